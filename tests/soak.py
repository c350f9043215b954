# SPDX-License-Identifier: Apache-2.0
"""Many short requests against a pool that preempts: random lengths, aborts, shared prefixes, sampling settings.

    python tests/soak.py --requests 10000 [--drafts 3] [--out eval/results/soak.json]

Every 100th request is a probe whose answer is known from a fresh engine: the same tokens, and
where they part, two that the fresh engine itself holds for equally likely (`TIE`). At the end no page
may be held, no probe may have differed and memory must be flat. Prints one JSON line, also into
the file `--out`, and exits non-zero on failure. A tiny random model, on CPU or GPU.
"""
from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "eval")]
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import psutil
import torch
from engine import compare_answer, generate, greedy, llm, run_engines, tokens
from engine_steps import pool
from engine_worker import result_of
from quality import versions
from tiny_models import tiny_model

CONCURRENT = 12
PROBE_EVERY = 100
PROBE_TOKENS = 24

WORST = 0.05
"""Nats by which a token's log-probability may differ: in fp32 a code flips where rounding meets a tie."""

TIE = 0.02
"""Nats between a fresh engine's first and second choice below which the other one is no error."""

SHARED = 0.9
"""Least share of the probes' tokens that come before any parting; what follows is another text."""

SHARED_COARSE = 0.7
"""The same where the model is not in fp32: bf16's logits come in steps of 1/64 beyond 2, and texts part at ties."""

COARSE = 10
"""Factor on `WORST` and `TIE` where the model is not in fp32."""


def arguments(model: str, dtype: str = "float32", drafts: int = 0) -> dict:
    """Strict hits, so that a probe has one answer; a third of the requests at a time fit into the pool."""
    engine = llm(
        model, dtype=dtype, max_model_len=512, num_gpu_blocks_override=110, max_num_seqs=CONCURRENT,
        max_num_batched_tokens=160, enable_prefix_caching=True, settings={"prefix_hits": "strict"},
    )  # fmt: skip
    if drafts:
        engine["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3, "prompt_lookup_min": 1
        }  # fmt: skip
    return engine


