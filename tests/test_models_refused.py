# SPDX-License-Identifier: Apache-2.0
"""Models that `int4_asym` does not serve: refused with one sentence, before any weight is read.

The folders hold a config.json and nothing else, or weights that no loader can read: whoever reads them fails.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from engine import llm, run_engines
from tiny_models import COMMON, config_only

AUTO = "use --kv-cache-dtype auto"

# Refused from the configuration: name -> (transformers' configuration, architecture, fields, words of the sentence).
BY_CONFIG = {
    "MLA": (
        "DeepseekV2Config", "DeepseekV2ForCausalLM",
        {"q_lora_rank": None, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
         "moe_intermediate_size": 64, "n_routed_experts": 4},
        "multi-head latent attention",
    ),
    "encoder-decoder": (
        "WhisperConfig", "WhisperForConditionalGeneration",
        {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
        "encoder-decoder model",
    ),
    "encoder-only": ("BertConfig", "BertModel", {}, "encoder-only model"),
    "encoder-only, RoBERTa": (
        "XLMRobertaConfig", "XLMRobertaForSequenceClassification", {}, "encoder-only model",
    ),
    "hybrid, Jamba": ("JambaConfig", "JambaForCausalLM", {"num_hidden_layers": 8}, "state-space or linear-attention"),
    "hybrid, Falcon-H1": ("FalconH1Config", "FalconH1ForCausalLM", {}, "state-space or linear-attention"),
    "hybrid, Qwen3-Next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {}, "state-space or linear-attention"),
    "hybrid, LFM2": (
        "Lfm2Config", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention", "conv"]},
        "state-space or linear-attention",
    ),
    "no attention, Mamba": ("MambaConfig", "MambaForCausalLM", {}, "has no attention layers"),
    "chunked, Llama 4": (
        "Llama4TextConfig", "Llama4ForCausalLM", {"attention_chunk_size": 64, "num_local_experts": 2},
        "chunked local attention (chunk 64)",
    ),
    "sinks, gpt-oss": ("GptOssConfig", "GptOssForCausalLM", {"num_local_experts": 4}, "learnable attention sinks"),
    "ALiBi, Bloom": ("BloomConfig", "BloomForCausalLM", {"n_head": 4, "n_layer": 2}, "ALiBi"),
    "ALiBi, Falcon": ("FalconConfig", "FalconForCausalLM", {"alibi": True}, "ALiBi"),
    "KV sharing, Gemma-3n": (
        "Gemma3nTextConfig", "Gemma3nForCausalLM",
        {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "head_dim": 64,
         "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 32,
         "intermediate_size": [512] * 4, "activation_sparsity_pattern": [0.0] * 4},
        "share another layer's KV cache",
    ),
    "KV sharing, Gemma-4": (
        "Gemma4TextConfig", "Gemma4ForCausalLM",
        {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "head_dim": 64,
         "layer_types": ["sliding_attention", "full_attention"] * 2},
        "share another layer's KV cache",
    ),
    "head size 512, Gemma-4": (
        "Gemma4TextConfig", "Gemma4ForCausalLM",
        {"num_hidden_layers": 4, "head_dim": 64, "layer_types": ["sliding_attention", "full_attention"] * 2},
        "full-attention layers with heads of 512",
    ),
    "bidirectional image prefixes, PaliGemma": (
        "PaliGemmaConfig", "PaliGemmaForConditionalGeneration",
        {"text_config": {"model_type": "gemma", "head_dim": 64, **COMMON},
         "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 64, "intermediate_size": 64,
                           "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}},
        "attends to images in both directions (bidirectional multimodal prefixes)",
    ),
}  # fmt: skip

# Refused when the attention layers are constructed, or as soon as they all are.
BY_LAYER = {
    "Falcon": (
        "FalconConfig", "FalconForCausalLM", {"alibi": False}, ["without its cache settings", "--kv-cache-dtype"],
    ),
    "values of another size, MiMo-V2": (
        "MiMoV2FlashConfig", "MiMoV2FlashForCausalLM",
        {"head_dim": 64, "v_head_dim": 128, "num_hidden_layers": 2, "hybrid_layer_pattern": [0, 0],
         "moe_layer_freq": [0, 0], "layernorm_epsilon": 1e-5, "n_routed_experts": 4, "partial_rotary_factor": 0.5},
        ["layers.0.self_attn.attn (Attention)", "an attention backend of its own (TRITON_ATTN_DIFFKV)"],
    ),
    "head size 32": (
        "LlamaConfig", "LlamaForCausalLM", {"head_dim": 32}, ["head_size 32", "64, 80, 96"],
    ),
    "head size 160": (
        "LlamaConfig", "LlamaForCausalLM", {"head_dim": 160}, ["head_size 160", "64, 80, 96"],
    ),
}  # fmt: skip


def folder_of(base: Path, name: str, kind: str, architecture: str, fields: dict) -> str:
    """A model folder with the configuration that `transformers` itself writes."""
    import transformers

    common = {k: v for k, v in COMMON.items() if "bert" not in kind.lower() or k not in ("bos_token_id",)}
    config = getattr(transformers, kind)(**{**common, **fields}).to_dict()
    config.update(architectures=[architecture], dtype="float32")
    return config_only(base / name.replace(" ", "-").replace(",", ""), **json.loads(json.dumps(config, default=str)))


@pytest.fixture(scope="module")
def by_config(tmp_path_factory) -> dict[str, str]:
    """The message of every case, one process for all of them: configurations only, no engine."""
    base = tmp_path_factory.mktemp("refused")
    folders = {name: folder_of(base, name, *case[:3]) for name, case in BY_CONFIG.items()}
    code = textwrap.dedent(f"""
        import json
        from vllm.engine.arg_utils import EngineArgs
        results = {{}}
        for name, folder in {folders!r}.items():
            try:
                EngineArgs(model=folder, kv_cache_dtype="int4_asym", skip_tokenizer_init=True).create_engine_config()
                results[name] = "accepted"
            except Exception as error:
                results[name] = str(error)
        print("RESULTS" + json.dumps(results))
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    assert "RESULTS" in done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.split("RESULTS")[1])


