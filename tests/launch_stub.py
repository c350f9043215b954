# SPDX-License-Identifier: Apache-2.0
"""`Launches` against the JIT on a driver that launches nothing; prints how many launches agreed.

A script, because the JIT's driver is global and the other tests run Triton's interpreter.
"""

from __future__ import annotations

import random

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

from bie_kernels.launches import Launches


class Driver:
    """Takes compiled kernels and does nothing with them; `launched` is the last launch."""

    launched: tuple = ()
    utils = property(lambda self: self)

    def load_binary(self, *arguments: object) -> tuple:
        return object(), object(), 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 17}

    def launcher_cls(self, source: object, metadata: object):  # noqa: ANN202
        def launch(x: int, y: int, z: int, stream: int, function: object, packed: object, *rest: object) -> None:
            Driver.launched = ((x, y, z), function, rest[3:])

        return launch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["p_y"])
def scale_kernel(p_x, p_y, p_none, n, stride, factor, B: tl.constexpr, TWICE: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(p_x + i * stride, mask=i < n) * factor
    if TWICE:
        x = x * 2
    if p_none is not None:
        x += tl.load(p_none)
    tl.store(p_y + i, x, mask=i < n)


def main() -> None:
    driver.set_active(Driver())
    launches, rng = Launches(scale_kernel), random.Random(0)
    memory = torch.zeros(4096, dtype=torch.uint8)
    agreed = cached = 0
    for _ in range(60):
        def tensor(dtype: torch.dtype) -> torch.Tensor:
            start = rng.choice((0, 16, 4, 20))
            return memory[start : start + 256].view(dtype)

        dtype = rng.choice((torch.float32, torch.float16))
        arguments = (
            tensor(dtype), tensor(dtype), rng.choice((None, tensor(torch.float32))), rng.choice((1, 3, 16, 1 << 33)),
            rng.choice((1, 2, 16, 1024, 1 << 32, -16)), rng.choice((1.0, 0.5)),
        )  # fmt: skip
        constants = {"B": rng.choice((16, 32)), "TWICE": rng.choice((True, False)), "num_warps": rng.choice((1, 4))}
        wanted = scale_kernel[(3,)](*arguments, **constants)
        assert isinstance(wanted, CompiledKernel)
        for _ in range(2):  # the second time without the JIT
            known, Driver.launched = len(launches._known), ()
            launches[(3,)](*arguments, **constants)
            grid, function, passed = Driver.launched
            expected = (*arguments, *list(constants.values())[:2])
            same = all(a is b or a == b for a, b in zip(passed, expected, strict=True))
            assert grid == (3, 1, 1) and same, (grid, passed)
            assert function is wanted.function, f"another kernel than the JIT's for {arguments[3:]} {constants}"
            agreed += 1
            cached += len(launches._known) == known
    print(agreed, cached)


if __name__ == "__main__":
    main()
