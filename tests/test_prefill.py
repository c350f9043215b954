# SPDX-License-Identifier: Apache-2.0
"""Prefill of mixed batches against the oracle, on caches whose unreadable parts are NaN."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from kernel_cases import DEVICE, LENGTHS, LONG, guard_memory, make_batch, worst_error  # noqa: E402

from bie_kernels import prefill, tuning  # noqa: E402
from bie_kernels.layout import PageLayout  # noqa: E402


@pytest.fixture(autouse=True)
def _guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    guard_memory(monkeypatch)


def check(
    lengths: list[tuple[int, int]], layout: PageLayout, *, group: int = 2, q_scale: float = 1.0,
    soft_cap: float = 0.0, limit: float | None = None, **options,
) -> None:  # fmt: skip
    batch = make_batch(lengths, layout, **options)
    body, window = batch.after()
    b = batch.to(DEVICE)
    dtype, tokens = window.dtype, batch.k.shape[0]
    q_heads = body.shape[1] * group
    q = torch.randn(tokens, q_heads, layout.head_size, generator=torch.Generator().manual_seed(1)) * q_scale
    q = q.to(dtype)
    out = torch.full((tokens, q_heads, layout.v_size), 7.0, dtype=dtype, device=DEVICE)
    work = torch.full((prefill.workspace_bytes(layout.v_size, device=DEVICE) // 4,), float("nan"), device=DEVICE)
    prefill.prefill(
        q.to(DEVICE), b.k, b.v, body.to(DEVICE), window.to(DEVICE), b.body_table, b.window_table, b.query_start_loc,
        b.seq_lens, out, work, layout, scale=layout.head_size**-0.5, sink_tokens=b.sink_tokens,
        recent_tokens=b.recent_tokens, retained=b.retained, soft_cap=soft_cap,
    )  # fmt: skip
    real = sum(n for _, n in lengths)
    want = batch.expected(q[:real], layout.head_size**-0.5, soft_cap)
    limit = limit or (2e-3 if dtype == torch.float16 else 8e-3)
    assert worst_error(out[:real], want, batch.q_lens) < limit
    assert ((out[real:] == 7.0) | (out[real:] == 0.0)).all()


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_mixed_batch(dtype: torch.dtype) -> None:
    """First chunks, later chunks, decodes and verifies together, with padding."""
    lengths = [(0, 1), (63, 1), (0, 65), (300, 1), (130, 127), (200, 6), (64, 64)]
    check(lengths, PageLayout(64), dtype=dtype, heads=1, pad_tokens=5, pad_requests=2)


@pytest.mark.parametrize("new", [2, pytest.param(LONG, marks=pytest.mark.slow)])
def test_lengths_around_pages(new: int) -> None:
    """Ends of prompts, and whole prompts."""
    lengths = [(max(0, n - new), min(n, new)) for n in LENGTHS]
    check(lengths, PageLayout(64), dtype=torch.bfloat16, heads=1, pad_tokens=5, pad_requests=2)


@pytest.mark.parametrize(
    "layout",
    [
        PageLayout(128), PageLayout(80, group_size=32), PageLayout(96, 64), PageLayout(112), PageLayout(192),
        PageLayout(256, 112),
    ],
    ids=lambda x: f"{x.head_size}-{x.v_size}-{x.group_size}",
)  # fmt: skip
def test_head_sizes(layout: PageLayout) -> None:
    check([(0, 20), (261, 9)], layout, heads=1)


@pytest.mark.parametrize(
    "layout", [PageLayout(128, group_size=32, key_axis="head_dim"), PageLayout(80, 64, key_axis="head_dim")]
)
def test_head_dim_axis(layout: PageLayout) -> None:
    check([(0, 70), (100, 90)], layout, recent_tokens=16, offset=1.0, heads=1)


def test_fewer_rows_for_cards_with_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "prefill_tile", lambda layout, device: tuning.PrefillTile(16, 4, 1, 2))
    check([(0, 20), (190, 9)], PageLayout(64, key_axis="head_dim"), offset=1.0, heads=1)


@pytest.mark.parametrize("group", [1, 7, 16])
def test_groups(group: int) -> None:
    check([(0, 40), (190, 30)], PageLayout(64), group=group, heads=1)


@pytest.mark.parametrize("splits", [1, 3, 8])
def test_pages_split_over_programs(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "MAX_SPLITS", splits)
    monkeypatch.setattr(prefill, "multiprocessors", lambda device: 64)
    check([(900, 20), (300, 1), (0, 30)], PageLayout(64), heads=1, pad_tokens=3)


@pytest.mark.parametrize("sink_tokens", [0, 20, 100])
def test_sinks(sink_tokens: int) -> None:
    check([(0, 300), (250, 20)], PageLayout(64), sink_tokens=sink_tokens, heads=1, recent_tokens=64)


def test_long_chunk_reads_its_middle_in_int4() -> None:
    check([(70, 450)], PageLayout(64), heads=1)


def test_positions_without_16_bit_copies_are_read_in_int4() -> None:
    check([(64 * 5, 70), (64 * 3, 17)], PageLayout(64), dropped=True, heads=1)


def test_soft_cap() -> None:
    check([(100, 100)], PageLayout(64), soft_cap=30.0, q_scale=4.0, heads=1)


def test_long_diffuse_attention() -> None:
    """Beside short requests, each held against the limit on its own."""
    check([(LONG - 5, 5), (0, 1), (100, 31)], PageLayout(64), heads=1, group=4, q_scale=0.05, offset=0.0, limit=1e-3)
