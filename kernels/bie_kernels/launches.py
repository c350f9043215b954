# SPDX-License-Identifier: Apache-2.0
"""Launches without the JIT's dispatch, which costs the host as much as a short step's kernels take.

Triton specialises a kernel on what is known of its arguments: dtypes, 16-byte alignment, integers that are
1 or multiples of 16. `Launches` looks the compiled kernel up by just that and by the constants; the first
launch of each kind goes through the JIT and is remembered.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from triton.compiler import CompiledKernel
from triton.runtime import driver


def specialisation(arguments: tuple[Any, ...]) -> list[Any]:
    """What Triton may compile into a kernel for these arguments, or more."""
    key: list[Any] = []
    for x in arguments:
        if type(x) is int:
            if x == 1 or not -(1 << 31) <= x < 1 << 31:
                key.append(("int", x))
            else:
                key.append(x & 15 == 0)
        elif isinstance(x, torch.Tensor):
            key.append(x.dtype)
            key.append(x.data_ptr() & 15 == 0)
        else:  # floats are not specialised; None is a constant
            key.append(type(x))
    return key


class Launches:
    """`Launches(kernel)[grid](*arguments, **constants)` is `kernel[grid](...)`.

    Positional arguments are the kernel's run-time ones: tensors, integers, floats, None.
    Keywords are its constexprs, in one order at every call, and launch options, optional ones last.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._names: tuple[str, ...] = ()
        self._known: dict[tuple, tuple[CompiledKernel, tuple]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> partial[None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        if not self._known:  # nor a driver, perhaps: an interpreter
            self._first(grid, arguments, constants)
            return
        known = self._known.get(self._key(arguments, constants))
        if known is None:
            self._first(grid, arguments, constants)
            return
        compiled, rest = known
        compiled[(*grid, 1, 1)](*arguments, *rest)

    def _first(self, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        compiled = self.kernel[grid](*arguments, **constants)
        self._names = self._names or tuple(constants)
        if any(a != b for a, b in zip(constants, self._names, strict=False)):  # the key holds their values only
            raise TypeError(f"constants {tuple(constants)} of a kernel that was first launched with {self._names}")
        if isinstance(compiled, CompiledKernel):  # neither an interpreter nor a compilation under way
            names = self.kernel.arg_names[len(arguments) :]
            self._known[self._key(arguments, constants)] = compiled, tuple(constants[name] for name in names)

    @staticmethod
    def _key(arguments: tuple[Any, ...], constants: dict[str, Any]) -> tuple:
        return (driver.active.get_current_device(), *specialisation(arguments), *constants.values())
