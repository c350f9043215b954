# SPDX-License-Identifier: Apache-2.0
"""Writing the cache: `store` (this step's tokens) and `seal` (key pages that this step completes).

`store` quantises values (and keys on the head_dim axis) as they arrive and copies
K and V into the 16-bit window. `seal` quantises a page's keys along its tokens, in
the step that writes the page's last key. Both give the bytes of `reference.py`
exactly, hence IEEE divisions and no fused multiply-adds.

A byte of codes never belongs to two tokens, so neither kernel reads what it writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bie_kernels import layout as layout_module
from bie_kernels.checks import check_body, check_ints, check_rows, check_window
from bie_kernels.launches import Launches
from bie_kernels.layout import PAGE_TOKENS, PageLayout, window_page_tokens
from bie_kernels.tuning import cdiv, multiprocessors

_FP16_MAX = tl.constexpr(layout_module.FP16_MAX)
_CODE_MAX = tl.constexpr(layout_module.CODE_MAX)
_ZERO_POINT_MAX = tl.constexpr(layout_module.ZERO_POINT_MAX)
_SMALLEST_SCALE = tl.constexpr(2.0**-24)
_PAGE = tl.constexpr(PAGE_TOKENS)

FEW_TOKENS = 256
"""Up to here one program stores one token of one head, for latency; beyond, eight."""

SHORT_QUERY = PAGE_TOKENS // 4
"""Up to here a step counts as decode, which a CUDA graph launches; beyond, as prefill."""

HOST_BOUND_TOKENS = 1024
"""Prefill steps up to here are over before the host has launched them: one launch, whatever the device prefers."""


@triton.jit
def token_slot(token):
    """`layout.token_slot` for kernels."""
    return 16 * ((token >> 1) & 3) + 4 * (token >> 4) + 2 * ((token >> 3) & 1) + (token & 1)


# -- numbers, as in reference.py ----------------------------------------------
@triton.jit
def _round_down(x):
    """fp32 -> the largest fp16 number <= x."""
    half = x.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True)
    # Positive numbers shrink and negative ones grow in magnitude; below +0 comes -2^-24.
    lower = tl.where(bits > 0, bits - 1, tl.where(bits == 0, -32767, bits + 1)).to(tl.int16)
    return tl.where(half.to(tl.float32) > x, lower.to(tl.float16, bitcast=True), half)


@triton.jit
def _round_up(x):
    """fp32 -> the smallest fp16 number >= x."""
    return (-_round_down(-x).to(tl.float32)).to(tl.float16)


@triton.jit
def _saturate(x):
    return tl.minimum(tl.maximum(x, -_FP16_MAX), _FP16_MAX)


@triton.jit
def _to_code(level, m_code):
    """Nearest code; NaN levels and masked elements give 0."""
    level = tl.floor(level + 0.5)
    level = tl.where((level == level) & m_code, level, 0.0)
    return tl.minimum(tl.maximum(level, 0.0), _CODE_MAX * 1.0).to(tl.int32)


@triton.jit
def _group_range(x, m_valid, axis: tl.constexpr):
    """(minimum, maximum, is NaN) of the valid elements along `axis`; 0 where none is valid.

    Triton's reductions drop NaN, so it is carried beside them.
    """
    bad = tl.max(((x != x) & m_valid).to(tl.int32), axis) > 0
    x = _saturate(x)
    low = tl.min(tl.where(m_valid, x, float("inf")), axis)
    high = tl.max(tl.where(m_valid, x, float("-inf")), axis)
    empty = low > high
    return tl.where(empty, 0.0, low), tl.where(empty, 0.0, high), bad


@triton.jit
def _quantise_min(x, m_valid, axis: tl.constexpr):
    """x [a, b, c] fp32 -> codes [a, b, c] int32, scale and minimum fp16 without `axis`."""
    low, high, bad = _group_range(x, m_valid, axis)
    minimum = _round_down(low)
    span = (high - minimum.to(tl.float32)) * (1.0 / _CODE_MAX)
    scale = _round_up(tl.maximum(span, _SMALLEST_SCALE))
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale.to(tl.float32))
    level = (_saturate(x) - tl.expand_dims(minimum.to(tl.float32), axis)) * tl.expand_dims(inverse, axis)
    codes = _to_code(level, m_valid & (x == x) & tl.expand_dims(bad == 0, axis))
    nan = float("nan")
    return codes, tl.where(bad, nan, scale).to(tl.float16), tl.where(bad, nan, minimum).to(tl.float16)


@triton.jit
def _quantise_zero_point(x, m_valid, axis: tl.constexpr):
    """As `_quantise_min`, the origin being an integer zero-point."""
    low, high, bad = _group_range(x, m_valid, axis)
    span = (high - low) * (1.0 / _CODE_MAX)
    reach = tl.maximum(tl.abs(low), tl.abs(high)) * (1.0 / _ZERO_POINT_MAX)
    scale = _round_up(tl.maximum(tl.maximum(span, reach), _SMALLEST_SCALE))
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale.to(tl.float32))
    zero = tl.floor(0.5 - low * inverse)
    level = _saturate(x) * tl.expand_dims(inverse, axis) + tl.expand_dims(zero, axis)
    codes = _to_code(level, m_valid & (x == x) & tl.expand_dims(bad == 0, axis))
    nan = float("nan")
    return codes, tl.where(bad, nan, scale).to(tl.float16), tl.where(bad, nan, zero).to(tl.float16)


@triton.jit
def _key_words(codes, b_rows: tl.constexpr, b_channels: tl.constexpr):
    """Codes [rows, channels] -> int32 [rows, channels / 8], even channels in the low half."""
    i_c = tl.arange(0, b_channels)
    shift = 4 * ((i_c >> 1) & 3) + 16 * (i_c & 1)
    return tl.sum(tl.reshape(codes << shift[None, :], [b_rows, b_channels // 8, 8]), 2)


# -- store --------------------------------------------------------------------
@triton.jit
def _store_tokens(
    i_block, i_h, p_k, p_v, p_body, p_window, p_body_slots, p_window_slots, n_tokens,
    s_kt, s_kh, s_vt, s_vh, s_bb, s_bh, s_wp, s_wh, s_wt,
    D: tl.constexpr, E: tl.constexpr, GROUP: tl.constexpr, K_GROUPS: tl.constexpr, V_GROUPS: tl.constexpr,
    HEAD_DIM_KEYS: tl.constexpr, O_V_CODES: tl.constexpr, O_K_SCALE: tl.constexpr, O_K_ORIGIN: tl.constexpr,
    O_V_SCALE: tl.constexpr, O_V_MIN: tl.constexpr, WINDOW_PAGE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """BT tokens of one KV head."""
    i_t = i_block * BT + tl.arange(0, BT)
    m_t = i_t < n_tokens
    body_slot = tl.load(p_body_slots + i_t, mask=m_t, other=-1)
    window_slot = tl.load(p_window_slots + i_t, mask=m_t, other=-1)
    # Slots below one page are "none" (-1) or lie in the null page: they write nothing.
    m_body = body_slot >= _PAGE
    m_window = window_slot >= WINDOW_PAGE
    token = (body_slot % _PAGE).to(tl.int32)
    p_page = p_body + (body_slot // _PAGE) * s_bb + i_h * s_bh  # [BT]
    p_row = p_window + (window_slot // WINDOW_PAGE) * s_wp + i_h * s_wh + (window_slot % WINDOW_PAGE) * s_wt
    i_t64 = i_t.to(tl.int64)

    # Values, padded to whole groups: [BT, groups, GROUP].
    BG: tl.constexpr = triton.next_power_of_2(V_GROUPS)
    i_c = tl.arange(0, BG)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    m_c = i_c < E
    m_v = m_t[:, None, None] & m_c[None, :, :]
    v = tl.load(p_v + i_t64[:, None, None] * s_vt + i_h * s_vh + i_c[None, :, :], mask=m_v, other=0.0)
    tl.store(p_row[:, None, None] + D + i_c[None, :, :], v, mask=m_v & m_window[:, None, None])
    valid = tl.broadcast_to(m_c[None, :, :], [BT, BG, GROUP])
    codes, scale, minimum = _quantise_min(v.to(tl.float32), valid, 2)
    # A byte holds channels c and c + 8 of one token: [BT, groups, blocks of 16, 2, 8] -> low and high nibble.
    codes = tl.permute(tl.reshape(codes, [BT, BG, GROUP // 16, 2, 8]), [0, 1, 2, 4, 3])
    low, high = tl.split(codes)  # [BT, groups, blocks, 8]
    packed = tl.reshape((low | (high << 4)).to(tl.uint8), [BT, BG * GROUP // 2])
    i_b = tl.arange(0, BG * GROUP // 2)
    o_token = 16 * ((token >> 1) & 3) + 4 * (token >> 4) + 2 * (token & 1) + ((token >> 3) & 1)
    o_byte = O_V_CODES + 512 * (i_b >> 3) + 64 * (i_b & 7)
    m_b = m_body[:, None] & (o_byte < O_V_CODES + E * 32)[None, :]
    tl.store(p_page[:, None] + o_byte[None, :] + o_token[:, None], packed, mask=m_b)
    i_g = tl.arange(0, BG)
    m_g = m_body[:, None] & (i_g < V_GROUPS)[None, :]
    p_meta = p_page[:, None] + 2 * (i_g[None, :] * _PAGE + token_slot(token)[:, None])
    tl.store((p_meta + O_V_SCALE).to(tl.pointer_type(tl.float16)), scale, mask=m_g)
    tl.store((p_meta + O_V_MIN).to(tl.pointer_type(tl.float16)), minimum, mask=m_g)

    # Keys: always into the window; codes only on the head_dim axis.
    BKG: tl.constexpr = triton.next_power_of_2((D + GROUP - 1) // GROUP)
    i_c = tl.arange(0, BKG)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    m_c = i_c < D
    m_k = m_t[:, None, None] & m_c[None, :, :]
    k = tl.load(p_k + i_t64[:, None, None] * s_kt + i_h * s_kh + i_c[None, :, :], mask=m_k, other=0.0)
    tl.store(p_row[:, None, None] + i_c[None, :, :], k, mask=m_k & m_window[:, None, None])
    if HEAD_DIM_KEYS:
        valid = tl.broadcast_to(m_c[None, :, :], [BT, BKG, GROUP])
        codes, scale, zero = _quantise_zero_point(k.to(tl.float32), valid, 2)
        words = _key_words(tl.reshape(codes, [BT, BKG * GROUP]), BT, BKG * GROUP)  # [BT, channels / 8]
        i_w = tl.arange(0, BKG * GROUP // 8)
        p_words = p_page[:, None] + token[:, None] * (D // 2) + 4 * i_w[None, :]
        m_w = m_body[:, None] & (i_w < D // 8)[None, :]
        tl.store(p_words.to(tl.pointer_type(tl.int32)), words, mask=m_w)
        i_g = tl.arange(0, BKG)
        m_g = m_body[:, None] & (i_g < K_GROUPS)[None, :]
        p_meta = p_page[:, None] + 2 * (i_g[None, :] * _PAGE + token_slot(token)[:, None])
        tl.store((p_meta + O_K_SCALE).to(tl.pointer_type(tl.float16)), scale, mask=m_g)
        tl.store((p_meta + O_K_ORIGIN).to(tl.pointer_type(tl.float16)), zero, mask=m_g)


# -- seal ---------------------------------------------------------------------
@triton.jit
def _seal_page(
    i_r, i_page, i_h, p_k, p_body, p_window, p_body_table, p_window_table, p_starts, p_lens,
    s_kt, s_kh, s_bb, s_bh, s_wp, s_wh, s_wt, s_btr, s_wtr, sink_tokens,
    D: tl.constexpr, GROUP: tl.constexpr, O_K_SCALE: tl.constexpr, O_K_ORIGIN: tl.constexpr,
    WINDOW_PAGE: tl.constexpr,
):  # fmt: skip
    """The i-th page that request r completes in this step, one KV head; nothing if it completes fewer."""
    BD: tl.constexpr = triton.next_power_of_2(D)
    start = tl.load(p_starts + i_r)
    seq_len = tl.load(p_lens + i_r)
    computed = seq_len - (tl.load(p_starts + i_r + 1) - start)
    page = computed // _PAGE + i_page
    # The page's last key is written now: computed <= 64 page + 63 < seq_len.
    if (computed >= 0) & ((page + 1) * _PAGE <= seq_len):
        block = tl.load(p_body_table + i_r * s_btr + page).to(tl.int64)
        if block > 0:
            i_t, i_c = tl.arange(0, _PAGE), tl.arange(0, BD)
            pos = page * _PAGE + i_t
            m_raw = pos >= computed
            entry = tl.load(p_window_table + i_r * s_wtr + pos // WINDOW_PAGE, mask=m_raw == 0, other=0).to(tl.int64)
            o_raw = (start + pos - computed).to(tl.int64) * s_kt + i_h * s_kh
            o_row = entry * s_wp + i_h * s_wh + (pos % WINDOW_PAGE) * s_wt
            m_c = (i_c < D)[None, :]
            raw = tl.load(p_k + o_raw[:, None] + i_c[None, :], mask=m_raw[:, None] & m_c, other=0.0)
            # An earlier key that is not resident breaks the contract; NaN makes that visible.
            kept = tl.load(
                p_window + o_row[:, None] + i_c[None, :], mask=(entry > 0)[:, None] & m_c, other=float("nan")
            )
            k = tl.where(m_raw[:, None], raw, kept).to(tl.float32)  # [64, BD]
            k = tl.reshape(k, [_PAGE // GROUP, GROUP, BD])
            m_valid = tl.reshape(tl.broadcast_to((pos >= sink_tokens)[:, None], [_PAGE, BD]), k.shape)
            codes, scale, minimum = _quantise_min(k, m_valid, 1)  # metadata [groups, BD]
            words = _key_words(tl.reshape(codes, [_PAGE, BD]), _PAGE, BD)  # [64, BD / 8]
            p_page = p_body + block * s_bb + i_h * s_bh
            i_w = tl.arange(0, BD // 8)
            p_words = (p_page + i_t[:, None] * (D // 2) + 4 * i_w[None, :]).to(tl.pointer_type(tl.int32))
            tl.store(p_words, words, mask=tl.broadcast_to((i_w < D // 8)[None, :], words.shape))
            i_g = tl.arange(0, _PAGE // GROUP)
            p_meta = p_page + 2 * (i_g[:, None] * D + i_c[None, :])
            m_meta = tl.broadcast_to(m_c, scale.shape)
            tl.store((p_meta + O_K_SCALE).to(tl.pointer_type(tl.float16)), scale, mask=m_meta)
            tl.store((p_meta + O_K_ORIGIN).to(tl.pointer_type(tl.float16)), minimum, mask=m_meta)


@triton.jit(
    do_not_specialize=["n_tokens", "n_blocks", "n_pages", "s_btr", "s_wtr"],
    do_not_specialize_on_alignment=[
        "p_body_slots",
        "p_window_slots",
        "p_body_table",
        "p_window_table",
        "p_starts",
        "p_lens",
    ],
)
def write_kernel(
    p_k, p_v, p_body, p_window, p_body_slots, p_window_slots, p_body_table, p_window_table, p_starts, p_lens,
    n_tokens, n_blocks, n_pages, sink_tokens,
    s_kt, s_kh, s_vt, s_vh, s_bb, s_bh, s_wp, s_wh, s_wt, s_btr, s_wtr,
    D: tl.constexpr, E: tl.constexpr, GROUP: tl.constexpr, K_GROUPS: tl.constexpr, V_GROUPS: tl.constexpr,
    HEAD_DIM_KEYS: tl.constexpr, O_V_CODES: tl.constexpr, O_K_SCALE: tl.constexpr, O_K_ORIGIN: tl.constexpr,
    O_V_SCALE: tl.constexpr, O_V_MIN: tl.constexpr, WINDOW_PAGE: tl.constexpr, BT: tl.constexpr,
    STORE: tl.constexpr, SEAL: tl.constexpr,
):  # fmt: skip
    """Programs 0..n_blocks-1 of a head store BT tokens each; the others seal, n_pages for each request.

    Sealing reads nothing that this step stores (its own keys come raw), so both may share a launch.
    """
    i, i_h = tl.program_id(0), tl.program_id(1)
    if STORE:  # noqa: SIM102 - decided at compile time
        if i < n_blocks:
            _store_tokens(
                i, i_h, p_k, p_v, p_body, p_window, p_body_slots, p_window_slots, n_tokens,
                s_kt, s_kh, s_vt, s_vh, s_bb, s_bh, s_wp, s_wh, s_wt, D, E, GROUP, K_GROUPS, V_GROUPS,
                HEAD_DIM_KEYS, O_V_CODES, O_K_SCALE, O_K_ORIGIN, O_V_SCALE, O_V_MIN, WINDOW_PAGE, BT,
            )  # fmt: skip
    if SEAL:  # noqa: SIM102
        if i >= n_blocks:
            _seal_page(
                (i - n_blocks) // n_pages, (i - n_blocks) % n_pages, i_h, p_k, p_body, p_window, p_body_table,
                p_window_table, p_starts, p_lens, s_kt, s_kh, s_bb, s_bh, s_wp, s_wh, s_wt, s_btr, s_wtr,
                sink_tokens, D, GROUP, O_K_SCALE, O_K_ORIGIN, WINDOW_PAGE,
            )  # fmt: skip


launch_write = Launches(write_kernel)


# -- launchers ----------------------------------------------------------------
def _write(
    k, v, body, window, body_slots, window_slots, body_table, window_table, query_start_loc, seq_lens, layout, *,
    sink_tokens: int = 0, max_query_len: int = 0,
) -> None:  # fmt: skip
    """One launch: stores if there are slots, seals if there are tables."""
    tokens, heads = k.shape[:2]
    does_store, does_seal = body_slots is not None, body_table is not None
    block = 1 if tokens <= FEW_TOKENS else 8
    blocks = cdiv(tokens, block) if does_store else 0
    pages = cdiv(max_query_len, PAGE_TOKENS)
    seals = seq_lens.shape[0] * pages if does_seal else 0
    if blocks + seals == 0:
        return
    values = k if v is None else v  # a seal alone does not look at them
    table_strides = (body_table.stride(0), window_table.stride(0)) if does_seal else (0, 0)
    warps = (8 if layout.head_size > 128 else 4) if does_seal or block > 1 else 1
    launch_write[(blocks + seals, heads)](
        k, values, body, window, body_slots, window_slots, body_table, window_table, query_start_loc, seq_lens,
        tokens, blocks, pages, sink_tokens,
        k.stride(0), k.stride(1), values.stride(0), values.stride(1), body.stride(0), body.stride(1),
        window.stride(0), window.stride(1), window.stride(2), *table_strides,
        D=layout.head_size, E=layout.v_size, GROUP=layout.group_size, K_GROUPS=layout.k_groups,
        V_GROUPS=layout.v_groups, HEAD_DIM_KEYS=layout.key_axis == "head_dim", O_V_CODES=layout.v_codes,
        O_K_SCALE=layout.k_scale, O_K_ORIGIN=layout.k_origin, O_V_SCALE=layout.v_scale, O_V_MIN=layout.v_min,
        WINDOW_PAGE=window_page_tokens(k.element_size()), BT=block, STORE=does_store, SEAL=does_seal,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


def store(
    k: torch.Tensor,
    v: torch.Tensor,
    body: torch.Tensor,
    window: torch.Tensor,
    body_slots: torch.Tensor,
    window_slots: torch.Tensor,
    layout: PageLayout,
) -> None:
    """Write this step's tokens: V codes, window rows, and K codes on the head_dim axis.

    Args:
        k, v: [T, H, D] and [T, H, E], fp16 or bf16, last dimension contiguous.
        body: uint8 [blocks, H, page_bytes], written in place.
        window: [pages, H, 16, D + E] in the dtype of `k`, written in place.
        body_slots, window_slots: int64 [T], page * tokens_per_page + offset. A slot
            below one page (-1, or the null page's) writes nothing.

    Raises:
        ValueError: a shape, stride or dtype that the kernel does not take.
    """
    _check_store(k, v, body, window, body_slots, window_slots, layout)
    _write(k, v, body, window, body_slots, window_slots, None, None, None, None, layout)


def _check_store(k, v, body, window, body_slots, window_slots, layout) -> None:
    heads = check_body(body, layout)
    check_rows("k", k, heads, layout.head_size)
    check_rows("v", v, heads, layout.v_size)
    tokens = k.shape[0]
    if v.shape[0] != tokens or v.dtype != k.dtype:
        raise ValueError("k and v differ in tokens or dtype")
    check_window(window, layout, heads, k.dtype)
    check_ints("body_slots", body_slots, torch.int64, tokens)
    check_ints("window_slots", window_slots, torch.int64, tokens)


def seal(
    k: torch.Tensor,
    body: torch.Tensor,
    window: torch.Tensor,
    body_table: torch.Tensor,
    window_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    layout: PageLayout,
    *,
    sink_tokens: int,
    retained: int,
    max_query_len: int,
) -> None:
    """Quantise the keys of every page whose last key is written in this step (channel axis).

    Nothing is decided on the host: a program asks the device lengths and leaves at
    once when its page is not completed. On the head_dim axis there is nothing to do.

    Args:
        k: [T, H, D], this step's raw keys; earlier keys of a page come from the window.
        body: uint8 [blocks, H, page_bytes], written in place.
        window: [pages, H, 16, D + E], dtype of `k`.
        body_table, window_table: int32 [R, pages]; entry 0 is the null page.
        query_start_loc: int32 [R + 1]; seq_lens: int32 [R], this step's tokens included.
        sink_tokens: leading positions left out of the statistics, code 0.
        retained: 16-bit positions kept before the computed ones; at least 63, or the
            earlier keys of a page would be gone.
        max_query_len: upper bound of the requests' query lengths.

    Raises:
        ValueError: a shape, stride, dtype or number that the kernel does not take.
    """
    if layout.key_axis == "head_dim":
        return
    heads = check_body(body, layout)
    check_rows("k", k, heads, layout.head_size)
    check_window(window, layout, heads, k.dtype)
    _check_requests(body_table, window_table, query_start_loc, seq_lens, retained, sink_tokens, max_query_len)
    _write(
        k, None, body, window, None, None, body_table, window_table, query_start_loc, seq_lens, layout,
        sink_tokens=sink_tokens, max_query_len=max_query_len,
    )  # fmt: skip


def _check_requests(
    body_table, window_table, query_start_loc, seq_lens, retained, sink_tokens, max_query_len
) -> None:  # fmt: skip
    requests = check_ints("seq_lens", seq_lens, torch.int32, None)
    check_ints("body_table", body_table, torch.int32, requests, None)
    check_ints("window_table", window_table, torch.int32, requests, None)
    check_ints("query_start_loc", query_start_loc, torch.int32, requests + 1)
    if retained < PAGE_TOKENS - 1:
        raise ValueError(f"retained={retained}: sealing needs the last 63 keys in 16 bits")
    if sink_tokens < 0 or max_query_len < 0:
        raise ValueError("sink_tokens and max_query_len must not be negative")


def store_and_seal(
    k: torch.Tensor,
    v: torch.Tensor,
    body: torch.Tensor,
    window: torch.Tensor,
    body_slots: torch.Tensor,
    window_slots: torch.Tensor,
    body_table: torch.Tensor,
    window_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    layout: PageLayout,
    *,
    sink_tokens: int,
    retained: int,
    max_query_len: int,
) -> None:
    """`store`, then `seal`; in one launch where the batch is small and the launch is what costs.

    Args and errors as theirs.
    """
    _check_store(k, v, body, window, body_slots, window_slots, layout)
    requests = (body_table, window_table, query_start_loc, seq_lens)
    sealing = layout.key_axis == "channel"
    if sealing:
        _check_requests(*requests, retained, sink_tokens, max_query_len)
    programs = (k.shape[0] + seq_lens.shape[0] * cdiv(max_query_len, PAGE_TOKENS)) * body.shape[1]
    small = k.shape[0] <= FEW_TOKENS and programs <= 2 * multiprocessors(k.device)
    hurried = max_query_len > SHORT_QUERY and k.shape[0] <= HOST_BOUND_TOKENS
    numbers = {"sink_tokens": sink_tokens, "max_query_len": max_query_len}
    if sealing and (small or hurried):
        _write(k, v, body, window, body_slots, window_slots, *requests, layout, **numbers)
        return
    # Sealing takes many registers: beyond one wave, stores had better not share its launch.
    _write(k, v, body, window, body_slots, window_slots, None, None, None, None, layout)
    if sealing:
        _write(k, None, body, window, None, None, *requests, layout, **numbers)
