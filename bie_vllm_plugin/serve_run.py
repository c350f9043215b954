# SPDX-License-Identifier: Apache-2.0
"""Runs the server as a child: passes its log through, ends it cleanly, says in one sentence why it failed.

The child gets a session of its own, so that Ctrl-C reaches it once and in order,
and so that everything it started can be found and ended with it.
"""
from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

import psutil

READY = "Application startup complete"
"""uvicorn's line when requests are served."""

STOP_SECONDS = 30.0
"""What the server gets to finish by itself after Ctrl-C."""

EXIT_INTERRUPTED = 130

_PREFIX = re.compile(r"^(?:\([^()]*pid=\d+\)\s*)+")
_STARTS_ERROR = re.compile(r"Traceback \(most recent call last\)|^Process \S+:$|^usage: |^\S+: error: ")
_USAGE = re.compile(r"^\S+: error: (?P<text>.+)$", re.MULTILINE)
_VALIDATION = re.compile(
    r"ValidationError: \d+ validation errors? for \w+\n(?:(?P<field>\w[\w.]*)\n)?\s+(?P<text>.+?)\s*\[type="
)
_ERROR = re.compile(r"^(?:[\w.]*\.)?[A-Z]\w*(?:Error|Exception|Exit): (?P<text>.+)$", re.MULTILINE)
_VLLM_LOG = re.compile(r"^(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^\]]*\]\s?")

UNTELLING = (
    "Engine core initialization failed", "See root cause above", "WorkerProc initialization failed", "cancelled",
    "Executor failed", "EngineCore encountered an issue",
)  # fmt: skip
"""What vLLM's outer processes say about an inner one's error or sudden end."""

_ENGINE_ENDED = re.compile(
    r"EngineDeadError|EngineCore encountered a fatal error|engine core exited unexpectedly|"
    r"Engine core initialization failed"
)
_ENGINE_PROCESSES = ("(EngineCore", "(Worker")
_WORKER_DIED = re.compile(r"Worker proc \S+ died unexpectedly")


class ServerLog:
    """Passes the child's lines on; before the server is ready, tracebacks are held back.

    A traceback at start-up means that the server will not start, and its last line
    says why. Afterwards errors of the engine's processes are noted, for the API server
    ends with status 0 when its engine is gone. The whole log is kept in a file.
    """

    def __init__(self, out: TextIO, file: IO[str]) -> None:
        self.out, self.file = out, file
        self.ready = threading.Event()
        self.held: list[str] = []
        self.bare: list[str] = []
        self.engine_ended = False
        self.engine_errors: deque[str] = deque(maxlen=16)
        self.worker_died = ""

    def feed(self, line: str) -> None:
        """Take one line of the child."""
        self.file.write(line)
        bare = _VLLM_LOG.sub("", _PREFIX.sub("", line.rstrip("\n")))
        if READY in line:
            self.ready.set()
            for held in self.held:  # a traceback that was survived is news after all
                self.out.write(held)
            self.held = []
        self.engine_ended |= bool(_ENGINE_ENDED.search(bare))
        if died := _WORKER_DIED.search(bare):
            self.worker_died = died[0]
        if not self.ready.is_set() and (self.held or _STARTS_ERROR.search(bare)):
            self.held.append(line)
            self.bare.append(bare)
            return
        if self.ready.is_set() and line.startswith(_ENGINE_PROCESSES) and (error := _ERROR.search(bare)):
            self.engine_errors.append(error["text"])
        self.out.write(line)
        self.out.flush()

    def engine_reason(self) -> str:
        """Why the engine of a running server ended, as one sentence."""
        if telling := _telling(self.engine_errors):
            return "its engine failed: " + _stop(telling[-1])
        what = self.worker_died or "a process of its engine ended without a message"
        return f"{what}; it was killed, or memory ran out."

    def reason(self) -> str:
        """Why the server did not start: the first error that tells it, as one sentence."""
        text = "\n".join(self.bare)
        if found := _USAGE.search(text):
            return _stop(found["text"])
        if found := _VALIDATION.search(text):
            message = found["text"].removeprefix("Value error, ")
            field = found["field"]
            return _stop(f"--{field.replace('_', '-')}: {message}" if field else message)
        if telling := _telling([match["text"] for match in _ERROR.finditer(text)]):
            return _stop(telling[0])
        return self.engine_reason() if self.engine_ended or self.worker_died else "vLLM gave no reason."


