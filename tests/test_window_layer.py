# SPDX-License-Identifier: Apache-2.0
"""Pages of a model's own sliding-window layers, on stand-ins for the layers of GPUs' backends."""
from __future__ import annotations

from functools import partial
from types import SimpleNamespace as Namespace

import pytest
import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from bie_kernels.layout import PageLayout
from bie_vllm_plugin.cache_spec import body_spec
from bie_vllm_plugin.window_layer import sliding_spec_of

SHAPE = {"num_kv_heads": 4, "head_size": 256, "dtype": torch.bfloat16}


class AnyLayout(AttentionBackend):
    """FlashAttention as far as pages go: any layout, multiples of 16 tokens."""

    get_name = get_impl_cls = get_builder_cls = get_kv_cache_shape = None

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(16)]


class Fixed(AnyLayout):
    """Pages of 128 tokens and no other."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [128]


class Layer:
    head_size = head_size_v = SHAPE["head_size"]
    num_kv_heads = SHAPE["num_kv_heads"]

    def __init__(self, backend, window=None):
        self.backend, self.sliding_window = backend, window
        self.kv_cache_dtype = "int4_asym" if window is None else "auto"

    def get_attn_backend(self):
        return self.backend


def model(backend, full: int, windowed: int, ranks: int = 1):
    """A windowed layer of a model, and the engine around it; full layers are in INT4."""
    layers = [Layer(backend, 1024) for _ in range(windowed)] + [Layer(None) for _ in range(full)]
    for layer in layers[windowed:]:
        layer.get_kv_cache_spec = partial(lambda spec, config: spec, body_spec(PageLayout(256), 4))
    return layers[0], Namespace(
        compilation_config=Namespace(static_forward_context=dict(enumerate(layers))),
        parallel_config=Namespace(pipeline_parallel_size=ranks),
        scheduler_config=Namespace(max_num_batched_tokens=2048), additional_config={},
        model_config=Namespace(max_model_len=131072),  # so long that padded pages cost more than they save
    )


def original(layer, config):
    return SlidingWindowSpec(block_size=64, sliding_window=layer.sliding_window, **SHAPE)


@pytest.mark.parametrize(
    ("backend", "full", "windowed", "ranks", "tokens"),
    [
        (AnyLayout, 10, 52, 1, 16),  # 11 windowed layers of 16 tokens fit into 10 INT4 layers
        (AnyLayout, 4, 22, 1, 32),  # 4 of 16 tokens leave more over than 2 of 32
        (AnyLayout, 4, 22, 2, 16),  # ranks of a pipeline must agree
        (CPUAttentionBackend, 10, 52, 1, 64),  # layer-outermost: vLLM makes all pages equal
        (Fixed, 10, 52, 1, 64),  # nothing smaller is a page of this backend
    ],
)
def test_pages_of_windowed_layers(backend, full, windowed, ranks, tokens):
    layer, config = model(backend, full, windowed, ranks)
    spec = sliding_spec_of(layer, original, config)
    assert type(spec) is SlidingWindowSpec and spec.block_size == tokens and spec.sliding_window == 1024
    assert spec.page_size_bytes == original(layer, config).page_size_bytes * tokens // 64


def test_other_specs_are_left_alone():
    layer, config = model(AnyLayout, 10, 52)
    other = body_spec(PageLayout(256), 4)
    assert sliding_spec_of(layer, lambda *_: other, config) is other
