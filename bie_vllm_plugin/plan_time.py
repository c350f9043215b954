# SPDX-License-Identifier: Apache-2.0
"""How fast it can be at best: bytes of a decode step over a bandwidth.

Decoding reads all weights and the whole cache once per token, so bandwidth sets a
ceiling that no kernel beats. What does not fit and is read over PCIe instead makes
every step longer by its bytes over the bus; that cliff is shown before it happens.
"""
from __future__ import annotations

from dataclasses import dataclass

from bie_vllm_plugin.plan_layers import Layer
from bie_vllm_plugin.plan_units import GIB, PlanError


@dataclass(frozen=True)
class Card:
    """A graphics card by its vendor's data sheet.

    Attributes:
        name: as on the command line.
        memory: bytes (vendors' GB of VRAM are GiB).
        bandwidth: bytes per second of its memory.
        pcie: bytes per second of its bus, one way, by the standard (generation x lanes).
    """

    name: str
    memory: int
    bandwidth: float
    pcie: float


PCIE = {"3x16": 15.75e9, "4x8": 15.75e9, "4x16": 31.5e9, "5x8": 31.5e9, "5x16": 63.0e9}

CARDS: dict[str, Card] = {
    name: Card(name, gib * GIB, rate * 1e9, PCIE[bus])
    for name, gib, rate, bus in (
        ("rtx-4060", 8, 272, "4x8"),
        ("rtx-3060-ti", 8, 448, "4x16"),
        ("rtx-3070", 8, 448, "4x16"),
        ("rtx-5060", 8, 448, "5x8"),
        ("rtx-3080", 10, 760, "4x16"),
        ("rtx-3060", 12, 360, "4x16"),
        ("rtx-4070", 12, 504, "4x16"),
        ("rtx-5070", 12, 672, "5x16"),
        ("t4", 16, 320, "3x16"),
        ("rtx-4060-ti-16gb", 16, 288, "4x8"),
        ("rtx-5060-ti-16gb", 16, 448, "5x8"),
        ("rtx-4080", 16, 716.8, "4x16"),
        ("rtx-5080", 16, 960, "5x16"),
        ("l4", 24, 300, "4x16"),
        ("a10", 24, 600, "4x16"),
        ("rtx-3090", 24, 936, "4x16"),
        ("rtx-4090", 24, 1008, "4x16"),
        ("rtx-5090", 32, 1792, "5x16"),
        ("a100-40gb", 40, 1555, "4x16"),
        ("l40s", 48, 864, "4x16"),
        ("a100-80gb", 80, 2039, "4x16"),
        ("h100", 80, 3350, "5x16"),
        ("h200", 141, 4800, "5x16"),
    )
}
"""From small to large."""

TYPICAL = {8: "rtx-4060", 10: "rtx-3080", 12: "rtx-3060", 16: "rtx-4060-ti-16gb", 24: "rtx-4090", 32: "rtx-5090"}
"""The card that a plain `--vram` is read as, for its bandwidth."""


def find_card(name: str) -> Card:
    """The card of that name.

    Raises:
        PlanError: not in the table.
    """
    key = name.lower().replace("nvidia", "").replace("geforce", "").strip(" -_").replace(" ", "-").replace("_", "-")
    if key not in CARDS:
        raise PlanError(
            f"--card {name} is not in the table; give --vram and --bandwidth, or one of {', '.join(CARDS)}."
        )
    return CARDS[key]


def typical_card(vram: int) -> Card:
    """A common card with about this much memory (the largest not above it, else the smallest)."""
    fitting = [card for card in CARDS.values() if card.memory <= vram * 1.05]
    gib = round(vram / GIB)
    if gib in TYPICAL:
        return CARDS[TYPICAL[gib]]
    return fitting[-1] if fitting else next(iter(CARDS.values()))


def cache_read_bytes(layers_and_bytes: list[tuple[Layer, int]], context: int) -> int:
    """Bytes of cache that one decode step of one sequence reads at `context` tokens.

    Args:
        layers_and_bytes: each attention layer and its bytes per token; each state layer and its bytes.
        context: tokens before the step.
    """
    total = 0
    for layer, size in layers_and_bytes:
        if layer.kind == "state":
            total += size
        elif layer.kind in ("sliding", "chunked"):
            total += size * min(context, layer.window)
        else:
            total += size * context
    return total


@dataclass(frozen=True)
class StepTime:
    """Ceiling of decoding.

    Attributes:
        bytes_read: from the card's memory per step, all sequences together.
        seconds: of one step, at least.
        sequences: tokens that a step yields.
    """

    bytes_read: int
    seconds: float
    sequences: int

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences together, at most."""
        return self.sequences / self.seconds


def step_time(
    weights: int, cache: int, sequences: int, bandwidth: float, spilled: int = 0, pcie: float = 1.0
) -> StepTime:
    """Ceiling of a decode step.

    Args:
        weights: bytes of weights that a step reads, on one GPU.
        cache: bytes of cache that it reads per sequence, on one GPU.
        sequences: sequences in the batch.
        bandwidth: bytes per second of the card's memory.
        spilled: of all these, bytes that lie in host memory.
        pcie: bytes per second of the bus.
    """
    read = weights + cache * sequences
    far = min(spilled, read)
    return StepTime(read, (read - far) / bandwidth + far / pcie, sequences)
