# SPDX-License-Identifier: Apache-2.0
"""Pieces that the Triton attention kernels share: the position rule, code tiles, softmax steps.

Orders inside a tile. `tl.dot` wants its operands in the order of MMA fragments, and
the codes lie in that order in memory, so tiles are left as they come:

* K codes come as [channels, tokens]; with few rows (TRANSPOSED) in MMA order of the
  channels, see `fragments`. In natural order (many rows, operands in shared memory) a
  thread writes 8 channels at once.
* V codes come as [channels, tokens], both in natural order; when TRANSPOSED as subnormal
  numbers.

Token bits: token = 16 x + 8 i1 + 2 t + e. Channel bits of a key, with AL words of 8
channels for each of 4 threads t: channel = 8 (AL t + al) + 4 i1 + 2 i0 + e.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bie_kernels.fragments import as_it_is, columns, fragment_scores, unpack
from bie_kernels.layout import PAGE_TOKENS
from bie_kernels.store import token_slot

_PAGE = tl.constexpr(PAGE_TOKENS)
LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(1 << 30)
"""A distance between positions beyond any context."""

NEGATIVE = tl.constexpr(-1.0e30)
"""Stands for minus infinity: finite, so that a row without keys makes no NaN."""

MASKED_SCORE = tl.constexpr(-3.0e38)
"""Where the products of a masked key start: times any row's factor far below NEGATIVE, or minus infinity."""

LEAST_POWER = tl.constexpr(2.0**-10)
"""What a query row is divided by at least (`decode_keys`: half of it). Its fp16 numbers may then be subnormal, but its
scores are nothing."""

WINDOW_WEIGHT = tl.constexpr(2)
"""Units of a window page: as many bytes as a body page, but read without a pipeline."""


@triton.jit
def dot16(a, b, acc, ASM: tl.constexpr):
    """tl.dot of operands in the model's dtype; the interpreter (no ASM) multiplies no bf16."""
    if ASM:
        return tl.dot(a, b, acc)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)


