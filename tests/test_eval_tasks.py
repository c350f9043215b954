# SPDX-License-Identifier: Apache-2.0
"""The offline lm-eval tasks: data, scoring, losses, and one run through lm-eval's vLLM model."""
from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

EVAL = Path(__file__).parent.parent / "eval"
sys.path[:0] = [str(EVAL), str(EVAL / "tasks")]

import bie_tasks
import make_tasks
import quality
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


def json_samples(valid: int, right: int, n: int = 600) -> quality_tasks.Samples:
    """n items of bie_json, so many of them valid, and so many valid and right."""
    first = lambda count: {str(i): float(i < count) for i in range(n)}
    return {"bie_json": {"acc": first(right), "valid": first(valid)}}


@pytest.mark.parametrize(
    ("auto", "other", "rejected", "noted"),
    [
        ((600, 600), (600, 600), [], []),
        ((600, 600), (594, 594), [], []),  # 99.0 % is not below it
        ((600, 600), (593, 593), ["valid", "valid and right"], []),
        ((600, 600), (600, 593), ["valid and right"], []),
        ((594, 594), (593, 593), ["valid", "valid and right"], []),
        ((600, 593), (593, 593), ["valid"], ["valid and right"]),
        ((593, 200), (593, 200), [], ["valid", "valid and right"]),
        ((593, 200), (600, 600), [], ["valid", "valid and right"]),  # better than auto: still said
    ],
)
def test_json_below_99_percent_rejects_where_auto_reaches_it(auto, other, rejected, noted):
    losses, notes = quality_tasks.losses(json_samples(*auto), json_samples(*other), 5.0)
    ours = [loss for loss in losses if "below 99 %" in loss.measure]
    assert {loss.measure for loss in ours} == {f"bie_json {words} below 99 %" for words in rejected}
    assert all(loss.outcome == quality_stats.REJECT for loss in ours)
    verdict = quality_stats.verdict("x", losses, notes)
    assert (verdict.outcome == quality_stats.REJECT) == bool(rejected)
    assert [f"that must be {words} are not asked" in verdict.sentence for words in ("valid", "valid and right")] == [
        words in noted for words in ("valid", "valid and right")
    ]
    if noted:
        said = 100 * auto[1 if noted == ["valid and right"] else 0] / 600
        assert f"auto itself has {said:.1f} %" in verdict.sentence
    assert verdict.sentence.count("\n") == 0 and verdict.sentence.endswith(".")


def test_the_harness_says_what_was_not_asked(monkeypatch):
    """From the tasks' results to the sentences, format by format."""
    shares = {"auto": (600, 593), "good": (600, 600), "bad": (593, 593)}
    monkeypatch.setattr(quality_tasks, "run", lambda model, fmt, args: json_samples(*shares[fmt.label]))
    formats = [quality_formats.Format(name, name) for name in shares]
    result = {"formats": dict.fromkeys(shares, "ran"), "tasks": [], "verdicts": [], "notes": {}}
    quality.add_tasks(argparse.Namespace(model="m", jobs=1, tolerance=5.0), formats, result)
    sentences = {name: quality_stats.verdict(name, lost, result["notes"][name]) for name, lost in result["verdicts"]}
    assert {name: verdict.outcome for name, verdict in sentences.items()} == {
        "good": quality_stats.ACCEPT, "bad": quality_stats.REJECT
    }  # fmt: skip
    assert all("auto itself has 98.8 % (this format" in verdict.sentence for verdict in sentences.values())


def test_other_tasks_have_no_share_to_reach():
    items = {str(i): float(i < 300) for i in range(600)}
    losses, notes = quality_tasks.losses({"gsm8k": {"acc": items}}, {"gsm8k": {"acc": items}}, 1.0)
    assert [loss.measure for loss in losses] == ["gsm8k acc"] and notes == []


@pytest.fixture(scope="module")
def manager():
    return pytest.importorskip("lm_eval.tasks").TaskManager(include_path=str(EVAL / "tasks"))


def test_task_definitions_load(manager):
    assert set(TASKS) <= set(manager.all_tasks)


def test_documented_names_are_lm_evals(manager):
    """Every task that our documentation names is one of lm-eval's or ours, the four of the Hub among them."""
    files = [EVAL.parent / "README.md", EVAL / "RESULTS.md", *EVAL.glob("*.py"), *EVAL.glob("*.sh")]
    named = {name for file in files for match in re.findall(r"--tasks ([a-z]\w*(?:,\w+)*)", file.read_text())
             for name in match.split(",")}  # fmt: skip
    assert {"gsm8k", "humaneval", "ifeval", "ruler", *TASKS} <= named
    unknown = [name for name in named if not manager.match_tasks([name])]
    assert not unknown


@pytest.mark.parametrize(
    ("task", "allowed", "length", "words"),
    [("humaneval", "0", 8192, "HF_ALLOW_CODE_EVAL=1"), ("humaneval", "1", 2048, None), ("gsm8k", "0", 2048, None),
     ("ruler", "0", 4096, "texts of 4096 tokens, and the engine takes 4096"), ("ruler", "0", 8192, None),
     ("niah_single_1", "0", None, "the engine takes 2048")],
)  # fmt: skip
def test_what_a_task_needs_is_said_first(task, allowed, length, words, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", allowed)
    engine = {} if length is None else {"max_model_len": length}
    sentence = quality_tasks.unmet([task], engine)
    assert (sentence is None) == (words is None)
    if words:
        args = argparse.Namespace(tasks=[task], engine_args=engine)
        with pytest.raises(ValueError, match=re.escape(words)) as error:
            quality_tasks.run("model", quality_formats.Format("int4_asym", "int4_asym"), args)
        assert "\n" not in str(error.value)


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
