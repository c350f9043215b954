# SPDX-License-Identifier: Apache-2.0
"""Bad input: one sentence that names the setting, the value and what is allowed, at configuration time."""
from __future__ import annotations

import json
import logging
import subprocess
import sys
import textwrap

import pytest
from tiny_models import config_only

from bie_vllm_plugin.config import Int4AsymConfig

BAD_SETTINGS = {
    "unknown key": ({"sinks": 4}, ["int4_asym.sinks=4", "is not a setting", "sink_tokens, recent_tokens"]),
    "wrong type": ({"sink_tokens": "8"}, ["int4_asym.sink_tokens='8'", "integer"]),
    "float": ({"recent_tokens": 128.5}, ["int4_asym.recent_tokens=128.5", "integer"]),
    "bool": ({"sink_tokens": True}, ["int4_asym.sink_tokens=True", "integer"]),
    "negative sink": ({"sink_tokens": -1}, ["int4_asym.sink_tokens=-1", "from 0 to 64"]),
    "sink beyond a page": ({"sink_tokens": 65}, ["int4_asym.sink_tokens=65", "from 0 to 64"]),
    "window below a page": ({"recent_tokens": 63}, ["recent_tokens=63", "at least 64", "key_axis='head_dim'"]),
    "negative window": ({"recent_tokens": -5, "key_axis": "head_dim"}, ["recent_tokens=-5", "negative"]),
    "group size": ({"group_size": 128}, ["int4_asym.group_size=128", "64, 32"]),
    "key axis": ({"key_axis": "token"}, ["int4_asym.key_axis='token'", "'channel' or 'head_dim'"]),
    "prefix hits": ({"prefix_hits": "exact"}, ["int4_asym.prefix_hits='exact'", "'relaxed' or 'strict'"]),
    "not a mapping": ([1, 2], ["additional_config['int4_asym']=[1, 2]", "mapping", "prefix_hits"]),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_settings(case):
    raw, words = BAD_SETTINGS[case]
    with pytest.raises(ValueError) as error:
        Int4AsymConfig.parse(raw)
    message = str(error.value)
    assert all(word in message for word in words), message
    assert message.count("\n") == 0 and message.endswith(".") and len(message) < 300


def test_good_settings_are_frozen_and_complete():
    config = Int4AsymConfig.parse({"recent_tokens": 0, "key_axis": "head_dim", "sink_tokens": 0, "group_size": 32})
    assert config.model_dump() == {
        "sink_tokens": 0, "recent_tokens": 0, "group_size": 32, "key_axis": "head_dim", "prefix_hits": "relaxed",
    }  # fmt: skip
    assert Int4AsymConfig.parse(None) == Int4AsymConfig() and Int4AsymConfig.parse(config) is config
    with pytest.raises(ValueError):
        config.sink_tokens = 4


ON_PLATFORM = """
import vllm.platforms as platforms
from vllm.platforms.interface import Platform, PlatformEnum
class Other(Platform):
    _enum, device_name, device_type = PlatformEnum.{enum}, "{name}", "{kind}"
platforms.current_platform = Other()
import bie_vllm_plugin
bie_vllm_plugin._state["registered"] = False
bie_vllm_plugin.register()
"""
"""For who asks from here on; last, since modules imported then would keep it."""

# What is refused when the engine's configuration is made: name -> (extra code, arguments, words of the sentence).
BAD_ENGINES = {
    "settings": ("", {"additional_config": {"int4_asym": {"sinks": 1}}}, ["int4_asym.sinks=1"]),
    "block size": ("", {"block_size": 32}, ["--block-size 32", "64 tokens", "leave the flag out"]),
    "no hybrid manager": ("", {"disable_hybrid_kv_cache_manager": True}, ["--disable-hybrid-kv-cache-manager"]),
    "connector": (
        "from vllm.config import KVTransferConfig\n"
        "extra['kv_transfer_config'] = KVTransferConfig(kv_connector='ExampleConnector', kv_role='kv_both')",
        {}, ["--kv-transfer-config", "'ExampleConnector'"],
    ),
    "offloading": ("", {"kv_offloading_size": 1.0}, ["--kv-offloading-size 1.0"]),
    "attention backend": ("", {"attention_backend": "TRITON_ATTN"}, ["--attention-backend TRITON_ATTN"]),
    "batch invariant": (
        "import os, vllm.envs as envs; envs.VLLM_BATCH_INVARIANT = True", {}, ["VLLM_BATCH_INVARIANT=1", "unset it"],
    ),
    "custom slot": (
        "from vllm.v1.attention.backends.registry import register_backend, AttentionBackendEnum\n"
        "register_backend(AttentionBackendEnum.CUSTOM, 'other.plugin.Backend')",
        {}, ["CUSTOM", "other.plugin.Backend", "VLLM_PLUGINS"],
    ),
    "decode context parallel": (
        "", {"model": "MQA", "tensor_parallel_size": 2, "decode_context_parallel_size": 2,
             "distributed_executor_backend": "mp"},
        ["--decode-context-parallel-size 2"],
    ),
    "prefill context parallel": (
        "", {"prefill_context_parallel_size": 2, "distributed_executor_backend": "mp"},
        ["--prefill-context-parallel-size 2"],
    ),
    "backend per kind": (
        "", {"attention_config": {"backend_per_kind": {"full_attention": "CPU_ATTN"}}}, ["backend_per_kind"],
    ),
    "kv scheme": (
        "", {"hf_overrides": {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic",
                                                      "kv_cache_scheme": {"num_bits": 8}}}},
        ["KV-cache scheme of its own", "num_bits"],
    ),
    "LMCache": (
        "from vllm.config import KVTransferConfig\n"
        "extra['kv_transfer_config'] = KVTransferConfig(kv_connector='LMCacheConnectorV1', kv_role='kv_both')",
        {}, ["--kv-transfer-config", "'LMCacheConnectorV1'", "another --kv-cache-dtype"],
    ),
    "disaggregated prefill": (
        "from vllm.config import KVTransferConfig\n"
        "extra['kv_transfer_config'] = KVTransferConfig(kv_connector='NixlConnector', kv_role='kv_producer')",
        {}, ["--kv-transfer-config", "'NixlConnector'"],
    ),
    "offloading to LMCache": (
        "", {"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"},
        ["--kv-offloading-size 1.0", "leave it out or use another"],
    ),
    "dual batch overlap": ("", {"enable_dbo": True}, ["--enable-dbo", "micro-batches", "leave the flag out"]),
    "micro-batches": ("", {"ubatch_size": 2}, ["--ubatch-size 2", "micro-batches"]),
    "drafter with a cache in 8 bits": (
        "", {"speculative_config": {"method": "draft_model", "model": "MODEL", "num_speculative_tokens": 2,
                                    "kv_cache_dtype": "fp8"}},
        ["speculative_config.kv_cache_dtype='fp8'", "set it to 'auto'"],
    ),
    "parallel drafting": (
        "", {"speculative_config": {"method": "draft_model", "model": "MODEL", "num_speculative_tokens": 2,
                                    "parallel_drafting": True}},
        ["speculative_config.parallel_drafting", "one token after the other"],
    ),
    "drafter with windows": (
        "", {"speculative_config": {"method": "draft_model", "model": "WINDOWED", "num_speculative_tokens": 2}},
        ["sliding-window layers", "full attention only"],
    ),
    "draft model beside windows": (
        "", {"model": "WINDOWED",
             "speculative_config": {"method": "draft_model", "model": "MODEL", "num_speculative_tokens": 2}},
        ["a draft model does not go with", "sliding window", "method ngram"],
    ),
    "adaptive verification": (
        "", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3,
                                    "enable_adaptive_verification": True}},
        ["speculative_config.enable_adaptive_verification", "leave it out"],
    ),
    "draft model in another layout": (
        "envs.VLLM_KV_CACHE_LAYOUT = 'LBHNC'",
        {"speculative_config": {"method": "draft_model", "model": "MODEL", "num_speculative_tokens": 2}},
        ["needs the cache layout BLHNC, not VLLM_KV_CACHE_LAYOUT=LBHNC", "unset VLLM_KV_CACHE_LAYOUT"],
    ),
    "several MTP modules": (
        "", {"model": "TWO_MTP", "speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
        ["2 speculative tokens of several MTP modules", "num_speculative_tokens to 1"],
    ),
    "draft model with latent attention": (
        "", {"speculative_config": {"method": "draft_model", "model": "MLA", "num_speculative_tokens": 2}},
        ["the draft model", "uses multi-head latent attention", "method ngram"],
    ),
    "draft model with state-space layers": (
        "", {"speculative_config": {"method": "draft_model", "model": "HYBRID", "num_speculative_tokens": 2}},
        ["the draft model", "uses state-space or linear-attention layers", "method ngram"],
    ),
    "draft model without attention": (
        "", {"speculative_config": {"method": "draft_model", "model": "MAMBA", "num_speculative_tokens": 2}},
        ["the draft model", "uses no attention", "method ngram"],
    ),
    "draft model with shared caches": (
        "", {"speculative_config": {"method": "draft_model", "model": "SHARED", "num_speculative_tokens": 2}},
        ["the draft model", "uses the KV cache of other layers", "method ngram"],
    ),
    "draft head that reads its target's cache": (
        "", {"speculative_config": {"method": "mtp", "model": "ASSISTANT", "num_speculative_tokens": 1}},
        ["the draft model", "uses the KV cache of other layers", "method ngram"],
    ),
    "medusa": (
        "", {"speculative_config": {"method": "medusa", "model": "MEDUSA", "num_speculative_tokens": 2}},
        ["'medusa'", "draft_model, eagle, eagle3, mtp, ngram"],
    ),
    **{
        name: (
            ON_PLATFORM.format(enum=enum, name=device, kind=kind), {},
            ["--kv-cache-dtype int4_asym runs on NVIDIA GPUs and CPUs", f"not on {device or kind}",
             "--kv-cache-dtype auto"],
        )
        for name, enum, device, kind in (
            ("ROCm", "ROCM", "rocm", "cuda"), ("XPU", "XPU", "xpu", "xpu"), ("TPU", "TPU", "", "tpu"),
            ("a platform of a plugin", "OOT", "npu", "npu"),
        )
    },
}  # fmt: skip

