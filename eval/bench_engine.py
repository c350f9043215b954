# SPDX-License-Identifier: Apache-2.0
"""Whole-engine timings on a GPU: TTFT, TPOT, throughput and capacity per KV-cache format.

    python eval/bench_engine.py --shape 8b --cases 24x32768 1x1024 --formats auto int4_asym --out engine.json

The model has the shape asked for and random weights (`load_format=dummy`): speed does not
depend on what they are. Prompts are distinct random tokens. Each format runs in a process
of its own, in the order given; a case is a batch of requests that are sent together.
    ttft_ms       median over the requests of the time to their first token
    tpot_ms       median time per output token while all requests decode
    tokens_per_s  output tokens of the batch over that time
"""
from __future__ import annotations

import argparse
import json
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


def run_case(llm, batch: int, context: int, output: int) -> dict:  # noqa: ANN001
    """One batch: seconds are read as each engine step returns."""
    import numpy as np
    from vllm import SamplingParams

    engine = llm.llm_engine
    rng = np.random.default_rng(batch * context)
    vocab = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    for i in range(batch):
        prompt = {"prompt_token_ids": rng.integers(3, vocab, context).tolist()}
        engine.add_request(f"{batch}-{context}-{i}-{start}", prompt, sampling)
    first: dict[str, float] = {}
    seen: dict[str, int] = {}
    steps = []  # (time, tokens of the batch so far), once everybody decodes
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for o in outputs:
            first.setdefault(o.request_id, now - start)
            seen[o.request_id] = len(o.outputs[0].token_ids)
        if len(first) == batch:
            steps.append((now, sum(seen.values())))
    # From the step in which the last request got its first token to the last step where nobody had finished.
    full = [s for s in steps if s[1] <= batch * output - batch]
    (t0, n0), (t1, n1) = full[0], full[-1]
    return {
        "ttft_ms": statistics.median(first.values()) * 1e3,
        "tpot_ms": (t1 - t0) / ((n1 - n0) / batch) * 1e3,
        "tokens_per_s": (n1 - n0) / (t1 - t0),
    }


def run_format(args: argparse.Namespace) -> list[dict]:
    """All cases of one format, in this process."""
    import torch
    from vllm import LLM

    cases = [tuple(map(int, case.split("x"))) for case in args.cases]
    longest = max(context for _, context in cases) + args.output + 8
    llm = LLM(
        model_folder(args.shape), kv_cache_dtype=args.format, load_format="dummy", skip_tokenizer_init=True,
        max_model_len=longest, max_num_seqs=max(batch for batch, _ in cases), enable_prefix_caching=False,
        gpu_memory_utilization=args.memory, enforce_eager=args.eager, max_num_batched_tokens=args.chunk,
    )  # fmt: skip
    run_case(llm, 1, 256, 8)
    before = torch.cuda.mem_get_info()[0]
    records = []
    capacity = llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens
    for batch, context in cases:
        record = {"batch": batch, "context": context, "format": args.format}
        record |= run_case(llm, batch, context, args.output)
        free, total = torch.cuda.mem_get_info()
        record |= {"capacity_tokens": capacity, "peak_gib": (total - free) / 2**30,
                   "growth_mib": (before - free) / 2**20}  # fmt: skip
        print(json.dumps(record), file=sys.stderr, flush=True)
        records.append(record)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--cases", nargs="+", default=["1x1024", "64x1024", "24x32768"], help="batch x context")
    parser.add_argument("--formats", nargs="+", default=["auto", "fp8", "int4_asym"])
    parser.add_argument("--output", type=int, default=64, help="output tokens per request")
    parser.add_argument("--chunk", type=int, default=8192, help="max_num_batched_tokens")
    parser.add_argument("--memory", type=float, default=0.92, help="gpu_memory_utilization")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON file of records")
    parser.add_argument("--format", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.format:
        print("RECORDS" + json.dumps(run_format(args)))
        return
    records = []
    for name in args.formats:
        command = [sys.executable, __file__, *sys.argv[1:], "--format", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode or "RECORDS" not in done.stdout:
            print(f"{name}: did not run", file=sys.stderr)
            continue
        records += json.loads(done.stdout.split("RECORDS")[1])
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps({**facts(), "records": records}, indent=1))


def facts() -> dict:
    """Versions, card and command."""
    import torch
    import triton
    import vllm

    return {
        "card": torch.cuda.get_device_name(), "vllm": vllm.__version__, "torch": torch.__version__,
        "triton": triton.__version__, "command": "python " + " ".join(sys.argv),
    }  # fmt: skip


if __name__ == "__main__":
    main()
