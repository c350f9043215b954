# SPDX-License-Identifier: Apache-2.0
"""The fast path of decode: the same plan, pages and partials as `decode`, explicit layouts.

One warp is one program and serves 8, 16 or 24 query rows. With mma.m16n8k16 (fragments
hold rows g, g + 8 of A and columns of B by lane; see `gluon_tiles`):

* S^T = K q^T has the codes as A and 8 query rows a tile as B: no row is padding beyond a
  multiple of 8, and every tile uses the codes that were unpacked once.
* Row statistics then lie along the accumulator's columns, as O^T = V^T P^T wants them.
  Only the probabilities have to change places within 8 x 8 blocks: one `movmatrix` each.
* The key minimum gives one number a row, from one more product with equal rows of A; it
  is added to the row's maximum, never to the scores. Value minima are one more A tile
  whose rows 0-7 and 8-15 repeat those of two groups.
* Queries wait in shared memory, in fragment order, since registers are short. Pages come
  by cp.async; keys and values are waited for, and their place refilled, separately.

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
    KEY_META,
    MINIMA,
    MMA,
    OPERAND_A,
    OPERAND_B,
    PAGE,
    TOKEN_META,
    WINDOW_KEYS,
    WINDOW_VALUES,
    blocks_layout,
    key_operand,
    meta_chunks,
    query_operand,
    rows_layout,
    slots_to_tokens,
    split_words,
    transposed,
    value_tile,
    word_rows,
)
from bie_kernels.layout import PageLayout, window_page_tokens
from bie_kernels.tiles import page_ranges as _page_ranges
from bie_kernels.tiles import window_range as _window_range
from bie_kernels.tuning import capability, gluon_tile, interpreted, overlaps

HEAD_SIZES = (64, 96, 128, 192, 256)
"""Key and value head sizes of this kernel; others take the plain one."""

_LOG2E = gl.constexpr(1.4426950408889634)
_NEGATIVE = gl.constexpr(-1.0e30)
_NEVER = gl.constexpr(1 << 30)  # a distance between positions beyond any context
_STATS = gl.constexpr(rows_layout(8, 8))  # per-row numbers as [8, 8]: eight equal rows, query rows along columns
page_ranges = gluon.jit(_page_ranges.fn)
window_range = gluon.jit(_window_range.fn)
# Triton 3.9 renamed the copy.
_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


# -- per-row numbers ----------------------------------------------------------
@gluon.jit
def _over_blocks(x, N: gl.constexpr):
    """[8, 8] statistics -> [1, 8, 8], to go with [N // 8, 8, 8]."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(0, blocks_layout(N)), assert_trivial=True), 0)


@gluon.jit
def _blocks(x, N: gl.constexpr):
    """Accumulator [N, 8] -> [N // 8, 8, 8]."""
    return gl.convert_layout(gl.reshape(x, [N // 8, 8, 8]), blocks_layout(N), assert_trivial=True)


@gluon.jit
def _scaled(x, alpha, N: gl.constexpr):
    """Accumulator [N, 8], columns times alpha."""
    y = gl.reshape(_blocks(x, N) * _over_blocks(alpha, N), [N, 8])
    return gl.convert_layout(y, MMA, assert_trivial=True)


@gluon.jit
def _small_mma(a, b, acc):
    """acc [8, 8] + a [8, K] b: half an MMA, whose other half never takes a register."""
    a = gl.reshape(gl.permute(gl.join(a, gl.zeros_like(a)), [2, 0, 1]), [16, a.shape[1]])
    c = gl.reshape(gl.permute(gl.join(acc, gl.zeros_like(acc)), [2, 0, 1]), [16, 8])
    c = gl.convert_layout(c, MMA, assert_trivial=True)
    c = _blocks(mma_v2(gl.convert_layout(a, OPERAND_A, assert_trivial=True), b, c), 16)
    c, _ = gl.split(gl.permute(c, [1, 2, 0]))
    return gl.convert_layout(c, _STATS, assert_trivial=True)


@gluon.jit
def _sum_row(low, row: gl.constexpr):
    """One row of [8, 8], [8]."""
    i = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(1, _STATS)), 1)
    return gl.sum(gl.where(i == row, low, 0.0), 0)


@gluon.jit
def _softmax(s, factor, bias, mask, peak, N: gl.constexpr, MASKED: gl.constexpr):
    """Online softmax of (s + bias) times factor, s [N keys, 8 rows]: (p as [N // 8, 8, 8], alpha, peak)."""
    shift = bias * factor
    if MASKED:
        s = gl.where(mask, s, _NEGATIVE)
    s = _blocks(s, N)
    top = gl.convert_layout(gl.max(s, 0), _STATS, assert_trivial=True)
    top = gl.expand_dims(gl.max(top, 0), 0).broadcast_to([8, 8])
    new_peak = gl.maximum(peak, top * factor + shift)  # the factor is positive
    alpha = gl.exp2(peak - new_peak)
    p = gl.exp2(s * _over_blocks(factor, N) + _over_blocks(shift - new_peak, N))
    if MASKED:
        p = gl.where(_blocks(mask, N), p, 0.0)
    return p, alpha, new_peak


@gluon.jit
def _weights(p, N: gl.constexpr):
    """16-bit probabilities [N // 8, 8 keys, 8 rows] -> B operand [N keys, 8 rows]."""
    y = gl.reshape(gl.permute(transposed(p), [0, 2, 1]), [N, 8])
    return gl.convert_layout(y, OPERAND_B, assert_trivial=True)


# -- pages --------------------------------------------------------------------
@gluon.jit
def _issue_keys(p_page, ring_k, ring_km, stage, D: gl.constexpr, HALF: gl.constexpr, PARTS: gl.constexpr):
    """Start the copy of a page's key codes and metadata: PARTS parts of HALF channels, the last one padded."""
    i = gl.arange(0, 16 * HALF, layout=CHUNKS)
    for part in gl.static_range(PARTS):
        column = part * (HALF // 4) + i % (HALF // 4)
        p_codes = p_page + (i // (HALF // 4)) * (D // 4) + column
        if D % HALF == 0:
            _copy(ring_k.index(stage * PARTS + part), p_codes)
        else:
            _copy(ring_k.index(stage * PARTS + part), p_codes, column < D // 4)
    META: gl.constexpr = meta_chunks(HALF // 4)
    row = gl.expand_dims(gl.arange(0, 8 * PARTS, layout=gl.SliceLayout(1, META)), 1)
    channel = (row % (4 * PARTS)) * (HALF // 4) + gl.expand_dims(
        gl.arange(0, HALF // 4, layout=gl.SliceLayout(0, META)), 0
    )
    p_meta = p_page + 32 * D + (row // (4 * PARTS)) * D + channel
    if D == HALF * PARTS:
        _copy(ring_km.index(stage), p_meta)
    else:
        _copy(ring_km.index(stage), p_meta, channel < D)


@gluon.jit
def _issue_values(p_page, ring_v, ring_vs, ring_vm, stage, D: gl.constexpr, VB: gl.constexpr):
    """Start the copy of a page's value codes, VB channels at a time, and metadata."""
    i = gl.arange(0, 16 * VB, layout=CHUNKS)
    for block in gl.static_range(D // VB):
        _copy(ring_v.index(stage * (D // VB) + block), p_page + 16 * D + block * (16 * VB) + i)
    GROUPS: gl.constexpr = (D + 63) // 64
    META: gl.constexpr = meta_chunks(64)
    PADDED: gl.constexpr = ring_vs.shape[1] // 64
    i_s = gl.arange(0, 64 * PADDED, layout=CHUNKS)
    i_m = 64 * gl.expand_dims(gl.arange(0, PADDED, layout=gl.SliceLayout(1, META)), 1)
    i_m = i_m + gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, META)), 0)
    minima = ring_vm.index(stage).slice(0, PADDED, 0)
    if GROUPS == PADDED:
        _copy(ring_vs.index(stage), p_page + 34 * D + i_s)
        _copy(minima, p_page + 34 * D + 64 * GROUPS + i_m)
    else:
        _copy(ring_vs.index(stage), p_page + 34 * D + i_s, i_s < 64 * GROUPS)
        _copy(minima, p_page + 34 * D + 64 * GROUPS + i_m, i_m < 64 * GROUPS)


@gluon.jit
def _key_meta(ring_km, stage, row: gl.constexpr, chunk: gl.constexpr):
    """fp16 metadata of a chunk of 32 channels, in MMA order, in thread t's registers."""
    x = ring_km.index(stage).slice(row, 4, 0).slice(8 * chunk, 8, 1).load(KEY_META)
    x = gl.reshape(x.to(gl.float16, bitcast=True), [4, 4, 2])  # t, (i1, i0), e
    return gl.reshape(gl.permute(x, [1, 0, 2]), [32])


@gluon.jit
def _query(ring_q, tile: gl.constexpr, chunk: gl.constexpr, dtype: gl.constexpr):
    """B operand [32 channels, 8 rows] of a tile."""
    return query_operand(ring_q.index(tile).slice(256 * chunk, 256).load(CHUNKS).to(dtype, bitcast=True))


@gluon.jit
def _scores(
    ring_q, ring_k, ring_km, stage,
    D: gl.constexpr, HALF: gl.constexpr, PARTS: gl.constexpr, T: gl.constexpr, LOAD: gl.constexpr,
):  # fmt: skip
    """Products of the codes with the scaled queries, T of [64 keys, 8 rows], and what the minima add, T of [8, 8]."""
    scores = ()
    bias = ()
    for _ in gl.static_range(T):
        scores = scores + (gl.full([PAGE, 8], 0.0, gl.float32, MMA),)
        bias = bias + (gl.full([8, 8], 0.0, gl.float32, _STATS),)
    WORDS: gl.constexpr = HALF // 32
    for part in gl.static_range(PARTS):
        codes = ring_k.index(stage * PARTS + part).reshape([4 * PAGE, HALF // 16])  # [token and t, its words]
        words = ()
        for word in gl.static_range(WORDS):
            if 128 * part + 8 * word < D:
                if word % LOAD == 0:
                    if T > 1 and word > 0:
                        _barrier()
                    words = split_words(codes.slice(2 * word, 2 * LOAD, 1).load(word_rows(LOAD)), LOAD)
                scale = _key_meta(ring_km, stage, 4 * part, word)
                minimum = _key_meta(ring_km, stage, 4 * (PARTS + part), word)
                scale = gl.convert_layout(scale, gl.SliceLayout(1, OPERAND_B), assert_trivial=True)
                minimum = gl.convert_layout(minimum, gl.SliceLayout(0, rows_layout(8, 32)), assert_trivial=True)
                minima = gl.expand_dims(minimum, 0).broadcast_to([8, 32])
                keys = key_operand(words[word % LOAD])
                new_scores = ()
                new_bias = ()
                for tile in gl.static_range(T):
                    q = _query(ring_q, tile, part * WORDS + word, gl.float16)
                    new_bias = new_bias + (_small_mma(minima, q, bias[tile]),)
                    new_scores = new_scores + (mma_v2(keys, q * gl.expand_dims(scale, 1), scores[tile]),)
                scores = new_scores
                bias = new_bias
    return scores, bias


@gluon.jit
def _add_values(
    weights, alpha, acc, low, ring_v, ring_vs, ring_vm, stage, tokens,
    D: gl.constexpr, T: gl.constexpr, VB: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """acc = acc * alpha + codes.(p * scale); acc is D // VB blocks of T tiles.

    low = low * alpha + p times the minima of the groups (rows 0 to 3) and ones (row 4).
    """
    new_acc = ()
    new_low = ()
    scaled = weights
    for block in gl.static_range(D // VB):
        if T > 1 and block > 0:
            _barrier()
        if (block * VB) % 64 == 0:
            scale = ring_vs.index(stage).slice(block * VB, 64).load(TOKEN_META)
            scale = scale.to(gl.float16, bitcast=True)
            if MASKED:  # unwritten values: 0 * NaN is NaN
                scale = gl.where(_slot_token(gl.arange(0, 64, layout=TOKEN_META)) < tokens, scale, 0.0).to(gl.float16)
            scale = gl.expand_dims(slots_to_tokens(scale, gl.SliceLayout(1, OPERAND_B)), 1)
            scaled = ()
            for tile in gl.static_range(T):
                scaled = scaled + (weights[tile] * scale,)
        values = value_tile(ring_v.index(stage * (D // VB) + block).load(CHUNKS), VB)
        for tile in gl.static_range(T):
            new_acc = new_acc + (mma_v2(values, scaled[tile], _scaled(acc[block * T + tile], alpha[tile], VB)),)
    minima = ring_vm.index(stage).load(MINIMA).to(gl.float16, bitcast=True)
    if MASKED:
        written = _slot_token(gl.arange(0, 64, layout=gl.SliceLayout(0, MINIMA))) < tokens
        minima = gl.where(gl.expand_dims(written, 0), minima, 0.0).to(gl.float16)
    minima = gl.permute(gl.reshape(minima, [8, 4, 4, 2, 2]), [0, 2, 3, 1, 4])  # row, t, x, i1, e
    minima = gl.convert_layout(gl.reshape(minima, [8, PAGE]), rows_layout(8, PAGE), assert_trivial=True)
    for tile in gl.static_range(T):
        new_low = new_low + (_small_mma(minima, weights[tile], low[tile] * alpha[tile]),)
    return new_acc, new_low


@gluon.jit
def _softmax_tiles(
    scores, bias, ring_f, log_scale, q_pos, pos, bound, peak, T: gl.constexpr, N: gl.constexpr, MASKED: gl.constexpr,
    dtype: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """`_softmax` of every tile: (B operands, alphas, peaks).

    A key counts for queries from position `bound` on (MASKED), or at a distance from 0 to below `bound` (WINDOW).
    """
    weights = ()
    alphas = ()
    peaks = ()
    for tile in gl.static_range(T):
        mask = None
        if WINDOW:
            mask = (gl.expand_dims(q_pos[tile], 0) - gl.expand_dims(pos, 1)).to(gl.uint32) < gl.expand_dims(bound, 1)
        elif MASKED:
            mask = gl.expand_dims(q_pos[tile], 0) >= gl.expand_dims(bound, 1)
        if WINDOW:
            factor = gl.full([8, 8], 1.0, gl.float32, _STATS) * log_scale
            shift = gl.full([8, 8], 0.0, gl.float32, _STATS)
        else:
            factor = gl.expand_dims(ring_f.index(tile).load(gl.SliceLayout(0, _STATS)), 0).broadcast_to([8, 8])
            shift = bias[tile]
        p, alpha, top = _softmax(scores[tile], factor, shift, mask, peak[tile], N, MASKED)
        weights = weights + (_weights(p.to(dtype), N),)
        alphas = alphas + (alpha,)
        peaks = peaks + (top,)
    return weights, alphas, peaks


@gluon.jit
def _slot_token(i):
    """Token of a page whose metadata is at slot i."""
    return ((i >> 2) & 3) * 16 + ((i >> 1) & 1) * 8 + (i >> 4) * 2 + (i & 1)


# -- queries ------------------------------------------------------------------
@gluon.jit
def _store_queries(
    ring_q, ring_f, p_q, row_0, i_r, i_h, s_qt, s_qh, log_scale, q_len: gl.constexpr, G: gl.constexpr, D: gl.constexpr,
    HALF: gl.constexpr, PARTS: gl.constexpr, T: gl.constexpr, RAW: gl.constexpr,
):  # fmt: skip
    """Query rows to shared memory as B fragments of 32 channels.

    RAW: as they are, 8 consecutive channels a thread of each chunk (16-bit windows).
    Otherwise in the order of the codes, fp16, a power of two taken off each row; ring_f gets
    what the scores must be multiplied with.
    """
    BD: gl.constexpr = HALF * PARTS
    Q: gl.constexpr = rows_layout(8, BD)
    i_k = gl.arange(0, BD, layout=gl.SliceLayout(0, Q))
    if RAW:
        i_c = (i_k & ~31) + 8 * ((i_k >> 1) & 3) + 2 * ((i_k >> 3) & 3) + (i_k & 1)
    else:
        i_c = i_k % HALF
        i_c = (HALF // 4) * ((i_c >> 1) & 3) + 8 * (i_c >> 5) + 2 * ((i_c >> 3) & 3) + (i_c & 1)
        i_c = i_k // HALF * HALF + i_c
    for tile in gl.static_range(T):
        i_row = row_0 + 8 * tile + gl.arange(0, 8, layout=gl.SliceLayout(1, Q))
        o_row = (i_r * q_len + i_row // G).to(gl.int64) * s_qt + (i_h * G + i_row % G) * s_qh
        m_q = gl.expand_dims(i_row < G * q_len, 1) & gl.expand_dims(i_c < D, 0)
        q = gl.load(p_q + gl.expand_dims(o_row, 1) + gl.expand_dims(i_c, 0), mask=m_q, other=0.0)
        if not RAW:
            wide = q.to(gl.float32)
            size = gl.max(gl.abs(wide), 1)
            power = (size.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
            power = gl.where((size > 1.0e-30) & (size < 1.0e30), power, 1.0)
            q = (wide / gl.expand_dims(power, 1)).to(gl.float16)
            ring_f.index(tile).store(power * log_scale)
        bits = gl.reshape(q.to(gl.int16, bitcast=True), [8, BD // 32, 2, 2, 4, 2])  # g, chunk, i1, i0, t, e
        bits = gl.reshape(gl.permute(bits, [1, 0, 4, 2, 3, 5]), [8 * BD])
        ring_q.index(tile).store(bits)


# -- the 16-bit window --------------------------------------------------------
@gluon.jit
def _window_page(u, window_sinks, window_start):
    """Window page of unit u: the sinks' first, then the recent ones."""
    return gl.where(u < window_sinks, u, u - window_sinks + window_start)


@gluon.jit
def _window_keys(p_rows, s_wt, m_key, chunk: gl.constexpr):
    """16-bit keys of 16 tokens, 32 channels -> A operand [16, 32]."""
    i_t = gl.arange(0, 16, layout=gl.SliceLayout(1, WINDOW_KEYS))
    i_c = 32 * chunk + gl.arange(0, 32, layout=gl.SliceLayout(0, WINDOW_KEYS))
    m = gl.expand_dims(gl.convert_layout(m_key, gl.SliceLayout(1, WINDOW_KEYS)), 1).broadcast_to([16, 32])
    k = gl.load(p_rows + gl.expand_dims(i_t, 1) * s_wt + gl.expand_dims(i_c, 0), mask=m, other=0.0)
    k = gl.permute(gl.reshape(k, [16, 4, 2, 2, 2]), [0, 2, 3, 1, 4])  # token, t, i1, i0, e
    return gl.convert_layout(gl.reshape(k, [16, 32]), OPERAND_A, assert_trivial=True)


@gluon.jit
def _window_values(p_rows, s_wt, m_key, channel: gl.constexpr):
    """16-bit values of 16 tokens, 16 channels -> A operand [16 channels, 16 tokens]."""
    i_t = gl.arange(0, 16, layout=gl.SliceLayout(1, WINDOW_VALUES))
    i_c = channel + gl.arange(0, 16, layout=gl.SliceLayout(0, WINDOW_VALUES))
    m = gl.expand_dims(gl.convert_layout(m_key, gl.SliceLayout(1, WINDOW_VALUES)), 1).broadcast_to([16, 16])
    v = gl.load(p_rows + gl.expand_dims(i_t, 1) * s_wt + gl.expand_dims(i_c, 0), mask=m, other=0.0)
    v = transposed(gl.permute(gl.reshape(v, [2, 8, 2, 8]), [0, 2, 1, 3]))  # x, c, channel, token
    v = gl.reshape(gl.permute(v, [1, 2, 0, 3]), [16, 16])
    return gl.convert_layout(v, OPERAND_A, assert_trivial=True)


# -- kernel -------------------------------------------------------------------
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
    p_item = p_plan + o_items + 4 * gl.program_id(0)
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
    log_scale = scale * _LOG2E

    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TABLE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ring_k = gl.allocate_shared_memory(gl.int16, [STAGES * PARTS, 16 * HALF], FLAT)
    ring_km = gl.allocate_shared_memory(gl.int16, [STAGES, 8 * PARTS, HALF // 4], TABLE)
    ring_v = gl.allocate_shared_memory(gl.int16, [STAGES * (D // VB), 16 * VB], FLAT)
    ring_vs = gl.allocate_shared_memory(gl.int16, [STAGES, 64 * (4 if GROUPS == 3 else GROUPS)], FLAT)
    ring_vm = gl.allocate_shared_memory(gl.int16, [STAGES, 8, 64], TABLE)
    ring_f = gl.allocate_shared_memory(gl.float32, [T, 8], FLAT)
    ring_q = gl.allocate_shared_memory(gl.int16, [T, 8 * HALF * PARTS], FLAT)
    _store_queries(ring_q, ring_f, p_q, row_0, i_r, i_h, s_qt, s_qh, log_scale, q_len, G, D, HALF, PARTS, T, False)
    # Row 4 of every stage's minima sums the probabilities; nothing else writes it.
    i_one = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(1, MINIMA)), 1)
    ones = gl.where(i_one == 4, 0x3C00, 0).to(gl.int16).broadcast_to([8, 64])
    for i in gl.static_range(STAGES):
        ring_vm.index(i).store(ones)

    acc = ()
    low = ()
    peak = ()
    for _ in gl.static_range(T * (D // VB)):
        acc = acc + (gl.full([VB, 8], 0.0, gl.float32, MMA),)
    for _ in gl.static_range(T):
        low = low + (gl.full([8, 8], 0.0, gl.float32, _STATS),)
        peak = peak + (gl.full([8, 8], _NEGATIVE, gl.float32, _STATS),)

    # 1. INT4 for every query.
    body = body_end - sink_end
    first = sink_end + gl.minimum(u_first, body)
    last = sink_end + gl.minimum(u_last, body)
    if first < last:
        for i in gl.static_range(STAGES):
            page = gl.minimum(first + i, last - 1)
            p_page = p_head + gl.load(p_table + page).to(gl.int64) * s_bb
            if first + i < last:
                _issue_keys(p_page, ring_k, ring_km, i, D, HALF, PARTS)
            async_copy.commit_group()
            if first + i < last:
                _issue_values(p_page, ring_v, ring_vs, ring_vm, i, D, VB)
            async_copy.commit_group()
        following = gl.load(p_table + gl.minimum(first + STAGES, last - 1)).to(gl.int64)
        stage = 0
        for page in range(first, last):
            p_next = p_head + following * s_bb
            following = gl.load(p_table + gl.minimum(page + STAGES + 1, last - 1)).to(gl.int64)
            async_copy.wait_group(2 * STAGES - 1)
            scores, bias = _scores(ring_q, ring_k, ring_km, stage, D, HALF, PARTS, T, LOAD)
            if page + STAGES < last:
                _issue_keys(p_next, ring_k, ring_km, stage, D, HALF, PARTS)
            async_copy.commit_group()
            weights, alpha, peak = _softmax_tiles(
                scores, bias, ring_f, log_scale, (), None, None, peak, T, PAGE, False, gl.float16, False
            )
            async_copy.wait_group(2 * STAGES - 1)
            acc, low = _add_values(
                weights, alpha, acc, low, ring_v, ring_vs, ring_vm, stage, PAGE, D, T, VB, False
            )
            if page + STAGES < last:
                _issue_values(p_next, ring_v, ring_vs, ring_vm, stage, D, VB)
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
        block = gl.load(p_table + page).to(gl.int64)
        reaches = (page * PAGE + recent_tokens <= seq_len - 1) | (gl.min(held.to(gl.int32), 0) == 0)
        if reaches & (block > 0):
            _issue_keys(p_head + block * s_bb, ring_k, ring_km, 0, D, HALF, PARTS)
            _issue_values(p_head + block * s_bb, ring_v, ring_vs, ring_vm, 0, D, VB)
            async_copy.commit_group()
            # The first query that reads a token in INT4. Padded rows compute nonsense for themselves.
            least = pos + gl.where(held, gl.where(pos < sink_tokens, _NEVER, recent_tokens), 0)
            async_copy.wait_group(0)
            scores, bias = _scores(ring_q, ring_k, ring_km, 0, D, HALF, PARTS, T, LOAD)
            weights, alpha, peak = _softmax_tiles(
                scores, bias, ring_f, log_scale, q_pos, None, least, peak, T, PAGE, True, gl.float16, False
            )
            acc, low = _add_values(
                weights, alpha, acc, low, ring_v, ring_vs, ring_vm, 0, seq_len - page * PAGE, D, T, VB, True
            )

    # 3. The 16-bit window, one window page a step, queries in their own dtype.
    i_r, u_first, u_last, seq_len, computed = _item(p_plan, o_items, q_len)
    sink_end, body_end, pages, window_sinks, window_start, window_pages = page_ranges(
        computed, seq_len, sink_tokens, recent_tokens, WINDOW_PAGE
    )
    p_window_row = p_window_table + i_r * s_wtr
    w_first, w_last = window_range(u_first, u_last, pages, window_sinks + window_pages - window_start)
    if w_first < w_last:
        _store_queries(ring_q, ring_f, p_q, row_0, i_r, i_h, s_qt, s_qh, log_scale, q_len, G, D, HALF, PARTS, T, True)
        q_pos = _positions(row_0, computed, G, T)
        w_row = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(1, rows_layout(8, 16))), 1)
        w_ones = gl.where(w_row == 4, 1.0, 0.0).to(dtype).broadcast_to([8, 16])
        following = gl.load(p_window_row + _window_page(w_first, window_sinks, window_start)).to(gl.int64)
        for u in range(w_first, w_last):
            w_page = _window_page(u, window_sinks, window_start)
            entry = following
            ahead = _window_page(gl.minimum(u + 1, w_last - 1), window_sinks, window_start)
            following = gl.load(p_window_row + ahead).to(gl.int64)
            if entry > 0:
                p_rows = p_window + entry * s_wp + i_h * s_wh
                pos = w_page * WINDOW_PAGE + gl.arange(0, 16, layout=gl.SliceLayout(1, MMA))
                m_key = (pos < seq_len) & ((pos < sink_tokens) | (pos >= computed - retained))
                keys = ()
                for chunk in gl.static_range(D // 32):
                    keys = keys + (_window_keys(p_rows, s_wt, m_key, chunk),)
                bound = gl.where(m_key, gl.where(pos < sink_tokens, _NEVER, recent_tokens), 0).to(gl.uint32)
                scores = ()
                for tile in gl.static_range(T):
                    s = gl.full([16, 8], 0.0, gl.float32, MMA)
                    for chunk in gl.static_range(D // 32):
                        s = mma_v2(keys[chunk], _query(ring_q, tile, chunk, dtype), s)
                    scores = scores + (s,)
                weights, alpha, peak = _softmax_tiles(
                    scores, (), ring_f, log_scale, q_pos, pos, bound, peak, T, 16, True, dtype, True
                )
                new_acc = ()
                new_low = ()
                for block in gl.static_range(D // VB):
                    parts = ()
                    for i in gl.static_range(VB // 16):
                        parts = parts + (_window_values(p_rows, s_wt, m_key, D + block * VB + 16 * i),)
                    for tile in gl.static_range(T):
                        x = _scaled(acc[block * T + tile], alpha[tile], VB)
                        new_acc = new_acc + (_add_window(parts, weights[tile], x, VB),)
                for tile in gl.static_range(T):
                    new_low = new_low + (_small_mma(w_ones, weights[tile], low[tile] * alpha[tile]),)
                acc = new_acc
                low = new_low

    for tile in gl.static_range(T):
        minima = ()
        for group in gl.static_range(GROUPS):
            minimum = gl.convert_layout(_sum_row(low[tile], group), gl.SliceLayout(0, MMA))
            minima = minima + (gl.expand_dims(minimum, 0),)
        top = gl.max(peak[tile], 0)
        total = _sum_row(low[tile], 4)
        i_s = row_0 + 8 * tile + gl.arange(0, 8, layout=gl.SliceLayout(0, _STATS))
        at_s = (i_item.to(gl.int64) * H + i_h) * ROWS + i_s
        gl.store(p_peak + at_s, top, mask=i_s < ROWS)
        gl.store(p_total + at_s, total, mask=i_s < ROWS)
        i_p = row_0 + 8 * tile + gl.arange(0, 8, layout=gl.SliceLayout(0, MMA))
        at = (i_item.to(gl.int64) * H + i_h) * ROWS + i_p
        m_part = gl.expand_dims(i_p < ROWS, 0).broadcast_to([VB, 8])
        for block in gl.static_range(D // VB):
            i_e = block * VB + gl.arange(0, VB, layout=gl.SliceLayout(1, MMA))
            x = acc[block * T + tile] + minima[block * VB // 64]
            gl.store(p_acc + gl.expand_dims(at, 0) * D + gl.expand_dims(i_e, 1), x, mask=m_part)


@gluon.jit
def _add_window(parts, weight, acc, VB: gl.constexpr):
    """acc [VB, 8] plus the products of its channels, 16 at a time."""
    if VB == 16:
        acc = mma_v2(parts[0], weight, acc)
    else:
        a, b = gl.split(gl.permute(gl.reshape(acc, [2, 16, 8]), [1, 2, 0]))
        a = mma_v2(parts[0], weight, gl.convert_layout(a, MMA, assert_trivial=True))
        b = mma_v2(parts[1], weight, gl.convert_layout(b, MMA, assert_trivial=True))
        acc = gl.reshape(gl.permute(gl.join(a, b), [2, 0, 1]), [32, 8])
        acc = gl.convert_layout(acc, MMA, assert_trivial=True)
    return acc


@gluon.jit(
    do_not_specialize=["o_items", "s_btr", "s_wtr"], do_not_specialize_on_alignment=["p_body_table", "p_window_table"]
)
def decode_keys_kernel(
    p_q, p_body, p_window, p_body_table, p_window_table, p_plan, p_acc, p_peak, p_total,
    s_qt, s_qh, s_bb, s_bh, s_wp, s_wh, s_wt, s_btr, s_wtr, o_items, scale, sink_tokens, recent_tokens, retained,
    q_len: gl.constexpr, H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, T: gl.constexpr, LAST: gl.constexpr,
    WINDOW_PAGE: gl.constexpr, STAGES: gl.constexpr, LOAD: gl.constexpr, VB: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One program: one item, one KV head, T tiles of 8 rows; LAST tiles in the last program of an item."""
    if PDL:  # the merge may set up while this runs
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
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


# -- launcher -----------------------------------------------------------------
def available(layout: PageLayout, soft_cap: float, device: torch.device) -> bool:
    """Whether this kernel serves a launch: common shapes, a card from Ampere on, a known Triton."""
    return (
        not interpreted()
        and capability(device) >= (8, 0)
        and (3, 6) <= tuple(int(x) for x in triton.__version__.split(".")[:2]) <= (3, 9)
        and layout.key_axis == "channel"
        and layout.group_size == 64
        and layout.head_size in HEAD_SIZES
        and layout.v_size == layout.head_size
        and soft_cap == 0.0
    )


def launch(
    q, body, window, body_table, window_table, plan, acc, peak, total, layout, *,
    q_len, scale, sink_tokens, recent_tokens, retained, soft_cap,
) -> None:  # fmt: skip
    """As `decode._launch`; shapes are checked by `decode.decode`."""
    del soft_cap
    budget, heads, rows, _ = acc.shape
    tile = gluon_tile(rows, layout.head_size)
    decode_keys_kernel[(budget, heads, tile.programs)](
        q, body.view(torch.int16), window, body_table, window_table, plan, acc, peak, total,
        q.stride(0), q.stride(1), body.stride(0) // 2, body.stride(1) // 2,
        window.stride(0), window.stride(1), window.stride(2), body_table.stride(0), window_table.stride(0),
        plan.shape[0] - 4 * budget, scale, sink_tokens, recent_tokens, retained,
        q_len=q_len, H=heads, G=rows // q_len, D=layout.head_size, T=tile.tiles, LAST=tile.last,
        WINDOW_PAGE=window_page_tokens(q.element_size()), STAGES=tile.stages, LOAD=2, VB=32, PDL=overlaps(q.device),
        num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