# Accepted: name -> (extra code, arguments).
GOOD_ENGINES = {
    "n-gram drafts on the GPU": (
        "", {"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
    ),
    **{
        f"settings {settings}": ("", {"additional_config": {"int4_asym": settings}})
        for settings in (
            {"sink_tokens": 4, "recent_tokens": 256}, {"recent_tokens": 256, "sink_tokens": 4},
            {"sink_tokens": 4, "recent_tokens": 192}, {"sink_tokens": 0, "recent_tokens": 256},
            {"group_size": 32}, {"key_axis": "head_dim"}, {"prefix_hits": "strict"}, {},
        )
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def refusals(model_64, model_1kv, tmp_path_factory) -> dict[str, str]:
    """The message of every case, one process for all of them (each makes a configuration, no engine)."""
    base = tmp_path_factory.mktemp("models")
    small = {
        "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "vocab_size": 512, "intermediate_size": 128, "torch_dtype": "float32", "max_position_embeddings": 512,
    }  # fmt: skip
    folders = {
        "MODEL": model_64,
        "MQA": model_1kv,
        "WINDOWED": config_only(
            base / "mistral", architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=64, **small
        ),
        "TWO_MTP": config_only(
            base / "mimo", architectures=["MiMoForCausalLM"], model_type="qwen2", num_nextn_predict_layers=2, **small
        ),
        "MLA": config_only(
            base / "deepseek", architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", kv_lora_rank=64,
            q_lora_rank=None, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32, n_routed_experts=4, **small
        ),
        "HYBRID": config_only(
            base / "lfm2", architectures=["Lfm2ForCausalLM"], model_type="lfm2",
            layer_types=["conv", "full_attention"], **small
        ),
        "MAMBA": config_only(base / "mamba", architectures=["MambaForCausalLM"], model_type="mamba", **small),
        "SHARED": config_only(
            base / "gemma4", architectures=["Gemma4ForCausalLM"], model_type="gemma4_text", head_dim=64,
            num_kv_shared_layers=1, layer_types=["full_attention"] * 2, **small
        ),
        "ASSISTANT": config_only(
            base / "assistant", architectures=["Gemma4AssistantForCausalLM"], model_type="gemma4_assistant",
            text_config={
                "model_type": "gemma4_text", "head_dim": 64, "layer_types": ["full_attention"] * 2,
                "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 2, **small
            },
        ),
        "MEDUSA": config_only(base / "medusa", architectures=["MedusaModel"], model_type="medusa", **small),
    }
    parts = [
        "import json, traceback",
        "from vllm.engine.arg_utils import EngineArgs",
        "from vllm.v1.attention.backends import registry",
        "import vllm.envs as envs, vllm.platforms",
        "results = {}",
    ]
    for name, (code, arguments, *_) in (GOOD_ENGINES | BAD_ENGINES).items():
        text = json.dumps(arguments)
        for placeholder, folder in folders.items():
            text = text.replace(f'"{placeholder}"', json.dumps(folder))
        arguments = json.loads(text)
        body = textwrap.indent(
            f"extra = dict({arguments!r})\n{code}\n"
            f"extra.setdefault('model', {model_64!r})\n"
            "engine = EngineArgs(kv_cache_dtype='int4_asym', skip_tokenizer_init=True, **extra)"
            f".create_engine_config()\nresults[{name!r}] = 'accepted ' + engine.compute_hash()",
            "    ",
        )
        parts.append(
            f"try:\n{body}\nexcept Exception as error:\n    results[{name!r}] = str(error)\n"
            "registry._ATTN_OVERRIDES.clear(); vllm.platforms.__dict__.pop('current_platform', None)\n"
            "for name in ('VLLM_BATCH_INVARIANT', 'VLLM_KV_CACHE_LAYOUT'): envs.__dict__.pop(name, None)"
        )
    parts.append("print('RESULTS' + json.dumps(results))")
    done = subprocess.run([sys.executable, "-c", "\n".join(parts)], capture_output=True, text=True, timeout=300)
    assert "RESULTS" in done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.split("RESULTS")[1])


@pytest.mark.parametrize("case", BAD_ENGINES)
def test_bad_engine_configurations(refusals, case):
    message, words = refusals[case], BAD_ENGINES[case][2]
    assert all(word in message for word in words), message
    # pydantic wraps a validator's ValueError; the sentence itself is one line.
    assert len([line for line in message.splitlines() if words[0] in line]) == 1


@pytest.mark.parametrize("case", GOOD_ENGINES)
def test_good_engine_configurations(refusals, case):
    assert refusals[case].startswith("accepted ")


def test_settings_enter_the_key_of_the_compile_cache(refusals):
    """vLLM names its folder of compiled graphs by this hash of the configuration."""
    keys = [refusals[case] for case in GOOD_ENGINES if case.startswith("settings")]
    assert len(keys) == 8 and keys[0] == keys[1] and len(set(keys)) == 7


LAYER_FEATURES = {
    "ALiBi": ({"alibi_slopes": [0.5]}, "ALiBi"),
    "learnable sinks": ({"sinks": [0.0]}, "learnable attention sinks"),
    "sliding window": ({"sliding_window": 64}, "--kv-cache-dtype-skip-layers sliding_window"),
    "encoder": ({"attn_type": "encoder_only"}, "decoder self-attention only"),
    "shared cache": ({"kv_sharing_target_layer_name": "model.layers.0"}, "share another layer's KV cache"),
    "unknown option": ({"chunk_lookback": 3}, "'chunk_lookback'"),
}


@pytest.mark.parametrize("case", LAYER_FEATURES)
def test_layer_features_are_refused_at_construction(case):
    from bie_vllm_plugin.backend import Int4AsymImpl

    extra, word = LAYER_FEATURES[case]
    arguments = {
        "num_heads": 4, "head_size": 64, "scale": 0.125, "num_kv_heads": 2, "alibi_slopes": None,
        "sliding_window": None, "kv_cache_dtype": "int4_asym",
    }  # fmt: skip
    with pytest.raises(ValueError, match="int4_asym") as error:
        Int4AsymImpl(**{**arguments, **extra})
    assert word in str(error.value)


def built(layer_class=None, backend=None, dtype="int4_asym", window=None):
    """A constructed attention layer as vLLM's forward context holds it, of a model that may do things its own way."""
    from vllm.model_executor.layers.attention import Attention

    from bie_vllm_plugin.backend import Int4AsymBackend

    layer = object.__new__(layer_class or Attention)
    layer.__dict__.update(
        attn_type="decoder", kv_cache_dtype=dtype, attn_backend=backend or Int4AsymBackend, sliding_window=window
    )
    return layer


def config_with(layer, skip=()):
    from types import SimpleNamespace as Namespace

    return Namespace(
        compilation_config=Namespace(static_forward_context={"model.layers.3.self_attn.attn": layer}),
        speculative_config=None, cache_config=Namespace(kv_cache_dtype_skip_layers=list(skip)),
    )  # fmt: skip


def test_built_layers():
    """What no check was asked about is found when the layers exist: foreign backends, special layers, lost settings."""
    from vllm.model_executor.layers.attention import ChunkedLocalAttention
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from bie_vllm_plugin.checks import check_built_layers

    assert check_built_layers(config_with(built())) == 1
    assert check_built_layers(config_with(built(dtype="auto"), skip=["3"])) == 0
    assert check_built_layers(config_with(built(dtype="auto", window=64), skip=["sliding_window"])) == 0
    for layer, words in (
        (built(backend=CPUAttentionBackend), ["layers.3", "CPU_ATTN", "cannot replace"]),
        (built(layer_class=ChunkedLocalAttention), ["ChunkedLocalAttention", "cannot replace"]),
        (built(dtype="auto"), ["without its cache settings", "--kv-cache-dtype int4_asym"]),
        (built(dtype="auto", window=64), ["without its cache settings"]),
    ):
        with pytest.raises(ValueError, match="another --kv-cache-dtype") as error:
            check_built_layers(config_with(layer))
        assert all(word in str(error.value) for word in words), error.value


DRAFTER_LAYERS = {
    "plain": ({}, None),
    "the target's cache": (
        {"kv_sharing_target_layer_name": "model.layers.3.self_attn.attn"},
        "draft.layers.0 reads the KV cache of model.layers.3.self_attn.attn, which int4_asym packs; use a draft model",
    ),
    "a window": ({"window": 64}, "draft.layers.0 is not plain full attention (SlidingWindowSpec), which int4_asym"),
    "encoder": ({"attn_type": "encoder_only"}, "draft.layers.0 is not plain full attention (Attention), which"),
}


def drafter_layer(features):
    import torch
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    layer = built(dtype="auto", backend=CPUAttentionBackend, window=features.get("window"))
    layer.__dict__.update(num_kv_heads=2, head_size=64, head_size_v=64, kv_cache_torch_dtype=torch.float32)
    layer.__dict__.update({"kv_sharing_target_layer_name": None, **features})
    return layer


@pytest.mark.parametrize("case", DRAFTER_LAYERS)
def test_layers_that_a_loader_has_changed_are_refused_as_well(case):
    """A drafter's layers are asked once more when everything is loaded."""
    from types import SimpleNamespace as Namespace

    from bie_vllm_plugin.layers import finish_layers

    features, sentence = DRAFTER_LAYERS[case]
    config = config_with(built())
    config.cache_config = Namespace(cache_dtype="auto", block_size=64, skip_page_size_padded=None)
    layer = config.compilation_config.static_forward_context["draft.layers.0"] = drafter_layer(features)
    if sentence is None:
        finish_layers(config)
        assert layer.get_kv_cache_spec.args == (layer, type(layer).get_kv_cache_spec)
    else:
        with pytest.raises(ValueError) as raised:
            finish_layers(config)
        assert sentence in str(raised.value)


@pytest.fixture
def on_cuda(monkeypatch):
    """The platform says that it is CUDA, once what looks at it while being imported is there."""
    import vllm.v1.attention.backends.flash_attn  # noqa: F401
    from vllm.platforms import current_platform

    from bie_vllm_plugin.layers import _block_outermost
    from bie_vllm_plugin.vllm_compat import full_precision_schedule

    caches = (_block_outermost, full_precision_schedule)
    [cached.cache_clear() for cached in caches]
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    yield
    [cached.cache_clear() for cached in caches]


@pytest.mark.parametrize("everything", [False, True], ids=["beside INT4 layers", "no INT4 layer"])
def test_full_precision_layers_are_scheduled_for_their_own_dtype(everything, on_cuda, monkeypatch):
    """vLLM's FlashAttention builder makes schedules for fp8 beside a quantised cache; that of our layers does not."""
    from types import SimpleNamespace as Namespace

    import torch
    from vllm.v1.attention.backends import flash_attn

    from bie_vllm_plugin import vllm_compat

    backend = flash_attn.FlashAttentionBackend
    dense = built(dtype="auto", backend=backend, window=64 if everything else None)
    config = config_with(dense, skip=["sliding_window"] if everything else ["3"])
    config.parallel_config = Namespace(pipeline_parallel_size=1)
    config.cache_config.cache_dtype = "int4_asym"
    if not everything:
        ours = config.compilation_config.static_forward_context["model.layers.4.self_attn.attn"] = built()
    monkeypatch.setattr("bie_vllm_plugin.checks.check_built_layers", lambda config: int(not everything))
    dense.int4_asym_target = True
    vllm_compat._update_block_size(lambda config: None, config)
    builder = dense.attn_backend.get_builder_cls()
    assert dense.attn_backend.get_name() == "FLASH_ATTN" and issubclass(dense.attn_backend, backend)
    assert dense.attn_backend.full_cls_name() != backend.full_cls_name()
    assert everything or ours.attn_backend.get_name() == "CUSTOM"  # its own builder

    cache_config = Namespace(cache_dtype="fp8")
    members = {"num_heads_q": 4, "num_heads_kv": 2, "headdim": 64, "block_size": 64, "dcp_world_size": 1}
    members |= {"kv_cache_dtype": torch.bfloat16, "aot_sliding_window": (-1, -1), "cache_config": cache_config}
    monkeypatch.setattr(flash_attn.FlashAttentionMetadataBuilder, "__init__", lambda self: vars(self).update(members))
    monkeypatch.setattr(flash_attn.current_platform, "fp8_dtype", lambda: torch.float8_e4m3fn, raising=False)
    for cls, dtype in ((builder, torch.bfloat16), (backend.get_builder_cls(), torch.float8_e4m3fn)):
        asked = {}
        monkeypatch.setattr(flash_attn, "get_scheduler_metadata", asked.update, raising=False)
        cls()._get_scheduler_metadata(
            aot_schedule=True, batch_size=1, cu_query_lens=None, max_query_len=1, seqlens=None, max_seq_len=64,
            causal=True, max_num_splits=0,
        )  # fmt: skip
        assert asked["qkv_dtype"] == dtype
    assert cache_config.cache_dtype == "fp8"  # the engine's own is left alone


@pytest.mark.parametrize("builder", ["initialize_model", "init_tensorizer_model"])
@pytest.mark.parametrize("case", DRAFTER_LAYERS)
def test_drafters_are_refused_before_their_weights_are_read(case, builder, monkeypatch):
    """vLLM's own loaders up to where they read weights, with a drafter that its configuration does not give away."""
    from types import SimpleNamespace as Namespace

    import torch
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import base_loader, tensorizer_loader

    from bie_vllm_plugin.vllm_compat import _built_and_checked

    features, sentence = DRAFTER_LAYERS[case]
    config = config_with(built())  # the target's layer is there
    config.cache_config = Namespace(cache_dtype="auto", block_size=64, skip_page_size_padded=None)
    config.device_config, config.load_config = Namespace(device="cpu"), Namespace(device=None)
    config.quant_config, config.parallel_config = None, Namespace(tensor_parallel_size=1)
    config.kernel_config = None

    def build(vllm_config, **kwargs):
        vllm_config.compilation_config.static_forward_context["draft.layers.0"] = drafter_layer(features)
        vllm_config.compilation_config.static_forward_context["draft.experts"] = torch.nn.Linear(1, 1)  # no attention
        return torch.nn.Linear(1, 1)

    def weights(*args, **kwargs):
        raise RuntimeError("weights are read")

    module, loader = (
        (base_loader, base_loader.BaseModelLoader) if builder == "initialize_model"
        else (tensorizer_loader, tensorizer_loader.TensorizerLoader)
    )  # fmt: skip
    monkeypatch.setattr(module, builder, lambda **kwargs: _built_and_checked(build, **kwargs))
    monkeypatch.setattr(tensorizer_loader, "is_vllm_tensorized", lambda config: True)
    monkeypatch.setattr(tensorizer_loader.TensorizerLoader, "_patch_tensorizer_config", lambda self, model: None)
    kind = type("Loader", (loader,), {"load_weights": weights, "download_model": weights})
    extra = {"model_loader_extra_config": {"tensorizer_config": {"tensorizer_uri": "model.tensors"}}}
    error, words = (RuntimeError, "weights are read") if sentence is None else (ValueError, sentence)
    with pytest.raises(error) as raised:
        kind(LoadConfig(**extra)).load_model(
            vllm_config=config, model_config=Namespace(dtype=torch.float32, quantization=None)
        )
    assert words in str(raised.value) and (sentence is None or "method ngram" in str(raised.value))


def test_the_log_says_that_nothing_is_quantised(hear, caplog):
    """All layers windowed: as under `auto`, and not without a word."""
    from types import SimpleNamespace as Namespace

    from bie_vllm_plugin import vllm_compat

    hear(vllm_compat.logger, logging.WARNING)
    config = config_with(built(dtype="auto", window=64), skip=["sliding_window"])
    config.cache_config.cache_dtype, config.parallel_config = "int4_asym", Namespace(pipeline_parallel_size=1)
    seen = []
    vllm_compat._update_block_size(seen.append, config)
    assert seen == [config]  # vLLM's own block size
    (line,) = [record.getMessage() for record in caplog.records if "int4_asym" in record.getMessage()]
    assert "every layer of this worker has a sliding window or is skipped" in line and "full precision" in line


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("head_size", 100, "head_size 100"),
        ("has_sink", True, "learnable attention sinks"),
        ("use_sparse", True, "sparse attention"),
    ],
)
def test_layers_are_checked_when_they_choose_a_backend(field, value, word):
    import torch
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from bie_vllm_plugin.checks import check_layer

    good = AttentionSelectorConfig(head_size=64, dtype=torch.bfloat16, kv_cache_dtype="int4_asym", block_size=None)
    check_layer(good)
    with pytest.raises(ValueError, match=word):
        check_layer(good._replace(**{field: value}))


def test_fp32_and_foreign_layouts_are_refused_when_a_layer_chooses_its_backend(monkeypatch):
    """Both used to be found after loading, on GPUs."""
    import torch
    import vllm.platforms
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from bie_vllm_plugin.checks import check_layer

    layer = AttentionSelectorConfig(head_size=64, dtype=torch.float32, kv_cache_dtype="int4_asym", block_size=None)
    check_layer(layer)
    monkeypatch.setattr(type(vllm.platforms.current_platform), "is_cpu", lambda self: False)
    with pytest.raises(ValueError, match="--dtype float32 .* on GPUs; use --dtype bfloat16 or float16"):
        check_layer(layer)
    layer = layer._replace(dtype=torch.bfloat16)
    for layout in ("HND", "BLHNC", "LBHNC"):
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
        check_layer(layer)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "NHD")
    with pytest.raises(ValueError, match="VLLM_KV_CACHE_LAYOUT=NHD .* set it to BLHNC"):
        check_layer(layer)
