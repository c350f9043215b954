# SPDX-License-Identifier: Apache-2.0
"""The soak of `soak.py` in small; run the script itself for the long one."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("requests", "drafts"),
    [(120, 0), pytest.param(600, 3, marks=pytest.mark.slow), pytest.param(10_000, 0, marks=pytest.mark.slow)],
)
def test_soak(requests, drafts):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    script = Path(__file__).with_name("soak.py")
    command = [sys.executable, str(script), "--requests", str(requests), "--drafts", str(drafts)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=7200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    print(result)
    assert result["ok"] and result["aborted"] > requests / 20 and result["prefix_hits"] > 0
