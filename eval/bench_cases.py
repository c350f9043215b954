# SPDX-License-Identifier: Apache-2.0
"""What `bench_kernels.py` times: cases by suite, their bytes, and the timer."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable

import torch

from bie_kernels.layout import PageLayout

SINK, RECENT, WINDOW_PAGE = 8, 128, 16
L2_BYTES = 60 << 20
DEVICE = "cuda"
LIMIT = 8e-3
"""Relative error that the gate lets pass."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the results."""

    name: str
    lengths: tuple[int, ...]
    kv_heads: int = 8
    group: int = 4
    head_size: int = 128
    q_len: int = 1
    axis: str = "channel"
    group_size: int = 64

    @property
    def layout(self) -> PageLayout:
        return PageLayout(self.head_size, group_size=self.group_size, key_axis=self.axis)  # type: ignore[arg-type]


def uniform(batch: int, context: int, **options) -> Case:
    """`batch` requests of `context` tokens."""
    return Case(f"decode {batch}x{context // 1024}k", (context,) * batch, **options)


def suites() -> dict[str, list[Case]]:
    k = 1024
    ragged = tuple(1024 + i * (31 * 1024) // 31 for i in range(32))
    return {
        "decode": [uniform(b, n * k) for b, n in ((1, 8), (1, 64), (8, 32), (32, 8), (32, 32), (64, 32), (64, 64))],
        "short": [uniform(b, k) for b in (1, 8, 32, 64)],
        "ragged": [Case("ragged 32 of 1k..32k", ragged)],
        "verify": [
            Case(f"verify q{q} {b}x{n}k", (n * k,) * b, q_len=q)
            for q, b, n in ((6, 8, 32), (6, 1, 64), (6, 32, 32), (2, 8, 32), (4, 8, 32), (9, 8, 32))
        ],
        "gqa": [dataclasses.replace(uniform(32, 32 * k), group=g, name=f"gqa {g} 32x32k") for g in (1, 2, 4, 7, 8, 16)],
        "heads": [
            dataclasses.replace(uniform(32, 32 * k), head_size=d, name=f"head size {d} 32x32k")
            for d in (64, 96, 128, 256)
        ],
        "axis": [
            dataclasses.replace(uniform(32, 32 * k), axis="head_dim", name="head_dim 32x32k"),
            dataclasses.replace(uniform(32, 32 * k), group_size=32, name="group 32 32x32k"),
        ],
    }


def bytes_read(case: Case) -> int:
    """Bytes of packed pages plus 16-bit windows that one launch reads."""
    layout = case.layout
    total = 0
    for n in case.lengths:
        wide = min(n, RECENT + SINK + case.q_len - 1)
        total += (n - wide) * layout.token_bytes + wide * (layout.head_size + layout.v_size) * 2
    return total * case.kv_heads


def bytes_of_16_bit(case: Case) -> int:
    """Bytes of a cache in 16 bits that one launch reads."""
    return sum(case.lengths) * case.kv_heads * (case.layout.head_size + case.layout.v_size) * 2


class Timer:
    """Median time of one call, from CUDA-graph replays of calls that rotate over inputs."""

    def __init__(self, calls: list[Callable[[], None]]) -> None:
        self.calls = calls  # a graph does not own the tensors of its launches
        torch.cuda.synchronize()  # the inputs were made on another stream
        self.stream = torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            for call in calls:
                call()
            self.stream.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            self.inner = max(8, len(calls))
            with torch.cuda.graph(self.graph, stream=self.stream):
                for i in range(self.inner):
                    calls[i % len(calls)]()
        self.times: list[float] = []

    def sample(self) -> None:
        """One replay, in microseconds per call."""
        with torch.cuda.stream(self.stream):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.graph.replay()
            end.record()
            end.synchronize()
            self.times.append(begin.elapsed_time(end) * 1000 / self.inner)

    @property
    def us(self) -> float:
        return statistics.median(self.times[2:])
