# SPDX-License-Identifier: Apache-2.0
"""Queries of `decode_keys`, kept in shared memory as fragments: registers are short."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from bie_kernels.fragments import HIGH_UNIT, LOW_UNIT
from bie_kernels.gluon_tiles import CHUNKS, OPERAND_A, rows_layout
from bie_kernels.keys_tiles import query_operand
from bie_kernels.tiles import LEAST_POWER


@gluon.jit
def load_queries(
    p_q, row_0, i_r, i_h, s_qt, s_qh, q_len: gl.constexpr, G: gl.constexpr, D: gl.constexpr, HALF: gl.constexpr,
    PARTS: gl.constexpr, T: gl.constexpr, RAW: gl.constexpr,
):  # fmt: skip
    """T tiles of 8 query rows, [8, HALF * PARTS] each, 0 beyond the rows and channels.

    RAW: 8 consecutive channels a thread of each chunk of 32 (16-bit windows); otherwise in the order of the codes.
    """
    BD: gl.constexpr = HALF * PARTS
    Q: gl.constexpr = rows_layout(8, BD)
    i_k = gl.arange(0, BD, layout=gl.SliceLayout(0, Q))
    if RAW:
        i_c = (i_k & ~31) + 8 * ((i_k >> 1) & 3) + 2 * ((i_k >> 3) & 3) + (i_k & 1)
    else:
        i_c = i_k % HALF
        i_c = (HALF // 4) * ((i_c >> 1) & 3) + 8 * (i_c >> 5) + 2 * ((i_c >> 3) & 3) + (i_c & 1)
        i_c = i_k // HALF * HALF + i_c
    queries = ()
    for tile in gl.static_range(T):
        i_row = row_0 + 8 * tile + gl.arange(0, 8, layout=gl.SliceLayout(1, Q))
        o_row = (i_r * q_len + i_row // G).to(gl.int64) * s_qt + (i_h * G + i_row % G) * s_qh
        m_q = gl.expand_dims(i_row < G * q_len, 1) & gl.expand_dims(i_c < D, 0)
        q = gl.load(p_q + gl.expand_dims(o_row, 1) + gl.expand_dims(i_c, 0), mask=m_q, other=0.0)
        queries = queries + (q,)
    return queries


@gluon.jit
def store_queries(
    queries, ring_q, ring_f, first: gl.constexpr, log_scale, HALF: gl.constexpr, PARTS: gl.constexpr, T: gl.constexpr,
    RAW: gl.constexpr,
):  # fmt: skip
    """Tiles from `load_queries` to shared memory, from tile `first` on, as fragments of 32 channels.

    RAW: as they are. Otherwise fp16, a power of two taken off each row, and channels whose key codes are in HIGH_UNIT
    made smaller by that much; ring_f gets what the scores, which are in LOW_UNIT, must be multiplied with.
    """
    BD: gl.constexpr = HALF * PARTS
    for tile in gl.static_range(T):
        q = queries[tile]
        if not RAW:
            wide = q.to(gl.float32)
            size = gl.max(gl.abs(wide), 1)
            power = (size.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
            power = gl.where(size < 1.0e30, gl.maximum(power, LEAST_POWER), 1.0)
            # Largest numbers from 2 to 4: times the largest key scale (131,008 / 15) they stay within fp16, and half of
            # them are divided by 16 now.
            power = power * 0.5
            i_k = gl.expand_dims(gl.arange(0, BD, layout=gl.SliceLayout(0, rows_layout(8, BD))), 0)
            unit = gl.where((i_k >> 3) % 2 == 0, 1.0, LOW_UNIT / HIGH_UNIT)
            q = (wide / gl.expand_dims(power, 1) * unit).to(gl.float16)
            ring_f.index(first + tile).store(power * (log_scale / LOW_UNIT))
        bits = gl.reshape(q.to(gl.int16, bitcast=True), [8, BD // 32, 2, 2, 4, 2])  # g, chunk, i1, i0, t, e
        ring_q.index(first + tile).store(gl.reshape(gl.permute(bits, [1, 0, 4, 2, 3, 5]), [8 * BD]))


@gluon.jit
def query_tile(ring_q, tile: gl.constexpr, chunk: gl.constexpr, dtype: gl.constexpr):
    """B operand [32 channels, 8 rows] of a tile."""
    return query_operand(ring_q.index(tile).slice(256 * chunk, 256).load(CHUNKS).to(dtype, bitcast=True))


@gluon.jit
def query_rows(ring_q, tile: gl.constexpr, chunk: gl.constexpr):
    """(B operand [32 channels, 8 rows], A operand [16, 16]) of a tile: the same registers.

    A has the 8 rows' channels in LOW_UNIT, then those in HIGH_UNIT.
    """
    x = ring_q.index(tile).slice(256 * chunk, 256).load(CHUNKS).to(gl.float16, bitcast=True)
    a = gl.permute(gl.reshape(x, [8, 4, 2, 2, 2]), [3, 0, 2, 1, 4])  # i0, g, i1, t, e
    return query_operand(x), gl.convert_layout(gl.reshape(a, [16, 16]), OPERAND_A, assert_trivial=True)
