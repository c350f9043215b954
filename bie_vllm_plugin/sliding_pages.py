# SPDX-License-Identifier: Apache-2.0
"""Pages of a model's own sliding-window layers beside INT4 ones; the engine and the planner ask it alike."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAX_WIDENING = 1.125
"""A block is widened by an eighth at most: pages of cached prefixes become as wide."""

WORTH = 0.98
"""And only where a request then takes 2 % less."""

ALIGNMENT = 512
"""INT4 pages grow by multiples of so many bytes, so that none starts at an odd address."""


class SlidingPages(NamedTuple):
    """Tokens of a sliding-window layer's page, and bytes that every INT4 page is padded by."""

    tokens: int
    padding: int


def sliding_pages(
    block_size: int, kernel_steps: Sequence[int], token_bytes: int, layers: int, block_bytes: int, held_tokens: int,
    full_tokens: int, bodies: int,
) -> SlidingPages:  # fmt: skip
    """Choose the pages with which a request takes the fewest bytes.

    A block is as wide as all full-attention layers' pages together, most of them INT4.
    vLLM splits the sliding-window layers into groups of as many as fit into a block; 64
    tokens in 16 bits are 3.5 times an INT4 page, so smaller pages often fit better. Where
    one layer more would nearly fit, the INT4 pages are padded until it does: every block
    grows a little and there is a group less (Gemma-3-4B: five INT4 pages are as wide as
    5.6 windowed ones; widened to six, 29 windowed layers make five groups instead of six).

    Args:
        block_size: the engine's; pages are divisors of it, so that prefix hits keep their alignment.
        kernel_steps: numbers of tokens whose multiples the layers' backend takes.
        token_bytes: of one token in one layer.
        layers: how many sliding-window layers there are.
        block_bytes: all full-attention layers' pages of `block_size` tokens; 0 for the smallest page.
        held_tokens: what a request holds, window and chunk.
        full_tokens: tokens of the longest request, for what widening costs.
        bodies: how many INT4 layers there are; 0 to leave their pages as they are.
    """
    fitting = [n for n in range(16, block_size, 16) if block_size % n == 0 and any(n % s == 0 for s in kernel_steps)]
    fitting.append(block_size)
    if not block_bytes:
        return SlidingPages(fitting[0], 0)

    def request(tokens: int, padding: int = 0) -> int:
        block = max(block_bytes + padding * bodies, tokens * token_bytes)
        groups = -(-layers // max(1, block // (tokens * token_bytes)))
        return block * (-(-full_tokens // block_size) + groups * -(-held_tokens // tokens))

    best = min((SlidingPages(n, 0) for n in fitting), key=lambda pages: request(*pages))
    if not bodies:
        return best
    widened = []
    for tokens in fitting:
        page = tokens * token_bytes
        for inside in range(block_bytes // page + 1, int(block_bytes * MAX_WIDENING) // page + 1):
            padding = -(-(inside * page - block_bytes) // bodies)
            widened.append(SlidingPages(tokens, -(-padding // ALIGNMENT) * ALIGNMENT))
    better = min(widened, key=lambda pages: request(*pages), default=best)
    return better if request(*better) < WORTH * request(*best) else best
