# SPDX-License-Identifier: Apache-2.0
"""Prefill: mixed batches of any query lengths, INT4 body from the packed pages, band and sinks in 16 bits.

One program serves a tile of query rows (query token, head of the group) of one request
and KV head and walks its keys once: body pages that are INT4 for the whole tile without
masks, the few at the edges with masks, then the 16-bit keys, 64 at a time. Keys of this
step come from the raw K and V, since a long chunk has no window pages for its middle;
earlier ones from the window pages. Where the tiles are too few for the card (a short
continuation of a long context), the unmasked pages are split over several programs and
`merge` joins their partial results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bie_kernels.checks import as_dtype, check_prefill
from bie_kernels.fragments import normalise
from bie_kernels.launches import Launches
from bie_kernels.layout import PAGE_TOKENS, PageLayout, window_page_tokens
from bie_kernels.merge import merge
from bie_kernels.tiles import (
    LOG2E,
    add_values,
    dot16,
    empty_state,
    page_ranges,
    page_step,
    resident,
    softmax_step,
    window_mask,
)
from bie_kernels.tuning import SMALL_GROUP_ROWS, choices, interpreted, multiprocessors, power_of_2, prefill_tile

MAX_SPLITS = 16
"""Programs that share the pages of one tile."""

_PAGE = tl.constexpr(PAGE_TOKENS)
_CHUNK = tl.constexpr(64)
"""16-bit keys of one step."""


@triton.jit
def _find_request(tile, p_starts, requests, BQ: tl.constexpr):
    """The request of a tile: request r owns the tiles from starts[r] // BQ + r on."""
    low, high = 0, requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(p_starts + middle) // BQ + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(
    do_not_specialize=["requests", "splits", "s_btr", "s_wtr"],
    do_not_specialize_on_alignment=["p_body_table", "p_window_table", "p_starts", "p_lens", "p_peak", "p_total"],
)
def prefill_kernel(
    p_q, p_k, p_v, p_body, p_window, p_body_table, p_window_table, p_starts, p_lens, p_out, p_acc, p_peak, p_total,
    s_qt, s_qh, s_kt, s_kh, s_vt, s_vh, s_bb, s_bh, s_wp, s_wh, s_wt, s_btr, s_wtr, s_ot, s_oh,
    requests, splits, scale, sink_tokens, recent_tokens, retained,
    G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, SOFT_CAP: tl.constexpr, O_V_CODES: tl.constexpr,
    O_K_SCALE: tl.constexpr, O_K_ORIGIN: tl.constexpr, O_V_SCALE: tl.constexpr, O_V_MIN: tl.constexpr,
    WINDOW_PAGE: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """One program: BM // G query tokens of one request, all heads of one KV head."""
    BQ: tl.constexpr = BM // G
    i_h = tl.program_id(0)
    i_r = _find_request(tl.program_id(1), p_starts, requests, BQ)
    start = tl.load(p_starts + i_r)
    q_len = tl.load(p_starts + i_r + 1) - start
    q_first = (tl.program_id(1) - (start // BQ + i_r)) * BQ
    if q_first >= q_len:
        return
    computed = tl.load(p_lens + i_r) - q_len
    if computed < 0:
        return
    first = computed + q_first
    end = computed + tl.minimum(q_first + BQ, q_len)
    i_m = tl.arange(0, BM)
    i_q = q_first + i_m // G
    m_row = (i_m < BQ * G) & (i_q < q_len)
    q_pos = computed + i_q
    i_token = (start + i_q).to(tl.int64)
    i_head = i_h * G + i_m % G
    p_q_row = p_q + i_token * s_qt + i_head * s_qh  # [BM]
    i_d = tl.arange(0, BD)
    m_d = i_d < D
    q, factor = normalise(tl.load(p_q_row[:, None] + i_d[None, :], mask=m_row[:, None] & m_d[None, :], other=0.0))
    if SOFT_CAP > 0:
        logit_scale = scale
    else:
        logit_scale = scale * LOG2E
    factor = factor * logit_scale
    state = empty_state(BM, E, GROUP, False)
    p_table = p_body_table + i_r * s_btr
    p_window_row = p_window_table + i_r * s_wtr
    sink_end, body_end, pages, window_sinks, window_start, window_chunks = page_ranges(
        first, end, sink_tokens, recent_tokens, _CHUNK
    )

    # 1. INT4 for every query of the tile.
    i_s = tl.program_id(2)
    body = body_end - sink_end
    first_page = sink_end + body * i_s // splits
    last_page = sink_end + body * (i_s + 1) // splits
    following = tl.load(p_table + first_page, mask=first_page < last_page, other=0).to(tl.int64)
    for page in tl.range(first_page, last_page, num_stages=STAGES):
        p_page = p_body + following * s_bb + i_h * s_bh
        # One look at the table ahead: a page's address is known when its turn comes.
        following = tl.load(p_table + tl.minimum(page + 1, last_page - 1)).to(tl.int64)
        state = page_step(
            q, factor, q_pos, state, p_page, page, computed, p_window_row, end,
            sink_tokens, recent_tokens, retained, D, BD, E, BM, BN, GROUP, HEAD_DIM, SOFT_CAP, O_V_CODES,
            O_K_SCALE, O_K_ORIGIN, O_V_SCALE, O_V_MIN, WINDOW_PAGE, False, False, ASM,
        )  # fmt: skip

    # 2. INT4 for some: the sinks' pages, then those after body_end. All masked work is the last split's.
    mine = tl.where(i_s == splits - 1, 1, 0)
    for u in tl.range(0, (pages - body) * mine, num_stages=1):
        page = tl.where(u < sink_end, u, u - sink_end + body_end)
        i_p = page * _PAGE + WINDOW_PAGE * tl.arange(0, _PAGE // WINDOW_PAGE)
        held = resident(i_p, p_window_row, computed, sink_tokens, retained, i_p < end, WINDOW_PAGE)
        reaches = (page * _PAGE + recent_tokens <= end - 1) | (tl.min(held.to(tl.int32), 0) == 0)
        block = tl.load(p_table + page).to(tl.int64)
        if reaches & (block > 0):
            state = page_step(
                q, factor, q_pos, state, p_body + block * s_bb + i_h * s_bh, page, computed, p_window_row, end,
                sink_tokens, recent_tokens, retained, D, BD, E, BM, BN, GROUP, HEAD_DIM, SOFT_CAP, O_V_CODES,
                O_K_SCALE, O_K_ORIGIN, O_V_SCALE, O_V_MIN, WINDOW_PAGE, True, False, ASM,
            )  # fmt: skip

    # 3. The 16-bit keys, queries in their own dtype.
    acc, low, peak, total = state
    q_raw = tl.load(p_q_row[:, None] + i_d[None, :], mask=m_row[:, None] & m_d[None, :], other=0.0)
    flat = tl.full([BM], 1.0, tl.float32) * logit_scale
    for u in tl.range(0, (window_sinks + window_chunks - window_start) * mine, num_stages=1):
        chunk = tl.where(u < window_sinks, u, u - window_sinks + window_start)
        pos = chunk * _CHUNK + tl.arange(0, _CHUNK)
        m_raw = pos >= computed
        entry = tl.load(p_window_row + pos // WINDOW_PAGE, mask=(m_raw == 0) & (pos < end), other=0).to(tl.int64)
        m_kept = (entry > 0) & ((pos < sink_tokens) | (pos >= computed - retained))
        m_key = (m_raw | m_kept) & (pos < end) & ((pos < sink_tokens) | (pos > first - recent_tokens))
        mask = window_mask(q_pos, pos, m_key, sink_tokens, recent_tokens)
        i_raw = (start + pos - computed).to(tl.int64)
        p_kept = p_window + entry * s_wp + i_h * s_wh + (pos % WINDOW_PAGE) * s_wt
        p_k_row = tl.where(m_raw, p_k + i_raw * s_kt + i_h * s_kh, p_kept)
        p_v_row = tl.where(m_raw, p_v + i_raw * s_vt + i_h * s_vh, p_kept + D)
        k = tl.load(p_k_row[:, None] + i_d[None, :], mask=m_key[:, None] & m_d[None, :], other=0.0)
        s = dot16(q_raw, tl.trans(k), tl.zeros([BM, _CHUNK], tl.float32), ASM)
        p, alpha, peak, total = softmax_step(s, flat, mask, peak, total, SOFT_CAP, True)
        acc, low = add_values(p, alpha, acc, low, p_v_row, m_key, E, GROUP, False, ASM)

    if PARTIAL:  # [token, split, head, E]
        at = (i_token * splits + i_s) * (tl.num_programs(0) * G) + i_head
        tl.store(p_peak + at, peak, mask=m_row)
        tl.store(p_total + at, total, mask=m_row)
        total = tl.full([BM], 1.0, tl.float32)
        p_row = p_acc + at * E
    else:
        total = tl.where(total == 0.0, 1.0, total)
        p_row = p_out + i_token * s_ot + i_head * s_oh
    for g in tl.static_range((E + GROUP - 1) // GROUP):
        i_e = g * GROUP + tl.arange(0, GROUP)
        part = (acc[g] + low[g][:, None]) / total[:, None]
        m_out = m_row[:, None] & (i_e < E)[None, :]
        tl.store(p_row[:, None] + i_e[None, :], part.to(p_row.dtype.element_ty), mask=m_out)


launch_prefill = Launches(prefill_kernel)


def workspace_bytes(head_size_v: int, *, device: torch.device | str = "cuda") -> int:
    """Bytes of the workspace that serves every prefill launch: the partial results of one wave of programs."""
    device = torch.device(device)
    chosen = choices(device)
    programs = chosen.prefill_programs_per_sm * multiprocessors(device)
    return 4 * programs * max(chosen.prefill_rows, SMALL_GROUP_ROWS) * (head_size_v + 2)


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
    *,
    scale: float,
    sink_tokens: int,
    recent_tokens: int,
    retained: int,
    soft_cap: float = 0.0,
) -> None:
    """Attention of a mixed batch by the position rule; store and seal of the step come first.

    Args:
        q: [T, Hq, D]; k, v: [T, H, D], [T, H, E], this step's rows (T may include padding).
        body: uint8 [blocks, H, page_bytes]; window: [pages, H, 16, D + E].
        body_table, window_table: int32 [R, pages]; window entries may be 0 or stale.
        query_start_loc: int32 [R + 1]; seq_lens: int32 [R], this step's tokens included.
        out: [T, Hq, E], dtype of q, written; rows beyond the last query keep their value or become 0.
        workspace: contiguous, at least `workspace_bytes` bytes, overwritten.
        scale: softmax scale.
        sink_tokens, recent_tokens: the window in 16 bits; retained: see design, R.
        soft_cap: logits become cap * tanh(logits / cap) when positive.

    Raises:
        ValueError: a shape, stride, dtype or number that the kernel does not take.
    """
    heads, requests = check_prefill(
        q, k, v, body, window, body_table, window_table, query_start_loc, seq_lens, out, layout, sink_tokens,
        recent_tokens, retained,
    )  # fmt: skip
    group = q.shape[1] // heads
    tile = prefill_tile(layout, q.device)
    if group > tile.rows:
        raise ValueError(f"{group} query heads per KV head: prefill takes at most {tile.rows}")
    floats = as_dtype("workspace", workspace, torch.float32)
    if floats.shape[0] * 4 < (need := workspace_bytes(layout.v_size, device=q.device)):
        raise ValueError(f"workspace has {floats.shape[0] * 4} bytes, {need} are needed")
    if requests == 0 or q.shape[0] == 0:
        return
    channel = layout.key_axis == "channel"
    tiles = q.shape[0] // (tile.rows // group) + requests
    # Too few tiles for the card, and their pages are split.
    splits = min(MAX_SPLITS, max(1, tile.per_sm * multiprocessors(q.device) // (heads * tiles)))
    acc = peak = total = None
    if splits > 1:
        size = q.shape[0] * splits * q.shape[1]
        acc = floats[: size * layout.v_size].view(q.shape[0], splits, q.shape[1], layout.v_size)
        sums = floats[size * layout.v_size :][: 2 * size].zero_()  # nobody writes those of padding
        peak, total = sums.view(2, q.shape[0], splits, q.shape[1])
    launch_prefill[(heads, tiles, splits)](
        q, k, v, body, window, body_table, window_table, query_start_loc, seq_lens, out, acc, peak, total,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        body.stride(0), body.stride(1), window.stride(0), window.stride(1), window.stride(2),
        body_table.stride(0), window_table.stride(0), out.stride(0), out.stride(1),
        requests, splits, scale, sink_tokens, recent_tokens, retained,
        G=group, D=layout.head_size, BD=max(32, power_of_2(layout.head_size)), E=layout.v_size,
        BM=tile.rows, BN=layout.group_size if channel else PAGE_TOKENS, GROUP=layout.group_size,
        HEAD_DIM=not channel, SOFT_CAP=soft_cap, O_V_CODES=layout.v_codes, O_K_SCALE=layout.k_scale,
        O_K_ORIGIN=layout.k_origin, O_V_SCALE=layout.v_scale, O_V_MIN=layout.v_min,
        WINDOW_PAGE=window_page_tokens(q.element_size()), ASM=not interpreted(), STAGES=tile.stages,
        PARTIAL=splits > 1, num_warps=tile.warps, enable_fp_fusion=True,
    )  # fmt: skip
    if acc is not None:
        items = q.shape[0] * splits
        parts = (acc.view(items, heads, group, layout.v_size), *(x.view(items, heads, group) for x in (peak, total)))
        merge(None, *parts, out, requests=q.shape[0], q_len=1, splits=splits)
