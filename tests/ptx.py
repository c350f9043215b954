# SPDX-License-Identifier: Apache-2.0
"""The PTX instructions of the kernels' inline assembly on torch tensors, as PTX defines them.

Registers are int64 tensors of 32-bit numbers, elementwise over whatever they are shaped like.
"""

from __future__ import annotations

import re

import torch

WORD = 0xFFFFFFFF


def words(x: torch.Tensor) -> torch.Tensor:
    """Pairs of 16-bit numbers, adjacent in the last dimension -> registers, the first in the low half."""
    return x.contiguous().view(torch.int32).to(torch.int64) & WORD


def halves(register: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`words` undone."""
    return (register - ((register >> 31) << 32)).to(torch.int32).view(dtype)


def _lop3(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: int) -> torch.Tensor:
    """Any function of three bits: that of a, b, c is bit 4 a + 2 b + c of the table."""
    result = torch.zeros_like(a)
    for bit in range(8):
        if table >> bit & 1:
            x, y, z = (r if bit >> place & 1 else ~r for r, place in ((a, 2), (b, 1), (c, 0)))
            result |= x & y & z
    return result & WORD


def _add_f16x2(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return words(halves(a, torch.float16) + halves(b, torch.float16))


OPERATIONS = {
    "lop3.b32": lambda a, b, c, table: _lop3(a, b, c, int(table.flatten()[0])),
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, n: a >> n,
    "mov.b32": lambda a: a,
    "add.rn.f16x2": _add_f16x2,
}


def run(asm: str, inputs: list[torch.Tensor], outputs: int) -> list[torch.Tensor]:
    """Registers $0 to $outputs-1 after a block of assembly; the inputs follow them.

    Raises:
        KeyError: an instruction or a register that is not known.
    """
    registers = {f"${outputs + i}": x for i, x in enumerate(inputs)}
    shape = inputs[0].shape

    def operand(text: str) -> torch.Tensor:
        if re.fullmatch(r"0x[0-9A-Fa-f]+|\d+", text):
            return torch.full(shape, int(text, 0), dtype=torch.int64)
        return registers[text]

    for statement in asm.strip().strip("{}").split(";"):
        if not (statement := statement.strip()) or statement.startswith(".reg"):
            continue
        name, rest = statement.split(None, 1)
        target, *sources = (x.strip() for x in rest.split(","))
        made = OPERATIONS[name](*(operand(x) for x in sources))
        registers[target] = made
    return [registers[f"${i}"] for i in range(outputs)]


def movmatrix(a: torch.Tensor) -> torch.Tensor:
    """`movmatrix.sync.aligned.m8n8.trans.b16`: registers of 32 lanes [32, ...] -> the same.

    Lane l holds columns 2 (l % 4) and the next of row l // 4, and gets those of the transposed matrix.
    """
    elements = {}
    for lane in range(32):
        for half in range(2):
            elements[lane // 4, 2 * (lane % 4) + half] = a[lane] >> (16 * half) & 0xFFFF
    lanes = [elements[2 * (i % 4), i // 4] | elements[2 * (i % 4) + 1, i // 4] << 16 for i in range(32)]
    return torch.stack(lanes)
