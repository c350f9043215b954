# SPDX-License-Identifier: Apache-2.0
"""Is a KV cache format as good as `auto` on your model? Perplexity, needles, tasks, and a verdict.

    python eval/quality.py --model smollm2                        # int4_asym against auto
    python eval/quality.py --model M --formats auto,fp8,int4_asym --contexts 2048,8192 --text mine.txt
    python eval/quality.py --model M --tasks bie_json,bie_retrieval --limit 500
    python eval/quality.py --model M --ablation --contexts 2048
    python eval/quality.py --model M --jobs 6 --time-limit 600   # engines side by side, an end that is kept

Every measure is paired with `auto` on the same tokens and goes through vLLM's engine. What is
done is kept: the same command resumes where it was stopped. Exit status: 0 the judged format
(--judge) is accepted, 1 it is rejected, 3 not enough evidence, 2 the command cannot be run.
"""
from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import platform
import shlex
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import models

RESULTS = Path(__file__).with_name("results")
NEEDED = ("vllm", "transformers", "scipy", "matplotlib", "rich", "numpy")


def build_parser() -> argparse.ArgumentParser:
    """The command line; numbers are tokens unless said otherwise."""
    numbers = lambda text: [int(x) for x in text.split(",") if x]
    floats = lambda text: [float(x) for x in text.split(",") if x]
    names = lambda text: [x.strip() for x in text.split(",") if x.strip()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help=f"folder, Hub id or a short name: {', '.join(models.PACKAGED)}")
    add("--formats", default="auto,int4_asym", help="settings: int4_asym+recent_tokens=64, see quality_formats.py")
    add("--judge", help="format whose verdict is the exit status (default int4_asym, else the last one)")
    add("--contexts", type=numbers, help="lengths to score (default 2048,4096,8192 as far as the model goes)")
    add("--documents", type=names, default=["prose", "technical", "code", "german"], help="of eval/texts, or none")
    add("--text", type=Path, action="append", default=[], help="a text file of your own, repeatable")
    add("--decode", type=int, default=32, help="tokens forced through decoding per document and context, 0 for none")
    add("--needles", type=names, default=["passkey", "needle", "multi", "cached"], help="kinds, or none")
    add("--needle-contexts", type=numbers, help="default: those of --contexts that are 4096 or 8192, else the largest")
    add("--depths", type=floats, default=[0.0, 0.25, 0.5, 0.75, 1.0], help="0 is the start of the text")
    add("--repeats", type=int, default=1, help="prompts per cell of the grid")
    add("--tasks", type=names, default=[], help="lm-eval tasks, those of eval/tasks included")
    add("--limit", type=int, help="items per task")
    add("--tolerance", type=float, default=1.0, help="accuracy that may be lost, in points")
    add("--ppl-tolerance", type=float, default=0.5, help="rise of perplexity that is allowed, in percent")
    add("--ablation", action="store_true", help="one table over the settings of int4_asym instead of --formats")
    add("--dtype", default="auto", help="of the model, as vLLM's --dtype")
    add("--kv-memory", type=float, default=2.0, help="GiB of KV cache per engine")
    add("--engine-args", type=json.loads, default={}, help="further arguments of vLLM's LLM, as JSON")
    add("--out", type=Path, default=RESULTS, help="folder of the JSON, the table and the pictures")
    add("--name", help="results are quality_NAME.* (default: from the model)")
    add("--work", type=Path, default=models.cache_dir() / "quality", help="finished units; can be deleted")
    add("--jobs", type=int, default=1, help="engines at a time (each takes the model and --kv-memory)")
    add("--time-limit", type=float, help="seconds after which engines are ended and what is finished is written")
    add("--fresh", action="store_true", help="do not resume: compute everything again")
    return parser