def _telling(errors: Iterable[str]) -> list[str]:
    return [error for error in errors if not any(part in error for part in UNTELLING)]


def _stop(text: str) -> str:
    text = re.sub(r"\s*See https://\S+ for more details\.?", "", text).strip()
    return text if text.endswith(".") else text + "."


def run_server(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run until the server ends or is told to; returns the exit status.

    0 after Ctrl-C or SIGTERM of a running server, 130 if it was interrupted while
    starting, the child's status (at least 1) if it ended by itself. vLLM's own status
    may be 0 when its engine has died; here it is 1.
    """
    _adopt_orphans()
    with tempfile.NamedTemporaryFile("w", prefix="bie-serve-", suffix=".log", delete=False) as file:
        log = ServerLog(sys.stdout, file)
        child = subprocess.Popen(
            list(command),
            env={**environment, "PYTHONUNBUFFERED": "1"},  # log lines as they come
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_end_with_parent(),
        )
        reader = threading.Thread(target=_read, args=(child.stdout, log), daemon=True)
        reader.start()
        interrupted = _wait(child, log.ready)
        leftovers = end_session(child.pid)
        reader.join(timeout=5)
        path = Path(file.name)
    if interrupted is not None:
        path.unlink(missing_ok=True)
        return interrupted
    if child.returncode == 0 and not log.engine_ended:
        path.unlink(missing_ok=True)
        return 0
    what = "stopped" if log.ready.is_set() else "did not start"
    if child.returncode < 0:
        reason = f"vLLM was ended by signal {-child.returncode} ({signal.strsignal(-child.returncode)})."
    elif log.ready.is_set():
        reason = log.engine_reason() if log.engine_ended else f"vLLM ended with status {child.returncode}."
    else:
        reason = log.reason()
    ended = f" ({leftovers} left-over processes were ended)" if leftovers else ""
    print(f"bie-serve: the server {what}: {reason} Full log: {path}{ended}", file=sys.stderr)
    return child.returncode if child.returncode and child.returncode > 0 else 1


def _read(stream: IO[str], log: ServerLog) -> None:
    for line in stream:
        log.feed(line)


def _wait(child: Any, ready: threading.Event) -> int | None:
    """Wait for the child; None if it ended by itself, else our exit status: were we running, or starting?"""
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
        running = ready.is_set()
        begin = told = time.monotonic()
        _signal(child.pid, signal.SIGINT)
        while child.poll() is None and time.monotonic() < begin + STOP_SECONDS and len(received) < 2:
            time.sleep(0.1)
            if not running and time.monotonic() > told + 2:  # vLLM may swallow it while it imports
                told = time.monotonic()
                _signal(child.pid, signal.SIGINT)
        return 0 if running else EXIT_INTERRUPTED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _end_with_parent() -> Callable[[], None] | None:
    """What makes the child get SIGTERM when this process is killed outright (Linux); run in the child."""
    if sys.platform != "linux":
        return None
    pr_set_pdeathsig, libc = 1, ctypes.CDLL(None, use_errno=True)
    return lambda: libc.prctl(pr_set_pdeathsig, int(signal.SIGTERM), 0, 0, 0)


def _adopt_orphans() -> None:
    """Become the parent of what the server's processes leave behind, so that it can be reaped (Linux)."""
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def end_session(session: int, grace: float = 5.0) -> int:
    """End every process of the session; returns how many did not go by themselves within `grace` seconds."""
    deadline = time.monotonic() + grace
    while (left := _session(session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        _quietly(process.terminate)
    _, alive = psutil.wait_procs(left, timeout=5)
    for process in alive:
        _quietly(process.kill)
    psutil.wait_procs(alive, timeout=5)
    with contextlib.suppress(ChildProcessError):  # reap adopted orphans
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
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
