# SPDX-License-Identifier: Apache-2.0
"""Which rows and keys flash attention gets in which call, for the prefill rows of a step.

Host arithmetic, once a step for all layers of a group; `prefill_flash` runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch

from bie_kernels.layout import PAGE_TOKENS, SLICE_BYTES, SLICE_ROWS, PageLayout


@dataclass(frozen=True)
class Call:
    """One call of flash attention: rows [first, last), their requests' keys in the workspace.

    Attributes:
        cu_q, cu_k: offsets into the plan's numbers, `requests` + 1 each.
        keys: rows of the workspace that are read.
        window: (left, right), -1 unbounded.
    """

    first: int
    last: int
    requests: int
    cu_q: int
    cu_k: int
    max_q: int
    max_k: int
    keys: int
    causal: bool
    window: tuple[int, int] = (-1, -1)
    segment: int = 0


@dataclass(frozen=True)
class Gather:
    """A copy into the workspace: items [first, first + count), four numbers each, from `at` on."""

    at: int
    count: int


@dataclass
class FlashPlan:
    """What is gathered and called for the prefill rows of a step.

    Attributes:
        requests: how many it serves.
        numbers: int32, on the device: cumulative lengths and the gathers' items.
        bands: (gather or None where this step's own rows are all the band needs, call).
        slices: (gather, calls that read it).
    """

    requests: int = 0
    bands: list[tuple[Gather | None, Call]] = field(default_factory=list)
    slices: list[tuple[Gather, list[Call]]] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    numbers: torch.Tensor | None = None

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Most workspace rows that a call reads, most query rows of a call."""
        every = [call for _, call in self.bands] + [call for _, calls in self.slices for call in calls]
        return max((call.keys for call in every), default=0), max((c.last - c.first for c in every), default=0)

    @cached_property
    def rows(self) -> int:
        """Query rows that it covers."""
        return max((call.last for _, call in self.bands), default=0)

    @property
    def launches(self) -> int:
        """Kernels that a layer launches for it: gathers, flash attention, merges."""
        bands = sum(1 + (gather is not None) for gather, _ in self.bands)
        return bands + sum(1 + 2 * len(calls) for _, calls in self.slices)

    def put(self, values: Sequence[int]) -> int:
        """Append numbers, 16-byte aligned; returns their offset."""
        at = len(self.host)
        self.host.extend(values)
        self.host.extend([0] * (-len(self.host) % 4))
        return at

    def to(self, device: torch.device) -> FlashPlan:
        """Send the numbers, without waiting."""
        numbers = torch.tensor(self.host or [0], dtype=torch.int32, pin_memory=device.type == "cuda")
        self.numbers = numbers.to(device, non_blocking=True)
        return self


def _items(request: int, start: int, end: int, row: int) -> list[int]:
    """Items (request, first position, row, count) of positions [start, end); none crosses a page."""
    items = []
    while start < end:
        stop = min(end, (start // PAGE_TOKENS + 1) * PAGE_TOKENS)
        items += [request, start, row, stop - start]
        row += stop - start
        start = stop
    return items


def plan_flash(
    starts: Sequence[int], seq_lens: Sequence[int], *, recent_tokens: int, slice_tokens: int, max_rows: int = SLICE_ROWS
) -> FlashPlan:
    """Cut the prefill rows of a step into calls.

    Args:
        starts: P + 1 row offsets of the requests; seq_lens: P lengths, this step included, exact.
        slice_tokens: rows of the workspace, a multiple of 64, at least recent_tokens + 64.
        max_rows: query tokens of one call.
    """
    if recent_tokens < 1:
        raise ValueError(f"recent_tokens={recent_tokens}: slices need a band of at least one key")
    if any(b <= a for a, b in zip(starts, starts[1:], strict=False)):
        raise ValueError("a request without rows has nothing to plan")
    plan = FlashPlan(len(seq_lens))
    rows_fit = min(max_rows, slice_tokens - recent_tokens)
    requests = len(seq_lens)
    r = 0
    while r < requests:
        ends = [max(0, seq_lens[r] - recent_tokens)]
        rows = starts[r + 1] - starts[r]
        if rows > rows_fit or ends[0] > slice_tokens:
            _plan_long(plan, r, starts[r], rows, seq_lens[r], recent_tokens, slice_tokens, rows_fit)
            r += 1
            continue
        first, keys = r, -(-ends[0] // PAGE_TOKENS) * PAGE_TOKENS
        band = rows + recent_tokens
        r += 1
        while r < requests:  # more short requests into the same call
            more, end = starts[r + 1] - starts[r], max(0, seq_lens[r] - recent_tokens)
            padded = -(-end // PAGE_TOKENS) * PAGE_TOKENS
            if rows + more > rows_fit or keys + padded > slice_tokens or band + more + recent_tokens > slice_tokens:
                break
            ends.append(end)
            rows, keys, band = rows + more, keys + padded, band + more + recent_tokens
            r += 1
        _plan_packed(plan, first, starts[first : r + 1], seq_lens[first:r], ends, recent_tokens)
    return plan


def _band(plan: FlashPlan, requests: range, spans: list[tuple[int, int]], first: int, recent: int) -> None:
    """The band of query positions spans[i] of each request, its rows adjacent from `first` on."""
    lengths = [end - start for start, end in spans]
    before = [min(recent - 1, start) for start, _ in spans]
    cu_q = list(accumulate(lengths, initial=0))
    cu_k = list(accumulate((n + b for n, b in zip(lengths, before, strict=True)), initial=0))
    gather = None
    if any(before):
        items = []
        for i, request in enumerate(requests):
            items += _items(request, spans[i][0] - before[i], spans[i][1], cu_k[i])
        gather = Gather(plan.put(items), len(items) // 4)
    call = Call(
        first, first + cu_q[-1], len(requests), plan.put(cu_q), plan.put(cu_k), max(lengths),
        max(b - a for a, b in zip(cu_k, cu_k[1:], strict=False)), cu_k[-1], True, (recent - 1, 0), len(plan.bands),
    )  # fmt: skip
    plan.bands.append((gather, call))


def _plan_packed(
    plan: FlashPlan, request: int, starts: Sequence[int], seq_lens: Sequence[int], ends: list[int], recent: int
) -> None:
    """Requests whose bodies fit into one slice together: one band call, one complement call."""
    lengths = [b - a for a, b in zip(starts, starts[1:], strict=False)]
    spans = [(s - n, s) for s, n in zip(seq_lens, lengths, strict=True)]
    requests = range(request, request + len(spans))
    _band(plan, requests, spans, starts[0], recent)
    if not any(ends):
        return
    cu_k = list(accumulate(ends, initial=0))
    items = []
    for i, r in enumerate(requests):
        items += _items(r, 0, ends[i], cu_k[i])
    call = Call(
        starts[0], starts[-1], len(spans), plan.put(list(accumulate(lengths, initial=0))), plan.put(cu_k),
        max(lengths), max(ends), cu_k[-1], True, (-1, 0), len(plan.bands) - 1,
    )  # fmt: skip
    plan.slices.append((Gather(plan.put(items), len(items) // 4), [call]))


def _plan_long(
    plan: FlashPlan, request: int, first: int, rows: int, seq_len: int, recent: int, slice_tokens: int, rows_fit: int
) -> None:
    """One request in several segments of rows and slices of keys, each slice gathered once."""
    computed = seq_len - rows
    parts = -(-rows // rows_fit)
    cuts = [rows * i // parts for i in range(parts + 1)]
    segments = []
    for a, b in zip(cuts, cuts[1:], strict=False):
        _band(plan, range(request, request + 1), [(computed + a, computed + b)], first + a, recent)
        segments.append((a, b, len(plan.bands) - 1))
    end = max(0, seq_len - recent)
    # From the end backwards: the diagonal then lies in the last slice, if it fits at all.
    bounds = [end]
    while bounds[-1] > slice_tokens:
        bounds.append(-(-(bounds[-1] - slice_tokens) // PAGE_TOKENS) * PAGE_TOKENS)
    bounds = [*bounds, 0] if end else bounds
    for start, stop in reversed(list(zip(bounds[1:], bounds, strict=False))):
        calls = []
        for a, b, segment in segments:
            last = computed + b - recent  # keys [0, last) are read by some row, [0, all_see) by all
            all_see = computed + a - recent + 1
            keys = min(stop, last) - start
            if keys <= 0:
                continue
            right = last - (start + keys)
            causal = right == 0 and start + keys > all_see
            window = (-1, 0) if causal else (-1, -1) if start + keys <= all_see else (-1, right)
            cu = plan.put([0, b - a]), plan.put([0, keys])
            calls.append(Call(first + a, first + b, 1, *cu, b - a, keys, keys, causal, window, segment))
        items = _items(request, start, stop, 0)
        plan.slices.append((Gather(plan.put(items), len(items) // 4), calls))


def least_slice_tokens(recent_tokens: int) -> int:
    """Rows below which a band and some queries do not fit: the caller sees to it that SLICE_BYTES hold them."""
    return (-(-recent_tokens // PAGE_TOKENS) + 16) * PAGE_TOKENS


def slice_tokens_of(row_bytes: int, limit: int, recent_tokens: int) -> int:
    """Rows of the workspace, a multiple of 64.

    Args:
        row_bytes: keys and values of one token, all KV heads, in the model's dtype.
        limit: tokens that a call could ever need.
        recent_tokens: a band's keys beyond its queries.
    """
    pages = min(SLICE_BYTES // row_bytes, limit) // PAGE_TOKENS
    return max(pages * PAGE_TOKENS, least_slice_tokens(recent_tokens))


def workspace_bytes(
    slice_tokens: int, rows: int, q_heads: int, kv_heads: int, layout: PageLayout, itemsize: int
) -> int:  # fmt: skip
    """Bytes of the workspace: a slice of keys and values, and one partial result of `rows` tokens."""
    return (slice_tokens * kv_heads * (layout.head_size + layout.v_size) + rows * q_heads * layout.v_size) * itemsize
