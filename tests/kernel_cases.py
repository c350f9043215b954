# SPDX-License-Identifier: Apache-2.0
"""Batches on poisoned caches for the kernel tests, and what the oracle says about them.

Everything that nothing may read is NaN: unsealed keys, unwritten values, free pages, stale
window pages. Bytes come from the layout's own offsets, independent of the kernels.
"""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache

import torch

from bie_kernels import reference
from bie_kernels.layout import PAGE_TOKENS, PageLayout, window_page_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

LENGTHS = (1, 63, 64, 65, *range(127, 138))
"""Tokens of a request: around one and two pages, and a recent window and its sinks, all in one batch."""

LONG = 4097
"""One token beyond 64 pages."""


@lru_cache(maxsize=32)
def _offsets(layout: PageLayout) -> dict[str, torch.Tensor]:
    """Byte offsets and shifts of every code and metadata entry of a page."""
    tokens = range(PAGE_TOKENS)
    k = torch.tensor([[layout.k_code_byte(t, c) for c in range(layout.head_size)] for t in tokens])
    v = torch.tensor([[layout.v_code_byte(t, c) for c in range(layout.v_size)] for t in tokens])
    first = [g * layout.group_size for g in range(layout.v_groups)]
    v_meta = torch.tensor([[layout.v_meta_byte(0, t, c) for c in first] for t in tokens])
    k_meta = torch.zeros(layout.k_groups, layout.k_meta_cols, dtype=torch.long)
    for _, token, channel, row, col in reference._key_meta_entries(layout):
        k_meta[row, col] = layout.k_meta_byte(0, token, channel)
    codes = {"k": k[..., 0], "k_shift": k[..., 1], "v": v[..., 0], "v_shift": v[..., 1]}
    return codes | {"v_meta": v_meta, "k_meta": k_meta}


