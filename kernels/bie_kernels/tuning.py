# SPDX-License-Identifier: Apache-2.0
"""Choices per card family, kept as data: programs per multiprocessor, tile sizes, warps, pipeline stages.

What `decode_keys` takes of shared memory is known before it is compiled, so its choices are pruned by what
the card has: fewer pages in the ring, then fewer programs a multiprocessor, then fewer rows. So are those of the
fused prefill on the `head_dim` axis, the other kernel that asks too much of a small card.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import torch

from bie_kernels.layout import PAGE_TOKENS, PageLayout

Card: TypeAlias = tuple[int, int]
"""A compute capability; (0, 0) where there is no card."""

SHARED_MEMORY: dict[Card, int] = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
"""KiB that one program may use. A multiprocessor has SHARED_RESERVED more, which each of its programs takes as well."""

SHARED_RESERVED = 1
"""KiB of a program that CUDA keeps for itself."""


@dataclass(frozen=True)
class Choices:
    """What was chosen for a card family.

    Attributes:
        programs_per_sm: decode programs per multiprocessor, one wave: more splits cost more than they balance.
        min_units: pages below which a split costs more in the merge than it saves.
        rows_per_program: query rows after which a KV head is counted as two programs that share a wave. What a
            program of the fast path serves at most up to 128 channels. Beyond, and on the portable path, one serves 8
            or 16 rows, and there are more of them than counted.
        keys_tiles, keys_wide_tiles: tiles of 8 rows of a `decode_keys` program: what the registers hold, up to 128
            channels and beyond.
        keys_stages, keys_narrow_stages: pages in its ring, beyond 64 channels and up to there. Keys and values are
            refilled separately and eight warps share a multiprocessor: one page hides the latency better than two
            do, except where pages are small.
        decode_stages: pages in flight in the plain decode kernel.
        decode_whole_groups: head sizes with groups of 32 whose masked pages it reads a group at a time instead of half
            of one: there that does not spill, and the other does.
        decode_two_warps: head sizes with groups of 32 that have two warps, since one would spill; beyond 128 all have.
        prefill_rows, prefill_warps, prefill_stages: of a prefill program.
        prefill_programs_per_sm: with fewer tiles than that, pages are split over more programs.
    """

    programs_per_sm: int = 8
    min_units: int = 2
    rows_per_program: int = 24
    keys_tiles: int = 3
    keys_wide_tiles: int = 2
    keys_stages: int = 1
    keys_narrow_stages: int = 2
    decode_stages: int = 2
    decode_whole_groups: tuple[int, ...] = ()
    decode_two_warps: tuple[int, ...] = ()
    prefill_rows: int = 64
    prefill_warps: int = 4
    prefill_stages: int = 1
    prefill_programs_per_sm: int = 2


MEASURED = Choices()
"""On an H200 (see NOTES.md)."""

CHOICES: dict[Card, Choices] = {
    **dict.fromkeys(SHARED_MEMORY, MEASURED),
    (10, 0): replace(MEASURED, decode_two_warps=(80, 96, 112)),  # not measured
    (12, 0): replace(MEASURED, decode_whole_groups=(80, 256)),  # not measured
}
"""By compute capability; cards that nobody has measured take the H200's numbers, pruned by their shared memory, or
what their builds ask for."""

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


def current_device() -> torch.device:
    """The CUDA device that launches go to; the CPU where CUDA was not started."""
    if not torch.cuda.is_initialized():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@lru_cache(maxsize=32)
def family(card: Card) -> Card:
    """The key of CHOICES and SHARED_MEMORY for a card: its own, or the least roomy one of its generation.

    Without a card: the H200's.
    """
    if card in SHARED_MEMORY:
        return card
    if card == (0, 0):
        return 9, 0
    near = [known for known in SHARED_MEMORY if known[0] == card[0]] or list(SHARED_MEMORY)
    return min(near, key=lambda known: SHARED_MEMORY[known])


def choices(device: torch.device) -> Choices:
    """What was chosen for the family of `device`, before pruning."""
    return CHOICES[family(capability(device))]


def use(card: Card, chosen: Choices) -> None:
    """Replace the choices of a family: for tuning scripts and tests."""
    CHOICES[family(card)] = chosen
    _keys_tile.cache_clear()
    _prefill_tile.cache_clear()


def overlaps(device: torch.device) -> bool:
    """Whether a kernel may be launched before its predecessor ends (Hopper and later)."""
    return capability(device) >= (9, 0)


@dataclass(frozen=True)
class DecodeTile:
    """How decode is cut: rows of a program, its warps and pipeline stages, tokens of a masked page at once."""

    rows: int
    warps: int
    stages: int
    edge: int


def key_chunk(layout: PageLayout) -> int:
    """Channels of a key that the plain decode kernel multiplies at once.

    A token's codes of a thread are one aligned load, 16 bytes or 8. Wider heads in one piece keep 128 bytes a thread in
    memory. A group on the `head_dim` axis, and of the widest heads with groups of 32, whose metadata take registers.
    """
    if layout.key_axis == "head_dim" or layout.head_size > 192:
        return layout.group_size
    return 128 if layout.head_size == 128 else 64


def decode_tile(rows: int, layout: PageLayout, device: torch.device) -> DecodeTile:
    """Tile for `rows` = GQA x query tokens of one KV head in the plain Triton kernel.

    As many rows as the registers of one warp hold, since one warp needs no barriers. What does not fit even so, groups
    of 32 and the `head_dim` axis of the widest heads, has more. Masks fit beside a whole page only in the common case.
    """
    tile = 8 if rows <= 8 or layout.head_size > 128 else 16
    warps = 1
    if layout.head_size > 192 and layout.key_axis == "head_dim":
        warps = 4
    elif layout.group_size < 64 and (layout.head_size > 128 or layout.head_size in choices(device).decode_two_warps):
        warps = 2
    edge = PAGE_TOKENS if tile == 8 and layout.head_size <= 128 else 32
    small = layout.group_size < 64 and layout.head_size not in choices(device).decode_whole_groups
    if small or layout.head_size > 128 and layout.group_size == 64:
        edge = 16
    if layout.key_axis == "channel":  # a piece has one scale a channel
        edge = min(edge, layout.group_size)
    return DecodeTile(tile, warps, choices(device).decode_stages, edge)


# -- decode_keys --------------------------------------------------------------
def keys_shared(head_size: int, tiles: int, stages: int) -> int:
    """Bytes of shared memory of a `decode_keys` program: `stages` pages, queries and sums of `tiles` x 8 rows."""
    half = 64 if head_size <= 64 else 128
    parts = cdiv(head_size, half)
    meta_rows = 4 if head_size > 128 else cdiv(head_size, 64)  # scales of the values' groups, 3 are kept as 4
    page = parts * (16 * half + 2 * half) + 16 * head_size + 64 * meta_rows + 8 * 64  # halfwords
    return 2 * stages * page + tiles * (2 * 8 * half * parts + 4 * 8 + 4 * 64)


@dataclass(frozen=True)
class KeysTile:
    """How `decode_keys` cuts rows: programs, tiles of 8 rows of each and of the last, pages in the ring.

    per_sm: programs that share a multiprocessor.
    """

    programs: int
    tiles: int
    last: int
    stages: int
    per_sm: int


def prune(chosen: Choices, shared: int, rows: int, head_size: int) -> KeysTile | None:
    """`chosen` for `rows` of one KV head on a card whose programs may use `shared` KiB; None if not even a row fits.

    Rows are spread evenly over the fewest programs.
    """
    stages = chosen.keys_stages if head_size > 64 else chosen.keys_narrow_stages
    most = chosen.keys_tiles if head_size <= 128 else chosen.keys_wide_tiles
    total = cdiv(rows, 8)
    while True:
        programs = cdiv(total, most)
        tiles = cdiv(total, programs)
        need = keys_shared(head_size, tiles, stages)
        per_sm = min(chosen.programs_per_sm, (shared + SHARED_RESERVED) * 1024 // (need + SHARED_RESERVED * 1024))
        if per_sm == chosen.programs_per_sm or (per_sm > 0 and stages == 1):
            return KeysTile(programs, tiles, total - tiles * (programs - 1), stages, per_sm)
        if stages > 1:
            stages -= 1
        elif tiles > 1:
            most = tiles - 1
        else:
            return None


@lru_cache(maxsize=256)
def _keys_tile(card: Card, rows: int, head_size: int) -> KeysTile | None:
    return prune(CHOICES[family(card)], SHARED_MEMORY[family(card)], rows, head_size)


def keys_fit(head_size: int, device: torch.device) -> bool:
    """Whether the shared memory of `device` holds a `decode_keys` program."""
    return _keys_tile(capability(device), 1, head_size) is not None


def keys_tile(rows: int, head_size: int, device: torch.device | None = None) -> KeysTile:
    """Tile of `decode_keys` for `rows` = GQA x query tokens of one KV head, on the current device by default.

    Raises:
        ValueError: the card has too little shared memory.
    """
    tile = _keys_tile(capability(device or current_device()), rows, head_size)
    if tile is None:
        raise ValueError(f"decode_keys does not fit the shared memory of this card at head size {head_size}")
    return tile


def decode_programs(rows: int, head_size: int, device: torch.device) -> int:
    """Decode programs that share a multiprocessor of `device`; the plain kernel counts as `decode_keys` does."""
    tile = _keys_tile(capability(device), rows, head_size)
    return choices(device).programs_per_sm if tile is None else tile.per_sm


# -- prefill ------------------------------------------------------------------
SMALL_GROUP_ROWS = 32
"""Rows of a prefill program with groups of 32."""


@dataclass(frozen=True)
class PrefillTile:
    """Rows of a prefill program (queries x GQA), its warps and stages; programs of a multiprocessor."""

    rows: int
    warps: int
    stages: int
    per_sm: int


def prefill_shared(layout: PageLayout, rows: int) -> int:
    """Bytes of shared memory that a prefill program takes at most.

    Keys of a page, and on the `head_dim` axis the queries as they are and scaled for every group of channels. On the
    channel axis it never takes more than 128 KiB where a card has 227, and 97 elsewhere: not reckoned.
    """
    if layout.key_axis == "channel":
        return 0
    channels = max(32, power_of_2(layout.head_size))
    return 2 * channels * (PAGE_TOKENS + rows * (1 + layout.k_groups)) + 256


@lru_cache(maxsize=256)
def _prefill_tile(card: Card, layout: PageLayout) -> PrefillTile:
    chosen, shared = CHOICES[family(card)], SHARED_MEMORY[family(card)]
    rows, warps, stages = chosen.prefill_rows, chosen.prefill_warps, chosen.prefill_stages
    if layout.group_size == 32:
        # Triton 3.6 miscompiles the wgmma products of 32 channels: two warps take mma.sync.
        rows, warps, stages = SMALL_GROUP_ROWS, 2, 1
    while (need := prefill_shared(layout, rows)) > shared * 1024:
        if rows <= 16:
            raise ValueError(
                f"key_axis='head_dim' with head size {layout.head_size} and group_size={layout.group_size} needs "
                f"{cdiv(need, 1024)} KiB of shared memory to prefill, this card has {shared}; "
                "use key_axis='channel' or group_size=64"
            )
        rows //= 2
    return PrefillTile(rows, warps, stages, chosen.prefill_programs_per_sm)


def prefill_tile(layout: PageLayout, device: torch.device) -> PrefillTile:
    """Tile of the prefill kernel, with as many rows as the shared memory of `device` holds.

    Raises:
        ValueError: it does not hold 16.
    """
    return _prefill_tile(capability(device), layout)
