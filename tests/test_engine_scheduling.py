# SPDX-License-Identifier: Apache-2.0
"""What schedules requests in unusual ways changes no number and leaks no page."""
from __future__ import annotations

import re

import numpy as np
import pytest
from engine import assert_same, generate, greedy, llm, run_engines, started, tokens
from tiny_models import add_tokenizer, tiny_model

pytestmark = pytest.mark.engine

FACTS, POOL, RESET = {"do": "facts"}, {"do": "pool"}, {"do": "reset_prefix_cache"}
EVERYTHING_FREE = {"known": 0, "referenced": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A tiny Llama with a byte-level tokenizer."""
    return add_tokenizer(tiny_model(tmp_path_factory.mktemp("scheduling"), "gqa"))


def with_tokenizer(model: str, **kwargs) -> dict:
    return llm(model, skip_tokenizer_init=False, max_model_len=1024, **kwargs)


def check_pool_is_free(pool: dict) -> None:
    assert pool["free"] == pool["pages"] - 1 and {k: pool[k] for k in EVERYTHING_FREE} == EVERYTHING_FREE, pool


@pytest.fixture(scope="module")
def runs(model):
    """Parallel samples, beams, constraints and refused prompts: with strict prefix hits, and without a cache."""
    prompt = tokens(333, seed=1, vocab=259)
    sampling = {**greedy(24), "temperature": 0.8, "seed": 7}
    del sampling["detokenize"]
    steps = {
        "samples": {"do": "completions", "prompts": [prompt], "sampling": {**sampling, "n": 3}},
        "beams": {"do": "beams", "prompts": [prompt], "width": 3, "max_tokens": 8},
        "choice": {"do": "structured", "prompts": [prompt] * 2, "constraint": {"choice": ["yes", "no"]},
                   "max_tokens": 8},
        "pattern": {"do": "structured", "prompts": [prompt] * 2,
                    "constraint": {"regex": "[0-9]{3}-[a-f]{4}"}, "max_tokens": 20},
        "empty": {"do": "refused_prompt", "prompt": []},
        "too long": {"do": "refused_prompt", "prompt": tokens(1025, vocab=259)},
        "longest": generate([tokens(1023, seed=3, vocab=259)], n=1),
        "after": generate([prompt]),
        "facts": FACTS, "pool": POOL,
    }  # fmt: skip
    alone = [
        {"do": "completions", "prompts": [prompt], "sampling": {**sampling, "seed": 7 + i, "n": 1}} for i in range(3)
    ]
    cached, plain, auto = started(run_engines(
        [
            {"llm": with_tokenizer(model, enable_prefix_caching=True, settings={"prefix_hits": "strict"}),
             "steps": list(steps.values())},
            {"llm": with_tokenizer(model), "steps": [*alone, *list(steps.values())[1:]]},
            {"llm": with_tokenizer(model, kv_cache_dtype="auto"), "steps": [generate([prompt])]},
        ]
    ))  # fmt: skip
    return dict(zip(steps, cached, strict=True)), plain[:3], dict(zip(list(steps)[1:], plain[3:], strict=True)), auto


def test_parallel_samples_share_their_prompt(runs):
    """`n=3` with a seed is three requests with the next seeds, and two of them hit the first one's pages."""
    cached, alone, *_ = runs
    assert_same(cached["samples"][0], [run[0][0] for run in alone], shared=0.8)
    assert len({tuple(c["tokens"]) for c in cached["samples"][0]}) == 3
    assert cached["facts"]["prefix_hits"] >= 2 * 320


def test_beam_search(runs):
    """Beams are short requests that all continue one prompt: same beams with and without shared pages."""
    cached, _, plain, _ = runs
    (warm,), (cold,) = cached["beams"], plain["beams"]
    assert len(warm) == 3
    assert np.allclose([b["logprob"] for b in warm], [b["logprob"] for b in cold], atol=0.02)
    assert warm[0]["tokens"] == cold[0]["tokens"]


def test_structured_output(runs):
    cached, _, plain, _ = runs
    assert set(cached["choice"]) <= {"yes", "no"} and cached["choice"] == plain["choice"]
    for text in cached["pattern"] + plain["pattern"]:
        assert re.fullmatch("[0-9]{3}-[a-f]{4}", text), text


def test_empty_and_longest_prompts(runs):
    """vLLM refuses empty and too long prompts; one up to the limit is served, and the next one is right."""
    cached, _, plain, auto = runs
    assert "empty" in cached["empty"] and re.search("1024|1025", cached["too long"]), cached
    assert len(cached["longest"][0]["tokens"]) == 1
    assert_same(cached["longest"], plain["longest"])
    assert_same(cached["after"], plain["after"], shared=0.8)
    with pytest.raises(AssertionError):
        assert_same(plain["after"], auto[0], shared=0.0)  # they could differ: INT4 is read
    check_pool_is_free(cached["pool"])
    check_pool_is_free(plain["pool"])


@pytest.fixture(scope="module")
def abort_runs(model):
    """A victim in every phase of its life; one strict engine, too small for all, that serves on after each abort."""
    prompts = [tokens(n, seed=n) for n in (200, 230, 260, 290)]
    phases = ("waiting", "chunk", "decode", "preempted")
    steps = [{"do": "abort", "prompts": prompts, "phase": phase, "sampling": greedy(160)} for phase in phases]
    reset = [step for abort in steps for step in (abort, RESET)]
    tight = {"num_gpu_blocks_override": 95, "max_model_len": 512, "max_num_batched_tokens": 128, "max_num_seqs": 4,
             "enable_prefix_caching": True, "settings": {"prefix_hits": "strict"}}  # fmt: skip
    aborted, plain = started(run_engines(
        [{"llm": llm(model, **tight), "steps": [*reset, POOL, FACTS]},
         {"llm": llm(model, max_model_len=512), "steps": [generate(prompts, n=160)]}]
    ))  # fmt: skip
    return dict(zip(phases, aborted[: 2 * len(phases) : 2], strict=True)), aborted, plain[0]


@pytest.mark.parametrize("phase", ["waiting", "chunk", "decode", "preempted"])
def test_abort_in_every_phase(abort_runs, phase):
    by_phase, _, plain = abort_runs
    run = by_phase[phase]
    assert run["victim"] is not None, f"no request was ever seen in phase {phase}"
    assert (run["computed"] > 0) == (phase in ("chunk", "decode"))
    check_pool_is_free(run["pool"])
    others = [i for i in range(4) if i != run["victim"]]
    assert sorted(run["others"]) == others
    assert_same([run["others"][i] for i in others], [plain[i] for i in others], shared=0.8)


def test_reset_between_aborts(abort_runs):
    _, aborted, _ = abort_runs
    assert all(result is True for result in aborted[1:8:2])
    assert aborted[-1]["preemptions"] > 0


def test_priorities(model):
    """A late request of high priority displaces others; who is displaced changes nobody's numbers."""
    prompts = [tokens(n, seed=n) for n in (200, 230, 260, 290)]
    sampling = greedy(160)
    step = {"do": "completions", "prompts": prompts, "sampling": sampling, "priority": [3, 2, 1, 0]}
    tight = {"num_gpu_blocks_override": 95, "max_model_len": 512, "scheduling_policy": "priority"}
    prioritised, plain = started(run_engines(
        [
            {"llm": llm(model, **tight), "steps": [step, FACTS, POOL]},
            {"llm": llm(model, max_model_len=512), "steps": [generate(prompts, n=160)]},
        ]
    ))
    assert prioritised[1]["preemptions"] > 0
    check_pool_is_free(prioritised[2])
    assert_same([completions[0] for completions in prioritised[0]], plain[0], shared=0.8)


def test_prompt_logprobs_in_chunks_and_beside_a_prefix_cache(model):
    """Scoring does not read the prefix cache, whatever is in it, and does not depend on chunks."""
    text = tokens(400, seed=5)
    step = {"do": "generate", "prompts": [text], "sampling": {**greedy(1), "prompt_logprobs": 1}}
    cached = {"enable_prefix_caching": True, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    chunks, whole = started(run_engines(
        [
            {"llm": llm(model, max_model_len=1024, **cached), "steps": [generate([text]), step]},
            {"llm": llm(model, max_model_len=1024), "steps": [step]},
        ]
    ))
    difference = np.abs(np.array(chunks[1][0]["prompt_logprobs"][1:]) - np.array(whole[0][0]["prompt_logprobs"][1:]))
    assert len(difference) == 399 and np.median(difference) < 1e-3 and difference.max() < 0.05
