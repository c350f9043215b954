# SPDX-License-Identifier: Apache-2.0
"""The planner against vLLM: its grouping rules, the plugin's specs, and start-up figures of real engines."""
from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bie_vllm_plugin.config import Int4AsymConfig
from bie_vllm_plugin.plan_drafter import Drafter, drafter_refusal, load_drafter, with_drafter
from bie_vllm_plugin.plan_formats import FORMATS
from bie_vllm_plugin.plan_model import load_model
from bie_vllm_plugin.plan_pool import EngineOptions, build_pool
from bie_vllm_plugin.plan_weights import weigh

MODELS_DIR = Path(__file__).parent / "plan_models"
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
    # Five INT4 pages are as wide as 2.8 windowed ones: padded until three fit.
    "padded": {
        **LLAMA,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 256,
        "query_pre_attn_scalar": 64,
        "num_hidden_layers": 11,
        "layer_types": ["full_attention"] * 5 + ["sliding_attention"] * 6,
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
    # Hybrids: short convolutions, Mamba-2, gated delta net. vLLM's CPU build keeps their states in fp32.
    "lfm2": {
        **LLAMA, "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "head_dim": 32,
        "layer_types": ["conv", "conv", "full_attention", "conv"], "conv_L_cache": 3, "conv_bias": False,
        "conv_dim": 256, "block_dim": 256, "block_ff_dim": 512, "block_multiple_of": 64,
        "block_auto_adjust_ff_dim": False,
    },
    "mamba2": {
        **LLAMA, "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"], "head_dim": 32,
        "layer_types": ["mamba", "mamba", "attention", "mamba"], "mamba_n_heads": 16, "mamba_d_head": 32,
        "mamba_expand": 2, "mamba_d_state": 64, "mamba_n_groups": 1, "mamba_d_conv": 4, "num_local_experts": 0,
        "shared_intermediate_size": 512, "position_embedding_type": "rope", "mamba_ssm_cache_dtype": "float32",
    },
    "delta": {
        **LLAMA, "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"],
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1,
        "norm_topk_prob": True, "mamba_ssm_dtype": "float32",
    },
}  # fmt: skip


# -- one boot of vLLM per process; several engines in it ---------------------------------
def _engine_figures(job: dict) -> dict:
    """Boot an engine with dummy weights and report what vLLM says at start-up."""
    from vllm import LLM

    if job.get("weights"):
        import vllm._custom_ops as ops

        ops._supports_onednn = False  # it would repack the matrices and drop the parameters, which are counted here
    arguments = {"load_format": "dummy", **job["llm"]}
    llm = LLM(
        model=job["model"], skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=CONTEXT,
        max_num_batched_tokens=CHUNK, max_num_seqs=4, kv_cache_memory_bytes=job.get("pool", POOL),
        disable_log_stats=True, **arguments,
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
        "weights": _parameter_bytes(llm) if job.get("weights") else 0,
    }


