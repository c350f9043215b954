# SPDX-License-Identifier: Apache-2.0
"""The offline lm-eval tasks: data, scoring, losses, and one run through lm-eval's vLLM model."""
from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import pytest

EVAL = Path(__file__).parent.parent / "eval"
sys.path[:0] = [str(EVAL), str(EVAL / "tasks")]

import bie_tasks
import make_tasks
import quality_formats
import quality_stats
import quality_tasks

TASKS = ("bie_arithmetic", "bie_copy", "bie_json", "bie_retrieval")


def _docs(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (EVAL / "tasks" / f"{name}.jsonl").read_text().splitlines()]


def test_data_is_what_the_script_makes(tmp_path, monkeypatch):
    (tmp_path / "schema.json").write_bytes((EVAL / "tasks" / "schema.json").read_bytes())
    monkeypatch.setattr(make_tasks, "HERE", tmp_path)
    make_tasks.main()
    for name in TASKS:
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (EVAL / "tasks" / f"{name}.jsonl").read_bytes()
        assert len(_docs(name)) >= 500


def test_scoring():
    doc = _docs("bie_json")[0]
    assert bie_tasks.score_json(doc, [f" {doc['answer']}\n\nText"]) == {"acc": 1.0, "valid": 1.0}
    other = json.loads(doc["answer"]) | {"quantity": 1000}
    assert bie_tasks.score_json(doc, [json.dumps(other)]) == {"acc": 0.0, "valid": 1.0}
    for wrong in ("{", "", '{"id": 1}'):
        assert bie_tasks.score_json(doc, [wrong]) == {"acc": 0.0, "valid": 0.0}
    solved = " 3 boxes of 5 are 15. 15 minus 3 is 12. #### 12"
    assert bie_tasks.score_arithmetic({"answer": "12"}, [solved]) == {"acc": 1}
    assert bie_tasks.score_arithmetic({"answer": "12"}, ["no number"]) == {"acc": 0}
    assert bie_tasks.score_text({"answer": "ab-1"}, [" ab-1\nx"]) == {"acc": 1}


def test_losses_pair_items_and_invalid_json_rejects():
    items = {str(i): 1.0 for i in range(600)}
    base = {"bie_json": {"acc": items, "valid": items}}
    other = {"bie_json": {"acc": items, "valid": {k: float(int(k) >= 12) for k in items}}}
    losses = quality_tasks.losses(base, other, 1.0)
    assert [x.outcome for x in losses] == [quality_stats.ACCEPT, quality_stats.REJECT]
    assert "valid below 99 %" in quality_stats.verdict("x", losses).sentence
    assert len(quality_tasks.losses(base, base, 1.0)) == 1


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_task_definitions_load():
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(EVAL / "tasks"))
    assert set(TASKS) <= set(manager.all_tasks)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_one_task_through_lm_eval(smollm2, tmp_path):
    args = argparse.Namespace(
        tasks=["bie_json"], limit=2, dtype="auto", kv_memory=0.25, engine_args={"max_num_seqs": 2}, work=tmp_path,
        deadline=None,
    )  # fmt: skip
    fmt = quality_formats.parse_format("int4_asym")
    samples = quality_tasks.run(smollm2, fmt, args)
    assert len(samples["bie_json"]["acc"]) == len(samples["bie_json"]["valid"]) == 2
    args.tasks = ["no_such_task"]
    with pytest.raises(ValueError, match="no_such_task did not run"):
        quality_tasks.run(smollm2, fmt, args)
