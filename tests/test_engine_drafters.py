# SPDX-License-Identifier: Apache-2.0
"""Draft models: their cache is their own, in full precision, and what they propose changes no result."""
from __future__ import annotations

from importlib.util import find_spec

import pytest
from engine import assert_same, generate, llm, run_engines, tiny_llama, tokens
from tiny_heads import tiny_eagle, tiny_eagle3, tiny_mimo

pytestmark = pytest.mark.engine

FACTS = {"do": "facts"}
VIEWS = {"do": "cache_views"}
PATTERN = tokens(40, seed=9)
PROMPTS = [tokens(5, seed=5), tokens(100, seed=100), tokens(333, seed=333), PATTERN * 6]
DEPTHS = [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(8, marks=pytest.mark.slow)]  # drafts a step
SHORT = [tokens(n, seed=n) for n in (4, 20, 63, 64)]  # all within the window to the last token: INT4 is never read


def drafted(model: str, draft: str, k: int, **kwargs) -> dict:
    """An engine whose drafts come from the model in folder `draft`."""
    speculation = {"method": "draft_model", "model": draft, "num_speculative_tokens": k}
    return llm(model, speculative_config=speculation, **kwargs)


def run(engine: dict, *steps: dict, **env: str) -> list:
    """One engine in a process of its own: vLLM's kernel overrides do not survive other speculation settings."""
    (results,) = run_engines([{"llm": engine, "steps": list(steps)}], **env)
    assert not isinstance(results, dict), results["error"]
    return results


def acceptance(facts: dict) -> float:
    assert facts["draft_tokens"] > 50
    return facts["accepted_tokens"] / facts["draft_tokens"]


def assert_identical(plain: list[dict], drafted: list[dict]) -> None:
    """Greedy tokens are the same, and so are the log-probabilities up to rounding."""
    assert [r["tokens"] for r in plain] == [r["tokens"] for r in drafted]
    assert_same(plain, drafted, median=1e-5, worst=1e-2, shared=1.0)


@pytest.fixture(scope="module")
def plain(model_64) -> list:
    """[SHORT, PROMPTS] without speculation."""
    return run(llm(model_64), generate(SHORT), generate(PROMPTS, n=48))


@pytest.mark.parametrize("k", DEPTHS)
def test_a_copy_as_its_own_draft(model_64, plain, k):
    """Equal to plain, while our pages are poisoned and no byte of them is written by the drafter."""
    _, short, first, long, facts, counts, views = run(
        drafted(model_64, model_64, k), {"do": "guard_drafter"}, generate(SHORT), FACTS, generate(PROMPTS, n=48),
        FACTS, {"do": "guard_counts"}, VIEWS,
    )  # fmt: skip
    assert_identical(plain[0], short)
    assert_identical(plain[1], long)
    # Within the window target and draft compute the same, so every draft is accepted, as under `auto`.
    assert first["accepted_tokens"] == first["draft_tokens"] > 50
    # Beyond it the target reads INT4 and the draft does not: a random model's best token changes now and then.
    assert acceptance(facts) > 0.75
    assert counts["calls"] == counts["calls_that_wrote"] > 10
    shapes = {name: shape for name, shape, _ in views}
    pages = {shape[0] for shape in shapes.values()}
    assert len(pages) == 1  # one pool: the drafter's layers lie in the pages of the bodies
    for layer in range(4):
        assert shapes[f"draft_model.model.layers.{layer}.self_attn.attn"][1:] == (2, 64, 128)
        assert shapes[f"model.layers.{layer}.self_attn.attn"][1:] == (2, 64, 72)
        assert f"draft_model.model.layers.{layer}.self_attn.attn.int4_asym_window" not in shapes


