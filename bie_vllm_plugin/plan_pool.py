# SPDX-License-Identifier: Apache-2.0
"""vLLM's block pool, in whole pages: which layers share a group, and what a block costs.

One block id stands for one page of every layer of a group, and a block is as wide
as the widest group. So the pool's figures follow from the pages of the layers and
from vLLM's grouping rules (0.32, `vllm/v1/core/kv_cache_utils.py`), which are
restated here because importing them takes seconds and a GPU build of vLLM. The
tests hold them against vLLM's own functions and start-up figures.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from bie_kernels.layout import PAGE_TOKENS, WindowLayout
from bie_vllm_plugin.config import DTYPE_NAME, Int4AsymConfig
from bie_vllm_plugin.plan_formats import Format, quantised, skipped_layers, token_bytes
from bie_vllm_plugin.plan_layers import Layer
from bie_vllm_plugin.plan_model import ModelShape
from bie_vllm_plugin.sliding_pages import sliding_page_tokens

PageKind = Literal["full", "sliding", "chunked", "window", "state"]

MAX_TOKENS = 1 << 24
"""Contexts are searched up to here."""


@dataclass(frozen=True)
class EngineOptions:
    """The engine's settings that decide about pages.

    Attributes:
        block_size: tokens of a page of vLLM's own formats; None for the platform's default.
        tp: GPUs that the heads are spread over.
        chunk: tokens of a prefill chunk (`max_num_batched_tokens`).
        drafts: speculative tokens per step.
        skip: layers that keep the model's dtype.
        cpu: vLLM's CPU platform: pages of 128 tokens, one layout for its own layers.
        settings: of int4_asym.
    """

    block_size: int | None = None
    tp: int = 1
    chunk: int = 2048
    drafts: int = 0
    skip: frozenset[int] = frozenset()
    cpu: bool = False
    settings: Int4AsymConfig = field(default_factory=Int4AsymConfig)

    @property
    def page_tokens(self) -> int:
        """Tokens of a page of vLLM's own formats."""
        return self.block_size or (128 if self.cpu else 16)

    @property
    def in_flight(self) -> int:
        """Tokens scheduled and not settled: a GPU overlaps two steps (async scheduling)."""
        return self.chunk * self.batches

    @property
    def batches(self) -> int:
        """Steps in flight."""
        return 1 if self.cpu else 2


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