def missing_packages() -> str | None:
    """The sentence about packages that are not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return f"{', '.join(missing)} cannot be imported; install them with: pip install 'bie-vllm-plugin[eval,cpu]'."


def model_facts(model: str, tokenizer: bool = True) -> tuple[Any, int, int]:
    """(tokenizer or None, longest context, attention layers); raises ValueError with one sentence."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(model)
        tokens = AutoTokenizer.from_pretrained(model) if tokenizer else None
    except Exception as error:  # noqa: BLE001 - the Hub's and transformers' many ways to fail
        first = str(error).strip().splitlines()[0]
        known = ", ".join(models.PACKAGED)
        what = f"{model!r} is neither a model folder, a reachable Hub id nor one of {known}"
        raise ValueError(f"{what} ({first}).") from None
    text = config.get_text_config()
    if tokens is not None:
        tokens.model_max_length = 1 << 30  # documents are cut here, a warning would mislead
    return tokens, int(text.max_position_embeddings), int(text.num_hidden_layers)


def versions(engine: bool = True) -> dict[str, str]:
    """What the numbers depend on besides the model; without vLLM's where no `engine` ran."""
    import torch
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name()
    found = {"vllm": importlib.import_module("vllm").__version__} if engine else {}
    return found | {
        "torch": torch.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(), "machine": device,
    }  # fmt: skip


def _cpu_name() -> str:
    import os

    info = Path("/proc/cpuinfo")
    names = [x.split(":", 1)[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")] if (
        info.exists()) else []  # fmt: skip
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} CPUs"


