# SPDX-License-Identifier: Apache-2.0
"""The fast path of decode: the same pages, plan and partials as `decode`, explicit layouts.

One warp is one program and serves 8, 16 or 24 query rows. With mma.m16n8k16 (fragments hold rows g, g + 8
of A and columns of B by lane; see `gluon_tiles`):

* S^T = K q^T has the codes as A and 8 query rows a tile as B: no row is padding beyond a
  multiple of 8, and every tile uses the codes that were unpacked once.
* Row statistics then lie along the accumulator's columns, as O^T = V^T P^T wants them.
  Only the probabilities have to change places within 8 x 8 blocks: one `movmatrix` each.
* Codes are multiplied as they lie: four bits of the mantissa are a subnormal fp16 number, a
  code in units of 2^-24 or 2^-20. Masks are all that unpacking takes; units go to the queries,
  the scores' factor, and, at the end of the packed pages, the sums.
* The key minimum gives one number a row, from one more product with queries as A; it is added
  to the row's maximum, never to the scores. Value minima and a row of ones, which sums the
  probabilities, are half an A tile more.
* Exponents are relative to a peak that scores may exceed a little, so that most pages need no
  reduction over lanes and scale nothing anew.
* Queries wait in shared memory, in fragment order, since registers are short. Pages come
  by cp.async; keys and values are waited for, and their place refilled, separately.

`assert_trivial` makes the compiler prove that a layout conversion moves nothing.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from bie_kernels.gluon_tiles import (
    MMA,
    PAGE,
    launch_dependents,
    page_ranges,
    program_id_x,
    rows_layout,
    serves,
    window_page_of,
    window_range,
)
from bie_kernels.keys_pages import (
    add_page_values,
    barrier,
    issue_keys,
    issue_values,
    page_scores,
    page_weights,
    window_weights,
)
from bie_kernels.keys_queries import load_queries, query_tile, store_queries
from bie_kernels.keys_tiles import (
    MINIMA,
    STATS,
    late_columns,
    late_rows,
    one_row,
    out_of_units,
    scaled_columns,
    small_mma,
)
from bie_kernels.keys_window import add_window_values, window_keys, window_values
from bie_kernels.launches import Launches
from bie_kernels.layout import PageLayout, window_page_tokens
from bie_kernels.tiles import LOG2E, MASKED_SCORE, NEGATIVE, NEVER
from bie_kernels.tuning import keys_tile, overlaps

HEAD_SIZES = (64, 96, 128, 192, 256)
"""Key and value head sizes of this kernel."""


@gluon.jit
def _positions(row_0, computed, G: gl.constexpr, T: gl.constexpr):
    """Positions of the query rows, [8] a tile."""
    q_pos = ()
    for tile in gl.static_range(T):
        q_pos = q_pos + (computed + (row_0 + 8 * tile + gl.arange(0, 8, layout=gl.SliceLayout(0, MMA))) // G,)
    return q_pos


@gluon.jit
def _item(p_plan, o_items, q_len: gl.constexpr):
    """This program's item: (request, first unit, end unit, seq_len, computed). Read anew where registers are short."""
    p_item = p_plan + o_items + 4 * program_id_x()
    seq_len = gl.load(p_item + 3)
    return gl.load(p_item), gl.load(p_item + 1), gl.load(p_item + 2), seq_len, seq_len - q_len


