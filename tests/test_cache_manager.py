# SPDX-License-Identifier: Apache-2.0
"""The managers on every supported release, and vLLM's own grouping of layers."""
from __future__ import annotations

from pathlib import Path

import pytest
from vllm_sources import run_with

SUITE = [str(Path(__file__).with_name(f"manager_{name}.py")) for name in ("suite", "scenarios", "schedules")]


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_managers(version):
    done = run_with(version, ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *SUITE])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "failed" not in done.stdout


GROUPS = """
import torch, dataclasses
from types import SimpleNamespace
import bie_vllm_plugin; bie_vllm_plugin.register()
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
register_all_kvcache_specs(None)
try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups, get_kv_cache_config_from_groups
except ImportError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups, get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, replace_as
from vllm.v1.kv_cache_layout import KVCacheLayout
from bie_vllm_plugin.cache_spec import *
from bie_vllm_plugin.config import Int4AsymConfig

layout = KVCacheLayout.BLHNC
cache = SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout, num_gpu_blocks_override=None,
                        prefix_cache_retention_interval=0, kv_cache_layout="BLHNC")
vllm_config = SimpleNamespace(
    cache_config=cache, speculative_config=None,
    scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    attention_config=SimpleNamespace(hisparse_config=None),
    model_config=SimpleNamespace(max_model_len=32768, original_max_model_len=32768),
    parallel_config=SimpleNamespace(decode_context_parallel_size=1))
body = body_spec(PageLayout(128), 8)
window = window_spec(Int4AsymConfig(), 8, 128, 128, torch.bfloat16, 0, 0)
dense = BodySpec(block_size=64, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
for skipped in ((), (0,), (0, 31), (0, 1, 30, 31)):
    specs, ideal = {}, 0
    for layer in range(32):
        if layer in skipped:
            specs[f"model.layers.{layer}.attn"] = dense
            ideal += 512 * dense.page_size_bytes
        else:
            specs[f"model.layers.{layer}.attn"] = body
            specs[f"model.layers.{layer}.attn.window"] = window
            ideal += 512 * body.page_size_bytes + window.pages_held(32768) * window.page_size_bytes
    groups = get_kv_cache_groups(vllm_config, specs)
    memory = 16 << 30
    config = get_kv_cache_config_from_groups(vllm_config, groups, memory)
    block = sum(t.size for t in config.kv_cache_tensors[:1]) // config.num_blocks
    blocks = 512 + window.pages_held(32768)
    first = groups[0].kv_cache_spec
    first = getattr(first, "first_spec", first)
    print(len(skipped), len(groups), f"{blocks * block / ideal - 1:.4f}", type(first).__name__)
"""

DRAFTER = GROUPS.split("for skipped")[0] + """
from bie_vllm_plugin import checks
drafter = DrafterSpec(block_size=64, num_kv_heads=8, head_size=64, dtype=torch.bfloat16)
for layers, draft_layers, layout in ((32, 16, "BLHNC"), (32, 32, "BLHNC"), (4, 6, "BLHNC"), (4, 4, "LBHNC")):
    cache.kv_cache_layout, layout = layout, KVCacheLayout[layout]
    specs = {}
    for layer in range(layers):
        specs[f"model.layers.{layer}.attn"] = body
        specs[f"model.layers.{layer}.attn.window"] = window
    names = [f"draft_model.layers.{layer}.attn" for layer in range(draft_layers)]
    specs |= {name: drafter for name in names}
    groups = get_kv_cache_groups(vllm_config, specs)
    first = getattr(groups[0].kv_cache_spec, "first_spec", groups[0].kv_cache_spec)
    for group in groups:  # as the scheduler sees them
        group.kv_cache_spec = getattr(group.kv_cache_spec, "first_spec", group.kv_cache_spec)
    try:
        checks.check_drafter_group(SimpleNamespace(kv_cache_groups=groups, kv_cache_layout=cache.kv_cache_layout))
        verdict = "accepted"
    except ValueError:
        verdict = "refused"
    print(len(groups), type(first).__name__, set(names) <= set(groups[0].layer_names), verdict)
"""


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_skipped_layers_cost_at_most_5_percent(version):
    """32 layers, 8 KV heads, D = 128, one 32k request: allocated over the ideal sum, by vLLM's own functions."""
    done = run_with(version, ["-c", GROUPS])
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    print(done.stdout)
    assert [row[0] for row in rows] == ["0", "1", "2", "4"]
    for _, groups, overhead, first in rows:
        assert groups == "2" and 0 <= float(overhead) <= 0.05
        assert first == "BodySpec"  # its manager rules the group, even when layer 0 is skipped


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_drafters_share_the_group_of_the_bodies(version):
    """Group 0 holds bodies and drafter, led by a body, whatever the layers; otherwise the engine does not start."""
    done = run_with(version, ["-c", DRAFTER])
    assert done.returncode == 0, done.stderr[-3000:]
    *packed, layer_outermost = done.stdout.splitlines()
    assert packed == ["2 BodySpec True accepted"] * 3
    assert layer_outermost.endswith("False refused")
