# SPDX-License-Identifier: Apache-2.0
"""The tuning script keeps its time: variants that hang, die or miss the oracle cost nothing but themselves."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "eval"))

import bench_kernels  # noqa: E402
import tune_decode  # noqa: E402

from bie_kernels import tuning  # noqa: E402

GATES = {
    "good": "print(0.002)", "wrong": "print(float('nan'))", "dies": "raise SystemExit('no such kernel')",
    "hangs": "import faulthandler, time; faulthandler.dump_traceback_later(0.5); time.sleep(60)",
}  # fmt: skip


def worker(*words: str) -> list[str]:
    """Stands in for the processes that need a card."""
    if words[0] == "--gate":
        return [sys.executable, "-c", GATES[words[2]]]
    name, errors, out = words[1], json.loads(words[2]), words[words.index("--out") + 1]
    result = {"copy_gb_per_s": 4000, "records": [{"case": name, "format": path} for path in errors]}
    return [sys.executable, "-c", f"open({out!r}, 'w').write({json.dumps(result)!r}); print('timed')"]


def test_only_what_passed_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(tune_decode, "GATE_LIMIT", 3.0)
    run, out = tune_decode.Tuning(60, 4, worker), tmp_path / "tune.json"
    begin = time.monotonic()
    run.round([("q6 8x32k", list(GATES)), ("1x8k", ["dies"]), ("q6 1x64k", ["good"])], 3, out)
    assert time.monotonic() - begin < 30
    saved = json.loads(out.read_text())
    assert [(x["case"], x["format"]) for x in saved["records"]] == [("q6 8x32k", "good"), ("q6 1x64k", "good")]
    verdicts = {(x["case"], x["path"]): x["verdict"].split()[0].rstrip(",") for x in saved["gates"]}
    # Both q6 cases share a gate.
    assert verdicts == {
        ("q6 8x32k", "good"): "passed", ("q6 8x32k", "wrong"): "REFUSED", ("q6 8x32k", "dies"): "FAILED",
        ("q6 8x32k", "hangs"): "TIMED", ("1x8k", "dies"): "FAILED",
    }  # fmt: skip
    assert any("File" in x["verdict"] for x in saved["gates"] if x["path"] == "hangs"), "where it hung is not told"
    printed = capsys.readouterr().out
    assert "no such kernel" in printed and "1x8k: not timed, no path passed" in printed


def test_nothing_starts_after_the_budget(tmp_path: Path) -> None:
    run = tune_decode.Tuning(0, 2, worker)
    run.round([("1x8k", ["good", "hangs"])], 3, tmp_path / "tune.json")
    assert run.gates == run.times == []


def test_every_variant_names_a_case_and_a_setting() -> None:
    for cases in tune_decode.ROUNDS:
        for name, paths in cases:
            case = tune_decode.case_of(name)
            assert case.name == name and case.lengths[0] >= 8192
            for path in paths:
                bench_kernels.choose(path)
                chosen, asked = tuning.choices(torch.device("cpu")), dict(x.split("=") for x in path.split("+")[1:])
                assert all(getattr(chosen, key.lower()) == int(value) for key, value in asked.items())
                # Nothing that a variant asks for is pruned away on the card that it is for.
                tile = tuning.keys_tile(case.group * case.q_len, case.head_size)
                stages = chosen.keys_stages if case.head_size > 64 else chosen.keys_narrow_stages
                assert (tile.stages, tile.per_sm) == (stages, chosen.programs_per_sm), (name, path)
    bench_kernels.choose("auto")  # puts the settings back
    assert tuning.choices(torch.device("cpu")) == tuning.MEASURED
    case = tune_decode.case_of("q6 8x32k")
    assert (case.q_len, case.head_size, case.lengths) == (6, 128, (32768,) * 8)
    with pytest.raises(ValueError, match="MAX_TILES"):
        bench_kernels.choose("keys+MAX_TILES=2")
