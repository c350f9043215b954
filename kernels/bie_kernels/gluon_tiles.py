# SPDX-License-Identifier: Apache-2.0
"""Layouts and register-only tile operations of the Gluon kernels.

With mma.m16n8k16, lane = 4 g + t: A's fragment holds rows g and g + 8, B's and the
accumulator's the columns 2 t, 2 t + 1. `assert_trivial` makes the compiler prove that a
layout conversion moves nothing between threads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from bie_kernels.layout import PAGE_TOKENS

PAGE = gl.constexpr(PAGE_TOKENS)
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
OPERAND_A = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]), 2))
OPERAND_B = gl.constexpr(gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]), 2))
CHUNKS = gl.constexpr(gl.BlockedLayout([8], [32], [1], [0]))  # 16 bytes a thread
TOKEN_META = gl.constexpr(gl.DistributedLinearLayout([[1], [2], [4], [8]], [[16], [32], [0], [0], [0]], [], [], [64]))
LOW_TILE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1, 0, 0], [0, 0, 1], [0, 0, 8], [0, 0, 16], [0, 0, 32]],
        [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]], [], [], [2, 8, 64],
    )
)  # fmt: skip
V_TILE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 8], [16, 0], [32, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [], [], [64, 16]
    )
)


KEY_META = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4]], [[1, 0], [2, 0], [0, 0], [0, 0], [0, 0]], [], [], [4, 8]
    )
)
MINIMA = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8]], [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]], [], [], [8, 64]
    )
)
WINDOW_KEYS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [], [], [16, 32]
    )
)
WINDOW_VALUES = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 8], [8, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [], [], [16, 16])
)


@gluon.constexpr_function
def blocks_layout(rows):
    """An accumulator [rows, 8] seen as [rows // 8, 8, 8]."""
    registers = [[0, 0, 1]] + [[1 << i, 0, 0] for i in range((rows // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        registers, [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]], [], [], [rows // 8, 8, 8]
    )


@gluon.constexpr_function
def word_rows(words):
    """Words of key codes [tokens and t, 2 words]: those of a thread in its registers."""
    registers = [[0, 1 << i] for i in range((2 * words).bit_length() - 1)] + [[32, 0], [64, 0], [128, 0]]
    return gl.DistributedLinearLayout(registers, [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]], [], [], [256, 2 * words])


@gluon.constexpr_function
def meta_chunks(columns):
    """16 bytes a thread of a table with rows of `columns` halfwords."""
    return gl.BlockedLayout([1, 8], [32 // (columns // 8), columns // 8], [1, 1], [1, 0])


@gluon.constexpr_function
def rows_layout(rows, columns):
    """[rows, columns] as in the fragments of A and of accumulators; lanes hold (g, t)."""
    registers = [[0, 1]] + ([[8, 0]] if rows == 16 else [])
    step = 8
    while step < columns:
        registers.append([0, step])
        step *= 2
    return gl.DistributedLinearLayout(registers, [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [], [], [rows, columns])


@gluon.constexpr_function
def channel_meta(channels):
    """[channels], natural order: thread t owns a quarter."""
    registers = [[1 << i] for i in range((channels // 4).bit_length() - 1)]
    lanes = [[channels // 4], [channels // 2], [0], [0], [0]]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [channels])


@gluon.constexpr_function
def key_rows(tokens, channels):
    """16-bit rows [tokens, channels]: thread t owns a quarter of the channels of tokens g, g + 8, ..."""
    registers = [[0, 1 << i] for i in range((channels // 4).bit_length() - 1)]
    registers += [[8 << i, 0] for i in range((tokens // 8).bit_length() - 1)]
    lanes = [[0, channels // 4], [0, channels // 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [tokens, channels])


@gluon.constexpr_function
def code_chunks(channels):
    """Halfwords of a page's key codes: thread t owns a quarter of each token's."""
    return gl.BlockedLayout([channels // 16], [32], [1], [0])


# -- unpacking ----------------------------------------------------------------
_CODES_WITH_BASE = gl.constexpr("""
{
.reg .b32 s;
lop3.b32 $0, $4, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 $1, $4, 0x00F000F0, 0x54005400, 0xEA;
shr.u32 s, $4, 8;
lop3.b32 $2, s, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 $3, s, 0x00F000F0, 0x54005400, 0xEA;
}
""")
"""1024 + code (nibbles 0 and 2), 64 + code (1 and 3): the caller takes the base off."""

_CODES = gl.constexpr("""
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


@gluon.jit
def _unpack(x, EXACT: gl.constexpr):
    """int16 -> four fp16 codes; packed asm keeps pairs together."""
    ASM: gl.constexpr = _CODES if EXACT else _CODES_WITH_BASE
    return gl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r,r", [x], dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2
    )


@gluon.jit
def key_tile(x, D: gl.constexpr, EXACT: gl.constexpr):
    """Key codes of a page (int16 [16 D]) -> B operand [D, 64], channels in MMA order."""
    a, b, c, d = _unpack(gl.reshape(x, [PAGE, 4, D // 32, 2]), EXACT)  # token, t, al, e
    y = gl.join(gl.join(a, c), gl.join(b, d))  # token, t, al, e, i1, i0
    y = gl.reshape(gl.permute(y, [2, 4, 5, 1, 3, 0]), [D, PAGE])  # al, i1, i0, t, e; token
    return gl.convert_layout(y, OPERAND_B, assert_trivial=True)


@gluon.jit
def split_words(x, WORDS: gl.constexpr):
    """Key codes (int16 [tokens and t, 2 WORDS]) -> WORDS words of 8 channels, [tokens, t, e] each."""
    x = gl.permute(gl.reshape(x, [PAGE, 4, WORDS, 2]), [0, 1, 3, 2])
    if WORDS == 1:
        words = (gl.reshape(x, [PAGE, 4, 2]),)
    elif WORDS == 2:
        a, b = gl.split(x)
        words = (a, b)
    else:
        even, odd = gl.split(gl.reshape(x, [PAGE, 4, 2, 2, 2]))
        a, c = gl.split(even)
        b, d = gl.split(odd)
        words = (a, b, c, d)
    return words


@gluon.jit
def key_operand(x):
    """One word a token and thread (int16 [tokens, t, e]) -> A operand [64 tokens, 32 channels], MMA order."""
    a, b, c, d = _unpack(x, True)
    y = gl.join(gl.join(a, c), gl.join(b, d))  # token, t, e, i1, i0
    y = gl.reshape(gl.permute(y, [0, 3, 4, 1, 2]), [PAGE, 32])
    return gl.convert_layout(y, OPERAND_A, assert_trivial=True)


@gluon.jit
def query_operand(x):
    """16-bit [256] in the order of fragments -> B operand [32 channels, 8 rows]."""
    y = gl.permute(gl.reshape(x, [8, 4, 2, 2, 2]), [2, 3, 1, 4, 0])  # g, t, i1, i0, e
    return gl.convert_layout(gl.reshape(y, [32, 8]), OPERAND_B, assert_trivial=True)


@gluon.jit
def transposed(x):
    """16-bit [..., 8, 8], rows over lanes, pairs of columns a thread: the blocks transposed, in place."""
    bits = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x.to(gl.int16, bitcast=True)], dtype=gl.int16,
        is_pure=True, pack=2,
    )  # fmt: skip
    return bits.to(x.dtype, bitcast=True)


@gluon.jit
def value_tile(x, CHANNELS: gl.constexpr):
    """Value codes (int16 [16 CHANNELS]) -> A operand [CHANNELS, 64], everything in natural order."""
    a, b, c, d = _unpack(gl.reshape(x, [CHANNELS // 16, 8, 4, 4, 2]), True)  # j, g, t, x, e
    y = gl.join(gl.join(a, c), gl.join(b, d))  # j, g, t, x, e, i1, i0
    y = gl.reshape(gl.permute(y, [0, 6, 1, 3, 5, 2, 4]), [CHANNELS, PAGE])  # j, i0, g; x, i1, t, e
    return gl.convert_layout(y, OPERAND_A, assert_trivial=True)


@gluon.jit
def channels_to_mma(x, D: gl.constexpr, LAYOUT: gl.constexpr):
    """[D] in natural order -> MMA order, no data moved."""
    y = gl.reshape(gl.permute(gl.reshape(x, [4, D // 32, 4, 2]), [1, 2, 0, 3]), [D])
    return gl.convert_layout(y, LAYOUT, assert_trivial=True)


@gluon.jit
def slots_to_tokens(x, LAYOUT: gl.constexpr):
    """Per-token metadata [64] as stored -> token order."""
    y = gl.reshape(gl.permute(gl.reshape(x, [4, 4, 2, 2]), [1, 2, 0, 3]), [PAGE])
    return gl.convert_layout(y, LAYOUT, assert_trivial=True)


@gluon.jit
def low_tile(first, second):
    """Value minima of two groups, as stored -> A operand [16, 64]: rows 0-7 the first, 8-15 the second."""
    y = gl.reshape(gl.permute(gl.reshape(gl.join(first, second), [4, 4, 2, 2, 2]), [4, 1, 2, 0, 3]), [2, PAGE])
    y = gl.convert_layout(y, gl.SliceLayout(1, LOW_TILE), assert_trivial=True)
    y = gl.reshape(gl.expand_dims(y, 1).broadcast_to([2, 8, PAGE]), [16, PAGE])
    return gl.convert_layout(y, OPERAND_A, assert_trivial=True)


@gluon.jit
def repeat8(x):
    x = gl.join(x, x)
    x = gl.join(x, x)
    return gl.join(x, x)


@gluon.jit
def pad_rows(q, D: gl.constexpr, R: gl.constexpr):
    """Query rows [R, D] -> A operand [16, D], padded with zeros in registers."""
    if R == 8:
        q = gl.join(q, gl.full([8, D], 0.0, q.dtype, rows_layout(8, D)))
        q = gl.reshape(gl.permute(q, [2, 0, 1]), [16, D])
    return gl.convert_layout(q, OPERAND_A, assert_trivial=True)


@gluon.jit
def drop_rows(s, R: gl.constexpr, N: gl.constexpr):
    """Accumulator [16, N] -> its first R rows."""
    if R == 8:
        s, _ = gl.split(gl.permute(gl.reshape(s, [2, 8, N]), [1, 2, 0]))
    return gl.convert_layout(s, rows_layout(R, N), assert_trivial=True)
