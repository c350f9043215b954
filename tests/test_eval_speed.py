# SPDX-License-Identifier: Apache-2.0
"""The speed command: the gate refuses wrong attention, formats take turns on the grid, what is done is kept."""
from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "eval"))

import speed
import speed_attention

ATTENTION = ["--attention-only", "--attention-contexts", "512"]


def test_attention_alone(model_64, tmp_path):
    out = tmp_path / "speed.json"
    assert speed.main(["--model", model_64, *ATTENTION, "--out", str(out)]) == 0
    records = {r["format"]: r for r in json.loads(out.read_text())["attention"]}
    assert set(records) == {"auto", "int4_asym"}
    assert all(r["us"] > 0 and r["of_copy_bandwidth"] > 0 for r in records.values())
    assert {(r["kv_heads"], r["gqa"], r["head_size"]) for r in records.values()} == {(2, 4, 64)}  # the model's
    assert records["auto"]["bytes"] == 512 * 2 * 2 * 64 * 4
    assert records["int4_asym"]["bytes"] == 2 * (384 * 72 + 136 * 2 * 64 * 4)  # 4.5 bits, and the windows in fp32
    assert records["int4_asym"]["rel_err"] < speed_attention.GATE


def test_wrong_attention_is_not_timed(model_64, tmp_path, monkeypatch, capsys):
    """A scale that is 1 % off in every page: no number for int4_asym, and a failing status."""
    from bie_kernels import torch_pages

    original = torch_pages.quantise_min

    def wrong(*args, **kwargs):
        q = original(*args, **kwargs)
        return q._replace(scale=q.scale * 1.01)

    monkeypatch.setattr(torch_pages, "quantise_min", wrong)
    out = tmp_path / "speed.json"
    assert speed.main(["--model", model_64, *ATTENTION, "--out", str(out)]) == 1
    assert "not timed" in capsys.readouterr().err
    records = json.loads(out.read_text())["attention"]
    assert [r["format"] for r in records if "us" in r] == ["auto"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--model", "/nowhere"], "neither a model folder"), (["--formats", "int5"], "'int5' is not a KV format"),
     (["--contexts", "100000"], "takes 8192 tokens, not 100000"), (["--output", "1"], "at least 12"),
     (["--batches", "0"], "at least 1"), (["--formats", "int4_asym+only=keys"], "change results and not speed")],
)  # fmt: skip
def test_bad_input_is_one_sentence(model_64, arguments, words, capsys):
    assert speed.main(["--model", model_64, *arguments]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("speed.py: ") and words in said


def test_models_without_weights(model_64, tmp_path):
    """A shape by its name, and a folder that holds only config.json, get random weights."""
    folder = tmp_path / "shape"
    folder.mkdir()
    (folder / "config.json").write_text((Path(model_64) / "config.json").read_text())
    assert speed.resolve(str(folder)) == (str(folder), True) and speed.resolve(model_64) == (model_64, False)
    shape, dummy = speed.resolve("tiny")
    assert dummy and json.loads((Path(shape) / "config.json").read_text())["num_hidden_layers"] == 4


class FakeWorker:
    """An engine of 1,000 blocks that computes nothing; every question is noted in `asked`."""

    asked: list[tuple[str, int, int, int]] = []
    starts = 0
    dies = True

    def __init__(self, llm: dict, log: Path, env: dict) -> None:
        self.name, self.error, self.facts = llm["kv_cache_dtype"], "", {}
        FakeWorker.starts += 1

    def answer(self) -> dict:
        return {"tokens_that_fit": 1000, "elements_per_token": 512}

    def ask(self, *, batch: int, context: int, output: int, seed: int) -> dict:
        self.asked.append((self.name, batch, context, seed))
        if self.name == "fp8" and batch == 2:
            return {"did_not_run": "too many"}
        if self.name == "fp8" and self.dies:
            self.error = "it died"
            return {}
        return {
            "ttft_cold_s": seed, "ttft_warm_s": 1.0, "warm_share": 0.5, "tpot_s": 0.01, "output_tokens_per_s": 9.0,
            "pool_share": 0.25 if self.name == "auto" else 0.125, "pool_tokens": batch * context,
            "peak_memory_bytes": 1 << 20,
        }  # fmt: skip

    def close(self) -> None:
        pass


def test_formats_take_turns_and_finished_cells_are_kept(model_64, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(speed, "attention", lambda args, limit: ([], ""))
    monkeypatch.setattr(speed, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "asked", [])
    monkeypatch.setattr(FakeWorker, "starts", 0)
    out = tmp_path / "speed.json"
    arguments = [
        "--model", model_64, "--formats", "auto,int4_asym,fp8", "--batches", "1,2", "--contexts", "256",
        "--rounds", "3", "--long", "256", "--kv-memory", "0.0625", "--out", str(out),
    ]  # fmt: skip
    assert speed.main(arguments) == 0
    short = [(name, 1, 256, turn) for turn in range(4) for name in ("auto", "int4_asym", "fp8")]
    asked = [a for a in short if a[0] != "fp8" or a[3] == 0]  # what died is not asked again in this cell
    assert FakeWorker.asked[: len(asked)] == asked
    assert FakeWorker.asked[len(asked) :] == [(name, 2, 256, 0) for name in ("auto", "int4_asym", "fp8")]  # long: once
    records = {(r["format"], r["batch"]): r for r in json.loads(out.read_text())["engine"]}
    assert [records["fp8", b]["did_not_run"] for b in (1, 2)] == ["it died", "it died"]
    auto = records["auto", 1]
    assert auto["ttft_cold_s"] == 2 and auto["rounds"] == 3  # turns 1 to 3: the first one warmed up
    assert auto["tokens_that_fit"] == 4 * 256
    assert auto["allocated_bits_per_element"] == pytest.approx(8 * (1 << 26) / 4 / 256 / 512, rel=1e-3)
    assert records["int4_asym", 1]["allocated_bits_per_element"] == pytest.approx(
        auto["allocated_bits_per_element"] / 2, rel=1e-3
    )
    assert "did not run: it died" in capsys.readouterr().out

    FakeWorker.asked.clear()
    assert speed.main(arguments) == 0
    assert {name for name, *_ in FakeWorker.asked} == {"fp8"} and FakeWorker.starts == 4
    assert speed.main([*arguments, "--output", "20"]) == 2
    assert "other settings (output)" in capsys.readouterr().err


def test_the_time_limit_keeps_what_is_done(model_64, tmp_path, monkeypatch, capsys):
    class Slow(FakeWorker):
        def ask(self, **cell) -> dict:
            if cell["batch"] == 2:
                assert grids[0].stopped or not grids[0].stop()  # the clock strikes during this cell
            return super().ask(**cell)

    grids = []
    original = speed.Grid.__init__
    monkeypatch.setattr(speed.Grid, "__init__", lambda self, *a: (original(self, *a), grids.append(self))[0])
    monkeypatch.setattr(speed, "attention", lambda args, limit: ([], ""))
    monkeypatch.setattr(speed, "Worker", Slow)
    out = tmp_path / "speed.json"
    assert speed.main([
        "--model", model_64, "--batches", "1,2", "--contexts", "256", "--time-limit", "600", "--out", str(out),
    ]) == 0  # fmt: skip
    assert {r["batch"] for r in json.loads(out.read_text())["engine"]} == {1}
    assert "time limit of 600 s was reached, 2 are missing" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.engine
def test_engine_grid(model_64, tmp_path):
    """Two cells on real engines, both formats, and a batch that the pool of `auto` does not hold."""
    out = tmp_path / "speed.json"
    arguments = [
        "--model", model_64, "--contexts", "512", "--batches", "1,8", "--output", "12", "--rounds", "1",
        "--long", "512", "--attention-contexts", "256", "--dtype", "bfloat16", "--kv-memory", "0.0078125",
        "--out", str(out),
    ]  # fmt: skip
    assert speed.main(arguments) == 0
    records = {(r["format"], r["batch"]): r for r in json.loads(out.read_text())["engine"]}
    auto, int4 = records["auto", 1], records["int4_asym", 1]
    for r in (auto, int4):
        assert "did_not_run" not in r, r
        assert r["ttft_cold_s"] > 0 and r["tpot_s"] > 0 and r["output_tokens_per_s"] > 0
        assert r["peak_memory_bytes"] > 1e6 and r["warm_share"] > 0.7
    # 8 MiB at 2 KiB per token; 528 tokens in pages of 128 are padded to 640
    assert auto["allocated_bits_per_element"] == pytest.approx(16 * 640 / 528, rel=0.1)
    assert 4.5 < int4["allocated_bits_per_element"] < 14  # the windows weigh much in short requests
    assert int4["tokens_that_fit"] > auto["tokens_that_fit"]
    assert "do not fit into a pool of" in records["auto", 8]["did_not_run"]
    assert "did_not_run" not in records["int4_asym", 8]


def test_a_batch_that_does_not_fit_is_said_and_asked_again(model_64, tmp_path, monkeypatch, capsys):
    """Its engine goes on with what fits; a resumed run asks for that cell alone, with one engine."""
    monkeypatch.setattr(speed, "attention", lambda args, limit: ([], ""))
    monkeypatch.setattr(speed, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "asked", [])
    monkeypatch.setattr(FakeWorker, "starts", 0)
    monkeypatch.setattr(FakeWorker, "dies", False)
    out = tmp_path / "speed.json"
    arguments = [
        "--model", model_64, "--formats", "fp8", "--batches", "1,2", "--contexts", "256,512", "--rounds", "1",
        "--long", "4096", "--out", str(out),
    ]  # fmt: skip
    assert speed.main(arguments) == 0
    records = {(r["batch"], r["context"]): r for r in json.loads(out.read_text())["engine"]}
    assert {key for key, r in records.items() if "did_not_run" in r} == {(2, 256), (2, 512)}
    assert records[1, 512]["ttft_cold_s"] == 1 and records[2, 512]["did_not_run"] == "too many"
    # Each cell is warmed up once and measured once; what does not fit is asked once.
    asked = [cell[1:3] for cell in FakeWorker.asked if cell[0] == "fp8"]
    assert sorted(asked) == [(1, 256), (1, 256), (1, 512), (1, 512), (2, 256), (2, 512)]
    assert "did not run: too many" in capsys.readouterr().out

    FakeWorker.asked.clear()
    assert speed.main(arguments) == 0
    assert [cell[:3] for cell in FakeWorker.asked] == [("fp8", 2, 256), ("fp8", 2, 512)] and FakeWorker.starts == 3
