# SPDX-License-Identifier: Apache-2.0
"""Bytes of a model's weights: from the safetensors index, else from its shapes.

Quantised checkpoints keep their embeddings, norms and (mostly) the `lm_head` in 16
bits, and a 128k-row vocabulary is a fifth of an 8B model at 4 bits; so matrices and
the rest are counted apart.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bie_vllm_plugin.plan_layers import MLA_TYPES, head_shape
from bie_vllm_plugin.plan_model import ModelShape
from bie_vllm_plugin.plan_units import PlanError

WEIGHT_CHOICES = ("auto", "bf16", "fp8", "int4")

UNGATED = ("gpt2", "gpt_neox", "opt", "bloom", "falcon", "phi", "starcoder2", "gpt_bigcode", "mpt", "gptj", "nemotron")
"""Families whose MLP has two matrices instead of three."""

TIED_BY_DEFAULT = (
    "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gpt2", "opt", "bloom", "falcon", "cohere", "cohere2", "mpt",
    "gpt_bigcode", "starcoder2",
)  # fmt: skip
"""Families that share embedding and `lm_head` unless the config says otherwise."""


@dataclass(frozen=True)
class Parameters:
    """Numbers of a model's parameters, by how they are stored.

    Attributes:
        embedding: the input embedding (and the `lm_head`, where tied).
        head: the `lm_head`, 0 where tied.
        matrices: linear layers that quantisation packs; experts included.
        experts: of `matrices`, those of routed experts.
        active_experts: of `experts`, those that one token reads.
        rest: norms, biases, routers, convolutions: 16 bits.
        vision: image or audio tower and projector: 16 bits.
    """

    embedding: int
    head: int
    matrices: int
    experts: int
    active_experts: int
    rest: int
    vision: int

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + self.head + self.matrices + self.rest + self.vision


@dataclass(frozen=True)
class Weights:
    """Bytes of the weights on one GPU.

    Attributes:
        total: resident bytes.
        per_step: bytes that a decode step of one token reads.
        kind: precision of the matrices, for people.
        source: where `total` comes from, for people.
        drafter: of `total`, those of a drafter.
    """

    total: int
    per_step: int
    kind: str
    source: str
    drafter: int = 0


def count_parameters(model: ModelShape) -> Parameters:
    """Parameters by the config's shapes."""
    text = model.text
    hidden, vocab, count = int(text["hidden_size"]), int(text["vocab_size"]), int(text["num_hidden_layers"])
    tied = text.get("tie_word_embeddings", model.config.get("tie_word_embeddings"))
    if tied is None:
        tied = str(text.get("model_type")) in TIED_BY_DEFAULT
    matrices = experts = active = rest = 0
    kinds: dict[int, set[str]] = {}
    for layer in model.layers:
        kinds.setdefault(layer.index, set()).add(layer.kind)
    for index in range(count):
        one = layer_parameters(model, index, kinds.get(index, set()))
        matrices += one.matrices
        experts += one.experts
        active += one.active_experts
        rest += one.rest
    rest += hidden  # the last norm
    return Parameters(
        embedding=vocab * hidden,
        head=0 if tied else vocab * hidden,
        matrices=matrices,
        experts=experts,
        active_experts=active,
        rest=rest,
        vision=_vision(model),
    )


def layer_parameters(model: ModelShape, index: int, kinds: set[str]) -> Parameters:
    """Parameters of one decoder layer with caches of these kinds, norms and biases in `rest`."""
    text, hidden = model.text, int(model.text["hidden_size"])
    matrices = experts = active = 0
    rest = (4 if "gemma" in model.model_type else 2) * hidden  # norms
    if text.get("attention_bias") or model.model_type.startswith(("qwen2", "mimo")):
        heads, kv_heads, size, v_size = head_shape(text)
        rest += heads * size + kv_heads * (size + v_size)
    pattern = text.get("hybrid_override_pattern")
    # A layer without a cache still has weights: it shares another's keys, or is an MLP (pattern '-').
    has = kinds or (set() if pattern else {"full"})
    if has - {"state"}:
        matrices += _attention_matrices(text)
    if "state" in has:
        matrices += _state_matrices(model, index)
    if not pattern or pattern[index] == "-":  # Nemotron-H: a layer is either attention, a state or an MLP
        dense, experts, active, router = _mlp(text, index)
        matrices += dense + experts
        rest += router
    return Parameters(0, 0, matrices, experts, active, rest, 0)