def plan(args: argparse.Namespace) -> tuple[list[Any], list[dict[str, Any]], int]:
    """Formats, units and the engine's context length; raises ValueError with one sentence."""
    import quality_data
    import quality_formats

    tokenizer, longest, layers = model_facts(args.model)
    contexts = args.contexts or [n for n in (2048, 4096, 8192) if n <= longest] or [longest]
    if max(contexts) > longest:
        raise ValueError(f"{args.model} takes {longest} tokens, not the {max(contexts)} of --contexts.")
    needle_contexts = args.needle_contexts or [n for n in contexts if n in (4096, 8192)] or [max(contexts)]
    unasked = args.ablation and args.needles == build_parser().get_default("needles")
    kinds = [] if unasked or args.needles == ["none"] else args.needles
    if unknown := set(kinds) - set(quality_data.NEEDLES):
        known = ", ".join(quality_data.NEEDLES)
        raise ValueError(f"needles {sorted(unknown)[0]!r} are unknown; there are {known}, none.")
    if kinds and (max(needle_contexts) > longest or min(needle_contexts) < 512):
        raise ValueError(f"--needle-contexts {needle_contexts} must be from 512 to the model's {longest} tokens.")
    if args.ablation:
        import torch

        variants = quality_formats.ablation(layers, not torch.cuda.is_available())
        formats = [quality_formats.parse_format("auto"), *variants]
    else:
        formats = quality_formats.parse_formats(args.formats)
    docs = quality_data.documents(tokenizer, [] if args.documents == ["none"] else args.documents, args.text)
    units = quality_data.score_units(docs, contexts, longest) if docs else []
    units += quality_data.decode_units(docs, contexts, args.decode, longest)
    units += quality_data.needle_units(tokenizer, kinds, needle_contexts, args.depths, args.repeats, longest)
    if not units and not args.tasks:
        raise ValueError("there is nothing to measure: no document, no needle, no task.")
    args.contexts = contexts
    # One token beyond what is asked, rounded up: engines of several commands then share their results.
    need = max((len(u["prompt"]) + max(1, len(u["forced"])) for u in units), default=1)
    return formats, units, min(longest, -(-need // 512) * 512)


def execute(args: argparse.Namespace, formats: list[Any], units: list[dict[str, Any]], length: int) -> Any:
    """Run everything that is missing, with a progress bar; returns the runner that holds the results."""
    from quality_run import Runner
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if args.fresh:
        shutil.rmtree(args.work, ignore_errors=True)
    llm = {
        "dtype": args.dtype, "max_model_len": length, "enforce_eager": True, "skip_tokenizer_init": True,
        "gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": int(args.kv_memory * 2**30),
        "max_num_batched_tokens": 2048, "max_num_seqs": 4, "disable_log_stats": True, **args.engine_args,
    }  # fmt: skip
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console) as bar:
        tasks = {fmt.label: bar.add_task(fmt.label, total=len(units)) for fmt in formats}
        runner = Runner(args.model, llm, args.work, lambda label, unit: bar.advance(tasks[label]))
        clock = None
        if args.time_limit:
            sentence = f"the time limit of {args.time_limit:g} s was reached"
            clock = threading.Timer(args.time_limit, runner.stop, [sentence])
            clock.start()
        try:
            runner.run_all(formats, units, args.jobs)
        finally:
            if clock:
                clock.cancel()
    base = formats[0]
    if base.label in runner.status and not any(runner.result(base, u) for u in units):
        raise ValueError(f"{args.model} does not run with the model's own KV cache: {runner.status[base.label]}")
    for label, reason in runner.status.items():
        print(f"{label} did not run to its end: {reason}", file=sys.stderr)
    return runner


def collect(args: argparse.Namespace, formats: list[Any], units: list[dict[str, Any]], runner: Any) -> dict[str, Any]:
    """Everything measured, as it goes into the JSON."""
    import quality_report as report
    import quality_stats as stats

    base = formats[0]
    result: dict[str, Any] = {
        "model": args.name, "dtype": args.dtype, "command": "python " + shlex.join(sys.argv), "versions": versions(),
        "formats": {}, "records": [], "positions": {}, "needles": [], "tasks": [], "verdicts": [], "notes": {},
    }  # fmt: skip
    for fmt in formats:
        done = sum(runner.result(fmt, u) is not None for u in units)
        how = "ran" if done == len(units) else f"ran in part ({done} of {len(units)} units)" if done else "did not run"
        reason = runner.status.get(fmt.label, "").split(" (log:")[0]
        result["formats"][fmt.label] = f"{how}: {reason}" if reason else how
        needles = [u for u in units if u["kind"] not in ("score", "decode")]
        for u in needles:
            if (r := runner.result(fmt, u)) is not None:
                result["needles"].append({
                    **{k: u[k] for k in ("kind", "context", "depth", "repeat")}, "format": fmt.label,
                    "exact": bool(r["top"].all()), "logprob": -float(r["nll"].sum()), "cached_tokens": int(r["cached"]),
                })  # fmt: skip
        if fmt.is_base:
            continue
        pairs = [(u, runner.result(base, u), runner.result(fmt, u)) for u in units]
        pairs = [(u, b, r) for u, b, r in pairs if b is not None and r is not None]
        scored = [r for u, _, r in pairs if u["kind"] == "score"]
        for u, _, r in pairs:
            facts = {"document": u.get("document"), "format": fmt.label}
            if u["kind"] == "score":
                for n in [n for n in args.contexts if n <= u["context"]]:
                    part = {k: v[: n - 1] for k, v in r.items() if v.ndim}
                    result["records"].append(report.token_record(part, **facts, context=n, mode="score"))
            elif u["kind"] == "decode":
                result["records"].append(report.token_record(r, **facts, context=u["context"], mode="decode"))
        losses = []
        if scored:
            result["positions"][fmt.label] = report.by_position(scored)
            losses = stats.token_losses(scored, args.tolerance, args.ppl_tolerance)
        found = [(b["top"].all(), r["top"].all()) for u, b, r in pairs if u in needles]
        if found:
            import numpy as np

            one, two = np.array(found).T
            losses.append(stats.accuracy_loss("needles", one, two, args.tolerance))
        if pairs:
            result["verdicts"].append((fmt.label, losses))
    return result


def add_tasks(args: argparse.Namespace, formats: list[Any], result: dict[str, Any]) -> None:
    """Run lm-eval's tasks per format and add their losses to the verdicts."""
    from concurrent.futures import ThreadPoolExecutor

    import quality_tasks

    samples: dict[str, Any] = {}
    running = [fmt for fmt in formats if not result["formats"][fmt.label].startswith("did not run")]
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = {fmt.label: pool.submit(quality_tasks.run, args.model, fmt, args) for fmt in running}
        for fmt in running:
            try:
                samples[fmt.label] = waiting[fmt.label].result()
            except ValueError as error:
                if fmt.is_base:
                    raise
                result["formats"][fmt.label] += f"; {error}"
    result["tasks"] += quality_tasks.table(samples)
    verdicts = dict(result["verdicts"])
    for label in samples:
        if label != "auto":
            lost, result["notes"][label] = quality_tasks.losses(samples["auto"], samples[label], args.tolerance)
            verdicts.setdefault(label, []).extend(lost)
    result["verdicts"] = list(verdicts.items())


def write(args: argparse.Namespace, result: dict[str, Any]) -> str:
    """JSON, markdown and pictures; returns the markdown."""
    import quality_report as report

    args.out.mkdir(parents=True, exist_ok=True)
    stem = f"quality_{args.name}"  # names hold dots: no with_suffix
    (args.out / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    parts = [f"# {args.name}: KV formats against auto"]
    if scored := report.pooled(result["records"]):
        longest = max(r["context"] for r in scored)
        last = [r for r in result["records"] if r["mode"] == "score" and r["context"] == longest]
        parts += ["## All documents", report.token_table(scored, "context"),
                  "KL p99 over all documents is that of the worst one.",
                  f"## By document, {longest} tokens", report.token_table(last, "document")]  # fmt: skip
    if decoded := report.pooled(result["records"], "decode"):
        parts += ["## Teacher-forced decoding", report.token_table(decoded, "context")]
    if result["needles"]:
        parts += ["## Needles", report.needle_table(result["needles"])]
        report.plot_needles(result["needles"], args.out / f"{stem}_needles.png", args.name)
    if result["tasks"]:
        import quality_tasks

        parts += ["## Tasks", quality_tasks.markdown(result["tasks"])]
    if result["positions"]:
        report.plot_positions(result["positions"], args.out / f"{stem}_positions.png", args.name)
    idle = [f"- {name} {status}" for name, status in result["formats"].items() if status != "ran"]
    parts += ["## Verdicts", "\n".join([f"- {v['sentence']}" for v in result["verdicts"]] + idle)]
    parts.append(f"`{result['command']}`, {', '.join(f'{k} {v}' for k, v in result['versions'].items())}")
    text = "\n\n".join(parts) + "\n"
    (args.out / f"{stem}.md").write_text(text)
    return text


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if sentence := missing_packages():
        print(sentence, file=sys.stderr)
        return 2
    import quality_stats as stats

    try:
        args.name = args.name or Path(args.model).name
        args.model = models.resolve(args.model)
        formats, units, length = plan(args)
        labels = [fmt.label for fmt in formats[1:]]
        if not labels:
            raise ValueError("--formats needs a format besides auto.")
        judged = args.judge or ("int4_asym" if "int4_asym" in labels else labels[-1])
        if judged not in labels:
            raise ValueError(f"--judge {judged!r} is not among the formats {', '.join(labels)}.")
        args.deadline = time.monotonic() + args.time_limit if args.time_limit else None
        runner = execute(args, formats, units, length)
        result = collect(args, formats, units, runner)
        if args.tasks:
            add_tasks(args, formats, result)
    except (ValueError, SystemExit) as error:
        print(f"quality.py: {error}", file=sys.stderr)
        return 2
    notes = result.pop("notes")
    verdicts = [stats.verdict(label, losses, notes.get(label, ())) for label, losses in result["verdicts"]]
    result["verdicts"] = [v.as_record() for v in verdicts]
    print(write(args, result))
    for v in verdicts:
        print(v.sentence)
    outcome = next((v.outcome for v in verdicts if v.format == judged), None)
    if outcome is None:
        print(f"{judged} did not run, so nothing can be said about it: {runner.status.get(judged)}", file=sys.stderr)
        return 2
    return stats.EXIT_STATUS[outcome]


if __name__ == "__main__":
    raise SystemExit(main())