@dataclass(frozen=True)
class Pool:
    """The block pool of a model in one format, on one GPU.

    Attributes:
        groups: pages of the layers, by vLLM's groups.
        in_flight: tokens scheduled and not settled.
    """

    groups: tuple[tuple[PageSpec, ...], ...]
    in_flight: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: the widest group's pages."""
        return max(sum(spec.page_bytes for spec in group) for group in self.groups)

    def blocks_per_sequence(self, context: int) -> int:
        """Blocks of a sequence of `context` tokens, over all groups."""
        return sum(max(spec.pages(context, self.in_flight) for spec in group) for group in self.groups)

    def sequence_bytes(self, context: int) -> int:
        """Bytes of a sequence as allocated, in whole blocks."""
        return self.blocks_per_sequence(context) * self.block_bytes

    def pool_bytes(self, context: int, sequences: int = 1) -> int:
        """Smallest pool that holds so many sequences: their blocks, one chunk's peak and the null block."""
        extra = sum(max(spec.peak_extra(context, self.in_flight) for spec in group) for group in self.groups)
        return (sequences * self.blocks_per_sequence(context) + extra + 1) * self.block_bytes

    def blocks(self, pool_bytes: int) -> int:
        """Blocks of a pool (`num_gpu_blocks`)."""
        return max(0, pool_bytes) // self.block_bytes

    def reported_concurrency(self, pool_bytes: int, context: int) -> float:
        """vLLM's "Maximum concurrency for N tokens per request", which counts the null block as usable."""
        return self.blocks(pool_bytes) / self.blocks_per_sequence(context)

    def reported_tokens(self, pool_bytes: int, context: int) -> int:
        """vLLM's "KV cache size: N tokens", for `max_model_len` = context."""
        return int(self.reported_concurrency(pool_bytes, context) * context)

    def max_sequences(self, pool_bytes: int, context: int) -> int:
        """Sequences of `context` tokens that run together without preemption."""
        spare = pool_bytes - self.pool_bytes(context, 0)
        return max(0, spare // self.sequence_bytes(context))

    def max_context(self, pool_bytes: int, sequences: int = 1) -> int:
        """Longest context of so many sequences; 0 if not even one token fits."""
        if self.pool_bytes(1, sequences) > pool_bytes:
            return 0
        low, high = 1, MAX_TOKENS
        while low < high:
            middle = (low + high + 1) // 2
            if self.pool_bytes(middle, sequences) <= pool_bytes:
                low = middle
            else:
                high = middle - 1
        return low


def build_pool(model: ModelShape, fmt: Format, options: EngineOptions) -> Pool:
    """The pool that vLLM would build for this model and format."""
    specs, block_outermost = layer_pages(model, fmt, options)
    return Pool(tuple(tuple(group) for group in group_pages(specs, block_outermost)), options.in_flight)


# -- pages of the layers -----------------------------------------------------------------
def layer_pages(model: ModelShape, fmt: Format, options: EngineOptions) -> tuple[list[PageSpec], bool]:
    """Pages of every layer, and whether the layout packs pages of different size in a block."""
    skipped = skipped_layers(model, fmt, options.skip)
    # With nothing to quantise the engine runs as under `auto`.
    ours = fmt.name == DTYPE_NAME and any(quantised(layer, fmt, skipped) for layer in model.layers)
    per_token = {
        layer: token_bytes(layer, fmt, model.itemsize, options.settings, skipped) * local_heads(layer, options.tp)
        for layer in model.layers
        if layer.kind != "state"
    }
    attention = [layer for layer in model.layers if layer.kind in ("full", "mla")] or list(per_token)
    tokens = PAGE_TOKENS if ours else options.page_tokens
    shared_page = 0
    if fmt.name not in ("bf16", DTYPE_NAME) and skipped:
        tokens, shared_page = _aligned_to_skipped(model, attention, per_token, tokens, skipped, options)
    states = [layer for layer in model.layers if layer.kind == "state"]
    state_page = max((layer.state.page_bytes(options.tp) for layer in states if layer.state), default=0)
    if states and attention:
        token = max(per_token[layer] for layer in attention)
        tokens *= -(-state_page // (tokens * token))  # an attention page covers a state
        state_page = max(state_page, tokens * token)

    windowed = [layer for layer in model.layers if layer.kind == "sliding"]
    block = tokens * sum(per_token[layer] for layer in model.layers if layer.kind == "full")
    bodies, windows = [], []
    for layer in model.layers:
        if layer.kind == "state":
            assert layer.state is not None
            used = layer.state.page_bytes(options.tp)
            # Prefix caching is on by default, and then two states are held.
            held = 2 + layer.state.checkpoints + options.drafts
            bodies.append(PageSpec("state", tokens, max(used, state_page), used, states=held))
            continue
        packed = quantised(layer, fmt, skipped)
        kind: PageKind = "full" if layer.kind == "mla" else layer.kind
        size, page = tokens, tokens * per_token[layer]
        packing = f"{fmt.name if packed else 'auto'}:{layer.kv_heads}:{layer.head_size}:{layer.head_size_v}"
        if kind == "sliding" and ours:
            held = layer.window + options.chunk
            steps = (32,) if options.cpu else (16,)
            size = sliding_page_tokens(tokens, steps, per_token[layer], len(windowed), block, held)
            page = size * per_token[layer]
        elif kind == "sliding" and shared_page:
            size = max(16, shared_page // per_token[layer] // 16 * 16)
            page = shared_page
        bodies.append(
            PageSpec(kind, size, page, size * per_token[layer], layer.window, packing=packing)
        )
        if ours and packed:
            windows.append(_window_pages(layer, model.itemsize, options))
    return bodies + windows, ours


def local_heads(layer: Layer, tp: int) -> int:
    """KV heads of a layer on one of `tp` GPUs; a latent vector is on all of them."""
    return 1 if layer.kind == "mla" else max(1, layer.kv_heads // tp)


def _window_pages(layer: Layer, itemsize: int, options: EngineOptions) -> PageSpec:
    settings = options.settings
    layout = WindowLayout(layer.head_size, layer.head_size_v, itemsize)
    page = layout.page_bytes * local_heads(layer, options.tp)
    return PageSpec(
        "window",
        layout.page_tokens,
        page,
        page,
        window=settings.recent_tokens + options.drafts + PAGE_TOKENS - 1,  # R; see cache_spec.retained_tokens
        sink_pages=-(-settings.sink_tokens // layout.page_tokens),
        packing=f"{layer.kv_heads}:{layer.head_size}:{layer.head_size_v}",
        step_tokens=1 + options.drafts,
        batches=options.batches,
        junction_pages=-(-settings.recent_tokens // layout.page_tokens) + 1 if settings.prefix_hits == "strict" else 0,
    )


def _aligned_to_skipped(
    model: ModelShape,
    attention: Sequence[Layer],
    per_token: dict[Layer, int],
    tokens: int,
    skipped: frozenset[int],
    options: EngineOptions,
) -> tuple[int, int]:
    """Page size that vLLM takes so that a packed page covers a 16-bit one of 16 tokens, and that page."""
    packed = [per_token[layer] for layer in attention if layer.index not in skipped]
    if not packed:
        return tokens, 0
    dense = max(
        model.itemsize * (layer.head_size + layer.head_size_v) * local_heads(layer, options.tp) for layer in attention
    )
    if dense == packed[0]:
        return tokens, 0
    smallest = 32 if options.cpu else 16
    step = max(smallest, tokens)
    tokens = max(tokens, step * -(-dense * smallest // (step * packed[0])))
    return tokens, tokens * packed[0]


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
