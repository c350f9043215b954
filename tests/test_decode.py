# SPDX-License-Identifier: Apache-2.0
"""Decode and verify against the oracle, on caches whose unreadable parts are NaN."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from kernel_cases import DEVICE, LENGTHS, LONG, Batch, guard_memory, make_batch, worst_error  # noqa: E402

from bie_kernels import decode, plan, tuning  # noqa: E402
from bie_kernels.layout import PageLayout  # noqa: E402


@pytest.fixture(autouse=True)
def _guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    guard_memory(monkeypatch)


def run(
    batch: Batch,
    q: torch.Tensor,
    *,
    q_len: int,
    soft_cap: float = 0.0,
    workspace: torch.Tensor | None = None,
    fast: decode.Fast = False,
    **options,
):
    """Decode on the caches after store and seal; returns [T, Hq, E] on the CPU."""
    body, window = batch.after()
    b = batch.to(DEVICE)
    heads, requests = body.shape[1], b.seq_lens.shape[0]
    if workspace is None:
        size = decode.workspace_bytes(
            requests, q.shape[1], batch.layout.v_size, q_len, kv_heads=heads, device=DEVICE
        )
        workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=DEVICE)
    out = torch.full((q.shape[0], q.shape[1], batch.layout.v_size), float("nan"), dtype=q.dtype, device=DEVICE)
    decode.decode(
        q.to(DEVICE), body.to(DEVICE), window.to(DEVICE), b.body_table, b.window_table, b.seq_lens, out, workspace,
        batch.layout, q_len=q_len, scale=batch.layout.head_size**-0.5, sink_tokens=b.sink_tokens,
        recent_tokens=b.recent_tokens, retained=b.retained, soft_cap=soft_cap, fast=fast, **options,
    )  # fmt: skip
    return out.cpu()


def check(
    lengths: list[int], layout: PageLayout, *, group: int = 2, q_len: int = 1, q_scale: float = 1.0,
    soft_cap: float = 0.0, limit: float | None = None, fast: decode.Fast = False, **options,
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
    assert worst_error(out[: want.shape[0]], want, batch.q_lens) < limit
    assert (out[want.shape[0] :] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lengths_around_pages(dtype: torch.dtype) -> None:
    check([*LENGTHS, 330], PageLayout(64), dtype=dtype, heads=1, pad_requests=2)


@pytest.mark.parametrize(
    "layout",
    [
        PageLayout(128), PageLayout(80, group_size=32), PageLayout(96, 64), PageLayout(112), PageLayout(192),
        PageLayout(256, 112),
    ],
    ids=lambda x: f"{x.head_size}-{x.v_size}-{x.group_size}",
)  # fmt: skip
def test_head_sizes(layout: PageLayout) -> None:
    check([70, 337], layout, heads=2 if layout.head_size == 128 else 1)


def test_choices_of_another_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masked pages a whole group of 32 at a time."""
    chosen = tuning.CHOICES[12, 0]
    assert 80 in chosen.decode_whole_groups and 80 not in tuning.MEASURED.decode_whole_groups
    monkeypatch.setitem(tuning.CHOICES, tuning.family(tuning.capability(torch.device(DEVICE))), chosen)
    check([70, 337], PageLayout(80, group_size=32), heads=1, fast=False)


@pytest.mark.parametrize(
    "layout", [PageLayout(128, group_size=32, key_axis="head_dim"), PageLayout(80, 64, key_axis="head_dim")]
)
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
    """Beside short requests, each held against the limit on its own."""
    check([LONG, 1, 131], PageLayout(64), heads=1, group=4, q_scale=0.05, offset=0.0, limit=1e-3)


