# SPDX-License-Identifier: Apache-2.0
"""Every byte offset of the `int4_asym` cache, and nothing else.

Two kinds of pages exist. A *body page* holds 64 tokens of one KV head in INT4
(codes first, then the 16-bit metadata); a *window page* holds 16 tokens (8 for
fp32 models) of one KV head in the model's dtype, one row `[K | V]` a token.
Pages of all heads of a layer lie one after the other.

    body page of one KV head (D = 128: 9,216 bytes)
    +----------------+----------------+---------+----------+---------+-------+
    | K codes 64*D/2 | V codes 64*E/2 | K scale | K origin | V scale | V min |
    +----------------+----------------+---------+----------+---------+-------+

`K origin` is the minimum (`key_axis: channel`) or the integer zero-point
(`key_axis: head_dim`). The code order is the one in which the fragments of
`mma.m16n8k16` want their operands, so that a thread reads its share with
16-byte loads and unpacks it with one AND/OR per two codes:

* K codes are token-major. A 32-bit word holds 8 consecutive channels, the even
  ones in the low half (nibbles 0, 1, 2, 3 = channels 0, 2, 4, 6), the odd ones
  in the high half.
* V codes come in blocks of 16 channels (512 bytes). Inside, channel c of token
  t sits in the low (c & 8 == 0) or high nibble of byte `v_code_byte(t, c)`. A
  byte never belongs to two tokens, so that a token is stored without reading.
* Per-token metadata (V always, K on the head_dim axis) is stored `[group][slot]`
  with the token's slot given by `token_slot`, the same order as in V's codes.
* Per-channel metadata (K on the channel axis) is `[group][channel]`, plain.

This module imports neither torch nor numpy: specs, kernels (as constexpr),
the reference and the tests all ask it.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

PAGE_TOKENS = 64
"""Tokens of one body page, whatever `--block-size` says."""

GROUP_SIZES = (64, 32)
"""Elements that share a scale and a minimum."""

HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
"""Head sizes that are tested; any multiple of 16 from 16 to 256 has a layout."""

CODE_MAX = 15
"""Largest 4-bit code."""

META_BYTES = 2
"""A scale, a minimum or a zero-point is one fp16 number."""

FP16_MAX = 65504.0
"""Inputs saturate here (bf16 models reach further), since metadata is fp16."""

ZERO_POINT_MAX = 2048
"""Integers up to here are exact in fp16; bounds |zero-point| on the head_dim axis."""

WINDOW_PAGE_TOKENS = 16
"""Tokens of one window page for 16-bit models."""

SLICE_BYTES = 64 << 20
"""Largest 16-bit copy of a slice of the body that prefill makes, keys and values together."""

SLICE_ROWS = 4096
"""Query tokens that attend to a slice at once; bounds their partial results."""

KeyAxis = Literal["channel", "head_dim"]


def token_slot(token: int) -> int:
    """Index of `token` (0..63) in per-token metadata, a permutation of 0..63."""
    return 16 * ((token >> 1) & 3) + 4 * (token >> 4) + 2 * ((token >> 3) & 1) + (token & 1)


def window_page_tokens(itemsize: int) -> int:
    """Tokens of a window page for elements of `itemsize` bytes.

    16 for 16-bit models and 8 for fp32: a window page must not be larger than a
    body page, or vLLM's shared pool would be cut into larger blocks for it.
    """
    if itemsize not in (2, 4):
        raise ValueError(f"window elements have 2 or 4 bytes, not {itemsize}")
    return WINDOW_PAGE_TOKENS * 2 // itemsize


@dataclass(frozen=True)
class PageLayout:
    """Offsets, in bytes, inside the body page of one KV head.

    Args:
        head_size: channels of a key (D), a multiple of 16, at most 256.
        head_size_v: channels of a value (E); `head_size` when None.
        group_size: 64 or 32 elements per scale. On the channel axis a key group
            is `group_size` tokens of one channel; otherwise a group is
            `group_size` channels of one token, the last one shorter when the
            head size is not a multiple.
        key_axis: `channel` or `head_dim`.

    Raises:
        ValueError: a head size, group size or axis that has no layout.
    """

    head_size: int
    head_size_v: int | None = None
    group_size: int = 64
    key_axis: KeyAxis = "channel"

    def __post_init__(self) -> None:
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)
        for name in ("head_size", "head_size_v"):
            size = getattr(self, name)
            if size % 16 or not 16 <= size <= 256:
                raise ValueError(f"{name}={size}: int4_asym needs a multiple of 16 from 16 to 256")
        if self.group_size not in GROUP_SIZES:
            raise ValueError(f"group_size={self.group_size}: int4_asym offers {GROUP_SIZES}")
        if self.key_axis not in ("channel", "head_dim"):
            raise ValueError(f"key_axis={self.key_axis!r}: int4_asym offers 'channel' and 'head_dim'")

    @cached_property
    def v_size(self) -> int:
        """Channels of a value, never None."""
        assert self.head_size_v is not None
        return self.head_size_v

    # -- groups ---------------------------------------------------------------
    @cached_property
    def k_groups(self) -> int:
        """Key groups: along the page's tokens (channel) or the head (head_dim)."""
        if self.key_axis == "channel":
            return PAGE_TOKENS // self.group_size
        return -(-self.head_size // self.group_size)

    @cached_property
    def v_groups(self) -> int:
        """Value groups of one token."""
        return -(-self.v_size // self.group_size)

    @cached_property
    def k_meta_cols(self) -> int:
        """Entries of one row of key metadata: channels or token slots."""
        return self.head_size if self.key_axis == "channel" else PAGE_TOKENS

    # -- offsets --------------------------------------------------------------
    @cached_property
    def k_row_bytes(self) -> int:
        """Bytes of one token's key codes."""
        return self.head_size // 2

    @cached_property
    def k_codes(self) -> int:
        """Offset of the key codes."""
        return 0

    @cached_property
    def v_codes(self) -> int:
        """Offset of the value codes."""
        return PAGE_TOKENS * self.head_size // 2

    @cached_property
    def k_scale(self) -> int:
        """Offset of the key scales."""
        return self.v_codes + PAGE_TOKENS * self.v_size // 2

    @cached_property
    def k_origin(self) -> int:
        """Offset of the key minima (channel) or zero-points (head_dim)."""
        return self.k_scale + self.k_groups * self.k_meta_cols * META_BYTES

    @cached_property
    def v_scale(self) -> int:
        """Offset of the value scales."""
        return self.k_origin + self.k_groups * self.k_meta_cols * META_BYTES

    @cached_property
    def v_min(self) -> int:
        """Offset of the value minima."""
        return self.v_scale + self.v_groups * PAGE_TOKENS * META_BYTES

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of the body page of one KV head."""
        return self.v_min + self.v_groups * PAGE_TOKENS * META_BYTES

    @cached_property
    def token_bytes(self) -> int:
        """Bytes per token and KV head, K and V together (144 at D = 128)."""
        assert self.page_bytes % PAGE_TOKENS == 0
        return self.page_bytes // PAGE_TOKENS

    @cached_property
    def bits_per_element(self) -> float:
        """Allocated bits per cached element, metadata included."""
        return 8 * self.page_bytes / (PAGE_TOKENS * (self.head_size + self.v_size))

    # -- codes ----------------------------------------------------------------
    def k_code_byte(self, token: int, channel: int) -> tuple[int, int]:
        """Byte offset in the page and bit shift (0 or 4) of a key code."""
        nibble = (channel >> 1) & 3
        byte = token * self.k_row_bytes + 4 * (channel >> 3) + 2 * (channel & 1) + (nibble >> 1)
        return self.k_codes + byte, 4 * (nibble & 1)

    def v_code_byte(self, token: int, channel: int) -> tuple[int, int]:
        """Byte offset in the page and bit shift (0 or 4) of a value code."""
        byte = (
            512 * (channel >> 4)
            + 64 * (channel & 7)
            + 16 * ((token >> 1) & 3)
            + 4 * (token >> 4)
            + 2 * (token & 1)
            + ((token >> 3) & 1)
        )
        return self.v_codes + byte, 4 * ((channel >> 3) & 1)

    # -- metadata -------------------------------------------------------------
    def k_meta_byte(self, base: int, token: int, channel: int) -> int:
        """Byte offset of the metadata entry of a key element; `base` is `k_scale` or `k_origin`."""
        if self.key_axis == "channel":
            entry = (token // self.group_size) * self.head_size + channel
        else:
            entry = (channel // self.group_size) * PAGE_TOKENS + token_slot(token)
        return base + META_BYTES * entry

    def v_meta_byte(self, base: int, token: int, channel: int) -> int:
        """Byte offset of the metadata entry of a value element; `base` is `v_scale` or `v_min`."""
        return base + META_BYTES * ((channel // self.group_size) * PAGE_TOKENS + token_slot(token))


@dataclass(frozen=True)
class WindowLayout:
    """Offsets, in elements, inside the window page of one KV head: rows `[K | V]`.

    Args:
        head_size: channels of a key.
        head_size_v: channels of a value.
        itemsize: bytes per element of the model's dtype, 2 or 4.
    """

    head_size: int
    head_size_v: int
    itemsize: int

    @property
    def page_tokens(self) -> int:
        """Tokens of a page: 16, or 8 in fp32."""
        return window_page_tokens(self.itemsize)

    @property
    def row(self) -> int:
        """Elements of one token's row."""
        return self.head_size + self.head_size_v

    @property
    def v_column(self) -> int:
        """Element at which the value starts in a row."""
        return self.head_size

    @property
    def page_bytes(self) -> int:
        """Bytes of the window page of one KV head."""
        return self.page_tokens * self.row * self.itemsize
