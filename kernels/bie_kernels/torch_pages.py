# SPDX-License-Identifier: Apache-2.0
"""INT4 pages in vectorised torch: write tokens, seal pages, dequantise, multiply codes.

Same bytes as `reference.pack_page`, for whole batches on paged caches.

Shapes used throughout
    body    uint8 [blocks, H, page_bytes]            INT4 pages of 64 tokens
    window  dtype [pages, H, page_tokens, D + E]     16-bit rows [K | V]
    k, v    [T, H, D], [T, H, E]                     this step's keys and values
Block 0 of either cache is vLLM's null block: never written, never read.
"""
from __future__ import annotations

from functools import cache

import torch

from bie_kernels.layout import PAGE_TOKENS, PageLayout, token_slot
from bie_kernels.reference import Quantised, quantise_min, quantise_zero_point


# -- index maps of the layout (tiny, cached) ------------------------------------
@cache
def _k_byte_channels(head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Channels in the low and the high nibble of each byte of a key row [D / 2]."""
    layout = PageLayout(head_size)
    low = torch.empty(head_size // 2, dtype=torch.long)
    high = torch.empty_like(low)
    for channel in range(head_size):
        byte, shift = layout.k_code_byte(0, channel)
        (high if shift else low)[byte] = channel
    return low, high


@cache
def _v_channel_bytes(head_size_v: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Channels (low, high nibble) and byte offset inside V's codes of each byte of token 0 [E / 2]."""
    layout = PageLayout(16, head_size_v)
    low = [c for c in range(head_size_v) if not c & 8]
    offset = [layout.v_code_byte(0, c)[0] - layout.v_codes for c in low]
    return torch.tensor(low), torch.tensor(low) + 8, torch.tensor(offset)


@cache
def _token_maps() -> tuple[torch.Tensor, torch.Tensor]:
    """Per token of a page: its byte offset inside a 16-channel block of V codes, and its metadata slot."""
    layout = PageLayout(16)
    offsets = [layout.v_code_byte(t, 0)[0] - layout.v_codes for t in range(PAGE_TOKENS)]
    return torch.tensor(offsets), torch.tensor([token_slot(t) for t in range(PAGE_TOKENS)])


# -- store ------------------------------------------------------------------------
def _quantise_head(x: torch.Tensor, group_size: int, zero_point: bool) -> Quantised:
    """[..., C] -> codes [..., C], metadata [..., groups]; the last group may be shorter."""
    quantise = quantise_zero_point if zero_point else quantise_min
    channels = x.shape[-1]
    if channels % group_size == 0:
        q = quantise(x.unflatten(-1, (-1, group_size)), -1)
        return Quantised(q.codes.flatten(-2), q.scale.squeeze(-1), q.origin.squeeze(-1))
    parts = [quantise(part, -1) for part in x.split(group_size, dim=-1)]
    return Quantised(*(torch.cat(field, dim=-1) for field in zip(*parts, strict=True)))


def _halves(body: torch.Tensor) -> torch.Tensor:
    """The body seen as fp16 numbers: metadata is indexed by half its byte offset."""
    return body.view(torch.float16)


def _store_token_meta(
    body: torch.Tensor, pages: torch.Tensor, tokens: torch.Tensor, base: int, meta: torch.Tensor
) -> None:
    """Write per-token metadata [n, H, groups] at `base` (bytes) of the tokens' pages."""
    _, slots = _token_maps()
    groups = meta.shape[-1]
    columns = base // 2 + torch.arange(groups)[None, :] * PAGE_TOKENS + slots[tokens][:, None]  # [n, groups]
    _halves(body)[pages[:, None], :, columns] = meta.transpose(1, 2)


def store(
    k: torch.Tensor,
    v: torch.Tensor,
    body: torch.Tensor,
    window: torch.Tensor,
    body_slots: torch.Tensor,
    window_slots: torch.Tensor,
    layout: PageLayout,
) -> None:
    """Write this step's tokens: V codes (and K codes on the head_dim axis) and 16-bit rows.

    Args:
        body_slots: int64 [T], block * 64 + offset; a slot inside block 0 or negative writes nothing.
        window_slots: int64 [T], page * page_tokens + offset, likewise.
    """
    live = body_slots >= PAGE_TOKENS
    if live.any():
        slots = body_slots[live]
        pages, tokens = slots // PAGE_TOKENS, slots % PAGE_TOKENS
        _store_values(v[live], body, pages, tokens, layout)
        if layout.key_axis == "head_dim":
            _store_head_dim_keys(k[live], body, pages, tokens, layout)
    page_tokens = window.shape[2]
    live = window_slots >= page_tokens
    if live.any():
        slots = window_slots[live]
        row = torch.cat((k[live], v[live]), dim=-1).to(window.dtype)  # [n, H, D + E]
        window[slots // page_tokens, :, slots % page_tokens] = row


def _store_values(
    v: torch.Tensor, body: torch.Tensor, pages: torch.Tensor, tokens: torch.Tensor, layout: PageLayout
) -> None:
    q = _quantise_head(v, layout.group_size, zero_point=False)
    low, high, offsets = _v_channel_bytes(layout.v_size)
    packed = q.codes[..., low] | (q.codes[..., high] << 4)  # [n, H, E / 2]
    token_offsets, _ = _token_maps()
    columns = layout.v_codes + offsets[None, :] + token_offsets[tokens][:, None]  # [n, E / 2]
    body[pages[:, None], :, columns] = packed.transpose(1, 2)
    _store_token_meta(body, pages, tokens, layout.v_scale, q.scale)
    _store_token_meta(body, pages, tokens, layout.v_min, q.origin)


def _pack_key_rows(codes: torch.Tensor) -> torch.Tensor:
    """Codes [..., D] -> bytes [..., D / 2] in the layout's order."""
    low, high = _k_byte_channels(codes.shape[-1])
    return codes[..., low] | (codes[..., high] << 4)


def _store_head_dim_keys(
    k: torch.Tensor, body: torch.Tensor, pages: torch.Tensor, tokens: torch.Tensor, layout: PageLayout
) -> None:
    q = _quantise_head(k, layout.group_size, zero_point=True)
    columns = layout.k_codes + tokens[:, None] * layout.k_row_bytes + torch.arange(layout.k_row_bytes)
    body[pages[:, None], :, columns] = _pack_key_rows(q.codes).transpose(1, 2)
    _store_token_meta(body, pages, tokens, layout.k_scale, q.scale)
    _store_token_meta(body, pages, tokens, layout.k_origin, q.origin)


# -- seal ---------------------------------------------------------------------------
def seal_pages(
    keys: torch.Tensor, body: torch.Tensor, pages: torch.Tensor, valid: torch.Tensor, layout: PageLayout
) -> None:
    """Quantise complete pages of keys along their tokens (channel axis) and store them.

    Args:
        keys: [n, 64, H, D], the pages' keys in any float dtype.
        pages: int64 [n], body blocks.
        valid: bool [n, 64], False for sink tokens (left out of the statistics).
    """
    grouped = keys.unflatten(1, (-1, layout.group_size))  # [n, groups, g, H, D]
    mask = valid.unflatten(1, (-1, layout.group_size))[..., None, None]
    q = quantise_min(grouped, 2, mask)
    rows = _pack_key_rows(q.codes.flatten(1, 2).transpose(1, 2))  # [n, H, 64, D / 2]
    body[pages, :, layout.k_codes : layout.v_codes] = rows.flatten(2)
    halves = _halves(body)
    for base, meta in ((layout.k_scale, q.scale), (layout.k_origin, q.origin)):
        flat = meta.squeeze(2).transpose(1, 2).flatten(2)  # [n, H, groups * D]
        halves[pages, :, base // 2 : base // 2 + flat.shape[-1]] = flat


# -- load ---------------------------------------------------------------------------
def _meta(page: torch.Tensor, base: int, groups: int, columns: int) -> torch.Tensor:
    """fp16 metadata at `base` -> fp32 [n, H, groups, columns]."""
    raw = page[..., base : base + 2 * groups * columns].contiguous().view(torch.float16)
    return raw.float().unflatten(-1, (groups, columns))


def _token_meta(page: torch.Tensor, base: int, groups: int) -> torch.Tensor:
    """Per-token metadata in token order: fp32 [n, H, 64, groups]."""
    meta = _meta(page, base, groups, PAGE_TOKENS).unflatten(-1, (4, 4, 2, 2))  # t, x, i1, e
    return meta.permute(0, 1, 4, 5, 3, 6, 2).flatten(2, 5)


def _spread(meta: torch.Tensor, layout: PageLayout, channels: int) -> torch.Tensor:
    """[..., groups] -> [..., channels], every channel with its group's number."""
    return meta.repeat_interleave(layout.group_size, -1)[..., :channels]


def load_keys(page: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """Dequantise keys of pages uint8 [n, H, page_bytes] -> fp32 [H, n * 64, D]."""
    n, heads, _ = page.shape
    raw = page[..., layout.k_codes : layout.v_codes]
    nibbles = torch.stack((raw & 15, raw >> 4), -1)  # [n, H, 32 D, 2]
    # A row's bytes are (word, half, pair), a nibble adds the last bit: channel = 8 word + 4 pair + 2 nib + half.
    codes = nibbles.view(n, heads, PAGE_TOKENS, layout.head_size // 8, 2, 2, 2)
    codes = codes.permute(0, 1, 2, 3, 5, 6, 4).reshape(n, heads, PAGE_TOKENS, layout.head_size).float()
    if layout.key_axis == "channel":
        scale = _meta(page, layout.k_scale, layout.k_groups, layout.head_size)
        origin = _meta(page, layout.k_origin, layout.k_groups, layout.head_size)
        codes = codes.unflatten(2, (layout.k_groups, layout.group_size))
        keys = codes.mul_(scale[..., None, :]).add_(origin[..., None, :]).flatten(2, 3)
    else:
        scale = _spread(_token_meta(page, layout.k_scale, layout.k_groups), layout, layout.head_size)
        zero = _spread(_token_meta(page, layout.k_origin, layout.k_groups), layout, layout.head_size)
        keys = codes.sub_(zero).mul_(scale)
    return keys.transpose(0, 1).flatten(1, 2)  # [H, n * 64, D]


def load_values(page: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """Dequantise values of pages uint8 [n, H, page_bytes] -> fp32 [H, n * 64, E]."""
    n, heads, _ = page.shape
    raw = page[..., layout.v_codes : layout.k_scale]
    nibbles = torch.stack((raw & 15, raw >> 4), -1)
    # Bytes are (block a, channel g, t, x, e, i1): token = 16 x + 8 i1 + 2 t + e, channel = 16 a + 8 nib + g.
    codes = nibbles.view(n, heads, layout.v_size // 16, 8, 4, 4, 2, 2, 2)
    codes = codes.permute(0, 1, 5, 7, 4, 6, 2, 8, 3).reshape(n, heads, PAGE_TOKENS, layout.v_size).float()
    scale = _spread(_token_meta(page, layout.v_scale, layout.v_groups), layout, layout.v_size)
    minimum = _spread(_token_meta(page, layout.v_min, layout.v_groups), layout, layout.v_size)
    values = codes.mul_(scale).add_(minimum)
    return values.transpose(0, 1).flatten(1, 2)  # [H, n * 64, E]


# -- few queries: codes stay codes ----------------------------------------------------
def _planes(raw: torch.Tensor) -> torch.Tensor:
    """Bytes [..., B] -> fp32 codes [..., 2, B]: the low nibbles, then the high ones."""
    return torch.stack((raw & 15, raw >> 4), -2).float()


def score_pages(q: torch.Tensor, page: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """Logits of a few rows against pages, without dequantising: the key scale folds into q.

    Args:
        q: fp32 [H, r, D], softmax scale applied; page: uint8 [n, H, page_bytes].

    Returns:
        fp32 [H, r, n * 64].
    """
    if layout.key_axis == "head_dim":  # a scale per token and group folds into nothing here
        return q @ load_keys(page, layout).transpose(1, 2)
    n, heads, _ = page.shape
    raw = page[..., layout.k_codes : layout.v_codes].unflatten(-1, (layout.k_groups, -1, layout.k_row_bytes))
    codes = _planes(raw).flatten(-2)  # [n, H, groups, g, D]: channels in low-then-high order
    scale = _meta(page, layout.k_scale, layout.k_groups, layout.head_size)
    origin = _meta(page, layout.k_origin, layout.k_groups, layout.head_size)
    low, high = _k_byte_channels(layout.head_size)
    folded = q[None, :, None] * scale[:, :, :, None]  # [n, H, groups, r, D]
    folded = folded[..., torch.cat((low, high))]
    constant = q[None, :, None] @ origin[..., None]  # [n, H, groups, r, 1]
    logits = folded @ codes.transpose(-1, -2) + constant  # [n, H, groups, r, g]
    return logits.permute(1, 3, 0, 2, 4).flatten(2)


def weigh_pages(weights: torch.Tensor, page: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """Weighted sum of the pages' values: the value scale folds into the weights.

    Args:
        weights: fp32 [H, r, S], S <= n * 64 (missing columns weigh nothing).

    Returns:
        fp32 [H, r, E].
    """
    n, heads, _ = page.shape
    rows = weights.shape[1]
    weights = torch.nn.functional.pad(weights, (0, n * PAGE_TOKENS - weights.shape[-1]))
    weights = weights.view(heads, rows, n, PAGE_TOKENS).permute(2, 0, 1, 3)  # [n, H, r, 64]
    # Metadata of tokens that no query reads may be anything, NaN included: 0 * NaN is NaN.
    read = (weights != 0).any(2)  # [n, H, 64]
    scale = _token_meta(page, layout.v_scale, layout.v_groups).masked_fill(~read[..., None], 0)
    minimum = _token_meta(page, layout.v_min, layout.v_groups).masked_fill(~read[..., None], 0)
    constant = (weights @ minimum).sum(0)  # [H, r, groups]
    order = _byte_order()
    raw = page[..., layout.v_codes : layout.k_scale].unflatten(-1, (-1, PAGE_TOKENS))  # [n, H, E / 2, 64]
    low, high, _ = _v_channel_bytes(layout.v_size)
    out = torch.empty(heads, rows, layout.v_size)
    for group in range(layout.v_groups):
        span = slice(group * layout.group_size // 2, (group + 1) * layout.group_size // 2)
        codes = _planes(raw[:, :, span].flatten(2)).view(n, heads, -1, PAGE_TOKENS)  # [n, H, channels, 64]
        folded = (weights * scale[:, :, None, :, group])[..., order]  # [n, H, r, 64]
        part = (folded @ codes.transpose(-1, -2)).sum(0) + constant[..., group, None]
        out[..., torch.cat((low[span], high[span]))] = part
    return out


@cache
def _byte_order() -> torch.Tensor:
    """Token at each of the 64 byte positions of a channel's V codes."""
    offsets, _ = _token_maps()
    return torch.argsort(offsets)
