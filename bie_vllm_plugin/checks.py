# SPDX-License-Identifier: Apache-2.0
"""What `int4_asym` refuses, each with one sentence: setting, value, way out.

All of it runs at configuration time (`check_config`), when a layer chooses its
backend (`check_layer`), when a model's layers exist (`check_built_layers`), all of which
is before any weight is read, or when the pool is built (`check_pool`); never at the first
token.
"""
from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from bie_kernels.layout import HEAD_SIZES, PAGE_TOKENS
from bie_vllm_plugin.config import DTYPE_NAME, Int4AsymConfig
from bie_vllm_plugin.model_checks import check_model, has_windows, shares_caches

logger = logging.getLogger("vllm.bie_vllm_plugin")

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DRAFTERS_WITHOUT_CACHE = ("ngram", "ngram_gpu", "suffix")
"""Speculation methods that keep no KV cache of their own."""

DRAFTERS_WITH_CACHE = ("draft_model", "eagle", "eagle3", "mtp")
"""Methods whose drafter keeps a KV cache, in full precision beside our bodies."""

LAYOUTS = (None, "BLHNC", "LBHNC", "HND")
"""Values of VLLM_KV_CACHE_LAYOUT that the backend takes; HND is vLLM's old name of LBHNC."""


def check_config(vllm_config: VllmConfig) -> None:
    """Validate the engine's configuration for this dtype, and complete it.

    Sliding-window layers are added to the skipped layers: their memory does not
    grow, so they keep the model's dtype.

    Raises:
        ValueError: one sentence that names the setting, the value and what is allowed.
    """
    _check_platform()  # first: other platforms may fail at anything below
    Int4AsymConfig.from_vllm(vllm_config)
    _check_cache(vllm_config)
    check_model(vllm_config)
    _check_engine(vllm_config)


def _check_platform() -> None:
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        raise ValueError(
            f"--kv-cache-dtype {DTYPE_NAME} runs on NVIDIA GPUs and CPUs, not on "
            f"{current_platform.device_name or current_platform.device_type}; use --kv-cache-dtype auto."
        )


def _check_cache(vllm_config: VllmConfig) -> None:
    cache = vllm_config.cache_config
    if cache.user_specified_block_size and cache.block_size != PAGE_TOKENS:
        raise ValueError(
            f"--block-size {cache.block_size} does not go with --kv-cache-dtype {DTYPE_NAME}, whose pages hold "
            f"{PAGE_TOKENS} tokens; leave the flag out or set it to {PAGE_TOKENS}."
        )
    if cache.kv_offloading_size is not None:
        raise ValueError(
            f"--kv-offloading-size {cache.kv_offloading_size} does not go with {DTYPE_NAME} yet: offloaded prefixes "
            "end inside pages and lack the sinks; leave it out or use another --kv-cache-dtype."
        )
    if vllm_config.kv_transfer_config is not None:
        connector = vllm_config.kv_transfer_config.kv_connector
        raise ValueError(
            f"--kv-transfer-config with connector {connector!r} does not go with {DTYPE_NAME} yet: external prefixes "
            "end inside pages and lack the sinks; leave it out or use another --kv-cache-dtype."
        )


