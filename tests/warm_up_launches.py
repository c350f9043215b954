# SPDX-License-Identifier: Apache-2.0
"""What `warm_up` compiles against what steps launch; one JSON line per engine.

    python tests/warm_up_launches.py [--steps N] [--random N [--seed S]] [engine ...]

A script, because the JIT's driver is global and the other tests run Triton's interpreter. Everything
from the metadata builder to the JIT's own dispatch is real; a hook takes each compilation's key and
stops it there, so that no compiler, no card and no kernel is needed. Tensors lie on the CPU and are
never read by a kernel, only asked for dtype, shape, strides and address.
"""
from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from launch_stub import Driver
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

from bie_kernels import gluon_tiles, layout, plan, prefill, store, tuning
from bie_vllm_plugin import backend, cuda_path, vllm_compat
from bie_vllm_plugin.metadata import Int4AsymMetadata, Int4AsymMetadataBuilder
from bie_vllm_plugin.window_layer import WindowLayer

CARDS = {75: 72, 86: 82, 89: 128, 90: 132, 120: 170}
"""Multiprocessors by capability."""

CONTEXTS = (0, 100, 1024, 65536, 120000)


@dataclass(frozen=True)
class Engine:
    """One worker: its attention layers and what its scheduler may do."""

    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    head_size_v: int | None = None
    seqs: int = 256
    tokens: int = 8192
    drafts: int = 0
    arch: int = 90
    dtype: torch.dtype = torch.bfloat16
    soft_cap: float = 0.0
    flash: bool = True
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def v_size(self) -> int:
        return self.head_size_v or self.head_size


ENGINES = {
    "8b": Engine(),
    "8b-drafts": Engine(drafts=3, seqs=600),
    "rank-of-8": Engine(4, 1, seqs=100, tokens=2048, settings={"recent_tokens": 3000}),
    "d64": Engine(14, 2, 64, seqs=16, tokens=512, drafts=16, arch=86, dtype=torch.float16),
    "soft-cap": Engine(16, 8, 256, seqs=230, tokens=2048, soft_cap=50.0, drafts=1),
    "head_dim": Engine(seqs=40, arch=89, settings={"key_axis": "head_dim", "recent_tokens": 0, "sink_tokens": 1}),
    "mha-d80": Engine(32, 32, 80, seqs=18, tokens=300, arch=75, dtype=torch.float16,
                      settings={"group_size": 32, "sink_tokens": 16, "recent_tokens": 65}),
    "d192": Engine(16, 4, 192, 128, seqs=20, tokens=20, arch=120, flash=False),
}  # fmt: skip