def _put_halves(page: torch.Tensor, offset: torch.Tensor, value: torch.Tensor) -> None:
    page.view(torch.float16)[offset.reshape(-1) // 2] = value.reshape(-1)


def put_values(page: torch.Tensor, v: torch.Tensor, tokens: torch.Tensor, layout: PageLayout) -> None:
    """Quantise v [n, E] into slots `tokens` of one page (uint8 [page_bytes])."""
    at, q = _offsets(layout), reference.quantise_values(v, layout)
    byte, shifted = at["v"][tokens].reshape(-1), (q.codes << at["v_shift"][tokens].to(torch.uint8)).reshape(-1)
    page[byte] = 0
    page.index_add_(0, byte, shifted)
    _put_halves(page, layout.v_scale + at["v_meta"][tokens], q.scale)
    _put_halves(page, layout.v_min + at["v_meta"][tokens], q.origin)


def put_keys(page: torch.Tensor, k: torch.Tensor, valid: torch.Tensor, layout: PageLayout) -> None:
    """Quantise k [64, D] into one page."""
    at, q = _offsets(layout), reference.quantise_keys(k, layout, valid)
    page[: layout.v_codes] = 0
    page.index_add_(0, at["k"].reshape(-1), (q.codes << at["k_shift"].to(torch.uint8)).reshape(-1))
    _put_halves(page, layout.k_scale + at["k_meta"], q.scale)
    _put_halves(page, layout.k_origin + at["k_meta"], q.origin)


def put_token_keys(page: torch.Tensor, k: torch.Tensor, tokens: torch.Tensor, layout: PageLayout) -> None:
    """Quantise k [n, D] into slots `tokens` of one page (head_dim axis)."""
    at = _offsets(layout)
    q = reference._along_head(k, layout.group_size, reference.quantise_zero_point)
    byte = at["k"][tokens].reshape(-1)
    page[byte] = 0
    page.index_add_(0, byte, (q.codes << at["k_shift"][tokens].to(torch.uint8)).reshape(-1))
    offset = at["k_meta"][:, tokens]
    _put_halves(page, layout.k_scale + offset, q.scale.T)
    _put_halves(page, layout.k_origin + offset, q.origin.T)


@dataclasses.dataclass
class Batch:
    """A batch before its step (`body`, `window`), the step's inputs, and the oracle's view."""

    layout: PageLayout
    sink_tokens: int
    recent_tokens: int
    retained: int
    computed: list[int]
    q_lens: list[int]
    keys: list[torch.Tensor]  # per request [S, H, D]
    values: list[torch.Tensor]  # per request [S, H, E]
    resident: list[torch.Tensor]  # per request bool [S]
    body: torch.Tensor
    window: torch.Tensor
    body_table: torch.Tensor
    window_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    body_slots: torch.Tensor
    window_slots: torch.Tensor
    k: torch.Tensor  # this step's rows [T, H, D]
    v: torch.Tensor

    def after(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The caches after store and seal, by the layout's offsets."""
        body, window = self.body.clone().cpu(), self.window.clone().cpu()
        for r, (done, n) in enumerate(zip(self.computed, self.q_lens, strict=True)):
            self._write(body, window, r, done, done + n)
        return body, window

    def rewrite(self) -> None:
        """Caches and inputs anew, after a test has changed keys or values (a batch without padding)."""
        for r, done in enumerate(self.computed):
            self._write(self.body, self.window, r, 0, done)
        _poison_window(self, self.window.shape[2])
        self.k, self.v = (
            torch.cat([x[done:] for x, done in zip(rows, self.computed, strict=True)])
            for rows in (self.keys, self.values)
        )

    def _write(self, body: torch.Tensor, window: torch.Tensor, r: int, start: int, end: int) -> None:
        layout, k, v = self.layout, self.keys[r].float(), self.values[r].float()
        for page in range(start // PAGE_TOKENS, -(-end // PAGE_TOKENS)):
            block = int(self.body_table[r, page])
            tokens = torch.arange(max(start, page * PAGE_TOKENS), min(end, (page + 1) * PAGE_TOKENS))
            sealed = page * PAGE_TOKENS + PAGE_TOKENS <= end
            for head in range(k.shape[1]):
                put_values(body[block, head], v[tokens, head], tokens % PAGE_TOKENS, layout)
                if layout.key_axis == "head_dim":
                    put_token_keys(body[block, head], k[tokens, head], tokens % PAGE_TOKENS, layout)
                elif sealed:
                    every = torch.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
                    put_keys(body[block, head], k[every, head], every >= self.sink_tokens, layout)
        size = window.shape[2]
        for j in range(start, end):
            entry = int(self.window_table[r, j // size])
            if entry > 0:
                row = torch.cat([self.keys[r][j], self.values[r][j]], -1)
                window[entry, :, j % size] = row.to(window.dtype)

    def expected(self, q: torch.Tensor, scale: float, soft_cap: float = 0.0) -> torch.Tensor:
        """The oracle's attention for q [T, Hq, D]; fp32 [T, Hq, E]."""
        out = []
        start = 0
        for r, (done, n) in enumerate(zip(self.computed, self.q_lens, strict=True)):
            k4, v4 = reference.quantised_copy(self.keys[r], self.values[r], self.layout, self.sink_tokens)
            out.append(
                reference.attention(
                    q[start : start + n].cpu(), torch.arange(done, done + n), self.keys[r], self.values[r], k4, v4,
                    scale=scale, sink_tokens=self.sink_tokens, recent_tokens=self.recent_tokens,
                    soft_cap=soft_cap, resident=self.resident[r],
                )
            )  # fmt: skip
            start += n
        return torch.cat(out) if out else torch.empty(0)

    def to(self, device: str) -> Batch:
        """The same batch with its device tensors on `device`."""
        names = ("body", "window", "body_table", "window_table", "query_start_loc", "seq_lens", "body_slots")
        moved = {n: getattr(self, n).to(device) for n in (*names, "window_slots", "k", "v")}
        return dataclasses.replace(self, **moved)


def make_batch(
    lengths: list[tuple[int, int]],
    layout: PageLayout,
    *,
    heads: int = 2,
    dtype: torch.dtype = torch.float16,
    sink_tokens: int = 8,
    recent_tokens: int = 128,
    lookahead: int = 0,
    dropped: bool = False,
    pad_tokens: int = 0,
    pad_requests: int = 0,
    seed: int = 0,
    spread: float = 1.0,
    offset: float = 4.0,
) -> Batch:
    """Requests of (computed, q_len) tokens on shuffled, poisoned pages.

    Args:
        dropped: window pages of sealed positions are gone (a relaxed prefix hit).
        pad_tokens, pad_requests: trailing padding as CUDA graphs bring it.
        offset: size of a constant per channel that keys carry, as real keys do.
    """
    gen = torch.Generator().manual_seed(seed)
    retained = recent_tokens + lookahead + 63
    size = window_page_tokens(dtype.itemsize)
    d, e = layout.head_size, layout.v_size
    total = [c + n for c, n in lengths]
    requests = len(lengths) + pad_requests
    max_body = max(-(-t // PAGE_TOKENS) for t in total) + 1
    max_window = max(-(-t // size) for t in total) + 1
    body_free = (torch.randperm(sum(-(-t // PAGE_TOKENS) for t in total) + 2, generator=gen) + 1).tolist()
    window_free = (torch.randperm(sum(-(-t // size) for t in total) + 3, generator=gen) + 1).tolist()
    stale = window_free.pop()
    body = torch.full((len(body_free) + 1, heads, layout.page_bytes), 0xFF, dtype=torch.uint8)
    window = torch.full((len(window_free) + 2, heads, size, d + e), math.nan, dtype=dtype)
    body_table = torch.zeros(requests, max_body, dtype=torch.int32)
    window_table = torch.zeros(requests, max_window, dtype=torch.int32)
    batch = Batch(
        layout, sink_tokens, recent_tokens, retained, [c for c, _ in lengths], [n for _, n in lengths], [], [], [],
        body, window, body_table, window_table, torch.zeros(requests + 1, dtype=torch.int32),
        torch.zeros(requests, dtype=torch.int32), torch.empty(0), torch.empty(0), torch.empty(0), torch.empty(0),
    )  # fmt: skip
    body_slots, window_slots = [], []
    for r, (done, n) in enumerate(lengths):
        end = done + n
        bias = torch.randn(1, heads, d, generator=gen) * offset
        batch.keys.append((torch.randn(end, heads, d, generator=gen) * spread + bias).to(dtype))
        batch.values.append(torch.randn(end, heads, e, generator=gen).to(dtype))
        for page in range(-(-end // PAGE_TOKENS)):
            body_table[r, page] = body_free.pop()
        position = torch.arange(end)
        kept = (position < sink_tokens) | (position >= done - retained)
        if dropped:
            kept &= position >= done // PAGE_TOKENS * PAGE_TOKENS
        batch.resident.append(kept)
        # What is held before the step, and new pages only for the sinks and the end state's last R tokens.
        wanted = kept.clone()
        wanted[done:] = (position[done:] < sink_tokens) | (position[done:] >= end - retained)
        for page in range(-(-end // size)):
            if wanted[page * size : (page + 1) * size].any():
                window_table[r, page] = window_free.pop()
            elif page % 2 and (page + 1) * size <= done - retained:
                window_table[r, page] = stale
        batch.query_start_loc[r + 1] = batch.query_start_loc[r] + n
        batch.seq_lens[r] = end
        if done:
            batch._write(body, window, r, 0, done)
        new = torch.arange(done, end)
        body_slots.append(body_table[r][new // PAGE_TOKENS].long() * PAGE_TOKENS + new % PAGE_TOKENS)
        window_slots.append(window_table[r][new // size].long() * size + new % size)
    _poison_window(batch, size)
    batch.query_start_loc[len(lengths) + 1 :] = batch.query_start_loc[len(lengths)]
    pad = torch.full((pad_tokens,), -1)
    batch.body_slots = torch.cat([*body_slots, pad])
    batch.window_slots = torch.cat([*window_slots, pad])
    batch.k, batch.v = (
        torch.cat([x[done:] for x, (done, _) in zip(rows, lengths, strict=True)] + [nan])
        for rows, nan in (
            (batch.keys, torch.full((pad_tokens, heads, d), math.nan, dtype=dtype)),
            (batch.values, torch.full((pad_tokens, heads, e), math.nan, dtype=dtype)),
        )
    )
    return batch


def _poison_window(batch: Batch, size: int) -> None:
    """NaN in every window row that is not resident, whatever its page."""
    for r, done in enumerate(batch.computed):
        for j in range(done):
            entry = int(batch.window_table[r, j // size])
            if entry > 0 and not batch.resident[r][j]:
                batch.window[entry, :, j % size] = math.nan


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """|out - expected| / |expected|; NaN stays NaN."""
    return float((out.float().cpu() - expected).norm() / expected.norm())


def worst_error(out: torch.Tensor, expected: torch.Tensor, q_lens: list[int]) -> float:
    """The largest `relative_error` of any request, `q_lens` rows each; NaN stays NaN."""
    parts = zip(out.split(q_lens), expected.split(q_lens), strict=True)
    return float(torch.tensor([relative_error(*part) for part in parts]).max())


class _GuardedMemory:
    """Triton's interpreter memory, where every access must fall into a tensor of the running launch.

    The null pages of the caches (the first page of `p_body` and `p_window`) belong to nobody.
    """

    def __init__(self, real) -> None:
        self._real = real
        self.ranges = torch.zeros(0, 2, dtype=torch.int64).numpy()

    def __getattr__(self, name: str):
        return getattr(self._real, name)

    def enter(self, names: list[str], args: list) -> None:
        """Remember the address ranges of a launch's tensors."""
        ranges = []
        for name, arg in zip(names, args, strict=False):
            if not isinstance(arg, torch.Tensor) or arg.numel() == 0:
                continue
            start = arg.data_ptr()
            last = sum((n - 1) * s for n, s in zip(arg.shape, arg.stride(), strict=True))
            end = start + (last + 1) * arg.element_size()
            if name in ("p_body", "p_window"):
                start += arg.stride(0) * arg.element_size()
            ranges.append((start, end))
        self.ranges = torch.tensor(sorted(ranges)).numpy()

    def _check(self, ptrs, mask, size: int) -> None:
        active = ptrs.reshape(-1)[mask.reshape(-1)].astype("int64")
        inside = torch.zeros(active.shape, dtype=torch.bool).numpy()
        for start, end in self.ranges:
            inside |= (active >= start) & (active + size <= end)
        assert inside.all(), f"{(~inside).sum()} of {inside.size} accesses outside the launch's tensors"

    def load(self, ptrs, mask, other, dtype):
        self._check(ptrs, mask, dtype.itemsize)
        return self._real.load(ptrs, mask, other, dtype)

    def store(self, ptrs, value, mask):
        self._check(ptrs, mask, value.dtype.itemsize)
        return self._real.store(ptrs, value, mask)


def guard_memory(monkeypatch) -> None:
    """Make the interpreter refuse accesses outside a launch's tensors; nothing on a card."""
    if DEVICE == "cuda":
        return
    from triton.runtime import interpreter

    memory = _GuardedMemory(interpreter._interpreter)
    host_args = interpreter.GridExecutor._init_args_hst

    def init_args(self, args_dev, kwargs):
        args, kwargs_host = host_args(self, args_dev, kwargs)
        memory.enter([*self.arg_names[: len(args)], *kwargs_host], [*args, *kwargs_host.values()])
        return args, kwargs_host

    monkeypatch.setattr(interpreter, "_interpreter", memory)
    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", init_args)
