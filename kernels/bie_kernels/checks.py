# SPDX-License-Identifier: Apache-2.0
"""What every launcher asks of its tensors: one clear ValueError for each thing that is wrong.

Asked at every launch, so messages are only put together when they are needed.
"""

from __future__ import annotations

import torch

from bie_kernels.layout import PageLayout, window_page_tokens

MODEL_DTYPES = (torch.float16, torch.bfloat16)
"""Dtypes of the model on a GPU; fp32 models are served by the CPU path."""


def check_rows(name: str, x: torch.Tensor, heads: int | None, size: int) -> None:
    """`x` is [tokens, heads, size] in a model dtype, last dimension contiguous."""
    shape = x.shape
    if x.dtype in MODEL_DTYPES and len(shape) == 3 and shape[2] == size and shape[1] == (heads or shape[1]):
        if x.stride(2) == 1:
            return
        raise ValueError(f"{name}: the last dimension must be contiguous, its stride is {x.stride(2)}")
    if x.dtype not in MODEL_DTYPES:
        raise ValueError(f"{name} has dtype {x.dtype}; the GPU kernels take float16 and bfloat16")
    raise ValueError(f"{name} has shape {tuple(shape)}, expected [tokens, {heads or 'heads'}, {size}]")


def check_written(name: str, x: torch.Tensor) -> None:
    """No two elements of `x` lie in one place, as they do after `expand`."""
    strides = x.stride()
    if 0 in strides and any(size > 1 and stride == 0 for size, stride in zip(x.shape, strides, strict=True)):
        raise ValueError(f"{name} is written, but its strides {strides} make elements share memory")


def check_body(body: torch.Tensor, layout: PageLayout) -> int:
    """`body` is uint8 [blocks, H, page_bytes], strides multiples of 16 bytes; returns H."""
    if body.dtype != torch.uint8:
        raise ValueError(f"body has dtype {body.dtype}, expected uint8")
    if body.dim() != 3 or body.shape[2] != layout.page_bytes:
        raise ValueError(f"body has shape {tuple(body.shape)}, expected [blocks, kv_heads, {layout.page_bytes}]")
    block, head, byte = body.stride()
    if byte != 1 or (block | head | body.data_ptr()) & 15:
        raise ValueError(
            f"body: strides {body.stride()} must be multiples of 16 bytes, the last one 1, and its start aligned"
        )
    check_written("body", body)
    return body.shape[1]


def check_window(window: torch.Tensor, layout: PageLayout, heads: int, dtype: torch.dtype) -> None:
    """`window` is [pages, H, 16, D + E] in the model's dtype, last dimension contiguous."""
    if window.dtype != dtype:
        raise ValueError(f"window has dtype {window.dtype}, the model's keys have {dtype}")
    row = (heads, window_page_tokens(dtype.itemsize), layout.head_size + layout.v_size)
    if window.dim() != 4 or window.shape[1:] != row:
        raise ValueError(f"window has shape {tuple(window.shape)}, expected [pages, {', '.join(map(str, row))}]")
    page, head, token, element = window.stride()
    if element != 1:
        raise ValueError(f"window: the last dimension must be contiguous, strides {window.stride()}")
    if (page | head | token) & 7 or window.data_ptr() & 15:
        raise ValueError(f"window: strides {window.stride()} must be multiples of 16 bytes and its start aligned")
    check_written("window", window)


def check_ints(name: str, x: torch.Tensor, dtype: torch.dtype, *shape: int | None) -> int:
    """`x` is an int tensor of `shape` (None: any size), its last dimension contiguous; returns its first size."""
    sizes = x.shape
    if (
        x.dtype != dtype
        or len(sizes) != len(shape)
        or any(want is not None and want != size for want, size in zip(shape, sizes, strict=True))
    ):
        raise ValueError(f"{name} is {x.dtype} {tuple(sizes)}, expected {dtype} {shape}")
    if sizes[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name}: the last dimension must be contiguous")
    return sizes[0]


def as_dtype(name: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The memory of `x`, contiguous and 16-byte aligned, as a flat tensor of `dtype`."""
    if not x.is_contiguous() or x.data_ptr() & 15:
        raise ValueError(f"{name} must be contiguous and start at a multiple of 16 bytes")
    flat = x.reshape(-1)
    if rest := flat.numel() * flat.element_size() % dtype.itemsize:
        flat = flat.view(torch.uint8)[:-rest]
    return flat.view(dtype)


def check_numbers(sink_tokens: int, recent_tokens: int, retained: int, layout: PageLayout) -> None:
    """The three window sizes fit together and suit the key axis."""
    if sink_tokens < 0:
        raise ValueError(f"sink_tokens={sink_tokens} is negative")
    least = 64 if layout.key_axis == "channel" else 0
    if recent_tokens < least:
        raise ValueError(f"recent_tokens={recent_tokens}: key_axis {layout.key_axis!r} needs at least {least}")
    if retained < recent_tokens:
        raise ValueError(f"retained={retained} is less than recent_tokens={recent_tokens}")


def check_attention(
    q: torch.Tensor, body_table: torch.Tensor, window_table: torch.Tensor, seq_lens: torch.Tensor, out: torch.Tensor,
    heads: int, layout: PageLayout,
) -> int:  # fmt: skip
    """What decode and prefill ask of queries that passed `check_rows`, of their output and of the requests.

    Returns the number of requests.
    """
    if q.shape[1] % heads != 0:
        raise ValueError(f"q has {q.shape[1]} heads, which are no multiple of {heads} KV heads")
    check_rows("out", out, q.shape[1], layout.v_size)
    if out.dtype != q.dtype or out.shape[0] != q.shape[0]:
        raise ValueError("out must have q's tokens and dtype")
    check_written("out", out)
    requests = check_ints("seq_lens", seq_lens, torch.int32, None)
    check_ints("body_table", body_table, torch.int32, requests, None)
    check_ints("window_table", window_table, torch.int32, requests, None)
    return requests


def check_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, body: torch.Tensor, window: torch.Tensor,
    body_table: torch.Tensor, window_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor,
    out: torch.Tensor, layout: PageLayout, sink_tokens: int, recent_tokens: int, retained: int,
) -> tuple[int, int]:  # fmt: skip
    """What both ways of prefill ask, shapes as in `bie_kernels.prefill.prefill`; returns (KV heads, requests)."""
    heads = check_body(body, layout)
    check_rows("q", q, None, layout.head_size)
    check_rows("k", k, heads, layout.head_size)
    check_rows("v", v, heads, layout.v_size)
    check_window(window, layout, heads, q.dtype)
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError("q, k and v differ in dtype")
    if k.shape[0] != q.shape[0] or v.shape[0] != q.shape[0]:
        raise ValueError("q, k and v differ in tokens")
    requests = check_attention(q, body_table, window_table, seq_lens, out, heads, layout)
    check_ints("query_start_loc", query_start_loc, torch.int32, requests + 1)
    check_numbers(sink_tokens, recent_tokens, retained, layout)
    return heads, requests
