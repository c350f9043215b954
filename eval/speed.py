# SPDX-License-Identifier: Apache-2.0
"""Speed and memory of KV formats on this machine: attention alone, whole engine, what fits.

    python eval/speed.py --model smollm2                          # a CPU's small grid
    python eval/speed.py --model M --formats auto,fp8,int4_asym   # on a GPU: batches 1 to 64, contexts 1k to 64k
    python eval/speed.py --model 8b --graphs --kv-memory 24 --long 40000 --time-limit 230
                                                                  # Llama-3.1-8B's shape, random weights, one H200

First the gate: attention that differs from the oracle is not timed. Then one engine per format
serves all cells of the grid (`speed_engine.py`); the engines stand side by side and take turns,
round by round (--one-at-a-time where the memory does not hold them all). A batch's requests are
sent together: random prompts with the prefix cache on, then the same prompts again, warm. Medians
are reported. Times depend on the shape of a model and not on its weights: a folder that holds
nothing but config.json gets random ones. On an NVIDIA GPU attention alone is timed by
eval/bench_kernels.py. Finished cells are kept in --out and not measured again.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import bench_engine
import models
from speed_engine import Worker

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
MEASURES = ("ttft_cold_s", "ttft_warm_s", "warm_share", "tpot_s", "output_tokens_per_s")


def resolve(model: str) -> tuple[str, bool]:
    """(folder or Hub id, whether its weights are random) of --model."""
    if model in bench_engine.SHAPES:
        return bench_engine.model_folder(model), True
    folder = Path(models.resolve(model))
    dummy = (folder / "config.json").is_file() and not any(any(folder.glob(end)) for end in WEIGHTS)
    return str(folder) if folder.is_dir() else model, dummy


def llm_arguments(args: argparse.Namespace, fmt: Any) -> dict[str, Any]:
    """Arguments of vLLM's LLM for one format."""
    return {
        "model": args.model, "dtype": args.dtype, "max_model_len": args.length, "enforce_eager": not args.graphs,
        "skip_tokenizer_init": True, "kv_cache_memory_bytes": int(args.kv_memory * 2**30),
        "gpu_memory_utilization": 0.1, "max_num_seqs": max(*args.batches, 4), "max_num_batched_tokens": args.chunk,
        "enable_prefix_caching": True, "load_format": "dummy" if args.dummy else "auto", **fmt.llm_arguments(),
        **args.engine_args,
    }  # fmt: skip


def summary(rounds: list[dict[str, Any]], facts: dict[str, Any], pool_bytes: int) -> dict[str, Any]:
    """Medians over the rounds of a cell; tokens and bits of requests like the cell's.

    tokens_that_fit and allocated_bits_per_element come from the share of the pool that the batch held: padding,
    windows and skipped layers are in them.
    """
    last = max(rounds, key=lambda r: r["pool_share"])
    per_token = pool_bytes * last["pool_share"] / last["pool_tokens"]
    return {
        **{name: statistics.median(r[name] for r in rounds) for name in MEASURES},
        "rounds": len(rounds), "tokens_that_fit": int(last["pool_tokens"] / last["pool_share"]),
        "allocated_bits_per_element": round(8 * per_token / facts["elements_per_token"], 3),
        "tokens_that_fit_of_long_requests": facts["tokens_that_fit"],
        "peak_memory_bytes": max(r["peak_memory_bytes"] for r in rounds),
    }  # fmt: skip


def measure_cell(
    args: argparse.Namespace, workers: dict[str, Any], batch: int, context: int
) -> dict[str, dict[str, Any]]:
    """{format: record} of one cell, the formats taking turns; a long cell runs once, others after one to warm up."""
    turns = 1 + args.rounds if batch * context <= args.long else 1
    got: dict[str, list[dict[str, Any]]] = {label: [] for label in workers}
    reason: dict[str, str] = {}
    for turn in range(turns):
        for label, worker in workers.items():
            if label in reason:
                continue
            answer = worker.ask(batch=batch, context=context, output=args.output, seed=turn)
            if worker.error or "did_not_run" in answer:
                reason[label] = worker.error or answer["did_not_run"]
            else:
                got[label].append(answer)
    facts = {"batch": batch, "context": context}
    pool = int(args.kv_memory * 2**30)
    return {
        label: {"format": label, **facts, "did_not_run": reason[label]} if label in reason
        else {"format": label, **facts, **summary(got[label][turns > 1 :], worker.facts, pool)}
        for label, worker in workers.items()
    }  # fmt: skip


