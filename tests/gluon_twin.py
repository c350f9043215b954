# SPDX-License-Identifier: Apache-2.0
"""Runs Gluon kernels without a GPU: their Python, with torch tensors in place of Gluon's.

Gluon has no interpreter. Layouts mean nothing here (the compiler proves those with
`assert_trivial`); what is checked is everything else: orders, masks, offsets, loops, and
that a copy is waited for before its data are read (LATE copies arrive at the wait) and not
started before the place is free (others arrive at once).
"""

from __future__ import annotations

import importlib.util
import sys
import types
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import ptx
import torch
import triton.experimental
import triton.language

PARTS = ("gluon_tiles", "keys_tiles", "keys_queries", "keys_pages", "keys_window")
KERNELS = Path(__file__).resolve().parents[1] / "kernels" / "bie_kernels"


def _plain(x: Any) -> Any:
    return x.data if isinstance(x, Tensor) else getattr(x, "value", x)


class Tensor:
    """A torch tensor that behaves as Gluon's do, scalars included."""

    def __init__(self, data: Any) -> None:
        self.data = data if isinstance(data, torch.Tensor) else torch.tensor(data)

    shape = property(lambda self: list(self.data.shape))
    dtype = property(lambda self: self.data.dtype)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Tensor:
        if bitcast:
            return Tensor(self.data.contiguous().view(dtype))
        if dtype == torch.uint32:  # torch computes little with it
            return Tensor(self.data.to(torch.int64) & 0xFFFFFFFF)
        return Tensor(self.data.to(dtype))

    def broadcast_to(self, shape: list[int]) -> Tensor:
        return Tensor(self.data.broadcast_to(shape))

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)


