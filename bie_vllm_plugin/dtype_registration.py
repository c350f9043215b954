# SPDX-License-Identifier: Apache-2.0
"""Make `int4_asym` a value of `--kv-cache-dtype`.

vLLM 0.33 has a public hook, `register_kv_cache_dtype`. In 0.32 the allowed values
are a `Literal` in the annotation of `CacheConfig.cache_dtype`; it is widened and
the pydantic dataclasses that hold it are rebuilt.
"""
from __future__ import annotations

import sys
from typing import Any, Literal, cast, get_args

import torch
import vllm.config.cache as _cache
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

from bie_vllm_plugin.config import DTYPE_NAME

cache_module: Any = _cache  # what it offers differs between releases


def register_dtype() -> None:
    """Add the dtype once; a second call changes nothing."""
    if hasattr(cache_module, "register_kv_cache_dtype"):
        _register_public()
    else:
        _register_literal()


def _register_public() -> None:
    """vLLM 0.33 and later."""
    if cache_module.is_known_kv_cache_dtype(DTYPE_NAME):
        return
    from vllm.v1.kv_cache_interface import KVQuantMode

    class Int4AsymHandler:
        """Answers vLLM's questions about the dtype: bytes in storage, no generic kernel."""

        name = DTYPE_NAME

        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> KVQuantMode:
            # Shares its value with another mode in 0.33: nobody may branch on its name.
            modes: Any = KVQuantMode
            return modes.CUSTOM

    register: Any = cache_module.register_kv_cache_dtype
    register(DTYPE_NAME)(Int4AsymHandler)


def _register_literal() -> None:
    """vLLM 0.32: widen the Literal wherever it was imported, then rebuild the validators."""
    old = cache_module.CacheDType
    if DTYPE_NAME in get_args(old):
        return
    from pydantic.dataclasses import rebuild_dataclass
    from vllm.config.cache import CacheConfig
    from vllm.config.vllm import VllmConfig

    new: Any = Literal[(*get_args(old), DTYPE_NAME)]  # type: ignore[valid-type]
    STR_DTYPE_TO_TORCH_DTYPE[DTYPE_NAME] = torch.uint8
    for module in list(sys.modules.values()):
        if module.__name__.startswith("vllm.") and getattr(module, "CacheDType", None) is old:
            module.CacheDType = new  # type: ignore[attr-defined]
    CacheConfig.__annotations__["cache_dtype"] = new
    CacheConfig.__dataclass_fields__["cache_dtype"].type = new
    for config in (CacheConfig, VllmConfig):
        rebuild_dataclass(cast(Any, config), force=True)