def _check_engine(vllm_config: VllmConfig) -> None:
    import vllm.envs as envs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from bie_vllm_plugin.vllm_compat import BACKEND_PATH

    scheduler, parallel, attention = (
        vllm_config.scheduler_config,
        vllm_config.parallel_config,
        vllm_config.attention_config,
    )
    if scheduler.disable_hybrid_kv_cache_manager:
        raise ValueError(
            f"--disable-hybrid-kv-cache-manager does not go with {DTYPE_NAME}, which keeps two caches per layer; "
            "leave the flag out."
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name)
        if size > 1:
            raise ValueError(
                f"--{name.replace('_', '-')} {size} does not go with {DTYPE_NAME}, whose window is not sharded by "
                "position; set it to 1 and use --tensor-parallel-size."
            )
    if parallel.use_ubatching:
        flag = "--enable-dbo" if parallel.enable_dbo else f"--ubatch-size {parallel.ubatch_size}"
        raise ValueError(
            f"{flag} does not go with {DTYPE_NAME}: micro-batches cut prefill chunks in two, and the second half would "
            "miss the 16-bit keys of the first, which are in the step's tensors only; leave the flag out."
        )
    if attention.backend is not None:
        raise ValueError(
            f"--attention-backend {attention.backend.name} does not go with --kv-cache-dtype {DTYPE_NAME}, which "
            "brings its own backend; leave the flag out."
        )
    if attention.backend_per_kind:
        raise ValueError(
            f"attention_config.backend_per_kind={attention.backend_per_kind} does not go with --kv-cache-dtype "
            f"{DTYPE_NAME}, which brings its own backend; leave it out."
        )
    if envs.VLLM_BATCH_INVARIANT:
        raise ValueError(
            f"VLLM_BATCH_INVARIANT=1 does not go with {DTYPE_NAME}: its split-KV decoding sums in an order that "
            "depends on the batch; unset it."
        )
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND_PATH:
        raise ValueError(
            f"vLLM's one CUSTOM attention-backend slot is taken by {custom.get_path()} and {DTYPE_NAME} needs it; "
            "uninstall that plugin or exclude it with VLLM_PLUGINS."
        )
    if vllm_config.speculative_config is not None:
        _check_speculation(vllm_config.speculative_config, vllm_config.model_config)


def _check_speculation(speculation: Any, target: Any) -> None:
    """Refuse drafters that were not tested; give the others a full-precision cache of their own."""
    import vllm.envs as envs

    if speculation.enable_adaptive_verification:
        raise ValueError(
            f"speculative_config.enable_adaptive_verification does not go with {DTYPE_NAME}, which plans a step by the "
            "number of drafts that the host knows; leave it out."
        )
    if speculation.method in DRAFTERS_WITHOUT_CACHE:
        return
    if speculation.method not in DRAFTERS_WITH_CACHE:
        raise ValueError(
            f"speculative method {speculation.method!r} is not supported by {DTYPE_NAME} yet; use one of "
            f"{', '.join((*DRAFTERS_WITH_CACHE, *DRAFTERS_WITHOUT_CACHE))}."
        )
    if speculation.kv_cache_dtype not in (None, "auto"):
        raise ValueError(
            f"speculative_config.kv_cache_dtype={speculation.kv_cache_dtype!r} does not go with --kv-cache-dtype "
            f"{DTYPE_NAME}, beside which drafters keep full precision; leave it out or set it to 'auto'."
        )
    if envs.VLLM_KV_CACHE_LAYOUT not in (None, "BLHNC"):  # see check_drafter_group
        raise ValueError(
            f"a draft model beside {DTYPE_NAME} needs the cache layout BLHNC, not VLLM_KV_CACHE_LAYOUT="
            f"{envs.VLLM_KV_CACHE_LAYOUT}: unset VLLM_KV_CACHE_LAYOUT, or use method ngram."
        )
    if speculation.parallel_drafting:
        raise ValueError(
            f"speculative_config.parallel_drafting does not go with {DTYPE_NAME} yet; leave it out or use a draft "
            "model that drafts one token after the other."
        )
    if speculation.use_multi_module_mtp():
        raise ValueError(
            f"{speculation.num_speculative_tokens} speculative tokens of several MTP modules do not go with "
            f"{DTYPE_NAME} yet, which was tested with one module; set num_speculative_tokens to 1 or use method ngram."
        )
    if speculation.method == "draft_model" and has_windows(target):
        # The V1 runner hands a draft model the block table of group 0, here that of the windowed layers.
        raise ValueError(
            f"a draft model does not go with {target.model}, some layers of which have a sliding window, under "
            f"{DTYPE_NAME} yet; use method ngram."
        )
    draft = speculation.draft_model_config
    for what, found in (
        ("the KV cache of other layers", shares_caches(draft)),
        ("no attention", draft.is_attention_free),
        ("multi-head latent attention", draft.use_mla),
        ("state-space or linear-attention layers", draft.is_hybrid),
        ("chunked local attention", draft.attention_chunk_size is not None),
        ("sliding-window layers", has_windows(draft)),
    ):
        if found:
            raise ValueError(
                f"the draft model {draft.model} uses {what}, which {DTYPE_NAME} does not support in a draft model "
                "yet; use a draft model with full attention only, or method ngram."
            )
    speculation.kv_cache_dtype = "auto"  # it would inherit int4_asym: two groups per layer, and drafters know one


