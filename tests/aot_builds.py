# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels ahead of time, for any card, through the launchers themselves.

`python aot_builds.py NAME...` prints one JSON line per kernel built; without names, the
list of names. Must run without TRITON_INTERPRET. A launch is recorded instead of run:
its arguments give the signature, as the JIT would specialise it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from bie_kernels import decode, flash_plan, gluon_tiles, plan, prefill, prefill_flash, store, tuning  # noqa: E402
from bie_kernels.layout import PAGE_TOKENS, PageLayout  # noqa: E402

TYPES = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.uint8: "*u8",
    torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
CAPABILITIES = (80, 86, 89, 90, 100, 120)
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")


def source_of(fn: JITFunction, args: tuple, kwargs: dict) -> tuple[ASTSource, dict]:
    """The specialised source and the options of a launch `fn[grid](*args, **kwargs)`."""
    options = {key: kwargs[key] for key in OPTIONS if key in kwargs}
    values = dict(zip(fn.arg_names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in fn.arg_names}
    signature, constants, attributes = {}, {}, {}
    for index, param in enumerate(fn.params):
        value = values[param.name]
        frozen = param.do_not_specialize
        if param.is_constexpr or (type(value) is int and value == 1 and not frozen) or value is None:
            signature[param.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = TYPES[value.dtype]
            if not param.do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[param.name] = "fp32" if isinstance(value, float) else "i32"
            if type(value) is int and value % 16 == 0 and not frozen:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = GluonASTSource if isinstance(fn, GluonJITFunction) else ASTSource
    return source(fn, signature, constants, attributes), options


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack (spills live there) and local bytes of a cubin."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    fields = dict(part.split(":") for part in text.split() if part.count(":") == 1 and part[-1].isdigit())
    return {"registers": int(fields["REG"]), "stack": int(fields["STACK"]), "local": int(fields["LOCAL"])}


def build(launches: list, arch: int) -> list[dict]:
    """Compile recorded launches for sm_`arch`."""
    rows = []
    for fn, args, kwargs in launches:
        source, options = source_of(fn, args, kwargs)
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        metadata = compiled.metadata
        constants = {name: value for name, value in kwargs.items() if name in fn.arg_names}
        row = {"kernel": fn.__name__, "sm": arch, "constants": constants, "shared": metadata.shared}
        rows.append(row | resources(compiled.asm["cubin"]))
    return rows


def record(call, arch: int) -> list:  # noqa: ANN001 - a function that launches
    """The launches of `call()`, none of which runs."""
    launches = []

    def launch(self: JITFunction, grid: object):  # noqa: ANN202
        del grid
        return lambda *args, **kwargs: launches.append((self, args, kwargs))

    sms = {80: 108, 86: 82, 89: 128, 90: 132, 100: 148, 120: 170}[arch]
    with (
        mock.patch.object(JITFunction, "__getitem__", launch),
        mock.patch.object(tuning, "capability", lambda device: (arch // 10, arch % 10)),
        mock.patch.object(gluon_tiles, "capability", lambda device: (arch // 10, arch % 10)),
        mock.patch.object(plan, "multiprocessors", lambda device: sms),
    ):
        call()
    return launches


def calls(layout: PageLayout, dtype: torch.dtype, group: int, q_len: int, fast: decode.Fast) -> dict:
    """The launchers on small tensors, by family."""
    heads, requests = 8, 16
    tokens = requests * q_len
    body = torch.zeros(4, heads, layout.page_bytes, dtype=torch.uint8)
    window = torch.zeros(4, heads, 16, layout.head_size + layout.v_size, dtype=dtype)
    k = torch.zeros(tokens, heads, layout.head_size, dtype=dtype)
    v = torch.zeros(tokens, heads, layout.v_size, dtype=dtype)
    q = torch.zeros(tokens, heads * group, layout.head_size, dtype=dtype)
    out = torch.zeros(tokens, heads * group, layout.v_size, dtype=dtype)
    slots = torch.zeros(tokens, dtype=torch.int64)
    body_table = torch.zeros(requests, 1024, dtype=torch.int32)
    window_table = torch.zeros(requests, 4096, dtype=torch.int32)
    starts = torch.zeros(requests + 1, dtype=torch.int32)
    lens = torch.zeros(requests, dtype=torch.int32)
    numbers = {"sink_tokens": 8, "retained": 191}
    attention = numbers | {"scale": layout.head_size**-0.5, "recent_tokens": 128}
    workspace = torch.zeros(1 << 28, dtype=torch.uint8)

    def flash() -> None:
        """Both gathers and the merge; flash attention itself is not ours."""
        cut = flash_plan.plan_flash([0, tokens], [tokens + 4096], recent_tokens=128, slice_tokens=8192)
        lse = torch.zeros(heads * group, tokens)
        prefill_flash.prefill(
            q, k, v, body, window, body_table[:1], window_table[:1], starts[:2], lens[:1], out, workspace, layout,
            cut.to(torch.device("cpu")), lambda *args, **kwargs: (kwargs["out"], lse), **attention,
        )  # fmt: skip

    return {
        "flash": flash,
        "write": lambda: store.store_and_seal(  # as small steps do: in one launch
            k, v, body, window, slots, slots, body_table, window_table, starts, lens, layout,
            max_query_len=PAGE_TOKENS, **numbers,
        ),
        "store": lambda: store.store(k, v, body, window, slots, slots, layout),
        "seal": lambda: store.seal(
            k, body, window, body_table, window_table, starts, lens, layout, max_query_len=PAGE_TOKENS, **numbers
        ),
        "decode": lambda: decode.decode(
            q, body, window, body_table, window_table, lens, out, workspace, layout, q_len=q_len, fast=fast, **attention
        ),
        "prefill": lambda: prefill.prefill(
            q, k, v, body, window, body_table, window_table, starts, lens, out, workspace, layout, **attention
        ),
    }  # fmt: skip


def parse(name: str):  # noqa: ANN201
    """`family-sm_90-d128-bf16[-gqaN][-qN][-g32][-head_dim][-keys]` -> (launches' call, arch)."""
    family, *words = name.split("-")
    arch, size, dtype, group, q_len, group_size, axis = 90, 128, torch.bfloat16, 4, 1, 64, "channel"
    fast: decode.Fast = False
    for word in words:
        if word.startswith("sm_"):
            arch = int(word[3:])
        elif word.startswith("d"):
            size = int(word[1:])
        elif word == "fp16":
            dtype = torch.float16
        elif word.startswith("gqa"):
            group = int(word[3:])
        elif word.startswith("q"):
            q_len = int(word[1:])
        elif word == "g32":
            group_size = 32
        elif word == "head_dim":
            axis = "head_dim"
        elif word == "keys":
            fast = True
    layout = PageLayout(size, group_size=group_size, key_axis=axis)  # type: ignore[arg-type]
    return calls(layout, dtype, group, q_len, fast)[family], arch


def main(names: list[str]) -> None:
    for name in names:
        call, arch = parse(name)
        for row in build(record(call, arch), arch):
            print(json.dumps({"build": name} | row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
