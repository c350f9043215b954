# SPDX-License-Identifier: Apache-2.0
"""No compilation after the server says that it is ready: what steps launch, `warm_up` has compiled."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("vllm")

from kernel_cases import DEVICE, guard_memory  # noqa: E402
from test_prefill_flash import flash_of  # noqa: E402

from bie_kernels import decode, flash_plan, prefill  # noqa: E402
from bie_kernels.layout import PageLayout, WindowLayout  # noqa: E402
from bie_kernels.torch_path import Rule  # noqa: E402
from bie_vllm_plugin.cuda_path import FlashLimits  # noqa: E402
from bie_vllm_plugin.warm_up import warm_up  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]


def compare(*arguments: str) -> list[dict]:
    """Runs `warm_up_launches.py` where no interpreter is on; a row per engine."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), env.get("PYTHONPATH", "")])
    script = Path(__file__).with_name("warm_up_launches.py")
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    for row in rows:
        print(f"{row['engine']}: {row['compiled']} compiled, {row['launched']} launched in {row['steps']} steps")
    return rows


def test_steps_launch_just_what_was_compiled() -> None:
    """Both ways: a warm-up that leaves one out is noticed, since steps here launch all that it compiles."""
    rows = compare()
    for row in rows:
        assert row["missing"] == {}, f"{row['engine']}: a step compiles what the warm-up did not"
        assert row["idle"] == [], f"{row['engine']}: compiled, and no step launches it"
    sources = "\n".join(path.read_text() for path in (ROOT / "kernels/bie_kernels").glob("*.py"))
    kernels = set(re.findall(r"^def (\w+_kernel)\(", sources, re.MULTILINE))
    assert {kernel for row in rows for kernel in row["kernels"]} == kernels


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1000, 2000])
def test_random_engines(seed: int) -> None:
    for row in compare("--random", "40", "--seed", str(seed), "--steps", "300"):
        assert row["missing"] == {}, row["engine"]


@pytest.mark.parametrize(
    ("axis", "slices"), [("channel", False), pytest.param("head_dim", True, marks=pytest.mark.slow)]
)
def test_it_writes_no_page(axis: str, slices: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches full of NaN stay as they are; all but slices, which read the null page, keep within their tensors."""
    if not slices:
        guard_memory(monkeypatch)
    pages, rows = PageLayout(64, None, 64, axis), WindowLayout(64, 64, 2)
    heads, kv_heads, requests, tokens = 2, 1, 3, 18
    body = torch.full((3, kv_heads, 64, pages.token_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
    window = torch.full((3, kv_heads, rows.page_tokens, rows.row), float("nan"), dtype=torch.float16, device=DEVICE)
    before = body.clone(), window.clone()
    limits = FlashLimits(flash_of(DEVICE), 1280, tokens, 64, 0, 4 * heads * 64, 0.0)
    size = max(
        decode.workspace_bytes(requests, heads, 64, 1, kv_heads=kv_heads, device=DEVICE),
        prefill.workspace_bytes(64, device=DEVICE),
        flash_plan.workspace_bytes(1280, tokens, heads, kv_heads, pages, 2),
    )
    warm_up(
        SimpleNamespace(num_heads=heads, num_kv_heads=kv_heads, kv_cache=body), window, pages, Rule(8, 64, 127),
        torch.empty(size, dtype=torch.uint8, device=DEVICE), limits=limits if slices else None, soft_cap=0.0,
        requests=requests, q_lens=(1,), tokens=tokens, dtype=torch.float16,
    )  # fmt: skip
    assert torch.equal(body, before[0])
    assert torch.equal(window.view(torch.int16), before[1].view(torch.int16))
