# SPDX-License-Identifier: Apache-2.0
"""Plans the caches of known layer patterns with vLLM's own functions; prints one JSON line per pattern.

    python tests/page_sizes.py [LENGTHxCHUNK ...]

Runs without an engine, on the installed vLLM or on another release's Python
sources. A pattern is (layers, KV heads, head size, full layers per cycle, window,
skipped full layers), a drafter (layers, KV heads, head size, tokens, EAGLE head); per
request of LENGTH tokens, prefilled CHUNK at a time, in bf16 it reports what vLLM allocates against the sum of the
pages' bytes, the alignment of prefix hits, and the tokens a pool holds against `auto`.
"""
from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import torch
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:
    from vllm.v1.core import kv_cache_utils as planning
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

import bie_vllm_plugin
from bie_kernels.layout import PageLayout
from bie_vllm_plugin.cache_spec import BodySpec, DrafterSpec, body_spec, window_spec
from bie_vllm_plugin.config import Int4AsymConfig
from bie_vllm_plugin.page_report import auto_request_bytes
from bie_vllm_plugin.sliding_pages import sliding_pages

bie_vllm_plugin.register()
register_all_kvcache_specs(None)

POOL = 64 << 30
USUAL = "32768x2048"
"""Tokens of a request, and of a prefill chunk: vLLM's own default for most cards; windows must hold a chunk, too."""
FLASH = 16
"""Tokens that a FlashAttention page is a multiple of."""

PATTERNS = {
    # name: (layers, KV heads, head size, a full layer every n-th, window, skipped full layers)
    "Llama-3-8B": (32, 8, 128, 1, None, 0),
    "Llama-3-8B, 2 layers skipped": (32, 8, 128, 1, None, 2),
    "Llama-3-70B, tensor parallel 8": (80, 1, 128, 1, None, 0),
    "Gemma-2-9B": (42, 8, 256, 2, 4096, 0),
    "Gemma-2-27B": (46, 16, 128, 2, 4096, 0),
    "Gemma-3-1B": (26, 1, 256, 6, 512, 0),
    "Gemma-3-4B": (34, 4, 256, 6, 1024, 0),
    "Gemma-3-27B": (62, 16, 128, 6, 1024, 0),
    "Command-R7B": (32, 8, 128, 4, 4096, 0),
    "Exaone-4-32B": (64, 8, 128, 4, 4096, 0),
    "Olmo-3-7B": (32, 32, 128, 4, 4096, 0),
    "Mistral-7B-v0.1": (32, 8, 128, 0, 4096, 0),
}
DRAFTED = {
    # name: (layers of the target, its KV heads and head size, the drafter)
    "Llama-3-8B, EAGLE-3 head": (32, 8, 128, (1, 8, 128, 3, True)),
    "Llama-3-70B, tensor parallel 8, EAGLE-3 head": (80, 1, 128, (1, 1, 128, 3, True)),
    "Llama-3-8B, draft model Llama-3.2-1B": (32, 8, 128, (16, 8, 64, 3, False)),
    "Qwen2.5-7B, draft model Qwen2.5-0.5B": (28, 4, 128, (24, 2, 64, 8, False)),
}


def engine(layout: KVCacheLayout, length: int, chunk: int) -> SimpleNamespace:
    """As much of a VllmConfig as planning reads."""
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout, num_gpu_blocks_override=None, prefix_cache_retention_interval=0,
        kv_cache_layout=layout.name, block_size=64, enable_prefix_caching=True, hash_block_size=None,
        prefix_match_unit=None, mamba_cache_mode="none",
    )  # fmt: skip
    return SimpleNamespace(
        cache_config=cache, speculative_config=None, kv_transfer_config=None, kv_events_config=None,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False, max_num_batched_tokens=chunk),
        attention_config=SimpleNamespace(hisparse_config=None), max_concurrent_batches=1,
        max_in_flight_tokens=chunk,
        model_config=SimpleNamespace(max_model_len=length, original_max_model_len=length),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
    )  # fmt: skip


