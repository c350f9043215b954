# SPDX-License-Identifier: Apache-2.0
"""Steps of `decode_keys` over packed pages: copies, scores, softmax, values."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from bie_kernels.gluon_tiles import (
    CHUNKS,
    MMA,
    OPERAND_B,
    PAGE,
    TOKEN_META,
    copy_async,
    rows_layout,
    slots_to_tokens,
    value_tile,
)
from bie_kernels.keys_queries import query_rows
from bie_kernels.keys_tiles import (
    HALF_CHUNK_COLUMNS,
    HALF_CHUNK_META,
    KEY_META,
    MINIMA,
    STATS,
    halves_sum,
    key_operand,
    over_blocks,
    row_blocks,
    scaled_columns,
    small_mma,
    split_words,
    weight_operand,
    word_rows,
)
from bie_kernels.tiles import NEGATIVE

EXCESS = gl.constexpr(0x40000000)
"""2.0 as fp32 bits: powers of two by which scores may exceed a peak. Probabilities of up to 4 times the largest value
scale (131,008 / 15) stay below fp16's largest number."""
# Triton 3.9 renamed it.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def issue_keys(p_page, ring_k, ring_km, stage, zero, D: gl.constexpr, HALF: gl.constexpr, PARTS: gl.constexpr):
    """Start the copy of a page's key codes and metadata: PARTS parts of HALF channels, the last one padded."""
    i = gl.arange(0, 16 * HALF, layout=CHUNKS) + zero
    for part in gl.static_range(PARTS):
        column = part * (HALF // 4) + i % (HALF // 4)
        p_codes = p_page + (i // (HALF // 4)) * (D // 4) + column
        if D % HALF == 0:
            copy_async(ring_k.index(stage * PARTS + part), p_codes)
        else:
            copy_async(ring_k.index(stage * PARTS + part), p_codes, column < D // 4)
    # The table of the metadata is flat, too: 8 * PARTS rows of HALF // 4 channels.
    i_m = gl.arange(0, 2 * HALF * PARTS, layout=CHUNKS) + zero
    row = i_m // (HALF // 4)
    channel = (row % (4 * PARTS)) * (HALF // 4) + i_m % (HALF // 4)
    p_meta = p_page + 32 * D + (row // (4 * PARTS)) * D + channel
    table = ring_km.index(stage).reshape([2 * HALF * PARTS])
    if D == HALF * PARTS:
        copy_async(table, p_meta)
    else:
        copy_async(table, p_meta, channel < D)


@gluon.jit
def issue_values(p_page, ring_v, ring_vs, ring_vm, stage, zero, D: gl.constexpr, VB: gl.constexpr):
    """Start the copy of a page's value codes, VB channels at a time, and metadata."""
    i = gl.arange(0, 16 * VB, layout=CHUNKS) + zero
    for block in gl.static_range(D // VB):
        copy_async(ring_v.index(stage * (D // VB) + block), p_page + 16 * D + block * (16 * VB) + i)
    GROUPS: gl.constexpr = (D + 63) // 64
    PADDED: gl.constexpr = ring_vs.shape[1] // 64
    i_s = gl.arange(0, 64 * PADDED, layout=CHUNKS) + zero
    minima = ring_vm.index(stage).slice(0, 64 * PADDED)
    if GROUPS == PADDED:
        copy_async(ring_vs.index(stage), p_page + 34 * D + i_s)
        copy_async(minima, p_page + 34 * D + 64 * GROUPS + i_s)
    else:
        copy_async(ring_vs.index(stage), p_page + 34 * D + i_s, i_s < 64 * GROUPS)
        copy_async(minima, p_page + 34 * D + 64 * GROUPS + i_s, i_s < 64 * GROUPS)


@gluon.jit
def _key_meta(ring_km, stage, row: gl.constexpr, chunk: gl.constexpr):
    """fp16 metadata of a chunk of 32 channels, in MMA order, in thread t's registers."""
    x = ring_km.index(stage).slice(row, 4, 0).slice(8 * chunk, 8, 1).load(KEY_META)
    x = gl.reshape(x.to(gl.float16, bitcast=True), [4, 4, 2])  # t, (i1, i0), e
    return gl.reshape(gl.permute(x, [1, 0, 2]), [32])


@gluon.jit
def _half_chunks(ring_km, stage, row: gl.constexpr, chunk: gl.constexpr):
    """fp16 metadata of a chunk as B operand [16, 8]: channels in LOW_UNIT in columns 0 to 3, in HIGH_UNIT in 4 to 7."""
    x = ring_km.index(stage).slice(row, 4, 0).slice(8 * chunk, 8, 1).load(HALF_CHUNK_META)
    x = gl.reshape(x.to(gl.float16, bitcast=True), [4, 2, 2, 2])  # t, i1, i0, e
    x = gl.reshape(gl.permute(x, [1, 0, 3, 2]), [16, 2])
    x = gl.convert_layout(x, gl.SliceLayout(2, HALF_CHUNK_COLUMNS), assert_trivial=True)
    x = gl.reshape(gl.expand_dims(x, 2).broadcast_to([16, 2, 4]), [16, 8])
    return gl.convert_layout(x, OPERAND_B, assert_trivial=True)


@gluon.jit
def page_scores(
    ring_q, ring_k, ring_km, stage, start,
    D: gl.constexpr, HALF: gl.constexpr, PARTS: gl.constexpr, T: gl.constexpr, LOAD: gl.constexpr,
):  # fmt: skip
    """Products of the codes with the scaled queries, T of [64 keys, 8 rows], and of queries and minima, T of [16, 8].

    start: what the products are added to, or () for 0. For what the minima add see `halves_sum`.
    """
    scores = start
    bias = ()
    for _ in gl.static_range(T):
        if len(start) == 0:
            scores = scores + (gl.full([PAGE, 8], 0.0, gl.float32, MMA),)
        bias = bias + (gl.full([16, 8], 0.0, gl.float32, MMA),)
    WORDS: gl.constexpr = HALF // 32
    for part in gl.static_range(PARTS):
        codes = ring_k.index(stage * PARTS + part).reshape([4 * PAGE, HALF // 16])  # [token and t, its words]
        words = ()
        for word in gl.static_range(WORDS):
            if 128 * part + 8 * word < D:
                if word % LOAD == 0:
                    if T > 1 and word > 0:  # or all loads go first, and registers do not suffice
                        barrier()
                    words = split_words(codes.slice(2 * word, 2 * LOAD, 1).load(word_rows(LOAD)), LOAD)
                scale = _key_meta(ring_km, stage, 4 * part, word)
                scale = gl.convert_layout(scale, gl.SliceLayout(1, OPERAND_B), assert_trivial=True)
                minima = _half_chunks(ring_km, stage, 4 * (PARTS + part), word)
                keys = key_operand(words[word % LOAD])
                new_scores = ()
                new_bias = ()
                for tile in gl.static_range(T):
                    q, rows = query_rows(ring_q, tile, part * WORDS + word)
                    new_bias = new_bias + (mma_v2(rows, minima, bias[tile]),)
                    new_scores = new_scores + (mma_v2(keys, q * gl.expand_dims(scale, 1), scores[tile]),)
                scores = new_scores
                bias = new_bias
    return scores, bias


@gluon.jit
def page_weights(
    scores, bias, ring_f, ring_low, peak, acc, D: gl.constexpr, T: gl.constexpr, VB: gl.constexpr,
):  # fmt: skip
    """Online softmax of a page's scores: (B operands, peaks, acc).

    A row's peak is what its exponents are taken relative to: the largest score when it was set, and no later one
    exceeds it by more than 2. So most pages leave the peaks alone, and nothing has to be scaled anew: maxima are not
    even reduced over lanes, only that no lane exceeds its row's peak by more.
    """
    factors = ()
    shifts = ()
    tops = ()
    excess = gl.full([8, 8], NEGATIVE, gl.float32, STATS)
    for tile in gl.static_range(T):
        factor = gl.expand_dims(ring_f.index(tile).load(gl.SliceLayout(0, STATS)), 0).broadcast_to([8, 8])
        shift = halves_sum(bias[tile]) * factor
        top = gl.convert_layout(gl.max(row_blocks(scores[tile], PAGE), 0), STATS, assert_trivial=True)
        excess = gl.maximum(excess, top * factor + (shift - peak[tile]))  # the factor is positive
        factors = factors + (factor,)
        shifts = shifts + (shift,)
        tops = tops + (top,)
    bits = gl.reshape(excess, [64]).to(gl.int32, bitcast=True)  # one instruction finds the largest integer of a warp
    if gl.max(bits, 0) > EXCESS:
        new_peak = ()
        alphas = ()
        for tile in gl.static_range(T):
            top = gl.expand_dims(gl.max(tops[tile], 0), 0).broadcast_to([8, 8])
            new_peak = new_peak + (gl.maximum(peak[tile], top * factors[tile] + shifts[tile]),)
            alphas = alphas + (gl.exp2(peak[tile] - new_peak[tile]),)
            low = ring_low.index(tile)
            low.store(low.load(STATS) * alphas[tile])
        new_acc = ()
        for block in gl.static_range(D // VB):
            for tile in gl.static_range(T):
                new_acc = new_acc + (scaled_columns(acc[block * T + tile], alphas[tile], VB),)
        acc = new_acc
        peak = new_peak
    weights = ()
    for tile in gl.static_range(T):
        s = row_blocks(scores[tile], PAGE)
        p = gl.exp2(s * over_blocks(factors[tile], PAGE) + over_blocks(shifts[tile] - peak[tile], PAGE))
        weights = weights + (weight_operand(p.to(gl.float16), PAGE),)
    return weights, peak, acc


@gluon.jit
def add_page_values(
    weights, acc, ring_low, ring_v, ring_vs, ring_vm, stage, D: gl.constexpr, T: gl.constexpr, VB: gl.constexpr,
):  # fmt: skip
    """acc + codes.(p * scale); acc is D // VB blocks of T tiles.

    low += p times the minima of the groups (rows 0 to 3) and ones (row 4).
    """
    new_acc = ()
    scaled = weights
    for block in gl.static_range(D // VB):
        if (block * VB) % 64 == 0:
            scale = ring_vs.index(stage).slice(block * VB, 64).load(TOKEN_META)
            scale = scale.to(gl.float16, bitcast=True)
            scale = gl.expand_dims(slots_to_tokens(scale, gl.SliceLayout(1, OPERAND_B)), 1)
            scaled = ()
            for tile in gl.static_range(T):
                scaled = scaled + (weights[tile] * scale,)
        values = value_tile(ring_v.index(stage * (D // VB) + block).load(CHUNKS), VB)
        for tile in gl.static_range(T):
            new_acc = new_acc + (mma_v2(values, scaled[tile], acc[block * T + tile]),)
    minima = ring_vm.index(stage).reshape([8, 64]).load(MINIMA).to(gl.float16, bitcast=True)
    minima = gl.permute(gl.reshape(minima, [8, 4, 4, 2, 2]), [0, 2, 3, 1, 4])  # row, t, x, i1, e
    minima = gl.convert_layout(gl.reshape(minima, [8, PAGE]), rows_layout(8, PAGE), assert_trivial=True)
    lows = ()  # read before any is written: no wait between the products
    for tile in gl.static_range(T):
        lows = lows + (small_mma(minima, weights[tile], ring_low.index(tile).load(STATS)),)
    for tile in gl.static_range(T):
        ring_low.index(tile).store(lows[tile])
    return new_acc


@gluon.jit
def window_weights(
    scores, log_scale, q_pos, pos, bound, peak, T: gl.constexpr, N: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Online softmax of N keys of the 16-bit window: (B operands, alphas, peaks).

    A key counts for queries at a distance from 0 to below `bound`.
    """
    weights = ()
    alphas = ()
    peaks = ()
    for tile in gl.static_range(T):
        mask = (gl.expand_dims(q_pos[tile], 0) - gl.expand_dims(pos, 1)).to(gl.uint32) < gl.expand_dims(bound, 1)
        s = row_blocks(gl.where(mask, scores[tile], NEGATIVE), N)
        top = gl.convert_layout(gl.max(s, 0), STATS, assert_trivial=True)
        top = gl.expand_dims(gl.max(top, 0), 0).broadcast_to([8, 8])
        new_peak = gl.maximum(peak[tile], top * log_scale)
        p = gl.exp2(s * log_scale - over_blocks(new_peak, N))
        p = gl.where(row_blocks(mask, N), p, 0.0)
        weights = weights + (weight_operand(p.to(dtype), N),)
        alphas = alphas + (gl.exp2(peak[tile] - new_peak),)
        peaks = peaks + (new_peak,)
    return weights, alphas, peaks
