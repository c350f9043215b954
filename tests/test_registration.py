# SPDX-License-Identifier: Apache-2.0
"""`register()` on both supported releases: idempotent, silent for others, and clear when a release is not supported."""
from __future__ import annotations

import pytest
from vllm_sources import run_with

VERSIONS = ["0.32", "0.33"]


def check(version: str, code: str) -> str:
    done = run_with(version, ["-c", code])
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_register_twice_and_use_the_dtype(version):
    out = check(
        version,
        "import bie_vllm_plugin, vllm\n"
        "from vllm.config import CacheConfig\n"
        "try:\n"
        "    CacheConfig(cache_dtype='int4_asym'); print('accepted before')\n"
        "except ValueError: print('unknown before')\n"
        "bie_vllm_plugin.register(); bie_vllm_plugin.register()\n"
        "bie_vllm_plugin._state['registered'] = False; bie_vllm_plugin.register()\n"
        "print(CacheConfig(cache_dtype='int4_asym').cache_dtype, CacheConfig(cache_dtype='fp8').cache_dtype)\n"
        "try: CacheConfig(cache_dtype='int5')\n"
        "except ValueError: print('still strict')\n"
        "from vllm.platforms import current_platform as p\n"
        "f = type(p).check_and_update_config.__func__\n"
        "inner = getattr(f, '_int4_asym_original', None)\n"
        "print('wrapped once', inner is not None and not hasattr(inner, '_int4_asym_original'))\n"
        "p.register_triton_kernel_overrides(); p.register_triton_kernel_overrides()\n"
        "from vllm.model_executor.model_loader import base_loader, tensorizer_loader, utils\n"
        "from vllm.model_executor.model_loader.weight_cache import ipc_loader\n"
        "builders = {m.initialize_model for m in (base_loader, tensorizer_loader, utils, ipc_loader)}\n"
        "builders.add(tensorizer_loader.init_tensorizer_model)\n"
        "print('builders', [hasattr(b._int4_asym_original, '_int4_asym_original') for b in builders])\n"
        "from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype as to_dtype\n"
        "print(to_dtype('int4_asym', None))\n"
        "print(vllm.__version__)",
    )
    lines = out.splitlines()
    assert lines[:-1] == ["unknown before", "int4_asym fp8", "still strict", "wrapped once True",
                          "builders [False, False]", "torch.uint8"]  # fmt: skip
    assert lines[-1].startswith(version)


@pytest.mark.parametrize("version", VERSIONS)
def test_specs_are_registered_with_their_managers(version):
    out = check(
        version,
        "import bie_vllm_plugin; bie_vllm_plugin.register()\n"
        "from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs\n"
        "register_all_kvcache_specs(None); register_all_kvcache_specs(None)\n"
        "from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry as R\n"
        "from bie_vllm_plugin.cache_spec import *\n"
        "from bie_vllm_plugin.config import Int4AsymConfig\n"
        "body = body_spec(PageLayout(128), 8)\n"
        "window = window_spec(Int4AsymConfig(), 8, 128, 128, torch.bfloat16, 0, 0)\n"
        "print(R.get_manager_class(body).__name__, R.get_manager_class(window).__name__)\n"
        "print(body.page_size_bytes, window.page_size_bytes, body.block_size, window.block_size)\n"
        "print(window.num_retained_tokens)",
    )
    assert out.splitlines() == ["BodyManager WindowManager", "73728 65536 64 16", "0"]


def test_entry_point_is_installed():
    out = check("0.32", "from importlib.metadata import entry_points as e\n"
                "print([p.value for p in e(group='vllm.general_plugins') if p.name == 'int4_asym'])")  # fmt: skip
    assert out.strip() == "['bie_vllm_plugin:register']"


def test_importing_the_plugin_imports_neither_vllm_nor_torch():
    out = check("0.32", "import sys, bie_vllm_plugin; print('vllm' in sys.modules, 'torch' in sys.modules)")
    assert out.strip() == "False False"


def test_a_vllm_with_other_internals_is_left_alone():
    """register() must never stop vLLM for users of other dtypes."""
    out = check(
        "0.32",
        "import vllm.config.cache as c; del c.CacheDType\n"
        "import bie_vllm_plugin; bie_vllm_plugin.register(); print('no exception')",
    )
    assert "no exception" in out


def test_other_dtypes_start_when_the_managers_do_not_import():
    """The scheduler's hook runs for every engine; only int4_asym may fail there, and only for its users."""
    out = check(
        "0.32",
        "import vllm.v1.core.kv_cache_utils as u; del u.resolve_block_hashes\n"
        "from types import SimpleNamespace as N\n"
        "import bie_vllm_plugin; bie_vllm_plugin.register()\n"
        "from vllm.platforms import current_platform as p\n"
        "p.register_custom_kv_cache_specs(N(cache_config=N(cache_dtype='auto'))); print('auto starts')\n"
        "p.register_custom_kv_cache_specs(None); print('so does an engine without a configuration')\n",
    )
    assert "auto starts" in out and "so does an engine" in out


def test_an_unsupported_release_is_named(model_64):
    out = check(
        "0.32",
        "import vllm; vllm.__version__ = '0.31.2'\n"
        "from vllm.engine.arg_utils import EngineArgs\n"
        f"make = lambda dtype: EngineArgs(model={model_64!r}, kv_cache_dtype=dtype, skip_tokenizer_init=True)"
        ".create_engine_config()\n"
        "make('auto'); print('auto is served')\n"
        "try: make('int4_asym')\n"
        "except Exception as e: print(e)",
    )
    assert "auto is served" in out
    assert "int4_asym supports vLLM 0.32 and 0.33, this is 0.31.2: install a supported vLLM" in out
