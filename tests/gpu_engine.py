# SPDX-License-Identifier: Apache-2.0
"""The equality list on a card, through real vLLM engines; prints one line per check and exits non-zero on failure.

    python tests/gpu_engine.py [check ...]      # e.g. "async, " or "draft": checks with the word in their name;
                                                # "plain": those without slices, async scheduling or a drafter

Needs an NVIDIA GPU and vLLM; models are random and made on the spot (D = 64 and 128; fp16, whose rounding is eight
times finer than bf16's and hides less; `BIE_GPU_DTYPE=bfloat16` for the other).
Each check starts engines in processes of their own, several checks side by side.
"""
from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from engine import generate, llm, logprob_differences, run_engines, tiny_llama, tokens
from tiny_heads import tiny_eagle3, tiny_mimo

JOBS = int(os.environ.get("BIE_GPU_JOBS", "4"))
"""Checks side by side, two engines each; an engine wants a core."""

DTYPE = os.environ.get("BIE_GPU_DTYPE", "float16")
MEDIAN, WORST, SHARED = {"float16": (0.005, 0.3, 0.5), "bfloat16": (0.02, 0.6, 0.3)}[DTYPE]
"""Nats that log-probabilities may differ, in the median and at most, over at least that share of the tokens."""

FACTS = {"do": "facts"}
FOLDER = Path(tempfile.gettempdir()) / "bie-gpu-models"


def gpu(model: str, **kwargs) -> dict:
    """A small engine on the card."""
    arguments = llm(model, dtype=DTYPE, kv_cache_memory_bytes=512 << 20, gpu_memory_utilization=0.05, **kwargs)
    arguments.setdefault("max_num_seqs", 16)
    return arguments


def compare(name: str, a: list, b: list, *, median: float = MEDIAN, worst: float = WORST) -> dict:
    """Rounding differs between kernels (split order, tile shapes); the rule itself would show far above it."""
    if isinstance(a, dict) or isinstance(b, dict):
        return {"check": name, "ok": False, "error": (a if isinstance(a, dict) else b)["error"][:600]}
    difference = logprob_differences(a[-2], b[-2])  # the last generation; facts come behind it
    total = sum(len(r["tokens"]) for r in a[-2])
    ok = len(difference) > SHARED * total and np.median(difference) < median and difference.max() < worst
    keys = ("preemptions", "prefix_hits", "draft_tokens", "accepted_tokens")
    return {
        "check": name, "ok": bool(ok), "median": float(np.median(difference)), "max": float(difference.max()),
        "common": f"{len(difference)}/{total}", **{key: [a[-1][key], b[-1][key]] for key in keys if a[-1][key]},
    }  # fmt: skip


def prompts_of(*lengths: int) -> list[list[int]]:
    return [tokens(n, seed=n) for n in lengths]


def two(name: str, first: dict, second: dict, steps: list, second_steps: list | None = None, *,
        env: dict[str, str] | None = None, **limits) -> dict:  # fmt: skip
    """Two engines in two processes (speculation settings do not mix in one)."""
    run = lambda arguments, todo: run_engines([{"llm": arguments, "steps": todo}], timeout=500,
                                              **{"VLLM_LOGGING_LEVEL": "INFO", **(env or {})})[0]  # fmt: skip
    with concurrent.futures.ThreadPoolExecutor() as pool:
        a, b = pool.map(run, (first, second), (steps, second_steps or steps))
    return compare(name, a, b, **limits)


def accepted_as_often(result: dict) -> dict:
    """The first engine's drafts are accepted at least 0.95 as often as the second's."""
    if result["ok"]:
        if "draft_tokens" not in result or "accepted_tokens" not in result:
            return result | {"ok": False, "error": "nothing was drafted or accepted"}
        (drafts, other_drafts), (accepted, other) = result["draft_tokens"], result["accepted_tokens"]
        result["rates"] = [accepted / drafts, other / other_drafts]
        result["ok"] = result["rates"][0] >= 0.95 * result["rates"][1] > 0.5
    return result


LONG = {"max_model_len": 8192}
GRAPHS = {"enforce_eager": False}
LOOP = tokens(50, seed=3)
REPETITIVE = [generate([LOOP * 160, LOOP * 20 + tokens(20, seed=1)], n=64), FACTS]
MANY = [generate(prompts_of(1, 63, 64, 65, 130, 137, 200, 256, 333, 700, 1500)), FACTS]


