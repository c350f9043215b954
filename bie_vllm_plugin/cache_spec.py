# SPDX-License-Identifier: Apache-2.0
"""What vLLM's block pool is told about the two caches of a layer.

* `BodySpec`: packed INT4, 64 tokens a page, held for the whole context. Skipped
  layers (full precision) of the same engine use it too, dense, so that vLLM puts
  all full-attention layers into one group whose manager is ours.
* `WindowSpec`: rows `[K | V]` in the model's dtype, the sinks and the recent
  window only. R below is the one constant that rules allocation, freeing and the
  admission cap: `retained_tokens = recent + lookahead + 63`.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

from bie_kernels.layout import PAGE_TOKENS, PageLayout, window_page_tokens
from bie_kernels.torch_path import Rule
from bie_vllm_plugin.config import Int4AsymConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def retained_tokens(recent_tokens: int, lookahead_tokens: int, dropped_tokens: int = 0) -> int:
    """R: 16-bit tokens kept behind the newest one, besides the sinks.

    `recent` for the queries of the next step, `lookahead` since that many drafts
    may be rejected, and 63 more because an exact repeat of a prompt hits at the
    page boundary up to 63 tokens before its end and wants the window there.
    With EAGLE and MTP vLLM drops one more page of a hit: `dropped`.
    """
    return recent_tokens + lookahead_tokens + PAGE_TOKENS - 1 + dropped_tokens


def lookahead_tokens(vllm_config: VllmConfig) -> int:
    """Drafts that a step may have to take back."""
    spec = vllm_config.speculative_config
    return 0 if spec is None else int(spec.num_speculative_tokens or 0)


def dropped_tokens(vllm_config: VllmConfig) -> int:
    """Tokens at the end of every prefix hit that vLLM computes again, for the states that EAGLE heads want."""
    spec = vllm_config.speculative_config
    return PAGE_TOKENS if spec is not None and spec.use_eagle_block_drop() else 0


def drafted_ahead_tokens(vllm_config: VllmConfig) -> int:
    """Tokens behind a step's own for which the scheduler takes pages: a drafter with a cache writes there."""
    return int(vllm_config.num_lookahead_tokens)


def rule_of(vllm_config: VllmConfig) -> Rule:
    """The position rule of this engine."""
    settings = Int4AsymConfig.from_vllm(vllm_config)
    retained = retained_tokens(
        settings.recent_tokens, lookahead_tokens(vllm_config), dropped_tokens(vllm_config)
    )
    return Rule(settings.sink_tokens, settings.recent_tokens, retained)


@dataclass(frozen=True, kw_only=True)
class BodySpec(FullAttentionSpec):
    """A full-attention cache of 64-token pages, INT4-packed or (skipped layers) dense."""


@dataclass(frozen=True, kw_only=True)
class DrafterSpec(BodySpec):
    """Dense 64-token pages of a layer of the draft model.

    vLLM puts it into the group of the bodies, which is what makes drafting right: the V1
    runner hands a draft model the block table of group 0, whatever the drafter's own group
    is. A type of its own, so that a group that a drafter leads is recognised and refused.
    """


