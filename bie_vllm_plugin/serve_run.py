# SPDX-License-Identifier: Apache-2.0
"""Runs the server as a child: passes its log through, ends it cleanly, says in one sentence why it failed.

The child gets a session of its own, so that Ctrl-C reaches it once and in order,
and so that everything it started can be found and ended with it.
"""
from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

import psutil

READY = "Application startup complete"
"""uvicorn's line when requests are served."""

STOP_SECONDS = 30.0
"""What the server gets to finish by itself after Ctrl-C."""

EXIT_INTERRUPTED = 130

_PREFIX = re.compile(r"^(?:\([^()]*pid=\d+\)\s*)+")
_ERROR = re.compile(r"^(?:[\w.]*\.)?(?P<kind>[A-Z]\w*(?:Error|Exception|Exit)): (?P<text>.+)$")
_VLLM_LOG = re.compile(r"^(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^\]]*\]\s?")

UNTELLING = ("Engine core initialization failed", "See root cause above", "WorkerProc initialization failed")
"""What vLLM's outer processes say about an inner one's error."""


class ServerLog:
    """Passes the child's lines on; before the server is ready, tracebacks are held back.

    A traceback at start-up means that the server will not start, and its last line
    says why. The whole log is kept in a file.
    """

    def __init__(self, out: TextIO, file: IO[str]) -> None:
        self.out, self.file = out, file
        self.ready = threading.Event()
        self.held: list[str] = []
        self.errors: list[str] = []

    def feed(self, line: str) -> None:
        """Take one line of the child."""
        self.file.write(line)
        bare = _VLLM_LOG.sub("", _PREFIX.sub("", line.rstrip("\n")))
        if READY in line:
            self.ready.set()
            for held in self.held:  # a traceback that was survived is news after all
                self.out.write(held)
            self.held = []
        if not self.ready.is_set():
            found = _ERROR.match(bare.strip())
            if found and not any(text in found["text"] for text in UNTELLING):
                self.errors.append(_sentence(found["text"]))
            if self.held or "Traceback (most recent call last)" in line or line.startswith("Process "):
                self.held.append(line)
                return
            if bare.lstrip().startswith(("usage:", "error:")) or "error: " in bare:  # vLLM's argument parser
                self.held.append(line)
                if "error: " in bare:
                    self.errors.append(bare.split("error: ", 1)[1])
                return
        self.out.write(line)
        self.out.flush()

    def reason(self) -> str:
        """Why the server did not start: the first telling error."""
        return self.errors[0] if self.errors else "vLLM gave no reason"


def _sentence(text: str) -> str:
    """An error's text without pydantic's and vLLM's decorations, ending in a full stop."""
    text = re.sub(r"^1 validation error for \w+\s*", "", text)
    text = text.removeprefix("Value error, ")
    text = re.sub(r"\s*\[type=.*$", "", text).strip()
    text = re.sub(r"\s*See https://\S+ for more details\.?", "", text)
    return text if text.endswith(".") else text + "."


def run_server(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run until the server ends or is told to; returns the exit status.

    0 after Ctrl-C or SIGTERM of a running server, 130 if it was interrupted while
    starting, the child's status (at least 1) if it ended by itself.
    """
    with tempfile.NamedTemporaryFile("w", prefix="bie-serve-", suffix=".log", delete=False) as file:
        log = ServerLog(sys.stdout, file)
        child = subprocess.Popen(
            list(command),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        reader = threading.Thread(target=_read, args=(child.stdout, log), daemon=True)
        reader.start()
        stopped = _wait(child)
        leftovers = end_session(child.pid)
        reader.join(timeout=5)
        path = Path(file.name)
    if stopped is not None:
        path.unlink(missing_ok=True)
        return 0 if log.ready.is_set() else EXIT_INTERRUPTED
    if child.returncode == 0:
        path.unlink(missing_ok=True)
        return 0
    what = "stopped" if log.ready.is_set() else "did not start"
    if log.ready.is_set():
        reason = f"vLLM ended with status {child.returncode}."
    else:
        reason = log.reason()
    ended = f" ({leftovers} left-over processes were ended)" if leftovers else ""
    print(f"bie-serve: the server {what}: {reason} Full log: {path}{ended}", file=sys.stderr)
    return child.returncode if child.returncode and child.returncode > 0 else 1


def _read(stream: IO[str], log: ServerLog) -> None:
    for line in stream:
        log.feed(line)


def _wait(child: Any) -> int | None:
    """Wait for the child; returns the signal that asked us to stop, None if it ended by itself."""
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        del frame
        received.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        while child.poll() is None and not received:
            time.sleep(0.1)
        if not received:
            return None
        print("bie-serve: stopping", file=sys.stderr)
        deadline = time.monotonic() + STOP_SECONDS
        _signal(child.pid, signal.SIGINT)
        while child.poll() is None and time.monotonic() < deadline and len(received) < 2:
            time.sleep(0.1)
        return received[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def end_session(session: int) -> int:
    """End every process of the session: politely, then not; returns how many there were."""
    left = _session(session)
    for process in left:
        _quietly(process.terminate)
    _, alive = psutil.wait_procs(left, timeout=5)
    for process in alive:
        _quietly(process.kill)
    psutil.wait_procs(alive, timeout=5)
    return len(left)


def _quietly(action: Callable[[], None]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        action()


def _session(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            continue
    return found
