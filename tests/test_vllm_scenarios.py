# SPDX-License-Identifier: Apache-2.0
"""vLLM's end-to-end scenarios of prefix caching and speculation, by its tests' names, with our dtype and driver.

| vLLM's test | here |
|---|---|
| v1/core/test_prefix_caching.py | `manager_scenarios.py`, by name; events, statistics, admission: `manager_suite.py` |
| prefix_caching: mixed_requests, unstable_prompt_sequence, fully_cached_prefill_needs_uncached_token | below |
| v1/core/test_prefix_caching.py: cache_key_salting, as a user sees it | below |
| the same: reset_prefix_cache; v1/core/test_reset_prefix_cache_e2e.py | below; `test_engine_prefix.py` |
| v1/e2e spec_decode: ngram_and_suffix_correctness | below, `test_engine_ngram.py`; suffix: `test_engine_drafters.py` |
| draft_model_correctness, tensor_parallelism, eagle and mtp correctness | `test_engine_drafters.py` |
| lora_with_spec_decode | below |
| v1/e2e async_scheduling: without_spec_decoding, with_eagle3_spec_decoding (drafters that end early) | below |
| the same, asynchronous | `gpu_engine.py`: vLLM's CPU platform switches it off; its managers: `manager_schedules.py` |
| v1/e2e context_length, min_tokens | `test_engine_scheduling.py`, below |

Draft models that need others' weights, GSM8K through a server and ROCm's deterministic prefix caching are not played.
"""
from __future__ import annotations

import pytest
from engine import compare_answer, generate, greedy, llm, run_engines, started, tokens
from tiny_models import add_tokenizer, tiny_model
from tiny_vision import tiny_adapter

pytestmark = pytest.mark.engine

FACTS = {"do": "facts"}
WORST, TIE = 0.05, 0.02
"""Nats: a code flips where rounding meets a tie; two tokens that the cold run tells apart by less may change places."""

LETTERS = 259  # tokens of the byte-level tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A tiny Llama with a byte-level tokenizer."""
    return add_tokenizer(tiny_model(tmp_path_factory.mktemp("scenarios"), "gqa"))


def assert_equal(known: list[dict], answers: list[dict], shared: float = 0.9) -> None:
    """Token by token, but for ties; so many tokens at least before any parting."""
    compared = [compare_answer(one, two, WORST, TIE) for one, two in zip(known, answers, strict=True)]
    assert all(result["right"] for result in compared), compared
    total = sum(len(one["tokens"]) for one in known)
    assert sum(result["shared"] for result in compared) >= shared * total, compared


# -- prefix caching ---------------------------------------------------------------------
PROMPT = tokens(333, seed=1)
ALIGNED = tokens(256, seed=2)
UNSTABLE = [PROMPT[:n] + tokens(m, seed=n) for n, m in ((333, 0), (100, 30), (333, 70), (200, 0), (320, 5), (64, 1))]
MIXED = [PROMPT + tokens(40, seed=5), tokens(90, seed=6), ALIGNED, tokens(20, seed=7), ALIGNED + tokens(9, seed=8)]


@pytest.fixture(scope="module")
def caching(model) -> list:
    """One strict engine; a salt of its own makes a request cold."""
    once = lambda prompts, name: generate(prompts, n=16, salts=[f"{name} {i}" for i in range(len(prompts))])
    steps = [
        once([PROMPT, ALIGNED, *UNSTABLE, *MIXED], "cold"),
        *(generate([PROMPT], n=16, salts=[salt]) for salt in ("ours", "ours", "theirs", None, None)),
        generate([ALIGNED], n=16), generate([ALIGNED], n=16),
        *(generate([prompt], n=16) for prompt in UNSTABLE),
        generate(MIXED, n=16),
        {"do": "reset_prefix_cache"}, generate([PROMPT], n=16),
    ]  # fmt: skip
    engine = llm(model, enable_prefix_caching=True, settings={"prefix_hits": "strict"}, max_model_len=1024)
    (results,) = started(run_engines([{"llm": engine, "steps": steps}]))
    return results


