# SPDX-License-Identifier: Apache-2.0
"""Steps of `engine_worker.py` that reach into the scheduler: aborts, beams, adapters, images; in-process only."""
from __future__ import annotations


def pool(llm) -> dict:  # noqa: ANN001
    """Pages of the block pool: all that exist, the free ones, and requests that the managers still know."""
    manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    books = ("req_to_blocks", "num_cached_block", "_first_held", "_wanted_tail")
    known = {
        key for m in manager.coordinator.single_type_managers for book in books for key in getattr(m, book, ())
    }
    return {
        "pages": manager.block_pool.num_gpu_blocks,
        "free": manager.block_pool.get_num_free_blocks(),
        "known": len(known),
        "referenced": sum(block.ref_cnt > 0 and not block.is_null for block in manager.block_pool.blocks),
    }


def all_completions(llm, step: dict) -> list[list[dict]]:  # noqa: ANN001
    """n > 1, priorities: every completion's tokens and log-probabilities, per prompt."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": ids} for ids in step["prompts"]]
    arguments = {"priority": step["priority"]} if "priority" in step else {}
    outputs = llm.generate(prompts, SamplingParams(**step["sampling"]), use_tqdm=False, **arguments)
    return [
        [
            {"tokens": list(c.token_ids), "text": c.text,
             "logprobs": [entry[t].logprob for t, entry in zip(c.token_ids, c.logprobs, strict=True)]}
            for c in output.outputs
        ]
        for output in outputs
    ]  # fmt: skip


def structured(llm, step: dict) -> list[str]:  # noqa: ANN001
    """Texts under a constraint (a field of StructuredOutputsParams)."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    constraint = StructuredOutputsParams(**step["constraint"])
    sampling = SamplingParams(temperature=0.0, max_tokens=step["max_tokens"], structured_outputs=constraint)
    prompts = [{"prompt_token_ids": ids} for ids in step["prompts"]]
    return [output.outputs[0].text for output in llm.generate(prompts, sampling, use_tqdm=False)]


def beams(llm, step: dict) -> list[list[dict]]:  # noqa: ANN001
    """Beam search: tokens and cumulative log-probability of every beam, per prompt."""
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=step["width"], max_tokens=step["max_tokens"], ignore_eos=True)
    outputs = llm.beam_search([{"prompt_token_ids": ids} for ids in step["prompts"]], params)
    return [
        [{"tokens": list(s.tokens[len(ids) :]), "logprob": s.cum_logprob} for s in output.sequences]
        for ids, output in zip(step["prompts"], outputs, strict=True)
    ]


def with_adapters(llm, step: dict) -> list[dict]:  # noqa: ANN001
    """One prompt after the other, each with its LoRA adapter (None: the base model)."""
    from engine_worker import result_of
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    results = []
    for ids, adapter in zip(step["prompts"], step["adapters"], strict=True):
        request = LoRARequest(adapter["name"], adapter["id"], adapter["path"]) if adapter else None
        (output,) = llm.generate(
            [{"prompt_token_ids": ids}], SamplingParams(**step["sampling"]), use_tqdm=False, lora_request=request
        )
        results.append(result_of(output))
    return results


def with_images(llm, step: dict) -> list[dict]:  # noqa: ANN001
    """Prompts with an image each, given as [height, width, 3] nested lists."""
    import numpy as np
    from engine_worker import result_of
    from PIL import Image
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": ids,
         "multi_modal_data": {"image": Image.fromarray(np.asarray(pixels, dtype=np.uint8))}}
        for ids, pixels in zip(step["prompts"], step["images"], strict=True)
    ]  # fmt: skip
    return [result_of(o) for o in llm.generate(prompts, SamplingParams(**step["sampling"]), use_tqdm=False)]


def embed(llm, step: dict) -> list[list[float]]:  # noqa: ANN001
    """Embeddings of token prompts."""
    prompts = [{"prompt_token_ids": ids} for ids in step["prompts"]]
    return [list(output.outputs.embedding) for output in llm.embed(prompts, use_tqdm=False)]


def abort(llm, step: dict) -> dict:  # noqa: ANN001
    """Run requests, abort the first one seen in `phase`, finish the others.

    Returns:
        victim (None if no request was ever in that phase), its computed tokens, the pool
        afterwards, and everybody else's results.
    """
    from engine_worker import result_of
    from vllm import SamplingParams

    engine, done, victim, computed = llm.llm_engine, {}, None, 0
    for index, prompt in enumerate(step["prompts"]):
        engine.add_request(str(index), {"prompt_token_ids": prompt}, SamplingParams(**step["sampling"]))
    scheduler = engine.engine_core.engine_core.scheduler
    while engine.has_unfinished_requests():
        seen = [request for request in scheduler.requests.values() if phase_of(request) == step["phase"]]
        if victim is None and seen:
            victim, computed = int(seen[0].request_id.split("-")[0]), seen[0].num_computed_tokens
            engine.abort_request([str(victim)])
        for output in engine.step():
            if output.finished:
                done[int(output.request_id.split("-")[0])] = output
    others = {i: result_of(o) for i, o in done.items() if i != victim}
    return {"victim": victim, "computed": computed, "pool": pool(llm), "others": others}


def phase_of(request) -> str:  # noqa: ANN001
    """waiting, chunk (its prompt is partly computed), decode or preempted."""
    if request.status.name in ("WAITING", "PREEMPTED"):
        return request.status.name.lower()
    return "chunk" if request.num_computed_tokens < request.num_prompt_tokens else "decode"


def refused_prompt(llm, step: dict) -> str:  # noqa: ANN001
    """The error that a prompt raises, as the caller sees it; "accepted" if none does."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    try:
        llm.generate([{"prompt_token_ids": step["prompt"]}], SamplingParams(max_tokens=4), use_tqdm=False)
    except (ValueError, VLLMValidationError) as error:
        return str(error)
    return "accepted"


def sleep(llm, step: dict) -> bool:  # noqa: ANN001
    """Put the engine to sleep (GPUs only); whether it says so."""
    llm.sleep(level=step["level"])
    return bool(llm.llm_engine.is_sleeping())


def weights(llm) -> dict:  # noqa: ANN001
    """A digest of the model's weights as loaded, and what serves its linear layers."""
    import hashlib

    import torch

    model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
    digest = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    methods = {name: getattr(module, "quant_method", None) for name, module in model.named_modules()}
    kinds = sorted({type(method).__name__ for name, method in methods.items() if name.endswith("_proj")})
    return {"digest": digest.hexdigest(), "methods": kinds}


STEPS = {
    "pool": lambda llm, step: pool(llm),
    "completions": all_completions, "structured": structured, "beams": beams, "adapters": with_adapters,
    "images": with_images, "embed": embed, "abort": abort, "refused_prompt": refused_prompt,
    "weights": lambda llm, step: weights(llm), "sleep": sleep, "wake_up": lambda llm, step: llm.wake_up(),
}  # fmt: skip
