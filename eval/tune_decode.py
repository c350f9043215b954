# SPDX-License-Identifier: Apache-2.0
"""Variants of the decode kernels, most valuable first, within a budget: `python eval/tune_decode.py --budget 540`.

Every variant is compiled and held against the oracle in a process of its own with a time
limit, so that one that hangs or dies costs nothing but itself; only what passed is timed,
one case a process. Each result is printed, and written to --out, as it comes.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

GATE_LIMIT, TIME_LIMIT = 60.0, 90.0
"""Seconds of one gate and of timing one case."""

ROUNDS: list[list[tuple[str, list[str]]]] = [
    [
        ("1x8k", ["keys", "keys+PROGRAMS_PER_SM=10", "keys+MIN_UNITS=3", "triton"]),
        ("8x32k", ["keys", "keys+PROGRAMS_PER_SM=10", "keys+KEYS_STAGES=2", "triton"]),
        ("q6 8x32k", ["keys", "keys+KEYS_TILES=2"]),
        ("d64 32x32k", ["keys", "keys+KEYS_NARROW_STAGES=1"]),
        ("d96 32x32k", ["keys", "keys+KEYS_STAGES=2"]),
        ("d192 32x32k", ["keys", "keys+KEYS_STAGES=2+PROGRAMS_PER_SM=5"]),
    ],
]  # fmt: skip
"""Rounds of (case, paths of bench_kernels): a round's gates run side by side, then its cases are timed."""


def shape(name: str) -> tuple[str, ...]:
    """What the gate sees of a case: everything but its batch and context."""
    return tuple(name.split()[:-1])


def case_of(name: str):  # noqa: ANN201 - bench_cases.Case, imported by the processes that have a card
    """`[qN] [dN] BxCk` -> the case."""
    import bench_cases

    *options, lengths = name.split()
    batch, context = lengths.removesuffix("k").split("x")
    fields = {{"q": "q_len", "d": "head_size"}[word[0]]: int(word[1:]) for word in options}
    return dataclasses.replace(bench_cases.uniform(int(batch), int(context) * 1024, **fields), name=name)


# -- processes that use the card ----------------------------------------------
def gate(name: str, path: str) -> None:
    """Compile and check one variant; the last line printed is its relative error."""
    import bench_kernels
    import torch

    torch.manual_seed(0)
    print(bench_kernels.gate(case_of(name), torch.bfloat16, bench_kernels.choose(path)), flush=True)