OTHER_DRAFTS = {
    "fewer layers, wider heads": {"layers": 2, "head_dim": 128, "kv_heads": 1, "heads": 4, "seed": 3},
    "more layers, narrower heads": {"layers": 6, "head_dim": 32, "kv_heads": 4, "seed": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_DRAFTS)
def test_another_model_as_the_draft(model_64, plain, tmp_path, name):
    """Other head sizes, heads and layers; two random models seldom agree, so nearly every draft is taken back."""
    draft = tiny_llama(tmp_path / "draft", **OTHER_DRAFTS[name])
    _, long, facts, counts = run(
        drafted(model_64, draft, 3), {"do": "guard_drafter"}, generate(PROMPTS, n=48), FACTS, {"do": "guard_counts"}
    )
    assert_identical(plain[1], long)
    assert acceptance(facts) < 0.3
    assert counts["calls"] == counts["calls_that_wrote"] > 10


def test_prefix_hits_with_a_draft_model(model_64, plain):
    """`strict`: a warm run equals a cold one, and as many drafts are accepted: the drafter's pages are hit as well."""
    engine = drafted(model_64, model_64, 3, enable_prefix_caching=True, settings={"prefix_hits": "strict"})
    step = generate(PROMPTS, n=48)
    cold, after_cold, warm, after_warm = run(engine, step, FACTS, step, FACTS)
    assert_identical(plain[1], cold)
    assert_identical(plain[1], warm)
    assert [r["cached"] for r in warm] == [64 * ((len(p) - 1) // 64) for p in PROMPTS]
    keys = ("draft_tokens", "accepted_tokens")
    first, both = ([facts[key] for key in keys] for facts in (after_cold, after_warm))
    assert first[0] > 50 and both == [2 * n for n in first]


@pytest.mark.slow
@pytest.mark.parametrize("caching", [False, True])
def test_preempted_equals_uninterrupted_with_a_draft_model(model_64, caching):
    prompts = [tokens(n, seed=n) for n in (200, 230, 260, 290)]
    step = generate(prompts, n=160)
    (ample,) = run(llm(model_64), step)
    tight, facts = run(
        drafted(model_64, model_64, 3, num_gpu_blocks_override=95, max_model_len=512, enable_prefix_caching=caching,
                settings={"prefix_hits": "strict"}),
        step, FACTS,
    )  # fmt: skip
    assert facts["preemptions"] > 0
    assert_identical(ample, tight)


@pytest.mark.slow
def test_tensor_parallel_with_a_draft_model(model_64, plain):
    """Target and draft on two workers, in processes of their own."""
    engine = drafted(model_64, model_64, 3, tensor_parallel_size=2, distributed_executor_backend="mp")
    engine["speculative_config"]["draft_tensor_parallel_size"] = 2
    parallel, facts = run(
        engine, generate(PROMPTS, n=48), FACTS, VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="0|1"
    )
    assert_same(plain[1], parallel, shared=0.8)
    assert acceptance(facts) > 0.75


@pytest.mark.slow
def test_skipped_layers_and_a_draft_model(model_64):
    """Bodies, dense layers of the target and the draft's in one group."""
    skip = {"kv_cache_dtype_skip_layers": ["0", "3"]}
    (alone,) = run(llm(model_64, **skip), generate(PROMPTS, n=48))
    _, together, counts = run(
        drafted(model_64, model_64, 3, **skip), {"do": "guard_drafter"}, generate(PROMPTS, n=48), {"do": "guard_counts"}
    )
    assert_identical(alone, together)
    assert counts["calls"] == counts["calls_that_wrote"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 3, 8])
def test_the_real_model_accepts_its_copy(smollm2, k):
    """SmolLM2 drafting for itself: accepted at least 0.95 as often as under `auto`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    story = (
        "The committee met in {0} to discuss the harbour, its debts, and the new ferry line to the islands. Nobody "
        "had been to {0} before, and the door was locked. "
    )
    places = ("May", "the old school", "a tent near the pier")
    texts = [story.format(place) * 10 + f"\n\nA recipe for soup, as in {place}:" for place in places]
    prompts = [tokenizer(text).input_ids for text in texts]
    assert min(map(len, prompts)) > 350
    base = {"max_model_len": 1024, "kv_cache_memory_bytes": 512 << 20}
    rates = {}
    for dtype in ("auto", "int4_asym"):
        _, facts = run(drafted(smollm2, smollm2, k, kv_cache_dtype=dtype, **base), generate(prompts, n=96), FACTS)
        rates[dtype] = acceptance(facts)
    print(rates)
    assert rates["int4_asym"] >= 0.95 * rates["auto"]


def check_head(target: str, speculation: dict, plain: list[dict], layers: int, k: int) -> None:
    """Heads that read the target's states: equal to plain cold and warm, pages of ours untouched.

    vLLM drops the last page of a hit, since a head needs the states in front of its first draft.
    """
    engine = llm(target, speculative_config={**speculation, "num_speculative_tokens": k}, enable_prefix_caching=True,
                 settings={"prefix_hits": "strict"})  # fmt: skip
    step = generate(PROMPTS, n=48)
    _, cold, after_cold, warm, after_warm, counts, views = run(
        engine, {"do": "guard_drafter"}, step, FACTS, step, FACTS, {"do": "guard_counts"}, VIEWS
    )
    assert_identical(plain, cold)
    assert_identical(plain, warm)
    assert [r["cached"] for r in warm] == [max(0, 64 * (len(p) // 64) - 64) for p in PROMPTS]
    assert max(r["cached"] for r in warm) == 256
    keys = ("draft_tokens", "accepted_tokens")
    first, both = ([facts[key] for key in keys] for facts in (after_cold, after_warm))
    assert 0 < first[1] < first[0] and both == [2 * n for n in first]
    assert counts["calls"] == counts["calls_that_wrote"] > 20
    shapes = {name: shape for name, shape, _ in views}
    assert len(shapes) == 2 * 4 + layers and len({shape[0] for shape in shapes.values()}) == 1


@pytest.mark.parametrize("k", DEPTHS)
def test_eagle3(model_64, plain, tmp_path, k):
    head = tiny_eagle3(tmp_path / "head", model_64)
    check_head(model_64, {"method": "eagle3", "model": head}, plain[1], layers=1, k=k)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 3, 8])
def test_eagle(model_64, plain, tmp_path, k):
    head = tiny_eagle(tmp_path / "head", model_64)
    check_head(model_64, {"method": "eagle", "model": head}, plain[1], layers=1, k=k)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 3, 8])
def test_mtp(tmp_path, k):
    model = tiny_mimo(tmp_path)
    (plain_results,) = run(llm(model), generate(PROMPTS, n=48))
    check_head(model, {"method": "mtp"}, plain_results, layers=1, k=k)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("arctic_inference") is None, reason="suffix decoding needs arctic-inference")
@pytest.mark.parametrize("k", [1, 3, 8])
def test_suffix_decoding(model_64, plain, k):
    """Drafts from suffixes seen before, of any number up to k a step: equal to plain, cold and with what it learnt."""
    speculation = {"method": "suffix", "num_speculative_tokens": k, "suffix_decoding_max_spec_factor": 4.0,
                   "suffix_decoding_min_token_prob": 0.0}  # fmt: skip
    step = generate(PROMPTS, n=48)
    cold, first, warm, both = run(llm(model_64, speculative_config=speculation), step, FACTS, step, FACTS)
    assert_identical(plain[1], cold)
    assert_identical(plain[1], warm)
    assert both["draft_tokens"] > first["draft_tokens"] > 0
    # The second time the very answers are in the tree.
    assert both["accepted_tokens"] - first["accepted_tokens"] > 50
