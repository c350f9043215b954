# SPDX-License-Identifier: Apache-2.0
"""Engines of eval/speed.py: one process per KV format that serves every cell of the grid, a batch at a time.

    python eval/speed_engine.py '{"model": FOLDER, "kv_cache_dtype": "int4_asym", ...}'     # arguments of vLLM's LLM

Requests come as lines of JSON on stdin, answers leave as lines `RECORD{...}` on stdout. An engine
that waits for its next line computes nothing, so that several can take turns on one machine.
"""
from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_engine import prefill_steps, run_batch

MARK = "RECORD"


class Worker:
    """The process of one format, seen from the parent.

    Attributes:
        facts: what the engine says about itself once it stands (see `serve`).
        error: one sentence, if it died.
    """

    def __init__(self, llm: dict[str, Any], log: Path, env: dict[str, str]) -> None:
        self.facts: dict[str, Any] = {}
        self.error = ""
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, __file__, json.dumps(llm)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors, text=True, env=env,
            )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        """The next record; {} and `error` set if the process has died instead."""
        for line in self.process.stdout or ():
            if line.startswith(MARK):
                record = json.loads(line.removeprefix(MARK))
                if "error" not in record:
                    return record
                self.error = record["error"]
        if not self.error:
            lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            self.error = lines[-1][:300] if lines else "no message"
        print(f"speed.py: an engine ended, its log: {self.log}", file=sys.stderr)
        return {}

    def ask(self, **cell: Any) -> dict[str, Any]:
        """Run one batch; {} if the process has died."""
        if self.error:
            return {}
        with contextlib.suppress(BrokenPipeError):  # its log says why
            print(json.dumps(cell), file=self.process.stdin, flush=True)
        return self.answer()

    def close(self) -> None:
        """End the process; what it holds is lost."""
        self.process.kill()  # an engine's own teardown takes seconds and nothing is left to save
        self.process.wait()


def measure(llm: Any, *, batch: int, context: int, output: int, seed: int) -> dict[str, Any]:
    """One batch of new random prompts, then the same prompts again for the warm first token.

    Returns:
        ttft_cold_s, ttft_warm_s: median over the requests, from when all were sent.
        warm_share: part of the warm prompts that came from the prefix cache.
        tpot_s, output_tokens_per_s: while all requests decode.
        pool_tokens, pool_share: tokens of the batch at its largest, and the part of the pool that it held then.
        peak_memory_bytes: of this process.
        {"did_not_run": sentence} instead, if the pool does not hold the batch at once.
    """
    import numpy as np

    config = llm.llm_engine.vllm_config
    # The first requests decode while the last are prefilled: all together need as many more steps.
    output += 2 * prefill_steps(batch, context, config.scheduler_config.max_num_batched_tokens)
    holds = config.cache_config.kv_cache_size_tokens
    if batch * (context + output) > holds:
        return {"did_not_run": f"{batch * (context + output)} tokens do not fit into a pool of {holds}"}
    rng = np.random.default_rng([batch, context, seed])
    prompts = rng.integers(3, config.model_config.get_vocab_size(), (batch, context)).tolist()
    _reset_peak()
    cold = run_batch(llm, prompts, output)
    if "tpot_ms" not in cold:
        return {"did_not_run": f"the pool, {holds} tokens of long requests, does not hold these short ones at once"}
    warm = run_batch(llm, prompts, 1)
    return {
        "ttft_cold_s": cold["ttft_ms"] / 1e3, "ttft_warm_s": warm["ttft_ms"] / 1e3,
        "warm_share": warm["cached_tokens"] / (batch * context), "tpot_s": cold["tpot_ms"] / 1e3,
        "output_tokens_per_s": cold["tokens_per_s"], "pool_tokens": cold["held_tokens"],
        "pool_share": cold["usage"], "peak_memory_bytes": _peak_memory(),
    }  # fmt: skip


def _reset_peak() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _peak_memory() -> int:
    """Of this process: GPU memory since the last reset where there is a GPU, else resident memory ever."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def elements_per_token(config: Any) -> int:
    """Numbers that a token has in the cache: all layers, keys and values; skipped layers count as any other."""
    model = config.model_config
    return model.get_num_layers(config.parallel_config) * model.get_total_num_kv_heads() * model.get_head_size() * 2


def serve(arguments: dict[str, Any]) -> None:
    """Start the engine, tell `tokens_that_fit` (requests of max_model_len) and `elements_per_token`, serve stdin."""
    from vllm import LLM

    llm = LLM(**arguments)
    config = llm.llm_engine.vllm_config

    def tell(record: dict[str, Any]) -> None:
        print(MARK + json.dumps(record), flush=True)

    chunk = config.scheduler_config.max_num_batched_tokens
    for seed, length in enumerate((64, min(chunk, config.model_config.max_model_len - 16))):
        measure(llm, batch=1, context=length, output=12, seed=1000 + seed)
    tell({
        "tokens_that_fit": config.cache_config.kv_cache_size_tokens, "elements_per_token": elements_per_token(config),
    })  # fmt: skip
    for line in sys.stdin:
        tell(measure(llm, **json.loads(line)))


def main() -> int:
    try:
        serve(json.loads(sys.argv[1]))
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises becomes one sentence of the table
        import traceback

        from quality_engine import one_sentence

        traceback.print_exc()
        print(MARK + json.dumps({"error": one_sentence(error)}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
