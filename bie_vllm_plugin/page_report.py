# SPDX-License-Identifier: Apache-2.0
"""The start-up line about pages: allocated against needed, where prefix hits may end, and what `auto` would hold."""
from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.bie_vllm_plugin")

AUTO_TOKENS = "int4_asym_auto_tokens"
"""Attribute of vLLM's KVCacheConfig: tokens that its pool would hold under `auto`."""


def note_auto(vllm_config: VllmConfig, specs: Sequence[dict[str, Any]], configs: Sequence[Any]) -> None:
    """Leave at every worker's config what the same memory would hold under `auto`, in requests of max_model_len.

    Args:
        specs: per worker {layer: its KVCacheSpec}.
        configs: vLLM's `KVCacheConfig` of each.
    """
    from bie_vllm_plugin.plan_pool import CPU_PAGE_TOKENS, GPU_PAGE_TOKENS

    length = vllm_config.model_config.max_model_len
    dtype: Any = vllm_config.model_config.dtype
    tokens = CPU_PAGE_TOKENS if vllm_config.device_config.device_type == "cpu" else GPU_PAGE_TOKENS
    held = [
        config.kv_cache_tensors[0].size
        / auto_request_bytes(layers, length, vllm_config.max_in_flight_tokens, dtype.itemsize, tokens)
        for layers, config in zip(specs, configs, strict=True)
        if layers and config.kv_cache_tensors
    ]
    for config in configs:
        setattr(config, AUTO_TOKENS, int(min(held) * length) if held else 0)


def auto_request_bytes(layers: dict[str, Any], length: int, in_flight: int, itemsize: int, page_tokens: int) -> int:
    """What a request of `length` tokens would take under `auto`, in whole blocks, by the planner's grouping.

    Args:
        layers: {layer: KVCacheSpec} as planned now; windows of INT4 layers would not exist.
        in_flight: tokens scheduled and not settled, which sliding windows hold too.
        itemsize: bytes of the model's dtype.
    """
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    from bie_vllm_plugin.cache_spec import WindowSpec
    from bie_vllm_plugin.plan_groups import PageSpec, group_pages
    from bie_vllm_plugin.plan_pool import Pool

    pages = []
    for spec in layers.values():
        if isinstance(spec, WindowSpec):
            continue
        page = page_tokens * spec.num_kv_heads * (spec.head_size + spec.head_size_v) * itemsize
        shape = f"{spec.num_kv_heads}:{spec.head_size}:{spec.head_size_v}"
        if isinstance(spec, SlidingWindowSpec):
            pages.append(PageSpec("sliding", page_tokens, page, page, spec.sliding_window, packing=shape))
        else:
            pages.append(PageSpec("full", page_tokens, page, page, packing=shape))
    return Pool(tuple(map(tuple, group_pages(pages, block_outermost=False))), in_flight).sequence_bytes(length)


def log_pages(manager: Any) -> None:
    """Say how the pages of all layers share the pool; a warning where they share it badly.

    Under `BLHNC` groups of different page size are packed into blocks and little is
    lost. `LBHNC` (a backend that takes nothing else, or the user's choice) makes all
    pages equal and may split the layers into many groups. A warning, too, where requests
    of max_model_len are so short that the pool holds fewer tokens than under `auto`.

    Args:
        manager: vLLM's `KVCacheManager`, built.
    """
    from bie_vllm_plugin.cache_spec import WindowSpec

    config = manager.kv_cache_config
    groups = config.kv_cache_groups
    ours = any(isinstance(group.kv_cache_spec, WindowSpec) for group in groups)
    if not ours or not config.kv_cache_tensors:
        return
    packed = config.kv_cache_layout in (None, "BLHNC")
    block_bytes = config.kv_cache_tensors[0].size // config.num_blocks
    page_of = {name: tensor.layer_stride for tensor in config.kv_cache_tensors for name in tensor.layers}
    blocks = ideal = 0
    for group, pages in zip(groups, pages_of_request(manager), strict=True):
        spec = group.kv_cache_spec
        own = [
            page_of[name] if packed and page_of[name] != spec.page_size_bytes else spec.unpadded_page_size_bytes
            for name in group.layer_names
        ]
        blocks += pages
        ideal += pages * sum(own)
    over = 100 * (blocks * block_bytes / ideal - 1)
    held = int(config.num_blocks / blocks * manager.max_model_len)
    auto = getattr(config, AUTO_TOKENS, 0)
    share = f", {held / auto:.2f} times what it would hold under auto" if auto else ""
    if held < auto:  # the windows of a request cost more than its body saves
        share += "; requests this short fit better with --kv-cache-dtype auto"
    logger.log(
        logging.INFO if packed and held >= auto else logging.WARNING,
        "KV cache int4_asym: %s%d groups, a request of %d tokens takes %.1f MiB, %.0f %% above the sum of its pages; "
        "prefix hits end at multiples of %d tokens; the pool holds %d tokens%s.",
        ""
        if packed
        else f"layout {config.kv_cache_layout} (a backend of the layers in full precision or VLLM_KV_CACHE_LAYOUT "
        "wants it) makes all pages equal: ",
        len(groups),
        manager.max_model_len,
        blocks * block_bytes / 2**20,
        over,
        math.lcm(*(group.kv_cache_spec.block_size for group in groups)),
        held,
        share,
    )


def pages_of_request(manager: Any) -> list[int]:
    """Pages that a request of max_model_len is admitted with, per group."""
    return [
        min(m.max_admission_blocks_per_request or math.inf, -(-manager.max_model_len // m.block_size))
        for m in manager.coordinator.single_type_managers
    ]
