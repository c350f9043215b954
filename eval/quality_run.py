# SPDX-License-Identifier: Apache-2.0
"""Drives one engine process per format and keeps what is done, so that a run can be resumed."""
from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quality_formats import PLUGIN, Format, unsupported

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
        progress: called with (format label, unit id or None) whenever something is done, from any thread.
        status: {format label: why some of its units are missing}.
        stopped: why no more engines are started, if so.
        live: engine processes now running.
    """

    model: str
    llm: dict[str, Any]
    work: Path
    progress: Callable[[str, str | None], None] = lambda label, unit: None
    status: dict[str, str] = field(default_factory=dict)
    stopped: str = ""
    live: set[subprocess.Popen] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        config = Path(self.model) / "config.json"
        weights = config.read_text() if config.is_file() else self.model
        fixed = {k: v for k, v in self.llm.items() if k != "max_model_len"}
        self.home = self.work / digest([weights, str(self.model), fixed, "top_base"])  # what units hold since
        self.sources = sources_digest()  # once: the checkout may change while this runs

    def folder(self, fmt: Format) -> Path:
        """Where the results of a format are kept."""
        key = [fmt.llm_arguments(), fmt.patches, self.sources if fmt.dtype == PLUGIN else ""]
        return self.home / f"{fmt.dtype}-{digest(key)}"

    def run(self, fmt: Format, units: list[dict[str, Any]], prefix_caching: bool) -> None:
        """Compute the units that are missing; a format that fails gets its reason in `status`."""
        folder, base = self.folder(fmt), self.home / "base"
        waiting = lambda u: not (folder / f"{u['id']}.npz").exists() or (
            fmt.is_base and not (base / f"{u['id']}.pt").exists()
        )
        missing = [u for u in units if waiting(u)]
        for done in units:
            if done not in missing:
                self.progress(fmt.label, done["id"])
        if not missing or self.stopped:
            if missing:
                self.status[fmt.label] = self.stopped
            return
        arguments = {"model": self.model, **self.llm, **fmt.llm_arguments(), "enable_prefix_caching": prefix_caching}
        job = {
            "folder": str(folder), "base": str(base), "is_base": fmt.is_base, "patches": fmt.patches,
            "llm": arguments, "units": missing,
        }  # fmt: skip
        reason = self._process(fmt, job, prefix_caching)
        if reason and any(map(waiting, units)):  # an engine that only failed to close has done its work
            self.status[fmt.label] = reason
            if fmt.is_base:
                self.stop(reason)  # whoever waits for its hidden states would wait in vain

    def run_all(self, formats: list[Format], units: list[dict[str, Any]], jobs: int) -> None:
        """All formats, `jobs` engines at a time; with more than one, formats start beside `auto` and wait for it."""
        for fmt in formats:
            if reason := unsupported(fmt, on_cpu=not torch.cuda.is_available()):
                self.status[fmt.label] = reason
        parts = [
            (fmt, part, warm) for fmt in formats if fmt.label not in self.status for warm in (False, True)
            if (part := [u for u in units if bool(u["warm"]) == warm])
        ]  # fmt: skip
        if jobs == 1:
            for fmt, *part in parts:
                if fmt.label not in self.status:  # what failed once fails again
                    self.run(fmt, *part)
            return
        # auto's parts come first in the queue, so that no format can hold every place and wait for them.
        with ThreadPoolExecutor(max(jobs, sum(fmt.is_base for fmt, *_ in parts))) as pool:
            waiting = [pool.submit(self.run, *part) for part in parts]
            try:
                for one in waiting:
                    one.result()
            except BaseException:
                self.stop("interrupted")
                raise

    def stop(self, reason: str) -> None:
        """End every engine and start no more; what is finished stays."""
        with self.lock:
            self.stopped = self.stopped or reason
            for process in self.live:
                process.terminate()

    def _process(self, fmt: Format, job: dict[str, Any], prefix_caching: bool) -> str | None:
        """Run a job; the reason if it failed."""
        self.home.mkdir(parents=True, exist_ok=True)
        log = self.home / f"{fmt.dtype}-{digest([fmt.label, prefix_caching])}.log"
        with tempfile.NamedTemporaryFile("w", suffix=".json", dir=self.home) as file, log.open("a") as errors:
            json.dump(job, file)
            file.flush()
            with self.lock:
                if self.stopped:
                    return self.stopped
                process = subprocess.Popen(
                    [sys.executable, str(WORKER), file.name],
                    stdout=subprocess.PIPE, stderr=errors, text=True, env=engine_environment(),
                )  # fmt: skip
                self.live.add(process)
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
                with self.lock:
                    self.live.discard(process)
        if process.returncode == 0:
            return None
        return reason and f"{reason} (log: {log})" or self.stopped or f"the engine process died (log: {log})"

    def result(self, fmt: Format, unit: dict[str, Any]) -> dict[str, np.ndarray] | None:
        """Arrays of a finished unit (see `quality_engine.compare`), None if there are none."""
        path = self.folder(fmt) / f"{unit['id']}.npz"
        if not path.exists():
            return None
        with np.load(path) as arrays:
            return dict(arrays)
