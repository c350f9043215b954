# SPDX-License-Identifier: Apache-2.0
"""One layer's step in vectorised torch, on any device: store, seal, attend.

This is what CPUs run. Same format and same position rule as `reference`, with
bounded scratch memory whatever the context. Shapes as in `torch_pages`.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from bie_kernels.layout import PAGE_TOKENS, PageLayout
from bie_kernels.torch_pages import load_keys, load_values, score_pages, seal_pages, store, weigh_pages

__all__ = ["RequestStep", "Rule", "attend", "seal", "store"]

KEY_SLICE = 4096
"""Keys that are unpacked at a time: bounds the scratch whatever the context."""

QUERY_BLOCK = 256
"""Queries of a prefill chunk that are scored at a time."""

FEW_QUERIES = 16
"""Up to here (decode, verify) the codes are multiplied as they are; beyond, pages are dequantised once."""


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

    @cached_property
    def wide_past(self) -> torch.Tensor:
        """Positions before this step that are read in 16 bits by some query, ascending."""
        return self.past[self.past_resident]

    @cached_property
    def narrow_end(self) -> int:
        """One past the last position that some query reads in INT4."""
        return max(0, self.seq_len - self.rule.recent_tokens, self.lowest_missing_end)

    @cached_property
    def _missing(self) -> torch.Tensor:
        missing = torch.zeros(self.narrow_end, dtype=torch.bool)
        missing[self.past[~self.past_resident]] = True
        return missing

    def wide_keys(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For rows first..last-1: which of [wide_past, this step's tokens] matter, and who sees them.

        Returns:
            (bool [S], bool [last - first, used]).
        """
        rule = self.rule
        positions = torch.cat((self.wide_past, torch.arange(self.computed, self.seq_len)))
        start, end = self.computed + first, self.computed + last
        used = ((positions < rule.sink_tokens) | (positions > start - rule.recent_tokens)) & (positions < end)
        positions = positions[used]
        distance = torch.arange(start, end)[:, None] - positions[None, :]
        return used, (distance >= 0) & ((positions < rule.sink_tokens) | (distance < rule.recent_tokens))

    def narrow_keys(self, start: int, end: int, first: int, last: int) -> torch.Tensor:
        """Who reads positions start..end-1 in INT4, for rows first..last-1: bool [last - first, end - start]."""
        k_pos = torch.arange(start, end)
        distance = torch.arange(self.computed + first, self.computed + last)[:, None] - k_pos[None, :]
        seen = (distance >= self.rule.recent_tokens) & (k_pos >= self.rule.sink_tokens)
        return seen | self._missing[start:end]

    @cached_property
    def few(self) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, int, torch.Tensor]]]:
        """The masks of a decode or verify step, made once for all layers: `wide_keys` and slices of `narrow_keys`."""
        n = self.end - self.start
        slices = [
            (start, min(start + KEY_SLICE, self.narrow_end)) for start in range(0, self.narrow_end, KEY_SLICE)
        ]
        return *self.wide_keys(0, n), [(s, e, self.narrow_keys(s, e, 0, n)) for s, e in slices]


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

    def add(
        self, logits: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor], rows: slice = slice(None)
    ) -> None:
        """Add keys: logits [H, r, S], -inf where masked; product maps weights [H, r, S] to [H, r, E]."""
        peak = torch.maximum(self.peak[:, rows], logits.amax(-1, keepdim=True))
        safe = torch.where(peak == -torch.inf, 0.0, peak)  # a row may not have seen a key yet
        weights = (logits - safe).exp_()
        decay = (self.peak[:, rows] - safe).exp()
        self.total[:, rows] = self.total[:, rows] * decay + weights.sum(-1, keepdim=True)
        self.out[:, rows] = self.out[:, rows] * decay + product(weights)
        self.peak[:, rows] = peak


def _weighted(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """weights [H, r, S] @ values [H, S, E], where 0 * NaN is 0: a key that a row does not see cannot hurt it."""
    bad = ~values.isfinite()
    if not bad.any():
        return weights @ values
    out = weights @ values.masked_fill(bad, 0.0)
    return out.masked_fill((weights > 0).float() @ bad.float() > 0, torch.nan)


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
    # [n, H, group, D] -> rows of one KV head together, query-major.
    q_rows = (q.float() * scale).view(n, heads, group, -1).permute(1, 0, 2, 3).reshape(heads, n * group, -1)
    softmax = _Softmax(heads, n * group, v.shape[-1])

    def masked(logits: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        if soft_cap > 0:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        return logits.masked_fill_(~seen.repeat_interleave(group, 0), -torch.inf)

    # 16-bit keys: the resident past, then this step's own.
    past_rows = step.window_rows(window, step.wide_past).float()  # [S, H, D + E]
    k_wide = torch.cat((past_rows[..., : layout.head_size], k.float())).transpose(0, 1)  # [H, S, D]
    v_wide = torch.cat((past_rows[..., layout.head_size :], v.float())).transpose(0, 1)

    def add_wide(used: torch.Tensor, seen: torch.Tensor, rows: slice) -> None:
        if not used.any():
            return
        values = v_wide[:, used]
        logits = masked(q_rows[:, rows] @ k_wide[:, used].transpose(1, 2), seen)
        softmax.add(logits, partial(_weighted, values=values), rows)

    def pages(start: int, end: int) -> torch.Tensor:
        return body[step.body_pages[start // PAGE_TOKENS : -(-end // PAGE_TOKENS)]]

    if n <= FEW_QUERIES:
        used, seen, slices = step.few
        add_wide(used, seen, slice(None))
        for start, end, narrow in slices:
            page = pages(start, end)
            logits = score_pages(q_rows, page, layout)[..., : end - start]
            softmax.add(masked(logits, narrow), partial(weigh_pages, page=page, layout=layout))
    else:
        blocks = [(first, min(first + QUERY_BLOCK, n)) for first in range(0, n, QUERY_BLOCK)]
        for first, last in blocks:
            add_wide(*step.wide_keys(first, last), slice(first * group, last * group))
        for start in range(0, step.narrow_end, KEY_SLICE):
            end = min(start + KEY_SLICE, step.narrow_end)
            page = pages(start, end)
            k4, v4 = (x[:, : end - start] for x in (load_keys(page, layout), load_values(page, layout)))
            for first, last in blocks:
                seen = step.narrow_keys(start, end, first, last)
                if seen.any():
                    rows = slice(first * group, last * group)
                    logits = masked(q_rows[:, rows] @ k4.transpose(1, 2), seen)
                    softmax.add(logits, partial(_weighted, values=v4), rows)

    out = softmax.out / softmax.total
    return out.view(heads, n, group, -1).permute(1, 0, 2, 3).reshape(n, heads_q, -1)
