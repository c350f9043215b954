# SPDX-License-Identifier: Apache-2.0
"""The start-up line about pages: what a request is allocated against what it needs, and where prefix hits may end."""
from __future__ import annotations

import logging
import math
from typing import Any

logger = logging.getLogger("vllm.bie_vllm_plugin")


def log_pages(manager: Any) -> None:
    """Say how the pages of all layers share the pool; a warning where they share it badly.

    Under `BLHNC` groups of different page size are packed into blocks and little is
    lost. `LBHNC` (a backend that takes nothing else, or the user's choice) makes all
    pages equal and may split the layers into many groups.

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
    logger.log(
        logging.INFO if packed else logging.WARNING,
        "KV cache int4_asym: %s%d groups, a request of %d tokens takes %.1f MiB, %.0f %% above the sum of its pages; "
        "prefix hits end at multiples of %d tokens; the pool holds %d tokens.",
        ""
        if packed
        else f"layout {config.kv_cache_layout} (a backend of the layers in full precision or VLLM_KV_CACHE_LAYOUT "
        "wants it) makes all pages equal: ",
        len(groups),
        manager.max_model_len,
        blocks * block_bytes / 2**20,
        over,
        math.lcm(*(group.kv_cache_spec.block_size for group in groups)),
        int(config.num_blocks / blocks * manager.max_model_len),
    )


def pages_of_request(manager: Any) -> list[int]:
    """Pages that a request of max_model_len is admitted with, per group."""
    return [
        min(m.max_admission_blocks_per_request or math.inf, -(-manager.max_model_len // m.block_size))
        for m in manager.coordinator.single_type_managers
    ]
