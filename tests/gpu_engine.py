# SPDX-License-Identifier: Apache-2.0
"""The equality list on a card, through real vLLM engines; prints one line per check and exits non-zero on failure.

    python tests/gpu_engine.py [check ...]

Needs an NVIDIA GPU and vLLM; models are random and made on the spot (bf16, D = 64 and 128).
Each check starts engines in processes of their own, several checks side by side.
"""
from __future__ import annotations

import concurrent.futures
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from engine import generate, llm, logprob_differences, run_engines, tiny_llama, tokens

JOBS = int(os.environ.get("BIE_GPU_JOBS", "4"))
"""Checks side by side, two engines each; an engine wants a core."""

FACTS = {"do": "facts"}
FOLDER = Path(tempfile.gettempdir()) / "bie-gpu-models"


def gpu(model: str, **kwargs) -> dict:
    """A small bf16 engine on the card."""
    arguments = llm(model, dtype="bfloat16", kv_cache_memory_bytes=512 << 20, gpu_memory_utilization=0.05, **kwargs)
    arguments.setdefault("max_num_seqs", 16)
    return arguments


def compare(name: str, a: list, b: list, *, median: float = 0.02, worst: float = 0.6) -> dict:
    """bf16 rounding differs between kernels (split order, tile shapes); the rule itself would show far above it."""
    if isinstance(a, dict) or isinstance(b, dict):
        return {"check": name, "ok": False, "error": (a if isinstance(a, dict) else b)["error"][:600]}
    difference = logprob_differences(a[-2], b[-2])  # the last generation; facts come behind it
    total = sum(len(r["tokens"]) for r in a[-2])
    ok = len(difference) > 0.3 * total and np.median(difference) < median and difference.max() < worst
    keys = ("preemptions", "prefix_hits", "draft_tokens", "accepted_tokens")
    return {
        "check": name, "ok": bool(ok), "median": float(np.median(difference)), "max": float(difference.max()),
        "common": f"{len(difference)}/{total}", **{key: [a[-1][key], b[-1][key]] for key in keys if a[-1][key]},
    }  # fmt: skip


def prompts_of(*lengths: int) -> list[list[int]]:
    return [tokens(n, seed=n) for n in lengths]


def two(name: str, first: dict, second: dict, steps: list, second_steps: list | None = None, **limits) -> dict:
    """Two engines in two processes (speculation settings do not mix in one)."""
    run = lambda arguments, todo: run_engines([{"llm": arguments, "steps": todo}], timeout=500,
                                              VLLM_LOGGING_LEVEL="INFO")[0]  # fmt: skip
    with concurrent.futures.ThreadPoolExecutor() as pool:
        a, b = pool.map(run, (first, second), (steps, second_steps or steps))
    return compare(name, a, b, **limits)


def checks() -> dict:
    m64, m128 = tiny_llama(FOLDER / "d64"), tiny_llama(FOLDER / "d128", head_dim=128, seed=1)
    many = [generate(prompts_of(1, 63, 64, 65, 130, 137, 200, 256, 333, 700, 1500)), FACTS]
    loop = tokens(50, seed=3)
    repetitive = [generate([loop * 160, loop * 20 + tokens(20, seed=1)], n=64), FACTS]
    long = {"max_model_len": 8192}
    ngram = lambda k: {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    graphs = {"enforce_eager": False}
    cached = lambda hits: {"enable_prefix_caching": True, "settings": {"prefix_hits": hits}}
    p600 = [tokens(600, seed=1)]
    return {
        "D=64: chunk 64 = chunk 2048": lambda n: two(n, gpu(m64, max_num_batched_tokens=64), gpu(m64), many),
        "D=128: batched = solo": lambda n: two(
            n, gpu(m128), gpu(m128), many, [{**many[0], "one_by_one": True}, FACTS]
        ),
        "D=128: graphs = eager": lambda n: two(n, gpu(m128, **graphs), gpu(m128), many),
        "head_dim axis: graphs = eager": lambda n: two(
            n, gpu(m64, settings={"key_axis": "head_dim"}, **graphs), gpu(m64, settings={"key_axis": "head_dim"}), many
        ),
        "preempted = ample": lambda n: two(
            n, gpu(m64, num_gpu_blocks_override=58, max_model_len=512), gpu(m64),
            [generate(prompts_of(200, 230, 260, 290), n=160), FACTS],
        ),
        "strict: warm = cold": lambda n: two(
            n, gpu(m64, **cached("strict")), gpu(m64), [generate(p600), generate(p600), FACTS],
        ),
        **{
            f"speculation K={k} = none": lambda n, k=k: two(
                n, gpu(m64, speculative_config=ngram(k), **graphs, **long), gpu(m64, **graphs, **long), repetitive
            )
            for k in (1, 3, 8, 16)  # 16 drafts are 17 rows: more than the decode kernel takes
        },
    }  # fmt: skip


def main(wanted: list[str]) -> int:
    everything = checks()
    names = [n for n in everything if not wanted or any(w in n for w in wanted)]
    start = time.time()
    results = []
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        futures = [pool.submit(guarded, everything[n], n) for n in names]
        for future in concurrent.futures.as_completed(futures):
            results.append(future.result())
            print(json.dumps(results[-1] | {"seconds": round(time.time() - start)}), flush=True)
    passed = sum(r["ok"] for r in results)
    print(f"{passed} passed, {len(results) - passed} failed in {time.time() - start:.0f} s")
    return int(passed < len(results))


def guarded(check, name: str) -> dict:
    """A check whose engine process died is a failed check, and the others still count."""
    try:
        return check(name)
    except AssertionError as error:
        return {"check": name, "ok": False, "error": str(error)[-1500:]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