def _parameter_bytes(llm) -> int:
    """Bytes of all parameters, the drafter's included, shared ones counted once."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    modules = [runner.model, runner.drafter.model]
    return sum({p.data_ptr(): p.nbytes for module in modules for p in module.parameters()}.values())


DRAFTED = [
    # (target, drafter, format, drafts, further settings)
    ("gqa", "draft_model", "int4_asym", 3, {}),
    ("gqa", "draft_model", "int4_asym", 1, {"sink_tokens": 20, "recent_tokens": 300, "prefix_hits": "strict"}),
    ("gqa", "draft_model", "bf16", 3, {}),
    ("gqa", "eagle", "int4_asym", 3, {}),
    ("gqa", "eagle3", "int4_asym", 5, {}),
    ("mimo", "mtp", "int4_asym", 1, {}),
    ("gqa", "ngram", "int4_asym", 4, {}),
]


def _drafted(folder: Path, target: str, method: str, drafts: int) -> tuple[str, dict]:
    """(target's folder, speculative_config), with real weights: vLLM compares them to tell what is shared."""
    from engine import tiny_llama
    from tiny_heads import tiny_eagle, tiny_eagle3, tiny_mimo

    model = tiny_mimo(folder / "mimo") if target == "mimo" else tiny_llama(folder / "gqa")
    speculation: dict = {"method": method, "num_speculative_tokens": drafts}
    if method == "draft_model":
        speculation["model"] = tiny_llama(folder / "draft", layers=2, heads=4, kv_heads=1, head_dim=128)
    elif method.startswith("eagle"):
        speculation["model"] = {"eagle": tiny_eagle, "eagle3": tiny_eagle3}[method](folder / method, model)
    return model, speculation


@pytest.mark.engine
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c[1] == "eagle3" else pytest.mark.slow) for c in DRAFTED],
    ids=lambda c: "-".join(map(str, c[:4])),
)  # fmt: skip
def test_startup_figures_with_a_drafter(tmp_path: Path, case: tuple) -> None:
    """The smallest pool with a drafter is vLLM's to the byte, its weights are within 0.2 %."""
    target, method, fmt, drafts, settings = case
    folder, speculation = _drafted(tmp_path, target, method, drafts)
    model = load_model(folder)
    drafter = load_drafter(speculation, model, 1)
    options = EngineOptions(chunk=CHUNK, cpu=True, settings=Int4AsymConfig(**settings), drafter=drafter)
    pool = build_pool(model, FORMATS[fmt], options, CONTEXT)
    least = pool.pool_bytes(CONTEXT)
    engine = {"kv_cache_dtype": FORMATS[fmt].vllm, "speculative_config": speculation, "load_format": "auto"}
    if settings:
        engine["additional_config"] = {"int4_asym": settings}
    job = {"model": folder, "llm": engine, "weights": bool(drafter.layers)}
    full, short = _boot([{**job, "pool": least}, {**job, "pool": least - 1}], tmp_path)
    assert full.get("blocks") == pool.blocks(least), full
    assert full["bytes"] == pool.blocks(least) * pool.block_bytes == least
    assert full["tokens"] == pool.reported_tokens(least, CONTEXT)
    assert full["groups"] == len(pool.groups)
    assert "error" in short, short
    if drafter.layers:
        by_shape = replace(model, index_bytes=None)
        drafter = replace(drafter, shape=replace(drafter.shape, index_bytes=None))
        weights = with_drafter(weigh(by_shape, "auto", 1), drafter, by_shape, "auto", 1)
        assert weights.total == pytest.approx(full["weights"], rel=2e-3)
        assert weights.drafter > 0.05 * weights.total


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
    ("padded", "int4_asym", {}),
    ("mha", "int4_asym", {"group_size": 32, "sink_tokens": 20, "recent_tokens": 300}),
    ("mqa", "int4_asym", {}),
    ("mla", "bf16", {}),
    ("lfm2", "bf16", {}),
    ("mamba2", "bf16", {}),
    ("delta", "bf16", {}),
]


@pytest.mark.engine
def test_startup_figures(tmp_path: Path) -> None:
    """Blocks, bytes, tokens and concurrency are what vLLM says when it starts: to the page, not just to 2 %."""
    jobs = []
    for name, config in MODELS.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    for name, fmt, settings in CASES:
        llm: dict = {"kv_cache_dtype": FORMATS[fmt].vllm}
        if name in ("mamba2", "delta"):
            llm["mamba_ssm_cache_dtype"] = "float32"
        if settings:
            llm["additional_config"] = {"int4_asym": settings}
        jobs.append({"model": str(tmp_path / name), "llm": llm})
    for (name, fmt, settings), figures in zip(CASES, _boot(jobs, tmp_path), strict=True):
        label = f"{name} {fmt} {figures}"
        options = EngineOptions(
            chunk=CHUNK, cpu=True, settings=Int4AsymConfig(**settings), block_size=16 if name == "mla" else None
        )
        pool = build_pool(load_model(str(tmp_path / name)), FORMATS[fmt], options, CONTEXT)
        assert pool.blocks(POOL) == figures["blocks"], label
        assert pool.blocks(POOL) * pool.block_bytes == figures["bytes"], label
        assert pool.reported_tokens(POOL, CONTEXT) == figures["tokens"], label
        assert pool.reported_concurrency(POOL, CONTEXT) == pytest.approx(figures["concurrency"]), label
        assert len(pool.groups) == figures["groups"], label
        if fmt == "int4_asym":
            assert any(page.page_bytes > page.used_bytes for page in pool.groups[0]) == (name == "padded"), label


