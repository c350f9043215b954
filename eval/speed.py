# SPDX-License-Identifier: Apache-2.0
"""Speed and memory of KV formats on this machine: attention alone, whole engine, what fits.

    python eval/speed.py --model smollm2                                   # a CPU's small grid
    python eval/speed.py --model M --batches 1,8,32,64 --contexts 1024,65536 --formats auto,fp8,int4_asym

First the gate: attention that differs from the oracle is not timed. Engine times come from
`vllm bench latency` (vLLM's own): one output token is the time to first token, cold and, with the
prefix cache on and the same prompt before, warm; a longer output gives the time per output token
and tokens per second. Formats take turns; medians are reported. On an NVIDIA GPU the attention
kernels are timed by eval/bench_kernels.py. Finished cells are kept in --out and not measured again.
"""
from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import models

GATE = 1e-4
"""Largest relative error against the oracle, fp32 on the CPU."""

SINK, RECENT = 8, 128


# -- attention alone, on the CPU ------------------------------------------------------------
def attention_case(
    context: int, kv_heads: int, group: int, head_size: int
) -> tuple[dict[str, Callable[[], Any]], float]:
    """Decode attention of one token: {format: callable} and int4_asym's relative error to the oracle."""
    import torch

    from bie_kernels import reference, torch_path
    from bie_kernels.layout import PAGE_TOKENS, PageLayout, window_page_tokens

    torch.manual_seed(0)
    layout = PageLayout(head_size)
    k, v = torch.randn(context, kv_heads, head_size), torch.randn(context, kv_heads, head_size)
    q = torch.randn(1, kv_heads * group, head_size)
    page_tokens = window_page_tokens(4)
    body_pages = torch.arange(1, 1 - (-context // PAGE_TOKENS))
    window_pages = torch.arange(1, 1 - (-context // page_tokens))
    body = torch.zeros(len(body_pages) + 1, kv_heads, layout.page_bytes, dtype=torch.uint8)
    window = torch.zeros(len(window_pages) + 1, kv_heads, page_tokens, 2 * head_size)
    positions = torch.arange(context)
    rule = torch_path.Rule(SINK, RECENT, context)
    fill = torch_path.RequestStep(0, context - 1, 0, body_pages, window_pages, page_tokens, rule)
    torch_path.store(k, v, body, window, positions + PAGE_TOKENS, positions + page_tokens, layout)
    torch_path.seal(k[:-1], body, window, [fill], layout)
    step = torch_path.RequestStep(0, 1, context - 1, body_pages, window_pages, page_tokens, rule)
    scale = head_size**-0.5

    def int4() -> torch.Tensor:
        return torch_path.attend(q, k[-1:], v[-1:], body, window, step, layout, scale=scale)

    keys, values = (x.transpose(0, 1)[None].contiguous() for x in (k, v))
    query = q.transpose(0, 1)[None]

    def auto() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=True)

    k4, v4 = reference.quantised_copy(k, v, layout, SINK)
    want = reference.attention(
        q, torch.tensor([context - 1]), k, v, k4, v4, scale=scale, sink_tokens=SINK, recent_tokens=RECENT
    )
    error = float((int4() - want).norm() / want.norm())
    return {"auto": auto, "int4_asym": int4}, error


def copy_bandwidth() -> float:
    """Bytes per second that a large copy reads and writes on this machine, median of 9."""
    import torch

    source = torch.empty(256 << 20, dtype=torch.uint8).random_(0, 255)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_seconds({"": lambda: target.copy_(source)}, 9)[""]


def median_seconds(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds per call, the calls taking turns; one round first warms up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def attention_records(contexts: list[int], kv_heads: int, group: int, head_size: int) -> list[dict[str, Any]]:
    """Decode attention of one layer, one request: microseconds, bytes read, share of copy bandwidth."""
    import torch

    from bie_kernels.layout import PageLayout

    bandwidth = copy_bandwidth()
    records = []
    for context in contexts:
        with torch.inference_mode():
            calls, error = attention_case(context, kv_heads, group, head_size)
            if not error < GATE:
                records.append({"context": context, "format": "int4_asym", "refused": f"relative error {error:.1e}"})
                del calls["int4_asym"]
            seconds = median_seconds(calls, 15)
        packed = PageLayout(head_size).page_bytes / 64 * max(0, context - RECENT) + 8 * head_size * (SINK + RECENT)
        size = {"auto": context * kv_heads * 2 * head_size * 4, "int4_asym": int(kv_heads * packed)}
        for name, value in seconds.items():
            records.append({
                "context": context, "format": name, "us": round(1e6 * value, 1), "bytes": size[name],
                "of_copy_bandwidth": round(size[name] / value / bandwidth, 4),
                **({"rel_err": error} if name == "int4_asym" else {}),
            })  # fmt: skip
    return records


# -- engine: child processes ---------------------------------------------------------------------
def child(job: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: `bench` runs vLLM's latency benchmark, `facts` reads capacity and memory."""
    if job["do"] == "bench":
        from vllm.benchmarks import latency
        from vllm.plugins import load_general_plugins
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        load_general_plugins()  # before the choices of --kv-cache-dtype are read, as vLLM's own commands do
        parser = FlexibleArgumentParser()
        latency.add_cli_args(parser)
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "latency.json"
            latency.main(parser.parse_args([*job["arguments"], "--output-json", str(out)]))
            return {"seconds": statistics.median(json.loads(out.read_text())["latencies"])}
    from vllm import LLM

    llm = LLM(**job["llm"])
    config = llm.llm_engine.vllm_config
    model = config.model_config
    elements = (
        model.get_num_layers(config.parallel_config) * model.get_total_num_kv_heads() * model.get_head_size() * 2
    )
    tokens = config.cache_config.kv_cache_size_tokens
    return {
        "tokens_that_fit": tokens,
        "allocated_bits_per_element": round(8 * job["llm"]["kv_cache_memory_bytes"] / (tokens * elements), 3),
        "peak_memory_bytes": _peak_memory(),
    }


def _peak_memory() -> int:
    """Of this process: GPU memory where there is one, else resident memory."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def start(job: dict[str, Any]) -> dict[str, Any]:
    """Run a child; {"error": sentence} if it failed."""
    from quality_run import engine_environment

    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "result.json"
        done = subprocess.run(
            [sys.executable, __file__, "--child", json.dumps(job), str(out)],
            capture_output=True, text=True, env=engine_environment(),
        )  # fmt: skip
        if done.returncode == 0 and out.exists():
            return json.loads(out.read_text())
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    return {"error": lines[-1].strip()[:300] if lines else f"exit status {done.returncode}"}


def cell_jobs(args: argparse.Namespace, fmt: Any, batch: int, context: int) -> dict[str, dict[str, Any]]:
    """The children of one cell: cold and warm first token, long output, facts."""
    length = context + args.output + 64
    llm = {
        "model": args.model, "dtype": args.dtype, "max_model_len": length, "enforce_eager": not args.graphs,
        "skip_tokenizer_init": True, "kv_cache_memory_bytes": int(args.kv_memory * 2**30),
        "gpu_memory_utilization": 0.3, "max_num_seqs": max(batch, 4), **fmt.llm_arguments(),
    }  # fmt: skip

    def bench(output: int, prefix: bool) -> dict[str, Any]:
        arguments = ["--input-len", str(context), "--output-len", str(output), "--batch-size", str(batch),
                     "--num-iters-warmup", "1", "--num-iters", str(args.rounds), "--disable-detokenize"]  # fmt: skip
        for key, value in llm.items():
            flag = "--" + key.replace("_", "-")
            if value is True:
                arguments.append(flag)
            elif value is not False:
                arguments += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
        return {"do": "bench", "arguments": [*arguments, *(["--enable-prefix-caching"] if prefix else [])]}

    return {
        "cold": bench(1, False), "warm": bench(1, True), "long": bench(args.output, False),
        "facts": {"do": "facts", "llm": llm},
    }  # fmt: skip


def measure_cell(args: argparse.Namespace, fmt: Any, batch: int, context: int) -> dict[str, Any]:
    """One record of the engine grid; seconds and tokens."""
    record: dict[str, Any] = {"format": fmt.label, "batch": batch, "context": context}
    got = {}
    for name, job in cell_jobs(args, fmt, batch, context).items():
        got[name] = start(job)
        if "error" in got[name]:
            return {**record, "did_not_run": got[name]["error"]}
    cold, warm, long = (got[name]["seconds"] for name in ("cold", "warm", "long"))
    return {
        **record, "ttft_cold_s": cold, "ttft_warm_s": warm, "tpot_s": (long - cold) / (args.output - 1),
        "output_tokens_per_s": batch * args.output / long, **got["facts"],
    }  # fmt: skip


def table(records: list[dict[str, Any]]) -> str:
    """Engine records as markdown."""
    lines = [
        "| format | batch | context | TTFT cold s | TTFT warm s | TPOT ms | tokens/s | fit | bits/element |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in records:
        head = f"| {r['format']} | {r['batch']} | {r['context']} "
        if "did_not_run" in r:
            lines.append(head + f"| did not run: {r['did_not_run']} | | | | | |")
        else:
            lines.append(
                head + f"| {r['ttft_cold_s']:.3f} | {r['ttft_warm_s']:.3f} | {1e3 * r['tpot_s']:.1f} "
                f"| {r['output_tokens_per_s']:.1f} | {r['tokens_that_fit']} | {r['allocated_bits_per_element']} |"
            )
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    numbers = lambda text: [int(x) for x in text.split(",") if x]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help=f"folder, Hub id or a short name: {', '.join(models.PACKAGED)}")
    add("--formats", default="auto,int4_asym", help="as for eval/quality.py")
    add("--batches", type=numbers, default=[1], help="requests at a time")
    add("--contexts", type=numbers, default=[1024], help="prompt tokens of the engine grid")
    add("--attention-contexts", type=numbers, default=[1024, 4096, 16384], help="of attention alone")
    add("--output", type=int, default=17, help="output tokens of the long run, at least 2")
    add("--rounds", type=int, default=3, help="iterations of a benchmark; the median counts")
    add("--dtype", default="auto")
    add("--kv-memory", type=float, default=1.0, help="GiB of KV cache per engine")
    add("--graphs", action="store_true", help="compile and capture graphs (on GPUs); else eager")
    add("--attention-only", action="store_true", help="no engines")
    add("--out", type=Path, help="JSON of the results (default: eval/results/speed_MODEL.json)")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    import quality
    import quality_formats
    import torch
    from rich.console import Console
    from rich.progress import track

    try:
        name = Path(args.model).name
        args.model = models.resolve(args.model)
        formats = quality_formats.parse_formats(args.formats)
        if any(fmt.patches for fmt in formats):
            raise ValueError("only= and fault= change results and not speed; eval/quality.py takes them.")
        if args.output < 2:
            raise ValueError(f"--output {args.output} must be at least 2.")
        _, longest, _ = quality.model_facts(args.model, tokenizer=False)
        if max(args.contexts) + args.output + 64 > longest:
            raise ValueError(f"{name} takes {longest} tokens, not {max(args.contexts)} and {args.output} more.")
    except (ValueError, SystemExit) as error:
        print(f"speed.py: {error}", file=sys.stderr)
        return 2
    out = args.out or quality.RESULTS / f"speed_{name}.json"
    facts = {"command": "python " + " ".join(sys.argv), "versions": quality.versions(), "cpus": os.cpu_count()}
    result = json.loads(out.read_text()) if out.exists() else {"attention": [], "engine": []}
    result.update(facts)

    def save() -> None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")

    if torch.cuda.is_available():
        done = subprocess.run([sys.executable, str(Path(__file__).with_name("bench_kernels.py")), "--gate-only"])
        if done.returncode:
            print("speed.py: the kernels miss the oracle, so nothing is timed.", file=sys.stderr)
            return 1
    else:
        result["attention"] = attention_records(args.attention_contexts, 2, 4, 64)
        save()
        for r in result["attention"]:
            print(json.dumps(r))
        if any("refused" in r for r in result["attention"]):
            print("speed.py: attention differs from the oracle, so int4_asym is not timed.", file=sys.stderr)
            return 1
    if args.attention_only:
        return 0
    key = lambda r: (r["format"], r["batch"], r["context"], r.get("model"))
    have = {key(r) for r in result["engine"] if "did_not_run" not in r}
    cells = [(fmt, b, n) for n in args.contexts for b in args.batches for fmt in formats]  # formats take turns
    for fmt, batch, context in track(cells, "engines", console=Console(stderr=True)):
        if (fmt.label, batch, context, name) not in have:
            record = {**measure_cell(args, fmt, batch, context), "model": name}
            result["engine"] = [r for r in result["engine"] if key(r) != key(record)] + [record]
            save()
    print(table(result["engine"]))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        Path(sys.argv[3]).write_text(json.dumps(child(json.loads(sys.argv[2]))))
        raise SystemExit(0)
    raise SystemExit(main())