@pytest.mark.parametrize(
    ("lengths", "budget"), [([5], 4), ([300] * 5, 7), ([1, 9000, 0, 65, 2000], 8), ([40000, 1], 132), ([0, 0], 3)]
)
def test_a_plan_covers_every_unit_once_within_its_budget(lengths: list[int], budget: int) -> None:
    lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    size = plan.plan_ints(len(lengths), budget)
    numbers = torch.full((size,), 77, dtype=torch.int32, device=DEVICE)
    made = plan.make_plan(lens, numbers, q_len=1, budget=budget, sink_tokens=8, recent_tokens=128).cpu()
    starts, items = made[: len(lengths) + 1].tolist(), made[size - 4 * budget :].view(budget, 4).tolist()
    assert starts[0] == 0 and starts[-1] <= budget
    for r, n in enumerate(lengths):
        mine = items[starts[r] : starts[r + 1]]
        # Body pages, and two units for each window page of the sinks and the recent keys.
        sinks, pages = min(1, -(-n // 16)), -(-n // 16)
        units = -(-n // 64) + 2 * (sinks + pages - max(sinks, max(0, n - 128) // 16)) if n else 0
        edges = [edge for _, first, last, _ in mine for edge in (first, last)]
        assert all(item[0] == r and item[3] == n for item in mine)
        assert edges[::2] == [0, *edges[1:-1:2]][: len(mine)] and (edges[-1] if edges else 0) == units
    assert all(item[0] == -1 for item in items[starts[-1] :])


def test_one_workspace_and_one_plan_serve_many_launches() -> None:
    """Reserved for the largest launch; the plan is made once for all layers."""
    size = decode.workspace_bytes(8, 4, 64, 5, kv_heads=2, device=DEVICE)
    shared = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    layout = PageLayout(64)
    for lengths, q_len in (([130, 200], 1), ([70] * 3, 2), ([90], 5)):
        batch = make_batch([(n - q_len, q_len) for n in lengths], layout, lookahead=q_len - 1)
        q = torch.randn(len(lengths) * q_len, 4, 64, generator=torch.Generator().manual_seed(2)).half()
        made = decode.plan_for(
            batch.seq_lens.to(DEVICE), torch.empty(1 << 18, dtype=torch.uint8, device=DEVICE), q_heads=4, kv_heads=2,
            head_size_v=64, q_len=q_len, sink_tokens=8, recent_tokens=128,
        )  # fmt: skip
        alone = run(batch, q, q_len=q_len, fast=False)
        assert torch.equal(run(batch, q, q_len=q_len, workspace=shared, plan=made, fast=False), alone)


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
@pytest.mark.parametrize("size", [64, 96, 128, 192, 256])
def test_fast_lengths(size: int, dtype: torch.dtype) -> None:
    check([*LENGTHS, 200, 330, 777], PageLayout(size), dtype=dtype, pad_requests=2, fast=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "q_len"), [(1, 1), (2, 1), (7, 1), (8, 1), (16, 1), (4, 6), (1, 16), (5, 9)])
def test_fast_rows(group: int, q_len: int) -> None:
    check([q_len, 140, 530], PageLayout(128), group=group, q_len=q_len, lookahead=q_len - 1, fast=True)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("q_scale", [1e-4, 1e-12])
def test_fast_tiny_queries(q_scale: float, size: int) -> None:
    """Rows whose keys of a page are all masked: their exponents must not be rounding errors."""
    lengths = [*LENGTHS, 330]
    check(lengths, PageLayout(size), dtype=torch.bfloat16, heads=1, q_scale=q_scale, fast=True)
    check(lengths, PageLayout(size), dtype=torch.bfloat16, heads=1, q_scale=q_scale, fast=True, dropped=True)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [
    {"sink_tokens": 0}, {"sink_tokens": 20}, {"sink_tokens": 100}, {"dropped": True}, {"recent_tokens": 64},
    {"dtype": torch.bfloat16, "q_scale": 300.0, "spread": 20000.0, "offset": 0.0, "limit": 0.02},
])  # fmt: skip
def test_fast_windows_and_ranges(options: dict) -> None:
    check([64 * 5 + 1, 64 * 3 + 17, 1000], PageLayout(128), fast=True, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [True, False])
def test_long_diffuse_attention_on_a_card(fast: decode.Fast) -> None:
    check([16385], PageLayout(128), heads=1, group=4, q_scale=0.05, offset=0.0, limit=1e-3, fast=fast)


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [True, False])
def test_a_graph_holds_for_any_lengths(fast: decode.Fast) -> None:
    """Captured once for 4 requests; replayed with other lengths, padding included, it equals eager."""
    layout, numbers = PageLayout(128), {"sink_tokens": 8, "recent_tokens": 128, "retained": 191, "scale": 0.1}
    batch = make_batch([(n - 1, 1) for n in (900, 300, 200, 65)], layout, dtype=torch.bfloat16)
    body, window = (x.to(DEVICE) for x in batch.after())
    b = batch.to(DEVICE)
    q = torch.randn(4, 8, 128, device=DEVICE).bfloat16()
    out = torch.empty_like(q)
    size = decode.workspace_bytes(4, 8, 128, 1, kv_heads=2, device=DEVICE)
    work, lens = torch.empty(size, dtype=torch.uint8, device=DEVICE), b.seq_lens.clone()

    def call(lengths: torch.Tensor, result: torch.Tensor) -> None:
        decode.decode(
            q, body, window, b.body_table, b.window_table, lengths, result, work, layout, q_len=1, fast=fast, **numbers
        )

    call(lens, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(lens, out)
    for lengths in ([900, 300, 200, 65], [900, 300, 0, 0], [0, 300, 200, 65]):
        lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        eager = torch.empty_like(out)
        call(lens.clone(), eager)
        assert torch.equal(out, eager) and out.isfinite().all()