# -- which positions ----------------------------------------------------------
@triton.jit
def resident(pos, p_row, computed, sink_tokens, retained, m_load, WINDOW_PAGE: tl.constexpr):
    """True where the 16-bit copy of `pos` exists; `p_row` is the request's row of the window table.

    Entries may be stale: below the retained range only sinks count.
    """
    entry = tl.load(p_row + pos // WINDOW_PAGE, mask=m_load & (pos < computed), other=0)
    kept = (entry > 0) & ((pos < sink_tokens) | (pos >= computed - retained))
    return (pos >= computed) | kept


@triton.jit
def int4_mask(q_pos, k_pos, held, sink_tokens, recent_tokens):
    """[rows, keys] that are read in INT4: by the rule, or since no 16-bit copy is held.

    Returns the least distance of each key as well; sinks that are held have one beyond any context.
    """
    least = tl.where(held, tl.where(k_pos < sink_tokens, NEVER, recent_tokens), 0)
    return q_pos[:, None] - k_pos[None, :] >= least[None, :], least


@triton.jit
def window_mask(q_pos, k_pos, m_key, sink_tokens, recent_tokens):
    """[rows, keys] that are read in 16 bits, of the keys `m_key`: 0 <= distance < bound in one comparison."""
    bound = tl.where(m_key, tl.where(k_pos < sink_tokens, NEVER, recent_tokens), 0).to(tl.uint32)
    return (q_pos[:, None] - k_pos[None, :]).to(tl.uint32) < bound[None, :]


@triton.jit
def page_ranges(computed, seq_len, sink_tokens, recent_tokens, WINDOW_PAGE: tl.constexpr):
    """Work units of queries at computed..seq_len-1, each about one body page of bytes.

    Returns (sink_end, body_end, pages, window_sinks, window_start, window_pages):
    body pages [sink_end, body_end) are INT4 for every query; the other body pages need
    masks; window pages [0, window_sinks) and [window_start, window_pages) may hold
    16-bit keys.
    """
    pages = (seq_len + _PAGE - 1) // _PAGE
    sink_end = tl.minimum((sink_tokens + _PAGE - 1) // _PAGE, pages)
    body_end = tl.maximum((computed - recent_tokens + 1) // _PAGE, sink_end)
    window_pages = (seq_len + WINDOW_PAGE - 1) // WINDOW_PAGE
    window_sinks = tl.minimum((sink_tokens + WINDOW_PAGE - 1) // WINDOW_PAGE, window_pages)
    window_start = tl.maximum(tl.maximum(computed - recent_tokens + 1, 0) // WINDOW_PAGE, window_sinks)
    window_start = tl.minimum(window_start, window_pages)
    return sink_end, tl.minimum(body_end, pages), pages, window_sinks, window_start, window_pages


@triton.jit
def window_range(u_first, u_last, pages, windows):
    """The window pages [first, last) of an item's units: those that start inside it."""
    first = (tl.maximum(u_first - pages, 0) + WINDOW_WEIGHT - 1) // WINDOW_WEIGHT
    last = (tl.maximum(u_last - pages, 0) + WINDOW_WEIGHT - 1) // WINDOW_WEIGHT
    return first, tl.minimum(last, windows)


# -- queries ------------------------------------------------------------------
@triton.jit
def first_rows(x, NQ: tl.constexpr):
    """The first NQ of the 16 rows of a padded MMA tile, without leaving registers; else x."""
    if NQ < 16:
        x, _ = tl.split(tl.permute(tl.reshape(x, [2, NQ, x.shape[1]]), [1, 2, 0]))
    return x


# -- scores -------------------------------------------------------------------
@triton.jit
def _key_codes(p_rows, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, ASM: tl.constexpr):
    """K codes of BN tokens as fp16 [BD, BN] in natural order; padded channels are 0."""
    i_t, i_w = tl.arange(0, BN), tl.arange(0, BD // 4)
    p = p_rows.to(tl.pointer_type(tl.int16)) + i_t[:, None] * (D // 4) + i_w[None, :]
    if D == BD:
        x = tl.load(p)
    else:
        x = tl.load(p, mask=tl.broadcast_to((i_w < D // 4)[None, :], p.shape), other=0)
    a, b, c, d = unpack(tl.reshape(x, [BN, 4, BD // 32, 2]), False, ASM)  # token, t, al, e
    y = tl.join(tl.join(a, c), tl.join(b, d))  # token, t, al, e, i1, i0
    return tl.reshape(tl.permute(y, [1, 2, 4, 5, 3, 0]), [BD, BN])


@triton.jit
def int4_scores(
    q, p_page, sub, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, O_K_SCALE: tl.constexpr, O_K_ORIGIN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """q.k in fp32 [rows, BN] for tokens BN * sub.. of a page; q fp16 [rows, BD]."""
    y = _key_codes(p_page + sub * (BN * D // 2), D, BD, BN, ASM)
    p_scale = (p_page + O_K_SCALE).to(tl.pointer_type(tl.float16))
    p_origin = (p_page + O_K_ORIGIN).to(tl.pointer_type(tl.float16))
    if HEAD_DIM:
        # One scale per token and group of channels: one product per group, scaled in fp32.
        slot = token_slot(sub * BN + tl.arange(0, BN))
        group = tl.arange(0, BD) // GROUP
        s = tl.zeros([q.shape[0], BN], tl.float32)
        for g in tl.static_range((D + GROUP - 1) // GROUP):
            part = tl.where((group == g)[None, :], q, 0.0).to(tl.float16)
            scale = tl.load(p_scale + g * _PAGE + slot).to(tl.float32)
            zero = tl.load(p_origin + g * _PAGE + slot).to(tl.float32)
            s += (tl.dot(part, y) - tl.sum(part.to(tl.float32), 1)[:, None] * zero[None, :]) * scale[None, :]
    else:
        # The scale folds into q; the minimum is one number per row, exact products summed in fp32.
        i_c = tl.arange(0, BD)
        m_c = i_c < D
        scale = tl.load(p_scale + sub * D + i_c, mask=m_c, other=0.0)
        minimum = tl.load(p_origin + sub * D + i_c, mask=m_c, other=0.0)
        offset = tl.max(tl.dot(q, tl.broadcast_to(minimum[:, None], [BD, 8])), 1)
        s = tl.dot(q * scale[None, :], y) + offset[:, None]
    return s


# -- softmax ------------------------------------------------------------------
@triton.jit
def _soft_cap(s, SOFT_CAP: tl.constexpr):
    """cap * tanh(s / cap) times log2(e); exp2 saturates to 0 or inf, tanh to -1 or 1."""
    return (SOFT_CAP * LOG2E) * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E / SOFT_CAP)) + 1.0))


@triton.jit
def softmax_step(s, factor, mask, peak, total, SOFT_CAP: tl.constexpr, MASKED: tl.constexpr):
    """Online softmax: (p, alpha, peak, total) for scores s [rows, keys], peak in base 2.

    `factor` [rows] is positive and holds the softmax scale, and log2(e) without a cap. Times it a masked score may be
    minus infinity, which no peak becomes.
    """
    if SOFT_CAP > 0:
        s = _soft_cap(s * factor[:, None], SOFT_CAP)
    if MASKED:
        s = tl.where(mask, s, NEGATIVE)
    if SOFT_CAP > 0:
        new_peak = tl.maximum(peak, tl.max(s, 1))
        p = tl.exp2(s - new_peak[:, None])
    else:
        new_peak = tl.maximum(peak, tl.max(s, 1) * factor)
        p = tl.exp2(s * factor[:, None] - new_peak[:, None])
    alpha = tl.exp2(peak - new_peak)
    if MASKED:
        p = tl.where(mask, p, 0.0)
    return p, alpha, new_peak, total * alpha + tl.sum(p, 1)


# -- values -------------------------------------------------------------------
@triton.jit
def _value_codes(
    p_group, blocks, sub, GROUP: tl.constexpr, BN: tl.constexpr, PERMUTED: tl.constexpr,
    WHOLE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """V codes of one group as fp16 [GROUP, BN]; `blocks` of 16 channels exist unless WHOLE."""
    XN: tl.constexpr = BN // 16
    i_r, i_h = tl.arange(0, GROUP // 2), tl.arange(0, 8 * XN)
    if XN == 4:
        o_h = i_h
    else:
        o_h = 8 * (i_h // (2 * XN)) + 2 * XN * sub + i_h % (2 * XN)
    p = p_group.to(tl.pointer_type(tl.int16)) + i_r[:, None] * 32 + o_h[None, :]
    if WHOLE:
        x = tl.load(p)
    else:
        x = tl.load(p, mask=tl.broadcast_to((i_r // 8 < blocks)[:, None], p.shape), other=0)
    a, b, c, d = unpack(tl.reshape(x, [GROUP // 16, 8, 4, XN, 2]), PERMUTED, ASM)  # j, g, t, x, e
    y = tl.join(tl.join(a, c), tl.join(b, d))  # j, g, t, x, e, i1, i0
    y = tl.permute(y, [0, 6, 1, 3, 5, 2, 4])  # channel (j, i0, g), token (x, i1, t, e)
    y = tl.reshape(y, [GROUP, BN])
    if PERMUTED:
        y = as_it_is(y, ASM)
    return y


@triton.jit
def _value_meta(p_meta, sub, BN: tl.constexpr):
    """Per-token metadata of one group in token order, [BN]."""
    if BN == _PAGE:
        x = tl.load(p_meta + tl.arange(0, BN))
        x = tl.reshape(tl.permute(tl.reshape(x, [4, 4, 2, 2]), [1, 2, 0, 3]), [BN])
    else:
        x = tl.load(p_meta + token_slot(sub * BN + tl.arange(0, BN)))
    return x


@triton.jit
def add_int4_values(
    p, alpha, acc, low, m_key, p_page, sub, E: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr,
    O_V_CODES: tl.constexpr, O_V_SCALE: tl.constexpr, O_V_MIN: tl.constexpr, MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc = acc * alpha + codes.(p * scale), low = low * alpha + p.minimum, for every group of channels.

    Args:
        p: fp32 [rows, BN]; alpha: [rows].
        acc: one fp32 [GROUP, rows] (TRANSPOSED) or [rows, GROUP] per group; low: one [rows] per group.
        m_key: bool [BN], tokens that a row reads; other metadata may be NaN (MASKED).
    """
    VG: tl.constexpr = (E + GROUP - 1) // GROUP
    p_scale = (p_page + O_V_SCALE).to(tl.pointer_type(tl.float16))
    p_min = (p_page + O_V_MIN).to(tl.pointer_type(tl.float16))
    half = p.to(tl.float16)
    new_acc = ()
    new_low = ()
    for g in tl.static_range(VG):
        scale = _value_meta(p_scale + g * _PAGE, sub, BN)
        minimum = _value_meta(p_min + g * _PAGE, sub, BN)
        if MASKED:
            scale = tl.where(m_key, scale, 0.0).to(tl.float16)
            minimum = tl.where(m_key, minimum, 0.0).to(tl.float16)
        v = _value_codes(
            p_page + O_V_CODES + g * (GROUP * 32), (E - g * GROUP) // 16, sub, GROUP, BN,
            TRANSPOSED, (g + 1) * GROUP <= E, ASM,
        )  # fmt: skip
        weight = half * scale[None, :]
        if TRANSPOSED:
            new_acc = new_acc + (tl.dot(v, columns(weight), acc[g] * alpha[None, :]),)
        else:
            new_acc = new_acc + (tl.dot(weight, tl.trans(v), acc[g] * alpha[:, None]),)
        new_low = new_low + (low[g] * alpha + tl.sum(p * minimum.to(tl.float32)[None, :], 1),)
    return new_acc, new_low


@triton.jit
def add_values(
    p, alpha, acc, low, p_rows, m_rows, E: tl.constexpr, GROUP: tl.constexpr, TRANSPOSED: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """As `add_int4_values` for 16-bit values; `p_rows` [keys] points at each key's value row."""
    VG: tl.constexpr = (E + GROUP - 1) // GROUP
    new_acc = ()
    new_low = ()
    for g in tl.static_range(VG):
        i_c = g * GROUP + tl.arange(0, GROUP)
        v = tl.load(p_rows[:, None] + i_c[None, :], mask=m_rows[:, None] & (i_c < E)[None, :], other=0.0)
        weight = p.to(v.dtype)
        if TRANSPOSED:
            new_acc = new_acc + (dot16(tl.trans(v), columns(weight), acc[g] * alpha[None, :], ASM),)
        else:
            new_acc = new_acc + (dot16(weight, v, acc[g] * alpha[:, None], ASM),)
        new_low = new_low + (low[g] * alpha,)
    return new_acc, new_low


@triton.jit
def empty_state(NQ: tl.constexpr, E: tl.constexpr, GROUP: tl.constexpr, TRANSPOSED: tl.constexpr):
    """(acc, low, peak, total) before the first key."""
    acc = ()
    low = ()
    for _ in tl.static_range((E + GROUP - 1) // GROUP):
        if TRANSPOSED:
            acc = acc + (tl.zeros([GROUP, NQ], tl.float32),)
        else:
            acc = acc + (tl.zeros([NQ, GROUP], tl.float32),)
        low = low + (tl.zeros([NQ], tl.float32),)
    return acc, low, tl.full([NQ], NEGATIVE, tl.float32), tl.zeros([NQ], tl.float32)


@triton.jit
def _part_step(
    q, factor, q_pos, state, p_page, sub, page, computed, p_window_row, q_end, sink_tokens, recent_tokens, retained,
    D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, NQ: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, SOFT_CAP: tl.constexpr, O_V_CODES: tl.constexpr, O_K_SCALE: tl.constexpr,
    O_K_ORIGIN: tl.constexpr, O_V_SCALE: tl.constexpr, O_V_MIN: tl.constexpr, WINDOW_PAGE: tl.constexpr,
    MASKED: tl.constexpr, TRANSPOSED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Tokens BN * sub.. of a page; BD is the width of a chunk of channels when TRANSPOSED, else of a key."""
    acc, low, peak, total = state
    if TRANSPOSED:
        s = first_rows(fragment_scores(q, p_page, sub, D, BD, BN, GROUP, HEAD_DIM, O_K_SCALE, O_K_ORIGIN, ASM), NQ)
    else:
        s = int4_scores(q, p_page, sub, D, BD, BN, GROUP, HEAD_DIM, O_K_SCALE, O_K_ORIGIN, ASM)
    mask = None
    m_key = None
    if MASKED:
        pos = page * _PAGE + sub * BN + tl.arange(0, BN)
        held = resident(pos, p_window_row, computed, sink_tokens, retained, pos >= 0, WINDOW_PAGE)
        mask, least = int4_mask(q_pos, pos, held, sink_tokens, recent_tokens)
        m_key = q_end - 1 - pos >= least
    p, alpha, peak, total = softmax_step(s, factor, mask, peak, total, SOFT_CAP, MASKED)
    acc, low = add_int4_values(
        p, alpha, acc, low, m_key, p_page, sub, E, GROUP, BN, O_V_CODES, O_V_SCALE, O_V_MIN,
        MASKED, TRANSPOSED, ASM,
    )  # fmt: skip
    return acc, low, peak, total


@triton.jit
def page_step(
    q, factor, q_pos, state, p_page, page, computed, p_window_row, q_end, sink_tokens, recent_tokens, retained,
    D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, NQ: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, SOFT_CAP: tl.constexpr, O_V_CODES: tl.constexpr, O_K_SCALE: tl.constexpr,
    O_K_ORIGIN: tl.constexpr, O_V_SCALE: tl.constexpr, O_V_MIN: tl.constexpr, WINDOW_PAGE: tl.constexpr,
    MASKED: tl.constexpr, TRANSPOSED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One body page for queries before q_end; BN tokens at a time, of one key group on the channel axis.

    Padded rows compute nonsense for themselves.
    """
    if MASKED and TRANSPOSED:
        # A loop, so that not all of it is loaded at once: masks take registers.
        for sub in tl.range(0, _PAGE // BN, num_stages=1):
            state = _part_step(
                q, factor, q_pos, state, p_page, sub, page, computed, p_window_row, q_end, sink_tokens, recent_tokens,
                retained, D, BD, E, NQ, BN, GROUP, HEAD_DIM, SOFT_CAP, O_V_CODES, O_K_SCALE, O_K_ORIGIN, O_V_SCALE,
                O_V_MIN, WINDOW_PAGE, MASKED, TRANSPOSED, ASM,
            )  # fmt: skip
    else:
        for sub in tl.static_range(_PAGE // BN):
            state = _part_step(
                q, factor, q_pos, state, p_page, sub, page, computed, p_window_row, q_end, sink_tokens, recent_tokens,
                retained, D, BD, E, NQ, BN, GROUP, HEAD_DIM, SOFT_CAP, O_V_CODES, O_K_SCALE, O_K_ORIGIN, O_V_SCALE,
                O_V_MIN, WINDOW_PAGE, MASKED, TRANSPOSED, ASM,
            )  # fmt: skip
    return state