@pytest.mark.engine
def test_the_smallest_pool_boots_and_one_block_less_does_not(tmp_path: Path) -> None:
    """`max_context` and `fits` are vLLM's and the plugin's own limits, to the block."""
    cases = [("gqa", "bf16"), ("gqa", "int4_asym"), ("sliding", "fp8"), ("mamba2", "bf16")]
    jobs, pools = [], []
    for name, fmt in cases:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(MODELS[name]))
        pool = build_pool(load_model(str(folder)), FORMATS[fmt], EngineOptions(chunk=CHUNK, cpu=True), CONTEXT)
        least = pool.pool_bytes(CONTEXT)
        assert pool.max_context(least) >= CONTEXT > pool.max_context(least - 1)
        llm = {"kv_cache_dtype": FORMATS[fmt].vllm}
        if name == "mamba2":
            llm["mamba_ssm_cache_dtype"] = "float32"
        for size in (least, least - 1):
            jobs.append({"model": str(folder), "llm": llm, "pool": size})
            pools.append(pool)
    for job, pool, figures in zip(jobs, pools, _boot(jobs, tmp_path), strict=True):
        if job["pool"] == pool.pool_bytes(CONTEXT):
            assert figures.get("blocks") == pool.blocks(job["pool"]), (job, figures)
        else:
            assert "error" in figures, (job, figures)


