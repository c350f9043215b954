# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time builds for every card family: they compile, fit shared memory, and decode does not spill."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BUILDS = [
    "decode-sm_80-d128-bf16", "decode-sm_86-d64-fp16", "decode-sm_89-d128-fp16", "decode-sm_90-d128-bf16",
    "decode-sm_100-d128-bf16", "decode-sm_120-d64-bf16",
    "decode-sm_80-d128-fp16-keys", "decode-sm_86-d128-bf16-keys", "decode-sm_89-d64-bf16-keys",
    "decode-sm_90-d128-bf16-keys", "decode-sm_90-d128-bf16-gqa16-keys", "decode-sm_100-d128-bf16-keys",
    "decode-sm_120-d128-bf16-keys", "decode-sm_89-d256-bf16-keys", "decode-sm_86-d96-fp16-keys",
    "decode-sm_90-d128-bf16-q6-keys", "decode-sm_89-d128-bf16-q6-keys", "decode-sm_80-d64-bf16-q6",
    "prefill-sm_80-d64-fp16", "prefill-sm_90-d128-bf16", "prefill-sm_120-d128-bf16",
    "flash-sm_80-d64-fp16", "flash-sm_90-d128-bf16",
    "store-sm_86-d64-fp16", "store-sm_90-d128-bf16", "seal-sm_89-d64-bf16", "seal-sm_90-d128-bf16",
]  # fmt: skip
"""Picked so that every family, card and size occurs; the whole matrix is `slow`."""

MATRIX = [
    f"{family}-sm_{arch}-d{size}-{dtype}{rest}"
    for arch, size, dtype in itertools.product((80, 86, 89, 90, 100, 120), (64, 80, 96, 112, 128, 192, 256), ("bf16",))
    for family, rest in (
        ("decode", ""), ("decode", "-gqa16"), ("decode", "-head_dim"), ("decode", "-g32"), ("decode", "-q6"),
        ("prefill", ""), ("prefill", "-head_dim"), ("flash", ""), ("flash", "-head_dim"),
        ("store", ""), ("store", "-head_dim"), ("seal", ""),
        *((("decode", "-keys"), ("decode", "-gqa16-keys"), ("decode", "-q6-keys")) if size not in (80, 112) else ()),
    )
]  # fmt: skip
SPILLS = {"decode-sm_90-d128-bf16-q6-keys": 64, "decode-sm_89-d128-bf16-q6-keys": 64}
"""Bytes of stack that a named build may take: 24 rows need every register, the rest goes around the loops."""

SMALL_SHARED_MEMORY = (86, 89, 120)
LIMIT = 99 * 1024


def build(name: str) -> list[dict]:
    """Compile in a process of its own: this one may run Triton's interpreter."""
    root = Path(__file__).resolve().parents[1]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(root / "kernels"), env.get("PYTHONPATH", "")])
    script = Path(__file__).with_name("aot_builds.py")
    done = subprocess.run([sys.executable, str(script), name], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(name: str) -> None:
    rows = build(name)
    assert rows
    for row in rows:
        print(
            f"{name}: {row['kernel']} {row['registers']} registers, {row['stack']} bytes of stack, "
            f"{row['shared']} bytes of shared memory"
        )
        if row["sm"] in SMALL_SHARED_MEMORY:
            assert row["shared"] <= LIMIT
        if name in BUILDS and row["kernel"].startswith("decode"):
            assert row["local"] == 0 and row["stack"] <= SPILLS.get(name, 0), f"{name}: {row['kernel']} spills"


@pytest.mark.parametrize("name", BUILDS)
def test_named_build(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MATRIX)
def test_matrix(name: str) -> None:
    check(name)