def equalities(one: dict, other: dict, **run) -> dict:
    """The list; the first engine of each check gets `one` on top, the second `other`, both processes `run`."""
    m64, m128 = tiny_llama(FOLDER / "d64"), tiny_llama(FOLDER / "d128", head_dim=128, seed=1)
    ngram = lambda k: {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    cached = lambda hits: {"enable_prefix_caching": True, "settings": {"prefix_hits": hits}}
    p600 = [tokens(600, seed=1)]
    return {
        "D=64: chunk 64 = chunk 2048": lambda n: two(
            n, gpu(m64, max_num_batched_tokens=64, **one), gpu(m64, **other), MANY, **run
        ),
        "D=128: batched = solo": lambda n: two(
            n, gpu(m128, **one), gpu(m128, **other), MANY, [{**MANY[0], "one_by_one": True}, FACTS],
            **run,
        ),
        "D=128: graphs = eager": lambda n: two(n, gpu(m128, **GRAPHS, **one), gpu(m128, **other), MANY, **run),
        # GRAPHS is FULL_AND_PIECEWISE: graphs of whole decode steps, and pieces around attention for the others.
        **{
            f"D=128: {name} = eager": lambda n, mode=mode: two(
                n, gpu(m128, **GRAPHS, compilation_config={"cudagraph_mode": mode}, **one), gpu(m128, **other), MANY,
                **run,
            )
            for name, mode in (("PIECEWISE graphs", "PIECEWISE"), ("compiled without graphs", "NONE"))
        },
        "head_dim axis: graphs = eager": lambda n: two(
            n, gpu(m64, settings={"key_axis": "head_dim"}, **GRAPHS, **one),
            gpu(m64, settings={"key_axis": "head_dim"}, **other), MANY, **run,
        ),
        "preempted = ample": lambda n: two(
            n, gpu(m64, num_gpu_blocks_override=58, max_model_len=512, **one), gpu(m64, **other),
            [generate(prompts_of(200, 230, 260, 290), n=160), FACTS], **run,
        ),
        "strict: warm = cold": lambda n: two(
            n, gpu(m64, **cached("strict"), **one), gpu(m64, **other), [generate(p600), generate(p600), FACTS], **run,
        ),
        **{
            f"speculation K={k} = none": lambda n, k=k: two(
                n, gpu(m64, speculative_config=ngram(k), **GRAPHS, **LONG, **one),
                gpu(m64, **GRAPHS, **LONG, **other), REPETITIVE, **run,
            )
            for k in (1, 3, 8, 16)  # 16 drafts are 17 rows: more than the decode kernel takes
        },
    }  # fmt: skip


def drafters() -> dict:
    """Drafters with a cache of their own, async scheduling on for them and off for the plain engine."""
    m64, m128 = tiny_llama(FOLDER / "d64"), tiny_llama(FOLDER / "d128", head_dim=128, seed=1)
    head, mimo = tiny_eagle3(FOLDER / "eagle3", m64), tiny_mimo(FOLDER / "mimo")
    copy = lambda k, model=m64: {"method": "draft_model", "model": model, "num_speculative_tokens": k}
    eagle3 = {"method": "eagle3", "model": head, "num_speculative_tokens": 3}
    one, other = {"async_scheduling": True}, {"async_scheduling": False}
    short = [generate(prompts_of(4, 20, 40, 60, 64, 70), n=48), FACTS]  # within the window: INT4 is never read
    four = [generate(prompts_of(200, 230, 260, 290), n=160), FACTS]
    p600 = [tokens(600, seed=1)]

    def against_none(speculation: dict, steps: list = MANY, model: str = m64, **kwargs):  # noqa: ANN202
        env = kwargs.pop("env", None)
        return lambda n: two(
            n, gpu(model, speculative_config=speculation, **{**GRAPHS, **LONG, **one, **kwargs}),
            gpu(model, **GRAPHS, **LONG, **other), steps, env=env,
        )  # fmt: skip

    return {
        **{f"draft model K={k}, async = none": against_none(copy(k)) for k in (1, 3, 8)},
        "draft model K=3, async, 8k = none": against_none(copy(3), REPETITIVE),
        "draft model K=3, not async = none": against_none(copy(3), **other),
        # Eager: the drafter adds a row a request, and 72 rows are beyond what vLLM compiles for chunks of 64.
        "draft model K=3, async, chunks of 64 = none": against_none(
            copy(3), max_num_batched_tokens=64, enforce_eager=True
        ),
        # V1 hands drafters the block table of group 0, V2 each group's own: both must be right.
        "draft model K=3, async, V1 runner = none": against_none(copy(3), env={"VLLM_USE_V2_MODEL_RUNNER": "0"}),
        "draft model of another shape K=3, async = none": against_none(copy(3, m128)),
        "draft model K=3, async, preempted = none": against_none(
            copy(3), four, num_gpu_blocks_override=62, max_model_len=512
        ),
        "draft model K=3, async, strict: warm = none": against_none(
            copy(3), [generate(p600), generate(p600), FACTS], enable_prefix_caching=True,
            settings={"prefix_hits": "strict"},
        ),
        "draft model K=3: accepted as under auto": lambda n: accepted_as_often(two(
            n, gpu(m64, speculative_config=copy(3), **GRAPHS),
            gpu(m64, speculative_config=copy(3), kv_cache_dtype="auto", **GRAPHS), short,
        )),
        "EAGLE-3 head K=3, async = none": against_none(eagle3),
        "EAGLE-3 head K=3, async, strict: warm = none": against_none(
            eagle3, [generate(p600), generate(p600), FACTS], enable_prefix_caching=True,
            settings={"prefix_hits": "strict"},
        ),
        "MTP K=1, async = none": against_none({"method": "mtp", "num_speculative_tokens": 1}, model=mimo),
        "ngram_gpu K=3, async = none": against_none(
            {"method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
            REPETITIVE,
        ),
    }  # fmt: skip


def checks() -> dict:
    with_async = equalities({"async_scheduling": True}, {"async_scheduling": False})
    slices = equalities({}, {}, env={"BIE_TEST_SLICES": "1"})  # decode, short drafts and slices in one step, too
    return {
        **equalities({}, {}), **{f"slices, {name}": check for name, check in slices.items()},
        **{f"async, {name}": check for name, check in with_async.items()}, **drafters(),
    }  # fmt: skip


def main(wanted: list[str]) -> int:
    everything = checks()
    plain = equalities({}, {}) if "plain" in wanted else {}
    names = [n for n in everything if not wanted or n in plain or any(w in n for w in wanted)]
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
    except (AssertionError, KeyError, subprocess.SubprocessError) as error:
        return {"check": name, "ok": False, "error": str(error)[-1500:]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
