# SPDX-License-Identifier: Apache-2.0
"""The oracle of `int4_asym` in plain torch: what every kernel is tested against.

Readable first: loops where a loop says it best, fp32 throughout, no paging
tricks. The number format is asymmetric INT4 with fp16 metadata; the position
rule is stated once, in `position_rule`, and used by `attention`.

Shapes: T tokens, H KV heads, Hq query heads, D key channels, E value channels,
G groups. Codes are uint8 in 0..15.
"""
from __future__ import annotations

import math
from typing import NamedTuple

import torch

from bie_kernels.layout import CODE_MAX, FP16_MAX, PAGE_TOKENS, ZERO_POINT_MAX, PageLayout

SMALLEST_SCALE = 2.0**-24
"""Smallest positive fp16 number; a constant group has this step and code 0."""


class Quantised(NamedTuple):
    """Codes with the metadata that decodes them; metadata has one entry a group."""

    codes: torch.Tensor  # uint8, shape of the input
    scale: torch.Tensor  # fp16
    origin: torch.Tensor  # fp16: the minimum, or the zero-point for head_dim keys


# -- 16-bit rounding ----------------------------------------------------------
def _step_down(half: torch.Tensor) -> torch.Tensor:
    """The next fp16 number below, by its bits (torch.nextafter knows no Half on CPU)."""
    bits = half.view(torch.int16)
    # Positive numbers shrink and negative ones grow in magnitude; below +0 comes -2^-24.
    lower = torch.where(bits > 0, bits - 1, torch.where(bits == 0, torch.full_like(bits, -32767), bits + 1))
    return lower.view(torch.float16)


def round_down_fp16(x: torch.Tensor) -> torch.Tensor:
    """Largest fp16 number <= x for finite |x| <= 65504; NaN stays NaN."""
    half = x.to(torch.float16)
    return torch.where(half.float() > x, _step_down(half), half)


def round_up_fp16(x: torch.Tensor) -> torch.Tensor:
    """Smallest fp16 number >= x for finite |x| <= 65504; NaN stays NaN."""
    return -round_down_fp16(-x)


