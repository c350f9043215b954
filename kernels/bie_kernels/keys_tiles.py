# SPDX-License-Identifier: Apache-2.0
"""Layouts and register-only tile operations of `decode_keys`, beyond those of `gluon_tiles`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from bie_kernels.fragments import HIGH_UNIT, LOW_UNIT
from bie_kernels.gluon_tiles import MMA, OPERAND_A, OPERAND_B, PAGE, late_lane, rows_layout, unpack

KEY_META = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4]], [[1, 0], [2, 0], [0, 0], [0, 0], [0, 0]], [], [], [4, 8]
    )
)
HALF_CHUNK_META = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 4]], [[1, 0], [2, 0], [0, 0], [0, 0], [0, 2]], [], [], [4, 8])
)
"""As `KEY_META`, but lanes of columns 0 to 3 have a chunk's channels in LOW_UNIT, the others those in HIGH_UNIT."""
HALF_CHUNK_COLUMNS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1, 0, 0], [8, 0, 0]], [[2, 0, 0], [4, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0]], [], [], [16, 2, 4]
    )
)
"""[16 channels, 2 units, 4]: the columns of a B operand in two."""
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
STATS = gl.constexpr(rows_layout(8, 8))
"""Per-row numbers as [8, 8]: eight equal rows, query rows along columns."""


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
    """One word a token and thread (int16 [tokens, t, e]) -> A operand [64 tokens, 32 channels], MMA order.

    Of every 16 channels the first 8 are in LOW_UNIT, the others in HIGH_UNIT.
    """
    a, b, c, d = unpack(x)
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


# -- per-row numbers ----------------------------------------------------------
@gluon.jit
def over_blocks(x, N: gl.constexpr):
    """[8, 8] statistics -> [1, 8, 8], to go with [N // 8, 8, 8]."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(0, blocks_layout(N)), assert_trivial=True), 0)


@gluon.jit
def row_blocks(x, N: gl.constexpr):
    """Accumulator [N, 8] -> [N // 8, 8, 8]."""
    return gl.convert_layout(gl.reshape(x, [N // 8, 8, 8]), blocks_layout(N), assert_trivial=True)


@gluon.jit
def units(N: gl.constexpr):
    """Of blocks of 8 rows, LOW_UNIT and HIGH_UNIT in turn: [N, 1, 1] for `blocks_layout`."""
    i = gl.arange(0, N, layout=gl.SliceLayout(1, gl.SliceLayout(2, blocks_layout(8 * N))))
    return gl.expand_dims(gl.expand_dims(gl.where(i % 2 == 0, LOW_UNIT, HIGH_UNIT), 1), 2)


@gluon.jit
def out_of_units(x, N: gl.constexpr):
    """Accumulator [N, 8] of products with `value_tile` -> with the codes themselves."""
    y = gl.reshape(row_blocks(x, N) * (1.0 / units(N // 8)), [N, 8])
    return gl.convert_layout(y, MMA, assert_trivial=True)


@gluon.jit
def scaled_columns(x, alpha, N: gl.constexpr):
    """Accumulator [N, 8], columns times alpha."""
    y = gl.reshape(row_blocks(x, N) * over_blocks(alpha, N), [N, 8])
    return gl.convert_layout(y, MMA, assert_trivial=True)


@gluon.jit
def small_mma(a, b, acc):
    """acc [8, 8] + a [8, K] b: half an MMA. The other half gets the same rows, its result is never looked at."""
    a = gl.reshape(gl.permute(gl.join(a, a), [2, 0, 1]), [16, a.shape[1]])
    c = gl.reshape(gl.permute(gl.join(acc, gl.zeros_like(acc)), [2, 0, 1]), [16, 8])
    c = gl.convert_layout(c, MMA, assert_trivial=True)
    c = row_blocks(mma_v2(gl.convert_layout(a, OPERAND_A, assert_trivial=True), b, c), 16)
    c, _ = gl.split(gl.permute(c, [1, 2, 0]))
    return gl.convert_layout(c, STATS, assert_trivial=True)


@gluon.jit
def halves_sum(x):
    """What `page_scores` gathers of the minima, [16, 8] -> [8, 8] per-row numbers in LOW_UNIT.

    Rows 0 to 7 hold half of the channels in columns 0 to 3, the others those whose queries lie in HIGH_UNIT /
    LOW_UNIT in columns 4 to 7.
    """
    BLOCKS: gl.constexpr = blocks_layout(16)
    i_half = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, BLOCKS)))
    i_column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, BLOCKS)))
    counts = gl.expand_dims(gl.expand_dims(4 * i_half, 1), 2) == gl.expand_dims(gl.expand_dims(i_column, 0), 1)
    x = row_blocks(x, 16) * units(2)
    x = gl.sum(gl.sum(gl.where(counts.broadcast_to([2, 8, 8]), x, 0.0), 0), 1)
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(0, STATS)), 0).broadcast_to([8, 8])


@gluon.jit
def late_rows(layout: gl.constexpr):
    """Rows of a `rows_layout` of 8, [8, 1]; no lane's number is kept for them."""
    return gl.expand_dims(late_lane(gl.full([8], 0, gl.int32, gl.SliceLayout(1, layout))) >> 2, 1)


@gluon.jit
def one_row(low, i_row, row: gl.constexpr):
    """One row of [8, 8], [8]; i_row: as from `late_rows`."""
    return gl.sum(gl.where(i_row == row, low, 0.0), 0)


@gluon.jit
def late_columns(layout: gl.constexpr):
    """Columns of MMA or STATS, [8], two neighbours a lane; no lane's number is kept for them."""
    odd = gl.arange(0, 8, layout=gl.SliceLayout(0, layout)) & 1
    return 2 * (late_lane(odd) & 3) + odd


@gluon.jit
def weight_operand(p, N: gl.constexpr):
    """16-bit probabilities [N // 8, 8 keys, 8 rows] -> B operand [N keys, 8 rows]."""
    y = gl.reshape(gl.permute(transposed(p), [0, 2, 1]), [N, 8])
    return gl.convert_layout(y, OPERAND_B, assert_trivial=True)