class Soak:
    """Drives one in-process engine step by step."""

    def __init__(self, engine, seed: int, drafts: int = 0) -> None:  # noqa: ANN001
        self.engine, self.rng = engine, random.Random(seed)
        # Beside drafts vLLM 0.32's sampler dies of top-k on CPUs, under `auto` too ("index ... is out of bounds").
        self.greedy = drafts > 0 and not torch.cuda.is_available()
        # vLLM 0.32 dies of a seeded request's prefill chunk on CPUs ("CPU Generator does not use offset").
        self.seeds = torch.cuda.is_available()
        self.prefixes = [tokens(self.rng.choice((64, 70, 128, 200)), seed=1000 + i) for i in range(6)]
        self.probes = [tokens(n, seed=2000 + n) for n in (40, 150, 260)]
        self.doomed: dict[str, int] = {}  # request -> steps until it is aborted
        self.asked: dict[str, int] = {}  # probe request -> which probe
        self.answers: list[tuple[int, dict]] = []
        self.finished = self.aborted = 0

    def add(self, index: int) -> None:
        from vllm import SamplingParams

        rng, name = self.rng, str(index)
        if index % PROBE_EVERY == 0:
            self.asked[name] = index // PROBE_EVERY % len(self.probes)
            prompt, sampling = self.probes[self.asked[name]], greedy(PROBE_TOKENS)
        else:
            prompt = rng.choice(self.prefixes) if rng.random() < 0.5 else []
            prompt = prompt + tokens(rng.randint(1, 150), seed=rng.randrange(1 << 30))
            sampling = {
                "max_tokens": rng.randint(1, 32), "ignore_eos": rng.random() < 0.8, "detokenize": False,
                "temperature": 0.0 if self.greedy else rng.choice((0.0, 0.7, 1.5)), "top_p": rng.choice((1.0, 0.9)),
                "top_k": rng.choice((0, 20)), "repetition_penalty": rng.choice((1.0, 1.2)),
                "logprobs": rng.choice((None, 0, 3)), "seed": rng.choice((None, index)) if self.seeds else None,
                "prompt_logprobs": 1 if rng.random() < 0.03 else None,
            }  # fmt: skip
            if self.greedy:
                sampling |= {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
            if sampling["temperature"] and rng.random() < 0.1:
                sampling["n"] = 2
            if rng.random() < 0.2:
                self.doomed[name] = rng.randint(0, 20)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(**sampling))

    def step(self) -> None:
        for name in [n for n, left in self.doomed.items() if left == 0]:
            self.engine.abort_request([name])  # may have finished long ago, which must not matter either
            del self.doomed[name]
            self.aborted += 1
        self.doomed = {name: left - 1 for name, left in self.doomed.items()}
        for output in self.engine.step():
            if output.finished:
                self.finished += 1
                name = output.request_id.split("-")[0]
                if name in self.asked:
                    self.answers.append((self.asked.pop(name), result_of(output)))

    def run(self, requests: int) -> list[int]:
        """Serve `requests` requests; returns resident bytes after every tenth of them."""
        memory, index = [], 0
        while index < requests or self.engine.has_unfinished_requests():
            while index < requests and self.engine.get_num_unfinished_requests() < CONCURRENT:
                self.add(index)
                index += 1
                if index % max(1, requests // 10) == 0:
                    memory.append(psutil.Process().memory_info().rss)
            self.step()
        return memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", help="of the model; bfloat16 for GPUs")
    parser.add_argument("--drafts", type=int, default=0, help="n-gram drafts; on CPUs all requests are greedy then")
    parser.add_argument("--out", type=Path, help="file for the result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = soak(tiny_model(Path(folder), "gqa"), options)
    line = json.dumps(result)
    if options.out:
        options.out.write_text(line + "\n")
    print(line)
    return int(not result["ok"])


def soak(model: str, options: argparse.Namespace) -> dict:
    from vllm import LLM

    fresh = {**arguments(model, options.dtype), "num_gpu_blocks_override": 400, "enable_prefix_caching": False}
    engine = LLM(**arguments(model, options.dtype, options.drafts))
    driver, start = Soak(engine.llm_engine, options.seed, options.drafts), time.time()
    ((known,),) = run_engines(
        [{"llm": fresh, "steps": [generate(driver.probes, n=PROBE_TOKENS, one_by_one=True)]}]
    )
    memory = driver.run(options.requests)
    factor, enough = (1, SHARED) if options.dtype == "float32" else (COARSE, SHARED_COARSE)
    compared = [compare_answer(known[i], answer, WORST * factor, TIE * factor) for i, answer in driver.answers]
    shared = sum(probe["shared"] for probe in compared) / max(1, PROBE_TOKENS * len(compared))
    metrics = {m.name: m.value for m in engine.get_metrics() if hasattr(m, "value")}
    state = pool(engine)
    growth = memory[-1] - memory[len(memory) // 2]  # the first half fills caches of the allocator
    probes = len(range(0, options.requests, PROBE_EVERY))
    checks = {
        "every probe answered": len(driver.answers) == probes and not driver.asked,
        "probes right": all(probe["right"] for probe in compared) and shared >= enough,
        "no leaked page": state["free"] == state["pages"] - 1 and state["known"] == state["referenced"] == 0,
        "preempted": metrics["vllm:num_preemptions"] > 0,
        "drafts accepted": not options.drafts or metrics["vllm:spec_decode_num_accepted_tokens"] > 0,
        "memory flat": growth < 64 << 20,
    }
    return {
        "ok": all(checks.values()), "failed": [name for name, ok in checks.items() if not ok],
        "requests": options.requests, "finished": driver.finished, "aborted": driver.aborted,
        "probes": probes, "probes_right": sum(probe["right"] for probe in compared),
        "tokens_shared": shared, "worst_nats": max((probe["worst"] for probe in compared), default=None),
        "partings_nats": [str(probe["gap"]) for probe in compared if probe["gap"] is not None],
        "bounds": {"worst": WORST * factor, "tie": TIE * factor, "shared": enough},
        "preemptions": metrics["vllm:num_preemptions"], "pool": state,
        "prefix_hits": metrics["vllm:prefix_cache_hits"], "growth_mib": growth / 2**20,
        "seconds": round(time.time() - start),
        "command": "python " + shlex.join(sys.argv), "versions": versions(),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
