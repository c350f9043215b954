# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs and torch.compile: what vLLM may capture with our metadata builders, and what it compiles once."""
from __future__ import annotations

import gpu_engine
import pytest
import torch
from engine import assert_same, generate, llm, run_engines, started, tokens

MODES = {  # asked for -> what vLLM runs; FULL also wants mixed batches in one graph, which ours are not
    "NONE": "NONE", "PIECEWISE": "PIECEWISE", "FULL_AND_PIECEWISE": "FULL_AND_PIECEWISE",
    "FULL_DECODE_ONLY": "FULL_DECODE_ONLY", "FULL": "FULL_AND_PIECEWISE",
}  # fmt: skip


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("mode", MODES)
def test_what_vllm_captures(mode, drafts):
    """By vLLM's own resolution, from the least that the builders of body and window support."""
    from vllm.config import CompilationConfig

    from bie_vllm_plugin.backend import Int4AsymBackend, WindowBackend
    from bie_vllm_plugin.cache_spec import PageLayout, body_spec, window_spec
    from bie_vllm_plugin.config import Int4AsymConfig

    compilation = CompilationConfig(mode=3, cudagraph_mode=mode)
    compilation.set_splitting_ops_for_v1(all2all_backend="naive")
    window = window_spec(Int4AsymConfig(), 8, 128, 128, torch.bfloat16, drafts, 0)
    support = min(
        (backend.get_builder_cls().get_cudagraph_support(None, spec)
         for backend, spec in ((Int4AsymBackend, body_spec(PageLayout(128), 8)), (WindowBackend, window))),
        key=lambda each: each.value,
    )  # fmt: skip
    compilation.cudagraph_capture_sizes = [4, 8]
    compilation.max_cudagraph_capture_size = 8
    resolved = compilation.resolve_cudagraph_mode_and_sizes(support, "CUSTOM", 1 + drafts)
    assert resolved.name == MODES[mode]


def test_the_gpu_list_asks_for_every_mode(tmp_path, monkeypatch):
    """Its checks build their engines' arguments here; they run on a card."""
    from vllm.engine.arg_utils import EngineArgs

    asked = {}
    monkeypatch.setattr(gpu_engine, "FOLDER", tmp_path)
    monkeypatch.setattr(gpu_engine, "two", lambda name, first, second, *_, **__: asked.update({name: (first, second)}))
    for name, check in gpu_engine.equalities({}, {}).items():
        check(name)
    modes = {}
    for name, engines in asked.items():
        first, second = (EngineArgs(**arguments) for arguments in engines)
        if "= eager" in name:
            assert not first.enforce_eager and second.enforce_eager
            mode = first.compilation_config.cudagraph_mode
            modes[name] = None if mode is None else mode.name
    assert modes == {
        "D=128: graphs = eager": None, "head_dim axis: graphs = eager": None,  # None: vLLM's default
        "D=128: PIECEWISE graphs = eager": "PIECEWISE", "D=128: compiled without graphs = eager": "NONE",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.engine
def test_compiled_equals_eager(model_64):
    """torch.compile with Inductor; on a CPU there are no graphs."""
    steps = [generate([tokens(n, seed=n) for n in (70, 333)])]
    eager, compiled = started(run_engines(
        [{"llm": llm(model_64, enforce_eager=eager), "steps": steps} for eager in (True, False)], timeout=1800
    ))  # fmt: skip
    assert_same(eager[0], compiled[0], shared=0.8)
