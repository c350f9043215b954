# SPDX-License-Identifier: Apache-2.0
"""The quality harness: rules, prompts, sentences, and a run that must reject broken formats."""
from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

EVAL = Path(__file__).parent.parent / "eval"
sys.path.insert(0, str(EVAL))

import models
import quality
import quality_data
import quality_engine
import quality_formats
import quality_report
import quality_run
import quality_stats as stats

KNOWN = ("auto", "fp8", "int4_asym")
BROKEN = "int4_asym+key_axis=head_dim+recent_tokens=0+sink_tokens=0"
WRONG_SCALE = "int4_asym+fault=scale"


# -- statistics ---------------------------------------------------------------------
def test_interval_covers_the_mean_and_shrinks():
    rng = np.random.default_rng(0)
    small, large = (stats.interval(rng.normal(1.0, 2.0, n)) for n in (100, 10_000))
    assert small[0] < 1.0 < small[1] and large[0] < 1.0 < large[1]
    assert large[1] - large[0] < 0.2 * (small[1] - small[0])


@pytest.mark.parametrize(
    ("lost", "n", "outcome"),
    [(0.0, 2000, stats.ACCEPT), (0.05, 2000, stats.REJECT), (0.01, 600, stats.UNSURE), (0.0, 40, stats.UNSURE),
     (0.5, 40, stats.REJECT)],
)  # fmt: skip
def test_verdict_rule(lost, n, outcome):
    """Accept, reject, and "not enough evidence" where the interval holds the tolerance or items are few."""
    base = np.ones(n)
    other = (np.arange(n) >= round(lost * n)).astype(float)
    verdict = stats.verdict("x", [stats.accuracy_loss("task", base, other, 1.0)])
    assert verdict.outcome == outcome
    assert verdict.sentence.startswith(f"x: {outcome}: ") and verdict.sentence.count("\n") == 0


def test_few_needles_reject_but_do_not_stop_acceptance():
    good = stats.Loss("tokens", 0.0, -0.1, 0.1, 1.0, "points", 4000)
    few = stats.accuracy_loss("needles", np.ones(20), np.ones(20), 1.0)
    lost = stats.accuracy_loss("needles", np.ones(20), np.zeros(20), 1.0)
    assert stats.verdict("x", [good, few]).outcome == stats.ACCEPT
    assert stats.verdict("x", [good, lost]).outcome == stats.REJECT
    assert sorted(stats.EXIT_STATUS.values()) == [0, 1, 3]


# -- formats ------------------------------------------------------------------------
def test_formats_carry_their_settings():
    fmt = quality_formats.parse_format("int4_asym+recent_tokens=64+skip_layers=0/3+only=keys", KNOWN)
    assert fmt.llm_arguments() == {
        "kv_cache_dtype": "int4_asym", "additional_config": {"int4_asym": {"recent_tokens": 64}},
        "kv_cache_dtype_skip_layers": ["0", "3"],
    }  # fmt: skip
    assert fmt.patches == {"only": "keys"}


