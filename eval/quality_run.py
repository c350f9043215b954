# SPDX-License-Identifier: Apache-2.0
"""Drives one engine process per format and keeps what is done, so that a run can be resumed."""
from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from quality_formats import PLUGIN, Format

ROOT = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).with_name("quality_engine.py")


def digest(value: Any) -> str:
    """A short name for a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]


def sources_digest() -> str:
    """A short name for the plugin's sources: results of other sources are not taken for these."""
    total = hashlib.sha256()
    for folder in ("bie_vllm_plugin", "kernels/bie_kernels"):
        for path in sorted((ROOT / folder).glob("*.py")):
            if not path.name.startswith(("plan", "serve")):  # no part of an engine
                total.update(path.read_bytes())
    return total.hexdigest()[:10]


def engine_environment() -> dict[str, str]:
    """Environment of engine processes: in-process core (hooks), quiet, every CPU unless told otherwise."""
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TOKENIZERS_PARALLELISM": "false"}
    env.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    env.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    return env


@dataclass
class Runner:
    """Runs units on formats of one model.

    Attributes:
        model: folder or Hub id.
        llm: further arguments of `LLM` for every format.
        work: folder of finished units and of `auto`'s hidden states.
        progress: called with (format label, unit id or None) whenever something is done.
    """

    model: str
    llm: dict[str, Any]
    work: Path
    progress: Callable[[str, str | None], None] = lambda label, unit: None
    status: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = Path(self.model) / "config.json"
        weights = config.read_text() if config.is_file() else self.model
        fixed = {k: v for k, v in self.llm.items() if k != "max_model_len"}
        self.home = self.work / digest([weights, str(self.model), fixed])
        self.sources = sources_digest()  # once: the checkout may change while this runs

    def folder(self, fmt: Format) -> Path:
        """Where the results of a format are kept."""
        key = [fmt.llm_arguments(), fmt.patches, self.sources if fmt.dtype == PLUGIN else ""]
        return self.home / f"{fmt.dtype}-{digest(key)}"

    def run(self, fmt: Format, units: list[dict[str, Any]], prefix_caching: bool) -> None:
        """Compute the units that are missing; a format that fails gets its reason in `status`."""
        folder, base = self.folder(fmt), self.home / "base"
        missing = [
            u for u in units
            if not (folder / f"{u['id']}.npz").exists() or (fmt.is_base and not (base / f"{u['id']}.pt").exists())
        ]  # fmt: skip
        for done in units:
            if done not in missing:
                self.progress(fmt.label, done["id"])
        if not missing or fmt.label in self.status:
            return
        arguments = {"model": self.model, **self.llm, **fmt.llm_arguments(), "enable_prefix_caching": prefix_caching}
        job = {
            "folder": str(folder), "base": str(base), "is_base": fmt.is_base, "patches": fmt.patches,
            "llm": arguments, "units": missing,
        }  # fmt: skip
        if reason := self._process(fmt, job):
            self.status[fmt.label] = reason

    def _process(self, fmt: Format, job: dict[str, Any]) -> str | None:
        """Run a job; the reason if it failed."""
        self.home.mkdir(parents=True, exist_ok=True)
        log = self.home / f"{fmt.dtype}-{digest(fmt.label)}.log"
        with tempfile.NamedTemporaryFile("w", suffix=".json", dir=self.home) as file, log.open("a") as errors:
            json.dump(job, file)
            file.flush()
            process = subprocess.Popen(
                [sys.executable, str(WORKER), file.name],
                stdout=subprocess.PIPE, stderr=errors, text=True, env=engine_environment(),
            )  # fmt: skip
            reason = None
            try:
                for line in process.stdout:
                    if not line.startswith("{"):
                        continue
                    message = json.loads(line)
                    if "unit" in message:
                        self.progress(fmt.label, message["unit"])
                    reason = message.get("error", reason)
            except BaseException:  # an interrupted run must not leave an engine behind
                process.terminate()
                raise
            finally:
                process.wait()
        if process.returncode == 0:
            return None
        return f"{reason or 'the engine process died'} (log: {log})"

    def result(self, fmt: Format, unit: dict[str, Any]) -> dict[str, np.ndarray] | None:
        """Arrays of a finished unit (see `quality_engine.compare`), None if there are none."""
        path = self.folder(fmt) / f"{unit['id']}.npz"
        if fmt.label in self.status or not path.exists():
            return None
        with np.load(path) as arrays:
            return dict(arrays)
