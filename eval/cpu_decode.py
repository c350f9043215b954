# SPDX-License-Identifier: Apache-2.0
"""Batch-1 decode time per token on this machine, int4_asym against auto, interleaved.

    python eval/cpu_decode.py --model smollm2 --context 1024 --tokens 64 --rounds 3

Each format runs in a process of its own (vLLM keeps one engine per process); the
rounds alternate. Prints milliseconds per output token (median over rounds) and the ratio.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from models import resolve


def measure(args: argparse.Namespace) -> float:
    """Seconds per output token in this process: the difference of a long and a short generation."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        resolve(args.model), kv_cache_dtype=args.format, max_model_len=args.context + args.tokens + 64,
        enable_prefix_caching=True, gpu_memory_utilization=0.3, kv_cache_memory_bytes=1 << 30,
        dtype=args.dtype, enforce_eager=True,
    )  # fmt: skip
    prompt = {"prompt_token_ids": [100 + i % 5000 for i in range(args.context)]}

    def run(n: int) -> float:
        start = time.perf_counter()
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=n, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - start

    run(4)  # fills the prefix cache and warms up
    # Both runs pay the same prefill; the difference is decoding alone.
    return (run(args.tokens + 1) - run(1)) / args.tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="short name of eval/models.py, folder or Hub id")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--format", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.format:
        print(json.dumps(measure(args)))
        return
    times: dict[str, list[float]] = {"auto": [], "int4_asym": []}
    for _ in range(args.rounds):
        for name, values in times.items():
            done = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--format", name],
                capture_output=True, text=True, env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            )  # fmt: skip
            if done.returncode:
                raise SystemExit(f"{name} did not run:\n{done.stderr[-2000:]}")
            values.append(float(done.stdout.strip().splitlines()[-1]))
    median = {name: statistics.median(values) for name, values in times.items()}
    for name, value in median.items():
        print(f"{name:10s} {value * 1e3:7.1f} ms per token  (rounds: {[f'{v * 1e3:.1f}' for v in times[name]]})")
    print(f"int4_asym / auto = {median['int4_asym'] / median['auto']:.2f}")


if __name__ == "__main__":
    main()
