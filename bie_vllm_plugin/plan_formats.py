# SPDX-License-Identifier: Apache-2.0
"""What each KV-cache format spends on a token of one layer and KV head.

Two figures each: *nominal*, the format's own definition with 16-bit scales, and
*allocated*, what vLLM 0.32 sets aside (e.g. fp32 scales for the per-token-head
formats, even slot sizes for turboquant). They are kept apart on purpose.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bie_kernels.layout import HEAD_SIZES, PageLayout
from bie_vllm_plugin.config import DTYPE_NAME, Int4AsymConfig
from bie_vllm_plugin.plan_layers import Layer
from bie_vllm_plugin.plan_model import ModelShape


@dataclass(frozen=True)
class Format:
    """A KV-cache format.

    Attributes:
        name: as in the tables and the JSON.
        vllm: the value of `--kv-cache-dtype`; None when vLLM 0.32 has no such format.
        nominal: (key size, value size) -> bytes per token and KV head by definition.
        allocated: the same as vLLM allocates it.
        mla: (latent size) -> allocated bytes per token, or None if not offered for MLA.
        keeps: layers at each end that vLLM leaves in 16 bits for this format.
        needs: hardware it asks for, for people.
    """

    name: str
    vllm: str | None
    nominal: Callable[[int, int], float]
    allocated: Callable[[int, int], int]
    mla: Callable[[int], int] | None = None
    keeps: int = 0
    needs: str = ""


def _turboquant(key_bits: int, value_bits: int) -> Callable[[int, int], int]:
    """vLLM's slot: packed keys with a 16-bit norm (8-bit keys have none), values with scale and zero."""

    def slot(d: int, e: int) -> int:
        keys = d if key_bits == 8 else -(-d * key_bits // 8) + 2
        return keys + -(-e * value_bits // 8) + 4

    return slot


def _even(slot: Callable[[int, int], int]) -> Callable[[int, int], int]:
    return lambda d, e: slot(d, e) + slot(d, e) % 2


def _turbo(name: str, key_bits: int, value_bits: int) -> Format:
    slot = _turboquant(key_bits, value_bits)
    return Format(name, name, slot, _even(slot), keeps=2)


_SCALES = 8  # an fp32 scale for K and one for V, per token and head

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("bf16", "auto", lambda d, e: 2 * (d + e), lambda d, e: 2 * (d + e), lambda c: 2 * c),
        Format("fp8", "fp8", lambda d, e: d + e, lambda d, e: d + e, lambda c: c),
        Format(
            "int8_per_token_head",
            "int8_per_token_head",
            lambda d, e: d + e + 4,
            lambda d, e: d + e + _SCALES,
            lambda c: c + _SCALES,
        ),
        Format(
            "nvfp4",
            "nvfp4",
            lambda d, e: (d + e) / 2 + (d + e) / 16,
            lambda d, e: d // 2 + d // 16 + e // 2 + e // 16,
            needs="Blackwell",
        ),
        Format(
            "mxfp4",
            None,
            lambda d, e: (d + e) / 2 + (d + e) / 32,
            lambda d, e: -(-(d + e) // 2) + -(-d // 32) + -(-e // 32),
        ),
        _turbo("turboquant_k8v4", 8, 4),
        _turbo("turboquant_4bit_nc", 4, 4),
        _turbo("turboquant_k3v4_nc", 3, 4),
        _turbo("turboquant_3bit_nc", 3, 3),
        Format(
            "int4_per_token_head",
            "int4_per_token_head",
            lambda d, e: (d + e) / 2 + _SCALES,
            lambda d, e: d // 2 + e // 2 + _SCALES,
            lambda c: c // 2 + _SCALES,
        ),
        # int4_asym's bytes belong to bie_kernels.layout; see `body_layout`.
        Format(DTYPE_NAME, DTYPE_NAME, lambda d, e: 0, lambda d, e: 0),
    )
}
"""In the order of the tables."""


LEARNED_SINKS = ("gpt_oss", "mimo_v2", "mimo_v2_flash", "laguna")
"""Model types with learnable attention sinks, which int4_asym refuses."""

IMAGE_PREFIXES = ("bagel", "gemma3", "molmo2", "moondream3", "paligemma")
"""Model types whose images attend in both directions: int4_asym serves them with --language-model-only."""


def text_only(model: ModelShape, fmt: Format) -> bool:
    """Whether the format serves this multimodal model as a language model only."""
    return fmt.name == DTYPE_NAME and str(model.config.get("model_type")) in IMAGE_PREFIXES


def body_layout(layer: Layer, settings: Int4AsymConfig) -> PageLayout:
    """The INT4 page of a layer; raises ValueError when its head size has none."""
    return settings.page_layout(layer.head_size, layer.head_size_v)


def format_of(name: str) -> str:
    """The planner's format for a value of `--kv-cache-dtype`; '' when it has none."""
    aliases = {"auto": "bf16", "bfloat16": "bf16", "float16": "bf16", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}
    found = aliases.get(name, name)
    return found if found in FORMATS else ""


def quantised(layer: Layer, fmt: Format, skipped: frozenset[int]) -> bool:
    """Whether this layer's cache is in `fmt`, and not in the model's dtype."""
    if layer.kind == "state" or layer.index in skipped or fmt.name == "bf16":
        return False
    # int4_asym leaves sliding windows alone: their memory does not grow.
    return not (fmt.name == DTYPE_NAME and layer.kind in ("sliding", "chunked"))


def skipped_layers(model: ModelShape, fmt: Format, skip: frozenset[int]) -> frozenset[int]:
    """Layers kept in 16 bits: the user's, and those at the ends that turboquant keeps by itself."""
    if fmt.name == "bf16":
        return frozenset()
    count = int(model.text["num_hidden_layers"])
    hybrid = any(layer.kind == "state" for layer in model.layers)
    keeps = 0 if hybrid else min(fmt.keeps, count // 2)
    return skip | frozenset(range(keeps)) | frozenset(range(count - keeps, count))


def token_bytes(layer: Layer, fmt: Format, itemsize: int, settings: Int4AsymConfig, skipped: frozenset[int]) -> int:
    """Allocated bytes of a token in this layer, per KV head (MLA: for the layer)."""
    if not quantised(layer, fmt, skipped):
        return itemsize * (layer.head_size + layer.head_size_v)
    if layer.kind == "mla":
        assert fmt.mla is not None, "refused by `refusal`"
        return fmt.mla(layer.head_size)
    if fmt.name == DTYPE_NAME:
        return body_layout(layer, settings).token_bytes
    return fmt.allocated(layer.head_size, layer.head_size_v)


def nominal_bytes(layer: Layer, fmt: Format, itemsize: int, settings: Int4AsymConfig) -> float:
    """Bytes of a token by the format's definition, per KV head (MLA: for the layer); no layer skipped."""
    if not quantised(layer, fmt, frozenset()):
        return itemsize * (layer.head_size + layer.head_size_v)
    if layer.kind == "mla":
        assert fmt.mla is not None, "refused by `refusal`"
        return fmt.mla(layer.head_size)
    if fmt.name == DTYPE_NAME:
        return body_layout(layer, settings).token_bytes
    return fmt.nominal(layer.head_size, layer.head_size_v)


def refusal(model: ModelShape, fmt: Format, settings: Int4AsymConfig) -> str:
    """Why this model cannot use the format, as a clause; '' when it can."""
    kinds = {layer.kind for layer in model.layers}
    if "mla" in kinds and fmt.mla is None:
        return f"{fmt.name} does not serve latent attention (MLA)"
    if fmt.name != DTYPE_NAME:
        return ""
    if model.model_type in LEARNED_SINKS:
        return f"{DTYPE_NAME} does not serve learnable attention sinks ({model.model_type})"
    if "state" in kinds:
        return f"{DTYPE_NAME} does not serve models with recurrent layers"
    if "chunked" in kinds:
        return f"{DTYPE_NAME} does not serve chunked local attention"
    for layer in model.layers:
        if layer.kind == "full":
            for size in (layer.head_size, layer.head_size_v):
                if size not in HEAD_SIZES:
                    return f"{DTYPE_NAME} does not serve head size {size}"
    return ""
