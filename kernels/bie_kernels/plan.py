# SPDX-License-Identifier: Apache-2.0
"""Cuts a decode batch into work items of equal size, on the device.

An item is (request, first unit, end unit, seq_len), a unit about one body page of bytes
(`tiles.page_ranges`). A launch has a fixed number of programs per KV head, its budget,
that depends on the batch size and the card only, so a CUDA graph holds for any lengths:
the plan finds the smallest item size with which every request fits the budget.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bie_kernels import tuning
from bie_kernels.checks import check_ints
from bie_kernels.launches import Launches
from bie_kernels.layout import WINDOW_PAGE_TOKENS
from bie_kernels.tiles import WINDOW_WEIGHT, page_ranges
from bie_kernels.tuning import cdiv, multiprocessors, power_of_2

_SEARCH_STEPS = tl.constexpr(22)
"""Halvings that find any item size below 4 million units."""


def item_budget(requests: int, kv_heads: int, rows: int, head_size: int, device: torch.device) -> int:
    """Items of a launch: one wave of programs, or room for each request and some long ones.

    Args:
        rows: GQA x query tokens of one KV head; head_size: channels of a value.
    """
    row_tiles = cdiv(rows, tuning.choices(device).rows_per_program)
    programs = tuning.decode_programs(rows, head_size, device)
    wave = programs * multiprocessors(device) // max(1, kv_heads * row_tiles)
    return max(wave, requests + requests // 4, 1)


def plan_ints(requests: int, budget: int) -> int:
    """int32 numbers of a plan: first items of the requests (and the end), then the items."""
    return _starts_size(requests) + 4 * budget


def _starts_size(requests: int) -> int:
    return (requests + 1 + 3) // 4 * 4  # items stay 16-byte aligned


@triton.jit(do_not_specialize=["requests", "budget", "q_len"], do_not_specialize_on_alignment=["p_lens", "p_plan"])
def plan_kernel(
    p_lens, p_plan, requests, budget, q_len, sink_tokens, recent_tokens, min_units,
    BR: tl.constexpr, BB: tl.constexpr, WINDOW_PAGE: tl.constexpr,
):  # fmt: skip
    """One program for the whole batch."""
    i_r = tl.arange(0, BR)
    seq_len = tl.load(p_lens + i_r, mask=i_r < requests, other=0)
    sink_end, body_end, pages, window_sinks, window_start, window_pages = page_ranges(
        seq_len - q_len, seq_len, sink_tokens, recent_tokens, WINDOW_PAGE
    )
    units = pages + WINDOW_WEIGHT * (window_sinks + window_pages - window_start)  # [BR]
    units = tl.where(seq_len > 0, units, 0)
    small, large = min_units, tl.maximum(tl.max(units, 0), min_units)
    for _ in range(_SEARCH_STEPS):
        middle = (small + large) // 2
        fits = tl.sum((units + middle - 1) // middle, 0) <= budget
        large = tl.where(fits, middle, large)
        small = tl.where(fits, small, tl.minimum(middle + 1, large))
    splits = (units + large - 1) // large
    end = tl.cumsum(splits, 0)
    start = end - splits
    tl.store(p_plan + i_r + 1, end, mask=i_r < requests)
    tl.store(p_plan, 0)
    p_items = p_plan + (requests + 4) // 4 * 4
    for i in range(tl.max(splits, 0)):
        mask = i < splits
        p_item = p_items + 4 * (start + i)
        whole = tl.maximum(splits, 1)
        tl.store(p_item, i_r, mask=mask)
        tl.store(p_item + 1, i * units // whole, mask=mask)
        tl.store(p_item + 2, (i + 1) * units // whole, mask=mask)
        tl.store(p_item + 3, seq_len, mask=mask)
    i_b = tl.arange(0, BB)
    unused = (i_b >= tl.sum(splits, 0)) & (i_b < budget)
    tl.store(p_items + 4 * i_b, -1, mask=unused)


launch_plan = Launches(plan_kernel)


def make_plan(
    seq_lens: torch.Tensor,
    plan: torch.Tensor,
    *,
    q_len: int,
    budget: int,
    sink_tokens: int,
    recent_tokens: int,
) -> torch.Tensor:
    """Write the plan of a batch; decode calls of the same step (all layers) can share it.

    Args:
        seq_lens: int32 [R], this step's tokens included; 0 for padding.
        plan: int32 [>= plan_ints(R, budget)], overwritten.
        q_len: query tokens of every request.
        budget: from `item_budget`.

    Returns:
        `plan`, cut to its size.

    Raises:
        ValueError: a dtype or shape that does not fit.
    """
    requests = check_ints("seq_lens", seq_lens, torch.int32, None)
    size = plan_ints(requests, budget)
    check_ints("plan", plan, torch.int32, None)
    if plan.shape[0] < size:
        raise ValueError(f"plan has {plan.shape[0]} numbers, {size} are needed")
    if budget < requests:
        raise ValueError(f"budget={budget} is below the {requests} requests")
    block = max(128, power_of_2(requests))  # few sizes: each is a compilation
    launch_plan[(1,)](
        seq_lens, plan, requests, budget, q_len, sink_tokens, recent_tokens, tuning.choices(seq_lens.device).min_units,
        BR=block, BB=max(256, power_of_2(budget)), WINDOW_PAGE=WINDOW_PAGE_TOKENS,
        num_warps=1 if block <= 128 else 4, enable_fp_fusion=False,
    )  # fmt: skip
    return plan[:size]