def specs(pattern: tuple, dtype: str, length: int, chunk: int, drafter: tuple | None = None) -> dict:
    layers, heads, head, every, window, skipped = pattern
    draft_layers, draft_heads, draft_head, drafts, eagle = drafter or (0, 0, 0, 0, False)
    shape = {"num_kv_heads": heads, "head_size": head, "dtype": torch.bfloat16}
    ours = dtype == "int4_asym"
    body = body_spec(PageLayout(head), heads)
    companion = window_spec(Int4AsymConfig(), heads, head, head, torch.bfloat16, drafts, 0, drafted_ahead=drafts,
                            dropped=64 * eagle)  # fmt: skip
    dense = BodySpec(block_size=64, **shape) if ours else FullAttentionSpec(block_size=16, **shape)
    full = layers // every if every else 0
    block = full * body.page_size_bytes + skipped * (dense.page_size_bytes - body.page_size_bytes)
    held = (window or 0) + chunk
    tokens = 16
    if ours and full and full < layers:  # without a full layer the plugin leaves everything alone
        choice = (64, [FLASH], 4 * heads * head, layers - full, block, held, length, full - skipped)
        tokens, padding = sliding_pages(*choice)
        if padding:
            body = replace(body, page_size_padded=body.page_size_bytes + padding)
    result: dict = {}
    for layer in range(layers):
        name = f"model.layers.{layer}.self_attn.attn"
        if not every or (layer + 1) % every:
            result[name] = SlidingWindowSpec(block_size=tokens, sliding_window=window, **shape)
        elif not ours or skipped > 0:
            result[name] = dense
            skipped -= 1
        else:
            result[name] = body
            result[name + ".int4_asym_window"] = companion
    shape = {"num_kv_heads": draft_heads, "head_size": draft_head, "dtype": torch.bfloat16}
    for layer in range(draft_layers):
        spec = DrafterSpec(block_size=64, **shape) if ours else FullAttentionSpec(block_size=16, **shape)
        result[f"draft_model.layers.{layer}.self_attn.attn"] = spec
    return result


def plan(pattern: tuple, dtype: str, length: int, chunk: int, drafter: tuple | None = None) -> dict:
    vllm_config = engine(KVCacheLayout.BLHNC if dtype == "int4_asym" else KVCacheLayout.LBHNC, length, chunk)
    wanted = specs(pattern, dtype, length, chunk, drafter)
    groups = planning.get_kv_cache_groups(vllm_config, dict(wanted))
    # As the engine core does, before it asks for the scheduler's block size.
    vllm_config.cache_config.block_size = min(group.kv_cache_spec.block_size for group in groups)
    config = planning.get_kv_cache_config_from_groups(vllm_config, groups, POOL)
    block = config.kv_cache_tensors[0].size // config.num_blocks
    pages = [-(-g.kv_cache_spec.max_memory_usage_bytes(vllm_config) // g.kv_cache_spec.page_size_bytes) for g in groups]
    plain = [replace(spec, page_size_padded=None) for spec in wanted.values()]
    ideal = sum(spec.max_memory_usage_bytes(vllm_config) for spec in plain)
    scheduler_block, hash_block = resolve_kv_cache_block_sizes(config, vllm_config)
    return {
        "groups": len(groups), "overhead": sum(pages) * block / ideal - 1, "alignment": scheduler_block,
        "largest_page": max(spec.block_size for spec in wanted.values()), "hash_block": hash_block,
        "tokens": int(config.num_blocks / sum(pages) * length), "request": sum(pages) * block,
        "report": auto_request_bytes(wanted, length, chunk, 2, 16),
        "led_by": type(getattr(groups[0].kv_cache_spec, "first_spec", groups[0].kv_cache_spec)).__name__,
        "drafter_in_group_0": {n for n in wanted if n.startswith("draft")} <= set(groups[0].layer_names),
    }  # fmt: skip


def main(wanted: list[str]) -> None:
    cases = {name: (pattern, None) for name, pattern in PATTERNS.items()}
    cases |= {name: ((*target, 1, None, 0), drafter) for name, (*target, drafter) in DRAFTED.items()}
    for size in wanted or [USUAL]:
        length, chunk = map(int, size.split("x"))
        for name, (pattern, drafter) in cases.items():
            ours, auto = (plan(pattern, dtype, length, chunk, drafter) for dtype in ("int4_asym", "auto"))
            size = {"name": name, "length": length, "chunk": chunk, "drafter": bool(drafter)}
            print(json.dumps({**size, **ours, "auto_tokens": auto["tokens"], "auto_request": auto["request"]}))


if __name__ == "__main__":
    main(sys.argv[1:])