def _attention_matrices(text: dict[str, Any]) -> int:
    hidden = int(text["hidden_size"])
    heads, kv_heads, size, v_size = head_shape(text)
    if text.get("kv_lora_rank") and text.get("model_type") in MLA_TYPES:
        nope, rope, latent = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["kv_lora_rank"]
        rank = text.get("q_lora_rank")
        queries = hidden * rank + rank * heads * (nope + rope) if rank else hidden * heads * (nope + rope)
        return queries + hidden * (latent + rope) + latent * heads * (nope + v_size) + heads * v_size * hidden
    return hidden * (heads * size + kv_heads * (size + v_size)) + heads * v_size * hidden


def _state_matrices(model: ModelShape, index: int) -> int:
    """In and out projections of a recurrent layer, from the channels of its state."""
    state = next(layer.state for layer in model.layers if layer.index == index and layer.kind == "state")
    assert state is not None
    hidden = int(model.text["hidden_size"])
    inner = state.channels
    channels = inner + state.group_channels * state.groups
    if "linear_num_value_heads" in model.text:  # gated delta net: q, k, v in the convolution, a gate like v
        inner = model.text["linear_num_value_heads"] * model.text["linear_value_head_dim"]
    elif not state.temporal:  # a short convolution has two gates
        channels = 2 * inner
    return hidden * (channels + inner) + inner * hidden


def _mlp(text: dict[str, Any], index: int) -> tuple[int, int, int, int]:
    """(dense or shared matrices, routed experts, those active per token, router) of a layer."""
    hidden = int(text["hidden_size"])
    gates = 2 if text.get("model_type") in UNGATED or text.get("hybrid_override_pattern") else 3
    inner = text.get("intermediate_size") or text.get("n_inner") or 4 * hidden
    if isinstance(inner, list):
        inner = inner[index]
    number = text.get("n_routed_experts") or text.get("num_local_experts") or text.get("num_experts") or 0
    step = text.get("decoder_sparse_step") or text.get("expert_layer_period") or text.get("interleave_moe_layer_step")
    dense_first = text.get("first_k_dense_replace") or 0
    sparse = number > 1 and index >= dense_first and index not in (text.get("mlp_only_layers") or ())
    if sparse and step and step > 1:
        sparse = index % step == (text["expert_layer_offset"] if "expert_layer_offset" in text else step - 1)
    if not sparse:
        return gates * hidden * int(inner), 0, 0, 0
    width = int(text.get("moe_intermediate_size") or inner)
    chosen = text.get("num_experts_per_tok") or text.get("num_experts_per_token") or 1
    shared = text.get("shared_expert_intermediate_size") or text.get("shared_intermediate_size") or 0
    if not shared and text.get("n_shared_experts"):
        shared = text["n_shared_experts"] * width
    expert = gates * hidden * width
    return gates * hidden * int(shared), number * expert, int(chosen) * expert, number * hidden


