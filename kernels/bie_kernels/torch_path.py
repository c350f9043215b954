# SPDX-License-Identifier: Apache-2.0
"""Vectorised torch path of `int4_asym`: store, seal and attend on any device.

This is what CPUs run. It implements the same format and the same position rule
as `reference`, on paged caches and whole batches, with bounded scratch memory.

Shapes used throughout
    body    uint8 [blocks, H, page_bytes]            INT4 pages of 64 tokens
    window  dtype [pages, H, page_tokens, D + E]     16-bit rows [K | V]
    k, v    [T, H, D], [T, H, E]                     this step's keys and values
Block 0 of either cache is vLLM's null block: never written, never read.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from bie_kernels.layout import PAGE_TOKENS, PageLayout, token_slot
from bie_kernels.reference import Quantised, quantise_min, quantise_zero_point

KEY_SLICE = 4096
"""Keys that are dequantised at a time: bounds the scratch whatever the context."""

QUERY_BLOCK = 256
"""Queries of a prefill chunk that are scored at a time."""


# -- index maps of the layout (tiny, cached) ------------------------------------
@lru_cache(maxsize=None)
def _k_byte_channels(head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Channels in the low and the high nibble of each byte of a key row [D / 2]."""
    layout = PageLayout(head_size)
    low = torch.empty(head_size // 2, dtype=torch.long)
    high = torch.empty_like(low)
    for channel in range(head_size):
        byte, shift = layout.k_code_byte(0, channel)
        (high if shift else low)[byte] = channel
    return low, high


@lru_cache(maxsize=None)
def _v_channel_bytes(head_size_v: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Channels (low, high nibble) and byte offset inside V's codes of each byte of token 0 [E / 2]."""
    layout = PageLayout(16, head_size_v)
    low = [c for c in range(head_size_v) if not c & 8]
    offset = [layout.v_code_byte(0, c)[0] - layout.v_codes for c in low]
    return torch.tensor(low), torch.tensor(low) + 8, torch.tensor(offset)


@lru_cache(maxsize=None)
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
def load_pages(
    body: torch.Tensor, pages: torch.Tensor, layout: PageLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantise body pages [n] -> fp32 keys [H, n * 64, D] and values [H, n * 64, E]."""
    page = body[pages]  # [n, H, P]
    return _load_keys(page, layout), _load_values(page, layout)


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


def _load_keys(page: torch.Tensor, layout: PageLayout) -> torch.Tensor:
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


def _load_values(page: torch.Tensor, layout: PageLayout) -> torch.Tensor:
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


# -- one step of one layer --------------------------------------------------------------
@dataclass(frozen=True)
class Rule:
    """The position rule's constants.

    sink_tokens, recent_tokens: see `reference.position_rule`.
    retained_tokens: R of the window manager; a window entry of a position j that
        was computed before this step is valid only if j < sink or j >= computed - R.
    """

    sink_tokens: int
    recent_tokens: int
    retained_tokens: int


class RequestStep:
    """What one request does in one step; host integers and page lists, shared by all layers.

    Args:
        start, end: the request's rows in the flat batch.
        computed: tokens computed before this step (position of the first row).
        body_pages: int64 [ceil(seq / 64)], blocks of the body.
        window_pages: int64 [ceil(seq / page_tokens)], 0 where nothing is held.
        page_tokens: tokens of a window page.
    """

    def __init__(
        self,
        start: int,
        end: int,
        computed: int,
        body_pages: torch.Tensor,
        window_pages: torch.Tensor,
        page_tokens: int,
        rule: Rule,
    ) -> None:
        self.start, self.end, self.computed = start, end, computed
        self.seq_len = computed + end - start
        self.body_pages, self.window_pages = body_pages, window_pages
        self.page_tokens = page_tokens
        self.rule = rule
        first_sealed = computed // PAGE_TOKENS
        self.sealed = range(first_sealed, self.seq_len // PAGE_TOKENS)
        """Pages whose last key is written in this step."""
        # Positions below `computed` that a query of this step may want in 16 bits.
        low = min(computed, max(0, computed - rule.recent_tokens + 1))
        sinks = torch.arange(min(rule.sink_tokens, computed, low))
        self.past = torch.cat((sinks, torch.arange(low, computed)))
        """Positions before this step in the windows, ascending [n]."""
        resident = window_pages[self.past // page_tokens] != 0
        resident &= (self.past < rule.sink_tokens) | (self.past >= computed - rule.retained_tokens)
        self.past_resident = resident
        missing = self.past[~resident]
        self.lowest_missing_end = int(missing[-1]) + 1 if len(missing) else 0
        """One past the highest position that must be read in INT4 although it is in a window."""

    def window_rows(self, window: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """16-bit rows of `positions` [n] -> [n, H, D + E]; null pages yield rubbish."""
        pages = self.window_pages[positions // self.page_tokens]
        return window[pages, :, positions % self.page_tokens]


def seal(
    k: torch.Tensor, body: torch.Tensor, window: torch.Tensor, steps: list[RequestStep], layout: PageLayout
) -> None:
    """Seal every page whose last key this step writes; no-op on the head_dim axis."""
    if layout.key_axis == "head_dim":
        return
    pages, keys, valid = [], [], []
    for step in steps:
        if not step.sealed:
            continue
        first = step.sealed[0] * PAGE_TOKENS
        positions = torch.arange(first, len(step.sealed) * PAGE_TOKENS + first)
        fresh = k[step.start : step.start + int(positions[-1]) + 1 - step.computed]
        if first < step.computed:
            earlier = step.window_rows(window, torch.arange(first, step.computed))[..., : layout.head_size]
            fresh = torch.cat((earlier.to(k.dtype), fresh))
        else:
            fresh = fresh[first - step.computed :]
        keys.append(fresh.unflatten(0, (-1, PAGE_TOKENS)))
        valid.append((positions >= step.rule.sink_tokens).view(-1, PAGE_TOKENS))
        pages.append(step.body_pages[step.sealed[0] : step.sealed[0] + len(step.sealed)])
    if pages:
        seal_pages(torch.cat(keys), body, torch.cat(pages), torch.cat(valid), layout)


class _Softmax:
    """Running softmax over slices of keys for rows [H, R] (R = queries x group)."""

    def __init__(self, heads: int, rows: int, channels: int) -> None:
        self.peak = torch.full((heads, rows, 1), -torch.inf)
        self.total = torch.zeros(heads, rows, 1)
        self.out = torch.zeros(heads, rows, channels)

    def add(self, logits: torch.Tensor, values: torch.Tensor, rows: slice) -> None:
        """Add keys: logits [H, r, S] with -inf where masked, values [H, S, E]."""
        peak = torch.maximum(self.peak[:, rows], logits.amax(-1, keepdim=True))
        safe = torch.where(peak == -torch.inf, 0.0, peak)  # a row may not have seen a key yet
        weights = (logits - safe).exp_()
        decay = (self.peak[:, rows] - safe).exp()
        self.total[:, rows] = self.total[:, rows] * decay + weights.sum(-1, keepdim=True)
        self.out[:, rows] = self.out[:, rows] * decay + weights @ values
        self.peak[:, rows] = peak


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    body: torch.Tensor,
    window: torch.Tensor,
    step: RequestStep,
    layout: PageLayout,
    *,
    scale: float,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Attention of one request's rows by the position rule; stores and seals come first.

    Args:
        q: [n, Hq, D], this request's queries; k [n, H, D], v [n, H, E] its new keys and values.
        body, window: the layer's caches.
        scale: softmax scale; soft_cap: see `reference.attention`.

    Returns:
        fp32 [n, Hq, E].
    """
    n, heads_q, _ = q.shape
    heads = k.shape[1]
    group = heads_q // heads
    # [H, n, group, D] -> rows of one KV head together, query-major.
    q_rows = (q.float() * scale).view(n, heads, group, -1).permute(1, 0, 2, 3).reshape(heads, n * group, -1)
    softmax = _Softmax(heads, n * group, v.shape[-1])
    rule, computed = step.rule, step.computed

    def cap(logits: torch.Tensor) -> torch.Tensor:
        return soft_cap * torch.tanh(logits / soft_cap) if soft_cap > 0 else logits

    def mask_rows(mask: torch.Tensor) -> torch.Tensor:  # [r, S] -> [r * group, S]
        return mask.repeat_interleave(group, 0)

    # 16-bit keys: the resident past, then this step's own.
    past = step.past[step.past_resident]
    past_rows = step.window_rows(window, past).float()  # [S, H, D + E]
    k_wide = torch.cat((past_rows[..., : layout.head_size], k.float())).transpose(0, 1)  # [H, S, D]
    v_wide = torch.cat((past_rows[..., layout.head_size :], v.float())).transpose(0, 1)
    wide_pos = torch.cat((past, torch.arange(computed, step.seq_len)))
    blocks = [(first, min(first + QUERY_BLOCK, n)) for first in range(0, n, QUERY_BLOCK)]
    for first, last in blocks:
        q_pos = torch.arange(computed + first, computed + last)
        used = (wide_pos < rule.sink_tokens) | (wide_pos > computed + first - rule.recent_tokens)
        used &= wide_pos < computed + last
        if not used.any():
            continue
        distance = q_pos[:, None] - wide_pos[used][None, :]
        seen = (distance >= 0) & ((wide_pos[used] < rule.sink_tokens) | (distance < rule.recent_tokens))
        rows = slice(first * group, last * group)
        logits = cap(q_rows[:, rows] @ k_wide[:, used].transpose(1, 2))
        softmax.add(logits.masked_fill_(~mask_rows(seen), -torch.inf), v_wide[:, used], rows)

    # INT4 keys, a slice of pages at a time.
    narrow_end = max(step.seq_len - rule.recent_tokens, step.lowest_missing_end)
    missing = torch.zeros(max(narrow_end, 0), dtype=torch.bool)
    gone = step.past[~step.past_resident]
    missing[gone] = True
    for start in range(0, narrow_end, KEY_SLICE):
        end = min(start + KEY_SLICE, narrow_end)
        pages = step.body_pages[start // PAGE_TOKENS : -(-end // PAGE_TOKENS)]
        k4, v4 = load_pages(body, pages, layout)
        k4, v4 = k4[:, : end - start], v4[:, : end - start]
        k_pos = torch.arange(start, end)
        for first, last in blocks:
            q_pos = torch.arange(computed + first, computed + last)
            seen = (q_pos[:, None] - k_pos[None, :] >= rule.recent_tokens) & (k_pos >= rule.sink_tokens)
            seen |= missing[start:end][None, :]
            if not seen.any():
                continue
            rows = slice(first * group, last * group)
            logits = cap(q_rows[:, rows] @ k4.transpose(1, 2))
            softmax.add(logits.masked_fill_(~mask_rows(seen), -torch.inf), v4, rows)

    out = softmax.out / softmax.total
    return out.view(heads, n, group, -1).permute(1, 0, 2, 3).reshape(n, heads_q, -1)
