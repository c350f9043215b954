# SPDX-License-Identifier: Apache-2.0
"""Tensor, pipeline and data parallelism through vLLM's own executors, workers in processes of their own."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

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


def in_processes(model: str, workers: int, steps: list | None = None, env: dict | None = None, **kwargs) -> list:
    """An engine whose core and workers are processes of their own."""
    arguments = llm(model, distributed_executor_backend="mp", **kwargs)
    cores = "|".join(str(i % os.cpu_count()) for i in range(workers))
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": cores, **(env or {})}
    return started(run_engines([{"llm": arguments, "steps": steps or STEPS}], **env))[0]


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "partition", "skipped"), [("gqa", "2,1", ["0", "1"]), ("gqa", "2,1", ["2"]), ("gemma2", "1,3", [])]
)
def test_a_pipeline_rank_without_int4_layers(tmp_path, name, partition, skipped):
    """All layers of a rank are skipped, or windowed; the second prompt comes while the first one decodes.

    vLLM's V1 runner orders a batch as the backends of its own rank like it; the ranks have to agree.
    """
    model, settings = tiny_model(tmp_path, name), {"kv_cache_dtype_skip_layers": skipped}
    step = {"do": "staggered", "prompts": PROMPTS, "after": [0, 4], "sampling": greedy(32)}
    ((expected,),) = started(run_engines([{"llm": llm(model, **settings), "steps": [step]}]))
    env = {"VLLM_PP_LAYER_PARTITION": partition}
    (results,) = in_processes(model, 2, steps=[step], env=env, **PIPELINE, **settings)
    assert_same(expected, results, shared=0.8)


@pytest.mark.slow
def test_pipeline_of_windowed_layers_only(tmp_path):
    """No rank has an INT4 layer: as under `auto`; the second prompt comes while the first one decodes."""
    model = tiny_model(tmp_path, "mistral windowed")
    step = {"do": "staggered", "prompts": PROMPTS, "after": [0, 4], "sampling": greedy(32)}
    ((expected,),) = started(run_engines([{"llm": llm(model, kv_cache_dtype="auto"), "steps": [step]}]))
    (results,) = in_processes(model, 2, steps=[step], **PIPELINE)
    assert_same(expected, results, median=1e-5, worst=1e-3)


def test_ranks_order_a_batch_alike():
    """Whatever the backends of a rank ask for, with a pipeline the threshold is the same on all ranks."""
    code = textwrap.dedent("""
        from types import SimpleNamespace as Namespace
        import bie_vllm_plugin
        from bie_vllm_plugin import vllm_compat
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        vllm_compat._wrap_batch_order()
        vllm_compat._wrap_batch_order()
        def threshold(dtype, ranks, *asked):
            groups = [Namespace(get_metadata_builder=lambda t=t: Namespace(reorder_batch_threshold=t)) for t in asked]
            runner = Namespace(_attn_group_iterator=lambda: groups, vllm_config=Namespace(
                cache_config=Namespace(cache_dtype=dtype), parallel_config=Namespace(pipeline_parallel_size=ranks)))
            GPUModelRunner.calculate_reorder_batch_threshold(runner)
            return runner.reorder_batch_threshold
        assert threshold("int4_asym", 2, None) == threshold("int4_asym", 2, 4, None) == threshold("int4_asym", 2) == 1
        assert threshold("int4_asym", 1, 4, None) == threshold("auto", 2, 4) == 4
        assert threshold("auto", 2, None) is None
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


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
