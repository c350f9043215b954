# SPDX-License-Identifier: Apache-2.0
"""The cache of each layer, from a model's text config.

Which layer slides, attends in chunks or keeps a state follows `layer_types` where
the config has it, else the rules by which the model classes fill it in.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from bie_vllm_plugin.plan_units import PlanError

MLA_TYPES = ("deepseek_v2", "deepseek_v3", "deepseek_mtp", "glm4_moe_lite", "kimi_k2", "longcat_flash")
"""Model types that vLLM runs with latent attention when `kv_lora_rank` is set."""

FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "gemma3n_text": 5, "gpt_oss": 2, "cohere2": 4}
"""Families without `layer_types`: layer i attends fully if (i + 1) is a multiple, else it slides."""

UNIFORM_WINDOW = ("mistral", "mixtral", "phi3", "starcoder2", "phimoe", "ministral")
"""Families whose `sliding_window`, when set, holds for every layer."""

STATE_TYPES = ("mamba", "linear_attention", "conv")

UNKNOWN_CACHES = (
    "mamba", "mamba2", "falcon_mamba", "zamba2", "plamo2", "rwkv", "minimax", "minimax_m1", "kimi_linear",
    "bailing_hybrid", "olmo_hybrid", "recurrent_gemma", "deepseek_v4", "qwen4_exp",
    "gemma4_text", "nemotron-nas", "openelm",
)  # fmt: skip
"""Families whose state, or whose layers of different head sizes, the planner does not compute."""


LayerKind = Literal["full", "sliding", "chunked", "mla", "state"]


@dataclass(frozen=True)
class StateCache:
    """A recurrent layer's state of one sequence.

    Attributes:
        channels: channels of the convolution, without the groups below.
        conv_tokens: tokens that the convolution remembers.
        conv_itemsize: bytes per element of the convolution's state.
        group_channels, groups: Mamba-2's B and C; a group is replicated where
            tensor parallelism does not divide the groups.
        temporal: elements of the recurrent state.
        temporal_itemsize: bytes per element of the recurrent state.
        checkpoints: states that a sequence holds besides its own two (Mamba-2 keeps one of its prefill).
    """

    channels: int
    conv_tokens: int
    conv_itemsize: int
    group_channels: int = 0
    groups: int = 0
    temporal: int = 0
    temporal_itemsize: int = 2
    checkpoints: int = 0

    def page_bytes(self, tp: int) -> int:
        """Bytes on one of `tp` GPUs."""
        groups = self.groups if self.groups % tp == 0 else tp
        channels = self.channels + self.group_channels * groups
        conv = channels // tp * self.conv_tokens * self.conv_itemsize
        return conv + self.temporal // tp * self.temporal_itemsize


@dataclass(frozen=True)
class Layer:
    """The cache of one layer, before tensor parallelism.

    Attributes:
        index: the model's layer that owns it.
        kind: what it keeps.
        kv_heads, head_size, head_size_v: of a key and of a value. An MLA layer
            has one latent vector, in `head_size`.
        window: tokens of a sliding window or of a local chunk; 0 otherwise.
        state: for `state` layers.
    """

    index: int
    kind: LayerKind
    kv_heads: int = 0
    head_size: int = 0
    head_size_v: int = 0
    window: int = 0
    state: StateCache | None = None


def model_layers(name: str, text: dict[str, Any], itemsize: int) -> tuple[Layer, ...]:
    """Every cache of the model, in the order of its layers.

    Args:
        name: the model, for messages.
        text: the language model's config, complete.
        itemsize: bytes per element of the model's dtype.

    Raises:
        PlanError: a family whose cache the planner does not know.
    """
    model_type = str(text.get("model_type", ""))
    if model_type in UNKNOWN_CACHES:
        raise PlanError(f"{name} is of type {model_type}, whose cache bie-plan does not compute.")
    _, kv_heads, head_size, head_size_v = head_shape(text)
    latent = text.get("kv_lora_rank") if model_type in MLA_TYPES else None
    layers = []
    for index, kind in enumerate(_kinds(name, text)):
        if kind in ("state", "both"):
            layers.append(Layer(index, "state", state=_state(name, text, itemsize)))
        if kind in ("state", "none"):
            continue
        if latent:
            layers.append(Layer(index, "mla", 1, int(latent) + int(text["qk_rope_head_dim"])))
            continue
        window = 0
        if kind == "sliding":
            window = int(text["sliding_window"])
        elif kind == "chunked":
            window = int(text["attention_chunk_size"])
        sort: LayerKind = "sliding" if kind == "sliding" else "chunked" if kind == "chunked" else "full"
        layers.append(Layer(index, sort, kv_heads, head_size, head_size_v, window))
    if not layers:
        raise PlanError(f"{name} keeps no KV cache; there is nothing to plan.")
    return tuple(layers)


def head_shape(text: dict[str, Any]) -> tuple[int, int, int, int]:
    """(query heads, KV heads, head size of a key, of a value)."""
    heads = int(text.get("num_attention_heads") or text.get("n_head") or text.get("num_heads") or 1)
    kv = text.get("num_key_value_heads") or text.get("num_kv_heads") or text.get("n_head_kv") or heads
    if text.get("multi_query") is True:
        kv = 1
    size = text.get("head_dim") or text.get("attention_head_dim")
    head_size = int(size) if size else int(text["hidden_size"]) // heads
    return heads, int(kv), head_size, int(text.get("v_head_dim") or head_size)


def _kinds(name: str, text: dict[str, Any]) -> list[str]:
    """Per layer: full, sliding, chunked, state, both (attention beside a state) or none."""
    count = int(text["num_hidden_layers"])
    model_type = str(text.get("model_type", ""))
    window = text.get("sliding_window")
    listed = text.get("layer_types") or text.get("layers_block_type")
    if model_type == "falcon_h1":
        kinds = ["both"] * count
    elif pattern := text.get("hybrid_override_pattern"):
        kinds = [{"M": "state", "*": "full"}.get(letter, "none") for letter in pattern]
    elif listed:
        kinds = [_listed_kind(name, str(entry), window) for entry in listed[:count]]
    elif (attn := text.get("attn_layer_indices")) is not None:
        kinds = ["full" if i in attn else "state" for i in range(count)]
    elif model_type == "jamba":
        period, offset = text["attn_layer_period"], text["attn_layer_offset"]
        kinds = ["full" if i % period == offset else "state" for i in range(count)]
    elif (every := text.get("full_attention_interval")) and "linear_num_value_heads" in text:
        kinds = ["full" if (i + 1) % every == 0 else "state" for i in range(count)]
    elif text.get("attention_chunk_size") and text.get("no_rope_layers"):
        kinds = ["chunked" if rope else "full" for rope in text["no_rope_layers"]]
    elif window and text.get("use_sliding_window", True) is not False:
        kinds = _sliding_kinds(text, model_type, count)
    else:
        kinds = ["full"] * count
    shared = int(text.get("num_kv_shared_layers") or 0)  # the last layers read an earlier layer's cache
    return kinds[: len(kinds) - shared] + ["none"] * shared


def _listed_kind(name: str, entry: str, window: Any) -> str:
    if entry in STATE_TYPES:
        return "state"
    if entry == "sliding_attention":
        return "sliding" if window else "full"
    if entry == "chunked_attention":
        return "chunked"
    if entry in ("full_attention", "attention"):
        return "full"
    raise PlanError(f"{name} has a layer of type {entry!r}, whose cache bie-plan does not compute.")


def _sliding_kinds(text: dict[str, Any], model_type: str, count: int) -> list[str]:
    every = text.get("sliding_window_pattern") or FULL_EVERY.get(model_type)
    if every and isinstance(every, int):
        return ["full" if (i + 1) % every == 0 else "sliding" for i in range(count)]
    if "max_window_layers" in text and model_type not in UNIFORM_WINDOW:
        return ["sliding" if i >= text["max_window_layers"] else "full" for i in range(count)]
    return ["sliding"] * count


def _state(name: str, text: dict[str, Any], itemsize: int) -> StateCache:
    """The state of a recurrent layer, by vLLM's shapes for its family."""
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
    stated = text.get("mamba_ssm_cache_dtype") or text.get("mamba_ssm_dtype")
    if stated is None and text.get("model_type") == "nemotron_h":
        stated = "float32"
    temporal_itemsize = sizes.get(str(stated), itemsize)
    hidden = int(text["hidden_size"])
    try:
        if "linear_num_value_heads" in text:  # gated delta net: Qwen3-Next, Qwen3.5
            k_heads, v_heads = text["linear_num_key_heads"], text["linear_num_value_heads"]
            k_size, v_size = text["linear_key_head_dim"], text["linear_value_head_dim"]
            return StateCache(
                channels=2 * k_size * k_heads + v_size * v_heads,
                conv_tokens=text["linear_conv_kernel_dim"] - 1,
                conv_itemsize=itemsize,
                temporal=v_heads * v_size * k_size,
                temporal_itemsize=temporal_itemsize,
            )
        if "conv_L_cache" in text:  # LFM2: short convolutions
            return StateCache(int(text.get("conv_dim") or hidden), text["conv_L_cache"] - 1, itemsize)
        if text.get("model_type") == "jamba":  # Mamba-1
            inner = text["mamba_expand"] * hidden
            return StateCache(
                channels=inner,
                conv_tokens=text["mamba_d_conv"] - 1,
                conv_itemsize=itemsize,
                temporal=inner * text["mamba_d_state"],
                temporal_itemsize=temporal_itemsize,
            )
        if "mamba_num_heads" in text:  # Nemotron-H
            heads, size = text["mamba_num_heads"], text["mamba_head_dim"]
            groups, state, kernel = text["n_groups"], text["ssm_state_size"], text["conv_kernel"]
            inner = heads * size
        else:  # Bamba, Granite 4, Falcon-H1
            heads, size = text["mamba_n_heads"], text["mamba_d_head"]
            groups, state, kernel = text["mamba_n_groups"], text["mamba_d_state"], text["mamba_d_conv"]
            inner = text.get("mamba_d_ssm") or int(text["mamba_expand"] * hidden)
    except KeyError as error:
        raise PlanError(
            f"{name} has recurrent layers of a family that bie-plan does not know (no {error.args[0]} in its config)."
        ) from None
    return StateCache(
        channels=inner,
        conv_tokens=kernel - 1,
        conv_itemsize=itemsize,
        group_channels=2 * state,
        groups=groups,
        temporal=heads * size * state,
        temporal_itemsize=temporal_itemsize,
        checkpoints=1,
    )
