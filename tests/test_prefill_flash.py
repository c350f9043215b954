# SPDX-License-Identifier: Apache-2.0
"""Prefill through flash attention on dequantised slices, against the oracle and against the fused kernel.

Off a card a torch function stands in for flash attention, with its masks and its
log-sum-exp, infinite for rows without keys.
"""

from __future__ import annotations

import functools
import math
import os
import random

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from kernel_cases import DEVICE, LENGTHS, LONG, guard_memory, make_batch, worst_error  # noqa: E402

from bie_kernels import flash_plan, prefill_flash  # noqa: E402
from bie_kernels.layout import PageLayout  # noqa: E402


@pytest.fixture(autouse=True)
def _guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    guard_memory(monkeypatch)


def torch_flash(q, k, v, *, out, cu_q, cu_k, max_q, max_k, scale, causal, window, soft_cap, empty=-math.inf):
    """Flash attention's contract in plain torch: masks aligned bottom-right."""
    group = q.shape[1] // k.shape[1]
    lse = torch.full((q.shape[1], q.shape[0]), empty, dtype=torch.float32, device=q.device)
    assert int(cu_q[-1]) == q.shape[0] and int(cu_k[-1]) == k.shape[0]
    for a, b, c, d in zip(cu_q.tolist(), cu_q.tolist()[1:], cu_k.tolist(), cu_k.tolist()[1:], strict=False):
        assert b - a <= max_q and d - c <= max_k
        if b == a:
            continue
        keys = k[c:d].float().repeat_interleave(group, 1)
        s = torch.einsum("qhd,khd->hqk", q[a:b].float(), keys) * scale
        if soft_cap:
            s = soft_cap * torch.tanh(s / soft_cap)
        row = torch.arange(b - a, device=q.device)[:, None] + (d - c) - (b - a)
        col = torch.arange(d - c, device=q.device)[None, :]
        m = torch.ones(b - a, d - c, dtype=torch.bool, device=q.device)
        if window[0] >= 0:
            m &= col >= row - window[0]
        if window[1] >= 0 or causal:
            m &= col <= row + (0 if causal else window[1])
        s = s.masked_fill(~m, -math.inf)
        seen = m.any(1)
        p = torch.softmax(s[:, seen], -1)
        values = v[c:d].float().repeat_interleave(group, 1)
        values = torch.where(torch.isnan(values) & ~m.any(0)[:, None, None], 0.0, values)
        out[a:b] = 0
        out[a:b][seen] = torch.einsum("hqk,khd->qhd", p, values).to(out.dtype)
        lse[:, a:b][:, seen] = torch.logsumexp(s[:, seen], -1)
    return out, lse


def flash_of(device: str):
    """The real one on a card that has vLLM's, else the stand-in."""
    if device == "cuda":
        pytest.importorskip("vllm.vllm_flash_attn")
        from bie_vllm_plugin import vllm_compat

        if (flash := vllm_compat.flash_attention()) is not None:
            return flash
    return torch_flash


def check(
    lengths: list[tuple[int, int]], layout: PageLayout, *, group: int = 2, q_scale: float = 1.0,
    soft_cap: float = 0.0, limit: float | None = None, slice_tokens: int = 1024, max_rows: int = 4096,
    flash=None, **options,
) -> flash_plan.FlashPlan:  # fmt: skip
    batch = make_batch(lengths, layout, **options)
    body, window = batch.after()
    b = batch.to(DEVICE)
    dtype, tokens = window.dtype, batch.k.shape[0]
    q_heads = body.shape[1] * group
    q = torch.randn(tokens, q_heads, layout.head_size, generator=torch.Generator().manual_seed(1)) * q_scale
    q = q.to(dtype)
    out = torch.full((tokens, q_heads, layout.v_size), 7.0, dtype=dtype, device=DEVICE)
    plan = flash_plan.plan_flash(
        batch.query_start_loc.tolist(), batch.seq_lens.tolist(), recent_tokens=batch.recent_tokens,
        slice_tokens=slice_tokens, max_rows=max_rows,
    ).to(torch.device(DEVICE))  # fmt: skip
    size = flash_plan.workspace_bytes(slice_tokens, max_rows, q_heads, body.shape[1], layout, dtype.itemsize)
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=DEVICE)  # NaN in both dtypes
    prefill_flash.prefill(
        q.to(DEVICE), b.k, b.v, body.to(DEVICE), window.to(DEVICE), b.body_table, b.window_table, b.query_start_loc,
        b.seq_lens, out, workspace, layout, plan, flash or flash_of(DEVICE), scale=layout.head_size**-0.5,
        sink_tokens=b.sink_tokens, recent_tokens=b.recent_tokens, retained=b.retained, soft_cap=soft_cap,
    )  # fmt: skip
    real = sum(n for _, n in lengths)
    want = batch.expected(q[:real], layout.head_size**-0.5, soft_cap)
    # The copies are rounded to 16 bits, and so is each partial result.
    limit = limit or (2e-3 if dtype == torch.float16 else 1e-2)
    assert worst_error(out[:real], want, batch.q_lens) < limit
    assert (out[real:] == 7.0).all()
    return plan


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_packed_requests(dtype: torch.dtype) -> None:
    """First chunks, later chunks and one without a body, in one call each, with padding."""
    lengths = [(0, 65), (300, 70), (0, 137), (130, 127), (64, 64)]
    plan = check(lengths, PageLayout(64), dtype=dtype, pad_tokens=5, slice_tokens=1280, heads=1)
    assert len(plan.bands) == len(plan.slices) == 1 and plan.slices[0][1][0].requests == len(lengths)