def check_layer(selector: Any) -> None:
    """Validate one attention layer as vLLM describes it when it selects a backend.

    Args:
        selector: vLLM's `AttentionSelectorConfig`.

    Raises:
        ValueError: a head size, dtype, cache layout or feature that is not served.
    """
    import vllm.envs as envs
    from vllm.platforms import current_platform

    if selector.head_size not in HEAD_SIZES:
        raise ValueError(
            f"head_size {selector.head_size} is not supported by {DTYPE_NAME} (supported: "
            f"{', '.join(map(str, HEAD_SIZES))}); use another --kv-cache-dtype."
        )
    kinds = (torch.float16, torch.bfloat16, *((torch.float32,) if current_platform.is_cpu() else ()))
    if selector.dtype not in kinds:
        where = " on GPUs" if selector.dtype == torch.float32 else ""
        raise ValueError(
            f"--dtype {str(selector.dtype).removeprefix('torch.')} is not supported by {DTYPE_NAME}{where}; use "
            "--dtype bfloat16 or float16."
        )
    if envs.VLLM_KV_CACHE_LAYOUT not in LAYOUTS:
        raise ValueError(
            f"VLLM_KV_CACHE_LAYOUT={envs.VLLM_KV_CACHE_LAYOUT} does not go with {DTYPE_NAME}, whose pages hold one "
            "head after the other; unset it or set it to BLHNC."
        )
    for attribute, what in (
        ("use_mla", "multi-head latent attention"),
        ("use_sparse", "sparse attention"),
        ("has_sink", "learnable attention sinks"),
        ("use_mm_prefix", "bidirectional multimodal prefixes"),
        ("use_non_causal", "non-causal attention"),
        ("use_rswa", "reference sliding windows"),
    ):
        if getattr(selector, attribute, False):
            raise ValueError(f"{DTYPE_NAME} does not support {what}; serve this model with another --kv-cache-dtype.")


