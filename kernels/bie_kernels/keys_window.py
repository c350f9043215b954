# SPDX-License-Identifier: Apache-2.0
"""Operands of `decode_keys` from the 16-bit window."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from bie_kernels.gluon_tiles import MMA, OPERAND_A
from bie_kernels.keys_tiles import WINDOW_KEYS, WINDOW_VALUES, transposed


@gluon.jit
def window_keys(p_rows, s_wt, m_key, chunk: gl.constexpr):
    """16-bit keys of 16 tokens, 32 channels -> A operand [16, 32]."""
    i_t = gl.arange(0, 16, layout=gl.SliceLayout(1, WINDOW_KEYS))
    i_c = 32 * chunk + gl.arange(0, 32, layout=gl.SliceLayout(0, WINDOW_KEYS))
    m = gl.expand_dims(gl.convert_layout(m_key, gl.SliceLayout(1, WINDOW_KEYS)), 1).broadcast_to([16, 32])
    k = gl.load(p_rows + gl.expand_dims(i_t, 1) * s_wt + gl.expand_dims(i_c, 0), mask=m, other=0.0)
    k = gl.permute(gl.reshape(k, [16, 4, 2, 2, 2]), [0, 2, 3, 1, 4])  # token, t, i1, i0, e
    return gl.convert_layout(gl.reshape(k, [16, 32]), OPERAND_A, assert_trivial=True)


@gluon.jit
def window_values(p_rows, s_wt, m_key, channel: gl.constexpr):
    """16-bit values of 16 tokens, 16 channels -> A operand [16 channels, 16 tokens]."""
    i_t = gl.arange(0, 16, layout=gl.SliceLayout(1, WINDOW_VALUES))
    i_c = channel + gl.arange(0, 16, layout=gl.SliceLayout(0, WINDOW_VALUES))
    m = gl.expand_dims(gl.convert_layout(m_key, gl.SliceLayout(1, WINDOW_VALUES)), 1).broadcast_to([16, 16])
    v = gl.load(p_rows + gl.expand_dims(i_t, 1) * s_wt + gl.expand_dims(i_c, 0), mask=m, other=0.0)
    v = transposed(gl.permute(gl.reshape(v, [2, 8, 2, 8]), [0, 2, 1, 3]))  # x, c, channel, token
    v = gl.reshape(gl.permute(v, [1, 2, 0, 3]), [16, 16])
    return gl.convert_layout(v, OPERAND_A, assert_trivial=True)


@gluon.jit
def add_window_values(parts, weight, acc, VB: gl.constexpr):
    """acc [VB, 8] plus the products of its channels, 16 at a time."""
    if VB == 16:
        acc = mma_v2(parts[0], weight, acc)
    else:
        a, b = gl.split(gl.permute(gl.reshape(acc, [2, 16, 8]), [1, 2, 0]))
        a = mma_v2(parts[0], weight, gl.convert_layout(a, MMA, assert_trivial=True))
        b = mma_v2(parts[1], weight, gl.convert_layout(b, MMA, assert_trivial=True))
        acc = gl.reshape(gl.permute(gl.join(a, b), [2, 0, 1]), [32, 8])
        acc = gl.convert_layout(acc, MMA, assert_trivial=True)
    return acc