def test_first_chunks_are_read_where_they_are() -> None:
    plan = check([(0, 100), (0, 200)], PageLayout(64), heads=1)
    assert plan.bands[0][0] is None


@pytest.mark.parametrize("empty", [math.inf, -math.inf])
def test_rows_without_keys(empty: float) -> None:
    """Flash attention 2 and 3 differ in what they say about rows without keys."""
    flash = functools.partial(torch_flash, empty=empty)
    check([(0, 20), (0, 300), (3, 190)], PageLayout(64), heads=1, flash=flash)


@pytest.mark.parametrize("new", [2, pytest.param(LONG, marks=pytest.mark.slow)])
def test_lengths_around_pages(new: int) -> None:
    """Ends of prompts, and whole prompts."""
    lengths = [(max(0, n - new), min(n, new)) for n in LENGTHS]
    check(lengths, PageLayout(64), dtype=torch.bfloat16, heads=1, pad_tokens=5)


@pytest.mark.parametrize(
    "layout",
    [
        PageLayout(128), PageLayout(80, group_size=32), PageLayout(96), PageLayout(112), PageLayout(192),
        PageLayout(256), PageLayout(64, group_size=32),
    ],
    ids=lambda x: f"{x.head_size}-{x.group_size}",
)  # fmt: skip
def test_head_sizes(layout: PageLayout) -> None:
    check([(0, 150), (200, 20)], layout, heads=1)


@pytest.mark.parametrize("recent_tokens", [1, 17])
def test_short_windows(recent_tokens: int) -> None:
    """Offered with keys along the head, whose pages need no sealing."""
    layout = PageLayout(64, key_axis="head_dim")
    check([(0, 70), (100, 40)], layout, heads=1, recent_tokens=recent_tokens)


def test_head_dim_axis() -> None:
    for layout in (PageLayout(64, key_axis="head_dim"), PageLayout(96, group_size=32, key_axis="head_dim")):
        check([(0, 150), (250, 90)], layout, heads=1)


@pytest.mark.parametrize("sink_tokens", [0, 20, 100])
def test_sinks(sink_tokens: int) -> None:
    check([(0, 300), (250, 20)], PageLayout(64), sink_tokens=sink_tokens, heads=1, recent_tokens=64)


def test_positions_without_16_bit_copies_are_read_in_int4() -> None:
    check([(64 * 5, 70), (64 * 3, 17)], PageLayout(64), dropped=True, heads=1)


def test_soft_cap() -> None:
    check([(100, 100)], PageLayout(64), soft_cap=30.0, q_scale=4.0, heads=1)


@pytest.mark.parametrize(
    ("done", "rows", "slice_tokens"), [(0, 500, 256), (501, 200, 256), (64 * 5, 64 * 4, 320), (500, 33, 192)]
)
def test_long_requests_are_cut(done: int, rows: int, slice_tokens: int) -> None:
    """Several slices of keys and several segments of rows, the cuts anywhere relative to the diagonal."""
    plan = check([(done, rows)], PageLayout(64), heads=1, slice_tokens=slice_tokens, max_rows=110, recent_tokens=64)
    assert len(plan.slices) > 1


def test_long_and_short_requests_together() -> None:
    check([(500, 100), (0, 40), (10, 90), (0, 400)], PageLayout(64), heads=1, slice_tokens=384, max_rows=200)


def test_long_diffuse_attention() -> None:
    """Beside short requests, each held against the limit on its own."""
    lengths = [(LONG - 40, 40), (0, 1), (100, 31)]
    check(lengths, PageLayout(64), heads=1, group=4, slice_tokens=2048, q_scale=0.05, offset=0.0, limit=2e-3)