# -- vLLM's own grouping on the specs of larger models, without an engine -----------------
def _vllm_specs(model, fmt, options: EngineOptions, context: int) -> dict:
    """The specs that the layers would hand to vLLM on a GPU, by vLLM's and the plugin's own classes."""
    import torch
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, get_kv_quant_mode, replace_as

    from bie_vllm_plugin.cache_spec import BodySpec, body_spec, window_spec
    from bie_vllm_plugin.sliding_pages import sliding_pages

    ours = fmt.name == "int4_asym"
    count = model.text["num_hidden_layers"]
    specs, windows = {}, {}
    for layer in model.layers:
        heads = max(1, layer.kv_heads // options.tp)
        boundary = fmt.name.startswith("turboquant") and (layer.index < 2 or layer.index >= count - 2)
        dense = layer.index in options.skip or boundary or (ours and layer.kind == "sliding")
        dtype = "auto" if dense else fmt.vllm
        shape = {
            "block_size": 64 if ours else options.page_tokens,
            "num_kv_heads": heads,
            "head_size": layer.head_size,
            "dtype": torch.bfloat16 if dtype == "auto" or ours else STR_DTYPE_TO_TORCH_DTYPE[dtype],
            "kv_quant_mode": get_kv_quant_mode("auto" if ours else dtype),
        }
        name = f"model.layers.{layer.index}.self_attn.attn"
        if layer.kind == "sliding":
            spec = SlidingWindowSpec(**shape, sliding_window=layer.window)
        elif ours and not dense:
            layout = options.settings.page_layout(layer.head_size)
            spec = body_spec(layout, heads)
            windows[name + ".window"] = window_spec(
                options.settings, heads, layer.head_size, layer.head_size_v, torch.bfloat16, options.drafts, 0,
                batches=options.batches, **_window_of_drafter(options.drafter),
            )  # fmt: skip
        else:
            spec = FullAttentionSpec(**shape)
            if ours:
                spec = replace_as(spec, BodySpec)
        backend = TurboQuantAttentionBackend if fmt.name.startswith("turboquant") else TritonAttentionBackend
        specs[name] = spec if ours else backend.customize_spec(spec)
    drafter = _drafter_specs(fmt, options)
    if ours:  # as window_layer does, beside FlashAttention's pages of 16
        sliding = {name: spec for name, spec in specs.items() if type(spec) is SlidingWindowSpec}
        full = {name: spec for name, spec in specs.items() if name not in sliding}
        block = sum(spec.page_size_bytes for spec in [*full.values(), *drafter.values()])
        bodies = [name for name, spec in full.items() if spec.dtype == torch.uint8]
        for name, spec in sliding.items():
            held, token = spec.sliding_window + options.chunk, spec.page_size_bytes // 64
            tokens, padding = sliding_pages(64, [16], token, len(sliding), block, held, context, len(bodies))
            specs[name] = replace(spec, block_size=tokens)
        for name in bodies if sliding and padding else ():
            specs[name] = replace(full[name], page_size_padded=full[name].page_size_bytes + padding)
    return {**specs, **windows, **drafter}


def _window_of_drafter(drafter: Drafter | None) -> dict:
    """What the plugin takes from vLLM's configuration (`num_lookahead_tokens`, `use_eagle_block_drop`)."""
    if drafter is None or not drafter.layers:
        return {}
    return {"drafted_ahead": drafter.drafts, "dropped": 0 if drafter.method == "draft_model" else 64}


def _drafter_specs(fmt, options: EngineOptions) -> dict:
    """As `window_layer.drafter_spec_of` makes them; beside other formats the drafter inherits the target's."""
    import torch
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode, replace_as

    from bie_vllm_plugin.cache_spec import DrafterSpec

    ours, specs = fmt.name == "int4_asym", {}
    dtype = "auto" if ours else fmt.vllm
    for layer in options.drafter.layers if options.drafter else ():
        spec = FullAttentionSpec(
            block_size=64 if ours else options.page_tokens,
            num_kv_heads=max(1, layer.kv_heads // options.tp),
            head_size=layer.head_size,
            dtype=torch.bfloat16 if dtype == "auto" else STR_DTYPE_TO_TORCH_DTYPE[dtype],
            kv_quant_mode=get_kv_quant_mode(dtype),
        )
        specs[f"draft.layers.{layer.index}.self_attn.attn"] = (
            replace_as(spec, DrafterSpec) if ours else TritonAttentionBackend.customize_spec(spec)
        )
    return specs


def _vllm_figures(specs: dict, layout: str, options: EngineOptions, context: int) -> tuple[int, int, int]:
    """(bytes per block, blocks per sequence, groups) by vLLM's functions."""
    from vllm.v1.core import kv_cache_utils as utils
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from bie_vllm_plugin.vllm_compat import _register_specs

    register_all_kvcache_specs(None)  # vLLM's own; calls the platform's hook too
    _register_specs(lambda config: None, None)
    resolved = KVCacheLayout[layout]
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: resolved),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        model_config=SimpleNamespace(max_model_len=context, original_max_model_len=context),
        speculative_config=None,  # marks groups only
        max_in_flight_tokens=options.in_flight,
    )
    groups = utils.get_kv_cache_groups(config, dict(specs))
    block = utils._pool_bytes_per_block(config, groups)
    total = utils._max_memory_usage_bytes_from_groups(config, groups)
    assert total % block == 0
    return block, total // block, len(groups)


LAYOUTS = {"int4_asym": "BLHNC"}
GPU_CASES = [
    ("Llama-3.1-8B", {}),
    ("Llama-3.1-8B", {"tp": 2}),
    ("Llama-3.1-70B", {"tp": 16}),
    ("Llama-3.1-8B", {"skip": frozenset({0})}),
    ("Llama-3.1-8B", {"skip": frozenset({0, 1, 30, 31})}),
    ("Llama-3.1-8B", {
        "drafter": Drafter("ngram", 4),
        "settings": Int4AsymConfig(sink_tokens=33, recent_tokens=256, group_size=32),
    }),
    ("Qwen2.5-7B-Instruct-AWQ", {}),
    ("Gemma-3-4B", {}),
    ("Gemma-3-4B", {"chunk": 512, "skip": frozenset({5})}),
    ("Gemma-3-4B", {"chunk": 8192, "tp": 2}),
]


