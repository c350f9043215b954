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
from build_report import note

from bie_kernels.layout import PageLayout
from bie_kernels.tuning import SHARED_MEMORY, keys_shared, prefill_shared

BUILDS = [
    "decode-sm_80-d128-bf16", "decode-sm_86-d64-fp16", "decode-sm_89-d128-fp16", "decode-sm_90-d128-bf16",
    "decode-sm_100-d128-bf16", "decode-sm_120-d64-bf16",
    "decode-sm_80-d128-fp16-keys", "decode-sm_86-d128-bf16-keys", "decode-sm_89-d64-bf16-keys",
    "decode-sm_90-d128-bf16-keys", "decode-sm_90-d128-bf16-gqa16-keys", "decode-sm_100-d128-bf16-keys",
    "decode-sm_120-d128-bf16-keys", "decode-sm_89-d256-bf16-keys", "decode-sm_86-d96-fp16-keys",
    "decode-sm_90-d128-bf16-q6-keys", "decode-sm_89-d128-bf16-q6-keys", "decode-sm_80-d64-bf16-q6",
    "prefill-sm_80-d64-fp16", "prefill-sm_90-d128-bf16", "prefill-sm_120-d128-bf16",
    "prefill-sm_86-d256-bf16-head_dim",
    "flash-sm_80-d64-fp16", "flash-sm_90-d128-bf16",
    "store-sm_86-d64-fp16", "store-sm_90-d128-bf16", "seal-sm_89-d64-bf16", "seal-sm_90-d128-bf16",
    "write-sm_80-d64-fp16", "write-sm_90-d128-bf16", "write-sm_120-d128-bf16-q32",
]  # fmt: skip
"""Picked so that every family, card and size occurs; the whole matrix is `slow`."""

FAMILIES = (
    ("decode", ""), ("decode", "-gqa16"), ("decode", "-head_dim"), ("decode", "-g32"), ("decode", "-q6"),
    ("decode", "-keys"), ("decode", "-gqa16-keys"), ("decode", "-q6-keys"),
    ("prefill", ""), ("prefill", "-head_dim"), ("flash", ""), ("flash", "-head_dim"),
    ("store", ""), ("store", "-head_dim"), ("seal", ""), ("write", ""),
)  # fmt: skip
KEYS_SIZES = (64, 96, 128, 192, 256)
MATRIX = [
    f"{family}-sm_{arch}-d{size}-{dtype}{rest}"
    for dtype, archs, sizes in (
        ("bf16", (80, 86, 89, 90, 100, 120), (64, 80, 96, 112, 128, 192, 256)),
        ("fp16", (80, 90), (64, 128, 256)),
    )
    for arch, size, (family, rest) in itertools.product(archs, sizes, FAMILIES)
    if size in KEYS_SIZES or not rest.endswith("-keys")
]


def build(name: str) -> list[dict]:
    """Compile in a process of its own: this one may run Triton's interpreter."""
    root = Path(__file__).resolve().parents[1]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(root / "kernels"), env.get("PYTHONPATH", "")])
    script = Path(__file__).with_name("aot_builds.py")
    done = subprocess.run([sys.executable, str(script), name], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(name: str, record_property) -> None:  # noqa: ANN001
    rows = build(name)
    for row in rows:
        note(record_property, row)
    assert rows
    for row in rows:
        limit = 1024 * SHARED_MEMORY[divmod(row["sm"], 10)]
        assert row["shared"] <= limit, (
            f"{name}: {row['kernel']} takes {row['shared']} of {limit} bytes of shared memory"
        )
        if row["kernel"].startswith("decode"):
            assert row["local"] == row["stack"] == 0, f"{name}: spills {row['stack']} bytes"
        if row["kernel"] == "decode_keys_kernel":
            sizes = row["constants"]
            reckoned = keys_shared(sizes["D"], max(sizes["T"], sizes["LAST"]), sizes["STAGES"])
            assert row["shared"] == reckoned, f"{name} takes {row['shared']} bytes, the pruning reckons with {reckoned}"
        if row["kernel"] == "prefill_kernel" and row["constants"]["HEAD_DIM"]:
            sizes = row["constants"]
            layout = PageLayout(sizes["D"], sizes["E"], group_size=sizes["GROUP"], key_axis="head_dim")
            assert row["shared"] <= prefill_shared(layout, sizes["BM"])
    if name.startswith("write"):
        (row,) = rows
        assert row["constants"]["STORE"] and row["constants"]["SEAL"], f"{name} is not one launch"


@pytest.mark.parametrize("name", BUILDS)
def test_named_build(name: str, record_property) -> None:  # noqa: ANN001
    check(name, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("name", MATRIX)
def test_matrix(name: str, record_property) -> None:  # noqa: ANN001
    check(name, record_property)


def test_figures_of_passing_tests_are_printed(tmp_path: Path) -> None:
    """With workers, too, whose output nobody sees."""
    row = {"build": "a-build", "kernel": "some_kernel", "registers": 255, "stack": 8, "shared": 1024}
    (tmp_path / "test_one.py").write_text(
        f"from build_report import note\ndef test_one(record_property):\n    note(record_property, {row})\n"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "build_report", "-c", os.devnull, "test_one.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.stdout.count("a-build  some 255/8/1024\n") == 1, done.stdout + done.stderr
