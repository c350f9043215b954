# SPDX-License-Identifier: Apache-2.0
"""The speed command: the gate refuses wrong attention, the grid runs on vLLM's own benchmark and resumes."""
from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "eval"))

import speed

ATTENTION = ["--attention-only", "--attention-contexts", "512"]


def test_attention_alone(model_64, tmp_path):
    out = tmp_path / "speed.json"
    assert speed.main(["--model", model_64, *ATTENTION, "--out", str(out)]) == 0
    records = {r["format"]: r for r in json.loads(out.read_text())["attention"]}
    assert set(records) == {"auto", "int4_asym"}
    assert all(r["us"] > 0 and r["bytes"] > 0 for r in records.values())
    assert records["int4_asym"]["bytes"] < records["auto"]["bytes"]
    assert records["int4_asym"]["rel_err"] < speed.GATE


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
     (["--contexts", "100000"], "takes 8192 tokens, not 100000"), (["--output", "1"], "at least 2")],
)  # fmt: skip
def test_bad_input_is_one_sentence(model_64, arguments, words, capsys):
    assert speed.main(["--model", model_64, *arguments]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("speed.py: ") and words in said


@pytest.mark.slow
@pytest.mark.engine
def test_engine_grid_and_resumption(smollm2, tmp_path, monkeypatch):
    """One cell of the grid through `vllm bench latency`, both formats; then nothing is measured twice.

    vLLM's benchmark draws token ids below 10,000: the tiny test models have fewer.
    """
    out = tmp_path / "speed.json"
    arguments = [
        "--model", smollm2, "--contexts", "256", "--output", "5", "--rounds", "1", "--attention-contexts", "256",
        "--kv-memory", "0.125", "--out", str(out),
    ]  # fmt: skip
    assert speed.main(arguments) == 0
    records = {r["format"]: r for r in json.loads(out.read_text())["engine"]}
    assert set(records) == {"auto", "int4_asym"}
    for r in records.values():
        assert "did_not_run" not in r, r
        assert r["ttft_cold_s"] > 0 and r["output_tokens_per_s"] > 0 and r["peak_memory_bytes"] > 1e6
    # 16 bits against 4.5 and the windows, which weigh much in a cache of short requests
    assert records["auto"]["allocated_bits_per_element"] == pytest.approx(16, rel=0.3)  # padding of short requests
    assert records["int4_asym"]["tokens_that_fit"] > records["auto"]["tokens_that_fit"]
    monkeypatch.setattr(speed, "start", lambda job: {"error": "measured twice"})
    assert speed.main(arguments) == 0
    again = {r["format"]: r for r in json.loads(out.read_text())["engine"]}
    assert again == records
