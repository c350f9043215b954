# SPDX-License-Identifier: Apache-2.0
"""The planner against vLLM: its grouping rules, the plugin's specs, and start-up figures of real engines."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bie_vllm_plugin.config import Int4AsymConfig
from bie_vllm_plugin.plan_formats import FORMATS
from bie_vllm_plugin.plan_model import load_model, parse_config
from bie_vllm_plugin.plan_pool import EngineOptions, build_pool

GIB = 1 << 30
POOL = 1 * GIB
CONTEXT = 4096
CHUNK = 512

# Tiny models of every kind of layer that the CPU can run; random weights, three or more layers.
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip
MODELS = {
    "gqa": LLAMA,
    "mha": {**LLAMA, "num_key_value_heads": 8, "num_attention_heads": 8, "num_hidden_layers": 3},
    "mqa": {**LLAMA, "num_key_value_heads": 1, "head_dim": 128},
    # Three of four layers slide, as in Gemma's and Mistral's hybrids.
    "sliding": {
        **LLAMA,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 256,
        "query_pre_attn_scalar": 64,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "num_key_value_heads": 2,
    },
    "mla": {
        **LLAMA,
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_key_value_heads": 8,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "n_routed_experts": 2,
        "first_k_dense_replace": 4,
        "num_hidden_layers": 4,
    },
}


# -- one boot of vLLM per process; several engines in it ---------------------------------
def _engine_figures(job: dict) -> dict:
    """Boot an engine with dummy weights and report what vLLM says at start-up."""
    from vllm import LLM

    llm = LLM(
        model=job["model"], load_format="dummy", skip_tokenizer_init=True, enforce_eager=True,
        dtype="bfloat16", max_model_len=CONTEXT, max_num_batched_tokens=CHUNK, max_num_seqs=4,
        kv_cache_memory_bytes=POOL, disable_log_stats=True, **job["llm"],
    )  # fmt: skip
    cache = llm.llm_engine.vllm_config.cache_config
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    return {
        "tokens": cache.kv_cache_size_tokens,
        "concurrency": cache.kv_cache_max_concurrency,
        "blocks": cache.num_gpu_blocks,
        # Groups lie over one another in the pool, so the longest tensor set is what is allocated.
        "bytes": max(tensor.size for tensor in config.kv_cache_tensors),
        "groups": len(config.kv_cache_groups),
        "layout": cache.kv_cache_layout,
    }


def _boot(jobs: list[dict], tmp_path: Path) -> list[dict]:
    script = tmp_path / "jobs.json"
    script.write_text(json.dumps(jobs))
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    env.pop("VLLM_CPU_KVCACHE_SPACE", None)
    done = subprocess.run(
        [sys.executable, __file__, str(script)], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return json.loads((tmp_path / "figures.json").read_text())


CASES = [
    ("gqa", "bf16", {}),
    ("gqa", "fp8", {}),
    ("gqa", "int4_asym", {}),
    ("sliding", "bf16", {}),
    ("sliding", "fp8", {}),
    ("sliding", "int4_asym", {}),
    ("mha", "int4_asym", {"group_size": 32, "sink_tokens": 20, "recent_tokens": 300}),
    ("mqa", "int4_asym", {}),
    ("mla", "bf16", {}),
]


@pytest.mark.engine
def test_startup_figures(tmp_path: Path) -> None:
    """Blocks, bytes, tokens and concurrency equal what vLLM says when it starts (2 % is allowed)."""
    jobs = []
    for name, config in MODELS.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    for name, fmt, settings in CASES:
        llm: dict = {"kv_cache_dtype": FORMATS[fmt].vllm}
        if settings:
            llm["additional_config"] = {"int4_asym": settings}
        jobs.append({"model": str(tmp_path / name), "llm": llm})
    for (name, fmt, settings), figures in zip(CASES, _boot(jobs, tmp_path), strict=True):
        label = f"{name} {fmt} {figures}"
        print(label)
        options = EngineOptions(
            chunk=CHUNK, cpu=True, settings=Int4AsymConfig(**settings), block_size=16 if name == "mla" else None
        )
        pool = build_pool(load_model(str(tmp_path / name)), FORMATS[fmt], options)
        assert pool.blocks(POOL) == pytest.approx(figures["blocks"], rel=0.02), label
        assert pool.blocks(POOL) * pool.block_bytes == pytest.approx(figures["bytes"], rel=0.02), label
        assert pool.reported_tokens(POOL, CONTEXT) == pytest.approx(figures["tokens"], rel=0.02), label
        assert pool.reported_concurrency(POOL, CONTEXT) == pytest.approx(figures["concurrency"], rel=0.02), label
        assert len(pool.groups) == figures["groups"], label
        print(pool.blocks(POOL), pool.blocks(POOL) * pool.block_bytes, pool.reported_tokens(POOL, CONTEXT), pool.reported_concurrency(POOL, CONTEXT), len(pool.groups))


if __name__ == "__main__":
    source = Path(sys.argv[1])
    out = []
    for one in json.loads(source.read_text()):
        out.append(_engine_figures(one))
        print(one, out[-1], flush=True)
    (source.parent / "figures.json").write_text(json.dumps(out))
