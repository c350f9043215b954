# SPDX-License-Identifier: Apache-2.0
"""What a step looks like to one cache group; the same builder serves body and window."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from bie_kernels import tuning
from bie_kernels.torch_path import RequestStep, Rule
from bie_vllm_plugin.cache_spec import WindowSpec, rule_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec

    from bie_vllm_plugin.cuda_path import FlashLimits, Split, Step


@dataclass
class Int4AsymMetadata(AttentionMetadata):
    """One group's view of a step; all tensors on the engine's device.

    Attributes:
        num_reqs, num_tokens: of the batch, padding included.
        max_query_len: host upper bound.
        query_start_loc: int32 [num_reqs + 1]; seq_lens: int32 [num_reqs], this step included.
        block_table: int32 [num_reqs, pages]; slot_mapping: int64 [num_tokens].
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    split: Split | None = None  # GPUs: which rows are decode rows
    plan: torch.Tensor | None = None  # GPUs: the decode plan of the step
    _steps: dict[int, list[RequestStep]] = field(default_factory=dict, repr=False)
    _gpu_steps: dict[int, Step] = field(default_factory=dict, repr=False)

    def gpu_step(self, window: Int4AsymMetadata) -> Step:
        """The batch cut for the GPU's kernels, once a step and group pair."""
        key = id(window)
        if key not in self._gpu_steps:
            from bie_vllm_plugin import cuda_path

            self._gpu_steps[key] = cuda_path.cut_step(self, window)
        return self._gpu_steps[key]

    def request_steps(self, window: Int4AsymMetadata, rule: Rule, page_tokens: int) -> list[RequestStep]:
        """The batch as host objects for the torch path, built once a step and group pair."""
        key = id(window)
        if key not in self._steps:
            starts = self.query_start_loc.tolist()
            seq_lens = self.seq_lens.tolist()
            body_table, window_table = self.block_table.long(), window.block_table.long()
            self._steps[key] = [
                RequestStep(start, end, seq - (end - start), body_table[i], window_table[i], page_tokens, rule)
                for i, (start, end, seq) in enumerate(zip(starts, starts[1:], seq_lens, strict=False))
                if end > start
            ]
        return self._steps[key]


class Int4AsymMetadataBuilder(AttentionMetadataBuilder[Int4AsymMetadata]):
    """Copies vLLM's common metadata; no host synchronisation."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Decode and verify rows first, so that a mixed batch splits into two kernel calls.
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._on_gpu = device.type == "cuda"
        self._window = isinstance(kv_cache_spec, WindowSpec)
        self._plan_buffer: torch.Tensor | None = None
        self._flash_limits: FlashLimits | None = None
        if self._on_gpu and not self._window:
            layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
            # One group may hold skipped layers, too: those bring a builder of their own.
            self._flash_limits = layers[layer_names[0]].impl.flash_limits
            self._make_plan_buffer()

    def _make_plan_buffer(self) -> None:
        """Persistent memory of the decode plan: CUDA graphs read it, `build` rewrites it."""
        layers: dict[str, Any] = self.vllm_config.compilation_config.static_forward_context
        heads = {(x.num_heads, x.num_kv_heads, x.head_size_v) for x in (layers[name] for name in self.layer_names)}
        if len(heads) > 1:
            return  # a plan is cut for one number of rows; decode then makes one per layer
        (self._heads,) = heads
        self._rule = rule_of(self.vllm_config)
        requests = self.vllm_config.scheduler_config.max_num_seqs
        # A plan holds an item per program, at most a wave of them or a few per request.
        items = tuning.choices(self.device).programs_per_sm * tuning.multiprocessors(self.device) + 2 * requests
        self._plan_buffer = torch.zeros(4 * items + requests + 8, dtype=torch.int32, device=self.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Int4AsymMetadata:
        """Metadata of this step for the group; cascade prefixes do not exist in this vLLM."""
        del common_prefix_len, fast_build
        common: Any = common_attn_metadata
        split = plan = None
        if self._on_gpu and not self._window:
            from bie_vllm_plugin import cuda_path

            split = cuda_path.split_batch(common, self.reorder_batch_threshold or 1, self._flash_limits)
            if self._plan_buffer is not None:
                plan = cuda_path.plan_decode(split, common.seq_lens, self._plan_buffer, self._heads, self._rule)
        return Int4AsymMetadata(
            split=split,
            plan=plan,
            num_reqs=common.num_reqs,
            num_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )
