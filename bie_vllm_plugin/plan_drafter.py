# SPDX-License-Identifier: Apache-2.0
"""What a drafter costs: the cache and the weights that vLLM's `--speculative-config` adds.

The engine's rules (`checks._check_speculation`, `cache_spec.DrafterSpec`) in figures: beside
int4_asym a drafter's layers keep the model's dtype and lie in the pages of the bodies.
n-gram and suffix look-up have neither weights nor a cache.
"""
from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from bie_vllm_plugin.config import DTYPE_NAME
from bie_vllm_plugin.plan_formats import FORMATS, Format, format_of
from bie_vllm_plugin.plan_layers import Layer, head_shape
from bie_vllm_plugin.plan_model import ModelShape, load_model
from bie_vllm_plugin.plan_units import PlanError
from bie_vllm_plugin.plan_weights import Parameters, Weights, count_parameters, layer_parameters, weigh

FLAG = "--speculative-config"

WITHOUT_CACHE = ("ngram", "ngram_gpu", "suffix")
HEADS = ("eagle", "eagle3")
METHODS = (*WITHOUT_CACHE, "draft_model", *HEADS, "mtp")

MTP_FAMILIES = ("mimo", "glm4_moe", "ernie4_5_moe")
"""Model types whose MTP modules are the target's own decoder layer, a projection and norms."""

KEYS_THAT_COUNT = (
    "method", "model", "num_speculative_tokens", "draft_tensor_parallel_size", "quantization", "kv_cache_dtype",
    "disable_padded_drafter_batch", "disable_eagle_block_drop",
)  # fmt: skip
KEYS_WITHOUT_BYTES = (
    "prompt_lookup_max", "prompt_lookup_min", "enforce_eager", "rejection_sample_method", "draft_sample_method",
    "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob", "synthetic_acceptance_rates", "synthetic_acceptance_length",
)  # fmt: skip


@dataclass(frozen=True)
class Drafter:
    """What proposes tokens.

    Attributes:
        method: vLLM's name.
        drafts: tokens per step.
        shape: the draft model or head; for MTP the target; None where the method has no model.
        layers: its caches.
        weights: precision of its matrices as `weigh` takes it; None for the target's (MTP).
        kv_cache_dtype: the planner's format of its cache, None for the target's.
        padded: whether the host may schedule ahead of the drafts (async scheduling).
        drops: whether vLLM computes the last page of every prefix hit again.
    """

    method: str
    drafts: int
    shape: ModelShape | None = None
    layers: tuple[Layer, ...] = ()
    weights: str | None = "auto"
    kv_cache_dtype: str | None = None
    padded: bool = True
    drops: bool = False

    @property
    def ahead(self) -> int:
        """Tokens behind a step's own that its cache takes; vLLM's `num_lookahead_tokens`."""
        return self.drafts if self.layers else 0

    @property
    def overlaps(self) -> bool:
        """Whether a GPU overlaps steps with it, by vLLM's rule."""
        return self.padded and self.method not in ("ngram", "suffix")

    def format_beside(self, fmt: Format) -> Format:
        """Format of its cache in an engine whose cache is in `fmt`."""
        return FORMATS["bf16" if fmt.name == DTYPE_NAME else self.kv_cache_dtype or fmt.name]


# -- reading it ---------------------------------------------------------------------------
def parse_speculation(text: str) -> dict[str, Any]:
    """The JSON of `--speculative-config`.

    Raises:
        PlanError: not a JSON object.
    """
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise PlanError(f"{FLAG} {text} is not a JSON object, such as {_EXAMPLE}.")
    return content


_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'


def load_drafter(config: dict[str, Any], target: ModelShape, tp: int) -> Drafter:
    """The drafter of a speculative_config; a draft model's config is looked up as `load_model` does.

    Raises:
        PlanError: a setting that has no meaning or that the planner does not compute.
    """
    for key, value in config.items():
        if key not in (*KEYS_THAT_COUNT, *KEYS_WITHOUT_BYTES) and value not in (None, False):
            raise PlanError(f"{FLAG}: bie-plan does not compute {key}={value!r}; leave it out for the plan.")
    name = config.get("model")
    if name is not None and not isinstance(name, str):
        raise PlanError(f"{FLAG}: model={name!r} must be a Hugging Face id or a folder.")
    method = _method(config, name)
    if method in WITHOUT_CACHE:
        return Drafter(method, _drafts(config, None))
    if (spread := config.get("draft_tensor_parallel_size")) not in (None, tp):
        raise PlanError(
            f"{FLAG}: draft_tensor_parallel_size={spread!r} differs from the target's {tp}, which bie-plan does not "
            "compute; leave it out."
        )
    if method == "mtp" and name is None:
        return _mtp(config, target)
    if name is None:
        raise PlanError(f"{FLAG}: method {method!r} needs a model; name one.")
    shape = load_model(name, target.itemsize)
    method = _by_model(method, name, shape)
    if method not in METHODS:
        raise PlanError(f"{FLAG}: bie-plan does not compute method {method!r}; it knows {', '.join(METHODS)}.")
    if method == "mtp":
        raise PlanError(f"{FLAG}: bie-plan computes MTP modules of the target only; leave model={name!r} out.")
    if "speculators_config" in shape.config:
        raise PlanError(
            f"{FLAG}: {name} is a checkpoint of the speculators library, which bie-plan does not compute; name the "
            "original head."
        )
    if method in HEADS:  # numbered behind the target's layers
        count = int(target.text["num_hidden_layers"])
        layers = tuple(replace(layer, index=layer.index + count) for layer in shape.layers)
    else:
        layers = shape.layers
        _check_spread(name, shape, tp)
    return _drafter(config, method, _drafts(config, None), shape, layers, _precision(config, shape))


def _method(config: dict[str, Any], name: str | None) -> str:
    method = config.get("method")
    if method is None:
        method = "ngram" if name in ("ngram", "[ngram]") else "draft_model"
    if not isinstance(method, str) or not (method in METHODS or method.endswith("_mtp")):
        raise PlanError(f"{FLAG}: bie-plan does not compute method {method!r}; it knows {', '.join(METHODS)}.")
    return "mtp" if method.endswith("_mtp") else method


def _by_model(method: str, name: str, shape: ModelShape) -> str:
    """vLLM tells a draft model's method by its name and type, unless it is an EAGLE head by request."""
    if method in HEADS:
        return method
    for part, found in (("eagle-", "eagle"), ("eagle3", "eagle3"), ("dflash", "dflash"), ("dspark", "dspark")):
        if part in name.lower():
            return found
    kind = str(shape.config.get("model_type"))
    if kind in ("medusa", "mlp_speculator"):
        return kind
    return "mtp" if kind.endswith("_mtp") else method


def _drafts(config: dict[str, Any], default: int | None) -> int:
    drafts = config.get("num_speculative_tokens", default)
    if not isinstance(drafts, int) or isinstance(drafts, bool) or not 0 < drafts <= 1024:
        raise PlanError(f"{FLAG}: num_speculative_tokens={drafts!r} must be a number of drafts from 1 to 1024.")
    return drafts


def _drafter(
    config: dict[str, Any], method: str, drafts: int, shape: ModelShape, layers: tuple[Layer, ...], weights: str | None
) -> Drafter:
    asked = config.get("kv_cache_dtype")
    fmt = None if asked is None else format_of(str(asked))
    if fmt == "":
        raise PlanError(f"{FLAG}: kv_cache_dtype={asked!r} is not planned; choose from {', '.join(FORMATS)}.")
    return Drafter(
        method=method,
        drafts=drafts,
        shape=shape,
        layers=layers,
        weights=weights,
        kv_cache_dtype=fmt,
        padded=not config.get("disable_padded_drafter_batch"),
        drops=method != "draft_model" and not config.get("disable_eagle_block_drop"),
    )


def _mtp(config: dict[str, Any], target: ModelShape) -> Drafter:
    """The MTP modules in the target's own checkpoint: its decoder layer again, one a module."""
    modules = target.text.get("num_nextn_predict_layers")
    if not isinstance(modules, int) or modules < 1:
        raise PlanError(f"{FLAG}: {target.name} has no MTP modules (num_nextn_predict_layers); use another method.")
    # vLLM goes by the architecture here, and MiMo's configs are Qwen2's but for the modules.
    mimo = "MiMoForCausalLM" in (target.config.get("architectures") or ())
    if not mimo and target.model_type not in MTP_FAMILIES:
        raise PlanError(
            f"{FLAG}: bie-plan does not compute the MTP modules of model type {target.model_type!r} (it knows "
            f"{', '.join(MTP_FAMILIES)}); leave the flag out for the plan."
        )
    drafts = _drafts(config, modules)
    if drafts > modules and drafts % modules:
        raise PlanError(f"{FLAG}: num_speculative_tokens={drafts} must be a multiple of the model's {modules} modules.")
    count = int(target.text["num_hidden_layers"])
    layers = tuple(replace(target.layers[-1], index=count + i) for i in range(modules))
    return _drafter(config, "mtp", drafts, target, layers, None)


def _check_spread(name: str, shape: ModelShape, tp: int) -> None:
    heads, kv_heads, *_ = head_shape(shape.text)
    if heads % tp or (kv_heads % tp and tp % kv_heads):
        raise PlanError(
            f"--tensor-parallel {tp} does not divide the {heads} query heads and {kv_heads} KV heads of the draft "
            f"model {name}; choose a divisor."
        )


def _precision(config: dict[str, Any], shape: ModelShape) -> str:
    """`weigh`'s choice for speculative_config.quantization."""
    asked = config.get("quantization")
    own = (shape.config.get("quantization_config") or {}).get("quant_method")
    if asked is None or str(asked) == own:
        return "auto"
    if asked == "fp8" and own is None:
        return "fp8"
    raise PlanError(f"{FLAG}: bie-plan does not compute quantization={asked!r} of {shape.name}; leave it out.")


# -- what it costs ------------------------------------------------------------------------
def drafter_refusal(drafter: Drafter | None, target: ModelShape, fmt: Format) -> str:
    """Why this drafter does not go with the format, as a clause; '' when it does. See `checks._check_speculation`."""
    if drafter is None or not drafter.layers:
        return ""
    kinds = {layer.kind for layer in drafter.layers}
    if "mla" in kinds and drafter.format_beside(fmt).mla is None:
        return f"{fmt.name} does not serve latent attention (MLA), which the drafter uses"
    if fmt.name != DTYPE_NAME:
        if {"state", "chunked"} & (kinds | {layer.kind for layer in target.layers}):
            return "bie-plan does not compute drafters with or beside recurrent or chunked layers"
        return ""
    if drafter.kv_cache_dtype not in (None, "bf16"):
        return f"{DTYPE_NAME} keeps drafters in full precision (speculative kv_cache_dtype {drafter.kv_cache_dtype})"
    if kinds != {"full"}:
        return f"{DTYPE_NAME} serves drafters with full attention only"
    if drafter.method == "mtp" and min(len(drafter.layers), drafter.drafts) > 1:
        return f"{DTYPE_NAME} does not serve several MTP modules"
    if drafter.method == "draft_model" and any(layer.kind == "sliding" for layer in target.layers):
        return f"{DTYPE_NAME} does not serve a draft model beside sliding windows"
    return ""


def with_drafter(weights: Weights, drafter: Drafter | None, target: ModelShape, choice: str, tp: int) -> Weights:
    """The target's weights and the drafter's, which a step reads once a draft.

    Raises:
        PlanError: a config that is not a drafter's.
    """
    if drafter is None or drafter.shape is None:
        return weights
    try:
        own = _weights(drafter, drafter.shape, target, choice, tp)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(
            f"{FLAG}: the shapes of {drafter.shape.name} are not as bie-plan knows them ({error!r})."
        ) from None
    return replace(
        weights,
        total=weights.total + own.total,
        per_step=weights.per_step + drafter.drafts * own.per_step,
        drafter=own.total,
    )


def _weights(drafter: Drafter, shape: ModelShape, target: ModelShape, choice: str, tp: int) -> Weights:
    if drafter.method == "draft_model":
        return weigh(shape, drafter.weights or choice, tp)
    if drafter.method == "mtp":
        own = weigh(shape, choice, tp, _module_parameters(drafter, target))
        # The checkpoint's index counts the modules already.
        return replace(own, total=0) if choice == "auto" and target.index_bytes else own
    return weigh(shape, drafter.weights or choice, tp, _head_parameters(drafter, shape, target))


def _head_parameters(drafter: Drafter, shape: ModelShape, target: ModelShape) -> Parameters:
    """Of an EAGLE head: decoder layers and a projection; the embedding (EAGLE: and the lm_head) is the target's."""
    count, hidden = count_parameters(shape), int(shape.text["hidden_size"])
    if drafter.method == "eagle":
        return replace(count, embedding=0, head=0, rest=count.rest + 2 * hidden * hidden)
    heads, kv_heads, size, v_size = head_shape(shape.text)
    states = 3 * int(shape.text.get("target_hidden_size") or target.text["hidden_size"])
    first = hidden * (heads * size + kv_heads * (size + v_size))  # its first layer sees the embedding besides
    vocab = int(shape.text.get("draft_vocab_size") or shape.text["vocab_size"])
    return replace(
        count,
        embedding=0,
        head=vocab * hidden,
        matrices=count.matrices + first,
        rest=count.rest + states * hidden + len(shape.layers) * hidden,
    )


def _module_parameters(drafter: Drafter, target: ModelShape) -> Parameters:
    """Of MTP modules: the last decoder layer, a projection of two states, norms; embedding and lm_head are shared."""
    hidden, modules = int(target.text["hidden_size"]), len(drafter.layers)
    one = layer_parameters(target, int(target.text["num_hidden_layers"]) - 1, {"full"})
    return Parameters(
        embedding=0,
        head=0,
        matrices=modules * one.matrices,
        experts=modules * one.experts,
        active_experts=modules * one.active_experts,
        rest=modules * (one.rest + 2 * hidden * hidden + 3 * hidden),
        vision=0,
    )
