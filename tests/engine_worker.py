# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM engines one after the other in a process of its own: JSON job in, pickled results out.

    python engine_worker.py job.json results.pkl

A job is {"engines": [{"llm": {kwargs of LLM}, "steps": [...]}]}; see `run_engines`
in engine.py for the steps.
"""
from __future__ import annotations

import gc
import json
import os
import pickle
import sys

from engine_steps import STEPS


def _logprob_table(entries, tokens):  # noqa: ANN001
    """Per position: the chosen token's log-probability and the top ones as {token: logprob}."""
    chosen, tops = [], []
    for token, entry in zip(tokens, entries, strict=True):
        if entry is None:  # the first prompt position
            chosen.append(None)
            tops.append(None)
            continue
        chosen.append(entry[token].logprob)
        tops.append({key: value.logprob for key, value in entry.items()})
    return chosen, tops


def result_of(output):  # noqa: ANN001
    completion = output.outputs[0]
    result = {"tokens": list(completion.token_ids), "cached": output.num_cached_tokens, "text": completion.text}
    if completion.logprobs is not None:
        result["logprobs"], result["top"] = _logprob_table(completion.logprobs, completion.token_ids)
    if output.prompt_logprobs is not None:
        table = _logprob_table(output.prompt_logprobs, output.prompt_token_ids)
        result["prompt_logprobs"], result["prompt_top"] = table
    return result


def _facts(llm) -> dict:  # noqa: ANN001
    config = llm.llm_engine.vllm_config
    metrics = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    return {
        "capacity_tokens": config.cache_config.kv_cache_size_tokens,
        "num_blocks": config.cache_config.num_gpu_blocks,
        "block_size": config.cache_config.block_size,
        "max_model_len": config.model_config.max_model_len,
        "preemptions": metrics.get("vllm:num_preemptions"),
        "prefix_queries": metrics.get("vllm:prefix_cache_queries"),
        "prefix_hits": metrics.get("vllm:prefix_cache_hits"),
        "usage": metrics.get("vllm:kv_cache_usage_perc"),
        "draft_tokens": metrics.get("vllm:spec_decode_num_draft_tokens"),
        "accepted_tokens": metrics.get("vllm:spec_decode_num_accepted_tokens"),
    }


def _staggered(llm, step: dict) -> list[dict]:  # noqa: ANN001
    """Requests added while others run: entry i joins after `after` engine steps.

    `resets`: [[steps, running]], reset the prefix cache then; vLLM does so only if no page is in
    use, or if running requests are to be preempted (`running`).
    """
    from vllm import SamplingParams

    engine, done, count = llm.llm_engine, {}, 0
    waiting = list(enumerate(zip(step["prompts"], step["after"], strict=True)))
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][1][1] <= count:
            index, (prompt, _) = waiting.pop(0)
            engine.add_request(str(index), {"prompt_token_ids": prompt}, SamplingParams(**step["sampling"]))
        for _, running in [reset for reset in step.get("resets", ()) if reset[0] == count]:
            assert engine.has_unfinished_requests()
            assert engine.reset_prefix_cache(reset_running_requests=running) is running
        for output in engine.step():
            if output.finished:
                done[int(output.request_id.split("-")[0])] = output
        count += 1
    return [result_of(done[index]) for index in range(len(step["prompts"]))]


def _cache_views(llm) -> list[tuple]:  # noqa: ANN001
    """(layer name, shape, bytes of a block) of every bound cache, in-process engines only."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    return [
        (name, tuple(layer.kv_cache.shape), layer.kv_cache[0].numel() * layer.kv_cache.element_size())
        for name, layer in layers.items()
        if hasattr(layer, "kv_cache")
    ]


def _cache_strides(llm) -> dict[str, tuple[int, int]]:  # noqa: ANN001
    """(bytes from block to block, offset in the pool) of every bound cache, in-process engines only."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    caches = {name: layer.kv_cache for name, layer in layers.items() if hasattr(layer, "kv_cache")}
    return {
        name: (cache.stride(0) * cache.element_size(), cache.storage_offset() * cache.element_size())
        for name, cache in caches.items()
    }


