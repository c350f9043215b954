# SPDX-License-Identifier: Apache-2.0
"""Layer patterns of known models in one block pool: what vLLM allocates, aligns and holds beside INT4 pages."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
from vllm_sources import run_with

SCRIPT = Path(__file__).with_name("page_sizes.py")


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_layer_patterns(version):
    done = run_with(version, [str(SCRIPT)])
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 16
    for row in rows:
        print(f"{row['name']:32} {row['groups']:2} groups, {100 * row['overhead']:4.1f} % over, hits every "
              f"{row['alignment']} tokens, {row['tokens'] / row['auto_tokens']:.2f} times auto's tokens")  # fmt: skip
    for row in rows:
        assert 0 <= row["overhead"] <= 0.10, row
        assert row["alignment"] <= 2 * row["largest_page"], row
        assert row["alignment"] == (16 if "Mistral" in row["name"] else 64), row
        assert row["tokens"] >= row["auto_tokens"], row
        # The start-up log's figure for `auto`, from the planner's grouping, is what vLLM would allocate.
        assert row["report"] == row["auto_request"], row
        if row["drafter"]:  # V1 hands a drafter the block table of group 0, and its first layer's manager rules
            assert row["led_by"] == "BodySpec" and row["drafter_in_group_0"], row