def _vision(model: ModelShape) -> int:
    """A transformer tower of the shape in `vision_config`, its patches, positions and projector."""
    vision = model.config.get("vision_config")
    if not isinstance(vision, dict) or "hidden_size" not in vision:
        return 0
    hidden, inner = vision["hidden_size"], vision.get("intermediate_size") or 4 * vision["hidden_size"]
    depth = vision.get("num_hidden_layers") or vision.get("depth") or 0
    patch, image = vision.get("patch_size") or 14, vision.get("image_size") or 0
    blocks = depth * (4 * hidden * hidden + 2 * hidden * inner + 9 * hidden + inner)
    patches = 3 * patch * patch * hidden + (image // patch) ** 2 * hidden
    return blocks + patches + hidden * int(model.text["hidden_size"])


# -- bytes -------------------------------------------------------------------------------
def matrix_bits(model: ModelShape) -> tuple[float, str]:
    """(bits per element of a packed matrix, name) by the checkpoint's own `quantization_config`."""
    quant = model.config.get("quantization_config") or model.text.get("quantization_config") or {}
    method = str(quant.get("quant_method", "")).lower()
    if not quant:
        return 8.0 * model.itemsize, "bf16" if model.itemsize == 2 else "fp32"
    if method == "compressed-tensors":
        groups = quant.get("config_groups") or {}
        weights = next((group.get("weights") or {} for group in groups.values()), {})
        bits, size = int(weights.get("num_bits") or 8), weights.get("group_size")
        zero = 0 if weights.get("symmetric", True) else bits
        return bits + ((16 + zero) / size if size and size > 0 else 0), f"compressed-tensors {bits}-bit"
    if method in ("awq", "gptq", "awq_marlin", "gptq_marlin", "auto-round"):
        bits = int(quant.get("bits") or quant.get("w_bit") or 4)
        size = int(quant.get("group_size") or quant.get("q_group_size") or 128)
        # Per group a 16-bit scale, and a zero-point that is packed like the codes.
        return bits + ((16 + bits) / size if size > 0 else 0), f"{method} {bits}-bit"
    if method == "bitsandbytes":
        return (4.5, "bitsandbytes 4-bit") if quant.get("load_in_4bit") else (8.0, "bitsandbytes 8-bit")
    if method == "mxfp4":
        return 4.25, "mxfp4"
    if "fp8" in method or method == "modelopt":
        return 8.0, method
    raise PlanError(
        f"{model.name} is quantised by {method!r}, whose size bie-plan does not know without a safetensors index; "
        "state it with --weights bf16, fp8 or int4."
    )


def _cast(model: ModelShape) -> float:
    """Loaded over stored size: vLLM runs unquantised fp32 checkpoints in 16 bits, or what `--dtype` says."""
    if model.config.get("quantization_config") or model.text.get("quantization_config"):
        return 1.0
    named = (source.get(key) for source in (model.text, model.config) for key in ("dtype", "torch_dtype"))
    stored = 4 if any(str(name).endswith("float32") for name in named if name) else 2
    return model.itemsize / stored


CHOSEN_BITS = {"bf16": 16.0, "fp8": 8.0, "int4": 4 + 20 / 128}
"""Bits per element of a matrix for `--weights`; int4 in groups of 128 as AWQ packs them."""


def weigh(model: ModelShape, choice: str, tp: int, count: Parameters | None = None) -> Weights:
    """Bytes of the weights on one of `tp` GPUs.

    Args:
        model: the model.
        choice: auto (as the checkpoint is), bf16, fp8 or int4.
        tp: GPUs; norms are on all of them.
        count: parameters of a part of the model; None for all of it, by its files where there are some.

    Raises:
        PlanError: an unknown choice or an unknown quantisation.
    """
    if choice not in WEIGHT_CHOICES:
        raise PlanError(f"--weights {choice} is not offered; choose from {', '.join(WEIGHT_CHOICES)}.")
    whole = count is None
    try:
        count = count or count_parameters(model)
    except (KeyError, TypeError, IndexError) as error:
        raise PlanError(
            f"{model.name}: the shapes of model type {model.model_type!r} are not as bie-plan knows them ({error!r})."
        ) from None
    bits, kind = matrix_bits(model) if choice == "auto" else (CHOSEN_BITS[choice], choice)
    dense = 2 if choice != "auto" else model.itemsize
    packed = count.matrices * bits / 8
    if kind == "mxfp4":  # gpt-oss: only the experts are packed
        packed = count.experts * bits / 8 + (count.matrices - count.experts) * dense
    sixteen = (count.embedding + count.head + count.vision) * dense
    total = packed + sixteen + count.rest * dense
    source = "shapes in the config, embeddings and lm_head in 16 bits"
    if choice == "auto" and whole and model.index_bytes:
        total, source = float(model.index_bytes) * _cast(model), "safetensors index or files"
    # A step reads every matrix once, of the experts those chosen, of the embedding a row.
    idle = (count.experts - count.active_experts) * bits / 8
    untied = count.embedding * dense if count.head else 0
    per_step = total - idle - untied - count.vision * dense
    rest = count.rest * dense
    return Weights(
        total=round((total - rest) / tp + rest),
        per_step=round(max(per_step - rest, 0) / tp + rest),
        kind=kind,
        source=source,
    )
