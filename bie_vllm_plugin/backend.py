# SPDX-License-Identifier: Apache-2.0
"""The attention backend: store, seal, attend, in that order, once a layer and step."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheLayout

from bie_kernels import torch_path
from bie_kernels.layout import PAGE_TOKENS, PageLayout
from bie_vllm_plugin import vllm_compat
from bie_vllm_plugin.cache_spec import lookahead_tokens, rule_of
from bie_vllm_plugin.config import DTYPE_NAME, Int4AsymConfig
from bie_vllm_plugin.layers import attach_layers
from bie_vllm_plugin.metadata import Int4AsymMetadata, Int4AsymMetadataBuilder
from bie_vllm_plugin.window_layer import WindowLayer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from bie_vllm_plugin.cuda_path import FlashLimits

logger = init_logger("vllm.bie_vllm_plugin")

_WARM: set[tuple] = set()
"""Layer shapes whose GPU kernels are compiled in this process."""


class Int4AsymBackend(AttentionBackend):
    """INT4 body pages of 64 tokens; the window pages belong to `WindowBackend`."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [DTYPE_NAME]
    # One call does it all: pages are published while scheduling, so a sibling in the same
    # batch reads what this call stores, and all stores and seals must come before any read.
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Int4AsymImpl]:
        return Int4AsymImpl

    @staticmethod
    def get_builder_cls() -> type[Int4AsymMetadataBuilder]:
        return Int4AsymMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        # MultipleOf, not a plain int: vLLM would split larger pages of a fixed size.
        return [MultipleOf(PAGE_TOKENS)]

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # the split into decode and prefill rows is made from the host's lengths

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # Block-outermost packs groups of different page size; the second makes all pages equal.
        return (KVCacheLayout.BLHNC, KVCacheLayout.LBHNC)


