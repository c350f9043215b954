# SPDX-License-Identifier: Apache-2.0
"""Compiles every GPU kernel that a layer will launch, before the server says that it is ready.

Launchers choose among compilations by the sizes of a batch. Which sizes are met here follows from
how they choose; `tests/test_warm_up.py` compares what this compiles with what steps of all kinds launch.
"""
from __future__ import annotations

from typing import Any

import torch

from bie_kernels import decode, flash_plan, prefill, prefill_flash, store
from bie_kernels.layout import PAGE_TOKENS, PageLayout
from bie_kernels.torch_path import Rule
from bie_kernels.tuning import cdiv
from bie_vllm_plugin.cuda_path import FlashLimits


def _powers(most: int) -> set[int]:
    """Powers of two up to `most`, and `most`."""
    return {most, *(1 << i for i in range(most.bit_length()))}


def decode_sizes(requests: int) -> list[int]:
    """Batches of 1 to `requests` that between them meet every choice.

    The plan's blocks are the least powers of two that hold the requests and, where those fill the wave, a quarter
    more of items: both ends of each power. The merge's block follows the items of a request, in steps of four times.
    """
    return sorted(n for size in _powers(requests) for n in {size, size + 1} if n <= requests)


def prefill_sizes(tokens: int, requests: int) -> list[tuple[int, int]]:
    """(tokens, requests) of batches of up to `tokens` and `requests` that between them meet every choice.

    Splits of the fused kernel, and with them its merge, follow its tiles: of more tokens as of more requests, doubled
    each time, since a merge's block serves splits that differ by four times. Sealing shares the launch of storing
    where queries are long or programs few, so the largest batch of the longest query that counts as short, too.
    """
    sizes = _powers(tokens) | {min(tokens, requests * store.SHORT_QUERY)}
    return sorted({(n, r) for n in sizes for r in (1, min(n, requests))})


def warm_up(
    layer: Any, window: torch.Tensor, layout: PageLayout, rule: Rule, workspace: torch.Tensor, *,
    limits: FlashLimits | None, soft_cap: float, requests: int, q_lens: tuple[int, ...], tokens: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Compile every kernel a layer of this shape will launch, on its own caches, writing nothing.

    All slots are -1 and all lengths 0: kernels start, find nothing to do, and end.

    Args:
        layer: vLLM's attention layer, cache bound; window: its companion's cache.
        requests: max_num_seqs; q_lens: uniform decode lengths; tokens: largest batch.
    """
    device = window.device
    body = layer.kv_cache.flatten(2)
    numbers: dict[str, Any] = {
        "scale": 1.0, "sink_tokens": rule.sink_tokens, "recent_tokens": rule.recent_tokens,
        "retained": rule.retained_tokens, "soft_cap": soft_cap,
    }  # fmt: skip

    def rows(n: int, heads: int, size: int) -> torch.Tensor:
        return torch.zeros(n, heads, size, dtype=dtype, device=device)

    def ints(*shape: int, dtype: torch.dtype = torch.int32, fill: int = 0) -> torch.Tensor:
        return torch.full(shape, fill, dtype=dtype, device=device)

    for q_len in q_lens:
        for n in decode_sizes(requests):
            out = rows(n * q_len, layer.num_heads, layout.v_size)
            decode.decode(
                rows(n * q_len, layer.num_heads, layout.head_size), body, window, ints(n, 16), ints(n, 64), ints(n),
                out, workspace, layout, q_len=q_len, **numbers,
            )  # fmt: skip
    most_q, most_out = rows(tokens, layer.num_heads, layout.head_size), rows(tokens, layer.num_heads, layout.v_size)
    most_k, most_v = (rows(tokens, layer.num_kv_heads, size) for size in (layout.head_size, layout.v_size))
    for n, r in prefill_sizes(tokens, requests):
        q, k, v, out = (x[:n] for x in (most_q, most_k, most_v, most_out))
        nowhere = ints(n, dtype=torch.int64, fill=-1)
        tables, starts, lens = (ints(r, 16), ints(r, 64)), ints(r + 1), ints(r)
        store.store_and_seal(
            k, v, body, window, nowhere, nowhere, *tables, starts, lens, layout, sink_tokens=rule.sink_tokens,
            retained=rule.retained_tokens, max_query_len=cdiv(n, r),
        )  # fmt: skip
        prefill.prefill(q, k, v, body, window, *tables, starts, lens, out, workspace, layout, **numbers)
    if limits is not None:
        _warm_up_flash(layer, body, window, layout, workspace, limits, dtype, numbers)


def _warm_up_flash(
    layer: Any, body: torch.Tensor, window: torch.Tensor, layout: PageLayout, workspace: torch.Tensor,
    limits: FlashLimits, dtype: torch.dtype, numbers: dict[str, Any],
) -> None:  # fmt: skip
    """A chunk whose pages are all null pages, beyond the window: both gathers, every kind of call, and the merge."""
    n, done, device = min(limits.rows, 256), 1024 + limits.recent_tokens, window.device
    body_table, window_table = (
        torch.zeros(1, cdiv(n + done, page), dtype=torch.int32, device=device)
        for page in (PAGE_TOKENS, window.shape[2])
    )
    plan = flash_plan.plan_flash(
        [0, n], [n + done], recent_tokens=limits.recent_tokens, slice_tokens=limits.slice_tokens, max_rows=limits.rows
    )
    q = torch.zeros(n, layer.num_heads, layout.head_size, dtype=dtype, device=device)
    k = torch.zeros(n, layer.num_kv_heads, layout.head_size, dtype=dtype, device=device)
    starts, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, n], [n + done]))
    prefill_flash.prefill(
        q, k, torch.zeros_like(k), body, window, body_table, window_table, starts, lens, torch.zeros_like(q), workspace,
        layout, plan.to(device), limits.flash, **numbers,
    )  # fmt: skip
