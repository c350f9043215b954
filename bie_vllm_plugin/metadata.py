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

from bie_kernels.torch_path import RequestStep, Rule

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec


@dataclass
class Int4AsymMetadata(AttentionMetadata):
    """One group's view of a step; all tensors on the engine's device.

    Attributes:
        num_reqs, num_tokens: of the batch, padding included.
        max_query_len, max_seq_len: host upper bounds.
        query_start_loc: int32 [num_reqs + 1]; seq_lens: int32 [num_reqs], this step included.
        block_table: int32 [num_reqs, pages]; slot_mapping: int64 [num_tokens].
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    _steps: dict[int, list[RequestStep]] = field(default_factory=dict, repr=False)

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

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Int4AsymMetadata:
        """Metadata of this step for the group; cascade prefixes do not exist in this vLLM."""
        del common_prefix_len, fast_build
        common: Any = common_attn_metadata
        return Int4AsymMetadata(
            num_reqs=common.num_reqs,
            num_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )
