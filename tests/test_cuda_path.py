# SPDX-License-Identifier: Apache-2.0
"""Which rows of a batch go to which GPU kernel: decided on the host, testable without a card."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from bie_vllm_plugin import cuda_path  # noqa: E402

LIMITS = cuda_path.FlashLimits(
    flash=lambda *args, **kwargs: None, slice_tokens=16384, rows=4096, recent_tokens=128, drafts=3,
    pair_work=4 * 32 * 128, launch_work=7.9e9,
)  # fmt: skip


def batch(lengths: list[tuple[int, int]], prefilling: list[bool] | None = None) -> SimpleNamespace:
    """vLLM's metadata of requests (computed, q_len), as vLLM orders them; `prefilling` leaves padding out."""
    starts = torch.tensor([0, *accumulate(n for _, n in lengths)], dtype=torch.int32)
    seq_lens = torch.tensor([c + n for c, n in lengths], dtype=torch.int32)
    return SimpleNamespace(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=seq_lens, seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=len(lengths), num_actual_tokens=int(starts[-1]), max_query_len=max(n for _, n in lengths),
        is_prefilling=None if prefilling is None else torch.tensor(prefilling),
    )  # fmt: skip


def split(lengths: list[tuple[int, int]], limits=LIMITS, *, threshold: int = 1, prefilling: list[bool] | None = None):
    return cuda_path.split_batch(batch(lengths, prefilling), threshold, limits)


def test_decodes_only() -> None:
    s = split([(1000, 1)] * 3)
    assert (s.decodes, s.q_len, s.starts, s.plan) == (3, 1, None, None)


def test_a_long_chunk_goes_to_flash_attention_and_the_decodes_do_not() -> None:
    s = split([(1000, 1), (20, 1), (30000, 2048), (0, 700)])
    assert (s.decodes, s.starts, s.flash_first, s.flash_row) == (2, None, 2, 2)
    assert s.flash_starts.tolist() == [0, 2048, 2748]
    assert s.plan.numbers is not None and s.plan.bands


def test_little_work_stays_in_one_launch() -> None:
    s = split([(0, 1024)])
    assert s.plan is None and s.starts.tolist() == [0, 1024]
    assert split([(65536, 100)]).plan is None  # 0.8 ms of the fused kernel, and of launches where hosts are slow
    assert split([(65536, 150)]).plan.launches == 17
    assert split([(4096, 20)] * 8).plan is None
    assert split([(0, 2048)] * 4).plan is not None  # no more work, but the device has enough else to do


def test_other_lengths_than_those_warmed_up_are_prefilled() -> None:
    s = split([(500, 3)] * 2, threshold=4, prefilling=[False, False])
    assert s.decodes == 0 and s.starts.tolist() == [0, 3, 6]
    assert split([(500, 4)] * 2, threshold=4).decodes == split([(500, 1)] * 2, threshold=4).decodes == 2


def test_without_flash_attention_all_is_fused() -> None:
    assert split([(0, 16384)], None).plan is None


def test_rows_with_drafts_in_flight_are_not_trusted() -> None:
    """Three drafts of a request that may have lost the last three: its length on the host is an upper bound."""
    lengths = [(500, 4), (500, 3), (30000, 2048)]
    s = split(lengths, threshold=4)
    assert (s.decodes, s.q_len) == (1, 4)
    assert s.starts.tolist() == [0, 3] and (s.flash_first, s.flash_row) == (2, 7)
    # Such rows behind the chunk keep the whole batch out of it, unless vLLM says that they are prefill.
    behind = [(30000, 2048), (500, 3)]
    assert split(behind, threshold=4).plan is None
    s = split(behind, threshold=4, prefilling=[True, True])
    assert s.flash_first == 0 and s.flash_starts.tolist() == [0, 2048, 2051]
    assert split(behind, threshold=4, prefilling=[True, False]).plan is None


def test_padding_behind_the_batch() -> None:
    """A captured batch is padded with requests without rows; the flags of the V2 runner leave them out."""
    lengths = [(500, 17), (500, 17), (0, 0), (0, 0)]
    assert split(lengths, threshold=16, prefilling=[False, False]).plan is None
    s = split([(30000, 2048), (0, 700), (0, 0)], prefilling=[True, True])
    assert s.flash_starts.tolist() == [0, 2048, 2748]


def test_verify_rows_alone_keep_vllms_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where every prefill goes through slices: a graph reads the persistent buffer at replay."""
    monkeypatch.setattr(cuda_path, "FLASH_TOKENS", 0)
    common = batch([(500, 17), (500, 17)])
    s = cuda_path.split_batch(common, 16, replace(LIMITS, drafts=16, launch_work=0))
    assert s.plan is None and s.starts is common.query_start_loc


def test_where_slices_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """No window, a window larger than the workspace, keys and values of different size: the fused kernel."""
    monkeypatch.setattr(cuda_path, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192), model_config=SimpleNamespace(max_model_len=65536)
    )
    layer = SimpleNamespace(head_size=128, head_size_v=128, num_heads=32, num_kv_heads=8)
    other = SimpleNamespace(**{**vars(layer), "head_size_v": 64})
    limits = lambda recent, *layers: cuda_path.flash_limits(
        config, list(layers), cuda_path.Rule(8, recent, recent + 63), 2, 0, LIMITS.flash
    )
    assert limits(128, layer).slice_tokens == 16384
    assert limits(0, layer) is None and limits(65536, layer) is None and limits(128, layer, other) is None
