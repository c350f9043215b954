# SPDX-License-Identifier: Apache-2.0
"""`store` and `seal` write exactly the bytes of the oracle."""

from __future__ import annotations

import math
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from kernel_cases import DEVICE, LENGTHS, LONG, Batch, guard_memory, make_batch, put_keys, put_values  # noqa: E402

from bie_kernels import reference, store  # noqa: E402
from bie_kernels.layout import PAGE_TOKENS, PageLayout, token_slot  # noqa: E402

LAYOUTS = [
    PageLayout(128),
    PageLayout(64, group_size=32),
    PageLayout(80),
    PageLayout(112, 96, group_size=32),
    PageLayout(256, 192),
    PageLayout(128, key_axis="head_dim"),
    PageLayout(96, 64, group_size=32, key_axis="head_dim"),
    PageLayout(80, key_axis="head_dim"),
]


@pytest.fixture(autouse=True)
def _guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    guard_memory(monkeypatch)


@pytest.fixture(autouse=True)
def _wide_programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter pays per program: most tests run the variant of eight tokens a program."""
    if "one_token" not in request.node.name:
        monkeypatch.setattr(store, "FEW_TOKENS", 3)


def name(layout: PageLayout) -> str:
    return f"{layout.head_size}-{layout.v_size}-{layout.group_size}-{layout.key_axis}"


def run(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Store and seal on a copy of the caches."""
    b = batch.to(DEVICE)
    body, window = b.body.clone(), b.window.clone()
    store.store(b.k, b.v, body, window, b.body_slots, b.window_slots, b.layout)
    store.seal(
        b.k, body, window, b.body_table, b.window_table, b.query_start_loc, b.seq_lens, b.layout,
        sink_tokens=b.sink_tokens, retained=b.retained, max_query_len=max(b.q_lens),
    )  # fmt: skip
    return body.cpu(), window.cpu()


def same(batch: Batch) -> None:
    body, window = run(batch)
    want_body, want_window = batch.after()
    assert torch.equal(body, want_body)
    assert torch.equal(window.view(torch.int16), want_window.view(torch.int16))


@pytest.mark.parametrize("layout", LAYOUTS[:2] + LAYOUTS[5:6], ids=name)
def test_packing_of_the_cases_is_the_oracles(layout: PageLayout) -> None:
    k, v = torch.randn(PAGE_TOKENS, layout.head_size) * 3 + 5, torch.randn(PAGE_TOKENS, layout.v_size)
    valid = torch.arange(PAGE_TOKENS) >= 8
    keys = reference.quantise_keys(k, layout, valid)
    want = reference.pack_page(keys, reference.quantise_values(v, layout), layout)
    page = torch.full((layout.page_bytes,), 0xFF, dtype=torch.uint8)
    put_values(page, v, torch.arange(PAGE_TOKENS), layout)
    put_keys(page, k, valid, layout)
    assert torch.equal(page, want)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_bytes_of_a_mixed_batch(layout: PageLayout) -> None:
    """Decode, verify and prefill requests together, pages completed at their end, in their middle and not."""
    lengths = [(0, 1), (63, 1), (62, 1), (126, 4), (0, 64), (5, 130), (190, 6)]
    same(make_batch(lengths, layout, pad_tokens=3, pad_requests=2))


@pytest.mark.parametrize("new", [3, pytest.param(LONG, marks=pytest.mark.slow)])
def test_lengths_around_pages(new: int) -> None:
    """Ends of prompts, and whole prompts, each beside all others."""
    lengths = [(max(0, n - new), min(n, new)) for n in (*LENGTHS, LONG)]
    same(make_batch(lengths, PageLayout(64), heads=1, pad_tokens=3, pad_requests=2))


@pytest.mark.parametrize(
    ("axis", "few", "hurried", "launches"),
    [("channel", 3, 1024, 1), ("channel", 3, 0, 2), ("channel", 256, 0, 1), ("head_dim", 256, 1024, 1)],
)
def test_store_and_seal_in_one_launch_or_two(
    axis: str, few: int, hurried: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "multiprocessors", lambda device: 1000)
    monkeypatch.setattr(store, "FEW_TOKENS", few)
    monkeypatch.setattr(store, "HOST_BOUND_TOKENS", hurried)
    made, write = [], store._write
    monkeypatch.setattr(store, "_write", lambda *args, **kwargs: (made.append(1), write(*args, **kwargs)))
    layout = PageLayout(64, key_axis=axis)  # type: ignore[arg-type]
    batch = make_batch([(63, 1), (0, 65), (126, 4)], layout, pad_tokens=2, pad_requests=1)
    b = batch.to(DEVICE)
    body, window = b.body.clone(), b.window.clone()
    store.store_and_seal(
        b.k, b.v, body, window, b.body_slots, b.window_slots, b.body_table, b.window_table, b.query_start_loc,
        b.seq_lens, b.layout, sink_tokens=8, retained=b.retained, max_query_len=65,
    )  # fmt: skip
    assert len(made) == launches
    want_body, want_window = batch.after()
    assert torch.equal(body.cpu(), want_body)
    assert torch.equal(window.cpu().view(torch.int16), want_window.view(torch.int16))


@pytest.mark.parametrize("axis", ["channel", "head_dim"])
def test_bytes_with_one_token_a_program(axis: str) -> None:
    same(make_batch([(63, 1), (64, 1), (126, 4)], PageLayout(64, key_axis=axis), pad_tokens=1))  # type: ignore[arg-type]