# (target, further options, method, drafts, the drafter's config)
_HEAD = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "draft_vocab_size": 32000,
}  # fmt: skip
_SMALL = {**_HEAD, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
DRAFTER_CASES = [
    ("Llama-3.1-8B", {}, "eagle3", 3, _HEAD),
    ("Llama-3.1-8B", {"tp": 2}, "draft_model", 5, _SMALL),
    ("Llama-3.1-8B", {"skip": frozenset({0})}, "draft_model", 5, _SMALL),
    ("Gemma-3-4B", {}, "eagle3", 3, {**_HEAD, "hidden_size": 2560, "num_attention_heads": 8, "num_key_value_heads": 4,
                                     "head_dim": 256}),
]  # fmt: skip


GPU_FORMATS = ("bf16", "fp8", "int8_per_token_head", "int4_per_token_head", "turboquant_4bit_nc", "turboquant_k8v4",
               "int4_asym")  # fmt: skip
GPU_MATRIX = [
    pytest.param(name, engine, fmt, id=f"{name}-{'-'.join(engine) or 'plain'}-{fmt}")
    for name, engine in GPU_CASES
    for fmt in GPU_FORMATS
    # With skipped layers vLLM's platform enlarges the pages of its own formats (test_aligned_pages), and
    # it has no turboquant for sliding windows.
    if fmt in ("bf16", "int4_asym") or not ("skip" in engine or (name[:5] == "Gemma" and fmt[:5] == "turbo"))
]


@pytest.mark.parametrize(("name", "engine", "fmt"), GPU_MATRIX)
def test_grouping_equals_vllms(name: str, engine: dict, fmt: str) -> None:
    """On a GPU's layouts: bytes per block, blocks per sequence and groups by vLLM's own functions."""
    model, options = load_model(str(MODELS_DIR / name)), EngineOptions(**engine)
    context = 20_000
    fmt_ = FORMATS[fmt]
    if fmt.startswith("turboquant"):  # the platform enlarges the pages first
        from bie_vllm_plugin.plan_pool import layer_pages

        pages, _ = layer_pages(model, fmt_, options, context)
        options = EngineOptions(**{**engine, "block_size": pages[0].tokens})
    specs = _vllm_specs(model, fmt_, options, context)
    expected = _vllm_figures(specs, LAYOUTS.get(fmt, "LBNHC"), options, context)
    pool = build_pool(model, fmt_, EngineOptions(**engine), context)
    assert (pool.block_bytes, pool.blocks_per_sequence(context), len(pool.groups)) == expected


@pytest.mark.parametrize(
    ("fmt", "name", "engine", "method", "drafts", "config"),
    [
        pytest.param(fmt, *case, id=f"{case[0]}-{case[2]}-{'-'.join(case[1]) or 'plain'}-{fmt}")
        for case in DRAFTER_CASES
        for fmt in ("bf16", "fp8", "int8_per_token_head", "int4_per_token_head", "int4_asym")
        if fmt in ("bf16", "int4_asym") or "skip" not in case[1]  # as in GPU_MATRIX
    ],
)
def test_grouping_with_a_drafter_equals_vllms(
    tmp_path: Path, fmt: str, name: str, engine: dict, method: str, drafts: int, config: dict
) -> None:
    """Bodies, windows and drafter in one pool: bytes per block, blocks per sequence and groups."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(str(MODELS_DIR / name))
    speculation = {"method": method, "model": str(tmp_path), "num_speculative_tokens": drafts}
    drafter = load_drafter(speculation, model, engine.get("tp", 1))
    assert not drafter_refusal(drafter, model, FORMATS[fmt])
    options = EngineOptions(**engine, drafter=drafter)
    context = 20_000
    specs = _vllm_specs(model, FORMATS[fmt], options, context)
    expected = _vllm_figures(specs, LAYOUTS.get(fmt, "LBNHC"), options, context)
    pool = build_pool(model, FORMATS[fmt], options, context)
    assert (pool.block_bytes, pool.blocks_per_sequence(context), len(pool.groups)) == expected
    without = build_pool(model, FORMATS[fmt], EngineOptions(**engine), context)
    assert pool.sequence_bytes(context) > without.sequence_bytes(context)


def test_window_and_body_are_the_plugins() -> None:
    """R, sinks and page sizes of the planner are those of the plugin's specs."""
    import torch

    from bie_vllm_plugin.cache_spec import body_spec, retained_tokens, window_spec
    from bie_vllm_plugin.plan_pool import layer_pages

    model = load_model(str(MODELS_DIR / "Llama-3.1-8B"))
    lookup = Drafter("ngram", 3)
    draft = Drafter("draft_model", 3, layers=model.layers[:2])
    head = Drafter("eagle3", 3, layers=model.layers[:1], drops=True)
    for window_settings, drafter in itertools.product(
        ({}, {"sink_tokens": 0}, {"sink_tokens": 64, "recent_tokens": 999}, {"prefix_hits": "strict"}),
        (lookup, draft, head),
    ):
        settings = Int4AsymConfig(**window_settings)
        options = EngineOptions(settings=settings, drafter=drafter)
        pages, outermost = layer_pages(model, FORMATS["int4_asym"], options, 5000)
        assert outermost
        body, window = pages[0], next(page for page in pages if page.kind == "window")
        extra = _window_of_drafter(drafter)
        spec = window_spec(settings, 8, 128, 128, torch.bfloat16, 3, 0, batches=options.batches, **extra)
        retained = retained_tokens(settings.recent_tokens, 3, extra.get("dropped", 0))
        assert window.window == retained == spec.sliding_window
        assert (window.tokens, window.page_bytes) == (spec.block_size, spec.page_size_bytes)
        assert window.sink_pages == spec.sink_pages
        for tokens in (1, 15, 16, 17, 100, 300, 5000):
            assert window.pages(tokens, 0) == spec.pages_held(tokens)
            assert window.pages(tokens, 0) + window.peak_extra(tokens, 0) == spec.peak_pages
        packed = body_spec(settings.page_layout(128), 8)
        assert (body.tokens, body.page_bytes) == (packed.block_size, packed.page_size_bytes)


def test_aligned_pages() -> None:
    """The page size for skipped layers is what vLLM's platform computes for turboquant."""
    from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig

    from bie_vllm_plugin.plan_pool import layer_pages

    model = load_model(str(MODELS_DIR / "Llama-3.1-8B"))
    for name in ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"):
        slot = TurboQuantConfig.from_cache_dtype(name, 128).slot_size_aligned
        pages, _ = layer_pages(model, FORMATS[name], EngineOptions(), 5000)
        packed = next(page for page in pages if page.packing.startswith(name))
        assert packed.page_bytes == packed.tokens * 8 * slot
        # vLLM's rule: whole kernel blocks of 16 until a packed page covers 16 tokens in 16 bits.
        needed = 16 * 8 * 256 * 2
        assert packed.page_bytes >= needed > packed.page_bytes - 16 * 8 * slot
        assert sum(page.packing.startswith("auto") for page in pages) == 4


if __name__ == "__main__":
    source = Path(sys.argv[1])
    out = []
    for one in json.loads(source.read_text()):
        try:
            out.append(_engine_figures(one))
        except Exception as error:
            if "pool" not in one:
                raise
            out.append({"error": str(error)})
        print(one, out[-1], flush=True)
    (source.parent / "figures.json").write_text(json.dumps(out))
