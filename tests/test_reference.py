# SPDX-License-Identifier: Apache-2.0
"""The number format: what is promised about errors, extremes and NaN, and bytes that survive a round trip."""
from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from bie_kernels import reference as ref
from bie_kernels.layout import PAGE_TOKENS, PageLayout

LAYOUTS = [
    PageLayout(96),
    PageLayout(64, None, 32),
    PageLayout(128, None, 64, "head_dim"),
    PageLayout(80, None, 32, "head_dim"),
]


def page(kind: str, size: int) -> torch.Tensor:
    """[64, size] of a kind of data that has broken formats before."""
    gen = torch.Generator().manual_seed(0)
    noise = torch.randn(PAGE_TOKENS, size, generator=gen)
    return {
        "normal": noise,
        "constant": torch.full_like(noise, 3.14159),
        "zero": torch.zeros_like(noise),
        "tiny range": 1.0 + noise * 1e-8,
        "tiny numbers": noise * 1e-8,
        "all positive": noise.abs() + 5,
        "biased as Qwen": noise + 456 * torch.randn(1, size, generator=gen).sign(),
        "one outlier": torch.where(torch.arange(size) == 5, 125_000.0, noise).bfloat16(),
        "plus minus 60000": noise.sign() * 60_000,
        "fp16 limits": noise.sign() * 65_504,
    }[kind]


KINDS = ["normal", "constant", "zero", "tiny range", "tiny numbers", "all positive", "biased as Qwen", "one outlier",
         "plus minus 60000", "fp16 limits"]  # fmt: skip


def per_element(meta: torch.Tensor, layout: PageLayout, what: str) -> torch.Tensor:
    """Key scales [k_groups, cols] or value scales [64, v_groups] spread to [64, channels]."""
    if what == "v":
        return meta.float().repeat_interleave(layout.group_size, -1)[:, : layout.v_size]
    if layout.key_axis == "channel":
        return meta.float().repeat_interleave(layout.group_size, 0)
    return meta.float().T.repeat_interleave(layout.group_size, -1)[:, : layout.head_size]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_error_is_at_most_half_a_stored_step(layout, kind):
    x = page(kind, layout.head_size)
    keys, values = ref.quantise_keys(x, layout), ref.quantise_values(x, layout)
    exact = x.float().clamp(-65_504, 65_504)
    for q, decoded, what in (
        (keys, ref.dequantise_keys(keys, layout), "k"),
        (values, ref.dequantise_values(values, layout), "v"),
    ):
        assert torch.isfinite(decoded).all() and torch.isfinite(q.scale.float()).all()
        step = per_element(q.scale, layout, what)
        # One fp32 rounding of numbers as large as the data comes on top.
        slack = 1e-5 * step + 2e-7 * exact.abs()
        assert ((decoded - exact).abs() <= step / 2 + slack).all()
        # The stored step is the range over 15, up to fp16's own spacing (a widened one on the head_dim axis).
        if what == "v" or layout.key_axis == "channel":
            assert (step * 15 <= 1.01 * (exact.amax() - exact.amin()) + exact.abs().amax() * 2e-3 + 1e-6).all()


def test_constant_groups_are_exact_when_fp16_can_hold_them():
    layout = PageLayout(64)
    x = torch.full((PAGE_TOKENS, 64), 2.5)
    assert torch.equal(ref.dequantise_keys(ref.quantise_keys(x, layout), layout), x)
    assert torch.equal(ref.dequantise_values(ref.quantise_values(x, layout), layout), x)


def test_zero_is_exact_on_the_head_dim_axis():
    layout = PageLayout(64, None, 64, "head_dim")
    x = page("normal", 64) * 3
    x[:, ::7] = 0.0
    decoded = ref.dequantise_keys(ref.quantise_keys(x, layout), layout)
    assert (decoded[:, ::7] == 0).all()


