# SPDX-License-Identifier: Apache-2.0
"""Which models `int4_asym` refuses from their configuration alone, before anything is loaded.

What a configuration does not tell (head sizes per layer, options of a layer) is
checked when each attention layer is constructed, which is before loading too:
see `checks.check_layer` and `backend.Int4AsymImpl`.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bie_kernels.layout import HEAD_SIZES
from bie_vllm_plugin.config import DTYPE_NAME

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

LEAVE_OUT = "use --kv-cache-dtype auto"
OTHER = "use --kv-cache-dtype auto or fp8"

ALIBI_MODELS = ("bloom", "step1")
"""Model types whose positions are ALiBi biases; Falcon has a flag for it."""


def check_model(vllm_config: VllmConfig) -> None:
    """Refuse models that the format does not serve; leave sliding-window layers in the model's dtype.

    Raises:
        ValueError: one sentence that names the model, the reason and the way out.
    """
    model = vllm_config.model_config
    if model is None:
        return
    for reason, way_out in _reasons(model):
        raise ValueError(f"{model.model} {reason}; {way_out}.")
    _leave_windows(vllm_config, model)


def _reasons(model: ModelConfig) -> list[tuple[str, str]]:
    """Every reason against this model, with its way out."""
    text: Any = model.hf_text_config
    unsupported = f"which {DTYPE_NAME} does not support"
    cases: list[tuple[Any, str, str]] = [
        (model.use_mla, f"uses multi-head latent attention (MLA), {unsupported}", OTHER),
        (model.is_encoder_decoder, f"is an encoder-decoder model, {unsupported}", LEAVE_OUT),
        (
            model.attn_type == "encoder_only",
            f"is an encoder-only model, which keeps no KV cache that {DTYPE_NAME} could store",
            LEAVE_OUT,
        ),
        (
            model.is_attention_free,
            f"has no attention layers and so no KV cache that {DTYPE_NAME} could store",
            LEAVE_OUT,
        ),
        (
            model.is_hybrid,
            f"mixes attention with state-space or linear-attention layers, {unsupported} yet",
            OTHER,
        ),
        (
            model.attention_chunk_size is not None,
            f"uses chunked local attention (chunk {model.attention_chunk_size}), {unsupported} yet",
            OTHER,
        ),
        (
            model.is_mm_prefix_lm,
            f"attends to images in both directions (bidirectional multimodal prefixes), {unsupported}",
            LEAVE_OUT,
        ),
        (text.model_type == "gpt_oss", f"uses learnable attention sinks, {unsupported}", OTHER),
        (_uses_alibi(text), f"uses ALiBi position biases, {unsupported}", OTHER),
        (
            shares_caches(model),
            f"has layers that share another layer's KV cache, {unsupported} yet",
            OTHER,
        ),
        (_odd_heads(model), f"has full-attention layers with heads of {_odd_heads(model)}, {unsupported}", OTHER),
        (
            _checkpoint_kv_scheme(model.hf_config) is not None,
            f"brings a KV-cache scheme of its own ({_checkpoint_kv_scheme(model.hf_config)}), which {DTYPE_NAME} "
            "would ignore",
            "use --kv-cache-dtype auto or a checkpoint without one",
        ),
    ]
    return [(reason, way_out) for applies, reason, way_out in cases if applies]


def _uses_alibi(text: Any) -> bool:
    if "falcon" in text.model_type or "RefinedWeb" in text.model_type:
        return bool(getattr(text, "alibi", False))
    return text.model_type in ALIBI_MODELS


def _odd_heads(model: ModelConfig) -> int | None:
    """A head size of full layers without a layout, where layers differ in it (Gemma-4: 256 and 512).

    vLLM picks an attention backend for such models, which would be blamed otherwise.
    """
    arch: Any = model.model_arch_config
    kinds = getattr(model.hf_text_config, "layer_types", None) or ()
    if arch.per_layer_overrides is None:
        return None
    sizes = (arch[i].head_size for i, kind in enumerate(kinds) if kind == "full_attention")
    return next((size for size in sizes if size not in HEAD_SIZES), None)


def _checkpoint_kv_scheme(hf_config: Any) -> Any:
    """The checkpoint's own KV-cache quantisation (compressed-tensors or ModelOpt), or None."""
    quant = getattr(hf_config, "quantization_config", None)
    if not isinstance(quant, dict):
        return None
    nested = quant.get("quantization")
    for source in (quant, nested if isinstance(nested, dict) else {}):
        for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
            if source.get(key) is not None:
                return source[key]
    return None


def shares_caches(model: ModelConfig) -> bool:
    """Whether some layers read the KV cache of others; Gemma-4's drafters (as vLLM calls them) read their target's."""
    shared = getattr(model.hf_text_config, "num_kv_shared_layers", 0)
    return bool(shared) or model.hf_config.model_type == "gemma4_mtp"


def has_windows(model: ModelConfig) -> bool:
    """Whether some layers of a model attend to a sliding window."""
    text: Any = model.hf_text_config
    return getattr(text, "sliding_window", None) is not None or "sliding_attention" in (
        getattr(text, "layer_types", None) or ()
    )


def _leave_windows(vllm_config: VllmConfig, model: ModelConfig) -> None:
    """Sliding-window layers keep the model's dtype: their memory does not grow."""
    skipped = vllm_config.cache_config.kv_cache_dtype_skip_layers
    if has_windows(model) and "sliding_window" not in skipped:
        skipped.append("sliding_window")
