# SPDX-License-Identifier: Apache-2.0
"""The backend on vLLM's own batch specs (its tests/v1/attention), against the oracle and against SDPA.

A batch of vLLM's `CommonAttentionMetadata` goes through our metadata builder and our impl's
forward; the contexts in front of it were stored by the same forward, in chunks. The result equals
the oracle's, and its distance from fp32 SDPA on unquantised keys and values is what 4 bits make
of these numbers: predicted from the groups' steps, neither more nor less.
"""
from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from kernel_cases import relative_error
from layer_driver import CHUNK, LayerDriver, Shape

from bie_kernels import reference

pytestmark = pytest.mark.engine

# (tokens after the step, of which this step's); what vLLM's harness calls by these names.
SPECS: dict[str, tuple[list[int], list[int]]] = {
    "small_decode": ([32, 40], [1, 1]),
    "small_prefill": ([32, 40], [8, 8]),
    "mixed_small": ([32, 40, 48, 56], [1, 1, 5, 5]),
    "medium_decode": ([128, 256, 512, 1024] * 2, [1] * 8),
    "medium_prefill": ([256, 512, 1024, 2048], [16] * 4),
    "mixed_medium": ([512, 1024, 2048] * 2, [1, 1, 1, 7, 7, 7]),
    "large_decode": ([2048] * 32, [1] * 32),
    "large_prefill": ([4096] * 8, [32] * 8),
    "mixed_large": ([1024, 2048, 4096] * 2, [1, 1, 1, 32, 32, 32]),
    "single_decode": ([1024], [1]),
    "single_prefill": ([1024], [64]),
    # Encoders' there; whole prompts here.
    "small_encoder_prefill": ([32, 64, 128, 256], [32, 64, 128, 256]),
    "medium_encoder_prefill": ([256, 512, 1024, 2048], [256, 512, 1024, 2048]),
    # Of its MLA and speculation tests.
    "spec_decode_tiny": ([35, 43], [3, 3]),
    "spec_decode_small": ([128, 256, 512, 1024], [4] * 4),
    "spec_decode_medium": ([512, 1024, 2048] * 2, [8] * 6),
}
SMALL, LLAMA_8B = Shape(4, 2, 128), Shape(32, 8, 128)
SINK, RECENT = 8, 128


def driver_of(folder: Path, shape: Shape, dtype: torch.dtype, name: str, **settings) -> LayerDriver:
    """A layer of this shape; specs of speculation verify as many drafts as they have."""
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=512, hidden_size=shape.heads * shape.head_size, intermediate_size=512, num_hidden_layers=1,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_size,
        max_position_embeddings=8192, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    drafts = max(SPECS[name][1]) - 1 if name.startswith("spec_") else 0
    return LayerDriver(folder, shape, dtype, drafts=drafts, **settings)


class Sequence:
    """One request's keys, values and last queries, and what has to come out of them."""

    def __init__(self, tokens: int, queries: int, shape: Shape, dtype: torch.dtype, gen: torch.Generator) -> None:
        offset = torch.randn(1, shape.kv_heads, shape.head_size, generator=gen) * 2  # constant: no softmax sees it
        self.k = (torch.randn(tokens, shape.kv_heads, shape.head_size, generator=gen) + offset).to(dtype)
        self.v = torch.randn(tokens, shape.kv_heads, shape.head_size, generator=gen).to(dtype)
        self.q = torch.randn(queries, shape.heads, shape.head_size, generator=gen).to(dtype)
        self.positions = torch.arange(tokens - queries, tokens)
        self.scale = shape.head_size**-0.5

    def oracle(self, layout) -> torch.Tensor:  # noqa: ANN001
        k4, v4 = reference.quantised_copy(self.k, self.v, layout, SINK)
        return reference.attention(
            self.q, self.positions, self.k, self.v, k4, v4, scale=self.scale, sink_tokens=SINK, recent_tokens=RECENT
        )

    def _heads_first(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        group = self.q.shape[1] // self.k.shape[1]
        k, v = (x.float().repeat_interleave(group, 1).transpose(0, 1) for x in (self.k, self.v))
        causal = torch.arange(len(self.k))[None, :] <= self.positions[:, None]
        return self.q.float().transpose(0, 1), k, v, causal

    def exact(self) -> torch.Tensor:
        """fp32 SDPA on what was not quantised, [n, Hq, D]."""
        q, k, v, causal = self._heads_first()
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=causal, scale=self.scale)
        return out.transpose(0, 1)

    def variance(self, exact: torch.Tensor, layout) -> torch.Tensor:  # noqa: ANN001
        """Expected squared distance of 4-bit attention from `exact`, to first order, [n, Hq, D].

        Rounding to steps of size s has variance s^2 / 12. An output is sum_j p_j v_j, so a value's
        error counts p_j, and the error e_j of a logit moves it by p_j e_j (v_j - out).
        """
        q, k, v, causal = self._heads_first()
        far = causal & (torch.arange(len(self.k))[None, :] >= SINK)
        far &= self.positions[:, None] - torch.arange(len(self.k))[None, :] >= RECENT
        p = (q @ k.transpose(1, 2) * self.scale).masked_fill(~causal, -math.inf).softmax(-1) * far
        k_step, v_step = self._steps(layout)
        logit = (q**2 @ (k_step**2).transpose(1, 2)) * self.scale**2 / 12  # [Hq, n, S]
        out = exact.transpose(0, 1)
        w = p**2 * logit
        spread = w @ v**2 - 2 * out * (w @ v) + out**2 * w.sum(-1, keepdim=True)
        return (p**2 @ v_step**2 / 12 + spread).transpose(0, 1)

    def _steps(self, layout) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN001
        """Distance of neighbouring codes at every key and value, [Hq, S, D]: a group's range / 15."""
        size = layout.group_size

        def step(group: torch.Tensor, dim: int) -> torch.Tensor:
            return ((group.amax(dim, True) - group.amin(dim, True)) / 15).expand_as(group)

        def along_head(x: torch.Tensor) -> torch.Tensor:
            return torch.cat([step(group, -1) for group in x.split(size, -1)], -1)

        k, v = self.k.float(), self.v.float()
        if layout.key_axis == "channel":
            groups = [step(k[max(i, SINK) : i + size], 0) for i in range(0, len(k), size)]
            k_step = torch.cat([torch.zeros_like(k[:SINK]), *groups])
        else:
            k_step = along_head(k)
        repeat = self.q.shape[1] // k.shape[1]
        return tuple(x.repeat_interleave(repeat, 1).transpose(0, 1) for x in (k_step, along_head(v)))