@pytest.mark.parametrize("seed", range(12))
def test_plan_covers_every_pair_once(seed: int) -> None:
    """Band and slices together: every (query, key) pair of the causal triangle exactly once."""
    rng = random.Random(seed)
    recent = rng.choice([1, 17, 64, 100, 128])
    lengths = [(rng.choice([0, rng.randrange(900)]), rng.randrange(1, 500)) for _ in range(rng.randrange(1, 5))]
    slice_tokens = 64 * rng.randrange(5, 12)
    starts = [0]
    for _, n in lengths:
        starts.append(starts[-1] + n)
    plan = flash_plan.plan_flash(
        starts, [c + n for c, n in lengths], recent_tokens=recent, slice_tokens=slice_tokens,
        max_rows=rng.randrange(50, 400),
    )  # fmt: skip
    seen = [torch.zeros(n, c + n, dtype=torch.int32) for c, n in lengths]

    def mark(call, items, band: bool) -> None:
        assert call.keys <= slice_tokens
        position, owner = {}, {}
        for r, first, row, count in items:
            assert first // 64 == (first + count - 1) // 64
            for i in range(count):
                position[row + i], owner[row + i] = first + i, r
        cu_q = plan.host[call.cu_q : call.cu_q + call.requests + 1]
        cu_k = plan.host[call.cu_k : call.cu_k + call.requests + 1]
        for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
            row = call.first + a
            r = max(i for i, s in enumerate(starts[:-1]) if s <= row)
            computed = lengths[r][0]
            i, t = torch.arange(b - a)[:, None], torch.arange(d - c)[None, :]
            at = i + (d - c) - (b - a)
            left, right = call.window
            m = (t >= at - left) if left >= 0 else torch.ones(b - a, d - c, dtype=torch.bool)
            m &= (t <= at) if call.causal else (t <= at + right) if right >= 0 else True
            keys = torch.tensor([position[c + j] for j in range(d - c)], dtype=torch.long)
            assert all(owner[c + j] == r for j in range(d - c))
            distance = computed + row - starts[r] + i - keys[None, :]
            assert (((distance < recent) == band) & (distance >= 0))[m].all()
            rows = row - starts[r] + i.expand_as(m)
            seen[r].index_put_((rows[m], keys[None, :].expand_as(m)[m]), torch.tensor(1, dtype=torch.int32), True)

    def four(gather) -> list:
        flat = plan.host[gather.at : gather.at + 4 * gather.count]
        return list(zip(*[iter(flat)] * 4, strict=True))

    for gather, call in plan.bands:
        own = [(r, 0, starts[r] - call.first, n) for r, (_, n) in enumerate(lengths)]
        if gather is None:  # rows of this step
            items = [(r, lengths[r][0] + p, row + p, 1) for r, _, row, n in own for p in range(n)]
        else:
            items = four(gather)
        mark(call, items, True)
    for gather, calls in plan.slices:
        for call in calls:
            mark(call, four(gather), False)
    for (computed, n), counts in zip(lengths, seen, strict=True):
        q_pos = torch.arange(computed, computed + n)[:, None]
        assert torch.equal(counts, (torch.arange(computed + n)[None, :] <= q_pos).int())


def test_nan_stays_in_its_request() -> None:
    """A request whose keys and values turned NaN shares a call with others, and spoils none of them."""
    layout, lengths = PageLayout(64), [(0, 150), (100, 90), (0, 70)]
    batch = make_batch(lengths, layout, heads=1)
    clean = batch.to(DEVICE)
    q = torch.randn(sum(n for _, n in lengths), 2, 64, generator=torch.Generator().manual_seed(1)).half().to(DEVICE)
    outs = []
    for poisoned in (False, True):
        if poisoned:
            batch.keys[1][100:] = batch.values[1][100:] = math.nan
        body, window = batch.after()
        k, v = clean.k.clone(), clean.v.clone()
        if poisoned:
            k[150:240] = v[150:240] = math.nan
        plan = flash_plan.plan_flash(
            batch.query_start_loc.tolist(), batch.seq_lens.tolist(), recent_tokens=128, slice_tokens=1024
        ).to(torch.device(DEVICE))
        outs.append(torch.empty_like(q))
        prefill_flash.prefill(
            q, k, v, body.to(DEVICE), window.to(DEVICE), clean.body_table, clean.window_table, clean.query_start_loc,
            clean.seq_lens, outs[-1], torch.zeros(1 << 22, dtype=torch.uint8, device=DEVICE), layout, plan,
            flash_of(DEVICE), scale=0.125, sink_tokens=8, recent_tokens=128, retained=batch.retained,
        )  # fmt: skip
    others = torch.ones(q.shape[0], dtype=torch.bool)
    others[150:240] = False
    assert torch.equal(outs[0][others], outs[1][others])
    assert outs[1][150:240].isnan().any()


def test_rejects_what_it_does_not_take() -> None:
    with pytest.raises(ValueError, match="one head size"):
        check([(0, 64)], PageLayout(64, 80))
    with pytest.raises(ValueError, match="at least one key"):
        flash_plan.plan_flash([0, 10], [500], recent_tokens=0, slice_tokens=1024)
    with pytest.raises(ValueError, match="without rows"):
        flash_plan.plan_flash([0, 0], [500], recent_tokens=128, slice_tokens=1024)
