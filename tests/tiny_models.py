# SPDX-License-Identifier: Apache-2.0
"""A catalogue of tiny random models, one per attention shape, layer pattern and model kind that people serve.

Each is made from its `transformers` configuration (no Hub) and sharpened, so that
attention matters and an error of one position shows.
"""
from __future__ import annotations

import json
from pathlib import Path

VOCAB = 512
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
_MOE = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 128}
_TIED = {"tie_word_embeddings": True}  # vLLM knows these models only so
_ALTERNATE = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def _llama(**extra) -> tuple[str, dict]:
    return "LlamaConfig", {"head_dim": 64, "attention_bias": True, **extra}


CATALOGUE: dict[str, tuple[str, dict]] = {
    # attention shapes
    "mha": _llama(num_key_value_heads=4),
    "gqa": _llama(num_attention_heads=8),
    "mqa": _llama(num_key_value_heads=1),
    **{f"head {d}": _llama(head_dim=d) for d in (80, 96, 112, 128, 192, 256)},
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 64}),
    "gemma": ("GemmaConfig", {"head_dim": 128, "hidden_act": "gelu_pytorch_tanh"}),
    "stablelm": ("StableLmConfig", {"partial_rotary_factor": 0.25}),
    "phi": ("PhiConfig", {"partial_rotary_factor": 0.5}),
    "phi3": ("Phi3Config", {}),
    "glm4": ("Glm4Config", {"head_dim": 64, "partial_rotary_factor": 0.5, "attention_bias": True}),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.2, "residual_multiplier": 0.8, "logits_scaling": 2.0}),
    "opt": ("OPTConfig", {"ffn_dim": 512, "word_embed_proj_dim": 256, "do_layer_norm_before": True}),
    "gpt2": ("GPT2Config", {"n_embd": 256, "n_head": 4, "n_layer": 3, "n_positions": 2048}),
    # layer patterns
    "gemma2": ("Gemma2Config", {"head_dim": 64, "sliding_window": 64, "num_hidden_layers": 4,
                                "query_pre_attn_scalar": 64, "attn_logit_softcapping": 8.0,
                                "final_logit_softcapping": 30.0, "layer_types": _ALTERNATE, **_TIED}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 64, "sliding_window": 64, "num_hidden_layers": 4,
                                    "layer_types": _ALTERNATE, "query_pre_attn_scalar": 64}),
    # Ten INT4 pages are as wide as 2.8 windowed ones (fp32, CPU: 32 tokens): padded until three fit.
    "gemma3 padded": ("Gemma3TextConfig", {"head_dim": 64, "sliding_window": 64, "num_hidden_layers": 13,
                                           "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 3
                                           + ["full_attention"] * 8, "query_pre_attn_scalar": 64}),
    "mistral windowed": ("MistralConfig", {"head_dim": 64, "sliding_window": 96}),
    "mistral": ("MistralConfig", {"head_dim": 64, "sliding_window": None}),
    "cohere": ("CohereConfig", {"use_qk_norm": False, "logit_scale": 1.0, **_TIED}),
    "cohere2": ("Cohere2Config", {"sliding_window": 64, "num_hidden_layers": 4, "layer_types": _ALTERNATE,
                                  "logit_scale": 1.0, **_TIED}),
    "exaone4": ("Exaone4Config", {"sliding_window": 64, "sliding_window_pattern": "LG", "num_hidden_layers": 4,
                                  "layer_types": _ALTERNATE}),
    "olmo3": ("Olmo3Config", {"sliding_window": 64, "num_hidden_layers": 4, "layer_types": _ALTERNATE}),
    # model kinds
    "mixtral": ("MixtralConfig", {**_MOE, "head_dim": 64}),
    "qwen3 moe": ("Qwen3MoeConfig", {**_MOE, "head_dim": 64, "decoder_sparse_step": 1, "mlp_only_layers": []}),
    "olmoe": ("OlmoeConfig", {**_MOE}),
}  # fmt: skip


def config_of(name: str):
    """The `transformers` configuration of a catalogue entry."""
    import transformers

    kind, extra = CATALOGUE[name]
    return getattr(transformers, kind)(**{**COMMON, **extra})


def tiny_model(folder: Path, name: str, seed: int = 0) -> str:
    """Make catalogue entry `name` under `folder` and return its path."""
    import torch
    from transformers import AutoModelForCausalLM

    path = folder / name.replace(" ", "-")
    if (path / "config.json").exists():
        return str(path)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(name), dtype=torch.float32)
    sharpen(model)
    model.save_pretrained(path)
    return str(path)


def sharpen(model) -> None:
    """Attention neither uniform nor one-hot, keys with per-channel offsets, logits far apart."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            leaf = name.removesuffix(".weight")
            if name.endswith(".bias"):
                if "k_proj" in name or "query_key_value" in name:
                    parameter.normal_(0, 1.0)
            elif any(part in leaf for part in ("q_norm", "k_norm")):
                parameter.mul_(2.0).add_(0.5)
            elif any(part in leaf for part in ("q_proj", "k_proj", "qkv", "query_key_value", "c_attn", "lm_head")):
                parameter.mul_(4.0)


def config_only(folder: Path, **config) -> str:
    """A model folder with nothing but a config.json, for what is refused before loading."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def add_tokenizer(folder: str) -> str:
    """A byte-level tokenizer for a model of the catalogue: one token a byte, special ones first. Returns the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "</s>", "<pad>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1], pad_token=special[2]
    )
    fast.save_pretrained(folder)
    return folder
