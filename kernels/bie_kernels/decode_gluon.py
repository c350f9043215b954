# SPDX-License-Identifier: Apache-2.0
"""The fast path of decode: the same plan, pages and partials as `decode`, explicit layouts.

One warp is one program. With mma.m16n8k16 (rows of A: g, g + 8; of a thread's lane
g = lane >> 2, t = lane & 3):

* S = q K^T has the query rows as A and codes as B. Codes lie in memory in the order of
  B's fragments, so a thread unpacks what it loads; no value changes its thread.
* O^T = V^T P^T has V's codes as A and P as B: the accumulator of S is P's fragment
  already. With 8 rows, the 8 padded rows of S are dropped in registers and everything
  after S works on 8.
* The key minimum enters as the initial accumulator of S (q times a broadcast column), the
  value minima as one more A tile whose rows 0-7 and 8-15 repeat those of two groups.
* Pages come by cp.async into a ring of shared memory, one page ahead.

`assert_trivial` makes the compiler prove that a layout conversion moves nothing.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from bie_kernels.gluon_tiles import (
    CHUNKS,
    MMA,
    OPERAND_A,
    OPERAND_B,
    PAGE,
    TOKEN_META,
    V_TILE,
    channel_meta,
    channels_to_mma,
    code_chunks,
    copy_async,
    drop_rows,
    key_rows,
    key_tile,
    launch_dependents,
    low_tile,
    pad_rows,
    page_ranges,
    repeat8,
    rows_layout,
    serves,
    slots_to_tokens,
    token_of_slot,
    value_tile,
    window_page_of,
    window_range,
)
from bie_kernels.layout import PageLayout, window_page_tokens
from bie_kernels.tiles import LOG2E, NEGATIVE, NEVER
from bie_kernels.tuning import overlaps

HEAD_SIZES = (64, 128)
"""Key and value head sizes of this kernel; others take the plain one."""



# -- steps --------------------------------------------------------------------
@gluon.jit
def _softmax(s, factor, mask, peak, total, MASKED: gl.constexpr, R: gl.constexpr, N: gl.constexpr):
    """Online softmax of scores [R, N] times factor [R]; the row sums stay spread over 8 columns until the end."""
    TOTAL: gl.constexpr = rows_layout(R, 8)
    if MASKED:
        s = gl.where(mask, s, NEGATIVE)
    new_peak = gl.maximum(peak, gl.max(s, 1) * factor)  # the factor is positive
    alpha = gl.exp2(peak - new_peak)
    p = gl.exp2(s * gl.expand_dims(factor, 1) - gl.expand_dims(new_peak, 1))
    if MASKED:
        p = gl.where(mask, p, 0.0)
    part = gl.convert_layout(gl.sum(gl.reshape(p, [R, N // 8, 8]), 1), TOTAL, assert_trivial=True)
    total = total * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, TOTAL)), 1) + part
    columns = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(0, MMA)), 0)
    return p, columns, new_peak, total


@gluon.jit
def _halves(ring, stage, offset, size: gl.constexpr, LAYOUT: gl.constexpr):
    """fp16 metadata from a stage of the ring."""
    return ring.index(stage).slice(offset, size).load(LAYOUT).to(gl.float16, bitcast=True)


@gluon.jit
def _value_group(
    g: gl.constexpr, half, ring_v, ring_m, stage, acc, alpha, m_tokens,
    D: gl.constexpr, R: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """acc * alpha + codes of value group g times (p * scale)."""
    P: gl.constexpr = rows_layout(R, 64)
    scale = slots_to_tokens(_halves(ring_m, stage, 2 * D + 64 * g, 64, TOKEN_META), gl.SliceLayout(0, P))
    if MASKED:  # unwritten values: 0 * NaN is NaN
        scale = gl.where(m_tokens, scale, 0.0).to(gl.float16)
    weight = gl.convert_layout(gl.permute(half * gl.expand_dims(scale, 0), [1, 0]), OPERAND_B, assert_trivial=True)
    codes = ring_v.index(stage).slice(1024 * g, 1024).load(CHUNKS)
    return mma_v2(value_tile(codes, 64), weight, acc * alpha)


@gluon.jit
def _page_step(
    q, factor, ring_k, ring_v, ring_m, stage, mask, m_tokens, m_slots, peak, total, acc0, acc1, low,
    D: gl.constexpr, R: gl.constexpr, MASKED: gl.constexpr, EXACT: gl.constexpr,
):  # fmt: skip
    """One body page, in a stage of the ring. Values are fetched after the scores: registers are short."""
    Q: gl.constexpr = rows_layout(R, D)
    META: gl.constexpr = channel_meta(D)
    k_scale = channels_to_mma(_halves(ring_m, stage, 0, D, META), D, gl.SliceLayout(0, Q))
    k_min = channels_to_mma(_halves(ring_m, stage, D, D, META), D, gl.SliceLayout(1, OPERAND_B))
    column = gl.expand_dims(k_min, 1).broadcast_to([D, 8])
    bias = mma_v2(pad_rows(q, D, R), column, gl.full([16, 8], 0.0, gl.float32, MMA))
    scaled = pad_rows(q * gl.expand_dims(k_scale, 0), D, R)
    if not EXACT:
        i_c = gl.arange(0, D, layout=gl.SliceLayout(1, OPERAND_B))
        base = gl.where(((i_c >> 3) & 1) == 0, -1024.0, -64.0).to(gl.float16)
        bias = mma_v2(scaled, gl.expand_dims(base, 1).broadcast_to([D, 8]), bias)
    bias = gl.reshape(gl.permute(repeat8(bias), [0, 2, 3, 4, 1]), [16, 64])
    codes = key_tile(ring_k.index(stage).load(code_chunks(D)), D, EXACT)
    s = mma_v2(scaled, codes, gl.convert_layout(bias, MMA, assert_trivial=True))
    s = drop_rows(s, R, 64)
    p, alpha, peak, total = _softmax(s, factor, mask, peak, total, MASKED, R, 64)
    half = p.to(gl.float16)
    acc0 = _value_group(0, half, ring_v, ring_m, stage, acc0, alpha, m_tokens, D, R, MASKED)
    if D == 128:
        acc1 = _value_group(1, half, ring_v, ring_m, stage, acc1, alpha, m_tokens, D, R, MASKED)
    min0 = _halves(ring_m, stage, 3 * D, 64, TOKEN_META)
    min1 = _halves(ring_m, stage, 4 * D - 64, 64, TOKEN_META)  # the same group again when D is 64
    if MASKED:
        min0 = gl.where(m_slots, min0, 0.0).to(gl.float16)
        min1 = gl.where(m_slots, min1, 0.0).to(gl.float16)
    plain = gl.convert_layout(gl.permute(half, [1, 0]), OPERAND_B, assert_trivial=True)
    low = mma_v2(low_tile(min0, min1), plain, low * alpha)
    return peak, total, acc0, acc1, low


@gluon.jit
def _issue(p_page, ring_k, ring_v, ring_m, stage, D: gl.constexpr):
    """Start the copy of a page into a stage of the ring."""
    o = gl.arange(0, 16 * D, layout=CHUNKS)
    o_m = gl.arange(0, 4 * D, layout=CHUNKS)
    copy_async(ring_k.index(stage), p_page + o)
    copy_async(ring_v.index(stage), p_page + 16 * D + o)
    copy_async(ring_m.index(stage), p_page + 32 * D + o_m)


@gluon.jit
def _value_rows(p_rows, s_wt, m_key, o_group):
    """16-bit values of 16 tokens, one group of channels -> A operand [64, 16]."""
    i_e = gl.arange(0, 64, layout=gl.SliceLayout(1, V_TILE))
    i_t = gl.arange(0, 16, layout=gl.SliceLayout(0, V_TILE))
    m = gl.convert_layout(m_key, gl.SliceLayout(0, V_TILE))
    p = p_rows + o_group + gl.expand_dims(i_t, 0) * s_wt + gl.expand_dims(i_e, 1)
    v = gl.load(p, mask=gl.expand_dims(m, 0).broadcast_to([64, 16]), other=0.0)
    return gl.convert_layout(v, OPERAND_A, assert_trivial=True)


@gluon.jit
def _decode_rows(
    row_0, p_q, p_body, p_window, p_body_table, p_window_table, p_plan, p_acc, p_peak, p_total,
    s_qt, s_qh, s_bb, s_bh, s_wp, s_wh, s_wt, s_btr, s_wtr, o_items, scale, sink_tokens, recent_tokens, retained,
    q_len: gl.constexpr, H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, R: gl.constexpr,
    WINDOW_PAGE: gl.constexpr, STAGES: gl.constexpr, EXACT: gl.constexpr,
):  # fmt: skip
    """R rows (query token, head of the group) of one item and KV head, from row_0 on."""
    Q: gl.constexpr = rows_layout(R, D)
    P: gl.constexpr = rows_layout(R, 64)
    W: gl.constexpr = rows_layout(R, 16)
    ROWS: gl.constexpr = G * q_len
    i_item = gl.program_id(0)
    i_h = gl.program_id(1)
    p_item = p_plan + o_items + 4 * i_item
    i_r = gl.load(p_item)
    u_first = gl.load(p_item + 1)
    u_last = gl.load(p_item + 2)
    seq_len = gl.load(p_item + 3)
    computed = seq_len - q_len
    sink_end, body_end, pages, window_sinks, window_start, window_pages = page_ranges(
        computed, seq_len, sink_tokens, recent_tokens, WINDOW_PAGE
    )
    p_table = p_body_table + i_r * s_btr
    p_window_row = p_window_table + i_r * s_wtr
    p_head = p_body + i_h * s_bh  # int16 elements, as the strides
    log_scale = scale * LOG2E

    # Queries, channels in MMA order, a power of two taken off each row.
    i_row = row_0 + gl.arange(0, R, layout=gl.SliceLayout(1, Q))
    i_k = gl.arange(0, D, layout=gl.SliceLayout(0, Q))
    i_c = (D // 4) * ((i_k >> 1) & 3) + 8 * (i_k >> 5) + 2 * ((i_k >> 3) & 3) + (i_k & 1)
    o_row = (i_r * q_len + i_row // G).to(gl.int64) * s_qt + (i_h * G + i_row % G) * s_qh
    p_q_tile = p_q + gl.expand_dims(o_row, 1) + gl.expand_dims(i_c, 0)
    m_q = gl.expand_dims(i_row < ROWS, 1).broadcast_to([R, D])
    wide = gl.load(p_q_tile, mask=m_q, other=0.0).to(gl.float32)
    size = gl.max(gl.abs(wide), 1)
    power = (size.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    power = gl.where((size > 1.0e-30) & (size < 1.0e30), power, 1.0)
    q = (wide / gl.expand_dims(power, 1)).to(gl.float16)
    factor = gl.convert_layout(power * log_scale, gl.SliceLayout(1, P))

    peak = gl.full([R], NEGATIVE, gl.float32, gl.SliceLayout(1, P))
    total = gl.full([R, 8], 0.0, gl.float32, rows_layout(R, 8))
    acc0 = gl.full([64, R], 0.0, gl.float32, MMA)
    acc1 = gl.full([64, R], 0.0, gl.float32, MMA)
    low = gl.full([16, R], 0.0, gl.float32, MMA)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring_k = gl.allocate_shared_memory(gl.int16, [STAGES, 16 * D], FLAT)
    ring_v = gl.allocate_shared_memory(gl.int16, [STAGES, 16 * D], FLAT)
    ring_m = gl.allocate_shared_memory(gl.int16, [STAGES, 4 * D], FLAT)

    # 1. INT4 for every query.
    body = body_end - sink_end
    first = sink_end + gl.minimum(u_first, body)
    last = sink_end + gl.minimum(u_last, body)
    if first < last:
        for i in gl.static_range(STAGES - 1):
            if first + i < last:
                _issue(p_head + gl.load(p_table + first + i).to(gl.int64) * s_bb, ring_k, ring_v, ring_m, i, D)
            async_copy.commit_group()
        following = gl.load(p_table + gl.minimum(first + STAGES - 1, last - 1)).to(gl.int64)
        stage = 0
        for page in range(first, last):
            async_copy.wait_group(STAGES - 2)
            target = stage + STAGES - 1
            target = gl.where(target >= STAGES, target - STAGES, target)
            if page + STAGES - 1 < last:
                _issue(p_head + following * s_bb, ring_k, ring_v, ring_m, target, D)
            async_copy.commit_group()
            following = gl.load(p_table + gl.minimum(page + STAGES, last - 1)).to(gl.int64)
            peak, total, acc0, acc1, low = _page_step(
                q, factor, ring_k, ring_v, ring_m, stage, None, None, None, peak, total, acc0, acc1, low,
                D, R, False, EXACT,
            )  # fmt: skip
            stage = gl.where(stage + 1 >= STAGES, 0, stage + 1)
        async_copy.wait_group(0)

    # 2. INT4 for some queries or positions.
    edges = pages - body
    i_out = row_0 + gl.arange(0, R, layout=gl.SliceLayout(1, P))
    q_pos = computed + i_out // G
    for u in range(gl.maximum(u_first, body) - body, gl.minimum(u_last - body, edges)):
        page = gl.where(u < sink_end, u, u + body)
        pos = page * PAGE + gl.arange(0, 64, layout=gl.SliceLayout(0, P))
        entry = gl.load(p_window_row + pos // WINDOW_PAGE, mask=pos < computed, other=0)
        held = (pos >= computed) | ((entry > 0) & ((pos < sink_tokens) | (pos >= computed - retained)))
        block = gl.load(p_table + page).to(gl.int64)
        reaches = (page * PAGE + recent_tokens <= seq_len - 1) | (gl.min(held.to(gl.int32), 0) == 0)
        if reaches & (block > 0):
            _issue(p_head + block * s_bb, ring_k, ring_v, ring_m, 0, D)
            async_copy.commit_group()
            # The least distance at which a token is read in INT4. Padded rows compute nonsense for themselves.
            least = gl.where(held, gl.where(pos < sink_tokens, NEVER, recent_tokens), 0)
            mask = gl.expand_dims(q_pos, 1) - gl.expand_dims(pos, 0) >= gl.expand_dims(least, 0)
            token = token_of_slot(gl.arange(0, 64, layout=TOKEN_META))
            async_copy.wait_group(0)
            peak, total, acc0, acc1, low = _page_step(
                q, factor, ring_k, ring_v, ring_m, 0, mask, pos < seq_len, page * PAGE + token < seq_len,
                peak, total, acc0, acc1, low, D, R, True, EXACT,
            )  # fmt: skip

    # 3. The 16-bit window, one window page a step, queries in their own dtype.
    w_first, w_last = window_range(u_first, u_last, pages, window_sinks + window_pages - window_start)
    if w_first < w_last:
        q_raw = pad_rows(gl.load(p_q_tile, mask=m_q, other=0.0), D, R)
        KR: gl.constexpr = key_rows(16, D)
        i_t = gl.arange(0, 16, layout=gl.SliceLayout(1, KR))
        i_d = gl.arange(0, D, layout=gl.SliceLayout(0, KR))
        o_out = row_0 + gl.arange(0, R, layout=gl.SliceLayout(1, W))
        w_pos = computed + o_out // G
        flat = gl.full([R], 1.0, gl.float32, gl.SliceLayout(1, W)) * log_scale
        following = gl.load(p_window_row + window_page_of(w_first, window_sinks, window_start)).to(gl.int64)
        for u in range(w_first, w_last):
            w_page = window_page_of(u, window_sinks, window_start)
            entry = following
            ahead = window_page_of(gl.minimum(u + 1, w_last - 1), window_sinks, window_start)
            following = gl.load(p_window_row + ahead).to(gl.int64)
            if entry > 0:
                p_rows = p_window + entry * s_wp + i_h * s_wh
                k_pos = w_page * WINDOW_PAGE + i_t
                m_k = (k_pos < seq_len) & ((k_pos < sink_tokens) | (k_pos >= computed - retained))
                k = gl.load(
                    p_rows + gl.expand_dims(i_t, 1) * s_wt + gl.expand_dims(i_d, 0),
                    mask=gl.expand_dims(m_k, 1).broadcast_to([16, D]), other=0.0,
                )  # fmt: skip
                v0 = _value_rows(p_rows, s_wt, m_k, D)
                if D == 128 and R == 8:  # 16 rows have no registers left for it
                    v1 = _value_rows(p_rows, s_wt, m_k, D + 64)
                k = gl.permute(gl.reshape(k, [16, 4, D // 32, 2, 2, 2]), [2, 3, 4, 1, 5, 0])
                k = gl.convert_layout(gl.reshape(k, [D, 16]), OPERAND_B, assert_trivial=True)
                s = mma_v2(q_raw, k, gl.full([16, 16], 0.0, gl.float32, MMA))
                s = drop_rows(s, R, 16)
                pos = w_page * WINDOW_PAGE + gl.arange(0, 16, layout=gl.SliceLayout(0, W))
                m_pos = (pos < seq_len) & ((pos < sink_tokens) | (pos >= computed - retained))
                # 0 <= distance < bound, in one unsigned comparison.
                bound = gl.where(m_pos, gl.where(pos < sink_tokens, NEVER, recent_tokens), 0).to(gl.uint32)
                distance = (gl.expand_dims(w_pos, 1) - gl.expand_dims(pos, 0)).to(gl.uint32)
                mask = distance < gl.expand_dims(bound, 0)
                w_peak = gl.convert_layout(peak, gl.SliceLayout(1, W))
                p, alpha, w_peak, total = _softmax(s, flat, mask, w_peak, total, True, R, 16)
                peak = gl.convert_layout(w_peak, gl.SliceLayout(1, P))
                weight = gl.convert_layout(gl.permute(p.to(k.dtype), [1, 0]), OPERAND_B, assert_trivial=True)
                acc0 = mma_v2(v0, weight, acc0 * alpha)
                if D == 128:
                    if R == 16:
                        v1 = _value_rows(p_rows, s_wt, m_k, D + 64)
                    acc1 = mma_v2(v1, weight, acc1 * alpha)
                low = low * alpha

    # The minima's rows 0-7 belong to the first group of channels, 8-15 to the second.
    low0, low1 = gl.split(gl.permute(gl.reshape(low, [2, 8, R]), [1, 2, 0]))
    i_e = gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
    i_p = row_0 + gl.arange(0, R, layout=gl.SliceLayout(0, MMA))
    at = (i_item.to(gl.int64) * H + i_h) * ROWS + i_p
    p_part = p_acc + gl.expand_dims(at, 0) * D + gl.expand_dims(i_e, 1)
    m_part = gl.expand_dims(i_p < ROWS, 0).broadcast_to([64, R])
    low0 = gl.reshape(gl.permute(repeat8(low0), [2, 3, 4, 0, 1]), [64, R])
    gl.store(p_part, acc0 + gl.convert_layout(low0, MMA), mask=m_part)
    if D == 128:
        low1 = gl.reshape(gl.permute(repeat8(low1), [2, 3, 4, 0, 1]), [64, R])
        gl.store(p_part + 64, acc1 + gl.convert_layout(low1, MMA), mask=m_part)
    at = (i_item.to(gl.int64) * H + i_h) * ROWS + i_out
    gl.store(p_peak + at, peak, mask=i_out < ROWS)
    sums = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, P))
    gl.store(p_total + at, sums, mask=i_out < ROWS)


@gluon.jit(
    do_not_specialize=["o_items", "s_btr", "s_wtr"], do_not_specialize_on_alignment=["p_body_table", "p_window_table"]
)
def decode_gluon_kernel(
    p_q, p_body, p_window, p_body_table, p_window_table, p_plan, p_acc, p_peak, p_total,
    s_qt, s_qh, s_bb, s_bh, s_wp, s_wh, s_wt, s_btr, s_wtr, o_items, scale, sink_tokens, recent_tokens, retained,
    q_len: gl.constexpr, H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, R: gl.constexpr, LAST: gl.constexpr,
    WINDOW_PAGE: gl.constexpr, STAGES: gl.constexpr, EXACT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One program: one item, one KV head, R rows; LAST (8 or 16) rows in the last tile of an item."""
    if PDL:  # the merge may set up while this runs
        launch_dependents()
    row_0 = gl.program_id(2) * R
    if gl.load(p_plan + o_items + 4 * gl.program_id(0)) < 0:  # fewer items than the budget
        return
    if LAST == R or row_0 + R < G * q_len:
        _decode_rows(
            row_0, p_q, p_body, p_window, p_body_table, p_window_table, p_plan, p_acc, p_peak, p_total,
            s_qt, s_qh, s_bb, s_bh, s_wp, s_wh, s_wt, s_btr, s_wtr, o_items, scale, sink_tokens, recent_tokens,
            retained, q_len, H, G, D, R, WINDOW_PAGE, STAGES, EXACT,
        )  # fmt: skip
    else:
        _decode_rows(
            row_0, p_q, p_body, p_window, p_body_table, p_window_table, p_plan, p_acc, p_peak, p_total,
            s_qt, s_qh, s_bb, s_bh, s_wp, s_wh, s_wt, s_btr, s_wtr, o_items, scale, sink_tokens, recent_tokens,
            retained, q_len, H, G, D, LAST, WINDOW_PAGE, STAGES, EXACT,
        )  # fmt: skip