# -- quantisation -------------------------------------------------------------
def _group_range(x: torch.Tensor, dim: int, valid: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Saturated minimum and maximum along `dim`; NaN if any counted element is NaN, 0 if none counts."""
    low = high = x
    if valid is not None:
        low = torch.where(valid, x, torch.inf)
        high = torch.where(valid, x, -torch.inf)
    low, high = low.amin(dim, keepdim=True), high.amax(dim, keepdim=True)
    empty = low > high
    return torch.where(empty, 0.0, low), torch.where(empty, 0.0, high)


def _to_code(level: torch.Tensor) -> torch.Tensor:
    """Nearest code of a real level (halves go up); NaN becomes code 0, its metadata is NaN anyway."""
    return (level + 0.5).floor().nan_to_num(0.0).clamp(0, CODE_MAX).to(torch.uint8)


def quantise_min(x: torch.Tensor, dim: int, valid: torch.Tensor | None = None) -> Quantised:
    """Quantise along `dim` with scale and minimum: x ~ code * scale + minimum.

    The minimum is rounded down and the scale up to fp16 before codes are
    computed against them, so that |error| <= scale / 2 for |x| <= 65504.

    Args:
        x: any float tensor; values beyond +-65504 saturate.
        dim: the group's dimension (all of it is one group).
        valid: bool, broadcastable to x; elements left out of the statistics get code 0.

    Returns:
        Codes shaped like x; metadata with size 1 along `dim`. NaN input makes its
        group's metadata NaN, never another group's.
    """
    x = x.float().clamp(-FP16_MAX, FP16_MAX)
    low, high = _group_range(x, dim, valid)
    minimum = round_down_fp16(low)
    span = (high - minimum.float()) * (1.0 / CODE_MAX)
    scale = round_up_fp16(span.clamp_min(SMALLEST_SCALE))
    codes = _to_code((x - minimum.float()) * (1.0 / scale.float()))
    if valid is not None:
        codes = torch.where(valid, codes, 0)
    return Quantised(codes, scale, minimum)


def quantise_zero_point(x: torch.Tensor, dim: int) -> Quantised:
    """Quantise along `dim` with an integer zero-point: x ~ (code - zero) * scale.

    Zero is exact whenever it lies in the group's range. The step is widened where
    needed so that |zero| <= 2048 and stays exact in fp16 (near-constant groups).

    Args and returns as `quantise_min`, `origin` being the zero-point.
    """
    x = x.float().clamp(-FP16_MAX, FP16_MAX)
    low, high = _group_range(x, dim, None)
    span = (high - low) * (1.0 / CODE_MAX)
    reach = torch.maximum(low.abs(), high.abs()) * (1.0 / ZERO_POINT_MAX)
    scale = round_up_fp16(torch.maximum(span, reach).clamp_min(SMALLEST_SCALE))
    inverse = 1.0 / scale.float()
    zero = (0.5 - low * inverse).floor()
    codes = _to_code(x * inverse + zero)
    return Quantised(codes, scale, zero.to(torch.float16))


def _along_head(x: torch.Tensor, group_size: int, quantise) -> Quantised:  # noqa: ANN001 - a function of this module
    """Quantise the last dimension in groups, the last group shorter if it must be."""
    parts = [quantise(part, -1) for part in x.split(group_size, dim=-1)]
    return Quantised(*(torch.cat(field, dim=-1) for field in zip(*parts, strict=True)))


def quantise_values(v: torch.Tensor, layout: PageLayout) -> Quantised:
    """Values [..., E] -> codes [..., E], scale and minimum [..., v_groups]."""
    return _along_head(v, layout.group_size, quantise_min)


def quantise_keys(k: torch.Tensor, layout: PageLayout, valid: torch.Tensor | None = None) -> Quantised:
    """Keys of one page [64, D] -> codes [64, D] and metadata [k_groups, k_meta_cols].

    Args:
        k: the page's keys in token order.
        layout: decides the axis and the group size.
        valid: bool [64], channel axis only: tokens that enter the statistics
            (sink tokens do not, they are always read in 16 bits).

    Returns:
        Metadata columns are channels (channel axis) or tokens (head_dim axis, in
        token order: `pack_page` permutes).
    """
    if layout.key_axis == "head_dim":
        q = _along_head(k, layout.group_size, quantise_zero_point)
        return Quantised(q.codes, q.scale.T, q.origin.T)
    mask = torch.ones(PAGE_TOKENS, dtype=torch.bool) if valid is None else valid
    parts = [
        quantise_min(k[start : start + layout.group_size], 0, mask[start : start + layout.group_size, None])
        for start in range(0, PAGE_TOKENS, layout.group_size)
    ]
    return Quantised(*(torch.cat(field, dim=0) for field in zip(*parts, strict=True)))


def dequantise_keys(q: Quantised, layout: PageLayout) -> torch.Tensor:
    """Codes [64, D] and metadata [k_groups, k_meta_cols] -> fp32 [64, D]."""
    codes, scale, origin = q.codes.float(), q.scale.float(), q.origin.float()
    if layout.key_axis == "channel":
        scale = scale.repeat_interleave(layout.group_size, 0)  # [64, D]
        origin = origin.repeat_interleave(layout.group_size, 0)
        return codes * scale + origin
    scale = scale.T.repeat_interleave(layout.group_size, 1)[:, : layout.head_size]  # [64, D]
    origin = origin.T.repeat_interleave(layout.group_size, 1)[:, : layout.head_size]
    return (codes - origin) * scale


def dequantise_values(q: Quantised, layout: PageLayout) -> torch.Tensor:
    """Codes [..., E] and metadata [..., v_groups] -> fp32 [..., E]."""
    scale = q.scale.float().repeat_interleave(layout.group_size, -1)[..., : layout.v_size]
    minimum = q.origin.float().repeat_interleave(layout.group_size, -1)[..., : layout.v_size]
    return q.codes.float() * scale + minimum


# -- bytes --------------------------------------------------------------------
def _put_half(page: torch.Tensor, byte: int, value: torch.Tensor) -> None:
    page[byte : byte + 2] = value.reshape(1).to(torch.float16).view(torch.uint8)


def _get_half(page: torch.Tensor, byte: int) -> torch.Tensor:
    return page[byte : byte + 2].clone().view(torch.float16)[0]


def pack_page(keys: Quantised, values: Quantised, layout: PageLayout) -> torch.Tensor:
    """One KV head's page as bytes, element by element by the layout's own offsets.

    Args:
        keys: as `quantise_keys` returns for 64 tokens.
        values: as `quantise_values` returns for [64, E].

    Returns:
        uint8 [page_bytes].
    """
    page = torch.zeros(layout.page_bytes, dtype=torch.uint8)
    for token in range(PAGE_TOKENS):
        for channel in range(layout.head_size):
            byte, shift = layout.k_code_byte(token, channel)
            page[byte] |= keys.codes[token, channel] << shift
        for channel in range(layout.v_size):
            byte, shift = layout.v_code_byte(token, channel)
            page[byte] |= values.codes[token, channel] << shift
        for group in range(layout.v_groups):
            channel = group * layout.group_size
            _put_half(page, layout.v_meta_byte(layout.v_scale, token, channel), values.scale[token, group])
            _put_half(page, layout.v_meta_byte(layout.v_min, token, channel), values.origin[token, group])
    for group, token, channel, row, col in _key_meta_entries(layout):
        del group
        _put_half(page, layout.k_meta_byte(layout.k_scale, token, channel), keys.scale[row, col])
        _put_half(page, layout.k_meta_byte(layout.k_origin, token, channel), keys.origin[row, col])
    return page


def _key_meta_entries(layout: PageLayout):  # noqa: ANN202 - a generator of 5 ints
    """Every key metadata entry as (group, token, channel, row, column), row and column into `Quantised`."""
    for group in range(layout.k_groups):
        for col in range(layout.k_meta_cols):
            if layout.key_axis == "channel":
                yield group, group * layout.group_size, col, group, col
            else:
                yield group, col, group * layout.group_size, group, col


def unpack_page(page: torch.Tensor, layout: PageLayout) -> tuple[Quantised, Quantised]:
    """Inverse of `pack_page`: uint8 [page_bytes] -> (keys, values)."""
    k_codes = torch.zeros(PAGE_TOKENS, layout.head_size, dtype=torch.uint8)
    v_codes = torch.zeros(PAGE_TOKENS, layout.v_size, dtype=torch.uint8)
    v_scale = torch.zeros(PAGE_TOKENS, layout.v_groups, dtype=torch.float16)
    v_min = torch.zeros_like(v_scale)
    k_scale = torch.zeros(layout.k_groups, layout.k_meta_cols, dtype=torch.float16)
    k_origin = torch.zeros_like(k_scale)
    for token in range(PAGE_TOKENS):
        for channel in range(layout.head_size):
            byte, shift = layout.k_code_byte(token, channel)
            k_codes[token, channel] = (page[byte] >> shift) & 15
        for channel in range(layout.v_size):
            byte, shift = layout.v_code_byte(token, channel)
            v_codes[token, channel] = (page[byte] >> shift) & 15
        for group in range(layout.v_groups):
            channel = group * layout.group_size
            v_scale[token, group] = _get_half(page, layout.v_meta_byte(layout.v_scale, token, channel))
            v_min[token, group] = _get_half(page, layout.v_meta_byte(layout.v_min, token, channel))
    for group, token, channel, row, col in _key_meta_entries(layout):
        del group
        k_scale[row, col] = _get_half(page, layout.k_meta_byte(layout.k_scale, token, channel))
        k_origin[row, col] = _get_half(page, layout.k_meta_byte(layout.k_origin, token, channel))
    return Quantised(k_codes, k_scale, k_origin), Quantised(v_codes, v_scale, v_min)


# -- attention ----------------------------------------------------------------
def position_rule(
    q_pos: torch.Tensor, k_pos: torch.Tensor, sink_tokens: int, recent_tokens: int
) -> torch.Tensor:
    """True where a query reads a key in 16 bits: `j < sink or p - j < recent`, with j <= p.

    Args:
        q_pos: int [n], positions p of the queries.
        k_pos: int [S], positions j of the keys.

    Returns:
        bool [n, S]; entries with j > p are meaningless (masked by causality).
    """
    distance = q_pos[:, None] - k_pos[None, :]
    return (k_pos[None, :] < sink_tokens) | (distance < recent_tokens)


def quantised_copy(
    k: torch.Tensor, v: torch.Tensor, layout: PageLayout, sink_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What INT4 readers see of a whole sequence.

    Args:
        k: [T, H, D], v: [T, H, E] in any float dtype, from position 0.

    Returns:
        fp32 [T, H, D] and [T, H, E]. Keys of the last, unfinished page (channel
        axis) are NaN: nothing may read them.
    """
    tokens, heads = k.shape[:2]
    v4 = dequantise_values(quantise_values(v, layout), layout)
    if layout.key_axis == "head_dim":
        q = _along_head(k, layout.group_size, quantise_zero_point)
        scale = q.scale.float().repeat_interleave(layout.group_size, -1)[..., : layout.head_size]
        zero = q.origin.float().repeat_interleave(layout.group_size, -1)[..., : layout.head_size]
        return (q.codes.float() - zero) * scale, v4
    k4 = torch.full(k.shape, math.nan, dtype=torch.float32)
    for start in range(0, tokens - PAGE_TOKENS + 1, PAGE_TOKENS):
        valid = torch.arange(start, start + PAGE_TOKENS) >= sink_tokens
        for head in range(heads):
            page = k[start : start + PAGE_TOKENS, head]
            k4[start : start + PAGE_TOKENS, head] = dequantise_keys(quantise_keys(page, layout, valid), layout)
    return k4, v4


def attention(
    q: torch.Tensor,
    q_pos: torch.Tensor,
    k16: torch.Tensor,
    v16: torch.Tensor,
    k4: torch.Tensor,
    v4: torch.Tensor,
    *,
    scale: float,
    sink_tokens: int,
    recent_tokens: int,
    soft_cap: float = 0.0,
    resident: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention by the position rule, in fp32, over one sequence.

    Args:
        q: [n, Hq, D] queries at positions `q_pos` [n]; Hq a multiple of H.
        k16, v16: [S, H, D], [S, H, E], 16-bit copies of positions 0..S-1.
        k4, v4: the same positions as INT4 readers see them (`quantised_copy`).
        scale: softmax scale, usually D ** -0.5.
        soft_cap: logits become cap * tanh(logits / cap) when positive.
        resident: bool [S], False where the 16-bit copy is gone (relaxed prefix
            hits): such positions are read in INT4.

    Returns:
        fp32 [n, Hq, E].
    """
    n, heads_q, _ = q.shape
    length, heads, _ = k16.shape
    k_pos = torch.arange(length)
    wide = position_rule(q_pos, k_pos, sink_tokens, recent_tokens)
    if resident is not None:
        wide &= resident[None, :]
    causal = k_pos[None, :] <= q_pos[:, None]
    out = torch.empty(n, heads_q, v16.shape[-1], dtype=torch.float32)
    for head_q in range(heads_q):
        head = head_q * heads // heads_q
        s16 = q[:, head_q].float() @ k16[:, head].float().T  # [n, S]
        s4 = q[:, head_q].float() @ k4[:, head].float().T
        logits = torch.where(wide, s16, s4) * scale
        if soft_cap > 0:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        p = torch.where(causal, logits, -torch.inf).softmax(-1)
        p16 = torch.where(wide & causal, p, 0.0)
        p4 = torch.where(~wide & causal, p, 0.0)
        # 0 * NaN is NaN: positions that no query reads must not enter the product.
        read16, read4 = (wide & causal).any(0), (~wide & causal).any(0)
        out[:, head_q] = p16[:, read16] @ v16[read16, head].float() + p4[:, read4] @ v4[read4, head].float()
    return out
