# SPDX-License-Identifier: Apache-2.0
"""`Launches` picks the kernel that the JIT would pick, for every specialisation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_the_same_kernels_as_the_jit(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    kernels = Path(__file__).resolve().parents[1] / "kernels"
    env["PYTHONPATH"] = os.pathsep.join([str(kernels), env.get("PYTHONPATH", "")])
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).with_name("launch_stub.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    agreed, cached = map(int, done.stdout.split()[-2:])
    assert agreed == 120 and cached >= 60