def test_cache_key_salting(caching):
    """One prompt under two salts and without: found by its own salt only, and the answer is the same."""
    cold, runs = caching[0], caching[1:6]
    assert [run[0]["cached"] for run in runs] == [0, 320, 0, 0, 320]
    for run in runs:
        assert_equal(cold[:1], run)


def test_fully_cached_prefill_needs_uncached_token(caching):
    """A prompt of whole pages, cached to its end: the last page is computed again, since logits are wanted."""
    cold, first, again = caching[0][1:2], caching[6], caching[7]
    assert all(result["cached"] == 0 for result in caching[0])
    assert (first[0]["cached"], again[0]["cached"]) == (0, 192)
    assert_equal(cold, first)
    assert_equal(cold, again)


def test_unstable_prompt_sequence(caching):
    """Prompts that grow, shrink and branch, one after the other: hits never reach beyond what they share."""
    cold, runs = caching[0][2:8], [run[0] for run in caching[8:14]]
    assert [run["cached"] for run in runs] == [320, 0, 320, 64, 320, 64]  # the second one leaves a window at 64
    assert_equal(cold, runs)


def test_mixed_requests(caching):
    """Hits of different lengths and misses in one batch."""
    cold, run = caching[0][8:], caching[14]
    assert [result["cached"] for result in run] == [320, 0, 192, 0, 256]
    assert_equal(cold, run)


def test_reset_prefix_cache(caching):
    """Nothing is found afterwards, and the answer stays."""
    reset, after = caching[15:]
    assert reset is True and after[0]["cached"] == 0
    assert_equal(caching[0][:1], after)


