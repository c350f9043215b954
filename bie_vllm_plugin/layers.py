# SPDX-License-Identifier: Apache-2.0
"""Specs on the instances of vLLM's attention layers; its classes stay as they are."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

from bie_vllm_plugin.config import DTYPE_NAME

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def attach_layers(vllm_config: VllmConfig) -> list[str]:
    """Give every int4_asym layer its window companion and both kinds of layer their specs.

    Called when weights are loaded, i.e. when all attention layers exist and none of
    their caches does. vLLM asks layers for specs by `get_kv_cache_spec`; overriding
    it on the instances leaves the class alone.

    Returns:
        Names of the int4_asym layers.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionType

    from bie_vllm_plugin.window_layer import WindowLayer, body_spec_of, dense_spec_of, sliding_spec_of

    layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    ours = []
    attention: list[tuple[str, Any]] = [(name, layer) for name, layer in layers.items() if isinstance(layer, Attention)]
    for name, layer in attention:
        layer.int4_asym_target = True  # layers that appear later belong to a draft model
        if layer.kv_cache_dtype == DTYPE_NAME:
            ours.append(name)
            companion = WindowLayer.name_of(name)
            if companion not in layers:
                layers[companion] = WindowLayer(layer)
                layer.get_kv_cache_spec = functools.partial(body_spec_of, layer)
                layer.impl.layer_name = name
        elif layer.attn_type == AttentionType.DECODER:
            spec_of = dense_spec_of if layer.sliding_window is None else sliding_spec_of
            layer.get_kv_cache_spec = functools.partial(spec_of, layer, type(layer).get_kv_cache_spec)
    return ours


def finish_layers(vllm_config: VllmConfig) -> None:
    """Full-precision layers, those of a draft model included, once all layers exist.

    A draft model is loaded after the target, so its layers are those that
    `attach_layers` has not seen; their pages join the body group. They are checked
    again: a loader may have built them by itself, or have changed them while loading.
    """
    from vllm.model_executor.layers.attention import Attention

    from bie_vllm_plugin.checks import check_drafter_layer
    from bie_vllm_plugin.window_layer import drafter_spec_of

    layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    for name, layer in [(name, layer) for name, layer in layers.items() if isinstance(layer, Attention)]:
        any_layer: Any = layer
        if any_layer.kv_cache_dtype == DTYPE_NAME:
            continue
        any_layer.attn_backend = _beside_ours(any_layer.attn_backend)
        if not hasattr(any_layer, "int4_asym_target"):
            check_drafter_layer(name, any_layer, vllm_config)
            original = type(any_layer).get_kv_cache_spec
            any_layer.get_kv_cache_spec = functools.partial(drafter_spec_of, any_layer, original)


@functools.cache
def _beside_ours(backend: Any) -> Any:
    """A full-precision layer's backend, as it must be in an engine whose dtype is int4_asym."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return _block_outermost(backend)
    return full_precision_schedule(backend) if backend.get_name() == "FLASH_ATTN" else backend


def full_precision_schedule(backend: Any) -> Any:
    """FlashAttention whose schedules are made for the layers' own dtype.

    Its builder takes fp8 for granted if the engine's cache dtype is a quantised one. Whether a schedule has
    room for splits depends on that: eagerly FlashAttention 3 refuses the wrong size, in a graph nobody would see it.
    """
    builder: Any = backend.get_builder_cls()

    class FullPrecisionBuilder(builder):
        cache_config: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.cache_config = copy.copy(self.cache_config)
            self.cache_config.cache_dtype = "auto"

    class FullPrecisionFlashAttentionBackend(backend):
        @staticmethod
        def get_builder_cls() -> Any:
            return FullPrecisionBuilder

    return FullPrecisionFlashAttentionBackend


def _block_outermost(backend: Any) -> Any:
    """The CPU backend, offered in our layout as well; others as they are.

    It declares layer-outermost caches only, which makes all pages of the pool equal
    and gives a draft model a group of its own. Its kernels take the strides of blocks
    and heads from the tensor and need the interior of a block contiguous, nothing else.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_interface import KVCacheLayout

    if backend is not CPUAttentionBackend:
        return backend

    class BlockOutermostCPUAttentionBackend(CPUAttentionBackend):
        @classmethod
        def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
            return (KVCacheLayout.BLHNC, KVCacheLayout.LBHNC)

    return BlockOutermostCPUAttentionBackend