def time_case(name: str, errors: dict[str, float], samples: int, out: Path) -> None:
    """Time the paths that passed, interleaved."""
    import bench_kernels
    import torch

    torch.manual_seed(0)
    case = case_of(name)
    bandwidth = bench_kernels.copy_bandwidth()
    pages = sum(-(-n // bench_kernels.PAGE_TOKENS) for n in case.lengths)
    pool = bench_kernels.Pool(case.layout, case.kv_heads, max(pages + 64, 32768), torch.bfloat16)
    timers = {}
    for path, error in errors.items():
        fast = bench_kernels.choose(path)
        timers[path] = (error, bench_kernels.decode_timer(case, pool, torch.bfloat16, fast))
    records = bench_kernels.measure(case, timers, samples, bandwidth)
    out.write_text(json.dumps({"copy_gb_per_s": round(bandwidth), "records": records}))


# -- the process that keeps the time --------------------------------------------
def run_limited(command: list[str], limit: float, env: dict[str, str] | None = None) -> tuple[int | None, str]:
    """(exit status, output) of a command; status None when it was stopped after `limit` seconds."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
    )
    try:
        text, _ = process.communicate(timeout=limit)
        return process.returncode, text
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its compiler too
        try:
            text, _ = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:  # stuck in the driver: leave it behind
            text = ""
        return None, text


Command = Callable[..., list[str]]


def own(*words: str) -> list[str]:
    """This script as a worker."""
    return [sys.executable, str(Path(__file__).resolve()), *words]


def traced(limit: float) -> tuple[str, str]:
    """Has a worker print where it is shortly before its limit: in the compiler, or waiting for a kernel."""
    return "--trace-after", str(max(0.5, limit - 3))


def frames(text: str) -> str:
    """The innermost calls of such a print."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("  File ")]
    return "".join(f"\n    {line}" for line in lines[:4])


class Tuning:
    """A run within a budget."""

    def __init__(self, budget: float, jobs: int, command: Command = own, limit: float = 8e-3) -> None:
        self.start, self.budget, self.jobs, self.command, self.limit = time.monotonic(), budget, jobs, command, limit
        threads = str(max(1, (os.cpu_count() or 1) // jobs))  # the oracle runs in torch, `jobs` times at once
        self.env = dict(os.environ, OMP_NUM_THREADS=threads, PYTHONUNBUFFERED="1")
        self.gates: list[dict] = []
        self.times: list[dict] = []

    @property
    def left(self) -> float:
        return self.budget - (time.monotonic() - self.start)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.start:5.0f} s] {text}", flush=True)

    def gate(self, name: str, path: str) -> float | None:
        """Relative error of a variant that passed, else None."""
        limit = min(GATE_LIMIT, self.left)
        if limit < 1:
            return None
        begin = time.monotonic()
        status, text = run_limited(self.command("--gate", name, path, *traced(limit)), limit, self.env)
        seconds = round(time.monotonic() - begin, 1)
        lines = text.strip().splitlines() or [""]
        error = float(lines[-1]) if status == 0 else None
        if status is None:
            verdict = f"TIMED OUT after {limit:.0f} s{frames(text)}"
        elif error is None:
            verdict = f"FAILED ({status}): {lines[-1][:200]}"
        elif error < self.limit:
            verdict = f"passed, relative error {error:.1e}"
        else:  # NaN too
            verdict = f"REFUSED, relative error {error}"
        self.gates.append({"case": name, "path": path, "seconds": seconds, "verdict": verdict})
        self.say(f"{name} | {path}: {verdict} ({seconds} s)")
        return error if error is not None and error < self.limit else None

    def round(self, cases: list[tuple[str, list[str]]], samples: int, out: Path) -> None:
        """Gate everything, then time each case's passed paths."""
        wanted: dict[tuple, str] = {}  # most valuable first; cases of one shape share their gates
        for name, paths in cases:
            for path in paths:
                wanted.setdefault((shape(name), path), name)
        keys = list(wanted)
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            found = dict(zip(keys, pool.map(lambda key: self.gate(wanted[key], key[1]), keys), strict=True))
        for name, paths in cases:
            errors = {path: e for path in paths if (e := found[shape(name), path]) is not None}
            limit = min(TIME_LIMIT, self.left)
            if limit < 1 or not errors:
                self.say(f"{name}: not timed, " + ("no path passed" if limit >= 1 else "the budget is spent"))
                continue
            part = out.with_suffix(".part")
            part.unlink(missing_ok=True)
            words = ("--time", name, json.dumps(errors), "--samples", str(samples), "--out", str(part), *traced(limit))
            status, text = run_limited(self.command(*words), limit, self.env)
            if part.exists():
                timed = json.loads(part.read_text())
                self.times += [record | {"copy_gb_per_s": timed["copy_gb_per_s"]} for record in timed["records"]]
                part.unlink()
                self.say(f"{name}:\n{text.strip()}")
            else:
                why = f"TIMED OUT after {limit:.0f} s{frames(text)}" if status is None else f"FAILED ({status})"
                self.say(f"{name}: timing {why}\n{text.strip()[-400:]}")
            out.write_text(json.dumps({"gates": self.gates, "records": self.times}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which nothing new starts")
    parser.add_argument("--jobs", type=int, default=max(1, min(12, (os.cpu_count() or 1) - 2)))
    parser.add_argument("--samples", type=int, default=11)
    parser.add_argument("--out", type=Path, default=Path("tune_decode.json"))
    parser.add_argument("--gate", nargs=2, metavar=("CASE", "PATH"), help="worker: check one variant")
    parser.add_argument("--time", nargs=2, metavar=("CASE", "ERRORS"), help="worker: time a case")
    parser.add_argument("--trace-after", type=float, default=0.0, help="worker: print the stack after so many seconds")
    args = parser.parse_args()
    if args.trace_after:
        faulthandler.dump_traceback_later(args.trace_after)
    if args.gate or args.time:
        try:
            if args.gate:
                gate(*args.gate)
            else:
                time_case(args.time[0], json.loads(args.time[1]), args.samples, args.out)
        finally:
            faulthandler.cancel_dump_traceback_later()
    else:
        run = Tuning(args.budget, args.jobs)
        for cases in ROUNDS:
            run.round(cases, args.samples, args.out)
        passed = sum(x["verdict"].startswith("passed") for x in run.gates)
        run.say(f"done: {passed} of {len(run.gates)} variants passed, {len(run.times)} times in {args.out}")


if __name__ == "__main__":
    main()
