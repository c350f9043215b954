# SPDX-License-Identifier: Apache-2.0
"""Prefill of long chunks through flash attention on dequantised, bounded slices (design, section 7).

The keys of a query at p fall into the band p - j < recent and its complement j <= p - recent.
The complement of a chunk [c0, c1) is itself a causal attention, over the first c1 - recent
keys and aligned bottom-right. Hence, per segment of at most `layout.SLICE_ROWS` rows:

    band        flash attention with a window, on a 16-bit copy of the band's keys
    complement  flash attention on slices of the dequantised body, sinks in 16 bits
    merge       by log-sum-exp, in place, after each slice

A copy of the body exists only slice by slice, in a workspace that does not grow with the
context. What is cut where follows from host lengths (`flash_plan`), which are exact for rows
that are surely prefill.

Flash attention is handed in as a function, so that this package needs no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from bie_kernels.checks import as_dtype, check_prefill
from bie_kernels.flash_plan import Call, FlashPlan, Gather, workspace_bytes
from bie_kernels.launches import Launches
from bie_kernels.layout import FP16_MAX, PAGE_TOKENS, PageLayout, window_page_tokens
from bie_kernels.store import token_slot
from bie_kernels.tuning import cdiv, power_of_2

_PAGE = tl.constexpr(PAGE_TOKENS)
_LARGEST = tl.constexpr(FP16_MAX)

Flash = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""flash(q, k, v, out=, cu_q=, cu_k=, max_q=, max_k=, scale=, causal=, window=(left, right), soft_cap=)
-> (out [T, Hq, E], natural log-sum-exp fp32 [Hq, T]); masks are aligned bottom-right, -1 means
unbounded, rows without keys have an infinite log-sum-exp of either sign."""


