# SPDX-License-Identifier: Apache-2.0
"""One attention layer without a model: vLLM's configuration, layer, block pool and metadata, our builder and forward.

What the engine's scheduler and worker do around `Int4AsymImpl.forward`, in a hundred lines: specs are
asked from the layers, caches come from vLLM's own allocation, pages from its `KVCacheManager`, and the
block tables keep stale entries as the worker's do.
"""
from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

from bie_vllm_plugin import register

register()

from vllm import EngineArgs, SamplingParams
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.request import Request
from vllm.v1.worker.utils import allocate_kv_cache

try:
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs  # vLLM 0.33
except ImportError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    get_global_kv_cache_groups = None

from bie_vllm_plugin.cache_spec import rule_of
from bie_vllm_plugin.window_layer import WindowLayer

NAME = "model.layers.0.self_attn.attn"
CHUNK = 2048


class Shape(NamedTuple):
    """Query heads, KV heads, head size."""

    heads: int
    kv_heads: int
    head_size: int


class LayerDriver:
    """A layer, its two poisoned caches, and requests that are fed step by step.

    Args:
        folder: of a model's config.json with these heads; no weights are read.
        drafts: n-gram drafts a step may verify.
        pool_bytes: of the block pool.
    """

    def __init__(self, folder: Path, shape: Shape, dtype: torch.dtype, *, drafts: int = 0, pool_bytes: int = 64 << 20,
                 max_num_seqs: int = 32, **settings) -> None:  # fmt: skip
        self.shape, self.dtype = shape, dtype
        self.device = torch.device("cuda" if current_platform.is_cuda() else "cpu")
        speculation = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3}
        self.config = EngineArgs(
            model=str(folder), kv_cache_dtype="int4_asym", dtype=dtype, max_model_len=4608, skip_tokenizer_init=True,
            max_num_seqs=max_num_seqs, max_num_batched_tokens=CHUNK * max_num_seqs, enable_prefix_caching=False,
            enforce_eager=True, kv_cache_memory_bytes=pool_bytes, additional_config={"int4_asym": settings},
            speculative_config=speculation if drafts else None,
        ).create_engine_config()  # fmt: skip
        with set_current_vllm_config(self.config), set_default_torch_dtype(dtype):  # as vLLM's loaders build models
            self.layer = Attention(
                shape.heads, shape.head_size, shape.head_size**-0.5, num_kv_heads=shape.kv_heads,
                cache_config=self.config.cache_config, prefix=NAME,
            )  # fmt: skip
            self.layer.impl.process_weights_after_loading(dtype)
            current_platform.update_block_size_for_backend(self.config)
            self.rule = rule_of(self.config)
            self._allocate(pool_bytes)

    def _allocate(self, pool_bytes: int) -> None:
        """Caches full of 0xFF, which is NaN in every format of both; managers and metadata builders."""
        layers = self.config.compilation_config.static_forward_context
        names = [NAME, WindowLayer.name_of(NAME)]
        specs = {name: layers[name].get_kv_cache_spec(self.config) for name in names}
        backends = {name: layers[name].get_attn_backend() for name in names}
        offered = [[layout.name for layout in backend.supported_kv_cache_layouts()] for backend in backends.values()]
        cache = self.config.cache_config
        cache.kv_cache_layout = resolve_kv_cache_layout(self.config, offered).name
        register_all_kvcache_specs(self.config)
        groups = [get_global_kv_cache_groups(self.config, [specs])] if get_global_kv_cache_groups else []
        worker = get_kv_cache_configs(self.config, [specs], [pool_bytes], *groups)[0]
        pages = [group.kv_cache_spec.block_size for group in worker.kv_cache_groups]
        caches = allocate_kv_cache(worker, self.device, cache.get_resolved_kv_cache_layout(), pages)
        for name in names:
            caches[name].untyped_storage().fill_(255)
            layers[name].bind_kv_cache(caches[name])
        scheduler = generate_scheduler_kv_cache_config([worker])
        self.groups = [group.layer_names[0] for group in scheduler.kv_cache_groups]
        self.page_tokens = [group.kv_cache_spec.block_size for group in scheduler.kv_cache_groups]
        self.builders = [
            backends[name].get_builder_cls()(specs[name], [name], self.config, self.device) for name in self.groups
        ]
        self.manager = KVCacheManager(
            scheduler, max_model_len=self.config.model_config.max_model_len, scheduler_block_size=cache.block_size,
            hash_block_size=min(self.page_tokens), max_in_flight_tokens=CHUNK, enable_caching=False,
        )  # fmt: skip
        self.requests: list[Request] = []
        self.tables: list[list[list[int]]] = []  # per request and group

    def add(self, tokens: int) -> int:
        """A request of `tokens` tokens, none computed yet; returns its index."""
        name = str(len(self.requests))
        self.requests.append(
            Request(name, prompt_token_ids=[3] * tokens, sampling_params=SamplingParams(), pooling_params=None)
        )
        self.tables.append([[] for _ in self.groups])
        return int(name)

    def step(self, batch: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        """One engine step.

        Args:
            batch: (request, q [n, Hq, D], k [n, H, D], v [n, H, D]) in the order of vLLM's batch.

        Returns:
            Per entry the attention output [n, Hq, D] in the model's dtype, on the CPU.
        """
        computed = [self.requests[r].num_computed_tokens for r, *_ in batch]
        lens = [len(q) for _, q, *_ in batch]
        for (r, *_), n in zip(batch, lens, strict=True):
            blocks = self.manager.allocate_slots(self.requests[r], n)
            assert blocks is not None, "the pool is too small for this batch"
            for row, new in zip(self.tables[r], blocks.get_block_ids(), strict=True):
                row.extend(new)
        metas = [self._metadata(group, [r for r, *_ in batch], computed, lens) for group in range(len(self.groups))]
        q, k, v = (torch.cat([entry[i] for entry in batch]).to(self.device) for i in (1, 2, 3))
        out = torch.full_like(q, float("nan"))
        by_name = dict(zip(self.groups, metas, strict=True))
        with torch.inference_mode(), set_forward_context(by_name, self.config, slot_mapping={}):
            self.layer.impl.forward(self.layer, q, k, v, self.layer.kv_cache, by_name[NAME], out)
        for (r, *_), n in zip(batch, lens, strict=True):
            self.requests[r].num_computed_tokens += n
        return list(out.cpu().split(lens))

    def _metadata(self, group: int, requests: list[int], computed: list[int], lens: list[int]):  # noqa: ANN202
        """Our builder on vLLM's common metadata of this step."""
        size = self.page_tokens[group]
        pages = -(-self.config.model_config.max_model_len // size) + 1
        table = torch.zeros(len(requests), pages, dtype=torch.int32)
        slots = []
        for i, (r, done, n) in enumerate(zip(requests, computed, lens, strict=True)):
            row = self.tables[r][group]
            table[i, : len(row)] = torch.tensor(row)
            positions = torch.arange(done, done + n)
            slots.append(table[i, positions // size].long() * size + positions % size)
        starts = torch.tensor([0, *accumulate(lens)], dtype=torch.int32)
        seq_lens = torch.tensor([done + n for done, n in zip(computed, lens, strict=True)], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(self.device), query_start_loc_cpu=starts, seq_lens=seq_lens.to(self.device),
            num_reqs=len(requests), num_actual_tokens=sum(lens), max_query_len=max(lens),
            max_seq_len=int(seq_lens.max()), block_table_tensor=table.to(self.device),
            slot_mapping=torch.cat(slots).to(self.device), seq_lens_cpu_upper_bound=seq_lens,
        )  # fmt: skip
        return self.builders[group].build(0, common)
