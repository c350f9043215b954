# SPDX-License-Identifier: Apache-2.0
"""Choices per card, kept as data: programs per multiprocessor, tile sizes, warps, pipeline stages.

Measured on an H200 (see NOTES.md); other cards take the same numbers, limited by their
shared memory, until somebody measures them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import torch

from bie_kernels.layout import PageLayout

PROGRAMS_PER_SM = 8
"""Decode programs per multiprocessor, one wave: more splits cost more than they balance."""

MIN_UNITS = 2
"""Pages below which a split costs more in the merge than it saves."""

ROWS_PER_PROGRAM = 24
"""Query rows after which a KV head is counted as two programs that share a wave.

What a program of the fast path serves at most up to 128 channels; beyond, and on the portable path, it is near enough.
"""

KEYS_TILES, KEYS_WIDE_TILES = 3, 2
"""Tiles of 8 rows of a `decode_keys` program: what the registers hold, up to 128 channels and beyond."""

KEYS_STAGES, KEYS_NARROW_STAGES = 1, 2
"""Pages in its ring, beyond 64 channels and up to there.

Keys and values are refilled separately and eight warps share a multiprocessor: one page hides the latency better
than two do, except where pages are small.
"""

SHARED_MEMORY = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
"""KiB that one program may use, by compute capability."""

INTERPRETED_SMS = 4
"""Stand-in for the multiprocessor count where there is no card."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up; Triton's own takes the host a microsecond."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least power of two that is at least n, itself at least 1; as above."""
    return 1 << max(0, n - 1).bit_length()


def interpreted() -> bool:
    """True under Triton's interpreter, which knows no inline assembly."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of `device`."""
    if device.type != "cuda":
        return INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=16)
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability, (0, 0) without a card."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def overlaps(device: torch.device) -> bool:
    """Whether a kernel may be launched before its predecessor ends (Hopper and later)."""
    return capability(device) >= (9, 0)


@dataclass(frozen=True)
class DecodeTile:
    """How decode rows are cut: rows of a program, its warps and pipeline stages."""

    rows: int
    warps: int
    stages: int


def decode_tile(rows: int) -> DecodeTile:
    """Tile for `rows` = GQA x query tokens of one KV head in the plain Triton kernel."""
    if rows <= 8:
        tile = 8
    elif rows <= 16:
        tile = 16
    else:
        tile = 32
    # One warp needs no barriers; wide heads spill a little with it, which costs less than they would.
    return DecodeTile(tile, 1 if tile <= 16 else 2, 2)


@dataclass(frozen=True)
class KeysTile:
    """How `decode_keys` cuts rows: programs, tiles of 8 rows of each and of the last, pages in the ring."""

    programs: int
    tiles: int
    last: int
    stages: int


def keys_tile(rows: int, head_size: int) -> KeysTile:
    """Tile of `decode_keys`, rows spread evenly over the fewest programs."""
    most = KEYS_TILES if head_size <= 128 else KEYS_WIDE_TILES
    total = -(-rows // 8)
    programs = -(-total // most)
    tiles = -(-total // programs)
    stages = KEYS_STAGES if head_size > 64 else KEYS_NARROW_STAGES
    return KeysTile(programs, tiles, total - tiles * (programs - 1), stages)


@dataclass(frozen=True)
class PrefillTile:
    """Rows of a prefill program (queries x GQA), its warps and stages."""

    rows: int
    warps: int
    stages: int


def prefill_tile(layout: PageLayout, device: torch.device) -> PrefillTile:
    """Tile of the prefill kernel."""
    if layout.group_size == 32:
        # Triton 3.6 miscompiles the wgmma products of 32 channels: two warps take mma.sync.
        return PrefillTile(32, 2, 1)
    return PrefillTile(64, 4, 1)