@pytest.mark.parametrize("case", BY_CONFIG)
def test_models_refused_by_their_configuration(by_config, case):
    message = by_config[case]
    (sentence,) = [line for line in message.splitlines() if BY_CONFIG[case][3] in line] or [message]
    assert BY_CONFIG[case][3] in sentence and AUTO in sentence and "int4_asym" in message, message


TENSORIZER = '''
class TensorDeserializer:
    def __init__(self, *args, lazy_load=False, **kwargs):
        if not lazy_load:  # lazily it tells which tensors there are
            raise RuntimeError("weights are read")
    def __contains__(self, name):
        return name == ".vllm_tensorized_marker"
DecryptionParams = EncryptionParams = TensorSerializer = None
'''
"""In place of the library: a file in vLLM's own format, whose tensors nobody may read."""


@pytest.mark.engine
def test_models_refused_by_their_layers(tmp_path):
    """With the real loaders and weights that cannot be read; a model that is served gets as far as those."""
    cases = {**BY_LAYER, "served": ("LlamaConfig", "LlamaForCausalLM", {"head_dim": 64})}
    folders = {name: folder_of(tmp_path, name, *case[:3]) for name, case in cases.items()}
    for folder in folders.values():
        (Path(folder) / "model.safetensors").write_bytes(b"not weights")
        (Path(folder) / "model.tensors").write_bytes(b"")
    library = tmp_path / "library" / "tensorizer"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text(TENSORIZER)
    (library / "stream_io.py").write_text("import contextlib\nopen_stream = lambda *a, **k: contextlib.nullcontext()")
    (library / "utils.py").write_text("convert_bytes = no_init_or_tensor = str\nget_mem_usage = lambda: 0")
    engines = [llm(f, max_model_len=512) for f in folders.values()]
    engines += [llm(folders[name], max_model_len=512, load_format="tensorizer") for name in ("Falcon", "served")]
    path = os.pathsep.join(filter(None, [str(library.parent), os.environ.get("PYTHONPATH")]))
    runs = run_engines([{"llm": engine, "steps": []} for engine in engines], PYTHONPATH=path)
    *results, served, tensorized_falcon, tensorized_served = runs
    assert "header" in served["error"], served
    assert "access accelerator device" in tensorized_served["error"]  # about to read them, which wants a GPU
    for name, result in [*zip(BY_LAYER, results, strict=True), ("Falcon", tensorized_falcon)]:
        assert isinstance(result, dict), f"{name} was accepted"
        words = (*BY_LAYER[name][3], "another --kv-cache-dtype")
        assert all(word in result["error"] for word in words), (name, result["error"])
        assert result["error"].count("\n") == 0 and len(result["error"]) < 400