def run(driver: LayerDriver, name: str, chunk: int = CHUNK) -> list[tuple[Sequence, torch.Tensor]]:
    """The spec's batch, after its contexts in chunks of `chunk`; per request its numbers and the output."""
    gen = torch.Generator().manual_seed(0)
    seqs = [Sequence(s, n, driver.shape, driver.dtype, gen) for s, n in zip(*SPECS[name], strict=True)]
    contexts = [len(s.k) - len(s.q) for s in seqs]
    requests = [driver.add(len(s.k)) for s in seqs]
    for start in range(0, max(contexts), chunk):
        batch = []
        for r, s, context in zip(requests, seqs, contexts, strict=True):
            if (n := min(chunk, context - start)) > 0:
                rows = slice(start, start + n)
                batch.append((r, torch.zeros(n, *s.q.shape[1:], dtype=driver.dtype), s.k[rows], s.v[rows]))
        driver.step(batch)
    last = [(r, s.q, s.k[n:], s.v[n:]) for r, s, n in zip(requests, seqs, contexts, strict=True)]
    return list(zip(seqs, driver.step(last), strict=True))


def check(driver: LayerDriver, name: str, *, limit: float, chunk: int = CHUNK) -> None:
    """Equal to the oracle up to `limit` (relative), and as far from SDPA as 4 bits are."""
    layout = driver.layer.impl.settings.page_layout(driver.shape.head_size, driver.shape.head_size)
    distance = expected = 0.0
    for seq, out in run(driver, name, chunk):
        assert relative_error(out, seq.oracle(layout)) < limit, len(seq.k)
        exact = seq.exact()
        variance = seq.variance(exact, layout)
        if not variance.any():  # all of it is within the windows
            assert relative_error(out, exact) < limit
            continue
        distance += float(((out.float() - exact) ** 2).sum())
        expected += float(variance.sum())
    if expected:
        print(name, distance / expected)
        assert 0.85 < distance / expected < 1.15, (distance, expected)
    else:
        assert max(SPECS[name][0]) <= SINK + RECENT


@pytest.mark.parametrize("name", SPECS)
def test_spec(name, tmp_path):
    check(driver_of(tmp_path, SMALL, torch.float32, name), name, limit=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_shape_of_llama_8b_in_16_bits(dtype, tmp_path):
    """32 query and 8 KV heads, pages of 16 window tokens; the output is rounded to 16 bits."""
    limit = 1e-3 if dtype == torch.float16 else 4e-3
    check(driver_of(tmp_path, LLAMA_8B, dtype, "mixed_medium"), "mixed_medium", limit=limit)


@pytest.mark.parametrize("settings", [{"key_axis": "head_dim"}, {"group_size": 32}], ids=str)
def test_other_formats(settings, tmp_path):
    check(driver_of(tmp_path, SMALL, torch.float32, "mixed_medium", **settings), "mixed_medium", limit=1e-5)


def test_contexts_in_odd_chunks(tmp_path):
    """Chunks end inside pages and let go of window pages, which later chunks of other requests take."""
    driver = driver_of(tmp_path, SMALL, torch.float32, "mixed_medium")
    check(driver, "mixed_medium", limit=1e-5, chunk=150)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_spec_on_a_card(name, dtype, tmp_path):
    """Decode rows, verify rows, fused prefill and slices, as the builder splits them; Llama-3-8B's heads."""
    limit = 2e-3 if dtype == torch.float16 else 1e-2
    check(driver_of(tmp_path, LLAMA_8B, dtype, name, pool_bytes=1 << 30), name, limit=limit)
