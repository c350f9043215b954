# SPDX-License-Identifier: Apache-2.0
"""Merges the partial results of a request's items by their log-sum-exp."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bie_kernels.checks import check_ints, check_rows, check_written
from bie_kernels.launches import Launches
from bie_kernels.tiles import NEGATIVE
from bie_kernels.tuning import cdiv, overlaps, power_of_2


@triton.jit(do_not_specialize=["q_len", "splits"], do_not_specialize_on_alignment=["p_peak", "p_total"])
def merge_kernel(
    p_plan, p_acc, p_peak, p_total, p_out, s_ot, s_oh, H, q_len, splits,
    ROWS: tl.constexpr, G: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BS: tl.constexpr, PLANNED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: BE channels of one row (query token and head) of one request; BS items at a time."""
    CHUNKS: tl.constexpr = (E + BE - 1) // BE
    i_r, i_h = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2) // CHUNKS
    i_e = (tl.program_id(2) % CHUNKS) * BE + tl.arange(0, BE)
    if PLANNED:
        first, last = tl.load(p_plan + i_r), tl.load(p_plan + i_r + 1)
    else:
        first = i_r * splits
        last = first + splits
    if PDL:  # for the partials; the plan was there before the kernel that writes them
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BE], tl.float32)
    peak = NEGATIVE * 1.0
    total = 0.0
    for block in range(first, last, BS):
        item = block + tl.arange(0, BS)
        at = (item.to(tl.int64) * H + i_h) * ROWS + row
        m = item < last
        peaks = tl.load(p_peak + at, mask=m, other=NEGATIVE)
        totals = tl.load(p_total + at, mask=m, other=0.0)
        m_part = m[:, None] & (i_e < E)[None, :]  # without the totals, which would have to come first
        part = tl.load(p_acc + at[:, None] * E + i_e[None, :], mask=m_part, other=0.0)
        part = tl.where(totals[:, None] > 0.0, part, 0.0)  # those of padding were never written
        new_peak = tl.maximum(peak, tl.max(peaks, 0))
        alpha = tl.exp2(peak - new_peak)
        weight = tl.exp2(peaks - new_peak)
        acc = acc * alpha + tl.sum(part * weight[:, None], 0)
        total = total * alpha + tl.sum(totals * weight, 0)
        peak = new_peak
    # A request without keys (padding) gives zeros.
    out = acc / tl.where(total == 0.0, 1.0, total)
    p_row = p_out + (i_r * q_len + row // G).to(tl.int64) * s_ot + (i_h * G + row % G) * s_oh
    tl.store(p_row + i_e, out.to(p_out.dtype.element_ty), mask=i_e < E)


launch_merge = Launches(merge_kernel)


def merge(
    plan: torch.Tensor | None,
    acc: torch.Tensor,
    peak: torch.Tensor,
    total: torch.Tensor,
    out: torch.Tensor,
    *,
    requests: int,
    q_len: int,
    splits: int = 0,
) -> None:
    """out[r] = sum of a request's partials, weighted by 2 ** peak, over their total.

    Args:
        plan: int32 plan whose first R + 1 numbers are the requests' first items; unused
            when every request has `splits` items. It is read before the preceding launch has ended,
            so that one must not write it.
        acc: fp32 [items, H, rows, E]; peak, total: fp32 [items, H, rows] (base-2 logits).
        out: [R * q_len, H * G, E], written; rows are (query token, head of the group).

    Raises:
        ValueError: a shape, stride or dtype that the kernel does not take.
    """
    _check_merge(plan, acc, peak, total, out, requests, q_len, splits)
    _, heads, rows, size = acc.shape
    budget = acc.shape[0]
    # Few requests have many items each: then a program takes few channels, all items at once.
    # Three sizes only, each a compilation.
    items = cdiv(budget, requests)
    block = 8 if items <= 8 else 32 if items <= 32 else 128
    channels = min(power_of_2(size), max(32, 4096 // block))
    pdl = plan is not None and overlaps(out.device)
    launch_merge[(requests, heads, rows * cdiv(size, channels))](
        plan, acc, peak, total, out, out.stride(0), out.stride(1), heads, q_len, splits,
        ROWS=rows, G=rows // q_len, E=size, BE=channels, BS=block, PLANNED=plan is not None, PDL=pdl,
        num_warps=1 if block <= 8 else 4, enable_fp_fusion=True, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def _check_merge(plan, acc, peak, total, out, requests, q_len, splits) -> None:  # noqa: ANN001
    shape = acc.shape
    if len(shape) != 4 or not peak.shape == total.shape == shape[:3]:
        raise ValueError(
            f"acc {tuple(shape)}, peak {tuple(peak.shape)}, total {tuple(total.shape)}: "
            "expected [items, kv_heads, rows, channels], and peak and total without channels"
        )
    for name, x in (("acc", acc), ("peak", peak), ("total", total)):
        if x.dtype != torch.float32 or not x.is_contiguous():
            raise ValueError(f"{name} is {x.dtype} with strides {x.stride()}, expected contiguous float32")
    items, heads, rows, size = shape
    if rows % q_len != 0:
        raise ValueError(f"acc has {rows} rows, no multiple of {q_len} query tokens")
    check_rows("out", out, heads * rows // q_len, size)
    check_written("out", out)
    if out.shape[0] != requests * q_len:
        raise ValueError(f"out has {out.shape[0]} tokens, {requests} requests of {q_len} were announced")
    if plan is None:
        if items != requests * splits:
            raise ValueError(f"acc has {items} items, {requests} requests of {splits} were announced")
    elif check_ints("plan", plan, torch.int32, None) <= requests:
        raise ValueError(f"plan has {plan.shape[0]} numbers, {requests} requests have {requests + 1} first items")