class WindowBackend(Int4AsymBackend):
    """The window group: same builder and layouts, pages of any size."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]


class Int4AsymImpl(AttentionImpl[Int4AsymMetadata]):
    """Attention of one layer on its two caches.

    Raises:
        ValueError: at construction, for a feature that the format does not serve.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **extra: Any,
    ) -> None:
        way_out = "serve this model with another --kv-cache-dtype"
        if alibi_slopes is not None:
            raise ValueError(f"int4_asym does not support ALiBi position biases; {way_out}.")
        if sinks is not None:
            raise ValueError(f"int4_asym does not support learnable attention sinks; {way_out}.")
        if sliding_window is not None:
            raise ValueError(
                f"int4_asym does not quantise sliding-window layers (window {sliding_window}); "
                "add --kv-cache-dtype-skip-layers sliding_window."
            )
        if attn_type != AttentionType.DECODER:
            raise ValueError(f"int4_asym supports decoder self-attention only, not {attn_type!r}; {way_out}.")
        if kv_sharing_target_layer_name is not None:
            raise ValueError(f"int4_asym does not support layers that share another layer's KV cache; {way_out}.")
        if unknown := {name for name, value in extra.items() if value is not None}:
            raise ValueError(f"int4_asym does not support the attention option {sorted(unknown)[0]!r}; {way_out}.")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_size, self.scale = head_size, float(scale)
        self.soft_cap = float(logits_soft_cap or 0.0)
        self.kv_cache_dtype = kv_cache_dtype
        self.layer_name = ""  # set when the companion layers are attached
        self.vllm_config: VllmConfig = get_current_vllm_config()
        self.settings = Int4AsymConfig.from_vllm(self.vllm_config)
        self.rule = rule_of(self.vllm_config)
        self.workspace: torch.Tensor | None = None  # GPUs: one for all layers of the worker
        self.flash_limits: FlashLimits | None = None  # GPUs with vLLM's flash attention

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Once a worker: attach the window companions, reserve the workspace, say what runs."""
        if self.layer_name:
            return
        names = attach_layers(self.vllm_config)
        _log_settings(self.vllm_config, self.settings, names)
        if self.vllm_config.device_config.device_type == "cuda":
            self._reserve_workspace(act_dtype, names)

    def _reserve_workspace(self, dtype: torch.dtype, names: list[str]) -> None:
        """Memory of the decode kernels; reserved here, it is counted when vLLM profiles."""
        from bie_vllm_plugin import cuda_path

        layers = [self.vllm_config.compilation_config.static_forward_context[name] for name in names]
        drafts = lookahead_tokens(self.vllm_config)
        limits = cuda_path.flash_limits(
            self.vllm_config, layers, self.rule, dtype.itemsize, drafts, vllm_compat.flash_attention()
        )
        size = cuda_path.workspace_bytes(self.vllm_config, layers, 1 + drafts, limits, dtype.itemsize)
        # What loading the weights left in the allocator's cache would lie beside the pool until graphs are captured.
        if not self.vllm_config.model_config.enable_sleep_mode:  # there weights lie in a pool that keeps its memory
            torch.cuda.empty_cache()
        workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
        for layer in layers:
            layer.impl.workspace, layer.impl.flash_limits = workspace, limits

    def caches_bound(self, layer: Any, window: torch.Tensor) -> None:
        """Both caches exist: on GPUs compile the kernels now and not during the first request.

        Layers of one shape share compiled kernels, so repetitions cost microseconds.
        """
        if self.workspace is None:
            return
        from bie_vllm_plugin.warm_up import warm_up

        scheduler = self.vllm_config.scheduler_config
        heads, sizes = (layer.num_heads, layer.num_kv_heads), (layer.head_size, layer.head_size_v)
        drafts = lookahead_tokens(self.vllm_config)
        limits = (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, drafts)
        key = (*heads, *sizes, self.soft_cap, window.dtype, self.settings, self.rule, *limits)
        if key in _WARM:
            return
        _WARM.add(key)
        warm_up(
            layer, window, self.settings.page_layout(layer.head_size, layer.head_size_v), self.rule, self.workspace,
            limits=self.flash_limits, soft_cap=self.soft_cap, requests=scheduler.max_num_seqs,
            q_lens=tuple({1, min(1 + drafts, 16)}), tokens=scheduler.max_num_batched_tokens, dtype=window.dtype,
        )  # fmt: skip

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Int4AsymMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store, seal and attend.

        Args:
            query: [tokens, Hq, D]; key: [tokens, H, D]; value: [tokens, H, E].
            kv_cache: uint8 [blocks, H, 64, token_bytes], the body.
            output: [tokens, Hq, E], written in place and returned.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("int4_asym does not fuse output quantisation; disable that compiler pass.")
        if attn_metadata is None:  # profiling run
            return output.fill_(0)
        window_name = WindowLayer.name_of(self.layer_name)
        window_meta, _ = vllm_compat.forward_state(window_name)
        window = self.vllm_config.compilation_config.static_forward_context[window_name].kv_cache
        layout = self.settings.page_layout(layer.head_size, layer.head_size_v)
        body = kv_cache.flatten(2)  # [blocks, H, page_bytes]: a view, rows of a head are contiguous
        if self.workspace is None:
            self._forward_torch(query, key, value, body, window, attn_metadata, window_meta, layout, output)
        else:
            from bie_vllm_plugin import cuda_path

            cuda_path.forward(
                query, key, value, body, window, attn_metadata, window_meta, layout, self.rule, self.workspace, output,
                self.flash_limits, scale=self.scale, soft_cap=self.soft_cap,
            )  # fmt: skip
        return output

    def _forward_torch(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        body: torch.Tensor,
        window: torch.Tensor,
        meta: Int4AsymMetadata,
        window_meta: Int4AsymMetadata,
        layout: PageLayout,
        output: torch.Tensor,
    ) -> None:
        steps = meta.request_steps(window_meta, self.rule, window.shape[2])
        n = meta.num_tokens
        torch_path.store(
            key[:n], value[:n], body, window, meta.slot_mapping[:n], window_meta.slot_mapping[:n], layout
        )
        torch_path.seal(key, body, window, steps, layout)
        for step in steps:
            rows = slice(step.start, step.end)
            output[rows] = torch_path.attend(
                query[rows], key[rows], value[rows], body, window, step, layout,
                scale=self.scale, soft_cap=self.soft_cap,
            )  # fmt: skip
        written = steps[-1].end if steps else 0
        output[written:].fill_(0)


def _log_settings(vllm_config: VllmConfig, settings: Int4AsymConfig, names: list[str]) -> None:
    """The start-up line: settings, bytes per token, layers."""
    layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    body = sum(
        settings.page_layout(layers[n].head_size, layers[n].head_size_v).token_bytes * layers[n].num_kv_heads
        for n in names
    )
    dtype: Any = vllm_config.model_config.dtype
    window = sum((layers[n].head_size + layers[n].head_size_v) * layers[n].num_kv_heads * dtype.itemsize for n in names)
    logger.info(
        "KV cache int4_asym: sink_tokens=%d recent_tokens=%d group_size=%d key_axis=%s prefix_hits=%s; "
        "%d bytes per token in the body, %d in the window, on this worker; %d layers: %s%s",
        settings.sink_tokens,
        settings.recent_tokens,
        settings.group_size,
        settings.key_axis,
        settings.prefix_hits,
        body,
        window,
        len(names),
        _ranges(names),
        _drafter(vllm_config),
    )


def _drafter(vllm_config: VllmConfig) -> str:
    """What the start-up line says of a drafter with a cache of its own."""
    speculation = vllm_config.speculative_config
    if speculation is None or speculation.draft_model_config is None or speculation.kv_cache_dtype is None:
        return ""
    return f"; drafter {speculation.method}, {speculation.num_speculative_tokens} tokens, its own cache: " + str(
        speculation.kv_cache_dtype
    )


def _ranges(names: list[str]) -> str:
    """Layer names, abbreviated to the first and the last when there are many."""
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} ... {names[-1]}"
