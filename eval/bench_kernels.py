# SPDX-License-Identifier: Apache-2.0
"""Times the attention kernels of one layer: `python eval/bench_kernels.py --out FILE`.

A correctness gate first: a kernel that misses the oracle is not timed. Times are medians
of CUDA-graph replays over page tables that rotate through memory much larger than L2,
16-bit windows included, the plan made once per step as a model's layers share it.
Prefill has a script of its own, `bench_prefill.py`.
`gb_per_s` counts the bytes of the cache that a launch must read. Exit status 1: a kernel missed the oracle.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

from bench_baseline import baseline_timer  # noqa: E402
from bench_cases import (  # noqa: E402
    DEVICE,
    L2_BYTES,
    LIMIT,
    RECENT,
    SINK,
    WINDOW_PAGE,
    Case,
    Timer,
    bytes_of_16_bit,
    bytes_read,
    suites,
)

from bie_kernels import decode, reference, store, tuning  # noqa: E402
from bie_kernels.layout import PAGE_TOKENS, PageLayout  # noqa: E402
from bie_kernels.tuning import cdiv  # noqa: E402

PATHS: dict[str, decode.Fast] = {"auto": None, "triton": False, "keys": True}
PATHS_HELP = (
    "auto: the kernel a user gets; triton: the portable one; keys: decode_keys; "
    "NAME+SETTING=n changes tuning.Choices.setting"
)

CHOSEN = dict(tuning.CHOICES)
"""As they were before any path changed them."""


def choose(path: str) -> decode.Fast:
    """`name[+SETTING=number...]` -> decode's `fast`, with the `tuning.Choices` of this card changed accordingly."""
    name, *settings = path.split("+")
    changed = {key.lower(): int(value) for key, value in (setting.split("=") for setting in settings)}
    if unknown := changed.keys() - vars(tuning.MEASURED).keys():
        raise ValueError(f"{path}: tuning has no {', '.join(unknown).upper()}")
    card = tuning.family(tuning.capability(torch.device(DEVICE if torch.cuda.is_available() else "cpu")))
    tuning.use(card, dataclasses.replace(CHOSEN[card], **changed))
    return PATHS[name]


