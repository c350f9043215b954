# SPDX-License-Identifier: Apache-2.0
"""N-gram speculation in mixed batches: whoever speculates beside whom, and whatever is accepted, the text stays."""
from __future__ import annotations

import pytest
from engine import assert_same, generate, greedy, llm, run_engines, tokens

pytestmark = pytest.mark.engine

FACTS, POOL = {"do": "facts"}, {"do": "pool"}
PATTERN, SHORT = tokens(40, seed=9), tokens(7, seed=8)
REPEATING = [PATTERN * 6, SHORT * 30, tokens(100, seed=5) + PATTERN * 4]
OTHERS = [tokens(n, seed=n) for n in (20, 100, 333)]
PROMPTS = [prompt for pair in zip(REPEATING, OTHERS, strict=True) for prompt in pair]

LENGTH = 64


def drafted(model: str, k: int, **kwargs) -> dict:
    speculation = {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    return llm(model, speculative_config=speculation, **kwargs)


def run(engine: dict, *steps: dict) -> list:
    """One engine in a process of its own: vLLM's kernel overrides do not survive other speculation settings."""
    (results,) = run_engines([{"llm": engine, "steps": list(steps)}])
    assert not isinstance(results, dict), results["error"]
    return results


@pytest.fixture(scope="module")
def plain(model_64) -> list[dict]:
    return run(llm(model_64), generate(PROMPTS, n=LENGTH))[0]


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 4, 16])
def test_mixed_batches(model_64, plain, k):
    """Some verify drafts, some decode one token, some prefill a chunk, in one step; again from a strict cache."""
    joining = {"do": "staggered", "prompts": PROMPTS, "after": [0, 0, 3, 5, 12, 20], "sampling": greedy(LENGTH)}
    engine = drafted(
        model_64, k, max_num_batched_tokens=96, max_num_seqs=8, enable_prefix_caching=True,
        settings={"prefix_hits": "strict"},
    )  # fmt: skip
    cold, facts, warm, both, pool = run(engine, joining, FACTS, joining, FACTS, POOL)
    print(facts)
    assert facts["draft_tokens"] > 50 and 0.1 < facts["accepted_tokens"] / facts["draft_tokens"] < 1
    assert_same(plain, cold, shared=0.9)
    assert_same(plain, warm, shared=0.9)
    assert [r["cached"] for r in warm] == [64 * ((len(p) - 1) // 64) for p in PROMPTS]
    assert both["draft_tokens"] > 1.5 * facts["draft_tokens"]
    assert pool["free"] == pool["pages"] - 1 and pool["known"] == pool["referenced"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("caching", [False, True])
def test_preempted_while_speculating(model_64, plain, caching):
    """A pool for a third of the batch: drafts, preemption and resuming together."""
    engine = drafted(
        model_64, 4, num_gpu_blocks_override=95, max_model_len=512, max_num_batched_tokens=128,
        enable_prefix_caching=caching, settings={"prefix_hits": "strict"},
    )  # fmt: skip
    tight, facts, pool = run(engine, generate(PROMPTS, n=LENGTH), FACTS, POOL)
    assert facts["preemptions"] > 0 and facts["accepted_tokens"] > 0
    assert_same(plain, tight, shared=0.9)
    assert pool["free"] == pool["pages"] - 1 and pool["known"] == pool["referenced"] == 0


@pytest.mark.slow
def test_the_real_model_repeats_itself(smollm2):
    """Texts that a real model continues by repeating them: most drafts are accepted, and the text is the plain one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    sentences = (
        "The ferry leaves the harbour at nine, at noon and at five, and costs four crowns. ",
        "def area(width: float, height: float) -> float:\n    return width * height\n\n",
        "one two three four five six seven eight nine ten ",
    )
    prompts = [tokenizer(sentence * 15).input_ids for sentence in sentences]
    prompts.append(tokenizer("A short story about a lighthouse keeper and his dog.").input_ids)
    base = {"max_model_len": 1024, "kv_cache_memory_bytes": 512 << 20}
    (alone,) = run(llm(smollm2, **base), generate(prompts, n=128))
    together, facts = run(drafted(smollm2, 4, **base), generate(prompts, n=128), FACTS)
    print(facts)
    assert facts["accepted_tokens"] / facts["draft_tokens"] > 0.6
    assert [r["tokens"] for r in alone] == [r["tokens"] for r in together]
    assert_same(alone, together, shared=1.0)