class Grid:
    """Runs the missing cells of the engine grid and keeps what is done.

    Attributes:
        records: finished ones, by (format, batch, context).
        stopped: whether the time is over.
    """

    def __init__(self, args: argparse.Namespace, formats: list[Any], records: list[dict[str, Any]], save: Any) -> None:
        self.args, self.formats, self.save = args, formats, save
        self.records = {(r["format"], r["batch"], r["context"]): r for r in records}
        self.stopped = False
        self.workers: dict[str, Worker] = {}
        self.lock = threading.Lock()

    def missing(self, labels: list[str]) -> list[tuple[int, int, list[str]]]:
        """(batch, context, formats) still to be measured, small cells first: a run cut short keeps most of them."""
        cells = sorted(((b, n) for n in self.args.contexts for b in self.args.batches), key=lambda c: c[0] * c[1])
        undone = lambda key: key not in self.records or "did_not_run" in self.records[key]
        cells_of = [(b, n, [label for label in labels if undone((label, b, n))]) for b, n in cells]
        return [cell for cell in cells_of if cell[2]]

    def run(self) -> None:
        """All groups of engines that stand together: all formats, or one at a time."""
        alone = self.args.one_at_a_time
        for group in [[fmt] for fmt in self.formats] if alone else [self.formats]:
            cells = self.missing([fmt.label for fmt in group])
            wanted = {label for *_, labels in cells for label in labels}
            try:
                if self._start([fmt for fmt in group if fmt.label in wanted]):
                    self._cells(cells)
            finally:
                self.stop(False)

    def _start(self, formats: list[Any]) -> bool:
        """Start engines side by side and wait until they stand or have failed; False if the time is over."""
        from quality_run import engine_environment

        folder = Path(tempfile.mkdtemp(prefix="speed-"))
        for i, fmt in enumerate(formats):
            with self.lock:
                if self.stopped:
                    return False
                log = folder / f"{i}-{fmt.dtype}.log"
                self.workers[fmt.label] = Worker(llm_arguments(self.args, fmt), log, engine_environment())
        for worker in self.workers.values():
            worker.facts = worker.answer()
        return not self.stopped

    def _cells(self, cells: list[tuple[int, int, list[str]]]) -> None:
        from rich.console import Console
        from rich.progress import track

        for batch, context, labels in track(cells, "cells", console=Console(stderr=True)):
            found = measure_cell(self.args, {label: self.workers[label] for label in labels}, batch, context)
            if self.stopped:  # its engines were ended under it
                return
            for label, record in found.items():
                self.records[label, batch, context] = record
            self.save(list(self.records.values()))

    def stop(self, for_good: bool = True) -> None:
        """End all engines; `for_good`: and start no more."""
        with self.lock:
            self.stopped |= for_good
            for worker in self.workers.values():
                worker.close()
            if not for_good:
                self.workers = {}


def attention(args: argparse.Namespace, limit: float | None) -> tuple[list[dict[str, Any]], str]:
    """Records of attention alone, and the sentence if it differs from the oracle (then nothing else is timed)."""
    import torch

    if not torch.cuda.is_available():
        from speed_attention import attention_records

        records = attention_records(args.attention_contexts, *args.heads)
        refused = any("refused" in r for r in records)
        return records, "attention differs from the oracle, so int4_asym is not timed." if refused else ""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "kernels.json"
        command = [sys.executable, str(Path(__file__).with_name("bench_kernels.py")), "--baseline", "--paths", "auto",
                   "--suites", args.attention_suites, "--out", str(out)]  # fmt: skip
        try:
            done = subprocess.run(command, stdout=sys.stderr, timeout=limit)
        except subprocess.TimeoutExpired:
            return [], "the time limit was reached before the attention kernels had passed their gate."
        if done.returncode:
            return [], "the kernels miss the oracle (or did not run, see above), so nothing is timed."
        found = json.loads(out.read_text())
        return [{**r, "copy_gb_per_s": found["copy_gb_per_s"]} for r in found["records"]], ""