def check_drafter_layer(name: str, layer: Any, vllm_config: VllmConfig) -> None:
    """A draft model's layer must be plain full attention with a cache of its own; what its configuration does not tell.

    Called when the draft model is built, before its weights are read (and after the target's
    are: vLLM builds it then), and once more when everything is loaded.

    Raises:
        ValueError: it reads the cache of another layer (the target's pages are packed), or attends otherwise.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    if (target := getattr(layer, "kv_sharing_target_layer_name", None)) is not None:
        raise ValueError(
            f"the draft model's layer {name} reads the KV cache of {target}, which {DTYPE_NAME} packs; use a draft "
            "model with a cache of its own or method ngram."
        )
    # Layers are asked by their class: what an instance of ours answers is made for other questions.
    spec = type(layer).get_kv_cache_spec(layer, vllm_config) if isinstance(layer, Attention) else None
    if type(spec) is not FullAttentionSpec:
        kind = type(layer if spec is None else spec).__name__
        raise ValueError(
            f"the draft model's layer {name} is not plain full attention ({kind}), which {DTYPE_NAME} does not support "
            "yet; use another draft model or method ngram."
        )


def check_drafter_group(kv_cache_config: Any) -> None:
    """A drafter's pages must be those of group 0, the bodies': the V1 runner hands it that block table.

    They are under `BLHNC`, where vLLM puts full-attention layers of any width together. Under
    another layout the drafter would write its keys into our pages, silently.

    Raises:
        ValueError: the drafter's layers ended in a group of their own.
    """
    from bie_vllm_plugin.cache_spec import DrafterSpec

    for group in kv_cache_config.kv_cache_groups:
        if isinstance(group.kv_cache_spec, DrafterSpec):
            raise ValueError(
                f"a draft model beside {DTYPE_NAME} needs the cache layout BLHNC, and layout "
                f"{kv_cache_config.kv_cache_layout} separates its pages from the others: unset VLLM_KV_CACHE_LAYOUT, "
                "or use method ngram."
            )


def check_built_layers(vllm_config: VllmConfig) -> int:
    """Every decoder layer that is not skipped must have taken this dtype, on our backend.

    Models with a backend of their own (MiMo-V2, whose keys and values differ in size)
    or a special attention layer (with static sinks, say) are never asked by
    `check_layer`; others (Falcon) build their layers without vLLM's cache settings and
    would stay in 16 bits without a word. Called when a model is built, before its weights
    are read, and once more when all models of a worker are there.

    Returns:
        How many layers of this worker are stored in INT4.

    Raises:
        ValueError: names the layer and the reason.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionType

    from bie_vllm_plugin.backend import Int4AsymBackend

    layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    speculation = vllm_config.speculative_config
    drafter_may_differ = speculation is not None and speculation.method not in DRAFTERS_WITHOUT_CACHE
    way_out = "serve this model with another --kv-cache-dtype"
    decoder = {
        name: layer
        for name, layer in layers.items()
        if isinstance(layer, Attention) and layer.attn_type == AttentionType.DECODER
    }
    quantised = sum(layer.kv_cache_dtype == DTYPE_NAME for layer in decoder.values())
    for name, layer in decoder.items():
        if layer.kv_cache_dtype != DTYPE_NAME:
            # A drafter's layers keep full precision; but if no layer took the dtype, it was the target's that did not.
            if not (drafter_may_differ and quantised) and not _skipped(name, layer, vllm_config.cache_config):
                raise ValueError(
                    f"vLLM builds {name} without its cache settings, so it would not take --kv-cache-dtype "
                    f"{DTYPE_NAME}; {way_out}."
                )
        elif type(layer) is not Attention or layer.attn_backend is not Int4AsymBackend:
            raise ValueError(
                f"{name} ({type(layer).__name__}) has an attention backend of its own "
                f"({layer.attn_backend.get_name()}), which {DTYPE_NAME} cannot replace; {way_out}."
            )
    return quantised


def _skipped(name: str, layer: Any, cache: Any) -> bool:
    """Whether --kv-cache-dtype-skip-layers names this layer, by vLLM's own rule."""
    from vllm.model_executor.models.utils import extract_layer_index

    skip = cache.kv_cache_dtype_skip_layers
    windowed = layer.sliding_window is not None and "sliding_window" in skip
    return windowed or str(extract_layer_index(name)) in skip


def check_pool(manager: Any) -> None:
    """The pool must hold one request of max_model_len while its last prefill chunk runs.

    At that moment the windows in front of the chunks in flight and the one behind the
    last are held together; with less, that request could never be scheduled.

    Args:
        manager: vLLM's `KVCacheManager`, built.

    Raises:
        ValueError: names the longest --max-model-len that fits, if any does.
    """
    from bie_vllm_plugin.cache_manager import BodyManager, WindowManager

    managers = manager.coordinator.single_type_managers
    windows = [m for m in managers if isinstance(m, WindowManager)]
    if not windows:
        return
    bodies = [m for m in managers if isinstance(m, BodyManager)]
    free = manager.block_pool.num_gpu_blocks - 1  # block 0 is the null block
    window_pages = sum(m.kv_cache_spec.peak_pages for m in windows)
    body_pages = sum(-(-manager.max_model_len // m.block_size) for m in bodies)
    other_pages = sum(
        m.max_admission_blocks_per_request or -(-manager.max_model_len // m.block_size)
        for m in managers
        if m not in windows and m not in bodies
    )
    needed = body_pages + window_pages + other_pages
    if needed <= free:
        return
    fits = max(0, (free - window_pages - other_pages) // max(1, len(bodies))) * PAGE_TOKENS
    shorter = f"set --max-model-len to at most {fits} or " if fits else ""
    raise ValueError(
        f"max_model_len {manager.max_model_len} needs {needed} KV-cache pages with {DTYPE_NAME} "
        f"while its last chunk is prefilled, and the pool has {free}: {shorter}give the cache more memory."
    )