@pytest.mark.parametrize("sink_tokens", [0, 8, 64, 70])
def test_sinks_are_left_out_of_the_statistics(sink_tokens: int) -> None:
    same(make_batch([(0, 130), (60, 10)], PageLayout(64), dtype=torch.bfloat16, sink_tokens=sink_tokens))


def test_long_chunk_without_window_pages_in_its_middle() -> None:
    same(make_batch([(70, 401)], PageLayout(64), heads=1, recent_tokens=64))


@pytest.mark.parametrize("axis", ["channel", "head_dim"])
def test_extreme_values(axis: str) -> None:
    """Constant groups, saturation beyond fp16, tiny spreads: finite and the oracle's bytes."""
    layout = PageLayout(64, group_size=32, key_axis=axis)  # type: ignore[arg-type]
    batch = make_batch([(0, 128)], layout, dtype=torch.bfloat16, heads=1)
    for x in (batch.keys[0], batch.values[0]):
        x[:64, :, :32] = 3.25
        x[:64, :, 32:] = 0.0
        x[64:, :, :8] = 1e30
        x[64:, :, 8:16] = -3e38
        x[70:, :, 16:32] *= 1e-20
        x[64:, :, 32:48] = 400 + x[64:, :, 32:48] * 1e-2
    batch.k, batch.v = batch.keys[0].clone(), batch.values[0].clone()
    same(batch)
    body = run(batch)[0]
    blocks = batch.body_table[0, :2].long()
    assert body[blocks][..., layout.k_scale :].contiguous().view(torch.float16).isfinite().all()


@pytest.mark.parametrize("axis", ["channel", "head_dim"])
def test_nan_stays_within_its_groups(axis: str) -> None:
    layout = PageLayout(64, key_axis=axis)  # type: ignore[arg-type]
    batch = make_batch([(0, 128), (0, 64)], layout, heads=1)
    clean = run(batch)[0]
    batch.k[70], batch.v[70] = math.nan, math.nan
    dirty = run(batch)[0]
    page = batch.body_table[0, 1]
    slot = token_slot(70 - 64)
    half = dirty[page, 0].view(torch.float16)
    if axis == "channel":
        k_meta = half[layout.k_scale // 2 : layout.v_scale // 2]
        assert k_meta.isnan().all()
        dirty[page, 0, : layout.v_codes] = clean[page, 0, : layout.v_codes]
        dirty[page, 0, layout.k_scale : layout.v_scale] = clean[page, 0, layout.k_scale : layout.v_scale]
    for base in (layout.v_scale, layout.v_min) + ((layout.k_scale, layout.k_origin) if axis == "head_dim" else ()):
        assert half[base // 2 + slot].isnan()
        half[base // 2 + slot] = clean[page, 0].view(torch.float16)[base // 2 + slot]
    for channel in range(64):
        for byte, _ in (layout.v_code_byte(6, channel), layout.k_code_byte(6, channel)):
            dirty[page, 0, byte] = clean[page, 0, byte]
    assert torch.equal(dirty, clean)


def test_strided_caches_and_rows() -> None:
    batch = make_batch([(60, 70)], PageLayout(64))
    want_body, want_window = batch.after()
    big_body = torch.zeros(batch.body.shape[0], 2, 3, batch.layout.page_bytes + 32, dtype=torch.uint8)
    big_window = torch.zeros(batch.window.shape[0], 2, 2, 16, 128, dtype=batch.window.dtype)
    big_body[:, :, 1, : batch.layout.page_bytes], big_window[:, :, 1] = batch.body, batch.window
    kv = torch.cat([batch.k, batch.v], -1)  # rows of a fused projection
    batch.k, batch.v = kv[..., :64], kv[..., 64:]
    b = batch.to(DEVICE)
    body, window = big_body.to(DEVICE)[:, :, 1, : batch.layout.page_bytes], big_window.to(DEVICE)[:, :, 1]
    store.store(b.k, b.v, body, window, b.body_slots, b.window_slots, b.layout)
    store.seal(
        b.k, body, window, b.body_table, b.window_table, b.query_start_loc, b.seq_lens, b.layout,
        sink_tokens=8, retained=b.retained, max_query_len=70,
    )  # fmt: skip
    assert torch.equal(body.cpu(), want_body)
    assert torch.equal(window.cpu().view(torch.int16), want_window.contiguous().view(torch.int16))


def test_refusals() -> None:
    b = make_batch([(0, 4)], PageLayout(64)).to(DEVICE)
    good = [b.k, b.v, b.body, b.window, b.body_slots, b.window_slots]
    bad = [
        (0, b.k.float(), "float16"), (0, b.k[..., :32], "shape"), (1, b.v[:2], "differ"),
        (2, b.body.view(torch.int8), "uint8"), (2, b.body[..., :-16], "shape"),
        (3, b.window.to(torch.bfloat16), "dtype"), (3, b.window[:, :, :8], "shape"),
        (4, b.body_slots.int(), "body_slots"), (5, b.window_slots[:2], "window_slots"),
    ]  # fmt: skip
    for index, tensor, message in bad:
        args = list(good)
        args[index] = tensor
        with pytest.raises(ValueError, match=message):
            store.store(*args, b.layout)