def random_engine(seed: int) -> Engine:
    """Any engine that starts; sizes spread over orders of magnitude."""
    rng = random.Random(seed)
    kv_heads, size = rng.choice((1, 1, 2, 3, 4, 8, 16, 32)), rng.choice(layout.HEAD_SIZES)
    heads = kv_heads * rng.choice([g for g in (1, 2, 3, 4, 5, 7, 8, 12, 16) if g * kv_heads <= 64])
    axis = rng.choice(("channel", "channel", "head_dim"))
    settings = {
        "key_axis": axis, "group_size": rng.choice((64, 64, 32)), "sink_tokens": rng.choice((0, 1, 8, 16, 64)),
        "recent_tokens": rng.choice((64, 65, 128, 128, 1024, 3000, *([0, 1, 16] if axis == "head_dim" else []))),
    }  # fmt: skip
    seqs = int(2 ** rng.uniform(0, 11))
    most = max(seqs, (1 << 26) // (heads * size))  # memory
    return Engine(
        heads, kv_heads, size, rng.choice((None, None, None, 64)), seqs, rng.randint(seqs, rng.randint(seqs, most)),
        rng.choice((0, 0, 1, 3, 5, 7, 16, 20)), rng.choice(list(CARDS)), rng.choice((torch.float16, torch.bfloat16)),
        rng.choice((0.0, 0.0, 30.0)), rng.random() < 0.8, settings,
    )  # fmt: skip


class Step(NamedTuple):
    """A batch as vLLM hands it over.

    Attributes:
        lengths: (computed, query tokens) of each request, decode first.
        requests, tokens: with padding, as a captured batch brings it.
        flags: whether vLLM says which requests are prefilling (V2 runner).
        fused: q, k and v are views of one projection's output; otherwise each is on its own.
        first: row of the runner's buffers where the step's tensors start.
    """

    lengths: list[tuple[int, int]]
    requests: int = 0
    tokens: int = 0
    flags: bool = True
    fused: bool = True
    first: int = 0

    def __str__(self) -> str:
        groups: list[list] = []
        for pair in self.lengths:
            if groups and groups[-1][1] == pair:
                groups[-1][0] += 1
            else:
                groups.append([1, pair])
        return f"{' + '.join(f'{n} x {q} after {c}' for n, (c, q) in groups)} {self[1:]}"


def steps(e: Engine) -> Iterator[Step]:
    """What an engine of this kind does in its life, every batch size of decode included."""
    verify = min(1 + e.drafts, cuda_path.MAX_VERIFY_TOKENS)
    for q_len in {1, verify, 1 + e.drafts}:
        for n in range(1, min(e.seqs, e.tokens // q_len) + 1):
            yield Step([(200, q_len)] * n)
            if n % 8 == 1 or n < 8:  # captured batches hold a multiple of 8 requests, and no more than there may be
                padded = min(-(-n // 8) * 8, e.seqs, e.tokens // q_len)
                yield Step([(200, q_len)] * n, padded, padded * q_len, n % 16 == 1, n % 3 > 0)
    for n in (2, 3, 8, 15, 16, 17):  # as many short prefills as there may be
        yield Step([(i % 3 * 300, n) for i in range(min(e.seqs, e.tokens // n))])
    lengths = 1, 2, 3, 17, 63, 64, 65, 100, 255, 256, 257, 1000, 1024, 1025, 2047, 2048, 4096, 5000
    for n in (n for n in (*lengths, e.tokens - 1, e.tokens) if n <= e.tokens):
        for context in CONTEXTS:
            yield Step([(context, n)], flags=context > 100, fused=n % 2 > 0, first=n % 3)
            decodes = min((1, 7, e.seqs - 1)[n % 3], (e.tokens - n) // verify)
            if context in (0, 65536) and 0 < decodes < e.seqs:
                for q_len in {1, verify}:
                    yield Step([(1000, q_len)] * decodes + [(context, n)])
        for requests in {2, 3, 8, 16, min(e.seqs, n)}:
            if requests <= min(n, e.seqs):
                cuts = [n * i // requests for i in range(requests + 1)]
                yield Step([(i % 3 * 300, b - a) for i, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False))])


def random_steps(e: Engine, seed: int, count: int) -> Iterator[Step]:
    """Any batch that a scheduler could make, sizes spread over orders of magnitude."""
    rng = random.Random(seed)
    spread = lambda most: min(most, int(2 ** rng.uniform(0, 1 + most.bit_length())))
    for _ in range(count):
        room, lengths = spread(e.tokens), []
        q_len = rng.choice((1, 1 + e.drafts, spread(1 + e.drafts)))
        decodes = min(spread(e.seqs), room // q_len) if rng.random() < 0.7 else 0
        lengths += [(spread(100000), q_len) for _ in range(decodes)]
        room -= decodes * q_len
        few = rng.random() < 0.5
        while room > 0 and len(lengths) < e.seqs and rng.random() < (0.7 if few else 0.99):
            lengths.append((rng.choice((0, spread(100000))), spread(room if few else min(room, 64))))
            room -= lengths[-1][1]
        if lengths:
            yield Step(lengths, 0, 0, rng.random() < 0.5, rng.random() < 0.5, rng.randrange(3))


class Compiled(CompiledKernel):
    """A kernel that was never compiled and may be launched."""

    latest: ClassVar[list[Compiled]] = []
    launched: ClassVar[set[Compiled]] = set()
    module = function = packed_metadata = None

    def __init__(self, src: Any, target: GPUTarget, options: dict[str, Any], **rest: Any) -> None:
        self.src, self.options = src, options
        Compiled.latest.append(self)

    def launch_metadata(self, grid: Any, stream: int, *arguments: Any) -> None:
        return None

    def run(self, *arguments: Any) -> None:  # the JIT's dispatch
        Compiled.launched.add(self)

    def __getitem__(self, grid: Any) -> Any:  # `Launches`
        return self.run

    def special(self) -> dict[str, Any]:
        """All that another compilation may differ in."""
        names = self.src.fn.arg_names
        found = {f"type of {name}": kind for name, kind in self.src.signature.items()}
        found |= {names[i]: value for (i, *_), value in self.src.constants.items()}
        found |= {f"multiple of {names[i]}": value for (i, *_), value in self.src.attrs.items()}
        return found | {name: str(value) for name, value in self.options.items()}

    def beside(self, others: list[Compiled]) -> str:
        """The kernel's name and in what it differs from the nearest of `others`."""
        mine, apart = self.special(), []
        for other in (c.special() for c in others if c.src.name == self.src.name):
            names = sorted(mine.keys() | other.keys())
            apart.append([f"{n} {mine.get(n)}, not {other.get(n)}" for n in names if mine.get(n) != other.get(n)])
        return f"{self.src.name}: {'; '.join(min(apart, key=len)) if apart else 'the only one'}"


class Worker:
    """Two layers of an engine with real builders, caches in one packed pool and the runner's buffers."""

    LAYERS = ("layers.0.attn", "layers.1.attn")

    def __init__(self, e: Engine) -> None:
        self.engine = e
        speculation = SimpleNamespace(
            num_speculative_tokens=e.drafts, parallel_drafting=False, use_eagle_block_drop=lambda: False
        )
        self.layers: dict[str, Any] = {}
        self.config: Any = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=e.seqs, max_num_batched_tokens=e.tokens),
            model_config=SimpleNamespace(max_model_len=131072), additional_config={"int4_asym": e.settings},
            speculative_config=speculation if e.drafts else None, use_v2_model_runner=True,
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            compilation_config=SimpleNamespace(static_forward_context=self.layers),
        )  # fmt: skip
        backend.get_current_vllm_config = lambda: self.config
        for name in self.LAYERS:
            impl = backend.Int4AsymImpl(
                e.heads, e.head_size, 0.1, e.kv_heads, None, None, "int4_asym", logits_soft_cap=e.soft_cap
            )
            impl.layer_name = name
            layer = SimpleNamespace(
                num_heads=e.heads, num_kv_heads=e.kv_heads, head_size=e.head_size, head_size_v=e.v_size, impl=impl
            )
            self.layers |= {name: layer, WindowLayer.name_of(name): WindowLayer(layer)}
        first = self.layers[self.LAYERS[0]]
        self.rule, self.settings = first.impl.rule, first.impl.settings
        flash = self.flash if e.flash else None
        layers = [self.layers[name] for name in self.LAYERS]
        limits = cuda_path.flash_limits(self.config, layers, self.rule, 2, e.drafts, flash)
        size = cuda_path.workspace_bytes(self.config, layers, 1 + e.drafts, limits, 2)
        for layer in layers:
            layer.impl.workspace, layer.impl.flash_limits = torch.empty(size, dtype=torch.uint8), limits
        self._make_buffers()

    @staticmethod
    def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor, **rest: Any) -> tuple:
        return out, torch.empty(q.shape[1], q.shape[0])

    def _make_buffers(self) -> None:
        """The runner's persistent memory; one block holds a page of every layer, as under BLHNC."""
        e, pages = self.engine, self.settings.page_layout(self.engine.head_size, self.engine.v_size)
        rows = layout.WindowLayout(e.head_size, e.v_size, 2)
        self.pool = torch.zeros(2, 2 * e.kv_heads * max(pages.page_bytes, rows.page_bytes), dtype=torch.uint8)
        self.bodies, self.windows = [], []
        for i in range(len(self.LAYERS)):
            at = i * e.kv_heads * pages.page_bytes
            body = self.pool[:, at : at + e.kv_heads * pages.page_bytes]
            self.bodies.append(body.view(2, e.kv_heads, 64, pages.token_bytes))
            at = i * e.kv_heads * rows.page_bytes
            window = self.pool[:, at : at + e.kv_heads * rows.page_bytes].view(e.dtype)
            self.windows.append(window.view(2, e.kv_heads, rows.page_tokens, rows.row))
        tokens, requests = 2 * e.tokens + 64, e.seqs
        sizes = e.heads * e.head_size, e.kv_heads * e.head_size, e.kv_heads * e.v_size
        self.fused = torch.empty(tokens, sum(sizes), dtype=e.dtype).split(sizes, -1)
        self.apart = [torch.empty(tokens, n, dtype=e.dtype) for n in sizes]
        self.out = torch.empty(tokens, e.heads, e.v_size, dtype=e.dtype)
        self.slots = torch.empty(tokens, dtype=torch.int64)
        self.tables = [torch.empty(requests, n, dtype=torch.int32) for n in (131072 // 64 + 1, 131072 // 16 + 1)]
        self.starts, self.lens = (torch.zeros(requests + n, dtype=torch.int32) for n in (1, 0))

    def warm_up(self) -> None:
        """Binds the caches, as vLLM does before it says that it is ready."""
        backend._WARM.clear()
        for i, name in enumerate(self.LAYERS):
            self.layers[name].kv_cache = self.bodies[i]
            self.layers[WindowLayer.name_of(name)].bind_kv_cache(self.windows[i])
        device = torch.device("cpu")
        self.builders = []
        for window in (False, True):
            builder = Int4AsymMetadataBuilder(None, list(self.LAYERS), self.config, device)  # type: ignore[arg-type]
            builder._on_gpu, builder._window = True, window
            if not window:
                builder._flash_limits = self.layers[self.LAYERS[0]].impl.flash_limits
                builder._make_plan_buffer()
            self.builders.append(builder)

    def run(self, step: Step) -> None:
        """One step through both builders and the last layer; another than the one that was warmed up."""
        n, e = len(step.lengths), self.engine
        requests, actual = max(step.requests, n), sum(q for _, q in step.lengths)
        tokens = max(step.tokens, actual)
        self.starts[: n + 1] = torch.tensor([0, *accumulate(q for _, q in step.lengths)])
        self.starts[n + 1 :] = actual
        self.lens[:n] = torch.tensor([c + q for c, q in step.lengths])
        self.lens[n:] = 0
        starts, lens = self.starts[: requests + 1], self.lens[:requests]
        flags = torch.tensor([c == 0 or q > 1 + e.drafts for c, q in step.lengths])
        metas: list[Int4AsymMetadata] = []
        for builder, table in zip(self.builders, self.tables, strict=True):
            common: Any = SimpleNamespace(
                query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens, seq_lens_cpu_upper_bound=lens,
                num_reqs=requests, num_actual_tokens=tokens, max_query_len=max(q for _, q in step.lengths),
                is_prefilling=flags if step.flags else None, block_table_tensor=table[:requests],
                slot_mapping=self.slots[step.first :][:tokens],
            )  # fmt: skip
            metas.append(builder.build(0, common))
        vllm_compat.forward_state = lambda name: (metas[1], None)
        rows = slice(step.first, step.first + tokens + 5 * (requests > n))  # a captured batch may have more rows
        q, k, v = (x[rows] for x in (self.fused if step.fused else self.apart))
        layer = self.layers[self.LAYERS[-1]]
        layer.impl.forward(
            layer, q.view(-1, e.heads, e.head_size), k.view(-1, e.kv_heads, e.head_size),
            v.view(-1, e.kv_heads, e.v_size), self.bodies[-1], metas[0], self.out[rows],
        )  # fmt: skip


def on_card(arch: int) -> None:
    """Everything that asks for the card sees this one, new to the JIT."""
    for module in (plan, store, prefill, cuda_path, tuning):
        module.multiprocessors = lambda device: CARDS[arch]  # type: ignore[attr-defined]
    for module in (tuning, gluon_tiles):
        module.capability = lambda device: divmod(arch, 10)  # type: ignore[attr-defined]
    gluon_tiles.serves.cache_clear()
    torch.cuda.current_device = lambda: 0
    device = Driver.get_current_device(driver.active) + 1
    Driver.get_current_device = lambda self: device  # type: ignore[method-assign]
    Driver.get_current_target = lambda self: GPUTarget("cuda", arch, 32)  # type: ignore[method-assign]


def compare(e: Engine, seed: int, count: int) -> dict[str, Any]:
    """What steps launch that the warm-up does not, and the other way round."""
    on_card(e.arch)
    Compiled.latest = warmed = []
    worker = Worker(e)
    worker.warm_up()
    missing: dict[str, str] = {}
    Compiled.launched, done = set(), 0
    for step in (*steps(e), *random_steps(e, seed, count)):
        Compiled.latest = []
        worker.run(step)
        done += 1
        missing |= {new.beside(warmed): str(step) for new in Compiled.latest}
    used = Compiled.launched
    return {
        "steps": done, "kernels": sorted({c.src.name for c in used}), "compiled": len(warmed), "launched": len(used),
        "missing": missing, "idle": [c.beside(list(used)) for c in warmed if c not in used],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engines", nargs="*", default=list(ENGINES))
    parser.add_argument("--steps", type=int, default=60, help="random steps of each engine")
    parser.add_argument("--random", type=int, default=0, help="random engines in place of the named ones")
    parser.add_argument("--seed", type=int, default=0, help="of the first random engine")
    args = parser.parse_args()
    driver.set_active(Driver())
    triton.compiler.compile = Compiled
    engines = {name: ENGINES[name] for name in args.engines}
    if args.random:
        engines = {str(e): e for e in map(random_engine, range(args.seed, args.seed + args.random))}
    for seed, (name, e) in enumerate(engines.items(), args.seed):
        print(json.dumps({"engine": name, **compare(e, seed, args.steps)}), flush=True)


if __name__ == "__main__":
    main()
