# SPDX-License-Identifier: Apache-2.0
"""The Gluon decode kernel without a GPU: its Python on torch tensors against the oracle (see `gluon_twin`)."""

from __future__ import annotations

import os
from functools import lru_cache

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from gluon_twin import twin  # noqa: E402
from test_decode import check  # noqa: E402

from bie_kernels import decode  # noqa: E402
from bie_kernels.layout import PageLayout  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel itself is tested on a card")
cached_twin = lru_cache(twin)


@pytest.fixture(autouse=True, params=[True, False], ids=["late", "at once"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "decode_gluon", cached_twin("decode_keys", request.param))


@pytest.mark.parametrize("size", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lengths_around_pages(size: int, dtype: torch.dtype) -> None:
    lengths = [1, 63, 64, 65, 129, 136, 137, 330] if size == 128 else [70, 337]
    check(lengths, PageLayout(size), dtype=dtype, heads=1, pad_requests=1, fast=True)


@pytest.mark.parametrize(("group", "q_len"), [(1, 1), (8, 1), (16, 1), (4, 6), (5, 9)])
def test_rows(group: int, q_len: int) -> None:
    check([q_len, 140, 330], PageLayout(64), group=group, q_len=q_len, heads=1, lookahead=q_len - 1, fast=True)
    check([200], PageLayout(192), group=group, q_len=q_len, heads=1, lookahead=q_len - 1, fast=True)


@pytest.mark.parametrize("options", [
    {"sink_tokens": 0}, {"sink_tokens": 100}, {"dropped": True}, {"recent_tokens": 64},
    {"dtype": torch.bfloat16, "q_scale": 300.0, "spread": 20000.0, "offset": 0.0, "limit": 0.02},
])  # fmt: skip
def test_windows_and_ranges(options: dict) -> None:
    check([64 * 3 + 17, 400], PageLayout(64), heads=1, fast=True, **options)
