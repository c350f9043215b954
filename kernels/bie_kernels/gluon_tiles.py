# SPDX-License-Identifier: Apache-2.0
"""Layouts and register-only tile operations of the Gluon kernels.

With mma.m16n8k16, lane = 4 g + t: A's fragment holds rows g and g + 8, B's and the
accumulator's the columns 2 t, 2 t + 1. `assert_trivial` makes the compiler prove that a
layout conversion moves nothing between threads.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from bie_kernels import tiles
from bie_kernels.fragments import SUBNORMAL_CODES
from bie_kernels.layout import PAGE_TOKENS, PageLayout
from bie_kernels.tuning import capability, interpreted, keys_fit

PAGE = gl.constexpr(PAGE_TOKENS)
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
OPERAND_A = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]), 2))
OPERAND_B = gl.constexpr(gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]), 2))
CHUNKS = gl.constexpr(gl.BlockedLayout([8], [32], [1], [0]))  # 16 bytes a thread
TOKEN_META = gl.constexpr(gl.DistributedLinearLayout([[1], [2], [4], [8]], [[16], [32], [0], [0], [0]], [], [], [64]))


@gluon.constexpr_function
def rows_layout(rows, columns):
    """[rows, columns] as in the fragments of A and of accumulators; lanes hold (g, t)."""
    registers = [[0, 1]] + ([[8, 0]] if rows == 16 else [])
    step = 8
    while step < columns:
        registers.append([0, step])
        step *= 2
    return gl.DistributedLinearLayout(registers, [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [], [], [rows, columns])


# -- of the plain kernels, and of this Triton -----------------------------------
page_ranges = gluon.jit(tiles.page_ranges.fn)
window_range = gluon.jit(tiles.window_range.fn)
# Triton 3.9 renamed the copy.
copy_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@lru_cache(maxsize=64)
def serves(sizes: tuple[int, ...], layout: PageLayout, soft_cap: float, device: torch.device) -> bool:
    """Whether a Gluon kernel for these sizes serves a launch: a common shape, a card with room, a known Triton."""
    return (
        not interpreted()
        and capability(device) >= (8, 0)
        and (3, 6) <= tuple(int(x) for x in triton.__version__.split(".")[:2]) <= (3, 9)
        and layout.key_axis == "channel"
        and layout.group_size == 64
        and layout.head_size in sizes
        and layout.v_size == layout.head_size
        and soft_cap == 0.0
        and keys_fit(layout.head_size, device)
    )


@gluon.jit
def launch_dependents():
    """Lets the merge set up while this kernel runs."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def program_id_x():
    """As `gl.program_id(0)`, read at the place of the call: what follows from it takes no register before."""
    return gl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def late_lane(x):
    """The lane of a thread, in the shape and layout of int32 `x`: read at the place of the call, as above."""
    return gl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def window_page_of(u, window_sinks, window_start):
    """Window page of unit u: the sinks' first, then the recent ones."""
    return gl.where(u < window_sinks, u, u - window_sinks + window_start)


# -- unpacking ----------------------------------------------------------------
@gluon.jit
def unpack(x):
    """int16 -> its four codes as subnormal fp16, in units LOW, HIGH, LOW, HIGH; packed asm keeps pairs together.

    Nothing but a mask: tensor cores multiply subnormal numbers exactly, and whoever takes the products knows the units.
    """
    return gl.inline_asm_elementwise(
        SUBNORMAL_CODES, "=r,=r,=r,=r,r", [x], dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True,
        pack=2,
    )  # fmt: skip


@gluon.jit
def value_tile(x, CHANNELS: gl.constexpr):
    """Value codes (int16 [16 CHANNELS]) -> A operand [CHANNELS, 64], everything in natural order.

    Of every 16 channels the first 8 are in LOW_UNIT, the others in HIGH_UNIT.
    """
    a, b, c, d = unpack(gl.reshape(x, [CHANNELS // 16, 8, 4, 4, 2]))  # j, g, t, x, e
    y = gl.join(gl.join(a, c), gl.join(b, d))  # j, g, t, x, e, i1, i0
    y = gl.reshape(gl.permute(y, [0, 6, 1, 3, 5, 2, 4]), [CHANNELS, PAGE])  # j, i0, g; x, i1, t, e
    return gl.convert_layout(y, OPERAND_A, assert_trivial=True)


@gluon.jit
def slots_to_tokens(x, LAYOUT: gl.constexpr):
    """Per-token metadata [64] as stored -> token order."""
    y = gl.reshape(gl.permute(gl.reshape(x, [4, 4, 2, 2]), [1, 2, 0, 3]), [PAGE])
    return gl.convert_layout(y, LAYOUT, assert_trivial=True)
