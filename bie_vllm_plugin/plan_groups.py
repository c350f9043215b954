# SPDX-License-Identifier: Apache-2.0
"""Which layers share a group in vLLM's block pool.

vLLM's grouping rules (0.32, `vllm/v1/core/kv_cache_utils.py`) are restated here because
importing them takes seconds and a GPU build of vLLM. The tests hold them against vLLM's
own functions and start-up figures.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

PageKind = Literal["full", "sliding", "chunked", "window", "state"]


@dataclass(frozen=True)
class PageSpec:
    """Pages of one layer's cache on one GPU.

    Attributes:
        kind: how many of them a sequence holds; `window` is int4_asym's 16-bit companion.
        tokens: tokens of a page.
        page_bytes: bytes of a page, padding included.
        used_bytes: the same without padding.
        window: sliding window, chunk, or R of a companion.
        sink_pages: pages of a companion's sinks.
        states: pages of a recurrent state.
        packing: what tells equal-sized pages of different content apart.
    """

    kind: PageKind
    tokens: int
    page_bytes: int
    used_bytes: int
    window: int = 0
    sink_pages: int = 0
    states: int = 0
    packing: str = ""
    step_tokens: int = 1
    batches: int = 1
    junction_pages: int = 0

    @property
    def companion_pages(self) -> int:
        """Pages of a companion's R tokens and of the steps in flight; see `cache_spec.WindowSpec`."""
        return -(-(self.window + self.step_tokens * self.batches - 1) // self.tokens) + 1

    def pages(self, context: int, in_flight: int) -> int:
        """Pages that a sequence of `context` tokens holds, by vLLM's admission rule."""
        total = -(-context // self.tokens)
        if self.kind == "full":
            return total
        if self.kind == "state":
            return self.states
        if self.kind == "chunked":
            return -(-min(self.window + in_flight, context) // self.tokens)
        if self.kind == "window":
            return min(total, self.sink_pages + self.companion_pages)
        return -(-min(self.window - 1 + in_flight, context) // self.tokens) + 1

    def peak_extra(self, context: int, in_flight: int) -> int:
        """Pages beyond `pages` during the last chunk: see `cache_spec.WindowSpec.peak_pages`."""
        if self.kind != "window":
            return 0
        peak = self.sink_pages + (1 + self.batches) * self.companion_pages + self.junction_pages
        return peak - self.pages(context, in_flight)


# -- vLLM's grouping ------------------------------------------------------------------------
def group_pages(specs: Sequence[PageSpec], block_outermost: bool) -> list[list[PageSpec]]:
    """Groups as `get_kv_cache_groups` makes them.

    Args:
        specs: pages per layer.
        block_outermost: whether the layout packs groups of different page size.
    """
    if _uniform(specs):
        return [list(specs)]
    if block_outermost and len({spec.page_bytes for spec in specs}) > 1:
        return _packed_groups(specs)
    return _equal_page_groups(_equal_pages(specs))


def _uniform(specs: Sequence[PageSpec]) -> bool:
    """One group holds them all: same tokens per page and same number of tokens held."""
    first = specs[0]
    if any(spec.tokens != first.tokens or spec.kind != first.kind for spec in specs):
        return False
    if first.kind == "state":
        return all(spec.page_bytes == first.page_bytes for spec in specs)
    return first.kind in ("full", "window") or all(spec.window == first.window for spec in specs)


def _packed_groups(specs: Sequence[PageSpec]) -> list[list[PageSpec]]:
    """`_get_packed_kv_cache_groups`: buckets of one type, split where layers repeat in a pattern."""
    buckets: list[list[PageSpec]] = []
    for spec in specs:
        home = next((bucket for bucket in buckets if _uniform([*bucket, spec])), None)
        if home is None:
            buckets.append([spec])
        else:
            home.append(spec)
    counts = [Counter(spec.page_bytes for spec in bucket) for bucket in buckets]
    balanced = [len(set(count.values())) == 1 for count in counts]
    repeats = [max(count.values()) for count in counts]
    floor = max((r for r, c, b in zip(repeats, counts, balanced, strict=True) if b and len(c) > 1), default=0)
    per_group = _approximate_gcd([r for r, b in zip(repeats, balanced, strict=True) if b], floor) if floor else None

    def pattern_groups(i: int) -> int:
        return -(-repeats[i] // per_group) if balanced[i] and per_group is not None else 1

    def state_like(i: int) -> bool:
        kind = buckets[i][0].kind
        return kind == "state" or (per_group is None and kind in ("sliding", "window"))

    def widest(i: int, n: int) -> int:
        return sum(-(-number // n) * page for page, number in counts[i].items())

    anchor = max(
        widest(i, len(bucket) if state_like(i) else pattern_groups(i)) for i, bucket in enumerate(buckets)
    )
    groups: list[list[PageSpec]] = []
    for i, bucket in enumerate(buckets):
        number = pattern_groups(i)
        if state_like(i):
            number = max(number, -(-len(bucket) // max(anchor // bucket[0].page_bytes, 1)))
        if number == 1:
            groups.append(bucket)
            continue
        by_page: dict[int, list[PageSpec]] = {}
        for spec in bucket:
            by_page.setdefault(spec.page_bytes, []).append(spec)
        patterns = list(zip(*by_page.values(), strict=False))
        groups += [[spec for pattern in patterns[j::number] for spec in pattern] for j in range(number)]
    return groups


def _approximate_gcd(values: Sequence[int], floor: int) -> int:
    """The chunk from `floor` up that pads least; the larger one of equals."""
    low, high = max(1, floor), max(values)
    if low > high:
        return low
    return min(range(low, high + 1), key=lambda d: (sum(-value % d for value in values), -d))


def _equal_pages(specs: Sequence[PageSpec]) -> list[PageSpec]:
    """`unify_kv_cache_spec_page_size`: longer pages where the widest is a multiple, padding elsewhere."""
    widest = max(spec.page_bytes for spec in specs)
    equal = []
    for spec in specs:
        if spec.page_bytes == widest:
            equal.append(spec)
        elif spec.kind != "state" and widest % spec.page_bytes == 0:
            ratio = widest // spec.page_bytes
            longer = replace(
                spec, tokens=spec.tokens * ratio, page_bytes=widest, used_bytes=spec.used_bytes * ratio
            )
            if spec.kind == "window":  # the sinks' pages are counted in the new size
                sink_tokens = spec.sink_pages * spec.tokens
                longer = replace(longer, sink_pages=-(-sink_tokens // longer.tokens))
            equal.append(longer)
        else:
            equal.append(replace(spec, page_bytes=widest))
    return equal


def _equal_page_groups(specs: Sequence[PageSpec]) -> list[list[PageSpec]]:
    """`_get_kv_cache_groups_uniform_page_size`: as many layers per group as the rarest kind has."""
    buckets: dict[PageSpec, list[PageSpec]] = {}
    for spec in specs:
        buckets.setdefault(spec, []).append(spec)
    sizes = [len(bucket) for bucket in buckets.values()]
    size = max(sizes) if max(sizes) < 1.5 * min(sizes) else min(sizes)
    groups: list[list[PageSpec]] = []
    for bucket in buckets.values():
        number = -(-len(bucket) // size)
        groups += [bucket[i::number] for i in range(number)]
    return groups