class Pool:
    """Pages of random content, shared by all cases of a layout."""

    def __init__(self, layout: PageLayout, heads: int, pages: int, dtype: torch.dtype) -> None:
        self.layout, self.heads, self.dtype = layout, heads, dtype
        few = 64
        k = torch.randn(few * PAGE_TOKENS, heads, layout.head_size, device=DEVICE).to(dtype)
        k += torch.randn(1, heads, layout.head_size, device=DEVICE).to(dtype) * 4
        v = torch.randn(few * PAGE_TOKENS, heads, layout.v_size, device=DEVICE).to(dtype)
        self.window = torch.randn(4096, heads, WINDOW_PAGE, layout.head_size + layout.v_size, device=DEVICE).to(dtype)
        body = torch.zeros(few + 1, heads, layout.page_bytes, dtype=torch.uint8, device=DEVICE)
        table = torch.arange(1, few + 1, device=DEVICE, dtype=torch.int32)[None]
        starts = torch.tensor([0, few * PAGE_TOKENS], device=DEVICE, dtype=torch.int32)
        slots = torch.arange(few * PAGE_TOKENS, device=DEVICE) + PAGE_TOKENS
        store.store(k, v, body, self.window, slots, torch.full_like(slots, -1), layout)
        store.seal(
            k, body, self.window, table, torch.zeros(1, few * 4, device=DEVICE, dtype=torch.int32), starts,
            starts[1:], layout, sink_tokens=0, retained=191, max_query_len=few * PAGE_TOKENS,
        )  # fmt: skip
        self.body = body[1:].repeat(-(-pages // few), 1, 1)

    def tables(self, lengths: tuple[int, ...], sets: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """`sets` pairs of page tables without common pages, as far as the pool reaches."""
        most = (max(-(-n // PAGE_TOKENS) for n in lengths) // 16 + 1) * 16  # as wide as a server's, 16-byte rows
        total = sum(-(-n // PAGE_TOKENS) for n in lengths)
        order = torch.randperm(self.body.shape[0] - 1, device=DEVICE) + 1
        result = []
        for i in range(sets):
            body = torch.zeros(len(lengths), most, dtype=torch.int32)
            window = torch.zeros(len(lengths), 4 * most, dtype=torch.int32)
            start = i * total % max(1, order.shape[0] - total)
            pages = order[start : start + total].int().cpu()
            at = 0
            for r, n in enumerate(lengths):
                count = -(-n // PAGE_TOKENS)
                body[r, :count] = pages[at : at + count]
                at += count
                held = list(range(1)) + list(range(max(1, (n - 200) // WINDOW_PAGE), -(-n // WINDOW_PAGE)))
                window[r, held] = torch.randint(1, self.window.shape[0], (len(held),), dtype=torch.int32)
            result.append((body.to(DEVICE), window.to(DEVICE)))
        return result


def gate(case: Case, dtype: torch.dtype, fast: decode.Fast) -> float:
    """Relative error against the oracle on a few short requests of the case's shape."""
    layout, heads = case.layout, case.kv_heads
    lengths = [case.q_len + n for n in (130, 700, 1291)]
    most = (max(lengths) // PAGE_TOKENS // 16 + 1) * 16
    requests = len(lengths)
    body = torch.full((requests * most + 1, heads, layout.page_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
    window = torch.full(
        (requests * most * 4 + 1, heads, WINDOW_PAGE, layout.head_size + layout.v_size), float("nan"),
        dtype=dtype, device=DEVICE,
    )  # fmt: skip
    table = (torch.arange(requests * most, device=DEVICE, dtype=torch.int32) + 1).view(requests, most)
    window_table = (torch.arange(requests * most * 4, device=DEVICE, dtype=torch.int32) + 1).view(requests, most * 4)
    offset = torch.randn(1, heads, layout.head_size) * 4
    keys = [(torch.randn(n, heads, layout.head_size) + offset).to(dtype) for n in lengths]
    values = [torch.randn(n, heads, layout.v_size).to(dtype) for n in lengths]
    lens = torch.tensor(lengths, device=DEVICE, dtype=torch.int32)
    starts = torch.nn.functional.pad(lens.cumsum(0).int(), (1, 0))
    position = torch.cat([torch.arange(n) for n in lengths]).to(DEVICE)
    row = torch.repeat_interleave(torch.arange(requests), torch.tensor(lengths)).to(DEVICE)
    slots = table[row, position // PAGE_TOKENS].long() * PAGE_TOKENS + position % PAGE_TOKENS
    window_slots = window_table[row, position // WINDOW_PAGE].long() * WINDOW_PAGE + position % WINDOW_PAGE
    k, v = torch.cat(keys).to(DEVICE), torch.cat(values).to(DEVICE)
    store.store(k, v, body, window, slots, window_slots, layout)
    retained = RECENT + case.q_len + 62
    store.seal(
        k, body, window, table, window_table, starts, lens, layout, sink_tokens=SINK, retained=retained,
        max_query_len=max(lengths),
    )  # fmt: skip
    q = torch.randn(requests * case.q_len, heads * case.group, layout.head_size).to(dtype)
    out = torch.full((q.shape[0], q.shape[1], layout.v_size), float("nan"), dtype=dtype, device=DEVICE)
    numbers = dict(scale=layout.head_size**-0.5, sink_tokens=SINK, recent_tokens=RECENT)
    decode.decode(
        q.to(DEVICE), body, window, table, window_table, lens, out, workspace_for(case, requests), layout,
        q_len=case.q_len, retained=retained, fast=fast, **numbers,
    )  # fmt: skip
    want = []
    for r, n in enumerate(lengths):
        k4, v4 = reference.quantised_copy(keys[r], values[r], layout, SINK)
        rows = slice(r * case.q_len, (r + 1) * case.q_len)
        want.append(
            reference.attention(q[rows], torch.arange(n - case.q_len, n), keys[r], values[r], k4, v4, **numbers)
        )
    expected = torch.cat(want)
    return float((out.float().cpu() - expected).norm() / expected.norm())


def workspace_for(case: Case, requests: int) -> torch.Tensor:
    heads = case.kv_heads
    size = decode.workspace_bytes(
        requests, heads * case.group, case.layout.v_size, case.q_len, kv_heads=heads, device=DEVICE
    )
    return torch.empty(size, dtype=torch.uint8, device=DEVICE)


def decode_timer(case: Case, pool: Pool, dtype: torch.dtype, fast: decode.Fast) -> Timer:
    layout, requests = case.layout, len(case.lengths)
    size = bytes_read(case)
    tables = pool.tables(case.lengths, max(1, min(8, 4 * L2_BYTES // size + 1)))
    lens = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)
    q = torch.randn(requests * case.q_len, case.kv_heads * case.group, layout.head_size, device=DEVICE).to(dtype)
    out = torch.empty(q.shape[0], q.shape[1], layout.v_size, dtype=dtype, device=DEVICE)
    work = workspace_for(case, requests)
    plan = decode.plan_for(
        lens, torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE), q_heads=q.shape[1],
        kv_heads=case.kv_heads, head_size_v=layout.v_size, q_len=case.q_len, sink_tokens=SINK, recent_tokens=RECENT,
    )  # fmt: skip

    def call(table: torch.Tensor, window_table: torch.Tensor) -> Callable[[], None]:
        return lambda: decode.decode(
            q, pool.body, pool.window, table, window_table, lens, out, work, layout, q_len=case.q_len,
            scale=layout.head_size**-0.5, sink_tokens=SINK, recent_tokens=RECENT, retained=RECENT + case.q_len + 62,
            plan=plan, fast=fast,
        )  # fmt: skip

    return Timer([call(*pair) for pair in tables])


def copy_bandwidth() -> float:
    """GB/s of a large device copy, bytes read plus written."""
    a = torch.randn(1 << 29, device=DEVICE)
    b = torch.empty_like(a)
    timer = Timer([lambda: torch.mul(a, 1.0, out=b)])  # a kernel; copy_ in a graph becomes a slower memcpy node
    for _ in range(12):
        timer.sample()
    return 2 * a.numel() * 4 / timer.us / 1e3


def measure(case: Case, timers: dict[str, tuple[float, Timer]], samples: int, bandwidth: float) -> list[dict]:
    """Records of a case; `timers` holds (relative error of the gate, timer) by path."""
    for _ in range(samples):  # interleaved
        for _, timer in timers.values():
            timer.sample()
    records = []
    for path, (error, timer) in timers.items():
        size = bytes_of_16_bit(case) if path == "fa3_bf16" else bytes_read(case)
        record = {
            "case": case.name, "batch": len(case.lengths), "context": max(case.lengths), "q_len": case.q_len,
            "gqa": case.group, "head_size": case.head_size, "axis": case.axis, "group_size": case.group_size,
            "format": path if path == "fa3_bf16" else f"int4_asym/{path}", "us": round(timer.us, 2),
            "bytes": size, "gb_per_s": round(size / timer.us / 1e3),
            "of_copy": round(size / timer.us / 1e3 / bandwidth, 3), "rel_err": round(error, 6),
        }  # fmt: skip
        records.append(record)
        print(f"{case.name:24s} {record['format']:40s} {record['us']:9.2f} us {record['gb_per_s']:5d} GB/s "
              f"{record['of_copy']:.3f} err {error:.1e}", flush=True)  # fmt: skip
    return records


def bytes_written(layout: PageLayout, tokens: int, sealed: int, heads: int) -> dict[str, int]:
    """Bytes that a store of `tokens` and a seal of `sealed` pages read and write."""
    rows = 2 * (layout.head_size + layout.v_size)
    keys = PAGE_TOKENS * layout.head_size
    return {
        "store": tokens * heads * (2 * rows + layout.v_size // 2 + 4 * cdiv(layout.v_size, layout.group_size)),
        "seal": sealed * heads * (2 * keys + keys // 2 + 4 * layout.head_size),
    }


def write_records(dtype: torch.dtype) -> list[dict]:
    """Store and seal of a decode step, and of a prefill chunk; the gate reads what they wrote."""
    records = []
    layout = PageLayout(128)
    error = gate(Case("write", ()), dtype, None)
    if not error < LIMIT:
        print(f"REFUSED write: relative error {error}", flush=True)
        return []
    for batch, n, label in ((1, 1, "none sealed"), (64, 1, "none sealed"), (64, 1, "all sealed"), (1, 8192, "chunk")):
        tokens = batch * n
        length = {"none sealed": 1000, "all sealed": 1024, "chunk": n}[label]
        pool = Pool(layout, 8, batch * (length // 64 + 1) + 64, dtype)
        body_table, window_table = pool.tables((length,) * batch, 1)[0]
        k = torch.randn(tokens, 8, 128, device=DEVICE).to(dtype)
        v = torch.randn_like(k)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * n
        lens = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
        position = torch.arange(length - n, length, device=DEVICE)
        slots = (body_table[:, position // 64].long() * 64 + position % 64).reshape(-1)
        window_slots = (window_table[:, position // 16].long() * 16 + position % 16).reshape(-1)
        both = {
            "store": lambda: store.store(k, v, pool.body, pool.window, slots, window_slots, layout),  # noqa: B023
            "seal": lambda: store.seal(
                k, pool.body, pool.window, body_table, window_table, starts, lens, layout,  # noqa: B023
                sink_tokens=SINK, retained=191, max_query_len=n,  # noqa: B023
            ),
        }  # fmt: skip
        for name, call in both.items():
            timer = Timer([call])
            for _ in range(7):
                timer.sample()
            pages = {"none sealed": 0, "all sealed": batch, "chunk": n // PAGE_TOKENS}[label]
            size = bytes_written(layout, tokens, pages, 8)[name]
            records.append({"case": f"{name}, {label}", "batch": batch, "context": length, "q_len": n,
                            "format": "int4_asym", "us": round(timer.us, 2),
                            "gb_per_s": round(size / timer.us / 1e3), "rel_err": round(error, 6)})  # fmt: skip
            print(records[-1], flush=True)
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--suites", default="decode,short,ragged,verify,gqa,heads,axis,write")
    parser.add_argument("--paths", default="auto,triton", help=PATHS_HELP)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--baseline", action="store_true", help="also time FlashAttention 3, if vLLM is importable")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--gate-only", action="store_true", help="compile and check, time nothing")
    args = parser.parse_args()
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    bandwidth = copy_bandwidth()
    versions = {"torch": torch.__version__, "triton": triton.__version__, "card": torch.cuda.get_device_name()}
    if args.baseline and importlib.util.find_spec("vllm"):
        versions["vllm"] = importlib.metadata.version("vllm")
    header = {"command": "python " + " ".join(sys.argv), "versions": versions, "copy_gb_per_s": round(bandwidth)}
    print(header, flush=True)
    records: list[dict] = []
    refused = False
    pools: dict[PageLayout, Pool] = {}

    def save() -> None:
        """After every suite, so that a run cut short keeps what it measured."""
        if args.out:
            args.out.write_text(json.dumps(header | {"records": records}, indent=1) + "\n")

    for suite in args.suites.split(","):
        if suite == "write":
            written = write_records(dtype)
            refused |= not written
            records += written
            save()
            continue
        for case in suites()[suite]:
            need = sum(-(-n // PAGE_TOKENS) for n in case.lengths)
            if args.gate_only:
                need = 1
            if case.layout not in pools or pools[case.layout].body.shape[0] < need + 1:
                pools.clear()
                pages = 64 if args.gate_only else max(need + 64, 32768)
                pools[case.layout] = Pool(case.layout, case.kv_heads, pages, dtype)
            timers: dict[str, tuple[float, Timer]] = {}
            for path in args.paths.split(","):
                fast = choose(path)
                try:
                    error = gate(case, dtype, fast)
                except ValueError as reason:  # a kernel that does not serve the case
                    print(f"skipped {case.name} {path}: {reason}", flush=True)
                    continue
                if not error < LIMIT:
                    print(f"REFUSED {case.name} {path}: relative error {error}", flush=True)
                    refused = True
                    continue
                if args.gate_only:
                    continue
                timers[path] = (error, decode_timer(case, pools[case.layout], dtype, fast))
            if args.baseline and (baseline := baseline_timer(case, dtype)):
                timers["fa3_bf16"] = baseline
            records += measure(case, timers, args.samples, bandwidth)
        save()
    return int(refused)


if __name__ == "__main__":
    raise SystemExit(main())
