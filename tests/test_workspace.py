# SPDX-License-Identifier: Apache-2.0
"""The memory reserved while vLLM profiles is enough for every step that the scheduler may make.

Tensors have no memory and kernels do not run; the launchers check their workspace and cut it up.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("vllm")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from bie_kernels import decode, flash_plan, launches, plan, prefill, prefill_flash, tuning  # noqa: E402
from bie_kernels.layout import PageLayout  # noqa: E402
from bie_kernels.torch_path import Rule  # noqa: E402
from bie_vllm_plugin import cuda_path, metadata  # noqa: E402

META = torch.device("meta")


def empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def _flash(q, k, v, *, out, **kwargs):  # noqa: ANN001, ANN003, ANN202
    return out, empty(q.shape[1], q.shape[0], dtype=torch.float32)


class Worker:
    """A layer's shapes, what its worker reserved, and steps up to the scheduler's limits."""

    def __init__(self, draw) -> None:  # noqa: ANN001
        self.heads, self.group = draw(st.sampled_from([1, 2, 4, 8, 32])), draw(st.integers(1, 16))
        self.layout = PageLayout(draw(st.sampled_from([64, 80, 96, 112, 128, 192, 256])))
        self.drafts, self.recent = draw(st.integers(0, 20)), draw(st.sampled_from([64, 128, 1000]))
        self.requests, self.tokens = draw(st.integers(1, 1024)), draw(st.integers(256, 16384))
        self.longest = draw(st.integers(1024, 131072))
        self.rule = Rule(8, self.recent, self.recent + self.drafts + 63)
        layer = SimpleNamespace(
            head_size=self.layout.head_size, head_size_v=self.layout.v_size, num_kv_heads=self.heads,
            num_heads=self.heads * self.group,
        )  # fmt: skip
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=self.requests, max_num_batched_tokens=self.tokens),
            model_config=SimpleNamespace(max_model_len=self.longest), speculative_config=None,
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
        )  # fmt: skip
        self.limits = cuda_path.flash_limits(config, [layer], self.rule, 2, self.drafts, _flash)
        self.workspace = empty(
            cuda_path.workspace_bytes(config, [layer], 1 + self.drafts, self.limits, 2), dtype=torch.uint8
        )
        builder = metadata.Int4AsymMetadataBuilder(SimpleNamespace(), ["layer"], config, META)
        with mock.patch.object(metadata, "rule_of", lambda config: self.rule):
            builder._make_plan_buffer()
        self.plan_buffer = builder._plan_buffer

    def rows(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """q, k, v and out of so many tokens."""
        d = self.layout.head_size
        q, k = empty(tokens, self.heads * self.group, d), empty(tokens, self.heads, d)
        return q, k, torch.empty_like(k), torch.empty_like(q)

    def caches(self, requests: int) -> tuple[torch.Tensor, ...]:
        """Body, window and their tables."""
        body = empty(4, self.heads, self.layout.page_bytes, dtype=torch.uint8)
        window = empty(4, self.heads, 16, 2 * self.layout.head_size)
        return body, window, *(empty(requests, 8, dtype=torch.int32) for _ in range(2))

    def decode(self, requests: int, q_len: int) -> None:
        q, _, _, out = self.rows(requests * q_len)
        lens, numbers = empty(requests, dtype=torch.int32), {"sink_tokens": 8, "recent_tokens": self.recent}
        split = cuda_path.Split(requests, q_len, None)
        heads = (self.heads * self.group, self.heads, self.layout.v_size)
        for made in (None, cuda_path.plan_decode(split, lens, self.plan_buffer, heads, self.rule)):
            decode.decode(
                q, *self.caches(requests), lens, out, self.workspace, self.layout, q_len=q_len, scale=1.0,
                retained=self.rule.retained_tokens, plan=made, **numbers,
            )  # fmt: skip

    def prefill(self, lengths: list[tuple[int, int]]) -> None:
        """Requests of (computed, new) tokens, fused and in slices."""
        starts = [0]
        for _, n in lengths:
            starts.append(starts[-1] + n)
        q, k, v, out = self.rows(starts[-1])
        common = (empty(len(lengths) + 1, dtype=torch.int32), empty(len(lengths), dtype=torch.int32), out)
        numbers = {
            "scale": 1.0, "sink_tokens": 8, "recent_tokens": self.recent, "retained": self.rule.retained_tokens
        }  # fmt: skip
        prefill.prefill(q, k, v, *self.caches(len(lengths)), *common, self.workspace, self.layout, **numbers)
        if self.limits is None:
            return
        cut = flash_plan.plan_flash(
            starts, [c + n for c, n in lengths], recent_tokens=self.recent, slice_tokens=self.limits.slice_tokens,
            max_rows=self.limits.rows,
        )  # fmt: skip
        prefill_flash.prefill(
            q, k, v, *self.caches(len(lengths)), *common, self.workspace, self.layout, cut.to(META), _flash, **numbers
        )


@contextlib.contextmanager
def card(sms: int, capability: tuple[int, int]) -> Iterator[None]:
    """A card with so many multiprocessors, whose kernels are not launched."""
    with contextlib.ExitStack() as stack:
        for module in (tuning, plan, prefill, cuda_path):
            stack.enter_context(mock.patch.object(module, "multiprocessors", lambda device: sms))
        stack.enter_context(mock.patch.object(tuning, "capability", lambda device: capability))
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: 0))
        no_launch = lambda self, grid: lambda *args, **kwargs: None
        stack.enter_context(mock.patch.object(launches.Launches, "__getitem__", no_launch))
        yield


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(16, 192), st.sampled_from(sorted(tuning.CHOICES)))
def test_what_was_reserved_is_enough(data, sms: int, capability: tuple[int, int]) -> None:  # noqa: ANN001
    with card(sms, capability):
        worker = Worker(data.draw)
        # Graphs pad a decode step up to max_num_seqs requests.
        q_len = data.draw(st.integers(1, min(1 + worker.drafts, cuda_path.MAX_VERIFY_TOKENS)))
        for requests in {data.draw(st.integers(1, worker.requests)), worker.requests}:
            worker.decode(requests, q_len)
        lengths: list[tuple[int, int]] = []
        left = worker.tokens
        while left and len(lengths) < min(worker.requests, 6):
            n = min(left, worker.longest, data.draw(st.sampled_from([1, 64, 300, left // 2 + 1, left])))
            lengths.append((min(data.draw(st.sampled_from([0, 500, worker.longest])), worker.longest - n), n))
            left -= n
        worker.prefill(lengths)
