# SPDX-License-Identifier: Apache-2.0
"""Engines for tests: tiny random models, subprocess engines, and how log-probabilities are compared."""
from __future__ import annotations

import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

WORKER = Path(__file__).with_name("engine_worker.py")


def tiny_llama(folder: Path, *, head_dim: int = 64, kv_heads: int = 2, heads: int = 8, layers: int = 4, seed: int = 0,
               **config) -> str:  # fmt: skip
    """A random Llama whose attention matters: sharp, long-range, with biased keys. Returns its folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "config.json").exists():
        return str(folder)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
            max_position_embeddings=8192, attention_bias=True, tie_word_embeddings=False,
            bos_token_id=0, eos_token_id=1, **config,
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj.weight" in name or "k_proj.weight" in name:
                parameter.mul_(4.0)  # attention neither uniform nor one-hot; an off-by-one window shows at 7e-3
            elif "k_proj.bias" in name:
                parameter.normal_(0, 1.0)  # per-channel offsets, as Qwen's keys have
            elif "lm_head" in name:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    return str(folder)


def run_engines(engines: list[dict], *, timeout: int = 900, **env: str) -> list:
    """Run engines in a fresh process, one after the other, and return their steps' results.

    Args:
        engines: [{"llm": {...}, "steps": [{"do": "generate", "prompts": [[ids]], "sampling": {...}}, ...]}]
        env: additional environment variables.

    Returns:
        Per engine the list of its steps' results, or {"error": message} if it did not start.
    """
    with tempfile.TemporaryDirectory() as scratch:
        job, result = Path(scratch) / "job.json", Path(scratch) / "result.pkl"
        job.write_text(json.dumps({"engines": engines}))
        full_env = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
            # One unpinned thread: engines of parallel tests would wait for each other at every barrier.
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **env,
        }
        done = subprocess.run(
            [sys.executable, str(WORKER), str(job), str(result)],
            env=full_env, timeout=timeout, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, f"engine process failed:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        with result.open("rb") as file:
            return pickle.load(file)


def started(runs: list) -> list:
    """`runs` as they are, if every engine started."""
    assert not (errors := [run["error"] for run in runs if isinstance(run, dict)]), errors
    return runs


def llm(model: str, **kwargs) -> dict:
    """Arguments of a small fp32 engine; everything can be overridden."""
    settings = kwargs.pop("settings", None)
    arguments = {
        "model": model, "kv_cache_dtype": "int4_asym", "dtype": "float32", "max_model_len": 2048,
        "enforce_eager": True, "skip_tokenizer_init": True, "disable_log_stats": False, "max_logprobs": 64,
        "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 64 << 20, "enable_prefix_caching": False, **kwargs,
    }  # fmt: skip
    if settings:
        arguments["additional_config"] = {"int4_asym": settings}
    return arguments


def greedy(n: int = 32, top: int = 5, **kwargs) -> dict:
    """Sampling for comparisons: greedy, exactly n tokens, with log-probabilities."""
    return {"temperature": 0.0, "max_tokens": n, "ignore_eos": True, "logprobs": top,
            "detokenize": False, **kwargs}  # fmt: skip


def generate(prompts: list[list[int]], **kwargs) -> dict:
    """A generate step; `salts` (one per prompt, None for none) separate prompts in the prefix cache."""
    options = {key: kwargs.pop(key, None) for key in ("one_by_one", "salts")}
    return {"do": "generate", "prompts": prompts, "sampling": greedy(**kwargs), **options}


def tokens(n: int, seed: int = 0, vocab: int = 512) -> list[int]:
    """n random prompt tokens, special ones left out."""
    return np.random.default_rng(seed).integers(3, vocab, n).tolist()


def logprob_differences(a: list[dict], b: list[dict]) -> np.ndarray:
    """|log-probability difference| of the chosen tokens up to the first position where the texts differ.

    Greedy runs may part where two tokens are within rounding noise of each other;
    what both see up to there is the same text and must have the same numbers.
    """
    differences = []
    for one, two in zip(a, b, strict=True):
        pairs = zip(one["tokens"], two["tokens"], one["logprobs"], two["logprobs"], strict=True)
        for token_1, token_2, p1, p2 in pairs:
            if token_1 != token_2:
                # Parting is only legitimate at a tie.
                differences.append(abs(p1 - p2))
                break
            differences.append(abs(p1 - p2))
    return np.array(differences)


def compare_answer(known: dict, answer: dict, worst: float, tie: float) -> dict:
    """An answer beside the known one: they may part only where the known engine itself sees a tie.

    Args:
        known, answer: tokens, logprobs (of the tokens) and, for `known`, top ({token: log-probability} per position).
        worst: nats by which a token's log-probability may differ.
        tie: nats between the two tokens at a parting, in the known engine's eyes, that are a tie.

    Returns:
        right; shared (tokens before they part); worst (nats, over those); gap (nats between the known
        choice and the other one at the parting, inf if that is not among the best; None without a parting).
    """
    pairs = zip(known["tokens"], answer["tokens"], strict=False)
    shared = next((i for i, (one, two) in enumerate(pairs) if one != two), None)
    complete = len(known["tokens"]) == len(answer["tokens"])
    gap = None
    if shared is None:
        shared = min(len(known["tokens"]), len(answer["tokens"]))
    else:
        table = known["top"][shared]
        gap = table[known["tokens"][shared]] - table.get(answer["tokens"][shared], -math.inf)
    pairs = zip(known["logprobs"][:shared], answer["logprobs"][:shared], strict=True)
    largest = max((abs(one - two) for one, two in pairs), default=0.0)
    right = complete and largest < worst and (gap is None or abs(gap) <= tie)
    return {"right": right, "shared": shared, "worst": largest, "gap": gap}


def assert_same(
    a: list[dict], b: list[dict], *, median: float = 1e-3, worst: float = 0.05, shared: float = 0.9
) -> None:
    """Both runs gave the same log-probabilities up to rounding noise, over most of their tokens."""
    differences = logprob_differences(a, b)
    total = sum(len(one["tokens"]) for one in a)
    assert len(differences) >= shared * total, f"runs part early: {len(differences)} of {total} tokens in common"
    assert np.median(differences) < median, f"median difference {np.median(differences):.2e}"
    assert differences.max() < worst, f"largest difference {differences.max():.2e}"
