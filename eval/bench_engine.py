# SPDX-License-Identifier: Apache-2.0
"""Whole-engine timings on a GPU: TTFT, TPOT, throughput and capacity per KV-cache format.

    python eval/bench_engine.py --cases 24x32768 1x8192 1x65536+100 --formats auto int4_asym --out engine.json

The model has the shape asked for and random weights (`load_format=dummy`): speed does not
depend on what they are. Prompts are distinct random tokens, prefix caching is on. Each format
runs in a process of its own, in the order given; a case is a batch of requests that are sent
together, `BATCHxCONTEXT`, or `BATCHxCACHED+NEW`, whose first CACHED tokens are in the prefix cache.
    ttft_ms          median over the requests of the time to their first token, best of --repeats
    tpot_ms          median time per output token while all requests decode
    tokens_per_s     output tokens of the batch over that time
    capacity_tokens  tokens of such requests that the pool holds, from the share of it that they took
    growth_mib       of GPU memory since the first prompt of --chunk tokens; growth_since_start_mib: since the engine
                     was ready
"""
from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHAPES = {
    # Llama-3.1-8B's shape.
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256},
    # A small one of the same proportions, to try the script.
    "tiny": {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
             "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 4096},
}  # fmt: skip


def model_folder(shape: str) -> str:
    """A folder with nothing but a config.json of the shape."""
    folder = Path(tempfile.gettempdir()) / f"bie-shape-{shape}"
    folder.mkdir(exist_ok=True)
    config = {
        **SHAPES[shape], "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


class Case:
    """`24x32768` or `1x65536+100`."""

    def __init__(self, text: str) -> None:
        batch, context = text.split("x")
        cached, _, new = context.partition("+")
        self.text, self.batch = text, int(batch)
        self.cached, self.new = (int(cached), int(new)) if new else (0, int(cached))

    @property
    def context(self) -> int:
        return self.cached + self.new


def in_use(llm) -> float:  # noqa: ANN001 - vLLM's LLM
    """Share of the pool that requests hold; cached pages that nobody holds count as free."""
    return llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.usage


def prefill_steps(batch: int, new: int, chunk: int) -> int:
    """Engine steps that prefill `batch` prompts of `new` tokens."""
    return -(-batch * new // chunk)


def run_batch(llm, prompts: list[list[int]], output: int) -> dict:  # noqa: ANN001
    """One batch: seconds are read as each engine step returns.

    Returns:
        ttft_ms (median over the requests), usage (largest share of the pool while all decode), held_tokens (of the
        batch at that time), cached_tokens (of all prompts) and, if all requests decode together for more than 8
        steps, tpot_ms and tokens_per_s.
    """
    from vllm import SamplingParams

    engine, batch = llm.llm_engine, len(prompts)
    sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add_request(f"{i}-{start}", {"prompt_token_ids": prompt}, sampling)
    first: dict[str, float] = {}
    seen: dict[str, int] = {}
    cached: dict[str, int] = {}
    prompt_tokens = sum(map(len, prompts))
    full, usage, held = [], 0.0, 0  # (time, tokens of the batch so far) of the steps in which every request decodes
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for o in outputs:
            first.setdefault(o.request_id, now - start)
            seen[o.request_id] = len(o.outputs[0].token_ids)
            cached.setdefault(o.request_id, o.num_cached_tokens or 0)
        if len(first) == batch and max(seen.values()) < output:
            full.append((now, sum(seen.values())))
            usage, held = max((usage, held), (in_use(llm), prompt_tokens + sum(seen.values())))
    record = {
        "ttft_ms": statistics.median(first.values()) * 1e3, "usage": usage, "held_tokens": held,
        "cached_tokens": sum(cached.values()),
    }  # fmt: skip
    if len(full) > 8:
        (t0, n0), (t1, n1) = full[0], full[-1]
        gaps = [(b[0] - a[0]) / max(1, (b[1] - a[1]) / batch) for a, b in zip(full, full[1:], strict=False)]
        record |= {"tpot_ms": statistics.median(gaps) * 1e3, "tokens_per_s": (n1 - n0) / (t1 - t0)}
    return record


def run_case(llm, case: Case, output: int, repeats: int, seed: int) -> dict:  # noqa: ANN001
    """The case, several times with new tokens when it is short.

    The first requests decode while the last are prefilled, so that `output` tokens are left
    for all together, a request gets as many more as there are steps of prefill.
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    vocab = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    pool = llm.llm_engine.vllm_config.cache_config
    chunk = llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    output += 2 * prefill_steps(case.batch, case.new, chunk)  # decoding tokens take their share of a chunk
    results = []
    cached = [rng.integers(3, vocab, case.cached).tolist() for _ in range(case.batch)]
    if case.cached:
        run_batch(llm, cached, 1)
    for _ in range(repeats if case.batch * case.new <= 65536 else 1):
        prompts = [old + rng.integers(3, vocab, case.new).tolist() for old in cached]
        results.append(run_batch(llm, prompts, output))
    best = min(results, key=lambda r: r["ttft_ms"])
    usage = max(r.pop("usage") for r in results)
    best = {key: value for key, value in best.items() if key not in ("cached_tokens", "held_tokens")}
    best |= {key: min(r[key] for r in results) for key in ("tpot_ms",) if key in best}
    capacity = case.batch * (case.context + output) / usage if usage else 0
    return best | {"capacity_tokens": round(capacity), "reported_capacity_tokens": pool.kv_cache_size_tokens}


def run_format(args: argparse.Namespace) -> list[dict]:
    """All cases of one format, in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the pool's use is read from the scheduler
    import torch
    from vllm import LLM

    cases = [Case(text) for text in args.cases]
    steps = lambda case: prefill_steps(case.batch, case.new, args.chunk)
    longest = max(case.context + 2 * steps(case) for case in cases) + args.output + 8
    llm = LLM(
        model_folder(args.shape), kv_cache_dtype=args.format, load_format="dummy", skip_tokenizer_init=True,
        max_model_len=longest, max_num_seqs=max(case.batch for case in cases), enable_prefix_caching=True,
        gpu_memory_utilization=args.memory, enforce_eager=args.eager, max_num_batched_tokens=args.chunk,
        kv_cache_memory_bytes=args.pool_gib << 30 if args.pool_gib else None,
    )  # fmt: skip
    ready = torch.cuda.mem_get_info()[0]
    for length in (256, args.chunk):  # a full chunk's activations are in vLLM's profile
        run_case(llm, Case(f"1x{length}"), 8, 1, 1000 + length)  # tokens of its own: no case may find them cached
    before = torch.cuda.mem_get_info()[0]
    records = []
    for case in cases:
        record = {"case": case.text, "batch": case.batch, "context": case.context, "format": args.format}
        record |= run_case(llm, case, args.output, args.repeats, len(records))
        free, total = torch.cuda.mem_get_info()
        record |= {"peak_gib": (total - free) / 2**30, "growth_mib": (before - free) / 2**20}
        record["growth_since_start_mib"] = (ready - free) / 2**20
        record = {k: round(v, 3) if isinstance(v, float) else v for k, v in record.items()}
        print("RECORD" + json.dumps(record), flush=True)
        records.append(record)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--cases", nargs="+", default=["1x1024", "64x1024", "24x32768"], help="see above")
    parser.add_argument("--formats", nargs="+", default=["auto", "fp8", "int4_asym"])
    parser.add_argument("--output", type=int, default=64, help="output tokens per request")
    parser.add_argument("--repeats", type=int, default=3, help="times that a short case is run")
    parser.add_argument("--chunk", type=int, default=8192, help="max_num_batched_tokens")
    parser.add_argument("--memory", type=float, default=0.92, help="gpu_memory_utilization")
    parser.add_argument("--pool-gib", type=int, help="size of the KV pool; default: what --memory leaves")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON file of records; records of other formats in it are kept")
    parser.add_argument("--format", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.format:
        run_format(args)
        return
    for name in args.formats:
        command = [sys.executable, __file__, *sys.argv[1:], "--format", name]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("RECORD"):  # saved one by one: a run cut short keeps what it measured
                record = json.loads(line.removeprefix("RECORD"))
                print(record, flush=True)
                save(args.out, record)
        if child.wait():
            print(f"{name}: stopped with status {child.returncode}", file=sys.stderr)


def save(path: Path | None, record: dict) -> None:
    """Add the record to the file, in place of one of the same case and format."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    old = json.loads(path.read_text())["records"] if path.exists() else []
    same = lambda r: (r["case"], r["format"]) == (record["case"], record["format"])  # noqa: E731
    records = [r for r in old if not same(r)] + [record | {"command": "python " + " ".join(sys.argv)}]
    path.write_text(json.dumps({**facts(), "records": records}, indent=1) + "\n")


@functools.cache
def facts() -> dict:
    """Versions and card."""
    import torch
    import triton
    import vllm

    return {
        "card": torch.cuda.get_device_name(), "vllm": vllm.__version__, "torch": torch.__version__,
        "triton": triton.__version__,
    }  # fmt: skip


if __name__ == "__main__":
    main()
