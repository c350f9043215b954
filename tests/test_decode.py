# SPDX-License-Identifier: Apache-2.0
"""Decode and verify against the oracle, on caches whose unreadable parts are NaN."""
from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from bie_kernels import decode  # noqa: E402
from bie_kernels.layout import PageLayout  # noqa: E402
from kernel_cases import DEVICE, Batch, make_batch, relative_error  # noqa: E402


def run(batch: Batch, q: torch.Tensor, *, q_len: int, soft_cap: float = 0.0, scale: float | None = None, **options):
    """Decode on the caches after store and seal; returns [T, Hq, E] on the CPU."""
    body, window = batch.after()
    b = batch.to(DEVICE)
    heads, requests = body.shape[1], b.seq_lens.shape[0]
    size = decode.workspace_bytes(
        requests, q.shape[1], batch.layout.v_size, q_len, kv_heads=heads, device=DEVICE
    )
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=DEVICE)
    out = torch.full((q.shape[0], q.shape[1], batch.layout.v_size), float("nan"), dtype=q.dtype, device=DEVICE)
    decode.decode(
        q.to(DEVICE), body.to(DEVICE), window.to(DEVICE), b.body_table, b.window_table, b.seq_lens, out, workspace,
        batch.layout, q_len=q_len, scale=scale or batch.layout.head_size**-0.5, sink_tokens=b.sink_tokens,
        recent_tokens=b.recent_tokens, retained=b.retained, soft_cap=soft_cap, **options,
    )  # fmt: skip
    return out.cpu()


def check(
    lengths: list[int], layout: PageLayout, *, group: int = 2, q_len: int = 1, q_scale: float = 1.0,
    soft_cap: float = 0.0, limit: float | None = None, fast: bool = False, **options,
) -> None:  # fmt: skip
    batch = make_batch([(n - q_len, q_len) for n in lengths], layout, **options)
    pad = batch.seq_lens.shape[0] - len(lengths)
    heads, dtype = batch.body.shape[1], batch.window.dtype
    gen = torch.Generator().manual_seed(1)
    tokens = (len(lengths) + pad) * q_len
    q = (torch.randn(tokens, heads * group, layout.head_size, generator=gen) * q_scale).to(dtype)
    out = run(batch, q, q_len=q_len, soft_cap=soft_cap, fast=fast)
    want = batch.expected(q, layout.head_size**-0.5, soft_cap)
    limit = limit or (2e-3 if dtype == torch.float16 else 8e-3)
    assert relative_error(out[: want.shape[0]], want) < limit
    assert (out[want.shape[0] :] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lengths_around_pages(dtype: torch.dtype) -> None:
    lengths = [1, 63, 64, 65, 127, 129, 131, 136, 137, 200, 330]
    check(lengths, PageLayout(64), dtype=dtype, heads=1, pad_requests=2)


@pytest.mark.parametrize(
    "layout",
    [PageLayout(128), PageLayout(80, group_size=32), PageLayout(96, 64), PageLayout(256, 112)],
    ids=lambda x: f"{x.head_size}-{x.v_size}-{x.group_size}",
)
def test_head_sizes(layout: PageLayout) -> None:
    check([70, 337], layout)


@pytest.mark.parametrize("layout", [PageLayout(128, group_size=32, key_axis="head_dim"), PageLayout(80, 64, key_axis="head_dim")])  # noqa: E501
def test_head_dim_axis(layout: PageLayout) -> None:
    check([66, 300], layout, recent_tokens=16, offset=1.0)


@pytest.mark.parametrize(("group", "q_len"), [(1, 1), (7, 1), (16, 1), (4, 6), (1, 16), (5, 9)])
def test_rows(group: int, q_len: int) -> None:
    check([q_len, 140, 330], PageLayout(64), group=group, q_len=q_len, heads=1, lookahead=q_len - 1)


@pytest.mark.parametrize("sink_tokens", [0, 20, 100])
def test_sinks(sink_tokens: int) -> None:
    check([99, 400], PageLayout(64), sink_tokens=sink_tokens, heads=1)


def test_positions_without_16_bit_copies_are_read_in_int4() -> None:
    check([64 * 5 + 1, 64 * 3 + 17], PageLayout(64), dropped=True)


def test_soft_cap() -> None:
    check([200], PageLayout(64), soft_cap=30.0, q_scale=4.0)


def test_large_queries_and_key_scales() -> None:
    """A query of hundreds meets a key scale of thousands: neither overflows fp16."""
    check([330], PageLayout(64), dtype=torch.bfloat16, q_scale=300.0, spread=20000.0, offset=0.0, heads=1, limit=0.02)


def test_long_diffuse_attention() -> None:
    check([4097], PageLayout(64), heads=1, group=4, q_scale=0.05, offset=0.0, limit=1e-3)


def test_refusals() -> None:
    batch = make_batch([(64, 1)], PageLayout(64))
    q = torch.zeros(1, 4, 64, dtype=torch.float16)
    for changed, message in ((q.float(), "float16"), (q[..., :32], "shape"), (q[:, :3], "multiple")):
        with pytest.raises(ValueError, match=message):
            run(batch, changed, q_len=1)
    with pytest.raises(ValueError, match="q_len"):
        run(batch, q.expand(17, 4, 64), q_len=17)
    with pytest.raises(ValueError, match="announced"):
        run(batch, q, q_len=2)


# -- on a card: the fast kernel against the oracle and its plain twin -----------
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 128])
def test_fast_lengths(size: int, dtype: torch.dtype) -> None:
    lengths = [1, 63, 64, 65, 127, 129, 131, 136, 137, 200, 330, 777]
    check(lengths, PageLayout(size), dtype=dtype, pad_requests=2, fast=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "q_len"), [(1, 1), (2, 1), (7, 1), (8, 1), (16, 1), (4, 6), (1, 16), (5, 9)])
def test_fast_rows(group: int, q_len: int) -> None:
    check([q_len, 140, 530], PageLayout(128), group=group, q_len=q_len, lookahead=q_len - 1, fast=True)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [
    {"sink_tokens": 0}, {"sink_tokens": 20}, {"sink_tokens": 100}, {"dropped": True}, {"recent_tokens": 64},
    {"dtype": torch.bfloat16, "q_scale": 300.0, "spread": 20000.0, "offset": 0.0, "limit": 0.02},
])  # fmt: skip
def test_fast_windows_and_ranges(options: dict) -> None:
    check([64 * 5 + 1, 64 * 3 + 17, 1000], PageLayout(128), fast=True, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [True, False])
def test_long_diffuse_attention_on_a_card(fast: bool) -> None:
    check([16385], PageLayout(128), heads=1, group=4, q_scale=0.05, offset=0.0, limit=1e-3, fast=fast)
