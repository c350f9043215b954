# SPDX-License-Identifier: Apache-2.0
"""Codes, queries and keys in the order of the products' operands, for the plain kernels.

With few query rows (decode) every operand lies in registers as it is loaded, in *MMA order*: channels of a chunk as
(word, i0, i1, t, e) where memory has (t, word, i1, i0, e), with channel = 8 (words t + word) + 4 i1 + 2 i0 + e. The
codes are not made numbers but are subnormal ones; units go to the queries, the scores' factor and, once, to the sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bie_kernels.layout import PAGE_TOKENS
from bie_kernels.store import token_slot

_PAGE = tl.constexpr(PAGE_TOKENS)

UNPACK = tl.constexpr("""
{
.reg .b32 s, a, b, c, d, base_low, base_high;
lop3.b32 a, $4, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 b, $4, 0x00F000F0, 0x54005400, 0xEA;
shr.u32 s, $4, 8;
lop3.b32 c, s, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 d, s, 0x00F000F0, 0x54005400, 0xEA;
mov.b32 base_low, 0xE400E400;
mov.b32 base_high, 0xD400D400;
add.rn.f16x2 $0, a, base_low;
add.rn.f16x2 $1, b, base_high;
add.rn.f16x2 $2, c, base_low;
add.rn.f16x2 $3, d, base_high;
}
""")
"""A nibble or-ed into the mantissa of 1024 (low) or 64 (high) is that number plus the code; two at a time."""


SUBNORMAL_CODES = tl.constexpr("""
{
.reg .b32 s, a, b;
shr.u32 s, $4, 8;
and.b32 a, $4, 0x000F000F;
and.b32 b, $4, 0x00F000F0;
and.b32 $2, s, 0x000F000F;
and.b32 $3, s, 0x00F000F0;
mov.b32 $0, a;
mov.b32 $1, b;
}
""")
"""Nothing but masks: tensor cores multiply subnormal numbers exactly, and whoever takes the products knows units."""

LOW_UNIT, HIGH_UNIT = tl.constexpr(2.0**-24), tl.constexpr(2.0**-20)
"""What a code of 1 is in fp16 when its four bits are the lowest of the mantissa, or the next four."""


@triton.jit
def unpack(x, SUBNORMAL: tl.constexpr, ASM: tl.constexpr):
    """int16 -> its four codes as fp16, lowest nibble first. Both ways give the same bits.

    SUBNORMAL: in units LOW_UNIT, HIGH_UNIT, LOW_UNIT, HIGH_UNIT.
    """
    if ASM:
        CODE: tl.constexpr = SUBNORMAL_CODES if SUBNORMAL else UNPACK
        return tl.inline_asm_elementwise(
            CODE, "=r,=r,=r,=r,r", [x], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif SUBNORMAL:
        y = x >> 8
        return (
            (x & 0x0F).to(tl.float16, bitcast=True), (x & 0xF0).to(tl.float16, bitcast=True),
            (y & 0x0F).to(tl.float16, bitcast=True), (y & 0xF0).to(tl.float16, bitcast=True),
        )  # fmt: skip
    else:
        return (
            (x & 15).to(tl.float16), ((x >> 4) & 15).to(tl.float16),
            ((x >> 8) & 15).to(tl.float16), ((x >> 12) & 15).to(tl.float16),
        )  # fmt: skip


@triton.jit
def as_it_is(x, ASM: tl.constexpr):
    """x [rows, columns], through a sum of one number each, which takes no instruction.

    Triton 3.6 gives products of what it sees to be joined another order of operands (kWidth 4) than 3.9; it looks no
    further than a sum. An operand in the other order takes hundreds of shuffles a page.
    """
    if ASM:
        x = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1], 1]), 2)
    return x


@triton.jit
def program_id_x(ASM: tl.constexpr):
    """As `tl.program_id(0)`, read at the place of the call: what follows from it takes no register before."""
    if ASM:
        return tl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return tl.program_id(0)


@triton.jit
def columns(x):
    """x [rows, keys] transposed where it is: Triton takes `tl.trans` of an operand through shared memory."""
    y = tl.permute(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), [1, 2, 0])
    return tl.reshape(y, [x.shape[1], x.shape[0]])


# -- queries ------------------------------------------------------------------
@triton.jit
def power_below(peak):
    """The power of two that brings numbers up to `peak` to [1, 2); 1 where there is nothing to bring.

    Key scales reach 8,736 and queries hundreds: their product would overflow fp16.
    """
    factor = (peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where((peak > 1.0e-30) & (peak < 1.0e30), factor, 1.0)


@triton.jit
def normalise(q):
    """q [rows, channels] -> (fp16 q / f with maximum in [1, 2), f [rows] a power of two)."""
    factor = power_below(tl.max(tl.abs(q.to(tl.float32)), 1))
    return (q.to(tl.float32) / factor[:, None]).to(tl.float16), factor


@triton.jit
def divided(chunks, factor):
    """Chunks of channels over the rows' factors, fp16.

    The factors come from another load: over fragments Triton 3.6 takes the maximum of wrong rows, and sums, too.
    """
    q = ()
    for i in tl.static_range(len(chunks)):
        q = q + ((chunks[i].to(tl.float32) / factor[:, None]).to(tl.float16),)
    return q


@triton.constexpr_function
def chunk_width(i, D, CHUNK):  # noqa: ANN001, ANN201
    """Channels of chunk `i` of a head, rounded up to what the products take."""
    left = min(CHUNK, D - i * CHUNK)
    return 32 if left <= 32 else 64 if left <= 64 else 128


@triton.jit
def _load_chunk(
    p_q, s_qt, s_qh, i_r, i_h, row_0, LEFT: tl.constexpr, BD: tl.constexpr, q_len: tl.constexpr, G: tl.constexpr,
    NQ: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """[ROWS, BD] in MMA order: every thread loads its own share of the products' operands."""
    WORDS: tl.constexpr = BD // 32
    i_x, i_lane, i_8 = tl.arange(0, 2 * WORDS), tl.arange(0, 2 * ROWS), tl.arange(0, 8)
    i = (16 * (i_lane >> 5) + ((i_lane >> 2) & 7))[None, :] + 8 * (i_x // WORDS)[:, None]
    i_row = row_0 + i
    i_c = 8 * (WORDS * (i_lane & 3)[None, :] + (i_x % WORDS)[:, None])
    o_q = (i_r * q_len + i_row // G).to(tl.int64) * s_qt + (i_h * G + i_row % G) * s_qh + i_c
    m_q = (i < NQ) & (i_row < G * q_len) & (i_c < LEFT)
    q = tl.load(p_q + o_q[:, :, None] + i_8[None, None, :], mask=m_q[:, :, None], other=0.0)
    q = tl.reshape(q, [2, WORDS, ROWS // 16, 8, 4, 2, 2, 2])  # half, word, tile, g, t, i1, i0, e
    return tl.reshape(tl.permute(q, [2, 0, 3, 1, 6, 5, 4, 7]), [ROWS, BD])


@triton.jit
def load_fragments(
    p_q, s_qt, s_qh, i_r, i_h, row_0, q_len: tl.constexpr, G: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
    NQ: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """NQ query rows in tiles of 16: [ROWS, channels] for every CHUNK channels, in MMA order, padded with 0.

    No page takes them through shared memory.
    """
    q = ()
    for i in tl.static_range((D + CHUNK - 1) // CHUNK):
        chunk = _load_chunk(
            p_q + i * CHUNK, s_qt, s_qh, i_r, i_h, row_0, D - i * CHUNK, chunk_width(i, D, CHUNK), q_len, G, NQ, ROWS,
        )  # fmt: skip
        q = q + (chunk,)
    return q


@triton.jit
def load_rows(
    p_q, s_qt, s_qh, i_r, i_h, row_0, q_len: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    NQ: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """NQ query rows [ROWS, BD] in natural order, padded with 0."""
    i, i_d = tl.arange(0, ROWS), tl.arange(0, BD)
    i_row = row_0 + i
    m_row = (i < NQ) & (i_row < G * q_len)
    o_q = (i_r * q_len + i_row // G).to(tl.int64) * s_qt + (i_h * G + i_row % G) * s_qh
    return tl.load(p_q + o_q[:, None] + i_d[None, :], mask=m_row[:, None] & (i_d < D)[None, :], other=0.0)


@triton.jit
def code_units(q):
    """q [rows, channels] in MMA order, smaller where key codes are in HIGH_UNIT: all products are in LOW_UNIT then."""
    high = (tl.arange(0, q.shape[1]) >> 4) & 1
    return q * tl.where(high == 1, LOW_UNIT / HIGH_UNIT, 1.0).to(tl.float16)[None, :]


@triton.jit
def out_of_units(acc):
    """Sums [channels, rows] of products with subnormal value codes -> with the codes themselves."""
    sums = ()
    for g in tl.static_range(len(acc)):
        high = (tl.arange(0, acc[g].shape[0]) >> 3) & 1
        sums = sums + (acc[g] * tl.where(high == 1, 1.0 / HIGH_UNIT, 1.0 / LOW_UNIT)[:, None],)
    return sums


# -- keys ---------------------------------------------------------------------
@triton.jit
def _key_fragments(p_rows, D: tl.constexpr, WIDTH: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, ASM: tl.constexpr):
    """K codes of BN tokens and WIDTH of D channels as subnormal fp16 [BD, BN] in MMA order; padded channels are 0.

    A thread loads what it multiplies.
    """
    WORDS: tl.constexpr = BD // 32
    i_lane, i_w = tl.arange(0, 4 * BN), tl.arange(0, 2 * WORDS)
    o_w = (i_lane % 4)[:, None] * (2 * WORDS) + i_w[None, :]
    p = p_rows.to(tl.pointer_type(tl.int16)) + (i_lane // 4)[:, None] * (D // 4) + o_w
    if WIDTH == BD:
        x = tl.load(p)
    else:
        x = tl.load(p, mask=o_w < WIDTH // 4, other=0)
    a, b, c, d = unpack(tl.reshape(x, [BN, 4, WORDS, 2]), True, ASM)  # token, t, word, e
    y = tl.join(tl.join(a, c), tl.join(b, d))  # token, t, word, e, i1, i0
    return as_it_is(tl.reshape(tl.permute(y, [2, 5, 4, 1, 3, 0]), [BD, BN]), ASM)


@triton.jit
def _fragment_meta(p_meta, LEFT: tl.constexpr, BD: tl.constexpr):
    """Metadata of BD channels in MMA order, 0 from LEFT on."""
    i_c = tl.arange(0, BD)
    if LEFT < BD:
        x = tl.load(p_meta + i_c, mask=i_c < LEFT, other=0.0)
    else:
        x = tl.load(p_meta + i_c)
    return tl.reshape(tl.permute(tl.reshape(x, [4, BD // 32, 2, 2, 2]), [1, 3, 2, 0, 4]), [BD])


@triton.jit
def fragment_scores(
    q, p_page, sub, D: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    O_K_SCALE: tl.constexpr, O_K_ORIGIN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """q.k in fp32 [rows, BN], in LOW_UNIT, for tokens BN * sub.. of a page.

    q: chunks of CHUNK channels from `load_fragments`, normalised; groups of channels on the head_dim axis.
    """
    tl.static_assert(HEAD_DIM or BN <= GROUP, "tokens of one key group only")
    p_codes = p_page + sub * (BN * D // 2)
    p_scale = (p_page + O_K_SCALE).to(tl.pointer_type(tl.float16))
    p_origin = (p_page + O_K_ORIGIN).to(tl.pointer_type(tl.float16))
    s = tl.zeros([q[0].shape[0], BN], tl.float32)
    offset = tl.zeros([q[0].shape[0], 8], tl.float32)
    if not HEAD_DIM:
        for i in tl.static_range(len(q)):
            minimum = _fragment_meta(p_origin + sub * BN // GROUP * D + i * CHUNK, D - i * CHUNK, q[i].shape[1])
            offset = tl.dot(q[i], tl.broadcast_to(minimum[:, None], [q[i].shape[1], 8]), offset)
        s += tl.max(offset, 1)[:, None] * LOW_UNIT
    for i in tl.static_range(len(q)):
        y = _key_fragments(p_codes + i * (CHUNK // 2), D, min(CHUNK, D - i * CHUNK), q[i].shape[1], BN, ASM)
        if HEAD_DIM:
            slot = i * _PAGE + token_slot(sub * BN + tl.arange(0, BN))
            scale = tl.load(p_scale + slot).to(tl.float32)
            zero = tl.load(p_origin + slot).to(tl.float32)
            ones = tl.full([q[i].shape[1], 8], 1.0, tl.float16)
            total = tl.max(tl.dot(q[i], ones), 1) * LOW_UNIT  # a sum: see `divided`
            s += (tl.dot(code_units(q[i]), y) - total[:, None] * zero[None, :]) * scale[None, :]
        else:
            scale = _fragment_meta(p_scale + sub * BN // GROUP * D + i * CHUNK, D - i * CHUNK, q[i].shape[1])
            s = tl.dot(code_units(q[i] * scale[None, :]), y, s)
    return s
