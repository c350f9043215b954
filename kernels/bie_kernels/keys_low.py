# SPDX-License-Identifier: Apache-2.0
"""Per-row sums of `decode_keys` beside its accumulator: probabilities times the minima of the values, and alone.

Both are products of probabilities with rows of `ring_vm` (minima in rows 0 to 3, ones in row 4). The registers that
hold probabilities as B operands are those of an A operand as well, whose 16 rows are two halves of the keys; the rows of
`ring_vm` are its B operand's columns, four for either half. So one product takes 32 keys and up to four rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from bie_kernels.gluon_tiles import MMA, OPERAND_A, OPERAND_B
from bie_kernels.keys_tiles import STATS, blocks_layout, row_blocks


@gluon.constexpr_function
def low_sets(groups):
    """Sets of four rows of `ring_vm`: 0, 1, 4 and 5 for up to two groups, or all 8."""
    return 1 if groups <= 2 else 2


@gluon.constexpr_function
def _rows_layout(sets):
    """Four rows as B operands: lanes of columns 0 to 3 have the first half of every 16 tokens, the others the second."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 4], [0, 0, 0, 8]]
    high, shape = ([1, 0, 0, 0], [2, 1, 2, 64]) if sets == 1 else ([0, 1, 0, 0], [1, 2, 2, 64])
    lanes = [[0, 0, 0, 16], [0, 0, 0, 32], [0, 0, 1, 0], high, [0, 0, 0, 2]]
    return gl.DistributedLinearLayout(registers, lanes, [], [], shape)


@gluon.jit
def _low_operands(ring, SETS: gl.constexpr, i_set: gl.constexpr):
    """A stage of `ring_vm` -> B operands [16, 8] of tokens 0 to 31 and 32 to 63."""
    rows = ring.reshape([2, 2, 2, 64])
    if SETS == 1:
        rows = rows.slice(0, 1, 1)
    else:
        rows = rows.slice(i_set, 1, 0)
    x = rows.load(_rows_layout(SETS)).to(gl.float16, bitcast=True)
    x = gl.reshape(x, [2, 2, 4, 2, 2, 2, 2])  # high and low bit of the row, t; tokens 32, 16, 8, e
    a, b = gl.split(gl.permute(x, [4, 2, 6, 5, 0, 1, 3]))
    a = gl.convert_layout(gl.reshape(a, [16, 8]), OPERAND_B, assert_trivial=True)
    return a, gl.convert_layout(gl.reshape(b, [16, 8]), OPERAND_B, assert_trivial=True)


@gluon.jit
def _weight_rows(weights):
    """B operand [64 keys, 8 rows] -> A operands [16, 16] of keys 0 to 31 and 32 to 63: the same registers."""
    x = gl.reshape(weights, [2, 2, 2, 8, 8])  # keys 32, 16, 8, 1; row
    a, b = gl.split(gl.permute(x, [2, 4, 1, 3, 0]))
    a = gl.convert_layout(gl.reshape(a, [16, 16]), OPERAND_A, assert_trivial=True)
    return a, gl.convert_layout(gl.reshape(b, [16, 16]), OPERAND_A, assert_trivial=True)


@gluon.jit
def add_low(weights, ring_low, ring_vm, stage, T: gl.constexpr, SETS: gl.constexpr):
    """Add a page to the sums: ring_low holds [16, 8] for each tile and set."""
    sums = ()  # all are read before any is written: no wait between the products
    for i_set in gl.static_range(SETS):
        first, second = _low_operands(ring_vm.index(stage), SETS, i_set)
        for tile in gl.static_range(T):
            a, b = _weight_rows(weights[tile])
            x = mma_v2(a, first, ring_low.index(tile * SETS + i_set).load(MMA))
            sums = sums + (mma_v2(b, second, x),)
    for i_set in gl.static_range(SETS):
        for tile in gl.static_range(T):
            ring_low.index(tile * SETS + i_set).store(sums[i_set * T + tile])


@gluon.jit
def scale_low(ring_low, tile: gl.constexpr, alpha, SETS: gl.constexpr):
    """A tile's sums times alpha ([8, 8] per-row numbers)."""
    BLOCKS: gl.constexpr = blocks_layout(16)
    rows = gl.convert_layout(gl.max(alpha, 0), gl.SliceLayout(0, gl.SliceLayout(2, BLOCKS)))
    rows = gl.expand_dims(gl.expand_dims(rows, 0), 2)
    for i_set in gl.static_range(SETS):
        low = ring_low.index(tile * SETS + i_set)
        x = gl.reshape(row_blocks(low.load(MMA), 16) * rows, [16, 8])
        low.store(gl.convert_layout(x, MMA, assert_trivial=True))


@gluon.jit
def _halves_added(x):
    """Sums [16, 8] -> [8 rows, 4]: first half of the keys in columns 0 to 3, second in rows 8 to 15 and columns 4 to 7."""
    BLOCKS: gl.constexpr = blocks_layout(16)
    i_half = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, BLOCKS)))
    i_column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, BLOCKS)))
    counts = gl.expand_dims(gl.expand_dims(i_half, 1), 2) == gl.expand_dims(gl.expand_dims(i_column // 4, 0), 1)
    x = gl.sum(gl.where(counts.broadcast_to([2, 8, 8]), row_blocks(x, 16), 0.0), 0)
    return gl.sum(gl.reshape(x, [8, 2, 4]), 1)


@gluon.jit
def low_statistics(ring_low, tile: gl.constexpr, SETS: gl.constexpr):
    """A tile's sums as [8, 8]: row r is what row r of `ring_vm` gave, query rows along columns."""
    first = _halves_added(ring_low.index(tile * SETS).load(MMA))
    second = first  # rows that nobody looks at
    if SETS == 2:
        second = _halves_added(ring_low.index(tile * SETS + 1).load(MMA))
    x = gl.join(gl.reshape(first, [8, 2, 2]), gl.reshape(second, [8, 2, 2]))  # row, high and low bit, set
    if SETS == 1:
        x = gl.permute(x, [1, 3, 2, 0])
    else:
        x = gl.permute(x, [3, 1, 2, 0])
    return gl.convert_layout(gl.reshape(x, [8, 8]), STATS)
