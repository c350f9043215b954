# SPDX-License-Identifier: Apache-2.0
"""Specs on the instances of vLLM's attention layers; its classes stay as they are."""

from __future__ import annotations

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
        any_layer.attn_backend = _block_outermost(any_layer.attn_backend)
        if not hasattr(any_layer, "int4_asym_target"):
            check_drafter_layer(name, any_layer, vllm_config)
            original = type(any_layer).get_kv_cache_spec
            any_layer.get_kv_cache_spec = functools.partial(drafter_spec_of, any_layer, original)


def full_precision_schedules(vllm_config: VllmConfig) -> None:
    """Layers without INT4 get a backend whose metadata is made for their own dtype."""
    from vllm.model_executor.layers.attention import Attention

    from bie_vllm_plugin.vllm_compat import full_precision_schedule

    layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    for layer in [layer for layer in layers.values() if isinstance(layer, Attention)]:
        any_layer: Any = layer
        if any_layer.kv_cache_dtype != DTYPE_NAME:
            any_layer.attn_backend = full_precision_schedule(any_layer.attn_backend)


@functools.cache
def _block_outermost(backend: Any) -> Any:
    """The CPU backend, offered in our layout as well; others as they are.

    It declares layer-outermost caches only, which makes all pages of the pool equal
    and gives a draft model a group of its own. Its kernels take the strides of blocks
    and heads from the tensor and need the interior of a block contiguous, nothing else.
    """
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import KVCacheLayout

    if not current_platform.is_cpu():
        return backend
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if backend is not CPUAttentionBackend:
        return backend

    class BlockOutermostCPUAttentionBackend(CPUAttentionBackend):
        @classmethod
        def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
            return (KVCacheLayout.BLHNC, KVCacheLayout.LBHNC)

    return BlockOutermostCPUAttentionBackend
