# SPDX-License-Identifier: Apache-2.0
"""A layer's whole step on the GPU path, every part of a mixed batch, against the oracle."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("vllm")

from kernel_cases import DEVICE, make_batch, relative_error  # noqa: E402
from test_prefill_flash import flash_of  # noqa: E402

from bie_kernels import decode, flash_plan, prefill  # noqa: E402
from bie_kernels.layout import PageLayout  # noqa: E402
from bie_kernels.torch_path import Rule  # noqa: E402
from bie_vllm_plugin import cuda_path  # noqa: E402
from bie_vllm_plugin.metadata import Int4AsymMetadata  # noqa: E402


@pytest.mark.parametrize(
    ("lengths", "parts", "padding"),
    [
        ([(300, 1), (70, 1), (90, 40), (500, 130)], ("decode", "fused", "flash"), 5),
        ([(300, 1), (129, 1)], ("decode",), 0),
        ([(40, 70)], ("fused",), 3),
        ([(40, 150)], ("flash",), 0),
    ],
)
def test_every_part_of_a_step(lengths: list[tuple[int, int]], parts: tuple[str, ...], padding: int) -> None:
    layout, group, flash = PageLayout(64), 2, flash_of(DEVICE)
    batch = make_batch(lengths, layout)
    b = batch.to(DEVICE)
    rule = Rule(b.sink_tokens, b.recent_tokens, b.retained)
    dtype, tokens, heads = b.window.dtype, b.k.shape[0], b.body.shape[1]
    q = torch.randn(tokens, heads * group, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    limits = cuda_path.FlashLimits(flash, 1024, 4096, b.recent_tokens, 0, 4 * heads * group * 64, 2e6)
    starts, lens = b.query_start_loc.cpu(), b.seq_lens.cpu()
    common = SimpleNamespace(
        query_start_loc=b.query_start_loc, query_start_loc_cpu=starts, seq_lens=b.seq_lens,
        seq_lens_cpu_upper_bound=lens, num_reqs=len(lengths), num_actual_tokens=tokens,
        max_query_len=max(n for _, n in lengths), is_prefilling=torch.tensor([n > 1 for _, n in lengths]),
    )  # fmt: skip
    split = cuda_path.split_batch(common, 1, limits)
    if parts == ("decode", "fused", "flash"):  # flash attention would take both prefills
        first = 3
        plan = flash_plan.plan_flash([0, 130], [630], recent_tokens=b.recent_tokens, slice_tokens=1024)
        split = cuda_path.Split(
            2, 1, b.query_start_loc[2:4] - 2, first, int(starts[first]),
            b.query_start_loc[first:] - b.query_start_loc[first], plan.to(torch.device(DEVICE)),
        )  # fmt: skip

    def meta(table: torch.Tensor, slots: torch.Tensor) -> Int4AsymMetadata:
        return Int4AsymMetadata(
            split=split, num_reqs=len(lengths), num_tokens=tokens, max_query_len=common.max_query_len,
            query_start_loc=b.query_start_loc, seq_lens=b.seq_lens, block_table=table, slot_mapping=slots,
        )  # fmt: skip

    body_meta, window_meta = meta(b.body_table, b.body_slots), meta(b.window_table, b.window_slots)
    step = body_meta.gpu_step(window_meta)
    assert body_meta.gpu_step(window_meta) is step
    assert tuple(name for name in ("decode", "fused", "flash") if getattr(step, name) is not None) == parts
    pad = lambda x: torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding), value=float("nan")).to(DEVICE)  # noqa: E731
    out = pad(torch.full_like(q, float("nan")))
    size = max(
        decode.workspace_bytes(len(lengths), heads * group, 64, 1, kv_heads=heads, device=DEVICE),
        prefill.workspace_bytes(64, device=DEVICE),
        flash_plan.workspace_bytes(1024, 4096, heads * group, heads, layout, dtype.itemsize),
    )  # fmt: skip
    cuda_path.forward(
        pad(q), pad(b.k), pad(b.v), b.body, b.window, body_meta, window_meta, layout, rule,
        torch.empty(size, dtype=torch.uint8, device=DEVICE), out, limits, scale=0.125, soft_cap=0.0,
    )  # fmt: skip
    assert relative_error(out[:tokens], batch.expected(q, 0.125)) < 8e-3
    assert out[tokens:].isnan().all()  # nothing of the padding is touched
    want_body, want_window = batch.after()
    assert torch.equal(b.body.cpu(), want_body)
    assert torch.equal(b.window.cpu().view(torch.int16), want_window.view(torch.int16))