def table(records: list[dict[str, Any]]) -> str:
    """Engine records as markdown."""
    lines = [
        "| format | batch | context | TTFT cold s | TTFT warm s | TPOT ms | tokens/s | fit | bits/element | peak GiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in sorted(records, key=lambda r: (r["batch"] * r["context"], r["batch"])):
        head = f"| {r['format']} | {r['batch']} | {r['context']} "
        if "did_not_run" in r:
            lines.append(head + f"| did not run: {r['did_not_run']} | | | | | | |")
        else:
            lines.append(
                head + f"| {r['ttft_cold_s']:.3f} | {r['ttft_warm_s']:.3f} | {1e3 * r['tpot_s']:.2f} "
                f"| {r['output_tokens_per_s']:.1f} | {r['tokens_that_fit']} | {r['allocated_bits_per_element']:.2f} "
                f"| {r['peak_memory_bytes'] / 2**30:.2f} |"
            )
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    import torch

    gpu = torch.cuda.is_available()
    numbers = lambda text: [int(x) for x in text.split(",") if x]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    known = ", ".join([*models.PACKAGED, *(f"{shape} (random weights)" for shape in bench_engine.SHAPES)])
    add("--model", required=True, help=f"folder, Hub id or a short name: {known}")
    add("--formats", default="auto,int4_asym", help="as for eval/quality.py")
    add("--batches", type=numbers, default=[1, 8, 32, 64] if gpu else [1, 4], help="requests at a time")
    add("--contexts", type=numbers, default=[1024, 8192, 65536] if gpu else [1024], help="prompt tokens of a request")
    add("--attention-contexts", type=numbers, default=[1024, 4096, 16384], help="of attention alone on a CPU")
    add("--attention-suites", default="short,decode", help="of bench_kernels.py, attention alone on a GPU")
    add("--output", type=int, default=33, help="output tokens of a request, at least 12")
    add("--rounds", type=int, default=3, help="times that a cell is run, after one to warm up; the median counts")
    add("--long", type=int, default=65536 if gpu else 4096, help="prompt tokens of a cell beyond which it runs once")
    add("--chunk", type=int, default=8192 if gpu else 2048, help="max_num_batched_tokens")
    add("--dtype", default="auto")
    add("--kv-memory", type=float, default=1.0, help="GiB of KV cache per engine")
    add("--engine-args", type=json.loads, default={}, help="further arguments of vLLM's LLM, as JSON")
    add("--graphs", action="store_true", help="compile and capture graphs (on GPUs); else eager")
    add("--one-at-a-time", action="store_true", help="one engine after the other, not side by side taking turns")
    add("--time-limit", type=float, help="seconds after which engines are ended; what is finished is kept")
    add("--attention-only", action="store_true", help="no engines")
    add("--out", type=Path, help="JSON of the results (default: eval/results/speed_MODEL.json)")
    return parser


def check(args: argparse.Namespace) -> list[Any]:
    """Complete `args` (model, dummy, heads, length); the formats. Raises ValueError with one sentence."""
    import quality
    import quality_formats
    from transformers import AutoConfig

    args.name = Path(args.model).name
    args.model, args.dummy = resolve(args.model)
    formats = quality_formats.parse_formats(args.formats)
    if any(fmt.patches for fmt in formats):
        raise ValueError("only= and fault= change results and not speed; eval/quality.py takes them.")
    if args.output < 12:
        raise ValueError(f"--output {args.output} must be at least 12: fewer tokens give no time per token.")
    for flag in ("batches", "contexts", "rounds", "chunk"):
        value = getattr(args, flag)
        if not value or min(value if isinstance(value, list) else [value]) < 1:
            raise ValueError(f"--{flag} {value} must hold numbers of at least 1.")
    _, longest, _ = quality.model_facts(args.model, tokenizer=False)
    more = lambda b, n: 2 * bench_engine.prefill_steps(b, n, args.chunk) + args.output + 16
    args.length = max(n + more(b, n) for b in args.batches for n in args.contexts)
    if args.length > longest:
        context, extra = max(args.contexts), args.length - max(args.contexts)
        raise ValueError(f"{args.name} takes {longest} tokens, not {context} and {extra} more; lower --contexts.")
    text = AutoConfig.from_pretrained(args.model).get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    args.heads = kv_heads, heads // kv_heads, getattr(text, "head_dim", None) or text.hidden_size // heads
    return formats


def main(argv: list[str] | None = None) -> int:
    begin = time.monotonic()
    args = build_parser().parse_args(argv)
    import quality

    try:
        formats = check(args)
        out = args.out or quality.RESULTS / f"speed_{args.name}.json"
        names = ("name", "dtype", "output", "chunk", "kv_memory", "graphs", "dummy", "engine_args", "one_at_a_time")
        settings = {name: getattr(args, name) for name in names} | quality.versions()
        result = json.loads(out.read_text()) if out.exists() else {"engine": [], "settings": settings}
        if changed := [key for key, value in settings.items() if result["settings"].get(key) != value]:
            raise ValueError(f"{out} holds results of other settings ({', '.join(changed)}); name a new file by --out.")
    except (ValueError, SystemExit) as error:
        print(f"speed.py: {error}", file=sys.stderr)
        return 2
    result |= {"command": "python " + " ".join(sys.argv), "cpus": os.cpu_count()}
    out.parent.mkdir(parents=True, exist_ok=True)

    def save(records: list[dict[str, Any]]) -> None:
        result["engine"] = records
        out.write_text(json.dumps(result, indent=1) + "\n")

    timed, refusal = attention(args, args.time_limit)
    result["attention"] = timed or result.get("attention", [])  # none: the gate did not end, and what is stored stays
    save(result["engine"])
    for r in timed:
        print(json.dumps(r))
    if refusal:
        print(f"speed.py: {refusal}", file=sys.stderr)
        return 1
    if args.attention_only:
        return 0
    grid = Grid(args, formats, result["engine"], save)
    clock = None
    if args.time_limit:
        clock = threading.Timer(max(0.0, args.time_limit - (time.monotonic() - begin)), grid.stop)
        clock.start()
    try:
        grid.run()
    finally:
        if clock:
            clock.cancel()
    print(table(list(grid.records.values())))
    if grid.stopped:
        wanted = [(fmt.label, b, n) for fmt in formats for b in args.batches for n in args.contexts]
        left = sum(cell not in grid.records for cell in wanted)
        print(f"speed.py: the time limit of {args.time_limit:g} s was reached, {left} are missing.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
