# SPDX-License-Identifier: Apache-2.0
"""Adapters, images, embeddings: what else vLLM serves beside plain text models."""
from __future__ import annotations

import numpy as np
import pytest
from engine import assert_same, generate, greedy, llm, logprob_differences, run_engines, started, tokens
from oracle import Oracle
from tiny_models import add_tokenizer, tiny_model
from tiny_packed import tiny_packed
from tiny_vision import IMAGE_SIZE, IMAGE_TOKENS, tiny_adapter, tiny_idefics

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("hits", ["strict", pytest.param("relaxed", marks=pytest.mark.slow)])
def test_adapters_never_share_pages(tmp_path, hits):
    """Two LoRA adapters and the base model with one prompt: no page of one is a hit of another."""
    model = tiny_model(tmp_path, "gqa")
    outputs = {"q_proj": 8 * 64, "k_proj": 2 * 64, "v_proj": 2 * 64}
    one, two = (
        {"name": n, "id": i, "path": tiny_adapter(tmp_path / n, seed=i, outputs=outputs)}
        for i, n in enumerate(("one", "two"), 1)
    )
    prompt = tokens(333, seed=1)
    order = [one, two, None, one, two, None]
    step = {"do": "adapters", "prompts": [prompt] * 6, "adapters": order, "sampling": greedy(24)}
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_model_len": 1024}
    warm, cold, without = started(run_engines(
        [
            {"llm": llm(model, enable_prefix_caching=True, settings={"prefix_hits": hits}, **lora), "steps": [step]},
            {"llm": llm(model, **lora), "steps": [{**step, "prompts": [prompt] * 3, "adapters": order[:3]}]},
            {"llm": llm(model, max_model_len=1024), "steps": [generate([prompt], n=24)]},
        ]
    ))
    assert [r["cached"] for r in warm[0]] == [0, 0, 0, 320, 320, 320]
    assert_same(warm[0][:3], cold[0], shared=0.8)
    assert_same(warm[0][3:], cold[0], shared=0.8)  # exact repeats find their window in both modes
    assert_same(cold[0][2:], without[0], shared=0.8)
    first = [r["logprobs"][0] for r in cold[0]]
    assert min(abs(first[0] - first[1]), abs(first[0] - first[2])) > 0.01  # the adapters matter


def test_image_prompts(tmp_path):
    """One image in 300 tokens of text, twice and another one: chunks and prefix hits change nothing."""
    model, image_token = tiny_idefics(tmp_path / "idefics")
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3)).tolist() for _ in range(2)]
    prompt = tokens(100, seed=1, vocab=250) + [image_token] + tokens(200, seed=2, vocab=250)
    base = {"max_model_len": 1024, "skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}}
    step = lambda *order: {"do": "images", "prompts": [prompt] * len(order), "images": [pictures[i] for i in order],
                           "sampling": greedy(24)}  # fmt: skip
    auto, wide, cold, warm = started(run_engines(
        [
            {"llm": llm(model, kv_cache_dtype="auto", **base), "steps": [step(0, 1)]},
            {"llm": llm(model, settings={"recent_tokens": 1024}, **base), "steps": [step(0, 1)]},
            {"llm": llm(model, max_num_batched_tokens=128, max_num_seqs=4, **base), "steps": [step(0, 1)]},
            {"llm": llm(model, enable_prefix_caching=True, settings={"prefix_hits": "strict"}, **base),
             "steps": [step(0), step(1), step(0), step(1)]},
        ]
    ))  # fmt: skip
    assert_same(auto[0], wide[0], median=1e-5, worst=1e-3)
    with pytest.raises(AssertionError):
        assert_same(auto[0], cold[0], shared=0.0)  # INT4 is read
    with pytest.raises(AssertionError):
        assert_same(cold[0][:1], cold[0][1:], shared=0.0)  # the picture matters
    for i, run in enumerate(warm):
        assert_same(run, [cold[0][i % 2]], shared=0.8)
    length = len(prompt) - 1 + IMAGE_TOKENS
    assert warm[0][0]["cached"] == 0
    assert warm[1][0]["cached"] <= 100  # text in front of another picture, never the picture
    assert [run[0]["cached"] for run in warm[2:]] == [64 * ((length - 1) // 64)] * 2


def test_embeddings_of_a_decoder(tmp_path):
    """A decoder that embeds, like Qwen3-Embedding, prefills by the same rule; all in 16 bits, and with the flag left
    out, it is exact."""
    model = add_tokenizer(tiny_model(tmp_path, "qwen3"))
    texts = [tokens(n, seed=n) for n in (50, 100, 400)]
    step = {"do": "embed", "prompts": texts}
    base = {"runner": "pooling", "convert": "embed", "max_model_len": 1024, "enable_prefix_caching": False,
            "skip_tokenizer_init": False}  # fmt: skip
    engines = [llm(model, **settings, **base) for settings in ({}, {"settings": {"recent_tokens": 1024}}, {})]
    del engines[0]["kv_cache_dtype"]
    auto, wide, int4 = (
        np.array(run[0]) for run in started(run_engines([{"llm": engine, "steps": [step]} for engine in engines]))
    )
    exact = [Oracle(recent_tokens=1024).embedding(model, text).numpy() for text in texts]
    assert np.abs(auto - exact).max() < 1e-4
    assert np.abs(auto - wide).max() < 1e-5
    assert np.abs(auto[:2] - int4[:2]).max() < 1e-5  # texts within the window
    assert np.abs(auto[2] - int4[2]).max() > 1e-5  # a longer text reads INT4
    assert np.abs(int4[2] - Oracle().embedding(model, texts[2]).numpy()).max() < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("method", "linear"), [("awq", "AutoAWQMarlinLinearMethod"), ("gptq", "AutoGPTQLinearMethod")])
def test_packed_weights_are_unaffected(tmp_path, method, linear):
    """The same weights in the same kernels as under `auto`; all in 16 bits it is as near to it as it is to itself in
    chunks, and INT4 is read beyond the window."""
    model = tiny_packed(tmp_path / method, tiny_model(tmp_path, "gqa"), method)
    steps = [generate([tokens(n, seed=n) for n in (50, 300)]), {"do": "weights"}]
    base = {"dtype": "bfloat16", "max_model_len": 1024}
    settings = ({"settings": {"recent_tokens": 1024}}, {}, {"kv_cache_dtype": "auto"},
                {"kv_cache_dtype": "auto", "max_num_batched_tokens": 64, "max_num_seqs": 4})  # fmt: skip
    runs = started(run_engines([{"llm": llm(model, **base, **extra), "steps": steps} for extra in settings]))
    assert all(run[1] == runs[2][1] for run in runs) and linear in runs[2][1]["methods"], [run[1] for run in runs]
    wide, chunks = (float(np.median(logprob_differences(runs[2][0], runs[i][0]))) for i in (0, 3))
    assert wide <= max(0.001, 2 * chunks), (wide, chunks)
    assert logprob_differences(runs[2][0][1:], runs[1][0][1:]).max() > 0.005  # the longer text reads INT4
