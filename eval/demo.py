# SPDX-License-Identifier: Apache-2.0
"""`make demo`: a real model behind the OpenAI-compatible server with an int4_asym cache.

Fetches the model, asks the server one question over HTTP, prints the answer and how
many tokens the same pool holds with `auto` and with `int4_asym`, as the engines report.
"""
from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from models import resolve
from rich.console import Console
from rich.table import Table

START_SECONDS = 300


def free_port() -> int:
    """A TCP port nobody listens on."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def server(model: str, dtype: str, args: argparse.Namespace) -> Iterator[str]:
    """vLLM's server on a free port; yields its base address and ends it, children included.

    Raises:
        SystemExit: it did not come up; the end of its log is shown.
    """
    port = free_port()
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "demo",
            "--kv-cache-dtype", dtype, "--max-model-len", str(args.context), "--port", str(port), "--host", "127.0.0.1",
            "--kv-cache-memory-bytes", str(args.pool << 30), "--gpu-memory-utilization", "0.5", "--enforce-eager",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            base = f"http://127.0.0.1:{port}"
            _wait(base, process, Path(log.name))
            yield base
        finally:
            stop(process)


def _wait(base: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{base}/health", timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise SystemExit(f"the server did not come up; the end of its log:\n{log.read_text()[-3000:]}")


def stop(process: subprocess.Popen) -> None:
    """SIGINT as Ctrl-C would, then whatever is left of the process group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def capacity(base: str) -> int:
    """Tokens that fit, from the engine's own metrics."""
    with urllib.request.urlopen(f"{base}/metrics") as response:
        text = response.read().decode()
    found = re.search(r'kv_cache_size_tokens="(\d+)"', text)
    if found is None:
        raise SystemExit("the server's metrics do not name kv_cache_size_tokens.")
    return int(found.group(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="short name of eval/models.py, folder or Hub id")
    parser.add_argument("--context", type=int, default=8192, help="max_model_len")
    parser.add_argument("--pool", type=int, default=1, help="GiB of KV cache")
    parser.add_argument("--question", default="In two sentences: why do leaves change colour in autumn?")
    args = parser.parse_args()
    console = Console()
    model = resolve(args.model)
    tokens: dict[str, int] = {}
    for dtype in ("auto", "int4_asym"):
        console.print(f"starting the server with --kv-cache-dtype {dtype} ...")
        with server(model, dtype, args) as base:
            tokens[dtype] = capacity(base)
            if dtype == "int4_asym":
                from openai import OpenAI

                client = OpenAI(base_url=f"{base}/v1", api_key="none")
                answer = client.chat.completions.create(
                    model="demo", messages=[{"role": "user", "content": args.question}], max_tokens=120, temperature=0
                )
                console.print(f"\n[bold]{args.question}[/bold]\n{answer.choices[0].message.content}\n")
    table = Table(title=f"Tokens in a pool of {args.pool} GiB, requests of {args.context:,} tokens")
    table.add_column("kv-cache-dtype")
    table.add_column("tokens", justify="right")
    table.add_column("times auto", justify="right")
    for dtype, count in tokens.items():
        table.add_row(dtype, f"{count:,}", f"{count / tokens['auto']:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
