# SPDX-License-Identifier: Apache-2.0
"""Tensor, pipeline and data parallelism through vLLM's own executors, workers in processes of their own."""
from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from engine import assert_same, generate, greedy, llm, run_engines, started, tokens
from tiny_models import tiny_model

pytestmark = pytest.mark.engine

# vLLM 0.32's CPU runner prepares a later rank's input buffers in its compiled warm-up only: with `enforce_eager`
# pipelines die under `auto`, too. The cheapest compilation does.
PIPELINE = {"pipeline_parallel_size": 2, "enforce_eager": False,
            "compilation_config": {"mode": 2, "backend": "eager"}}  # fmt: skip
PROMPTS = [tokens(n, seed=n) for n in (100, 400)]
STEPS = [generate(PROMPTS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return tiny_model(tmp_path_factory.mktemp("parallel"), "gqa")


@pytest.fixture(scope="module")
def single(model):
    return started(run_engines([{"llm": llm(model), "steps": STEPS}]))[0][0]


def in_processes(model: str, workers: int, **kwargs) -> list:
    """An engine whose core and workers are processes of their own."""
    arguments = llm(model, distributed_executor_backend="mp", **kwargs)
    cores = "|".join(str(i % os.cpu_count()) for i in range(workers))
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": cores}
    return started(run_engines([{"llm": arguments, "steps": STEPS}], **env))[0]


@pytest.mark.slow
def test_pipeline_parallel(model, single):
    """3 layers on 2 ranks."""
    (results,) = in_processes(model, 2, **PIPELINE)
    assert_same(single, results, shared=0.8)


@pytest.mark.slow
def test_tensor_parallel_beyond_the_kv_heads(model, single):
    """TP 4 with 2 KV heads: each head on two ranks."""
    (results,) = in_processes(model, 4, tensor_parallel_size=4)
    assert_same(single, results, shared=0.8)


@pytest.mark.slow
def test_pipeline_ranks_with_different_backends(model):
    """Layer 0 is skipped, so rank 0 has a backend more than rank 1, with fewer layouts: they agree on one."""
    skipped = {"kv_cache_dtype_skip_layers": ["0"]}
    ((expected,),) = started(run_engines([{"llm": llm(model, **skipped), "steps": STEPS}]))
    (results,) = in_processes(model, 2, **PIPELINE, **skipped)
    assert_same(expected, results, shared=0.8)


DATA_PARALLEL = """
import asyncio, json, sys

async def main(job):
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**job["llm"], data_parallel_size=2))

    async def answer(rank, prompt):
        sampling = SamplingParams(**job["sampling"], output_kind=RequestOutputKind.FINAL_ONLY)
        async for output in engine.generate({"prompt_token_ids": prompt}, sampling, str(rank), data_parallel_rank=rank):
            done = output.outputs[0]
        logprobs = [entry[token].logprob for token, entry in zip(done.token_ids, done.logprobs)]
        return {"tokens": list(done.token_ids), "logprobs": logprobs}

    results = await asyncio.gather(*(answer(rank, prompt) for rank, prompt in enumerate(job["prompts"])))
    print("RESULTS" + json.dumps(results), flush=True)
    engine.shutdown()

if __name__ == "__main__":
    asyncio.run(main(json.load(open(sys.argv[1]))))
"""


@pytest.mark.slow
def test_data_parallel(model, single, tmp_path):
    """Two engine cores behind one front end, a request each."""
    script, job = tmp_path / "data_parallel.py", tmp_path / "job.json"
    script.write_text(DATA_PARALLEL)
    arguments = {k: v for k, v in llm(model).items() if k != "disable_log_stats"}
    job.write_text(json.dumps({"llm": arguments, "prompts": PROMPTS, "sampling": greedy(32)}))
    env = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, str(script), str(job)], env=env, capture_output=True, text=True, timeout=300)
    assert "RESULTS" in done.stdout, done.stdout[-2000:] + done.stderr[-3000:]
    results = json.loads(done.stdout.split("RESULTS")[1].splitlines()[0])
    assert_same(single, results, shared=0.8)