# -- speculation ----------------------------------------------------------------------------
WORDS = tokens(30, seed=9, vocab=LETTERS)
REPEATING = [(tokens(9, seed=i, vocab=LETTERS) + WORDS[: 10 + 3 * i]) * 6 for i in range(5)]
CHAT = [tokens(30 + 40 * i, seed=100 + i, vocab=LETTERS) for i in range(5)]
PROMPTS = [prompt for pair in zip(REPEATING, CHAT, strict=True) for prompt in pair]
NGRAM = {"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 3, "num_speculative_tokens": 3}
TIGHT = {"num_gpu_blocks_override": 95, "max_model_len": 512}
CHUNKS = {"max_num_batched_tokens": 64, "max_num_seqs": 16}

OVERRIDES = {
    "greedy": {}, "frequency penalty": {"frequency_penalty": -1.0}, "bad words": {"bad_words": ["A", "B", "z"]},
    "prompt logprobs": {"prompt_logprobs": 2}, "min tokens": {"ignore_eos": False, "min_tokens": 45},
}  # fmt: skip


def run(model: str, *steps: dict, env: dict | None = None, **kwargs) -> list:
    """One engine in a process of its own: vLLM's kernel overrides do not survive other speculation settings."""
    engine = llm(model, **{"max_model_len": 1024, "skip_tokenizer_init": False, **kwargs})
    return started(run_engines([{"llm": engine, "steps": list(steps)}], **(env or {})))[0]


def every_override() -> list[dict]:
    return [generate(PROMPTS, n=48, **override) for override in OVERRIDES.values()]


@pytest.fixture(scope="module")
def baseline(model) -> list:
    """Without speculation, without pressure, in one process: results per entry of `OVERRIDES`."""
    results = run(model, *every_override())
    texts = [[answer["tokens"] for answer in batch] for batch in results]
    assert all(texts[0] != other for other in texts[1:3])  # these change the text; the others what is said about it
    return results


def check_overrides(baseline: list, results: list) -> None:
    for name, known, answers in zip(OVERRIDES, baseline, results, strict=True):
        try:
            assert_equal(known, answers)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    scores = [[p for answer in batch[3] for p in answer["prompt_logprobs"][1:]] for batch in (baseline, results)]
    assert max(abs(one - two) for one, two in zip(*scores, strict=True)) < WORST


SCHEDULES = {
    "preempted": TIGHT,
    "chunked": CHUNKS,
    "preempted and chunked": {**TIGHT, **CHUNKS},
    "strict prefix cache, preempted": {
        **TIGHT, "enable_prefix_caching": True, "additional_config": {"int4_asym": {"prefix_hits": "strict"}}
    },
    "executor in processes": {"distributed_executor_backend": "mp"},
}  # fmt: skip
IN_PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_and_with_spec_decoding(model, baseline, schedule, drafts):
    """Every sampling parameter under every schedule: what vLLM asks of asynchronous scheduling, here of our cache."""
    options = {**SCHEDULES[schedule], **({"speculative_config": NGRAM} if drafts else {})}
    env = IN_PROCESSES if "distributed_executor_backend" in options else {}
    *results, facts = run(model, *every_override(), FACTS, env=env, **options)
    check_overrides(baseline, results)
    assert facts["preemptions"] > 0 or "preempted" not in schedule
    assert not drafts or facts["accepted_tokens"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("k", "floor"), [(1, 0.55), (3, 0.4), (8, 0.22)])
def test_ngram_correctness(model, baseline, k, floor):
    """Ten prompts, half of them repetitive: all answers, where vLLM once asked for two in three.

    The floors are 80 to 85 % of what these texts gave (0.65, 0.48, 0.27): the text decides it, not the cache.
    """
    answers, facts = run(
        model, generate(PROMPTS, n=48), FACTS, speculative_config={**NGRAM, "num_speculative_tokens": k}
    )
    assert_equal(baseline[0], answers)
    rate = facts["accepted_tokens"] / facts["draft_tokens"]
    print(k, facts["draft_tokens"], rate)
    assert facts["draft_tokens"] > 50 and rate > floor


@pytest.mark.slow
def test_drafts_end_where_the_draft_model_does(model, baseline):
    """A draft model of 128 tokens beside texts of up to 260: vLLM fills its drafts up, and they are taken back.

    One by one, since vLLM stops drafting for a whole batch. As many are accepted as under `auto`.
    """
    step = generate(PROMPTS, n=48, one_by_one=True)
    speculation = {"method": "draft_model", "model": model, "num_speculative_tokens": 3}
    accepted = {}
    for name, dtype, length in (("short", "int4_asym", 128), ("auto", "auto", 128), ("long", "int4_asym", 1024)):
        options = {"kv_cache_dtype": dtype, "speculative_config": {**speculation, "max_model_len": length}}
        answers, facts = run(model, step, FACTS, **options)
        accepted[name] = facts["accepted_tokens"]
        if dtype != "auto":
            assert_equal(baseline[0], answers)
    print(accepted)
    assert 0.95 * accepted["auto"] <= accepted["short"] < 0.5 * accepted["long"] and accepted["short"] > 50


@pytest.mark.slow
def test_lora_with_spec_decode(model, tmp_path):
    """An adapter's answers are the same with n-gram drafts, and are the adapter's."""
    outputs = {"q_proj": 8 * 64, "k_proj": 2 * 64, "v_proj": 2 * 64}
    adapter = {"name": "one", "id": 1, "path": tiny_adapter(tmp_path / "one", seed=1, outputs=outputs)}
    prompts = REPEATING[:3] * 2
    step = {"do": "adapters", "prompts": prompts, "adapters": [adapter] * 3 + [None] * 3, "sampling": greedy(48)}
    lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    (plain,) = run(model, step, **lora)
    drafted, facts = run(model, step, FACTS, speculative_config=NGRAM, **lora)
    assert facts["accepted_tokens"] > 10
    assert_equal(plain, drafted)
    assert [r["tokens"] for r in plain[:3]] != [r["tokens"] for r in plain[3:]]
