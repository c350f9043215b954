# SPDX-License-Identifier: Apache-2.0
"""The companion layer that owns a layer's 16-bit window, and the specs of both."""
from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import vllm.envs as envs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec, replace_as

from bie_kernels.layout import PAGE_TOKENS
from bie_vllm_plugin.cache_spec import (
    BodySpec,
    DrafterSpec,
    WindowSpec,
    body_spec,
    drafted_ahead_tokens,
    dropped_tokens,
    lookahead_tokens,
    window_spec,
)
from bie_vllm_plugin.config import DTYPE_NAME, Int4AsymConfig
from bie_vllm_plugin.sliding_pages import SlidingPages, sliding_pages

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend


class WindowLayer(AttentionLayerBase):
    """Holds the window cache of one attention layer; computes nothing itself.

    It stands in vLLM's static forward context beside its layer, so that vLLM
    allocates its pages, keeps its block table and computes its slots.
    """

    SUFFIX = ".int4_asym_window"

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.num_kv_heads: int = layer.num_kv_heads
        self.head_size: int = layer.head_size
        self.head_size_v: int = layer.head_size_v
        self.kv_cache = torch.tensor([])
        self.kv_sharing_target_layer_name = None

    @classmethod
    def name_of(cls, layer_name: str) -> str:
        """Name of the companion of `layer_name`; the layer index in it stays the only number."""
        return layer_name + cls.SUFFIX

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Take the window cache; the layer's body is bound before it, so kernels can be compiled now."""
        self.kv_cache = kv_cache
        self._layer.impl.caches_bound(self._layer, kv_cache)

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend whose metadata builder serves the window group."""
        from bie_vllm_plugin.backend import WindowBackend

        return WindowBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> WindowSpec:
        """Sinks and recent window in the model's dtype."""
        dtype: Any = vllm_config.model_config.dtype
        return window_spec(
            Int4AsymConfig.from_vllm(vllm_config),
            self.num_kv_heads,
            self.head_size,
            self.head_size_v,
            dtype,
            lookahead_tokens(vllm_config),
            vllm_config.cache_config.prefix_cache_retention_interval,
            batches=vllm_config.max_concurrent_batches,
            chunk_tokens=min(
                vllm_config.scheduler_config.max_num_batched_tokens, vllm_config.model_config.max_model_len
            ),
            drafted_ahead=drafted_ahead_tokens(vllm_config),
            dropped=dropped_tokens(vllm_config),
        )


def body_spec_of(layer: Any, vllm_config: VllmConfig) -> BodySpec:
    """Spec of an int4_asym layer's body, padded where that packs the model's sliding-window layers better."""
    spec = _unpadded_body(layer, vllm_config)
    windowed = next((other for other in _attention(layer, vllm_config) if other.sliding_window is not None), None)
    if windowed is None:
        return spec
    own = type(windowed).get_kv_cache_spec(windowed, vllm_config)
    pages = _pages_of_windows(windowed, own, vllm_config) if type(own) is SlidingWindowSpec else None
    if pages is None or not pages.padding:
        return spec
    return replace(spec, page_size_padded=spec.page_size_bytes + pages.padding)


def _unpadded_body(layer: Any, vllm_config: VllmConfig) -> BodySpec:
    layout = Int4AsymConfig.from_vllm(vllm_config).page_layout(layer.head_size, layer.head_size_v)
    return body_spec(layout, layer.num_kv_heads)


def _attention(layer: Any, vllm_config: VllmConfig) -> list[Any]:
    """All attention layers of this worker, a drafter's included."""
    layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    return [other for other in layers.values() if isinstance(other, type(layer))]


def dense_spec_of(layer: Any, original: Any, vllm_config: VllmConfig) -> KVCacheSpec | None:
    """Spec of a skipped (full-precision) layer: 64-token pages in the group of the others."""
    spec = original(layer, vllm_config)
    if type(spec) is not FullAttentionSpec:
        return spec
    return replace_as(spec, BodySpec, block_size=PAGE_TOKENS)


def drafter_spec_of(layer: Any, original: Any, vllm_config: VllmConfig) -> DrafterSpec:
    """Spec of a draft model's layer, checked before: full precision in the pages of the body group."""
    return replace_as(original(layer, vllm_config), DrafterSpec, block_size=PAGE_TOKENS)


def sliding_spec_of(layer: Any, original: Any, vllm_config: VllmConfig) -> KVCacheSpec | None:
    """Spec of a model's own sliding-window layer: pages that pack well beside INT4 ones."""
    spec = original(layer, vllm_config)
    pages = _pages_of_windows(layer, spec, vllm_config) if type(spec) is SlidingWindowSpec else None
    return spec if pages is None else replace(spec, block_size=pages.tokens)


def _pages_of_windows(layer: Any, spec: SlidingWindowSpec, vllm_config: VllmConfig) -> SlidingPages | None:
    """What all layers of this engine agree on, asked by each; None where blocks are not packed.

    Under a layer-outermost layout vLLM makes all pages equal.

    Args:
        layer: a sliding-window layer.
        spec: vLLM's own of it.
    """
    backend = layer.get_attn_backend()
    layouts = backend.supported_kv_cache_layouts()  # None: any
    if layouts is not None and not any(layout.is_block_outermost for layout in layouts):
        return None
    attention = _attention(layer, vllm_config)
    windows = [other.sliding_window for other in attention if other.sliding_window is not None]
    bodies = [other for other in attention if other.kv_cache_dtype == DTYPE_NAME]
    block = sum(_unpadded_body(body, vllm_config).page_size_bytes for body in bodies) + sum(
        cache.page_size_bytes
        for other in attention
        if other.sliding_window is None
        and other.kv_cache_dtype != DTYPE_NAME
        and (cache := other.get_kv_cache_spec(vllm_config)) is not None
    )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        block = 0  # ranks hold different layers and must agree: the smallest page
    packed = envs.VLLM_KV_CACHE_LAYOUT in (None, "BLHNC") and len(set(windows)) == 1
    return sliding_pages(
        spec.block_size,
        [s if isinstance(s, int) else int(s.base) for s in backend.get_supported_kernel_block_sizes(spec)],
        spec.page_size_bytes // spec.block_size,
        len(windows),
        block,
        spec.sliding_window + vllm_config.scheduler_config.max_num_batched_tokens,
        vllm_config.model_config.max_model_len,
        len(bodies) if packed else 0,
    )
