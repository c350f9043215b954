# SPDX-License-Identifier: Apache-2.0
"""The rule without an engine, on a tiny random model."""
from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tiny_models import add_tokenizer, tiny_model

sys.path.insert(0, str(Path(__file__).parent.parent / "eval"))

import simulate

TOKENS = 384


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return add_tokenizer(tiny_model(tmp_path_factory.mktemp("simulate"), "gqa"))


def run(model: str, folder: Path, *options: str) -> dict:
    out = folder / "out.json"
    simulate.main(["--model", model, "--tokens", str(TOKENS), "--out", str(out), *options])
    return json.loads(out.read_text())


def test_simulation(model, tmp_path, capsys):
    """Records with what they depend on; a window over all of the text changes nothing, one side less than both."""
    measured = {"kl_mean": 0.5, "top1": 0.25, "ppl": 9.0, "ppl_base": 8.0}
    row = {"document": "prose", "context": TOKENS, "mode": "score", "format": "int4_asym", **measured}
    engine = tmp_path / "engine.json"
    engine.write_text(json.dumps({"records": [{**row, "format": "fp8", "kl_mean": 1.0}, row]}))
    both = run(model, tmp_path, "--engine", str(engine))
    (record,) = both["records"]
    assert (record["document"], record["tokens"], record["dtype"]) == ("prose", TOKENS, "float32")
    assert record["engine"] == measured and json.loads(capsys.readouterr().out) == record
    assert both["versions"].keys() == {"torch", "transformers", "python", "machine"}
    assert both["command"].startswith("python eval/simulate.py --model ") and both["settings"]["recent_tokens"] == 128
    kl = {"both": record["simulated"]["kl_mean"]}
    for name, options in (("keys", ("--only", "keys")), ("values", ("--only", "values")),
                          ("window", ("--recent-tokens", str(TOKENS)))):  # fmt: skip
        (record,) = run(model, tmp_path, *options)["records"]
        assert "engine" not in record
        kl[name] = record["simulated"]["kl_mean"]
    assert abs(kl["window"]) < 1e-6 and record["simulated"]["top1"] == 1
    assert 1e-4 < kl["values"] < kl["both"] and 1e-4 < kl["keys"] < kl["both"], kl
