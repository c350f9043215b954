# SPDX-License-Identifier: Apache-2.0
"""Inline assembly against its plain twins, bit for bit: on a CPU as PTX defines its instructions, and on a card."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import ptx  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from gluon_twin import Tensor, twin  # noqa: E402
from kernel_cases import DEVICE  # noqa: E402

from bie_kernels import fragments  # noqa: E402

EVERY = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
"""All 16-bit numbers."""


@triton.jit
def unpack_kernel(p_x, p_out, SUBNORMAL: tl.constexpr, ASM: tl.constexpr):
    i = tl.arange(0, 4096) + tl.program_id(0) * 4096
    a, b, c, d = fragments.unpack(tl.load(p_x + i), SUBNORMAL, ASM)
    tl.store(p_out + i, a)
    tl.store(p_out + 65536 + i, b)
    tl.store(p_out + 2 * 65536 + i, c)
    tl.store(p_out + 3 * 65536 + i, d)


def plain(x: torch.Tensor, subnormal: bool, asm: bool = False) -> torch.Tensor:
    """`fragments.unpack` of 65,536 numbers; the bits of its four results."""
    out = torch.empty(4, 65536, dtype=torch.float16, device=x.device)
    unpack_kernel[(16,)](x, out, SUBNORMAL=subnormal, ASM=asm, num_warps=4)
    return out.view(torch.int16)


def shuffled() -> torch.Tensor:
    """Every number in either half of a register, beside another."""
    return EVERY[torch.randperm(65536, generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize("x", [EVERY, shuffled()], ids=["in order", "shuffled"])
def test_unpacking(x: torch.Tensor) -> None:
    """Assembly, the plain Triton code and what the codes are; as numbers and, for few rows, as subnormal ones."""
    want = torch.stack([(x.int() >> (4 * i) & 15).to(torch.float16) for i in range(4)]).view(torch.int16)
    assert torch.equal(plain(x.to(DEVICE), False).cpu(), want)
    made = ptx.run(fragments.UNPACK.value, [ptx.words(x)], 4)
    assert torch.equal(torch.stack([ptx.halves(register, torch.int16) for register in made]), want)
    bits = torch.stack([x.int() >> shift & mask for shift, mask in ((0, 0x0F), (0, 0xF0), (8, 0x0F), (8, 0xF0))])
    assert torch.equal(plain(x.to(DEVICE), True).cpu(), bits.to(torch.int16))
    gluon = twin("gluon_tiles", late=False)
    units = [float(fragments.LOW_UNIT.value), float(fragments.HIGH_UNIT.value)] * 2
    codes = [y.data.float() / unit for y, unit in zip(gluon.unpack(Tensor(x)), units, strict=True)]
    assert torch.equal(torch.stack(codes).half().view(torch.int16), want)


@pytest.mark.gpu
@pytest.mark.parametrize("subnormal", [False, True])
def test_unpacking_on_a_card(subnormal: bool) -> None:
    x = shuffled().to(DEVICE)
    assert torch.equal(plain(x, subnormal), plain(x, subnormal, asm=True))


@pytest.mark.parametrize("rows", [16, 64])
def test_transposing_blocks(rows: int) -> None:
    """Where the layout puts a tile's elements, `movmatrix` transposes its 8 x 8 blocks in place."""
    module = twin("keys_tiles", late=False)
    registers, lanes, warps, blocks, shape = module.blocks_layout(rows)
    assert shape == [rows // 8, 8, 8] and not warps and not blocks
    x = torch.randint(-32768, 32768, shape, generator=torch.Generator().manual_seed(1)).to(torch.int16)

    def place(lane: int, register: int) -> tuple[int, ...]:
        """The element in a lane's register: bases of the bits that are set, xor-ed."""
        at = [0, 0, 0]
        for number, bases in ((lane, lanes), (register, registers)):
            for bit, base in enumerate(bases):
                if number >> bit & 1:
                    at = [a ^ b for a, b in zip(at, base, strict=True)]
        return tuple(at)

    held = torch.stack([torch.stack([x[place(i, j)] for j in range(2 * rows // 8)]) for i in range(32)])
    moved = ptx.halves(ptx.movmatrix(ptx.words(held)), torch.int16)  # a pair of registers is one of 32 bits
    result = torch.empty_like(x)
    for lane in range(32):
        for register in range(moved.shape[1]):
            result[place(lane, register)] = moved[lane, register]
    assert torch.equal(result, x.transpose(1, 2))
    assert torch.equal(module.transposed(Tensor(x)).data, result)
