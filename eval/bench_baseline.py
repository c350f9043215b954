# SPDX-License-Identifier: Apache-2.0
"""FlashAttention on a paged 16-bit cache: baseline of `bench_kernels.py` and `bench_prefill.py`; it has a gate, too."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from bench_cases import DEVICE, L2_BYTES, LIMIT, Case, Timer

GATE_ROWS = 512
"""Queries of a request in the gate at most: its oracle has a score for every query and key."""


def flash_attention() -> Callable | None:
    """vLLM's FlashAttention, where vLLM is."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return functools.partial(flash_attn_varlen_func, causal=True, fa_version=3)


def baseline_inputs(case: Case, dtype: torch.dtype, sets: int) -> tuple[dict, torch.Tensor, list[torch.Tensor]]:
    """FlashAttention's arguments on a paged 16-bit cache [2, pages, 16, H, D], the cache, and page tables."""
    requests, size = len(case.lengths), case.head_size
    pages = sum(-(-n // 16) for n in case.lengths)
    kv = torch.randn(2, pages * sets + 1, 16, case.kv_heads, size, device=DEVICE, dtype=dtype)
    most = -(-max(case.lengths) // 16)
    tables = []
    order = (torch.randperm(pages * sets, device=DEVICE) + 1).int()
    for i in range(sets):
        table, at = torch.zeros(requests, most, dtype=torch.int32, device=DEVICE), i * pages
        for r, n in enumerate(case.lengths):
            table[r, : -(-n // 16)] = order[at : at + -(-n // 16)]
            at += -(-n // 16)
        tables.append(table)
    q = torch.randn(requests * case.q_len, case.kv_heads * case.group, size, device=DEVICE, dtype=dtype)
    arguments = {
        "q": q, "k": kv[0], "v": kv[1], "out": torch.empty_like(q), "max_seqlen_q": case.q_len,
        "cu_seqlens_q": torch.arange(requests + 1, dtype=torch.int32, device=DEVICE) * case.q_len,
        "max_seqlen_k": max(case.lengths), "seqused_k": torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE),
    }  # fmt: skip
    return arguments, kv, tables


def baseline_gate(case: Case, dtype: torch.dtype, flash: Callable) -> float:
    """Relative error of FlashAttention against fp32 attention on short requests of the case's shape."""
    rows = min(case.q_len, GATE_ROWS)
    short = dataclasses.replace(case, q_len=rows, lengths=tuple(rows + n for n in (130, 700, 1291)))
    arguments, kv, (table,) = baseline_inputs(short, dtype, 1)
    flash(**arguments, block_table=table)
    want = []
    for r, n in enumerate(short.lengths):
        k, v = (x[table[r, : -(-n // 16)].long()].flatten(0, 1)[:n].float() for x in kv)
        q = arguments["q"][r * rows : (r + 1) * rows].float()
        causal = torch.arange(n, device=DEVICE) <= torch.arange(n - rows, n, device=DEVICE)[:, None]
        want.append(torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=causal, enable_gqa=True
        ).transpose(0, 1))  # fmt: skip
    expected = torch.cat(want)
    return float((arguments["out"].float() - expected).norm() / expected.norm())


def baseline_timer(case: Case, dtype: torch.dtype) -> tuple[float, Timer] | None:
    """FlashAttention on a paged 16-bit cache, where vLLM brings it: (relative error, timer)."""
    flash = flash_attention()
    if flash is None:
        return None
    error = baseline_gate(case, dtype, flash)
    if not error < LIMIT:
        print(f"REFUSED {case.name} fa3_bf16: relative error {error}", flush=True)
        return None
    pages = sum(-(-n // 16) for n in case.lengths)
    sets = max(1, min(4, 4 * L2_BYTES // (pages * 16 * case.kv_heads * case.head_size * 4) + 1))
    arguments, _, tables = baseline_inputs(case, dtype, sets)
    return error, Timer([functools.partial(flash, **arguments, block_table=table) for table in tables])
