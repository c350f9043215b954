# SPDX-License-Identifier: Apache-2.0
"""The soak of `soak.py` in small; run the script itself for the long one."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine import compare_answer


def answer(tokens: list[int], logprobs: list[float], other: tuple[int, float] = (9, -3.0)) -> dict:
    """A probe's answer, `other` being the second choice everywhere."""
    top = [{token: value, other[0]: other[1]} for token, value in zip(tokens, logprobs, strict=True)]
    return {"tokens": tokens, "logprobs": logprobs, "top": top}


@pytest.mark.parametrize(
    ("known", "found", "expected"),
    [
        (answer([1, 2, 3], [-1.0] * 3), answer([1, 2, 3], [-1.0, -1.01, -1.0]), (True, 3, None)),
        (answer([1, 2, 3], [-1.0] * 3), answer([1, 2, 3], [-1.0, -1.2, -1.0]), (False, 3, None)),
        # Another text at once, every token of it as likely as the known one: no error of 1e-3, and wrong.
        (answer([1, 2, 3], [-1.0] * 3), answer([7, 8, 9], [-1.0] * 3), (False, 0, float("inf"))),
        (answer([1, 2, 3], [-1.0] * 3), answer([1, 9, 3], [-1.0] * 3), (False, 1, 2.0)),
        (answer([1, 2, 3], [-1.0] * 3, (9, -1.01)), answer([1, 9, 4], [-1.0] * 3), (True, 1, 0.01)),
        (answer([1, 2, 3], [-1.0] * 3), answer([1, 2], [-1.0] * 2), (False, 2, None)),
    ],
)  # fmt: skip
def test_a_probe_is_right_by_its_tokens(known, found, expected):
    """Tokens decide; they may part only where the fresh engine's first two choices are within the tie bound."""
    result = compare_answer(known, found, worst=0.05, tie=0.02)
    gap = None if expected[2] is None else pytest.approx(expected[2])
    assert (result["right"], result["shared"], result["gap"]) == (*expected[:2], gap)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("requests", "drafts"),
    [(120, 0), pytest.param(600, 3, marks=pytest.mark.slow), pytest.param(10_000, 0, marks=pytest.mark.slow)],
)
def test_soak(requests, drafts, tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    script = Path(__file__).with_name("soak.py")
    out = tmp_path / "soak.json"
    command = [sys.executable, str(script), "--requests", str(requests), "--drafts", str(drafts), "--out", str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=7200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    print(result)
    assert result["ok"] and result["aborted"] > requests / 20 and result["prefix_hits"] > 0
    assert result["probes_right"] == result["probes"] > 0 and result["tokens_shared"] >= 0.9
    assert json.loads(out.read_text()) == result and result["versions"]["vllm"] and "soak.py" in result["command"]
