# SPDX-License-Identifier: Apache-2.0
"""Times prefill attention of one layer: `python eval/bench_prefill.py --out FILE`.

Three ways in one run: the fused kernel, flash attention on dequantised slices (both read
the packed pages; windows included), and FlashAttention on a paged 16-bit cache. The
oracle gates all three on short requests, and at full size the first two must agree, or
nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import triton
from bench_baseline import baseline_timer
from bench_cases import DEVICE, RECENT, SINK, Case, Timer
from bench_kernels import Pool

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from kernel_cases import make_batch, relative_error  # noqa: E402

from bie_kernels import flash_plan, prefill, prefill_flash  # noqa: E402
from bie_kernels.layout import SLICE_ROWS, PageLayout  # noqa: E402
from bie_vllm_plugin import vllm_compat  # noqa: E402

HEADS, GROUP, SIZE = 8, 4, 128
CASES = {
    "8k": [(0, 8192)],
    "4 x 2k": [(0, 2048)] * 4,
    "8k after 24k": [(24576, 8192)],
    "2k after 30k": [(30720, 2048)],
    "512 after 64k": [(65536, 512)],
    "100 after 64k": [(65536, 100)],
    "32 after 64k": [(65536, 32)],
    "8 x 100 after 4k": [(4096, 100)] * 8,
}


def case_of(name: str) -> Case:
    """The case as FlashAttention sees it: requests of equally many queries at the end of their context."""
    ((new,),) = [{n for _, n in CASES[name]}]
    return Case(name, tuple(c + n for c, n in CASES[name]), HEADS, GROUP, SIZE, q_len=new)


class Step:
    """One layer's inputs of a prefill step, and the ways to serve it."""

    def __init__(self, lengths: list[tuple[int, int]], pool: Pool, flash: prefill_flash.Flash | None) -> None:
        self.lengths, self.pool, self.flash, self.layout = lengths, pool, flash, pool.layout
        rows = sum(n for _, n in lengths)
        ends = tuple(c + n for c, n in lengths)
        self.body_table, self.window_table = pool.tables(ends, 1)[0]
        gen = torch.Generator(DEVICE).manual_seed(0)
        new = lambda heads: torch.randn(rows, heads, SIZE, device=DEVICE, generator=gen).to(pool.dtype)  # noqa: E731
        self.q, self.k, self.v = new(HEADS * GROUP), new(HEADS), new(HEADS)
        starts = [0]
        for _, n in lengths:
            starts.append(starts[-1] + n)
        self.starts = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
        self.lens = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        row_bytes = HEADS * 2 * SIZE * pool.dtype.itemsize
        tokens = flash_plan.slice_tokens_of(row_bytes, 1 << 20, RECENT)
        self.plan = flash_plan.plan_flash(starts, ends, recent_tokens=RECENT, slice_tokens=tokens)
        self.plan.to(torch.device(DEVICE))
        size = flash_plan.workspace_bytes(
            tokens, SLICE_ROWS, HEADS * GROUP, HEADS, pool.layout, pool.dtype.itemsize
        )
        self.workspace = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        self.numbers = dict(scale=SIZE**-0.5, sink_tokens=SINK, recent_tokens=RECENT, retained=RECENT + 63)
        self.outs = {name: torch.full_like(self.q, float("nan")) for name in ("fused", "slices")}

    def _caches(self) -> tuple:
        return (self.pool.body, self.pool.window, self.body_table, self.window_table, self.starts, self.lens)

    def fused(self) -> None:
        prefill.prefill(
            self.q, self.k, self.v, *self._caches(), self.outs["fused"], self.workspace, self.layout, **self.numbers
        )

    def slices(self) -> None:
        prefill_flash.prefill(
            self.q, self.k, self.v, *self._caches(), self.outs["slices"], self.workspace, self.layout, self.plan,
            self.flash, **self.numbers,
        )  # fmt: skip


def gate(dtype: torch.dtype, flash: prefill_flash.Flash | None) -> dict[str, float]:
    """Relative errors against the oracle on a few short requests."""
    layout, lengths = PageLayout(SIZE), [(0, 300), (700, 130), (40, 200)]
    batch = make_batch(lengths, layout, heads=2, dtype=dtype).to(DEVICE)
    body, window = (x.to(DEVICE) for x in batch.after())
    q = torch.randn(batch.k.shape[0], 2 * GROUP, SIZE).to(dtype)
    want = batch.expected(q, SIZE**-0.5)
    numbers = dict(scale=SIZE**-0.5, sink_tokens=SINK, recent_tokens=RECENT, retained=batch.retained)
    inputs = (q.to(DEVICE), batch.k, batch.v, body, window, batch.body_table, batch.window_table,
              batch.query_start_loc, batch.seq_lens)  # fmt: skip
    out = torch.full_like(inputs[0], float("nan"))
    workspace = torch.full((1 << 27,), 0xFF, dtype=torch.uint8, device=DEVICE)
    prefill.prefill(*inputs, out, workspace, layout, **numbers)
    errors = {"fused": relative_error(out, want)}
    if flash is not None:
        plan = flash_plan.plan_flash(
            batch.query_start_loc.tolist(), batch.seq_lens.tolist(), recent_tokens=RECENT, slice_tokens=2048
        ).to(torch.device(DEVICE))
        out.fill_(float("nan"))
        prefill_flash.prefill(*inputs, out, workspace, layout, plan, flash, **numbers)
        errors["slices"] = relative_error(out, want)
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--samples", type=int, default=9)
    args = parser.parse_args()
    torch.manual_seed(0)
    dtype, flash = getattr(torch, args.dtype), vllm_compat.flash_attention()
    errors = gate(dtype, flash)
    for name, error in errors.items():
        if not error < 1e-2:
            sys.exit(f"REFUSED {name}: relative error {error} against the oracle")
    versions = {"torch": torch.__version__, "triton": triton.__version__, "card": torch.cuda.get_device_name()}
    header = {"command": "python " + " ".join(sys.argv), "versions": versions, "rel_err": dict(errors)}
    print(header, flush=True)
    pool, records = Pool(PageLayout(SIZE), HEADS, 4096, dtype), []
    for case in args.cases:
        step = Step(CASES[case], pool, flash)
        timers = {}
        for name in errors:
            call = getattr(step, name)
            call()
            timers[name] = Timer([call])
        if len(errors) == 2:
            difference = relative_error(step.outs["slices"], step.outs["fused"].float().cpu())
            if not difference < 1e-2:
                sys.exit(f"REFUSED {case}: the two ways differ by {difference}")
            if baseline := baseline_timer(case_of(case), dtype):
                header["rel_err"]["fa3_bf16"] = max(baseline[0], header["rel_err"].get("fa3_bf16", 0.0))
                timers["fa3_bf16"] = baseline[1]
        for _ in range(args.samples):  # interleaved
            for timer in timers.values():
                timer.sample()
        flops = sum(4 * HEADS * GROUP * SIZE * (n * c + n * n / 2) for c, n in step.lengths)
        for name, timer in timers.items():
            record = {"case": case, "batch": len(step.lengths), "context": max(c + n for c, n in step.lengths),
                      "q_len": step.lengths[0][1], "format": name if name == "fa3_bf16" else f"int4_asym/{name}",
                      "us": round(timer.us, 1), "tflops": round(flops / timer.us / 1e6, 1)}  # fmt: skip
            records.append(record)
            print(f"{case:18s} {record['format']:18s} {record['us']:9.1f} us {record['tflops']:6.1f}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(header | {"records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
