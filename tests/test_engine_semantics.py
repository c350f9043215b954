# SPDX-License-Identifier: Apache-2.0
"""The position rule, end to end: precision depends on positions and on nothing else (prefix caching off)."""
from __future__ import annotations

import numpy as np
import pytest
from engine import assert_same, generate, greedy, llm, run_engines, tokens
from oracle import Oracle

pytestmark = pytest.mark.engine

@pytest.fixture(scope="module")
def oracle():
    return Oracle()


@pytest.mark.parametrize("model", ["model_64", "model_128"])
def test_position_rule_equals_reference_at_every_residue(model, request, oracle):
    model = request.getfixturevalue(model)
    if model.endswith("d128"):
        lengths = [1, 63, 64, 65, 127, 129, 136, 200, 256, 321]
    else:
        edges = {1, 7, 8, 9, 127, 128, 129, 135, 136, 137, 191, 192, 193, 255, 256, 257, 600}
        lengths = sorted(edges | set(range(192, 256)))  # every residue of the page
    prompts = [tokens(n, seed=n) for n in lengths]
    ((results,),) = run_engines([{"llm": llm(model), "steps": [generate(prompts)]}])
    oracle.check(model, prompts, results)


def test_chunk_size_does_not_matter(model_64):
    prompts = [tokens(n, seed=n) for n in (5, 100, 200, 333, 700, 1000)]
    small, middle, large = run_engines(
        [
            {"llm": llm(model_64, max_num_batched_tokens=size, max_num_seqs=8), "steps": [generate(prompts)]}
            for size in (64, 256, 2048)
        ]
    )
    assert_same(small[0], large[0], shared=0.8)
    assert_same(middle[0], large[0], shared=0.8)


def test_batch_does_not_matter(model_64):
    prompts = [tokens(n, seed=n) for n in (3, 64, 130, 200, 450, 900)]
    ((together, alone),) = run_engines(
        [{"llm": llm(model_64), "steps": [generate(prompts), generate(prompts, one_by_one=True)]}]
    )
    assert_same(together, alone, shared=0.8)


def test_preempted_equals_uninterrupted(model_64):
    prompts = [tokens(n, seed=n) for n in (200, 230, 260, 290)]
    steps = [generate(prompts, n=160), {"do": "facts"}]
    ample, tight = run_engines(
        [
            {"llm": llm(model_64), "steps": steps},
            # A prompt takes about 30 pages (4 body, 26 window), and grows by 3: three fit until they grow.
            {"llm": llm(model_64, num_gpu_blocks_override=95, max_model_len=512), "steps": steps},
        ]
    )
    assert ample[1]["preemptions"] == 0 and tight[1]["preemptions"] > 0
    assert_same(ample[0], tight[0], shared=0.8)


@pytest.mark.parametrize("drafts", [3, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 8))])
def test_speculation_equals_none(model_64, drafts):
    # Repetition gives the n-gram proposer something to propose, a random model rejects most of it.
    pattern = tokens(40, seed=9)
    prompts = [pattern * 6, pattern * 3 + tokens(30, seed=4), tokens(100, seed=5) + pattern * 4]
    speculative = llm(
        model_64,
        speculative_config={"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3,
                            "prompt_lookup_min": 1},
    )  # fmt: skip
    steps = [generate(prompts, n=96), {"do": "facts"}]
    # One process each: vLLM's kernel overrides do not survive a change of speculation settings.
    ((plain, _),) = run_engines([{"llm": llm(model_64), "steps": steps}])
    ((drafted, facts),) = run_engines([{"llm": speculative, "steps": steps}])
    assert facts["draft_tokens"] > 50 and facts["accepted_tokens"] < facts["draft_tokens"]
    assert_same(plain, drafted, shared=0.8)


@pytest.mark.parametrize(
    "settings",
    [
        {"key_axis": "head_dim", "recent_tokens": 0, "sink_tokens": 0},
        pytest.param({"group_size": 32, "sink_tokens": 0, "recent_tokens": 64}, marks=pytest.mark.slow),
        pytest.param({"sink_tokens": 64, "recent_tokens": 300}, marks=pytest.mark.slow),
    ],
)
def test_other_settings_chunk_and_batch(model_64, settings):
    prompts = [tokens(n, seed=n) for n in (5, 100, 333, 700)]
    one, two = run_engines(
        [
            {"llm": llm(model_64, settings=settings, max_num_batched_tokens=96, max_num_seqs=8),
             "steps": [generate(prompts)]},
            {"llm": llm(model_64, settings=settings), "steps": [generate(prompts, one_by_one=True)]},
        ]
    )  # fmt: skip
    assert_same(one[0], two[0], shared=0.75)


def test_nan_cannot_cross_requests(model_64):
    """Requests share pages' memory over time: a pool small enough to reuse every page stays finite."""
    rounds = [generate([tokens(500, seed=s), tokens(300, seed=s + 50)], n=24) for s in range(6)]
    fresh = run_engines([{"llm": llm(model_64, num_gpu_blocks_override=130, max_model_len=1024), "steps": rounds}])[0]
    alone = run_engines([{"llm": llm(model_64), "steps": rounds[-1:]}])[0]
    assert all(np.isfinite(r["logprobs"]).all() for results in fresh for r in results)
    assert_same(fresh[-1], alone[0], shared=0.8)


def test_prompt_logprobs_equal_decode_logprobs(model_64):
    """Scoring a text (prefill) and generating it (decode) see the same cache."""
    prompt = tokens(300, seed=1)
    ((generated,),) = run_engines([{"llm": llm(model_64), "steps": [generate([prompt], n=64)]}])
    text = prompt + generated[0]["tokens"]
    step = {"do": "generate", "prompts": [text], "sampling": {**greedy(1), "prompt_logprobs": 1}}
    ((scored,),) = run_engines([{"llm": llm(model_64), "steps": [step]}])
    difference = np.abs(np.array(scored[0]["prompt_logprobs"][300:]) - np.array(generated[0]["logprobs"]))
    assert np.median(difference) < 1e-3 and difference.max() < 0.05
