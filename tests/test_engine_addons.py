# SPDX-License-Identifier: Apache-2.0
"""What vLLM leaves to packages of others: GGUF weights (vllm-gguf-plugin); suffix decoding is in test_engine_drafters.

Neither is installed with this package. Where one is missing vLLM says so itself, under `auto`
as well; where it is there (`pip install --no-deps --target DIR vllm-gguf-plugin`, DIR on
PYTHONPATH) the engine has to answer as from safetensors.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest
from engine import assert_same, generate, llm, run_engines, started, tokens
from tiny_models import tiny_model

pytestmark = pytest.mark.engine

GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def as_gguf(folder: str) -> str:
    """The Qwen2 model in `folder` as one GGUF file of fp32 tensors (quantised ones need the plugin's GPU kernels)."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((Path(folder) / "config.json").read_text())
    path = str(Path(folder) / "model.gguf")
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    for name, tensor in load_file(Path(folder) / "model.safetensors").items():
        stem, kind = name.rsplit(".", 1)
        _, _, layer, *rest = [*stem.split("."), "", ""]
        inside = stem.startswith("model.layers.")
        part = GGUF_NAMES[".".join(rest).strip(".") if inside else stem]
        writer.add_tensor(f"blk.{layer}.{part}.{kind}" if inside else f"{part}.{kind}", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm_gguf_plugin") is None, reason="GGUF weights need vllm-gguf-plugin")
def test_gguf_weights(tmp_path):
    """The same numbers as from safetensors, to the last digit: nothing but the loader differs."""
    folder = tiny_model(tmp_path, "qwen2")
    steps = [generate([tokens(n, seed=n) for n in (100, 400)])]
    file = llm(as_gguf(folder), hf_config_path=folder, tokenizer=folder, quantization="gguf", load_format="gguf")
    ((expected,),) = started(run_engines([{"llm": llm(folder), "steps": steps}]))
    ((results,),) = started(run_engines([{"llm": file, "steps": steps}]))
    assert_same(expected, results, median=1e-6, worst=1e-4, shared=1.0)


def test_without_the_packages_vllm_says_so(tmp_path):
    """Before any weight is read, and whatever the cache's dtype."""
    folder = tiny_model(tmp_path, "qwen2")
    code = textwrap.dedent(f"""
        from vllm.config import speculative
        speculative.has_arctic_inference = lambda: False
        from vllm.engine.arg_utils import EngineArgs
        for dtype in ("int4_asym", "auto"):
            for options in ({{"quantization": "gguf"}},
                            {{"speculative_config": {{"method": "suffix", "num_speculative_tokens": 3}}}}):
                try:
                    EngineArgs(model={folder!r}, kv_cache_dtype=dtype, skip_tokenizer_init=True, **options
                               ).create_engine_config()
                    print("ANSWER accepted")
                except Exception as error:
                    print("ANSWER", str(error).replace(chr(10), " ")[:300])
    """)
    env = {**os.environ, "VLLM_PLUGINS": "int4_asym", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    assert len(answers) == 4, done.stderr[-3000:]
    assert all("Unknown quantization method: gguf" in answer for answer in answers[::2]), answers
    assert all("Arctic Inference is required" in answer for answer in answers[1::2]), answers