def test_zero_points_are_integers_that_fp16_holds():
    layout = PageLayout(64, None, 64, "head_dim")
    for kind in KINDS:
        zero = ref.quantise_keys(page(kind, 64), layout).origin.float()
        assert (zero == zero.round()).all() and zero.abs().max() <= 2048


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_nan_poisons_its_own_group_and_nothing_else(layout):
    x = page("normal", layout.head_size)
    clean_k = ref.dequantise_keys(ref.quantise_keys(x, layout), layout)
    clean_v = ref.dequantise_values(ref.quantise_values(x, layout), layout)
    dirty = x.clone()
    dirty[17, 3] = torch.nan
    k, v = ref.dequantise_keys(ref.quantise_keys(dirty, layout), layout), ref.dequantise_values(
        ref.quantise_values(dirty, layout), layout
    )
    k_same, v_same = (k == clean_k), (v == clean_v)
    group = slice(17 // layout.group_size * layout.group_size, (17 // layout.group_size + 1) * layout.group_size)
    if layout.key_axis == "channel":
        assert k[group, 3].isnan().all()
        k_same[group, 3] = True
    else:
        assert k[17, : layout.group_size].isnan().all()
        k_same[17, : layout.group_size] = True
    assert v[17, : layout.group_size].isnan().all()
    v_same[17, : layout.group_size] = True
    assert k_same.all() and v_same.all()


def test_sinks_do_not_enter_the_statistics():
    layout = PageLayout(64)
    x = page("normal", 64)
    with_outlier = x.clone()
    with_outlier[:8] = 1e4
    valid = torch.arange(PAGE_TOKENS) >= 8
    a, b = (ref.quantise_keys(y, layout, valid) for y in (x, with_outlier))
    assert all(torch.equal(one, two) for one, two in zip(a, b, strict=True))
    assert (a.codes[:8] == 0).all()
    everything_sink = ref.quantise_keys(x, layout, torch.zeros(PAGE_TOKENS, dtype=torch.bool))
    assert torch.isfinite(ref.dequantise_keys(everything_sink, layout)).all()


@pytest.mark.parametrize("layout", [*LAYOUTS, PageLayout(192, 128)], ids=str)
def test_bytes_survive_the_round_trip(layout):
    keys = ref.quantise_keys(page("biased as Qwen", layout.head_size), layout)
    values = ref.quantise_values(page("normal", layout.v_size), layout)
    packed = ref.pack_page(keys, values, layout)
    assert packed.shape == (layout.page_bytes,)
    for before, after in zip(keys + values, sum(map(tuple, ref.unpack_page(packed, layout)), ()), strict=True):
        assert torch.equal(before, after)


@given(x=arrays("float32", (32,), elements=st.floats(-65504, 65504, width=32)))
@settings(max_examples=300, deadline=None)
def test_rounding_directions(x):
    x = torch.from_numpy(x)
    down, up = ref.round_down_fp16(x), ref.round_up_fp16(x)
    assert (down.float() <= x).all() and (up.float() >= x).all()
    exact = x.half().float() == x
    assert (down.float()[exact] == x[exact]).all() and (up.float()[exact] == x[exact]).all()
    # The nearest fp16 number is one of the two: nothing of fp16 lies between them and x.
    nearest = x.half().float()
    assert ((nearest == down.float()) | (nearest == up.float())).all()


@given(x=arrays("float32", (PAGE_TOKENS,), elements=st.floats(-1e5, 1e5, width=32)))
@settings(max_examples=300, deadline=None)
def test_any_finite_group_decodes_to_finite_numbers_near_it(x):
    x = torch.from_numpy(x)
    for quantise, decode in (
        (ref.quantise_min, lambda q: q.codes * q.scale.float() + q.origin.float()),
        (ref.quantise_zero_point, lambda q: (q.codes - q.origin.float()) * q.scale.float()),
    ):
        q = quantise(x, 0)
        error = (decode(q) - x.clamp(-65_504, 65_504)).abs()
        assert (error <= q.scale.float() * 0.50001 + 1e-2 * 2**-10 * x.abs().max().clamp_max(65_504)).all()


def test_position_rule_is_what_the_design_says():
    rule = ref.position_rule(torch.tensor([0, 7, 135, 136, 500]), torch.tensor([0, 7, 8, 300, 371, 372, 373]), 8, 128)
    assert rule[4].tolist() == [True, True, False, False, False, False, True]
    assert rule[2].tolist()[:3] == [True, True, True]  # 135 - 8 = 127 < 128
    assert rule[3].tolist()[:3] == [True, True, False]


def test_oracle_attention_equals_plain_attention_when_nothing_is_far():
    q, k, v = torch.randn(5, 4, 64), torch.randn(100, 2, 64), torch.randn(100, 2, 64)
    nan = torch.full_like(k, torch.nan)  # no INT4 copy may be read
    out = ref.attention(q, torch.arange(95, 100), k, v, nan, nan, scale=0.125, sink_tokens=0, recent_tokens=128)
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1).repeat_interleave(2, 0), v.transpose(0, 1).repeat_interleave(2, 0),
        attn_mask=torch.arange(100)[None] <= torch.arange(95, 100)[:, None], scale=0.125,
    ).transpose(0, 1)  # fmt: skip
    assert torch.allclose(out, want, atol=1e-5)
