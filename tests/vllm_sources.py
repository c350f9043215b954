# SPDX-License-Identifier: Apache-2.0
"""vLLM releases to test against: the installed one, and 0.33's Python sources unpacked beside it.

0.33 has no wheel for CPUs; its managers and its registration are plain Python and
run without the compiled extensions. The wheel is downloaded once into the cache.
"""
from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION_033 = "0.33.0"


def sources_033() -> Path:
    """Folder to put on PYTHONPATH for vLLM 0.33 (Python files only)."""
    cache = Path(os.environ.get("BIE_CACHE", Path.home() / ".cache" / "bie-vllm-plugin"))
    folder = cache / f"vllm-{VERSION_033}-sources"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        platforms = [f"manylinux_2_{n}_x86_64" for n in (28, 31, 34, 35)] + ["manylinux1_x86_64"]
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", scratch,
             *(flag for name in platforms for flag in ("--platform", name)), "--python-version", "3.12",
             f"vllm=={VERSION_033}"],
            check=True,
        )  # fmt: skip
        (wheel,) = Path(scratch).glob("*.whl")
        unpacked = Path(scratch) / "sources"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked, [name for name in archive.namelist() if name.endswith((".py", ".json"))])
        # vLLM tells its platform from the version of the installed distribution.
        info = unpacked / f"vllm-{VERSION_033}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION_033}+cpu\n")
        if not folder.exists():
            unpacked.rename(folder)
    return folder


def run_with(version: str, arguments: list[str], timeout: int = 600) -> subprocess.CompletedProcess:
    """Run `python *arguments` with the named vLLM ("0.32": the installed one)."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if version == "0.33":
        before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        env["PYTHONPATH"] = os.pathsep.join([str(sources_033()), *before])
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=timeout)
