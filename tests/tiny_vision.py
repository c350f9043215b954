# SPDX-License-Identifier: Apache-2.0
"""A tiny random Idefics3 (SmolVLM's design) with its processor, and tiny LoRA adapters, made offline."""
from __future__ import annotations

import json
from pathlib import Path

from tiny_models import COMMON, add_tokenizer, sharpen

IMAGE_SIZE, PATCH, SCALE = 224, 14, 2
FEATURES = (IMAGE_SIZE // PATCH // SCALE) ** 2
IMAGE_TOKENS = FEATURES + 3
"""Positions that one image takes in the cache: its features and three marks around them."""


def tiny_idefics(folder: Path) -> tuple[str, int]:
    """Make the model; returns its folder and the id of the image token."""
    import torch
    from transformers import (
        AutoTokenizer,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3Processor,
        LlamaConfig,
    )
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(add_tokenizer(str(folder)))
    tokenizer.add_special_tokens({"additional_special_tokens": [
        "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>",
    ]})  # fmt: skip
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    torch.manual_seed(0)
    text = LlamaConfig(**{**COMMON, "head_dim": 64, "attention_bias": True})
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
              "image_size": IMAGE_SIZE, "patch_size": PATCH}  # fmt: skip
    config = Idefics3Config(
        text_config=text.to_dict(), vision_config=vision, image_token_id=image_token, scale_factor=SCALE,
        tie_word_embeddings=False, pad_token_id=2,
    )  # fmt: skip
    model = Idefics3ForConditionalGeneration(config).float()
    sharpen(model)
    model.save_pretrained(folder)
    edge = {"longest_edge": IMAGE_SIZE}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    Idefics3Processor(image_processor=images, tokenizer=tokenizer, image_seq_len=FEATURES).save_pretrained(folder)
    return str(folder), image_token


def tiny_adapter(folder: Path, seed: int, *, layers: int = 3, hidden: int = 256, outputs: dict[str, int]) -> str:
    """A LoRA adapter of rank 8 with random weights, in PEFT's file format. Returns its folder.

    Args:
        outputs: projection -> its output features.
    """
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(layers):
        for name, size in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(8, hidden, generator=generator) * 0.1
            weights[f"{prefix}.lora_B.weight"] = torch.randn(size, 8, generator=generator) * 0.1
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": list(outputs), "bias": "none",
        "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "fan_in_fan_out": False, "lora_dropout": 0.0,
    }))  # fmt: skip
    return str(folder)