def _guard_drafter(llm) -> None:  # noqa: ANN001
    """From now on: poisoned bodies and windows, and a byte that a drafter writes elsewhere is an error.

    Bodies and windows are filled with NaNs; whoever reads what was not written shows. (vLLM's own
    caches are not: its kernels multiply what they mask by 0.) Around each call of the drafter the
    bytes of the target's caches are compared, and the drafter's own between calls.
    """
    import torch

    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    caches = {name: layer.kv_cache for name, layer in layers.items() if hasattr(layer, "kv_cache")}
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    draft_names = runner.drafter._draft_attn_layer_names
    ours = [cache for name, cache in caches.items() if name not in draft_names]
    drafts = [cache for name, cache in caches.items() if name in draft_names]
    assert ours and drafts
    for name, cache in caches.items():
        if cache.dtype == torch.uint8 or name.endswith("int4_asym_window"):
            cache.copy_(torch.full_like(cache, 255 if cache.dtype == torch.uint8 else float("nan")))
    propose = runner.drafter.propose
    counts = {"calls": 0, "calls_that_wrote": 0}
    before = [[cache.clone(memory_format=torch.contiguous_format) for cache in drafts]]

    def same(now: list, then: list) -> bool:
        return all(torch.equal(a.contiguous().view(torch.uint8), b.view(torch.uint8))
                   for a, b in zip(now, then, strict=True))  # fmt: skip

    def guarded(*args, **kwargs):  # noqa: ANN002, ANN003, ANN202
        assert same(drafts, before[0]), "somebody else wrote into the drafter's pages"
        saved = [cache.clone(memory_format=torch.contiguous_format) for cache in ours]
        result = propose(*args, **kwargs)
        assert same(ours, saved), "the drafter wrote into the target's pages"
        counts["calls"] += 1
        counts["calls_that_wrote"] += not same(drafts, before[0])
        before[0] = [cache.clone(memory_format=torch.contiguous_format) for cache in drafts]
        return result

    runner.drafter.propose = guarded
    llm.guard_counts = counts


def _run_step(llm, step: dict):  # noqa: ANN001, ANN202
    from vllm import SamplingParams

    match step["do"]:
        case "generate":
            sampling = SamplingParams(**step["sampling"])
            salts = step.get("salts") or [None] * len(step["prompts"])
            prompts = [
                {"prompt_token_ids": ids, **({"cache_salt": salt} if salt else {})}
                for ids, salt in zip(step["prompts"], salts, strict=True)
            ]
            batches = [[p] for p in prompts] if step.get("one_by_one") else [prompts]
            return [result_of(o) for batch in batches for o in llm.generate(batch, sampling, use_tqdm=False)]
        case "staggered":
            return _staggered(llm, step)
        case "facts":
            return _facts(llm)
        case "cache_views":
            return _cache_views(llm)
        case "cache_strides":
            return _cache_strides(llm)
        case "guard_drafter":
            return _guard_drafter(llm)
        case "guard_counts":
            return llm.guard_counts
        case "reset_prefix_cache":
            return llm.reset_prefix_cache()
        case other if other in STEPS:
            return STEPS[other](llm, step)
        case other:
            raise ValueError(f"unknown step {other}")


def main(job_path: str, result_path: str) -> None:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    if os.environ.get("BIE_TEST_SLICES") == "1":  # on a card: all prefill through slices, however small the step
        from bie_vllm_plugin import cuda_path

        cuda_path.LAUNCH_WORK = cuda_path.FLASH_TOKENS = 0

    with open(job_path) as file:
        job = json.load(file)
    results = []
    for engine in job["engines"]:
        try:
            llm = LLM(**engine["llm"])
        except Exception as error:  # noqa: BLE001 - the test asserts on the message
            results.append({"error": f"{type(error).__name__}: {error}"})
        else:
            results.append([_run_step(llm, step) for step in engine["steps"]])
            llm.llm_engine.engine_core.shutdown()
            del llm
        gc.collect()
        cleanup_dist_env_and_memory()
    with open(result_path, "wb") as file:
        pickle.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
