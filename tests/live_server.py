# SPDX-License-Identifier: Apache-2.0
"""A real bie-serve in a process of its own, and a plain HTTP client that can hang up."""
from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]


class Server:
    """bie-serve with a model on a CPU; everything that it says goes to `log`."""

    def __init__(self, model: str, log: Path, *flags: str, **env: str) -> None:
        self.port, self.log = free_port(), log
        clean = {key: val for key, val in os.environ.items() if not key.startswith("VLLM_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bie_vllm_plugin.serve", model, "--port", str(self.port), "--enforce-eager", *flags],
            stdout=log.open("w"), stderr=subprocess.STDOUT, env=clean | env, start_new_session=True,
        )  # fmt: skip

    def wait_ready(self, seconds: float = 180) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2)
                return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-6000:])

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self) -> None:
        """As Ctrl-C does; nothing if it has ended."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                for process in [*self.family(), psutil.Process(self.process.pid)]:
                    process.kill()
                raise

    # -- the client ------------------------------------------------------------------
    def post(self, **body) -> tuple[int, dict]:
        """/v1/completions: status and answer."""
        connection, _ = self.send(**body)
        response = connection.getresponse()
        answer = json.loads(response.read())
        connection.close()
        return response.status, answer

    def send(self, **body) -> tuple[http.client.HTTPConnection, Iterator[dict | str]]:
        """/v1/completions: the connection, to hang up with, and the events of a stream; "[DONE]" is one."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})

        def events() -> Iterator[dict | str]:
            for line in connection.getresponse():
                if line.startswith(b"data: "):
                    data = line[6:].decode().strip()
                    yield data if data == "[DONE]" else json.loads(data)

        return connection, events()

    def metric(self, name: str, **labels: str) -> float:
        """A Prometheus metric, summed over what `labels` leaves open."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as response:
            text = response.read().decode()
        rows = re.findall(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
        assert rows, f"no metric {name}"
        return sum(float(v) for tags, v in rows if all(f'{key}="{val}"' in tags for key, val in labels.items()))