@gluon.jit
def _decode_rows(
    row_0, p_q, p_body, p_window, p_body_table, p_window_table, p_plan, p_acc, p_peak, p_total,
    s_qt, s_qh, s_bb, s_bh, s_wp, s_wh, s_wt, s_btr, s_wtr, o_items, scale, sink_tokens, recent_tokens, retained,
    q_len: gl.constexpr, H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, T: gl.constexpr,
    WINDOW_PAGE: gl.constexpr, STAGES: gl.constexpr, LOAD: gl.constexpr, VB: gl.constexpr,
):  # fmt: skip
    """T tiles of 8 rows (query token, head of the group) of one item and KV head, from row_0 on."""
    HALF: gl.constexpr = 64 if D == 64 else 128
    PARTS: gl.constexpr = (D + HALF - 1) // HALF
    GROUPS: gl.constexpr = (D + 63) // 64
    ROWS: gl.constexpr = G * q_len
    dtype: gl.constexpr = p_q.dtype.element_ty
    i_item = gl.program_id(0)
    i_h = gl.program_id(1)
    i_r, u_first, u_last, seq_len, computed = _item(p_plan, o_items, q_len)
    sink_end, body_end, pages, window_sinks, window_start, window_pages = page_ranges(
        computed, seq_len, sink_tokens, recent_tokens, WINDOW_PAGE
    )
    p_table = p_body_table + i_r * s_btr
    p_head = p_body + i_h * s_bh  # int16 elements, as the strides
    log_scale = scale * LOG2E

    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TABLE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ring_k = gl.allocate_shared_memory(gl.int16, [STAGES * PARTS, 16 * HALF], FLAT)
    ring_km = gl.allocate_shared_memory(gl.int16, [STAGES, 8 * PARTS, HALF // 4], TABLE)
    ring_v = gl.allocate_shared_memory(gl.int16, [STAGES * (D // VB), 16 * VB], FLAT)
    ring_vs = gl.allocate_shared_memory(gl.int16, [STAGES, 64 * (4 if GROUPS == 3 else GROUPS)], FLAT)
    ring_vm = gl.allocate_shared_memory(gl.int16, [STAGES, 8 * 64], FLAT)
    ring_f = gl.allocate_shared_memory(gl.float32, [T, 8], FLAT)
    ring_low = gl.allocate_shared_memory(gl.float32, [T, 8, 8], TABLE)
    ring_q = gl.allocate_shared_memory(gl.int16, [T, 8 * HALF * PARTS], FLAT)
    # Row 4 of every stage's minima sums the probabilities; nothing else writes it.
    i_one = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(1, MINIMA)), 1)
    ones = gl.where(i_one == 4, 0x3C00, 0).to(gl.int16).broadcast_to([8, 64])
    for i in gl.static_range(STAGES):
        ring_vm.index(i).reshape([8, 64]).store(ones)
    barrier()  # before copies write the other rows

    # 1. INT4 for every query.
    body = body_end - sink_end
    first = sink_end + gl.minimum(u_first, body)
    last = sink_end + gl.minimum(u_last, body)
    # What waits for memory goes first: queries and pages are under way together.
    queries = load_queries(p_q, row_0, i_r, i_h, s_qt, s_qh, q_len, G, D, HALF, PARTS, T, False)
    if first < last:
        for i in gl.static_range(STAGES):
            page = gl.minimum(first + i, last - 1)
            p_page = p_head + gl.load(p_table + page).to(gl.int64) * s_bb
            if first + i < last:
                issue_keys(p_page, ring_k, ring_km, i, 0, D, HALF, PARTS)
            async_copy.commit_group()
            if first + i < last:
                issue_values(p_page, ring_v, ring_vs, ring_vm, i, 0, D, VB)
            async_copy.commit_group()
    store_queries(queries, ring_q, ring_f, 0, log_scale, HALF, PARTS, T, False)
    acc = ()
    peak = ()
    for _ in gl.static_range(T * (D // VB)):
        acc = acc + (gl.full([VB, 8], 0.0, gl.float32, MMA),)
    for i in gl.static_range(T):
        ring_low.index(i).store(gl.full([8, 8], 0.0, gl.float32, STATS))
        peak = peak + (gl.full([8, 8], NEGATIVE, gl.float32, STATS),)
    if first < last:
        following = gl.load(p_table + gl.minimum(first + STAGES, last - 1)).to(gl.int64)
        stage = 0
        for page in range(first, last):
            p_next = p_head + following * s_bb
            following = gl.load(p_table + gl.minimum(page + STAGES + 1, last - 1)).to(gl.int64)
            async_copy.wait_group(2 * STAGES - 1)
            scores, bias = page_scores(ring_q, ring_k, ring_km, stage, (), D, HALF, PARTS, T, LOAD)
            if page + STAGES < last:
                issue_keys(p_next, ring_k, ring_km, stage, 0, D, HALF, PARTS)
            async_copy.commit_group()
            weights, peak, acc = page_weights(scores, bias, ring_f, ring_low, peak, acc, D, T, VB)
            async_copy.wait_group(2 * STAGES - 1)
            acc = add_page_values(weights, acc, ring_low, ring_v, ring_vs, ring_vm, stage, D, T, VB)
            if page + STAGES < last:
                issue_values(p_next, ring_v, ring_vs, ring_vm, stage, 0, D, VB)
            async_copy.commit_group()
            if STAGES > 1:
                stage = gl.where(stage + 1 >= STAGES, 0, stage + 1)
        async_copy.wait_group(0)

    # 2. INT4 for some queries or positions.
    i_r, u_first, u_last, seq_len, computed = _item(p_plan, o_items, q_len)
    sink_end, body_end, pages, window_sinks, window_start, window_pages = page_ranges(
        computed, seq_len, sink_tokens, recent_tokens, WINDOW_PAGE
    )
    body = body_end - sink_end
    edges = pages - body
    p_table = p_body_table + i_r * s_btr
    p_window_row = p_window_table + i_r * s_wtr
    q_pos = _positions(row_0, computed, G, T)
    for u in range(gl.maximum(u_first, body) - body, gl.minimum(u_last - body, edges)):
        page = gl.where(u < sink_end, u, u + body)
        pos = page * PAGE + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
        entry = gl.load(p_window_row + pos // WINDOW_PAGE, mask=pos < computed, other=0)
        held = (pos >= computed) | ((entry > 0) & ((pos < sink_tokens) | (pos >= computed - retained)))
        block = gl.load(p_table + page)
        zero = (block >> 30) * 2048  # the compiler cannot know: addresses are computed here, not kept from part 1
        block = block.to(gl.int64)
        reaches = (page * PAGE + recent_tokens <= seq_len - 1) | (gl.min(held.to(gl.int32), 0) == 0)
        if reaches & (block > 0):
            issue_keys(p_head + block * s_bb, ring_k, ring_km, 0, zero, D, HALF, PARTS)
            issue_values(p_head + block * s_bb, ring_v, ring_vs, ring_vm, 0, zero, D, VB)
            async_copy.commit_group()
            # The first query that reads a token in INT4. Padded rows compute nonsense for themselves.
            least = pos + gl.where(held, gl.where(pos < sink_tokens, NEVER, recent_tokens), 0)
            async_copy.wait_group(0)
            scores = ()  # masked before the products: no mask takes registers while keys are unpacked
            for tile in gl.static_range(T):
                reads = gl.expand_dims(q_pos[tile], 0) >= gl.expand_dims(least, 1)
                scores = scores + (gl.where(reads, 0.0, MASKED_SCORE),)
            scores, bias = page_scores(ring_q, ring_k, ring_km, 0, scores, D, HALF, PARTS, T, LOAD)
            weights, peak, acc = page_weights(scores, bias, ring_f, ring_low, peak, acc, D, T, VB)
            # Whole pages only, so that every value was written: recent_tokens is at least a page, and where a
            # 16-bit copy is missing before `computed`, the page was complete when it was dropped or hit.
            acc = add_page_values(weights, acc, ring_low, ring_v, ring_vs, ring_vm, 0, D, T, VB)

    new_acc = ()
    for i in gl.static_range(T * (D // VB)):
        new_acc = new_acc + (out_of_units(acc[i], VB),)
    acc = new_acc  # the window's values have no units

    # 3. The 16-bit window, one window page a step, queries in their own dtype.
    i_r, u_first, u_last, seq_len, computed = _item(p_plan, o_items, q_len)
    sink_end, body_end, pages, window_sinks, window_start, window_pages = page_ranges(
        computed, seq_len, sink_tokens, recent_tokens, WINDOW_PAGE
    )
    p_window_row = p_window_table + i_r * s_wtr
    w_first, w_last = window_range(u_first, u_last, pages, window_sinks + window_pages - window_start)
    if w_first < w_last:
        for tile in gl.static_range(T):  # one at a time: registers are short
            rows = load_queries(p_q, row_0 + 8 * tile, i_r, i_h, s_qt, s_qh, q_len, G, D, HALF, PARTS, 1, True)
            store_queries(rows, ring_q, ring_f, tile, log_scale, HALF, PARTS, 1, True)
        q_pos = _positions(row_0, computed, G, T)
        w_row = late_rows(rows_layout(8, 16))
        w_ones = gl.where(w_row == 4, 1.0, 0.0).to(dtype).broadcast_to([8, 16])
        for u in range(w_first, w_last):
            w_page = window_page_of(u, window_sinks, window_start)
            entry = gl.load(p_window_row + w_page).to(gl.int64)
            if entry > 0:
                p_rows = p_window + entry * s_wp + i_h * s_wh
                pos = w_page * WINDOW_PAGE + gl.arange(0, 16, layout=gl.SliceLayout(1, MMA))
                m_key = (pos < seq_len) & ((pos < sink_tokens) | (pos >= computed - retained))
                bound = gl.where(m_key, gl.where(pos < sink_tokens, NEVER, recent_tokens), 0).to(gl.uint32)
                scores = ()
                for _ in gl.static_range(T):
                    scores = scores + (gl.full([16, 8], 0.0, gl.float32, MMA),)
                for chunk in gl.static_range(D // 32):
                    keys = window_keys(p_rows, s_wt, m_key, chunk)
                    new = ()
                    for tile in gl.static_range(T):
                        new = new + (mma_v2(keys, query_tile(ring_q, tile, chunk, dtype), scores[tile]),)
                    scores = new
                weights, alpha, peak = window_weights(scores, log_scale, q_pos, pos, bound, peak, T, 16, dtype)
                new_acc = ()
                for block in gl.static_range(D // VB):
                    parts = ()
                    for i in gl.static_range(VB // 16):
                        parts = parts + (window_values(p_rows, s_wt, m_key, D + block * VB + 16 * i),)
                    for tile in gl.static_range(T):
                        x = scaled_columns(acc[block * T + tile], alpha[tile], VB)
                        new_acc = new_acc + (add_window_values(parts, weights[tile], x, VB),)
                for tile in gl.static_range(T):
                    low = ring_low.index(tile)
                    low.store(small_mma(w_ones, weights[tile], low.load(STATS) * alpha[tile]))
                acc = new_acc

    i_row = late_rows(STATS)
    for tile in gl.static_range(T):
        low = ring_low.index(tile).load(STATS)
        minima = ()
        for group in gl.static_range(GROUPS):
            minimum = gl.convert_layout(one_row(low, i_row, group), gl.SliceLayout(0, MMA))
            minima = minima + (gl.expand_dims(minimum, 0),)
        top = gl.expand_dims(gl.max(peak[tile], 0), 0).broadcast_to([8, 8])
        i_s = gl.expand_dims(row_0 + 8 * tile + late_columns(STATS), 0).broadcast_to([8, 8])
        at_s = (i_item.to(gl.int64) * H + i_h) * ROWS + i_s
        gl.store(p_peak + at_s, top, mask=(i_row == 0) & (i_s < ROWS))
        gl.store(p_total + at_s, low, mask=(i_row == 4) & (i_s < ROWS))
        i_p = row_0 + 8 * tile + late_columns(MMA)
        at = (i_item.to(gl.int64) * H + i_h) * ROWS + i_p
        m_part = gl.expand_dims(i_p < ROWS, 0).broadcast_to([VB, 8])
        for block in gl.static_range(D // VB):
            i_e = block * VB + gl.arange(0, VB, layout=gl.SliceLayout(1, MMA))
            x = acc[block * T + tile] + minima[block * VB // 64]
            gl.store(p_acc + gl.expand_dims(at, 0) * D + gl.expand_dims(i_e, 1), x, mask=m_part)


@gluon.jit(
    do_not_specialize=["o_items", "s_btr", "s_wtr"],
    do_not_specialize_on_alignment=["p_body_table", "p_window_table", "p_peak", "p_total"],
)
def decode_keys_kernel(
    p_q, p_body, p_window, p_body_table, p_window_table, p_plan, p_acc, p_peak, p_total,
    s_qt, s_qh, s_bb, s_bh, s_wp, s_wh, s_wt, s_btr, s_wtr, o_items, scale, sink_tokens, recent_tokens, retained,
    q_len: gl.constexpr, H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, T: gl.constexpr, LAST: gl.constexpr,
    WINDOW_PAGE: gl.constexpr, STAGES: gl.constexpr, LOAD: gl.constexpr, VB: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One program: one item, one KV head, T tiles of 8 rows; LAST tiles in the last program of an item."""
    if PDL:  # the merge may set up while this runs
        launch_dependents()
    row_0 = 0
    if G * q_len > 8 * T:  # known when compiling: a row_0 of 0 takes no register
        row_0 = gl.program_id(2) * (8 * T)
    if gl.load(p_plan + o_items + 4 * gl.program_id(0)) < 0:  # fewer items than the budget
        return
    if LAST == T or row_0 + 8 * T < G * q_len:
        _decode_rows(
            row_0, p_q, p_body, p_window, p_body_table, p_window_table, p_plan, p_acc, p_peak, p_total,
            s_qt, s_qh, s_bb, s_bh, s_wp, s_wh, s_wt, s_btr, s_wtr, o_items, scale, sink_tokens, recent_tokens,
            retained, q_len, H, G, D, T, WINDOW_PAGE, STAGES, LOAD, VB,
        )  # fmt: skip
    else:
        _decode_rows(
            row_0, p_q, p_body, p_window, p_body_table, p_window_table, p_plan, p_acc, p_peak, p_total,
            s_qt, s_qh, s_bb, s_bh, s_wp, s_wh, s_wt, s_btr, s_wtr, o_items, scale, sink_tokens, recent_tokens,
            retained, q_len, H, G, D, LAST, WINDOW_PAGE, STAGES, LOAD, VB,
        )  # fmt: skip


launch_decode_keys = Launches(decode_keys_kernel)


# -- launcher -----------------------------------------------------------------
def available(layout: PageLayout, soft_cap: float, device: torch.device) -> bool:
    """Whether this kernel serves a launch."""
    return serves(HEAD_SIZES, layout, soft_cap, device)


def launch(
    q, body, window, body_table, window_table, plan, acc, peak, total, layout, *,
    q_len, scale, sink_tokens, recent_tokens, retained, soft_cap,
) -> None:  # fmt: skip
    """As `decode._launch`; shapes are checked by `decode.decode`."""
    del soft_cap
    budget, heads, rows, _ = acc.shape
    tile = keys_tile(rows, layout.head_size, q.device)
    launch_decode_keys[(budget, heads, tile.programs)](
        q, body.view(torch.int16), window, body_table, window_table, plan, acc, peak, total,
        q.stride(0), q.stride(1), body.stride(0) // 2, body.stride(1) // 2,
        window.stride(0), window.stride(1), window.stride(2), body_table.stride(0), window_table.stride(0),
        plan.shape[0] - 4 * budget, scale, sink_tokens, recent_tokens, retained,
        q_len=q_len, H=heads, G=rows // q_len, D=layout.head_size, T=tile.tiles, LAST=tile.last,
        WINDOW_PAGE=window_page_tokens(q.element_size()), STAGES=tile.stages, LOAD=2, VB=32, PDL=overlaps(q.device),
        num_warps=1, enable_fp_fusion=True, maxnreg=255,  # else ptxas aims for 12 warps on some cards, and spills
    )  # fmt: skip