# -- kernels --------------------------------------------------------------------
@triton.jit
def _dequantised_keys(
    p_page, slot, D: tl.constexpr, BD: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    O_K_SCALE: tl.constexpr, O_K_ORIGIN: tl.constexpr,
):  # fmt: skip
    """Keys of a page in fp32, [64 tokens, BD channels]."""
    i_w = tl.arange(0, BD // 8)
    p_words = p_page.to(tl.pointer_type(tl.int32)) + slot[:, None] * (D // 8) + i_w[None, :]
    words = tl.load(p_words, mask=tl.broadcast_to((i_w < D // 8)[None, :], [_PAGE, BD // 8]), other=0)
    i_8 = tl.arange(0, 8)  # channel 8 w + i sits at bit 16 (i & 1) + 4 (i >> 1) of word w
    codes = (words[:, :, None] >> (16 * (i_8 & 1) + 4 * (i_8 >> 1))[None, None, :]) & 15  # [64, BD/8, 8]
    codes = tl.reshape(codes, [_PAGE, BD]).to(tl.float32)
    i_d = tl.arange(0, BD)
    m_d = (i_d < D)[None, :]
    p_scale = (p_page + O_K_SCALE).to(tl.pointer_type(tl.float16))
    p_origin = (p_page + O_K_ORIGIN).to(tl.pointer_type(tl.float16))
    if HEAD_DIM:
        o_meta = (i_d // GROUP)[None, :] * _PAGE + token_slot(slot)[:, None]
    else:
        o_meta = (slot // GROUP)[:, None] * D + i_d[None, :]
    scale = tl.load(p_scale + o_meta, mask=m_d, other=0.0).to(tl.float32)
    origin = tl.load(p_origin + o_meta, mask=m_d, other=0.0).to(tl.float32)
    if HEAD_DIM:
        return (codes - origin) * scale
    else:
        return codes * scale + origin


@triton.jit
def _dequantised_values(
    p_page, slot, E: tl.constexpr, BE: tl.constexpr, GROUP: tl.constexpr, O_V_CODES: tl.constexpr,
    O_V_SCALE: tl.constexpr, O_V_MIN: tl.constexpr,
):  # fmt: skip
    """Values of a page in fp32, [64 tokens, BE channels]."""
    # Word (t, x) of row g of a block of 16 channels: byte 2 e + i1 holds token 16 x + 8 i1 + 2 t + e,
    # channel g in its low and 8 + g in its high nibble.
    i_r, i_w = tl.arange(0, BE // 2), tl.arange(0, 16)
    p_words = (p_page + O_V_CODES).to(tl.pointer_type(tl.int32)) + i_r[:, None] * 16 + i_w[None, :]
    words = tl.load(p_words, mask=tl.broadcast_to((i_r < E // 2)[:, None], [BE // 2, 16]), other=0)
    codes = (words[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 15  # [row, word, (e, i1, nibble)]
    codes = tl.reshape(codes, [BE // 16, 8, 4, 4, 2, 2, 2])  # block, g, t, x, e, i1, nibble
    codes = tl.reshape(tl.permute(codes, [3, 5, 2, 4, 0, 6, 1]), [_PAGE, BE]).to(tl.float32)
    i_e = tl.arange(0, BE)
    m_e = (i_e < E)[None, :]
    o_meta = (i_e // GROUP)[None, :] * _PAGE + token_slot(slot)[:, None]
    scale = tl.load((p_page + O_V_SCALE).to(tl.pointer_type(tl.float16)) + o_meta, mask=m_e, other=0.0)
    low = tl.load((p_page + O_V_MIN).to(tl.pointer_type(tl.float16)) + o_meta, mask=m_e, other=0.0)
    return codes * scale.to(tl.float32) + low.to(tl.float32)


@triton.jit(
    do_not_specialize=["s_btr", "s_wtr"],
    do_not_specialize_on_alignment=["p_body_table", "p_window_table", "p_starts", "p_lens"],
)
def gather_kernel(
    p_items, p_k, p_v, p_body, p_window, p_body_table, p_window_table, p_starts, p_lens, p_keys, p_values,
    s_kt, s_kh, s_vt, s_vh, s_bb, s_bh, s_wp, s_wh, s_wt, s_btr, s_wtr, H, sink_tokens, retained,
    D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, O_V_CODES: tl.constexpr, O_K_SCALE: tl.constexpr, O_K_ORIGIN: tl.constexpr,
    O_V_SCALE: tl.constexpr, O_V_MIN: tl.constexpr, WINDOW_PAGE: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """One program: up to 64 tokens of one page and head, as the model's dtype, into rows of the workspace.

    BAND: 16-bit copies wherever they exist; otherwise only the sinks'.
    """
    i_n, i_h = tl.program_id(0), tl.program_id(1)
    request = tl.load(p_items + 4 * i_n)
    first = tl.load(p_items + 4 * i_n + 1)
    row = tl.load(p_items + 4 * i_n + 2)
    count = tl.load(p_items + 4 * i_n + 3)
    start = tl.load(p_starts + request)
    computed = tl.load(p_lens + request) - (tl.load(p_starts + request + 1) - start)
    page = first // _PAGE
    slot = tl.arange(0, _PAGE)
    pos = page * _PAGE + slot
    m = (pos >= first) & (pos < first + count)
    i_d, i_e = tl.arange(0, BD), tl.arange(0, BE)
    m_d, m_e = (i_d < D)[None, :], (i_e < E)[None, :]
    to = (row + pos - first).to(tl.int64) * H + i_h
    p_key = p_keys + to[:, None] * D + i_d[None, :]
    p_value = p_values + to[:, None] * E + i_e[None, :]
    m_raw = m & (pos >= computed)  # rows of this step
    if BAND == 0:
        m_raw = m_raw & (pos < sink_tokens)
    m_16 = m_raw
    if BAND or first < sink_tokens:
        entry = tl.load(
            p_window_table + request * s_wtr + pos // WINDOW_PAGE, mask=m & (m_raw == 0), other=0
        ).to(tl.int64)  # fmt: skip
        m_sink = pos < sink_tokens
        if BAND:
            m_kept = (entry > 0) & (m_sink | (pos >= computed - retained))
        else:
            m_kept = (entry > 0) & m_sink
        m_16 = m_raw | m_kept
        p_kept = p_window + entry * s_wp + i_h * s_wh + (pos % WINDOW_PAGE) * s_wt
        i_raw = (start + pos - computed).to(tl.int64)
        p_k_row = tl.where(m_raw, p_k + i_raw * s_kt + i_h * s_kh, p_kept)
        p_v_row = tl.where(m_raw, p_v + i_raw * s_vt + i_h * s_vh, p_kept + D)
        k = tl.load(p_k_row[:, None] + i_d[None, :], mask=m_16[:, None] & m_d, other=0.0)
        tl.store(p_key, k, mask=m_16[:, None] & m_d)
        v = tl.load(p_v_row[:, None] + i_e[None, :], mask=m_16[:, None] & m_e, other=0.0)
        tl.store(p_value, v, mask=m_16[:, None] & m_e)
    m_4 = m & (m_16 == 0)
    if tl.max(m_4.to(tl.int32), 0) > 0:
        block = tl.load(p_body_table + request * s_btr + page).to(tl.int64)
        p_page = p_body + block * s_bb + i_h * s_bh
        k4 = _dequantised_keys(p_page, slot, D, BD, GROUP, HEAD_DIM, O_K_SCALE, O_K_ORIGIN)
        v4 = _dequantised_values(p_page, slot, E, BE, GROUP, O_V_CODES, O_V_SCALE, O_V_MIN)
        # A NaN passes; the scale is rounded up, so that the largest code can lie beyond fp16.
        k4 = tl.clamp(k4, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
        v4 = tl.clamp(v4, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
        tl.store(p_key, k4.to(p_keys.dtype.element_ty), mask=m_4[:, None] & m_d)
        tl.store(p_value, v4.to(p_values.dtype.element_ty), mask=m_4[:, None] & m_e)


launch_gather = Launches(gather_kernel)


@triton.jit(do_not_specialize=["s_l", "s_m"])
def combine_kernel(p_out, p_lse, p_more, p_more_lse, s_ot, s_oh, s_l, s_m, H, E: tl.constexpr, BE: tl.constexpr,
                   BH: tl.constexpr):  # fmt: skip
    """One program: BH heads of one token; out and its log-sum-exp take in another partial result."""
    i_t, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1) * BH + tl.arange(0, BH)
    i_e = tl.arange(0, BE)
    m_h = i_h < H
    m = m_h[:, None] & (i_e < E)[None, :]
    a = tl.load(p_lse + i_h * s_l + i_t, mask=m_h, other=0.0)
    b = tl.load(p_more_lse + i_h * s_m + i_t, mask=m_h, other=0.0)
    # No key: flash attention says minus infinity or, in version 2, plus infinity. The band always has one.
    b = tl.where(tl.abs(b) == float("inf"), -float("inf"), b)
    peak = tl.maximum(a, b)
    total = tl.exp(a - peak) + tl.exp(b - peak)
    lse = peak + tl.log(total)
    p_row = p_out + i_t * s_ot + i_h[:, None] * s_oh + i_e[None, :]
    x = tl.load(p_row, mask=m, other=0.0).to(tl.float32)
    y = tl.load(p_more + (i_t * H + i_h[:, None]) * E + i_e[None, :], mask=m, other=0.0).to(tl.float32)
    z = x * tl.exp(a - lse)[:, None] + y * tl.exp(b - lse)[:, None]
    tl.store(p_row, z.to(p_out.dtype.element_ty), mask=m)
    tl.store(p_lse + i_h * s_l + i_t, lse, mask=m_h)


launch_combine = Launches(combine_kernel)


# -- launcher -------------------------------------------------------------------
def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    body: torch.Tensor,
    window: torch.Tensor,
    body_table: torch.Tensor,
    window_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor,
    layout: PageLayout,
    plan: FlashPlan,
    flash: Flash,
    *,
    scale: float,
    sink_tokens: int,
    recent_tokens: int,
    retained: int,
    soft_cap: float = 0.0,
) -> None:
    """Attention of prefill rows by the position rule; store and seal of the step come first.

    Args:
        q, k, v, body, window, body_table, window_table, query_start_loc, seq_lens, out: as in
            `bie_kernels.prefill.prefill`; head sizes of keys and values are equal.
        workspace: uint8, at least `workspace_bytes`; contents are lost.
        plan: of the same requests, by `plan_flash`, on the device.
        flash: flash attention, see `Flash`.

    Raises:
        ValueError: a shape, stride, dtype or number that is not taken.
    """
    if layout.head_size != layout.v_size:
        raise ValueError("flash attention needs keys and values of one head size")
    heads, requests = check_prefill(
        q, k, v, body, window, body_table, window_table, query_start_loc, seq_lens, out, layout, sink_tokens,
        recent_tokens, retained,
    )  # fmt: skip
    numbers = plan.numbers
    if numbers is None:
        raise ValueError("plan: its numbers are not on the device; call plan.to(device)")
    if plan.requests != requests or plan.rows > q.shape[0]:
        raise ValueError(
            f"plan: made for {plan.requests} requests of {plan.rows} rows, there are {requests} of {q.shape[0]}"
        )
    keys, rows = plan.sizes
    need = workspace_bytes(keys, rows, q.shape[1], heads, layout, q.element_size())
    if workspace.dtype != torch.uint8 or workspace.numel() < need:
        raise ValueError(f"workspace has {workspace.numel()} numbers of {workspace.dtype}, {need} bytes are needed")
    room = as_dtype("workspace", workspace, q.dtype)
    size = keys * heads * layout.head_size
    flat_k, flat_v, partial = room[:size], room[size : 2 * size], room[2 * size :]

    def gather(what: Gather, band: bool) -> None:
        items = numbers[what.at : what.at + 4 * what.count]
        launch_gather[(what.count, heads)](
            items, k, v, body, window, body_table, window_table, query_start_loc, seq_lens, flat_k, flat_v,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1), body.stride(0), body.stride(1),
            window.stride(0), window.stride(1), window.stride(2), body_table.stride(0), window_table.stride(0),
            heads, sink_tokens, retained, D=layout.head_size, BD=power_of_2(layout.head_size),
            E=layout.v_size, BE=power_of_2(layout.v_size), GROUP=layout.group_size,
            HEAD_DIM=layout.key_axis == "head_dim", O_V_CODES=layout.v_codes, O_K_SCALE=layout.k_scale,
            O_K_ORIGIN=layout.k_origin, O_V_SCALE=layout.v_scale, O_V_MIN=layout.v_min,
            WINDOW_PAGE=window_page_tokens(q.element_size()), BAND=band, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip

    def attend(call: Call, own: bool, to: torch.Tensor) -> torch.Tensor:
        shape = (call.keys, heads, layout.head_size)
        rows = slice(call.first, call.last)
        n = call.keys * heads * layout.head_size
        keys, values = (k[rows], v[rows]) if own else (flat_k[:n].view(shape), flat_v[:n].view(shape))
        _, lse = flash(
            q[rows], keys, values, out=to, cu_q=numbers[call.cu_q : call.cu_q + call.requests + 1],
            cu_k=numbers[call.cu_k : call.cu_k + call.requests + 1], max_q=call.max_q, max_k=call.max_k,
            scale=scale, causal=call.causal, window=call.window, soft_cap=soft_cap,
        )  # fmt: skip
        return lse

    lses = []
    for band, call in plan.bands:
        if band is not None:
            gather(band, True)
        lses.append(attend(call, band is None, out[call.first : call.last]))
    block = max(1, min(power_of_2(q.shape[1]), 4096 // power_of_2(layout.v_size)))
    for what, calls in plan.slices:
        gather(what, False)
        for call in calls:
            n, target = call.last - call.first, out[call.first : call.last]
            more = partial[: n * q.shape[1] * layout.v_size].view(n, q.shape[1], layout.v_size)
            lse, more_lse = lses[call.segment], attend(call, False, more)
            launch_combine[(n, cdiv(q.shape[1], block))](
                target, lse, more, more_lse, out.stride(0), out.stride(1), lse.stride(0), more_lse.stride(0),
                q.shape[1], E=layout.v_size, BE=power_of_2(layout.v_size), BH=block, num_warps=4,
            )  # fmt: skip
