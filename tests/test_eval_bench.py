# SPDX-License-Identifier: Apache-2.0
"""The baseline of the kernel benches, as far as it goes without a GPU: inputs, gate, bytes."""
from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "eval"))

import bench_baseline
import bench_cases
import bench_prefill


def _paged_attention(shift: int):
    """Stands in for FlashAttention: attention over the pages of `block_table`, `shift` keys of the future seen."""

    def flash(*, q, k, v, out, cu_seqlens_q, seqused_k, block_table, **_):
        for r, n in enumerate(seqused_k.tolist()):
            rows = slice(*cu_seqlens_q[r : r + 2].tolist())
            keys, values = (x[block_table[r].long()].flatten(0, 1)[:n].transpose(0, 1) for x in (k, v))
            queries = q[rows].transpose(0, 1)
            seen = torch.arange(n - queries.shape[1], n)[:, None] + shift
            out[rows] = torch.nn.functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=torch.arange(n) <= seen, enable_gqa=True
            ).transpose(0, 1)

    return flash


@pytest.mark.parametrize(("shift", "passes"), [(0, True), (1, False)])
def test_the_gate_refuses_a_mask_that_is_off_by_one(monkeypatch, shift, passes):
    """For a prefill case, in fp32 on the CPU; long ones are checked on their first GATE_ROWS queries."""
    monkeypatch.setattr(bench_baseline, "DEVICE", "cpu")
    monkeypatch.setattr(bench_baseline, "GATE_ROWS", 24)
    case = dataclasses.replace(bench_prefill.case_of("2k after 30k"), kv_heads=2, group=2, head_size=32)
    error = bench_baseline.baseline_gate(case, torch.float32, _paged_attention(shift))
    assert (error < bench_cases.LIMIT) == passes


def test_prefill_cases_are_the_ones_of_the_table():
    for name, requests in bench_prefill.CASES.items():
        case = bench_prefill.case_of(name)
        assert case.lengths == tuple(c + n for c, n in requests) and case.q_len == requests[0][1]


def test_bytes_of_both_caches():
    """At 32k tokens 16 bits are 3.5 times what INT4 with its windows reads."""
    case = bench_cases.uniform(32, 32768)
    assert bench_cases.bytes_of_16_bit(case) == 32 * 32768 * 8 * 2 * 128 * 2
    ratio = bench_cases.bytes_of_16_bit(case) / bench_cases.bytes_read(case)
    assert 3.4 < ratio < 16 / 4.5
