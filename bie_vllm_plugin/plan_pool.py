# SPDX-License-Identifier: Apache-2.0
"""vLLM's block pool, in whole pages: the pages of every layer, and what a block and a sequence cost.

One block id stands for one page of every layer of a group, and a block is as wide
as the widest group (`plan_groups`), so the pool's figures follow from the pages.
"""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from bie_kernels.layout import PAGE_TOKENS, WindowLayout
from bie_vllm_plugin.config import DTYPE_NAME, Int4AsymConfig
from bie_vllm_plugin.plan_drafter import Drafter
from bie_vllm_plugin.plan_formats import Format, quantised, skipped_layers, token_bytes
from bie_vllm_plugin.plan_groups import PageKind, PageSpec, group_pages
from bie_vllm_plugin.plan_layers import Layer
from bie_vllm_plugin.plan_model import ModelShape
from bie_vllm_plugin.sliding_pages import SlidingPages, sliding_pages

MAX_TOKENS = 1 << 24
"""Contexts are searched up to here."""

CPU_PAGE_TOKENS, GPU_PAGE_TOKENS = 128, 16
"""Tokens of vLLM's own pages, where --block-size is left out."""


@dataclass(frozen=True)
class EngineOptions:
    """The engine's settings that decide about pages.

    Attributes:
        block_size: tokens of a page of vLLM's own formats; None for the platform's default.
        tp: GPUs that the heads are spread over.
        chunk: tokens of a prefill chunk (`max_num_batched_tokens`).
        drafter: what proposes tokens, if anything does.
        skip: layers that keep the model's dtype.
        cpu: vLLM's CPU platform: pages of 128 tokens, one layout for its own layers.
        settings: of int4_asym.
    """

    block_size: int | None = None
    tp: int = 1
    chunk: int = 2048
    drafter: Drafter | None = None
    skip: frozenset[int] = frozenset()
    cpu: bool = False
    settings: Int4AsymConfig = field(default_factory=Int4AsymConfig)

    @property
    def page_tokens(self) -> int:
        """Tokens of a page of vLLM's own formats."""
        return self.block_size or (CPU_PAGE_TOKENS if self.cpu else GPU_PAGE_TOKENS)

    @property
    def in_flight(self) -> int:
        """Tokens scheduled and not settled: a GPU overlaps two steps (async scheduling)."""
        return self.chunk * self.batches

    @property
    def batches(self) -> int:
        """Steps in flight."""
        return 1 if self.cpu or (self.drafter and not self.drafter.overlaps) else 2

    @property
    def drafts(self) -> int:
        """Speculative tokens per step."""
        return self.drafter.drafts if self.drafter else 0


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


def build_pool(model: ModelShape, fmt: Format, options: EngineOptions, max_model_len: int) -> Pool:
    """The pool that vLLM would build for this model, format and `--max-model-len`."""
    specs, block_outermost = layer_pages(model, fmt, options, max_model_len)
    return Pool(tuple(tuple(group) for group in group_pages(specs, block_outermost)), options.in_flight)


def longest_context(model: ModelShape, fmt: Format, options: EngineOptions, pool_bytes: int, sequences: int = 1) -> int:
    """Longest `--max-model-len` of which a pool holds so many sequences; 0 if not even one token fits.

    Where layers slide the engine chooses its pages by that length (`sliding_pages`), so it is searched over.
    """
    if not any(layer.kind == "sliding" for layer in model.layers):
        return build_pool(model, fmt, options, MAX_TOKENS).max_context(pool_bytes, sequences)

    def too_long(context: int) -> bool:
        return build_pool(model, fmt, options, context).pool_bytes(context, sequences) > pool_bytes

    return bisect_right(range(1, MAX_TOKENS + 1), False, key=too_long)


# -- pages of the layers -----------------------------------------------------------------
def layer_pages(
    model: ModelShape, fmt: Format, options: EngineOptions, max_model_len: int
) -> tuple[list[PageSpec], bool]:
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

    drafted = _drafter_pages(fmt, tokens, model.itemsize, options, skipped)
    beside = SlidingPages(tokens, 0)
    if ours:
        block = tokens * sum(per_token[layer] for layer in model.layers if layer.kind == "full")
        block += sum(spec.page_bytes for spec in drafted)
        beside = _pages_of_windows(model, options, per_token, block, skipped, max_model_len)
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
        used = page
        if kind == "sliding" and ours:
            size = beside.tokens
            used = page = size * per_token[layer]
        elif ours and packed:
            page += beside.padding
        elif kind == "sliding" and shared_page:
            size = max(16, shared_page // per_token[layer] // 16 * 16)
            used, page = size * per_token[layer], shared_page
        bodies.append(PageSpec(kind, size, page, used, layer.window, packing=packing))
        if ours and packed:
            windows.append(_window_pages(layer, model.itemsize, options))
    return bodies + windows + drafted, ours


def _pages_of_windows(
    model: ModelShape,
    options: EngineOptions,
    per_token: dict[Layer, int],
    block: int,
    skipped: frozenset[int],
    max_model_len: int,
) -> SlidingPages:
    """As `window_layer` chooses them; `block` is the bytes of all full-attention layers' pages."""
    windowed = [layer for layer in model.layers if layer.kind == "sliding"]
    if not windowed:
        return SlidingPages(PAGE_TOKENS, 0)
    bodies = sum(layer.kind == "full" and layer.index not in skipped for layer in model.layers)
    same = len({layer.window for layer in windowed}) == 1
    return sliding_pages(
        PAGE_TOKENS,
        (32,) if options.cpu else (16,),
        per_token[windowed[0]],
        len(windowed),
        block,
        windowed[0].window + options.chunk,
        max_model_len,
        bodies if same else 0,
    )


def _drafter_pages(
    fmt: Format, tokens: int, itemsize: int, options: EngineOptions, skipped: frozenset[int]
) -> list[PageSpec]:
    """Pages of the drafter's layers, as long as the target's: vLLM registers them last."""
    if options.drafter is None:
        return []
    specs, own = [], options.drafter.format_beside(fmt)
    for layer in options.drafter.layers:
        page = tokens * token_bytes(layer, own, itemsize, options.settings, skipped) * local_heads(layer, options.tp)
        packed = own.name if quantised(layer, own, skipped) else "auto"
        packing = f"{packed}:{layer.kv_heads}:{layer.head_size}:{layer.head_size_v}"
        kind: PageKind = "sliding" if layer.kind == "sliding" else "full"
        specs.append(PageSpec(kind, tokens, page, page, layer.window, packing=packing))
    return specs


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
        window=_retained(options),
        sink_pages=-(-settings.sink_tokens // layout.page_tokens),
        packing=f"{layer.kv_heads}:{layer.head_size}:{layer.head_size_v}",
        step_tokens=1 + options.drafts + (options.drafter.ahead if options.drafter else 0),
        batches=options.batches,
        junction_pages=-(-settings.recent_tokens // layout.page_tokens) + 1 if settings.prefix_hits == "strict" else 0,
    )


def _retained(options: EngineOptions) -> int:
    """R; see cache_spec.retained_tokens."""
    dropped = PAGE_TOKENS if options.drafter and options.drafter.drops else 0
    return options.settings.recent_tokens + options.drafts + PAGE_TOKENS - 1 + dropped


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
