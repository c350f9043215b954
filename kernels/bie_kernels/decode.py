# SPDX-License-Identifier: Apache-2.0
"""Decode and verify: 1 to 16 query tokens per request over the packed pages, split over keys.

Work is cut by `plan` into items of equal size; one program serves one item and KV
head with all its query heads, dequantises in registers and writes a partial result;
`merge` joins the partials. Inside an item, body pages that are INT4 for every query
need no masks; the few others (sinks, the edge of the recent window, prefix hits whose
16-bit copies are gone) and the 16-bit window pages do.

The plain Triton kernel here is the portable path; `decode_keys` holds a faster one for the
common shapes. Both read one layout and write the same partials.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import triton
import triton.language as tl

from bie_kernels.checks import (
    as_dtype,
    check_attention,
    check_body,
    check_ints,
    check_numbers,
    check_rows,
    check_window,
)
from bie_kernels.fragments import LOW_UNIT, divided, load_fragments, load_rows, out_of_units, power_below, program_id_x
from bie_kernels.launches import Launches
from bie_kernels.layout import PAGE_TOKENS, PageLayout, window_page_tokens
from bie_kernels.merge import merge
from bie_kernels.plan import item_budget, make_plan, plan_ints
from bie_kernels.tiles import (
    LOG2E,
    add_values,
    dot16,
    empty_state,
    first_rows,
    page_ranges,
    page_step,
    resident,
    softmax_step,
    window_mask,
    window_range,
)
from bie_kernels.tuning import cdiv, decode_tile, interpreted, key_chunk, overlaps, power_of_2

try:
    from bie_kernels import decode_keys
except (ImportError, AttributeError):  # a Triton without Gluon, or with another one
    decode_keys = None  # type: ignore[assignment]

Fast: TypeAlias = bool | None
"""Kernel of a launch: the best one that serves it (None), `decode_keys` (True), the plain one (False)."""

MAX_QUERY_TOKENS = 16
"""Query tokens per request of a decode or verify launch."""

_PAGE = tl.constexpr(PAGE_TOKENS)


@triton.jit(
    do_not_specialize=["o_items", "s_btr", "s_wtr"],
    do_not_specialize_on_alignment=["p_body_table", "p_window_table", "p_peak", "p_total"],
)
def decode_kernel(
    p_q, p_body, p_window, p_body_table, p_window_table, p_plan, p_acc, p_peak, p_total,
    s_qt, s_qh, s_bb, s_bh, s_wp, s_wh, s_wt, s_btr, s_wtr, o_items, scale, sink_tokens, recent_tokens, retained,
    q_len: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, CHUNK: tl.constexpr,
    E: tl.constexpr, NQ: tl.constexpr, BN: tl.constexpr, EDGE: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, SOFT_CAP: tl.constexpr,
    O_V_CODES: tl.constexpr, O_K_SCALE: tl.constexpr, O_K_ORIGIN: tl.constexpr, O_V_SCALE: tl.constexpr,
    O_V_MIN: tl.constexpr, WINDOW_PAGE: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: one item, one KV head, NQ rows (query token, head of the group)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # the merge may set up while this runs
    row_0 = tl.program_id(0) * NQ  # neighbours read the same pages
    i_item, i_h = tl.program_id(1), tl.program_id(2)
    p_item = p_plan + o_items + 4 * i_item
    i_r = tl.load(p_item)
    if i_r < 0:
        return
    u_first, u_last, seq_len = tl.load(p_item + 1), tl.load(p_item + 2), tl.load(p_item + 3)
    computed = seq_len - q_len
    sink_end, body_end, pages, window_sinks, window_start, window_pages = page_ranges(
        computed, seq_len, sink_tokens, recent_tokens, WINDOW_PAGE
    )
    ROWS: tl.constexpr = G * q_len
    MMA_ROWS: tl.constexpr = 16 if NQ < 16 else NQ
    q_row = load_rows(p_q, s_qt, s_qh, i_r, i_h, row_0, q_len, G, D, BD, NQ, MMA_ROWS)
    factor = power_below(tl.max(tl.abs(q_row.to(tl.float32)), 1))
    q = divided(load_fragments(p_q, s_qt, s_qh, i_r, i_h, row_0, q_len, G, D, CHUNK, NQ, MMA_ROWS), factor)
    if SOFT_CAP > 0:
        logit_scale = scale
    else:
        logit_scale = scale * LOG2E
    # In NQ rows (8 of 16 are padding when NQ is 8).
    factor = tl.max(first_rows(tl.broadcast_to(factor[:, None], [MMA_ROWS, 8]), NQ), 1) * (logit_scale / LOW_UNIT)
    state = empty_state(NQ, E, GROUP, True)
    p_table = p_body_table + i_r * s_btr
    p_window_row = p_window_table + i_r * s_wtr

    # 1. INT4 for every query.
    body = body_end - sink_end
    for u in tl.range(tl.minimum(u_first, body), tl.minimum(u_last, body), num_stages=STAGES):
        page = sink_end + u
        p_page = p_body + tl.load(p_table + page).to(tl.int64) * s_bb + i_h * s_bh
        state = page_step(
            q, factor, None, state, p_page, page, computed, p_window_row, seq_len,
            sink_tokens, recent_tokens, retained, D, CHUNK, E, NQ, BN, GROUP, HEAD_DIM, SOFT_CAP, O_V_CODES,
            O_K_SCALE, O_K_ORIGIN, O_V_SCALE, O_V_MIN, WINDOW_PAGE, False, True, ASM,
        )  # fmt: skip

    # 2. INT4 for some queries or positions: first the sinks' pages, then those after body_end.
    edges = pages - body
    # The program's number is read once more, here and below, so that rows are not kept from above.
    q_pos = computed + (program_id_x(ASM) * NQ + tl.arange(0, NQ)) // G
    for u in tl.range(tl.maximum(u_first, body) - body, tl.minimum(u_last - body, edges), num_stages=1):
        page = tl.where(u < sink_end, u, u + body)
        i_p = page * _PAGE + WINDOW_PAGE * tl.arange(0, _PAGE // WINDOW_PAGE)
        held = resident(i_p, p_window_row, computed, sink_tokens, retained, i_p < seq_len, WINDOW_PAGE)
        held = held | (i_p >= computed)
        # Most of these pages are all 16-bit: one look at the table saves reading them.
        reaches = (page * _PAGE + recent_tokens <= seq_len - 1) | (tl.min(held.to(tl.int32), 0) == 0)
        block = tl.load(p_table + page).to(tl.int64)
        if reaches & (block > 0):
            state = page_step(
                q, factor, q_pos, state, p_body + block * s_bb + i_h * s_bh, page, computed, p_window_row, seq_len,
                sink_tokens, recent_tokens, retained, D, CHUNK, E, NQ, EDGE, GROUP, HEAD_DIM, SOFT_CAP, O_V_CODES,
                O_K_SCALE, O_K_ORIGIN, O_V_SCALE, O_V_MIN, WINDOW_PAGE, True, True, ASM,
            )  # fmt: skip

    # 3. The 16-bit window, one window page a step, queries in their own dtype.
    acc, low, peak, total = state
    acc = out_of_units(acc)
    w_first, w_last = window_range(u_first, u_last, pages, window_sinks + window_pages - window_start)
    if w_first < w_last:
        i_d = tl.arange(0, BD)
        m_d = i_d < D
        if BD <= 128:
            q_raw = load_rows(p_q, s_qt, s_qh, i_r, i_h, program_id_x(ASM) * NQ, q_len, G, D, BD, NQ, MMA_ROWS)
        flat = tl.full([NQ], 1.0, tl.float32) * logit_scale
        for u in tl.range(w_first, w_last, num_stages=1):
            w_page = tl.where(u < window_sinks, u, u - window_sinks + window_start)
            entry = tl.load(p_window_row + w_page).to(tl.int64)
            if BD > 128:  # wide queries take too many registers to be kept beside a page's keys
                q_raw = load_rows(p_q, s_qt, s_qh, i_r, i_h, program_id_x(ASM) * NQ, q_len, G, D, BD, NQ, MMA_ROWS)
            if entry > 0:
                pos = w_page * WINDOW_PAGE + tl.arange(0, WINDOW_PAGE)
                m_key = (pos < seq_len) & ((pos < sink_tokens) | (pos >= computed - retained))
                mask = window_mask(q_pos, pos, m_key, sink_tokens, recent_tokens)
                p_rows = p_window + entry * s_wp + i_h * s_wh + tl.arange(0, WINDOW_PAGE) * s_wt
                k = tl.load(p_rows[:, None] + i_d[None, :], mask=m_key[:, None] & m_d[None, :], other=0.0)
                s = dot16(q_raw, tl.trans(k), tl.zeros([MMA_ROWS, WINDOW_PAGE], tl.float32), ASM)
                s = first_rows(s, NQ)
                p, alpha, peak, total = softmax_step(s, flat, mask, peak, total, SOFT_CAP, True)
                acc, low = add_values(p, alpha, acc, low, p_rows + D, m_key, E, GROUP, True, ASM)

    i_out = program_id_x(ASM) * NQ + tl.arange(0, NQ)
    m_out = i_out < ROWS
    at = (i_item.to(tl.int64) * H + i_h) * ROWS + i_out
    tl.store(p_peak + at, peak, mask=m_out)
    tl.store(p_total + at, total, mask=m_out)
    for g in tl.static_range((E + GROUP - 1) // GROUP):
        i_e = g * GROUP + tl.arange(0, GROUP)
        p_part = p_acc + at[None, :] * E + i_e[:, None]
        tl.store(p_part, acc[g] + low[g][None, :], mask=(i_e < E)[:, None] & m_out[None, :])


launch_decode = Launches(decode_kernel)


# -- launcher -----------------------------------------------------------------
def workspace_bytes(
    max_reqs: int,
    q_heads: int,
    head_size_v: int,
    max_q_len: int,
    *,
    kv_heads: int,
    device: torch.device | str = "cuda",
) -> int:
    """Bytes of the workspace that serves every decode launch of up to `max_reqs` requests.

    Args:
        max_reqs: largest (padded) number of requests.
        q_heads, kv_heads: heads on this rank.
        head_size_v: channels of a value.
        max_q_len: largest query length, 1 plus the speculated tokens.
        device: whose number of multiprocessors counts.
    """
    device = torch.device(device)
    most = 0
    for q_len in range(1, max_q_len + 1):
        rows = q_heads // kv_heads * q_len
        for requests in {1, max_reqs}:
            budget = item_budget(requests, kv_heads, rows, head_size_v, device)
            floats = plan_ints(requests, budget) + budget * kv_heads * rows * (head_size_v + 2)
            most = max(most, 4 * floats + 64)
    return most


def plan_for(
    seq_lens: torch.Tensor,
    workspace: torch.Tensor,
    *,
    q_heads: int,
    kv_heads: int,
    head_size_v: int,
    q_len: int,
    sink_tokens: int,
    recent_tokens: int,
) -> torch.Tensor:
    """Plan a step's decode launches once, for all layers that share lengths and heads.

    Args:
        seq_lens: int32 [R]; workspace: any contiguous tensor with room for the plan,
            which decode launches then must not use as theirs.
        q_heads, kv_heads: heads on this rank; head_size_v: channels of a value.

    Returns:
        int32 plan for `decode(plan=...)`.

    Raises:
        ValueError: a shape, stride or dtype that does not fit.
    """
    requests = check_ints("seq_lens", seq_lens, torch.int32, None)
    budget = item_budget(requests, kv_heads, q_heads // kv_heads * q_len, head_size_v, seq_lens.device)
    plan = as_dtype("workspace", workspace, torch.int32)
    if plan.shape[0] < (need := plan_ints(requests, budget)):
        raise ValueError(f"workspace has {4 * plan.shape[0]} bytes, {4 * need} are needed")
    return make_plan(seq_lens, plan, q_len=q_len, budget=budget, sink_tokens=sink_tokens, recent_tokens=recent_tokens)


def decode(
    q: torch.Tensor,
    body: torch.Tensor,
    window: torch.Tensor,
    body_table: torch.Tensor,
    window_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor,
    layout: PageLayout,
    *,
    q_len: int,
    scale: float,
    sink_tokens: int,
    recent_tokens: int,
    retained: int,
    soft_cap: float = 0.0,
    plan: torch.Tensor | None = None,
    fast: Fast = None,
) -> None:
    """Attention of `q_len` query tokens per request; store and seal of the step come first.

    No host synchronisation, and a grid that depends on the batch size alone: safe to
    capture. Requests with seq_len 0 are padding and give zeros.

    Args:
        q: [R * q_len, Hq, D], fp16 or bf16, last dimension contiguous.
        body: uint8 [blocks, H, page_bytes]; window: [pages, H, 16, D + E].
        body_table, window_table: int32 [R, pages]; window entries may be 0 or stale.
        seq_lens: int32 [R], this step's tokens included.
        out: [R * q_len, Hq, E], dtype of q, written.
        workspace: contiguous, at least `workspace_bytes` bytes, overwritten.
        q_len: query tokens per request, 1 to 16.
        scale: softmax scale.
        sink_tokens, recent_tokens: the window in 16 bits; retained: see design, R.
        soft_cap: logits become cap * tanh(logits / cap) when positive.
        plan: from `plan_for` with the same lengths; made here when None.
        fast: force (True) or forbid (False) the Gluon kernel; chosen when None.

    Raises:
        ValueError: a shape, stride, dtype or number that the kernels do not take.
    """
    heads, requests = _check_decode(q, body, window, body_table, window_table, seq_lens, out, layout, q_len)
    check_numbers(sink_tokens, recent_tokens, retained, layout)
    if requests == 0:
        return
    q_heads = q.shape[1]
    rows = q_heads // heads * q_len
    budget = item_budget(requests, heads, rows, layout.v_size, q.device)
    start = (plan_ints(requests, budget) + 3) // 4 * 4
    need = start + budget * heads * rows * (layout.v_size + 2)
    floats = as_dtype("workspace", workspace, torch.float32)
    if floats.shape[0] < need:
        raise ValueError(f"workspace has {floats.shape[0] * 4} bytes, {need * 4} are needed")
    if plan is None:
        plan = make_plan(
            seq_lens, floats.view(torch.int32)[:start], q_len=q_len, budget=budget,
            sink_tokens=sink_tokens, recent_tokens=recent_tokens,
        )  # fmt: skip
    else:
        check_ints("plan", plan, torch.int32, plan_ints(requests, budget))
    size = budget * heads * rows
    acc = floats[start : start + size * layout.v_size].view(budget, heads, rows, layout.v_size)
    peak, total = floats[start + size * layout.v_size :][: 2 * size].view(2, budget, heads, rows)
    able = decode_keys is not None and decode_keys.available(layout, soft_cap, q.device)
    if fast and not able:
        raise ValueError("the Gluon kernel does not serve this layout, card or Triton")
    launch = decode_keys.launch if fast or (fast is None and able) else _launch
    launch(
        q, body, window, body_table, window_table, plan, acc, peak, total, layout, q_len=q_len,
        scale=scale, sink_tokens=sink_tokens, recent_tokens=recent_tokens, retained=retained, soft_cap=soft_cap,
    )  # fmt: skip
    merge(plan, acc, peak, total, out, requests=requests, q_len=q_len)


def _check_decode(
    q, body, window, body_table, window_table, seq_lens, out, layout, q_len
) -> tuple[int, int]:  # fmt: skip  # noqa: ANN001
    heads = check_body(body, layout)
    check_rows("q", q, None, layout.head_size)
    check_window(window, layout, heads, q.dtype)
    if not 1 <= q_len <= MAX_QUERY_TOKENS:
        raise ValueError(f"q_len={q_len}: decode takes 1 to {MAX_QUERY_TOKENS} query tokens")
    requests = check_attention(q, body_table, window_table, seq_lens, out, heads, layout)
    if q.shape[0] != requests * q_len:
        raise ValueError(f"q has {q.shape[0]} tokens, {requests} requests of {q_len} were announced")
    return heads, requests


def _launch(
    q, body, window, body_table, window_table, plan, acc, peak, total, layout, *,
    q_len, scale, sink_tokens, recent_tokens, retained, soft_cap,
) -> None:  # fmt: skip  # noqa: ANN001, ANN003
    """The plain Triton kernel."""
    budget, heads, rows, _ = acc.shape
    tile = decode_tile(rows, layout, q.device)
    channel = layout.key_axis == "channel"
    # Items are the grid's y: 65,535 of them serve 52,000 requests.
    launch_decode[(cdiv(rows, tile.rows), budget, heads)](
        q, body, window, body_table, window_table, plan, acc, peak, total,
        q.stride(0), q.stride(1), body.stride(0), body.stride(1),
        window.stride(0), window.stride(1), window.stride(2), body_table.stride(0), window_table.stride(0),
        plan.shape[0] - 4 * budget, scale, sink_tokens, recent_tokens, retained,
        q_len=q_len, H=heads, G=rows // q_len, D=layout.head_size,
        BD=max(32, power_of_2(layout.head_size)), CHUNK=key_chunk(layout), E=layout.v_size, NQ=tile.rows,
        BN=layout.group_size if channel else PAGE_TOKENS, EDGE=tile.edge, GROUP=layout.group_size, HEAD_DIM=not channel,
        SOFT_CAP=soft_cap, O_V_CODES=layout.v_codes, O_K_SCALE=layout.k_scale, O_K_ORIGIN=layout.k_origin,
        O_V_SCALE=layout.v_scale, O_V_MIN=layout.v_min, WINDOW_PAGE=window_page_tokens(q.element_size()),
        ASM=not interpreted(), STAGES=tile.stages, PDL=overlaps(q.device),
        num_warps=tile.warps, enable_fp_fusion=True, maxnreg=255,  # else ptxas may aim for 12 warps, and spill
    )  # fmt: skip
