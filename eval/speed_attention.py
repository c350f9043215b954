# SPDX-License-Identifier: Apache-2.0
"""Decode attention of one layer on the CPU, for eval/speed.py: gate, microseconds, bytes, share of copy bandwidth."""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from bench_cases import RECENT, SINK

GATE = 1e-4
"""Largest relative error against the oracle, fp32."""


def attention_case(
    context: int, kv_heads: int, group: int, head_size: int
) -> tuple[dict[str, Callable[[], Any]], float]:
    """Decode attention of one token: {format: callable} and int4_asym's relative error to the oracle."""
    import torch

    from bie_kernels import reference, torch_path
    from bie_kernels.layout import PAGE_TOKENS, PageLayout, window_page_tokens

    torch.manual_seed(0)
    layout = PageLayout(head_size)
    k, v = torch.randn(context, kv_heads, head_size), torch.randn(context, kv_heads, head_size)
    q = torch.randn(1, kv_heads * group, head_size)
    page_tokens = window_page_tokens(4)
    body_pages = torch.arange(1, 1 - (-context // PAGE_TOKENS))
    window_pages = torch.arange(1, 1 - (-context // page_tokens))
    body = torch.zeros(len(body_pages) + 1, kv_heads, layout.page_bytes, dtype=torch.uint8)
    window = torch.zeros(len(window_pages) + 1, kv_heads, page_tokens, 2 * head_size)
    positions = torch.arange(context)
    rule = torch_path.Rule(SINK, RECENT, context)
    fill = torch_path.RequestStep(0, context - 1, 0, body_pages, window_pages, page_tokens, rule)
    torch_path.store(k, v, body, window, positions + PAGE_TOKENS, positions + page_tokens, layout)
    torch_path.seal(k[:-1], body, window, [fill], layout)
    step = torch_path.RequestStep(0, 1, context - 1, body_pages, window_pages, page_tokens, rule)
    scale = head_size**-0.5

    def int4() -> torch.Tensor:
        return torch_path.attend(q, k[-1:], v[-1:], body, window, step, layout, scale=scale)

    keys, values = (x.transpose(0, 1)[None].contiguous() for x in (k, v))
    query = q.transpose(0, 1)[None]

    def auto() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=True)

    k4, v4 = reference.quantised_copy(k, v, layout, SINK)
    want = reference.attention(
        q, torch.tensor([context - 1]), k, v, k4, v4, scale=scale, sink_tokens=SINK, recent_tokens=RECENT
    )
    error = float((int4() - want).norm() / want.norm())
    return {"auto": auto, "int4_asym": int4}, error


def copy_bandwidth() -> float:
    """Bytes per second that a large copy reads and writes on this machine, median of 9."""
    import torch

    source = torch.empty(256 << 20, dtype=torch.uint8).random_(0, 255)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_seconds({"": lambda: target.copy_(source)}, 9)[""]


def median_seconds(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds per call, the calls taking turns; one round first warms up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def attention_records(contexts: list[int], kv_heads: int, group: int, head_size: int) -> list[dict[str, Any]]:
    """Decode attention of one layer and one request in fp32, by context and format.

    `auto` is torch's attention on contiguous tensors. A format that misses the oracle gets `refused` and no time.
    """
    import torch

    from bie_kernels.layout import PageLayout

    bandwidth = copy_bandwidth()
    records = []
    for context in contexts:
        shape = {"context": context, "kv_heads": kv_heads, "gqa": group, "head_size": head_size}
        with torch.inference_mode():
            calls, error = attention_case(context, kv_heads, group, head_size)
            if not error < GATE:
                records.append({**shape, "format": "int4_asym", "refused": f"relative error {error:.1e}"})
                del calls["int4_asym"]
            seconds = median_seconds(calls, 15)
        packed = PageLayout(head_size).page_bytes / 64 * max(0, context - RECENT) + 8 * head_size * (SINK + RECENT)
        size = {"auto": context * kv_heads * 2 * head_size * 4, "int4_asym": int(kv_heads * packed)}
        for name, value in seconds.items():
            records.append({
                **shape, "format": name, "us": round(1e6 * value, 1), "bytes": size[name],
                "of_copy_bandwidth": round(size[name] / value / bandwidth, 4),
                **({"rel_err": error} if name == "int4_asym" else {}),
            })  # fmt: skip
    return records