@dataclass(frozen=True, kw_only=True)
class WindowSpec(SlidingWindowSpec):
    """Sinks and recent window of one layer in 16 bits.

    `sliding_window` is R. Fields that rule the manager:
        sink_tokens, recent_tokens: the position rule's.
        strict: prefix hits need the window pages.
        retention_interval: vLLM's prefix_cache_retention_interval.
        step_tokens: tokens that a decode step may take pages for, drafts to verify and
            drafts to come included.
        batches: steps that may be in flight at once (async scheduling, pipeline
            parallelism); pages are freed when a step is processed, not when it is scheduled.
        chunk_tokens: largest prefill chunk.
    """

    sink_tokens: int
    recent_tokens: int
    strict: bool
    retention_interval: int | None = 0
    step_tokens: int = 1
    batches: int = 1
    chunk_tokens: int = 0

    @property
    def num_retained_tokens(self) -> int:
        """0 keeps vLLM 0.33's worker from nulling entries below the window: sinks live there."""
        return 0

    @property
    def sink_pages(self) -> int:
        """Pages that hold the sinks."""
        return cdiv(self.sink_tokens, self.block_size)

    def pages_held(self, num_tokens: int) -> int:
        """Upper bound of the pages held after a step that ends at `num_tokens`."""
        total = cdiv(num_tokens, self.block_size)
        return min(total, self.sink_pages + self._window_pages)

    @property
    def _window_pages(self) -> int:
        """Pages that R tokens and those of the steps in flight may touch, wherever they start."""
        return cdiv(self.sliding_window + self.step_tokens * self.batches - 1, self.block_size) + 1

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """What a request holds when its prompt is done; a chunk's own middle needs no pages."""
        del max_in_flight_tokens
        return self.pages_held(max_model_len)

    @property
    def peak_pages(self) -> int:
        """Pages of one request at worst, while prefill chunks run.

        Every chunk in flight keeps the window before it, and the last one brings its
        own. With strict hits one shared-prefix junction has its window too, and a
        retention interval may ask for pages all along the chunks.
        """
        pages = self.sink_pages + (1 + self.batches) * self._window_pages
        if self.strict:
            pages += cdiv(self.recent_tokens, self.block_size) + 1
            if self.retention_interval != 0:
                pages += self.batches * cdiv(self.chunk_tokens, self.block_size)
        return pages

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of one request of max_model_len, in whole pages.

        `--max-model-len auto` sizes the longest request to the pool, so there, and
        only there, the pages of its last chunk have to be counted in (see `check_pool`).
        """
        model = vllm_config.model_config
        fitted = model.original_max_model_len == -1
        pages = self.peak_pages if fitted else self.pages_held(model.max_model_len)
        return pages * self.page_size_bytes

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Companions group with companions only, never with a model's own sliding windows."""
        return all(isinstance(spec, WindowSpec) for spec in kv_cache_specs.values())

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """One spec for layers that agree in every field.

        Raises:
            AssertionError: they differ (vLLM then keeps them in separate groups).
        """
        assert all(type(spec) is cls and spec == specs[0] for spec in specs), "window specs of a group must agree"
        return specs[0]


def body_spec(layout: PageLayout, num_kv_heads: int) -> BodySpec:
    """The INT4 body of a layer: `state_content_bytes` says that a token takes `token_bytes` a head."""
    return BodySpec(
        block_size=PAGE_TOKENS,
        num_kv_heads=num_kv_heads,
        head_size=layout.head_size,
        head_size_v=layout.v_size,
        dtype=torch.uint8,
        state_content_bytes=layout.token_bytes,
    )


def window_spec(
    settings: Int4AsymConfig,
    num_kv_heads: int,
    head_size: int,
    head_size_v: int,
    dtype: torch.dtype,
    lookahead_tokens: int,
    retention_interval: int | None,
    *,
    batches: int = 1,
    chunk_tokens: int = 0,
    drafted_ahead: int = 0,
    dropped: int = 0,
) -> WindowSpec:
    """The 16-bit companion of a layer; see `WindowSpec` for `batches` and `chunk_tokens`."""
    return WindowSpec(
        block_size=window_page_tokens(dtype.itemsize),
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        head_size_v=head_size_v,
        dtype=dtype,
        sliding_window=retained_tokens(settings.recent_tokens, lookahead_tokens, dropped),
        sink_tokens=settings.sink_tokens,
        recent_tokens=settings.recent_tokens,
        strict=settings.prefix_hits == "strict",
        retention_interval=retention_interval,
        step_tokens=1 + lookahead_tokens + drafted_ahead,
        batches=batches,
        chunk_tokens=chunk_tokens,
    )
