# SPDX-License-Identifier: Apache-2.0
"""A paged cache driven by hand: what the manager and the worker do, in forty lines, for kernel tests."""
from __future__ import annotations

import math

import torch

from bie_kernels.layout import PAGE_TOKENS, PageLayout, window_page_tokens
from bie_kernels.torch_path import RequestStep, Rule, attend, seal, store


def nan_body(blocks: int, heads: int, layout: PageLayout) -> torch.Tensor:
    """A body cache whose every fp16 reads as NaN and every code as 15."""
    return torch.full((blocks, heads, layout.page_bytes), 0xFF, dtype=torch.uint8)


def nan_window(pages: int, heads: int, layout: PageLayout, dtype: torch.dtype) -> torch.Tensor:
    """A window cache full of NaN."""
    tokens = window_page_tokens(dtype.itemsize)
    return torch.full((pages, heads, tokens, layout.head_size + layout.v_size), math.nan, dtype=dtype)


class PagedRequest:
    """One request on shared caches, with shuffled pages; window pages below R are dropped and poisoned."""

    def __init__(self, k, v, body, window, layout, rule, body_pages, window_pages):  # noqa: ANN001
        self.k, self.v, self.body, self.window = k, v, body, window
        self.layout, self.rule = layout, rule
        self.page_tokens = window.shape[2]
        self.body_pages, self.free_window = body_pages, list(window_pages)
        self.window_table = torch.zeros(-(-k.shape[0] // self.page_tokens) + 1, dtype=torch.long)
        self.computed = 0
        self.row = 0  # pages that the table covers

    def schedule(self, n: int) -> tuple[RequestStep, torch.Tensor, torch.Tensor]:
        """Allocate as the manager does for n more tokens; returns the step and both slot mappings."""
        end = self.computed + n
        keep = max(0, end - self.rule.retained_tokens) // self.page_tokens
        held = max(0, self.computed - self.rule.retained_tokens) // self.page_tokens
        sink_pages = -(-self.rule.sink_tokens // self.page_tokens)
        for i in range(-(-end // self.page_tokens)):
            if i >= self.row:  # rejected drafts leave their pages to the tokens that replace them
                if i < sink_pages or i >= keep:
                    self.window_table[i] = self.free_window.pop()
            elif sink_pages <= i < held and self.window_table[i] > 0:
                # Freed: somebody else writes it now, but the worker's table still names it.
                self.window[self.window_table[i]] = math.nan
        self.row = max(self.row, -(-end // self.page_tokens))
        positions = torch.arange(self.computed, end)
        step = RequestStep(0, n, self.computed, self.body_pages, self.window_table, self.page_tokens, self.rule)
        body_slots = self.body_pages[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
        pages = self.window_table[positions // self.page_tokens]
        return step, body_slots, pages * self.page_tokens + positions % self.page_tokens

    def run(self, q: torch.Tensor, *, scale: float, soft_cap: float = 0.0, accept: int | None = None) -> torch.Tensor:
        """Store, seal and attend the next len(q) tokens; `accept` of them stay computed."""
        n = q.shape[0]
        step, body_slots, window_slots = self.schedule(n)
        k, v = self.k[self.computed : self.computed + n], self.v[self.computed : self.computed + n]
        store(k, v, self.body, self.window, body_slots, window_slots, self.layout)
        seal(k, self.body, self.window, [step], self.layout)
        out = attend(q, k, v, self.body, self.window, step, self.layout, scale=scale, soft_cap=soft_cap)
        self.computed += n if accept is None else accept
        return out


def make_request(
    tokens: int, heads: int, layout: PageLayout, rule: Rule, dtype: torch.dtype, *, seed: int = 0, spread: float = 1.0
) -> PagedRequest:
    """A request of random keys (with a per-channel offset, as real keys have) and values on poisoned caches."""
    gen = torch.Generator().manual_seed(seed)
    offset = torch.randn(1, heads, layout.head_size, generator=gen) * 4
    k = (torch.randn(tokens, heads, layout.head_size, generator=gen) * spread + offset).to(dtype)
    v = torch.randn(tokens, heads, layout.v_size, generator=gen).to(dtype)
    n_body = -(-tokens // PAGE_TOKENS)
    n_window = -(-tokens // window_page_tokens(dtype.itemsize)) + 1
    body = nan_body(n_body + 3, heads, layout)
    window = nan_window(n_window + 3, heads, layout, dtype)
    body_pages = torch.randperm(n_body + 2, generator=gen)[:n_body] + 1
    window_pages = (torch.randperm(n_window + 2, generator=gen)[:n_window] + 1).tolist()
    return PagedRequest(k, v, body, window, layout, rule, body_pages, window_pages)