def _operator(name: str, swapped: bool):  # noqa: ANN202
    def apply(self: Tensor, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        a, b = self.data, _plain(other)
        if swapped:
            a, b = torch.as_tensor(b), a
        return Tensor(getattr(torch, name)(a, b) if name != "floor_divide" else a // b)

    return apply


for _symbol, _name in (
    ("add", "add"), ("sub", "sub"), ("mul", "mul"), ("truediv", "div"), ("floordiv", "floor_divide"),
    ("mod", "remainder"), ("and", "bitwise_and"), ("or", "bitwise_or"), ("rshift", "bitwise_right_shift"),
    ("lt", "lt"), ("le", "le"), ("gt", "gt"), ("ge", "ge"), ("eq", "eq"),
):  # fmt: skip
    setattr(Tensor, f"__{_symbol}__", _operator(_name, False))
    setattr(Tensor, f"__r{_symbol}__", _operator(_name, True))


class Pointer:
    """Element offsets into a tensor's memory."""

    def __init__(self, base: torch.Tensor, offset: Any = 0) -> None:
        self.base, self.offset = base, torch.as_tensor(offset)
        self.dtype = types.SimpleNamespace(element_ty=base.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.base, self.offset + _plain(other))

    @property
    def memory(self) -> torch.Tensor:
        """Everything from the tensor's first element to the end of its storage."""
        size = self.base.untyped_storage().nbytes() // self.base.element_size() - self.base.storage_offset()
        return self.base.as_strided((size,), (1,))


def load(p: Pointer, mask: Any = None, other: Any = 0) -> Tensor:
    offset = p.offset.long()
    if mask is None:
        return Tensor(p.memory[offset])
    mask, offset = torch.broadcast_tensors(_plain(mask), offset)
    value = p.memory[torch.where(mask, offset, 0)]
    return Tensor(torch.where(mask, value, torch.tensor(other, dtype=value.dtype)))


def store(p: Pointer, value: Any, mask: Any = None) -> None:
    value = _plain(value)
    offset, value = torch.broadcast_tensors(p.offset.long(), value)
    mask = torch.ones_like(offset, dtype=torch.bool) if mask is None else _plain(mask).broadcast_to(offset.shape)
    p.memory[offset[mask]] = value[mask].to(p.base.dtype)


class Shared:
    """A view of shared memory; fresh memory is NaN or the code 15."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    shape = property(lambda self: list(self.data.shape))

    def index(self, i: Any) -> Shared:
        return Shared(self.data[int(_plain(i))])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.data.view(shape))

    def load(self, layout: Any) -> Tensor:
        return Tensor(self.data.clone())

    def store(self, value: Tensor) -> None:
        assert tuple(value.shape) == tuple(self.data.shape)
        self.data.copy_(value.data)


class Copies:
    """cp.async: groups of copies that arrive when they are waited for, or at once."""

    def __init__(self, late: bool) -> None:
        self.late, self.open, self.groups = late, [], []

    def copy(self, target: Shared, p: Pointer, mask: Any = None) -> None:
        assert tuple(p.offset.shape) == tuple(target.data.shape)
        value = load(p, mask).data.clone()
        if self.late:
            self.open.append((target.data, value))
        else:
            target.data.copy_(value)

    def commit_group(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, outstanding: int) -> None:
        while len(self.groups) > outstanding:
            for target, value in self.groups.pop(0):
                target.copy_(value)


@lru_cache
def _unpacked(asm: str) -> torch.Tensor:
    """What the assembly makes of every 16-bit number, from -32768 on, [65536, 4]; halves do not mix."""
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    return torch.stack([ptx.halves(register, torch.float16) for register in ptx.run(asm, [ptx.words(x)], 4)], -1)


def _assembly(asm: str, constraints: str, args: list[Tensor], dtype: Any, is_pure: bool, pack: int) -> Any:
    if "movmatrix" in asm:
        return Tensor(args[0].data.transpose(-1, -2).contiguous())
    if "0x000F000F" in asm:
        return tuple(map(Tensor, _unpacked(asm)[args[0].data.int() + 32768].unbind(-1)))
    assert "griddepcontrol" in asm
    return None


def _assembly_of(gl: types.ModuleType):  # noqa: ANN202
    """Inline assembly, which reads the numbers of programs and lanes as well."""

    def run(asm: str, *args: Any, **kwargs: Any) -> Any:
        if "%ctaid.x" in asm:
            return Tensor(torch.tensor(gl.program[0], dtype=torch.int32))
        if "%laneid" in asm:  # as in MMA: lane >> 2 is the row, lane & 3 two columns; cards check that
            i = torch.arange(8, dtype=torch.int32)
            return Tensor(4 * i + i // 2)
        return _assembly(asm, *args, **kwargs)

    return run


class _Kernel:
    """`gluon.jit`: called from another kernel as a function, launched over a grid."""

    def __init__(self, fn: Any, language: Any) -> None:
        if "tl" in fn.__globals__:  # shared with the plain kernels
            names = {k: getattr(v, "value", v) for k, v in fn.__globals__.items()} | {"tl": language}
            fn = types.FunctionType(fn.__code__, names, fn.__name__)
        self.fn, self.language = fn, language

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)

    def __getitem__(self, grid: tuple[int, ...]):  # noqa: ANN204
        def launch(*args: Any, num_warps: int, enable_fp_fusion: bool, maxnreg: int, **constants: Any) -> None:
            values = [Pointer(x) if isinstance(x, torch.Tensor) else x for x in args]
            for z in range(grid[2]):
                for y in range(grid[1]):
                    for x in range(grid[0]):
                        self.language.program = (x, y, z)
                        self.fn(*values, **constants)

        return launch


def language(late: bool) -> dict[str, types.ModuleType]:
    """Modules that stand in for Gluon's."""
    gl, gluon, ampere = types.ModuleType("gl"), types.ModuleType("gluon"), types.ModuleType("ampere")
    pair = lambda f: lambda a, b: Tensor(f(torch.as_tensor(_plain(a)), torch.as_tensor(_plain(b))))
    members: dict[str, Any] = {
        "constexpr": lambda x: x, "static_range": range, "load": load, "store": store, "barrier": lambda: None,
        "arange": lambda a, b, layout=None: Tensor(torch.arange(a, b, dtype=torch.int32)),
        "full": lambda shape, x, dtype, layout=None: Tensor(torch.full(shape, x, dtype=dtype)),
        "zeros_like": lambda x: Tensor(torch.zeros_like(x.data)),
        "where": lambda m, a, b: Tensor(torch.where(torch.as_tensor(_plain(m)), _plain(a), _plain(b))),
        "max": lambda x, axis: Tensor(x.data.amax(axis)), "min": lambda x, axis: Tensor(x.data.amin(axis)),
        "sum": lambda x, axis: Tensor(x.data.sum(axis)),
        "maximum": pair(torch.maximum), "minimum": pair(torch.minimum),
        "exp2": lambda x: Tensor(torch.exp2(x.data)), "abs": lambda x: Tensor(x.data.abs()),
        "join": lambda a, b: Tensor(torch.stack([a.data, b.data], -1)),
        "split": lambda x: tuple(Tensor(y) for y in x.data.unbind(-1)),
        "permute": lambda x, order: Tensor(x.data.permute(order)),
        "reshape": lambda x, shape: Tensor(x.data.reshape(shape)),
        "expand_dims": lambda x, axis: Tensor(x.data.unsqueeze(axis)),
        "convert_layout": lambda x, layout, assert_trivial=False: x,
        "program_id": lambda axis: Tensor(torch.tensor(gl.program[axis], dtype=torch.int32)),
        "inline_asm_elementwise": _assembly_of(gl),
        "allocate_shared_memory": lambda dtype, shape, layout: Shared(torch.full(shape, -1).to(torch.int16).repeat(
            *[1] * (len(shape) - 1), dtype.itemsize // 2).view(dtype)),
    }  # fmt: skip
    gl.__dict__.update(members)
    gl.__dict__.update({n: getattr(torch, n) for n in ("int16", "int32", "int64", "uint32", "float16", "float32")})
    for name in ("SwizzledSharedLayout", "DistributedLinearLayout", "SliceLayout", "BlockedLayout",
                 "DotOperandLayout", "NVMMADistributedLayout"):  # fmt: skip
        setattr(gl, name, lambda *args: args)
    gluon.language = gl
    gluon.constexpr_function = lambda fn: fn
    gluon.jit = lambda fn=None, **options: _Kernel(fn, gl) if fn else lambda fn: _Kernel(fn, gl)
    copies = Copies(late)
    ampere.mma_v2 = lambda a, b, c: Tensor(c.data + a.data.float() @ b.data.float())
    ampere.async_copy = types.SimpleNamespace(
        async_load=copies.copy, commit_group=copies.commit_group, wait_group=copies.wait_group
    )
    base = "triton.experimental.gluon"
    return {base: gluon, f"{base}.language": gl, f"{base}.language.nvidia.ampere": ampere}


def twin(name: str, late: bool) -> types.ModuleType:
    """Module `name` of bie_kernels, to be run with torch; `late` copies arrive when they are waited for."""
    modules = language(late)
    made: dict[str, types.ModuleType] = {}
    gluon = modules["triton.experimental.gluon"]
    with mock.patch.dict(sys.modules, modules), mock.patch.object(triton.experimental, "gluon", gluon, create=True):
        for part in (*PARTS, name):
            spec = importlib.util.spec_from_file_location(f"bie_kernels.{part}", KERNELS / f"{part}.py")
            made[part] = importlib.util.module_from_spec(spec)
            with mock.patch.dict(sys.modules, {f"bie_kernels.{k}": v for k, v in made.items()}):
                spec.loader.exec_module(made[part])
            constants = {k: v.value for k, v in vars(made[part]).items() if isinstance(v, triton.language.constexpr)}
            vars(made[part]).update(constants)  # those of the plain kernels
    module = made[name]
    module.available = lambda layout, soft_cap, device: True
    return module
