# SPDX-License-Identifier: Apache-2.0
"""Host time of one layer's launches, us: `python eval/bench_host.py [--profile]`.

Steps that the device finishes sooner than the host can launch them (a short prompt, a short
continuation of a long one) last as long as their launches. Each call is repeated on an idle
device, and the host's time is read before the device is waited for; medians of rounds.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from bench_cases import DEVICE, RECENT, SINK
from bench_kernels import Pool
from bench_prefill import HEADS, Step

from bie_kernels import decode, store
from bie_kernels.layout import PageLayout
from bie_vllm_plugin import vllm_compat

CASES = {"1k": [(0, 1024)], "100 after 64k": [(65536, 100)]}


def calls_of(step: Step, name: str) -> dict[str, Callable[[], None]]:
    """The launches of a step, by name."""
    n = step.q.shape[0]
    slots = torch.full((n,), -1, dtype=torch.int64, device=DEVICE)
    tables = (step.body_table, step.window_table, step.starts, step.lens)

    def write() -> None:
        store.store_and_seal(
            step.k, step.v, step.pool.body, step.pool.window, slots, slots, *tables, step.layout, sink_tokens=SINK,
            retained=RECENT + 63, max_query_len=n,
        )  # fmt: skip

    calls = {f"store and seal {name}": write, f"fused {name}": step.fused}
    if step.flash is not None:
        calls[f"slices {name}"] = step.slices
        starts = step.starts
        calls[f"flash alone {name}"] = lambda: step.flash(
            step.q, step.k, step.v, out=step.outs["slices"], cu_q=starts, cu_k=starts, max_q=n, max_k=n, scale=1.0,
            causal=True, window=(-1, -1), soft_cap=0.0,
        )  # fmt: skip
    return calls


def decode_call(pool: Pool, batch: int) -> Callable[[], None]:
    lens = torch.full((batch,), 1024, dtype=torch.int32, device=DEVICE)
    table, window_table = pool.tables((1024,) * batch, 1)[0]
    q = torch.randn(batch, HEADS * 4, 128, device=DEVICE).to(pool.dtype)
    out, layout = torch.empty_like(q), pool.layout
    size = decode.workspace_bytes(batch, HEADS * 4, 128, 1, kv_heads=HEADS, device=DEVICE)
    work = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    plan = decode.plan_for(
        lens, torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE), q_heads=HEADS * 4, kv_heads=HEADS,
        head_size_v=128, q_len=1, sink_tokens=SINK, recent_tokens=RECENT,
    )  # fmt: skip
    return lambda: decode.decode(
        q, pool.body, pool.window, table, window_table, lens, out, work, layout, q_len=1, scale=128**-0.5,
        sink_tokens=SINK, recent_tokens=RECENT, retained=RECENT + 63, plan=plan,
    )  # fmt: skip


def host_us(call: Callable[[], None], repeats: int, rounds: int) -> float:
    """Median host time of a call."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        times.append((time.perf_counter() - begin) / repeats * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def profile(call: Callable[[], None], lines: int = 28) -> str:
    """Where the host's time goes."""
    profiler = cProfile.Profile()
    torch.cuda.synchronize()
    profiler.enable()
    for _ in range(100):
        call()
    profiler.disable()
    torch.cuda.synchronize()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(lines)
    return "\n".join(line for line in text.getvalue().splitlines() if line.strip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=5, help="calls of a round: few, so that the queue stays short")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    args = parser.parse_args()
    pool = Pool(PageLayout(128), HEADS, 2048, torch.bfloat16)
    flash = vllm_compat.flash_attention()
    calls = {"decode 1": decode_call(pool, 1)}
    for name, lengths in CASES.items():
        calls |= calls_of(Step(lengths, pool, flash), name)
    records = []
    for name, call in calls.items():
        for _ in range(3):
            call()
        records.append({"call": name, "host_us": round(host_us(call, args.repeats, args.rounds), 1)})
        print(records[-1], flush=True)
    if args.profile:
        for name in ("fused 1k", "slices 1k", "store and seal 1k"):
            if name in calls:
                print(f"== {name}, 100 calls\n{profile(calls[name])}", flush=True)
    versions = {"torch": torch.__version__, "triton": triton.__version__, "card": torch.cuda.get_device_name()}
    if args.out:
        header = {"command": "python " + " ".join(sys.argv), "versions": versions}
        args.out.write_text(json.dumps(header | {"records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
