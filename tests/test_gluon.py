# SPDX-License-Identifier: Apache-2.0
"""`decode_keys` without a GPU: its Python on torch tensors against the oracle (see `gluon_twin`).

Copies that arrive late find reads that come before their wait, copies that arrive at once
find places that are refilled too early. A part of the matrix is quick, the rest slow.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from functools import lru_cache

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from gluon_twin import twin  # noqa: E402
from kernel_cases import LENGTHS, make_batch, relative_error  # noqa: E402
from test_decode import check, run  # noqa: E402

from bie_kernels import decode  # noqa: E402
from bie_kernels.layout import PageLayout  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel itself is tested on a card")
cached_twin = lru_cache(twin)
FP16, BF16 = torch.float16, torch.bfloat16


def matrix(quick: Callable[..., bool], *axes: tuple) -> list:
    """All combinations; those that are not quick are slow."""
    return [pytest.param(*x, marks=() if quick(*x) else pytest.mark.slow) for x in itertools.product(*axes)]


@pytest.fixture(autouse=True)
def _kernel(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "decode_keys", cached_twin("decode_keys", late))


def _quick_lengths(late: bool, dtype: torch.dtype, size: int) -> bool:
    return dtype == BF16 if late else dtype == FP16 and size in (64, 256)


@pytest.mark.parametrize(
    ("late", "dtype", "size"), matrix(_quick_lengths, (True, False), (FP16, BF16), (64, 96, 128, 192, 256))
)
def test_lengths_around_pages(late: bool, dtype: torch.dtype, size: int) -> None:
    lengths = [*LENGTHS, 330] if size == 128 else [70, 337]
    check(lengths, PageLayout(size), dtype=dtype, heads=1, pad_requests=1, fast=True)


@pytest.mark.parametrize(
    ("late", "rows", "size"),
    matrix(
        lambda late, rows, size: (late, rows, size) in [(True, (4, 6), 64), (False, (16, 1), 64), (True, (8, 1), 192)],
        (True, False), ((1, 1), (8, 1), (16, 1), (4, 6), (5, 9)), (64, 192),
    ),
)  # fmt: skip
def test_rows(late: bool, rows: tuple[int, int], size: int) -> None:
    """Query heads of a KV head times query tokens: 8 to 24 rows a program, and programs that differ."""
    group, q_len = rows
    lengths = [q_len, 140, 330] if size == 64 else [200]
    check(lengths, PageLayout(size), group=group, q_len=q_len, heads=1, lookahead=q_len - 1, fast=True)


@pytest.mark.parametrize(
    ("late", "options"),
    matrix(
        lambda late, options: late,
        (True, False),
        (
            {"sink_tokens": 0}, {"sink_tokens": 100}, {"dropped": True}, {"recent_tokens": 64},
            {"dtype": BF16, "q_scale": 1e-12},
            {"dtype": BF16, "q_scale": 300.0, "spread": 20000.0, "offset": 0.0, "limit": 0.02},
            {"dtype": BF16, "q_scale": 3000.0, "spread": 1e-3, "offset": 0.0},
        ),
    ),
)  # fmt: skip
def test_windows_and_ranges(late: bool, options: dict) -> None:
    check([64 * 3 + 17, 400], PageLayout(64), heads=1, fast=True, **options)


@pytest.mark.parametrize("late", [True])
def test_small_values_under_a_dominant_key(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the weight is one packed key's, the rest flat over 4k: times small value scales it is near fp16's end."""
    monkeypatch.setattr(decode, "item_budget", lambda *_: 1)
    batch = make_batch([(4095, 1)], PageLayout(64), heads=1, offset=0.0)
    q = (torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(1)) * 0.3).to(FP16)
    row = q[0, 0].float()
    batch.keys[0][70] = (row * 8 * math.log(4095) / row.dot(row)).to(FP16)
    batch.values[0].mul_(0.0015)  # scales of 0.0005
    batch.rewrite()
    out = run(batch, q, q_len=1, fast=True)
    assert relative_error(out[:, :1], batch.expected(q, 64**-0.5)[:, :1]) < 0.01


@pytest.mark.parametrize("late", [True])
def test_keys_of_every_size_that_fp16_holds(late: bool) -> None:
    """A channel from -65,000 to 65,000, and a query whose largest number is just below a power of two there."""
    batch = make_batch([(400, 1)], PageLayout(64), heads=1, offset=0.0)
    batch.keys[0][64:128, 0, 0] = torch.tensor([65000.0, -65000.0]).repeat(32).to(FP16)
    batch.rewrite()
    q = torch.full((1, 2, 64), 1e-3, dtype=FP16)
    q[..., 0] = 0.0155
    assert relative_error(run(batch, q, q_len=1, fast=True), batch.expected(q, 64**-0.5)) < 2e-3


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(("q_scale", "fewest", "most"), [(8.0, 3, 12), (0.01, 1, 1)])
def test_peaks_move_when_scores_exceed_them(
    late: bool, q_scale: float, fewest: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flat scores set their peak once in a run of pages; sharp ones, whose largest keeps growing, again and again."""
    module, moved = decode.decode_keys, 0
    original = module.page_weights

    def counted(scores, bias, ring_f, ring_low, peak, *rest):  # noqa: ANN001, ANN202
        nonlocal moved
        result = original(scores, bias, ring_f, ring_low, peak, *rest)
        moved += result[1] is not peak
        return result

    monkeypatch.setattr(module, "page_weights", counted)
    monkeypatch.setattr(decode, "item_budget", lambda *_: 1)  # one run of pages
    check([64 * 14 + 17], PageLayout(64), dtype=FP16, heads=1, q_scale=q_scale, offset=0.0, fast=True)
    assert fewest <= moved <= most
