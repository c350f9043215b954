# SPDX-License-Identifier: Apache-2.0
"""Page size of a model's own sliding-window layers; the engine and the planner ask it alike."""
from __future__ import annotations

from collections.abc import Sequence


def sliding_page_tokens(
    block_size: int, kernel_steps: Sequence[int], token_bytes: int, layers: int, block_bytes: int, held_tokens: int
) -> int:
    """Tokens of a page of the model's own sliding-window layers, so that little of a block is left over.

    A block is as wide as all full-attention layers' pages together, most of them INT4.
    vLLM splits the sliding-window layers into groups of as many as fit into a block; 64
    tokens in 16 bits are 3.5 times an INT4 page, so smaller pages often fit better.

    Args:
        block_size: the engine's; pages are divisors of it, so that prefix hits keep their alignment.
        kernel_steps: numbers of tokens whose multiples the layers' backend takes.
        token_bytes: of one token in one layer.
        layers: how many sliding-window layers there are.
        block_bytes: all full-attention layers' pages of `block_size` tokens; 0 for the smallest page.
        held_tokens: what a request holds, window and chunk.
    """
    fitting = [n for n in range(16, block_size, 16) if block_size % n == 0 and any(n % s == 0 for s in kernel_steps)]

    def blocks(tokens: int) -> int:
        groups = -(-layers // max(1, block_bytes // (tokens * token_bytes)))
        return groups * -(-held_tokens // tokens) * max(block_bytes, tokens * token_bytes)

    if not block_bytes:
        return min([*fitting, block_size])
    return min([*fitting, block_size], key=blocks)
