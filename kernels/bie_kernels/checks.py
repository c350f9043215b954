# SPDX-License-Identifier: Apache-2.0
"""What every launcher asks of its tensors: one clear ValueError for each thing that is wrong."""

from __future__ import annotations

import torch

from bie_kernels.layout import PageLayout, WindowLayout

MODEL_DTYPES = (torch.float16, torch.bfloat16)
"""Dtypes of the model on a GPU; fp32 models are served by the CPU path."""


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def check_rows(name: str, x: torch.Tensor, heads: int | None, size: int) -> None:
    """`x` is [tokens, heads, size] in a model dtype, last dimension contiguous."""
    require(x.dtype in MODEL_DTYPES, f"{name} has dtype {x.dtype}; the GPU kernels take float16 and bfloat16")
    require(
        x.dim() == 3 and x.shape[2] == size and heads in (None, x.shape[1]),
        f"{name} has shape {tuple(x.shape)}, expected [tokens, {heads or 'heads'}, {size}]",
    )
    require(x.stride(2) == 1, f"{name}: the last dimension must be contiguous, its stride is {x.stride(2)}")


def check_body(body: torch.Tensor, layout: PageLayout) -> None:
    """`body` is uint8 [blocks, H, page_bytes], strides multiples of 16 bytes."""
    require(body.dtype == torch.uint8, f"body has dtype {body.dtype}, expected uint8")
    require(
        body.dim() == 3 and body.shape[2] == layout.page_bytes,
        f"body has shape {tuple(body.shape)}, expected [blocks, kv_heads, {layout.page_bytes}]",
    )
    aligned = body.stride(0) % 16 == 0 and body.stride(1) % 16 == 0 and body.data_ptr() % 16 == 0
    require(
        body.stride(2) == 1 and aligned,
        f"body: strides {body.stride()} must be multiples of 16 bytes, the last one 1, and its start aligned",
    )


def check_window(window: torch.Tensor, layout: PageLayout, heads: int, dtype: torch.dtype) -> None:
    """`window` is [pages, H, 16, D + E] in the model's dtype, last dimension contiguous."""
    rows = WindowLayout(layout.head_size, layout.v_size, dtype.itemsize)
    require(window.dtype == dtype, f"window has dtype {window.dtype}, the model's keys have {dtype}")
    require(
        window.dim() == 4 and tuple(window.shape[1:]) == (heads, rows.page_tokens, rows.row),
        f"window has shape {tuple(window.shape)}, expected [pages, {heads}, {rows.page_tokens}, {rows.row}]",
    )
    require(window.stride(3) == 1, f"window: the last dimension must be contiguous, strides {window.stride()}")
    aligned = all(s % 8 == 0 for s in window.stride()[:3]) and window.data_ptr() % 16 == 0
    require(aligned, f"window: strides {window.stride()} must be multiples of 16 bytes and its start aligned")


def check_ints(name: str, x: torch.Tensor, dtype: torch.dtype, *shape: int | None) -> None:
    """`x` is an int tensor of `shape` (None: any size), its last dimension contiguous."""
    fits = x.dim() == len(shape) and all(want in (None, size) for want, size in zip(shape, x.shape, strict=True))
    require(x.dtype == dtype and fits, f"{name} is {x.dtype} {tuple(x.shape)}, expected {dtype} {shape}")
    require(x.shape[-1] < 2 or x.stride(-1) == 1, f"{name}: the last dimension must be contiguous")


def check_numbers(sink_tokens: int, recent_tokens: int, retained: int, layout: PageLayout) -> None:
    """The three window sizes fit together and suit the key axis."""
    require(sink_tokens >= 0, f"sink_tokens={sink_tokens} is negative")
    least = 64 if layout.key_axis == "channel" else 0
    require(
        recent_tokens >= least,
        f"recent_tokens={recent_tokens}: key_axis {layout.key_axis!r} needs at least {least}",
    )
    require(retained >= recent_tokens, f"retained={retained} is less than recent_tokens={recent_tokens}")


def check_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, body: torch.Tensor, window: torch.Tensor,
    body_table: torch.Tensor, window_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor,
    out: torch.Tensor, layout: PageLayout, sink_tokens: int, recent_tokens: int, retained: int,
) -> tuple[int, int]:  # fmt: skip
    """What both ways of prefill ask, shapes as in `bie_kernels.prefill.prefill`; returns (KV heads, requests)."""
    heads, requests = body.shape[1], seq_lens.shape[0]
    check_body(body, layout)
    check_rows("q", q, None, layout.head_size)
    check_rows("k", k, heads, layout.head_size)
    check_rows("v", v, heads, layout.v_size)
    check_window(window, layout, heads, q.dtype)
    require(k.dtype == q.dtype and v.dtype == q.dtype, "q, k and v differ in dtype")
    require(k.shape[0] == q.shape[0] and v.shape[0] == q.shape[0], "q, k and v differ in tokens")
    require(q.shape[1] % heads == 0, f"{q.shape[1]} query heads are no multiple of {heads} KV heads")
    check_rows("out", out, q.shape[1], layout.v_size)
    require(out.dtype == q.dtype and out.shape[0] == q.shape[0], "out must have q's tokens and dtype")
    check_ints("body_table", body_table, torch.int32, requests, None)
    check_ints("window_table", window_table, torch.int32, requests, None)
    check_ints("query_start_loc", query_start_loc, torch.int32, requests + 1)
    check_ints("seq_lens", seq_lens, torch.int32, requests)
    check_numbers(sink_tokens, recent_tokens, retained, layout)
    return heads, requests
