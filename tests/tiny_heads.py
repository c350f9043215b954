# SPDX-License-Identifier: Apache-2.0
"""Tiny heads that draft from a target's hidden states: EAGLE, EAGLE-3 and MTP."""
from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def tiny_eagle3(folder: Path, target: str, *, layers: int = 1, seed: int = 0) -> str:
    """A random EAGLE-3 head for a model of `tiny_llama`; returns its folder.

    It guesses that the token before last comes again: the target's embedding of it passes
    through, bent a little by the head's own attention. Random models go in circles, so some
    drafts are accepted and some are not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((Path(target) / "config.json").read_text())
    hidden = config["hidden_size"]
    config.update(
        architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=layers, attention_bias=False,
        draft_vocab_size=config["vocab_size"], target_hidden_size=hidden,
        # Read here by vLLM 0.32 and there by 0.33's V2 runner; three distinct layers, as fc has three parts.
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, eagle_aux_hidden_state_layer_ids=[0, 1, 2],
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(*shape, generator=generator) * 0.1
    base = load_file(Path(target) / "model.safetensors")
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    weights = {
        "fc.weight": torch.cat([200 * torch.eye(hidden), torch.zeros(hidden, 2 * hidden)], 1),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": base["model.embed_tokens.weight"],
        "embed_tokens.weight": base["model.embed_tokens.weight"],
    }
    for layer in range(layers):
        name = f"layers.{layer}."
        wide = 2 * hidden if layer == 0 else hidden  # the first layer sees the embedding beside the state
        weights |= {
            name + "self_attn.q_proj.weight": random(queries, wide),
            name + "self_attn.k_proj.weight": random(keys, wide),
            name + "self_attn.v_proj.weight": random(keys, wide),
            name + "self_attn.o_proj.weight": random(hidden, queries) * 0.3,
            name + "mlp.gate_proj.weight": random(config["intermediate_size"], hidden),
            name + "mlp.up_proj.weight": random(config["intermediate_size"], hidden),
            name + "mlp.down_proj.weight": random(hidden, config["intermediate_size"]) * 0.1,
            name + "input_layernorm.weight": torch.ones(hidden),
            name + "hidden_norm.weight": torch.ones(hidden),
            name + "post_attention_layernorm.weight": torch.ones(hidden),
        }
    save_file({name: weight.contiguous().clone() for name, weight in weights.items()}, folder / "model.safetensors")
    return str(folder)


def tiny_eagle(folder: Path, target: str) -> str:
    """An EAGLE (first version) head made of the target's last layer; it guesses that the last token comes again."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((Path(target) / "config.json").read_text())
    base = load_file(Path(target) / "model.safetensors")
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    weights = {"layers.0." + name.removeprefix(last): weight for name, weight in base.items() if name.startswith(last)}
    del weights["layers.0.input_layernorm.weight"]  # EAGLE's first layer has none
    weights["layers.0.self_attn.o_proj.weight"] = weights["layers.0.self_attn.o_proj.weight"] * 0.1
    weights["embed_tokens.weight"] = base["model.embed_tokens.weight"]
    hidden = config["hidden_size"]
    weights["fc.weight"] = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], 1)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    save_file({name: weight.contiguous().clone() for name, weight in weights.items()}, folder / "model.safetensors")
    return str(folder)


def tiny_mimo(folder: Path) -> str:
    """A random model with one MTP layer (MiMo: Qwen2 and a predictor), biased keys included."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=8192, tie_word_embeddings=False, bos_token_id=0,
            eos_token_id=1,
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj.weight" in name or "k_proj.weight" in name or "lm_head" in name:
                parameter.mul_(4.0)
            elif "k_proj.bias" in name:
                parameter.normal_(0, 1.0)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    predictor, last = "model.mtp_layers.0.", "model.layers.3."
    weights |= {name.replace(last, predictor): w.clone() for name, w in weights.items() if name.startswith(last)}
    for norm in ("token", "hidden", "final"):
        weights[f"{predictor}{norm}_layernorm.weight"] = torch.ones(256)
    weights[predictor + "input_proj.weight"] = torch.cat([0.5 * torch.eye(256), torch.eye(256)], 1)
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config.update(architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