# -- launcher -----------------------------------------------------------------
def available(layout: PageLayout, soft_cap: float, device: torch.device) -> bool:
    """Whether this kernel serves a launch."""
    return serves(HEAD_SIZES, layout, soft_cap, device)


STAGES = 2
"""Pages in the ring."""

EXACT_KEYS = True
"""Take the base off key codes too, rather than off the scores."""


def launch(
    q, body, window, body_table, window_table, plan, acc, peak, total, layout, *,
    q_len, scale, sink_tokens, recent_tokens, retained, soft_cap,
) -> None:  # fmt: skip
    """As `decode._launch`; shapes are checked by `decode.decode`."""
    del soft_cap
    budget, heads, rows, _ = acc.shape
    tile = 8 if rows <= 8 else 16
    last = 8 if 0 < rows % tile <= 8 else tile
    decode_gluon_kernel[(budget, heads, triton.cdiv(rows, tile))](
        q, body.view(torch.int16), window, body_table, window_table, plan, acc, peak, total,
        q.stride(0), q.stride(1), body.stride(0) // 2, body.stride(1) // 2,
        window.stride(0), window.stride(1), window.stride(2), body_table.stride(0), window_table.stride(0),
        plan.shape[0] - 4 * budget, scale, sink_tokens, recent_tokens, retained,
        q_len=q_len, H=heads, G=rows // q_len, D=layout.head_size, R=tile, LAST=last,
        WINDOW_PAGE=window_page_tokens(q.element_size()), STAGES=STAGES, EXACT=EXACT_KEYS, PDL=overlaps(q.device),
        num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
