# SPDX-License-Identifier: Apache-2.0
"""A tiny random LLaVA with its processor, and tiny LoRA adapters, made offline."""
from __future__ import annotations

import json
from pathlib import Path

from tiny_models import COMMON, add_tokenizer, sharpen

IMAGE_TOKEN = "<image>"
IMAGE_SIZE, PATCH = 112, 14
IMAGE_TOKENS = (IMAGE_SIZE // PATCH) ** 2
"""Positions that one image takes in the cache."""


def tiny_llava(folder: Path) -> tuple[str, int]:
    """Make the model; returns its folder and the id of the image token."""
    import torch
    from transformers import (
        AutoTokenizer,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(add_tokenizer(str(folder)))
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN]})
    image_token = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    torch.manual_seed(0)
    config = LlavaConfig(
        text_config=LlamaConfig(**{**COMMON, "head_dim": 64, "attention_bias": True}),
        vision_config=CLIPVisionConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=IMAGE_SIZE,
            patch_size=PATCH, projection_dim=64,
        ),
        image_token_index=image_token, vision_feature_layer=-1, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlavaForConditionalGeneration(config).float()
    sharpen(model)
    model.save_pretrained(folder)
    images = CLIPImageProcessorPil(
        size={"shortest_edge": IMAGE_SIZE}, crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    )
    LlavaProcessor(
        image_processor=images, tokenizer=tokenizer, patch_size=PATCH, vision_feature_select_strategy="default",
        image_token=IMAGE_TOKEN, num_additional_image_tokens=1,
    ).save_pretrained(folder)  # fmt: skip
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