@pytest.mark.parametrize(
    ("text", "words"),
    [("int5", "'int5' is not a KV format"), ("fp8+recent_tokens=64", "settings belong to int4_asym"),
     ("int4_asym+recent=64", "recent"), ("int4_asym+recent_tokens=8", "at least 64"), ("auto+chunk", "key=value"),
     ("int4_asym+fault=x", "unknown"), ("auto+chunk=x", "number of tokens")],
)  # fmt: skip
def test_bad_formats_are_one_sentence(text, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")) as error:
        quality_formats.parse_format(text, KNOWN)
    assert "\n" not in str(error.value)


def test_ablation_covers_the_switches():
    labels = " ".join(fmt.label for fmt in quality_formats.ablation(24, on_cpu=True))
    for word in ("sink_tokens=0", "sink_tokens=16", "recent_tokens=64", "recent_tokens=512", "group_size=32",
                 "key_axis=head_dim", "only=keys", "only=values", "skip_layers=0/23"):  # fmt: skip
        assert word in labels


# -- prompts ------------------------------------------------------------------------
class _Bytes:
    """A tokenizer of bytes."""

    def __call__(self, text: str, add_special_tokens: bool = True):
        ids = ([256] if add_special_tokens else []) + list(text.encode())
        return type("Encoding", (), {"input_ids": ids})


@pytest.mark.parametrize("kind", quality_data.NEEDLES)
def test_needles_fill_the_context_and_hide_the_answer(kind):
    units = quality_data.needle_units(_Bytes(), [kind], [2048, 4096], [0.0, 1.0], 1, 4096)
    assert len(units) == 4 and len({u["id"] for u in units}) == 4
    for u in units:
        assert len(u["prompt"]) + len(u["forced"]) == u["context"]
        answer = bytes(u["forced"]).decode().strip()
        text = bytes(u["prompt"][1:]).decode(errors="replace")
        assert text.count(answer) == 2  # said twice, not in the question
        where = text.index(answer) / len(text)
        assert where < 0.1 if u["depth"] == 0 else where > 0.8
        assert bool(u["warm"]) == (kind == "cached")
        if kind == "cached":
            shared = next(i for i, (a, b) in enumerate(zip(u["prompt"], u["warm"], strict=False)) if a != b)
            assert shared > 0.9 * u["context"] - 100
    assert units == quality_data.needle_units(_Bytes(), [kind], [2048, 4096], [0.0, 1.0], 1, 4096)


def test_score_and_decode_units():
    docs = {"a": list(range(5000)), "b": list(range(1000))}
    units = quality_data.score_units(docs, [512, 4096], 4096)
    assert [(u["document"], u["context"], len(u["prompt"])) for u in units] == [("a", 4096, 4095), ("b", 512, 512)]
    units = quality_data.decode_units(docs, [512, 4096], 16, 4096)
    assert [(len(u["prompt"]), u["forced"][0]) for u in units] == [(496, 496), (4080, 4080), (496, 496)]
    with pytest.raises(ValueError, match="no document fills 8192 tokens"):
        quality_data.score_units(docs, [8192], 8192)


# -- records and pictures -------------------------------------------------------------
def _arrays(n: int, kl: float) -> dict[str, np.ndarray]:
    one = np.ones(n, np.float32)
    return {"nll": 2 * one, "nll_base": 2 * one, "kl": kl * one, "agree": one, "top": one, "cached": np.array(0)}


def test_report(tmp_path):
    parts = {name: [_arrays(2047, kl)] for name, kl in (("a", 1e-3), ("b", 1e-1))}
    records = [
        quality_report.token_record(a[0], format=name, document="d", context=2048, mode="score")
        for name, a in parts.items()
    ]
    rows = quality_report.pooled(records)
    assert [r["format"] for r in rows] == ["a", "b"] and rows[1]["kl_mean"] == pytest.approx(0.1)
    assert "+0.00 %" in quality_report.token_table(rows, "context")
    positions = {name: quality_report.by_position(a) for name, a in parts.items()}
    assert positions["a"][-1]["to"] == 2047
    needles = [
        {"kind": k, "format": f, "context": c, "depth": d, "exact": d > 0, "logprob": -1.0}
        for k in ("passkey", "multi") for f in "ab" for c in (4096, 8192) for d in (0.0, 0.5)
    ]  # fmt: skip
    assert "2 of 4" not in quality_report.needle_table(needles) and "1 of 2" in quality_report.needle_table(needles)
    quality_report.plot_positions(positions, tmp_path / "p.png", "t")
    quality_report.plot_needles(needles, tmp_path / "n.png", "t")
    assert (tmp_path / "p.png").stat().st_size > 5000 < (tmp_path / "n.png").stat().st_size


# -- bad input ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--model", "/nowhere"], "neither a model folder"), (["--formats", "auto,int5"], "'int5' is not a KV format"),
     (["--contexts", "65536"], "takes 8192 tokens, not the 65536"), (["--formats", "auto"], "a format besides auto"),
     (["--judge", "fp8"], "not among the formats"), (["--text", "/nowhere.txt"], "there is no text"),
     (["--needles", "haystack"], "are unknown"), (["--needle-contexts", "100"], "must be from 512")],
)  # fmt: skip
def test_bad_input_is_one_sentence(smollm2, arguments, words, capsys):
    assert quality.main(["--model", smollm2, *arguments]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("quality.py: ") and words in said


def test_missing_package_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(quality, "NEEDED", ("no_such_package",))
    assert quality.main(["--model", "x"]) == 2
    assert "no_such_package cannot be imported; install" in capsys.readouterr().err


def test_a_wrong_package_is_noticed(tmp_path):
    """Whether it was downloaded or brought by hand."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUFrubbish")
    wanted = models.PACKAGED["smollm2"]
    with pytest.raises(SystemExit, match="do not hold the expected model"):
        models.check(file, wanted)
    digest = models._sha256(file)
    models.check(file, models.Packaged(("p",), 11, digest, "llama", 1))
    with pytest.raises(SystemExit, match="sha256"):
        models.check(file, models.Packaged(("p",), 11, "0", "llama", 1))
    with pytest.raises(SystemExit, match="do not hold the expected model"):
        models.from_file("smollm2", file, tmp_path / "new")
    with pytest.raises(SystemExit, match="exists; name a new folder"):
        models.from_file("smollm2", file, tmp_path)


# -- driver ----------------------------------------------------------------------------
FAKE_ENGINE = """
import json, sys, time
from pathlib import Path
import numpy as np
job = json.loads(Path(sys.argv[1]).read_text())
folder = Path(job["folder"])
folder.mkdir(parents=True, exist_ok=True)
Path(job["base"]).mkdir(parents=True, exist_ok=True)
behaviour = job["llm"]["kv_cache_dtype"] if not job["is_base"] else job["llm"]["base"]
for unit in job["units"]:
    if behaviour == "dies":
        print(json.dumps({"error": "no such thing"}), flush=True)
        sys.exit(1)
    while not job["is_base"] and not (Path(job["base"]) / f"{unit['id']}.pt").exists():
        time.sleep(0.02)
    if unit["id"] == "second" and behaviour == "hangs":
        time.sleep(600)
    np.savez(folder / f"{unit['id']}.npz", cached=0)
    if job["is_base"]:
        (Path(job["base"]) / f"{unit['id']}.pt").write_text("")
    print(json.dumps({"unit": unit["id"]}), flush=True)
"""


def _runner(tmp_path, monkeypatch, base: str = "runs") -> quality_run.Runner:
    worker = tmp_path / "worker.py"
    worker.write_text(FAKE_ENGINE)
    monkeypatch.setattr(quality_run, "WORKER", worker)
    monkeypatch.setattr(quality_run, "unsupported", lambda fmt, on_cpu: None)
    return quality_run.Runner("model", {"base": base}, tmp_path / "work")


UNITS = [{"id": name, "warm": []} for name in ("first", "second")] + [{"id": "third", "warm": [1]}]
AUTO, GOOD, HANGS, DIES = (quality_formats.Format(name, name) for name in ("auto", "good", "hangs", "dies"))


def _done(runner: quality_run.Runner, fmt: quality_formats.Format) -> list[str]:
    return [u["id"] for u in UNITS if runner.result(fmt, u) is not None]


def test_engines_side_by_side_wait_for_auto_and_can_be_ended(tmp_path, monkeypatch):
    runner = _runner(tmp_path, monkeypatch)
    finished = []

    def progress(label: str, unit: str | None) -> None:
        finished.append((label, unit))
        if len(finished) == 8:  # all of auto's and good's units, and what the hanging format can do
            runner.stop("the time is over")

    runner.progress = progress
    runner.run_all([AUTO, GOOD, HANGS], UNITS, jobs=6)
    assert _done(runner, AUTO) == _done(runner, GOOD) == ["first", "second", "third"]
    assert _done(runner, HANGS) == ["first", "third"]
    assert runner.status == {"hangs": "the time is over"} and not runner.live
    runner.run_all([AUTO, HANGS], UNITS, jobs=2)  # stopped: starts nothing, returns at once
    assert _done(runner, HANGS) == ["first", "third"]


@pytest.mark.parametrize("jobs", [1, 4])
def test_a_format_that_fails_leaves_the_others(tmp_path, monkeypatch, jobs):
    runner = _runner(tmp_path, monkeypatch)
    runner.run_all([AUTO, DIES, GOOD], UNITS, jobs)
    assert set(runner.status) == {"dies"} and runner.status["dies"].startswith("no such thing (log: ")
    assert _done(runner, GOOD) == ["first", "second", "third"] and _done(runner, DIES) == []


@pytest.mark.parametrize("jobs", [1, 4])
def test_without_auto_nothing_is_measured(tmp_path, monkeypatch, jobs):
    runner = _runner(tmp_path, monkeypatch, base="dies")
    runner.run_all([AUTO, GOOD], UNITS, jobs)
    assert all("no such thing" in runner.status[name] for name in ("auto", "good"))
    assert not any(runner.result(GOOD, u) for u in UNITS)


def test_forced_tokens_follow_positions():
    """Prefill chunks and foreign rows are left alone; from the prompt's last position on, tokens are pinned."""
    model = torch.nn.Identity()
    model.compute_logits = lambda hidden: torch.zeros(len(hidden), 7)
    captured = quality_engine.Captured(model)
    forcing = quality_engine.Forcing(model, captured)
    captured.start()
    forcing.start([5, 3], first=9)
    picked = []
    for positions in (range(0, 6), range(6, 10), range(10, 11), range(11, 12)):
        hidden = torch.zeros(len(positions), 2)
        captured._hook(model, (), {"positions": torch.tensor(positions)}, hidden)
        picked.append(model.compute_logits(hidden[-1:]).softmax(-1).max(-1))
    assert [int(p.indices) for p in picked[1:3]] == [5, 3] and all(float(p.values) == 1 for p in picked[1:3])
    assert float(picked[0].values) < 0.2 and float(picked[3].values) < 0.2
    assert captured.take(range(12)).shape == (12, 2)
    with pytest.raises(RuntimeError, match="12 to 12"):
        captured.take(range(13))


def test_a_format_that_only_a_gpu_computes():
    for name, on_cpu, runs in (("nvfp4", True, False), ("nvfp4", False, True), ("fp8", True, True)):
        assert (quality_formats.unsupported(quality_formats.Format(name, name), on_cpu) is None) == runs


FAKE_SCORES = """
import json, sys
from pathlib import Path
import numpy as np
job = json.loads(Path(sys.argv[1]).read_text())
Path(job["folder"]).mkdir(parents=True, exist_ok=True)
Path(job["base"]).mkdir(parents=True, exist_ok=True)
kl = {"keys": 0.004, "values": 0.001}.get(job["patches"].get("only"), 0.005)
for unit in job["units"]:
    one = np.ones(len(unit["prompt"]) - 1, np.float32)
    np.savez(Path(job["folder"]) / f"{unit['id']}.npz", nll=2 * one, nll_base=2 * one, kl=kl * one, agree=one, top=one,
             top_base=one, cached=0)
    if job["is_base"]:
        (Path(job["base"]) / f"{unit['id']}.pt").write_text("")
    print(json.dumps({"unit": unit["id"]}), flush=True)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="only= works on the CPU's torch path")
def test_ablation_is_one_table_with_keys_and_values_alone(smollm2, tmp_path, monkeypatch):
    """The whole command with an engine that computes nothing: every variant is a row of one table."""
    worker = tmp_path / "worker.py"
    worker.write_text(FAKE_SCORES)
    monkeypatch.setattr(quality_run, "WORKER", worker)
    status, result = _run(smollm2, tmp_path, "--ablation", "--contexts", "256", "--documents", "prose", "--decode", "0")
    assert status == stats.EXIT_STATUS[stats.UNSURE]  # 255 tokens are too few
    (table,) = [part for part in (tmp_path / "quality_test.md").read_text().split("\n\n") if "| tokens |" in part][:1]
    rows = {line.split(" | ")[0].strip("| "): line for line in table.splitlines()[2:]}
    assert list(rows) == [fmt.label for fmt in quality_formats.ablation(30, on_cpu=True)]
    assert {label: kl in rows[label] for label, kl in (
        ("int4_asym", "0.0050"), ("int4_asym+only=keys", "0.0040"), ("int4_asym+only=values", "0.0010")
    )} == dict.fromkeys(("int4_asym", "int4_asym+only=keys", "int4_asym+only=values"), True)  # fmt: skip
    assert result["formats"] == dict.fromkeys(["auto", *rows], "ran")


# -- engines ---------------------------------------------------------------------------
def _run(model: str, work: Path, *more: str) -> tuple[int, dict]:
    status = quality.main(["--model", model, "--name", "test", "--work", str(work), "--out", str(work), *more])
    return status, json.loads((work / "quality_test.json").read_text())


@pytest.mark.engine
def test_broken_formats_are_rejected(smollm2, tmp_path):
    """Keys along the head without windows and a wrong scale lose too much; the defaults do not."""
    status, result = _run(
        smollm2, tmp_path, "--formats", f"auto,int4_asym,{BROKEN},{WRONG_SCALE}", "--contexts", "512", "--documents",
        "prose", "--decode", "0", "--needles", "none", "--kv-memory", "0.25", "--judge", BROKEN,
    )  # fmt: skip
    assert status == 1
    outcomes = {v["format"]: v["outcome"] for v in result["verdicts"]}
    assert outcomes[BROKEN] == outcomes[WRONG_SCALE] == stats.REJECT
    assert outcomes["int4_asym"] != stats.REJECT
    kl = {r["format"]: r["kl_mean"] for r in result["records"]}
    assert kl["int4_asym"] < 0.01 and kl[BROKEN] > 10 * kl["int4_asym"]


@pytest.mark.slow
@pytest.mark.engine
def test_every_measure_and_resumption(smollm2, tmp_path, monkeypatch):
    """Smoke run of every measure; keys along the head without windows and a wrong scale are rejected."""
    arguments = [
        "--formats", f"auto,int4_asym,{BROKEN},{WRONG_SCALE}", "--contexts", "512,1024", "--documents", "prose",
        "--decode", "4", "--needles", "passkey,cached", "--needle-contexts", "512", "--depths", "0.5",
        "--kv-memory", "0.5",
    ]  # fmt: skip
    status, result = _run(smollm2, tmp_path, *arguments, "--judge", WRONG_SCALE)
    assert status == 1
    outcomes = {v["format"]: v["outcome"] for v in result["verdicts"]}
    assert outcomes[BROKEN] == outcomes[WRONG_SCALE] == stats.REJECT
    assert outcomes["int4_asym"] != stats.REJECT
    by_format = {r["format"]: r for r in result["records"] if r["mode"] == "score" and r["context"] == 1024}
    good, broken = by_format["int4_asym"], by_format[BROKEN]
    assert good["kl_mean"] < 0.01 and good["top1"] > 0.94
    assert broken["kl_mean"] > 10 * good["kl_mean"]
    assert {r["mode"] for r in result["records"]} == {"score", "decode"}
    cached = [n for n in result["needles"] if n["kind"] == "cached"]
    assert len(cached) == 4 and all(n["cached_tokens"] >= 256 for n in cached)
    assert all(n["cached_tokens"] == 0 for n in result["needles"] if n["kind"] != "cached")
    assert (tmp_path / "quality_test_needles.png").exists() and (tmp_path / "quality_test_positions.png").exists()

    # Everything is kept: the same command needs no engine, and its verdicts are the same.
    def no_engine(*_):
        raise AssertionError("an engine was started for finished units")

    monkeypatch.setattr(quality_run.Runner, "_process", no_engine)
    status, again = _run(smollm2, tmp_path, *arguments)
    assert status == stats.EXIT_STATUS[outcomes["int4_asym"]]
    assert again["records"] == result["records"] and again["verdicts"] == result["verdicts"]


@pytest.mark.engine
def test_a_format_that_does_not_run_is_said_so(tmp_path, smollm2, capsys):
    """A known format that this machine does not serve: a sentence instead of numbers."""
    status, result = _run(
        smollm2, tmp_path, "--formats", "auto,turboquant_4bit_nc", "--contexts", "256", "--documents", "prose",
        "--decode", "0", "--needles", "none", "--kv-memory", "0.25",
    )  # fmt: skip
    assert status == 2
    assert result["formats"]["turboquant_4bit_nc"].startswith("did not run: turboquant_4bit_nc needs a GPU")
    assert "turboquant_4bit_nc did not run" in capsys.readouterr().err
    assert result["records"] == [] and result["verdicts"] == []


@pytest.fixture(scope="session")
def qwen() -> str:
    """Qwen2.5-Coder-0.5B-Instruct, fetched from its PyPI packages on first use (50 s, most of it conversion)."""
    return str(models.fetch("qwen2.5-coder-0.5b"))


def _assert_within_bounds(row: dict) -> None:
    """What int4_asym promises on a small model against `auto`: KL in nats, top-1 agreement, perplexity."""
    assert row["kl_mean"] <= 0.005, row
    assert row["top1"] >= 0.96, row
    assert abs(row["ppl"] / row["ppl_base"] - 1) <= 0.005, row


AT_2K = ("--formats", "auto,int4_asym", "--dtype", "float32", "--contexts", "2048", "--decode", "0")
"""Where the bounds come from: 2k tokens, and no rounding of the model's own."""


@pytest.mark.engine
def test_qwen_gate_on_prose(qwen, tmp_path):
    """The document that the bounds come from. The longest of the fast tests: two engines, 2k tokens each."""
    status, result = _run(qwen, tmp_path, *AT_2K, "--documents", "prose", "--needles", "none", "--kv-memory", "0.25")
    (row,) = result["records"]
    assert (row["format"], row["tokens"]) == ("int4_asym", 2047)
    assert row["kl_mean"] > 1e-4  # the body was read in INT4
    _assert_within_bounds(row)
    assert status != stats.EXIT_STATUS[stats.REJECT]


@pytest.mark.slow
@pytest.mark.engine
def test_qwen_gate_on_all_documents(qwen, tmp_path):
    """The bounds hold over prose, technical English, code and German together."""
    _, result = _run(qwen, tmp_path, *AT_2K, "--needles", "none", "--kv-memory", "0.25")
    assert [r["document"] for r in result["records"]] == ["prose", "technical", "code", "german"]
    (row,) = quality_report.pooled(result["records"])
    _assert_within_bounds(row)


@pytest.mark.slow
@pytest.mark.engine
def test_qwen_passkeys_at_4k_and_8k(qwen, tmp_path):
    """Every passkey that `auto` finds is found."""
    _, result = _run(
        qwen, tmp_path, "--formats", "auto,int4_asym", "--documents", "none", "--needles", "passkey",
        "--needle-contexts", "4096,8192", "--depths", "0,0.5,1", "--kv-memory", "0.5",
    )  # fmt: skip
    found = {
        name: {(n["context"], n["depth"]): n["exact"] for n in result["needles"] if n["format"] == name}
        for name in ("auto", "int4_asym")
    }
    assert len(found["auto"]) == 6 and sum(found["auto"].values()) >= 5  # else equal recall would say nothing
    assert found["int4_asym"] == found["auto"]


@pytest.mark.slow
@pytest.mark.engine
def test_qwen_tells_the_formats_apart(qwen, tmp_path):
    """Qwen2.5's key biases: `int4_asym` passes where keys along the head without windows fail."""
    status, result = _run(
        qwen, tmp_path, "--formats", f"auto,int4_asym,{BROKEN}", "--contexts", "1024", "--documents",
        "prose,technical,code", "--decode", "0", "--needles", "passkey", "--needle-contexts", "1024",
    )  # fmt: skip
    rows = {r["format"]: r for r in quality_report.pooled(result["records"])}
    assert rows["int4_asym"]["kl_mean"] <= 0.005 and rows["int4_asym"]["top1"] >= 0.96
    outcomes = {v["format"]: v["outcome"] for v in result["verdicts"]}
    assert outcomes[BROKEN] == stats.REJECT and outcomes["int4_asym"] != stats.REJECT


@pytest.mark.slow
@pytest.mark.engine
def test_ablation_of_one_side(smollm2, tmp_path):
    """Keys only and values only each lose less than both, and more than nothing."""
    _, result = _run(
        smollm2, tmp_path, "--formats", "auto,int4_asym,int4_asym+only=keys,int4_asym+only=values", "--contexts",
        "1024", "--documents", "prose", "--decode", "4", "--needles", "none", "--dtype", "float32",
    )  # fmt: skip
    kl = {r["format"]: r["kl_mean"] for r in result["records"] if r["mode"] == "score"}
    assert 1e-5 < kl["int4_asym+only=keys"] < kl["int4_asym"]
    assert 1e-5 < kl["int4_asym+only=values"] < kl["int4_asym"]
