# SPDX-License-Identifier: Apache-2.0
"""Models and features that need a GPU host; prints one JSON line per check and exits non-zero on failure.

    python tests/gpu_breadth.py [check ...]

Needs vLLM and an NVIDIA GPU; checks for two GPUs say `skipped` on one. Models are random
and made on the spot (bf16). "= auto" compares an engine whose window is longer than the
text, so that everything is read in 16 bits, with `auto`: the rest of the machinery, pages
included, must not be seen in the numbers. Random models are flat, and bf16 soon parts their
greedy texts, so that one engine scores what the other has decoded; `auto` on another attention
backend is scored, too, as a control: its rounding is what the bounds may grow with.
"""
from __future__ import annotations

import concurrent.futures
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from engine import generate, greedy, llm, logprob_differences, run_engines, tokens
from tiny_models import CATALOGUE, add_tokenizer, tiny_model
from tiny_packed import tiny_packed
from tiny_vision import IMAGE_SIZE, tiny_adapter, tiny_idefics

FOLDER = Path(tempfile.gettempdir()) / "bie-gpu-breadth"
FACTS = {"do": "facts"}
PROMPTS = [tokens(n, seed=n) for n in (50, 333, 700)]
WIDE = {"settings": {"recent_tokens": 1024}}
AUTO = {"kv_cache_dtype": "auto"}
WORKERS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
MODELS = ["gemma2", "gemma3", "mistral windowed", "cohere2", "qwen3", "qwen2", "glm4", "mixtral", "head 256", "head 80"]


def gpu(model: str, **kwargs) -> dict:
    """A small bf16 engine on the card; windows and pages as in production."""
    arguments = {"dtype": "bfloat16", "kv_cache_memory_bytes": 512 << 20, "gpu_memory_utilization": 0.05,
                 "max_num_seqs": 16, "max_model_len": 2048, **kwargs}  # fmt: skip
    return llm(model, **arguments)


def one(arguments: dict, steps: list, **env: str) -> list:
    """One engine in a process of its own; raises RuntimeError if it does not start."""
    (run,) = run_engines([{"llm": arguments, "steps": steps}], timeout=550, VLLM_LOGGING_LEVEL="INFO", **env)
    if isinstance(run, dict):
        raise RuntimeError(run["error"])
    return run


def compare(a: list[dict], b: list[dict], *, median: float = 0.02, worst: float = 0.6, shared: float = 0.3) -> dict:
    """bf16 rounding differs between kernels; a wrong page or mask would show far above it.

    Texts may part at a tie; `shared` is the least share of the tokens before they do.
    """
    difference = logprob_differences(a, b)
    total = sum(len(r["tokens"]) for r in a)
    finite = bool(np.isfinite(difference).all())
    ok = finite and len(difference) > shared * total and np.median(difference) < median and difference.max() < worst
    return {"ok": bool(ok), "median": float(np.median(difference)), "max": float(difference.max()),
            "common": f"{len(difference)}/{total}"}  # fmt: skip


def score(step: dict, run: list[dict]) -> dict:
    """A step that returns the log-probabilities of the texts that `step` has decoded, prompts included."""
    texts = [prompt + r["tokens"] for prompt, r in zip(step["prompts"], run, strict=True)]
    return {**step, "prompts": texts, "sampling": {**greedy(1), "prompt_logprobs": 0}}


def scored(run: list[dict], scores: list[dict], control: dict | None = None) -> dict:
    """Log-probabilities of decoded tokens by the engine that decoded them and by one that scored them.

    Weights and activations of 8 bits multiply what kernels round differently, for `auto`'s own two backends as well:
    the bound grows with the control, as long as that says anything (below 0.1).
    """
    pairs = [(r["logprobs"], s["prompt_logprobs"][-len(r["tokens"]) :]) for r, s in zip(run, scores, strict=True)]
    difference = np.abs(np.concatenate([np.subtract(*pair) for pair in pairs]))
    bound = max(0.02, 1.5 * control["median"]) if control else 0.02
    bound = bound if bound < 0.15 else 0.0
    ok = np.isfinite(difference).all() and np.median(difference) < bound and difference.max() < 0.6
    return {"ok": bool(ok), "median": float(np.median(difference)), "max": float(difference.max())}


def against_auto(model: str, step: dict | None = None, **kwargs) -> dict:
    """What `int4_asym` decodes with all in 16 bits, scored by `auto`; `auto` on another backend is the control."""
    step = step or generate(PROMPTS)
    other = gpu(model, attention_backend="TRITON_ATTN", **kwargs, **AUTO)
    steps = [step, FACTS, {"do": "weights"}]
    runs = together({"wide": (gpu(model, **kwargs, **WIDE), steps), "auto": (other, steps)})
    wide, auto = runs["wide"], runs["auto"]
    ours, own = one(gpu(model, **kwargs, **AUTO), [score(step, wide[0]), score(step, auto[0])])
    control = scored(auto[0], own)
    result = {**scored(wide[0], ours, control), "auto": control, "auto tokens": auto[1]["capacity_tokens"]}
    same = wide[2] == auto[2]  # weights, and what multiplies them
    return {**result, "ok": result["ok"] and same, "same weights": same, "linear": wide[2]["methods"]}


def like_auto(name: str) -> dict:
    """All in 16 bits equals auto, INT4 in chunks of 64 equals INT4 at once, and auto's capacity is beaten."""
    model = tiny_model(FOLDER, name)
    first = against_auto(model)
    step = generate(PROMPTS)
    whole = one(gpu(model), [step, FACTS])
    chunks = one(gpu(model, max_num_batched_tokens=64), [score(step, whole[0])])
    second = scored(whole[0], chunks[0], first["auto"])
    tokens_held = [first["auto tokens"], whole[1]["capacity_tokens"]]
    return {"ok": first["ok"] and second["ok"] and tokens_held[1] >= tokens_held[0], "16 bits = auto": first,
            "chunks": second, "tokens auto, int4_asym": tokens_held}  # fmt: skip


def with_graphs(name: str, **kwargs) -> dict:
    """Layers in 16 bits beside INT4 ones, compiled and with graphs: all in 16 bits it equals auto.

    With INT4 it equals itself compiled without graphs, which rounds alike. (Eager layers round otherwise and flip codes
    of a random model, as many as make up INT4's own cost.)
    """
    model = tiny_model(FOLDER, name)
    step = generate(PROMPTS)
    kinds = {"graphs": {}, "none": {"compilation_config": {"cudagraph_mode": "NONE"}}}
    engines = {kind: (gpu(model, enforce_eager=False, **kwargs, **extra), [step]) for kind, extra in kinds.items()}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        captured = pool.submit(together, engines)
        first = against_auto(model, enforce_eager=False, **kwargs)
        runs = captured.result()
    second = compare(runs["graphs"][0], runs["none"][0], median=0.005, worst=0.3, shared=0.5)
    return {"ok": first["ok"] and second["ok"], "16 bits = auto": first, "graphs = none": second}


def sleep_and_wake() -> dict:
    """Level 1: weights to the host, the cache is dropped; the same answers afterwards and no hit in a dead cache."""
    model = tiny_model(FOLDER, "gqa")
    arguments = gpu(model, enable_sleep_mode=True, enable_prefix_caching=True, settings={"prefix_hits": "strict"})
    steps = [generate(PROMPTS), {"do": "sleep", "level": 1}, {"do": "wake_up"}, generate(PROMPTS), {"do": "pool"}]
    run = one(arguments, steps)
    result = compare(run[0], run[3])
    dropped = all(r["cached"] == 0 for r in run[3])
    pool = run[4]
    return {**result, "ok": result["ok"] and dropped and pool["referenced"] == 0, "slept": run[1], "pool": pool}


def lacking(*packages: str, gpus: int = 1) -> dict | None:
    """The result of a check that cannot run here; None where it can."""
    import torch

    if torch.cuda.device_count() < gpus:
        return {"ok": True, "skipped": f"{torch.cuda.device_count()} GPUs"}
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return {"ok": True, "skipped": f"{' and '.join(missing)} is not installed"} if missing else None


def bitsandbytes() -> dict:
    """A plugin serves it from vLLM 0.33 on."""
    return lacking("bitsandbytes", "vllm_bnb_plugin") or quantised("bitsandbytes")


def quantised(method: str) -> dict:
    """Weights that vLLM quantises while loading: the cache does not notice."""
    return against_auto(tiny_model(FOLDER, "gqa"), quantization=method)


def packed(method: str) -> dict:
    """AWQ and GPTQ checkpoints."""
    return against_auto(tiny_packed(FOLDER / method, tiny_model(FOLDER, "gqa"), method), dtype="float16")


def images() -> dict:
    """As `against_auto`, and another picture gives other numbers."""
    model, image_token = tiny_idefics(FOLDER / "idefics")
    rng = np.random.default_rng(0)
    prompt = tokens(100, seed=1, vocab=250) + [image_token] + tokens(200, seed=2, vocab=250)
    picture, another = (rng.integers(0, high, (IMAGE_SIZE, IMAGE_SIZE, 3)).tolist() for high in (256, 40))
    step = {"do": "images", "prompts": [prompt], "sampling": greedy(24), "images": [picture]}
    base = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}}
    result = against_auto(model, step, **base)
    seen = one(gpu(model, **base, **WIDE), [step])[0]
    other = scored(seen, one(gpu(model, **base, **WIDE), [{**score(step, seen), "images": [another]}])[0])
    seen_difference = other["median"] > 2 * result["median"]
    return {**result, "ok": result["ok"] and seen_difference, "another picture": other}


def adapters() -> dict:
    model = tiny_model(FOLDER, "gqa")
    outputs = {"q_proj": 512, "k_proj": 128, "v_proj": 128}
    paths = [{"name": n, "id": i, "path": tiny_adapter(FOLDER / n, seed=i, outputs=outputs)}
             for i, n in enumerate(("one", "two"), 1)]  # fmt: skip
    prompt = tokens(333, seed=1)
    step = {"do": "adapters", "prompts": [prompt] * 4, "adapters": [*paths, *paths], "sampling": greedy(24)}
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    run = one(gpu(model, enable_prefix_caching=True, settings={"prefix_hits": "strict"}, **lora), [step])[0]
    result = compare(run[:2], run[2:])
    return {**result, "ok": result["ok"] and [r["cached"] for r in run] == [0, 0, 320, 320]}


def together(engines: dict[str, tuple[dict, list]], **env: str) -> dict[str, list]:
    """Engines side by side: name -> (arguments, steps) gives name -> what its steps return."""
    with concurrent.futures.ThreadPoolExecutor(len(engines)) as pool:
        futures = {name: pool.submit(one, *engine, **env) for name, engine in engines.items()}
    return {name: future.result() for name, future in futures.items()}


def across(**kwargs) -> dict:
    """Two GPUs against one: what two decode, the same format on one GPU and `auto` on one GPU score.

    With all in 16 bits the two must differ as little as `auto`'s two do. Sums in another order flip codes of INT4, so
    that there the yardstick is what INT4 itself costs: one GPU with INT4 against one with `auto` on the same texts.
    Two GPUs may be apart from one by no more than that, nor farther from `auto` than half again as much as one is.
    """
    if skipped := lacking(gpus=2):
        return skipped
    model = tiny_model(FOLDER, "gqa")
    alone = {key: value for key, value in kwargs.items() if not key.endswith("parallel_size")}
    kinds = {"int4_asym": {}, "16 bits": WIDE, "auto": AUTO}
    step = generate(PROMPTS)
    two = {n: (gpu(model, distributed_executor_backend="mp", **kwargs, **kind), [step]) for n, kind in kinds.items()}
    runs = {name: results[0] for name, results in together(two, **WORKERS).items()}
    texts = [score(step, runs[name]) for name in kinds]
    scores = together({name: (gpu(model, **alone, **kind), texts) for name, kind in kinds.items()}, **WORKERS)
    decoded = {name: np.concatenate([r["logprobs"] for r in run]) for name, run in runs.items()}
    of = {
        (name, text): np.concatenate(
            [s["prompt_logprobs"][-len(r["tokens"]) :] for r, s in zip(runs[text], scores[name][i], strict=True)]
        )
        for name in kinds
        for i, text in enumerate(kinds)
    }
    differences = {
        **{f"{name}: two, one": decoded[name] - of[name, name] for name in kinds},
        "two with INT4, one with auto": decoded["int4_asym"] - of["auto", "int4_asym"],
        "one with INT4, one with auto": of["int4_asym", "int4_asym"] - of["auto", "int4_asym"],
    }
    median = {name: float(np.median(np.abs(x))) for name, x in differences.items()}
    worst = {name: float(np.abs(x).max()) for name, x in differences.items()}
    cost = median["one with INT4, one with auto"]
    ok = all(np.isfinite(x).all() for x in differences.values())
    ok = ok and median["16 bits: two, one"] <= max(0.01, 2 * median["auto: two, one"])
    ok = ok and median["int4_asym: two, one"] <= max(0.01, cost)
    ok = ok and median["two with INT4, one with auto"] <= max(0.01, 1.5 * cost)
    return {"ok": bool(ok and max(worst.values()) < 0.6), "median": median, "max": worst}


def ray_executor() -> dict:
    """Tensor parallel 2 on Ray's workers and on vLLM's own."""
    if skipped := lacking("ray", gpus=2):
        return skipped
    model = tiny_model(FOLDER, "gqa")
    two = lambda executor: gpu(model, distributed_executor_backend=executor, tensor_parallel_size=2)
    runs = together({executor: (two(executor), [generate(PROMPTS)]) for executor in ("ray", "mp")}, **WORKERS)
    return compare(runs["ray"][0], runs["mp"][0], median=0.005)


def soak() -> dict:
    script = Path(__file__).with_name("soak.py")
    done = subprocess.run([sys.executable, str(script), "--requests", "2000", "--dtype", "bfloat16"],
                          capture_output=True, text=True, timeout=580)  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"ok": False, "error": done.stderr[-1500:]}


def checks() -> dict:
    return {
        **{f"model {name}": lambda name=name: like_auto(name) for name in MODELS},
        "a skipped layer, graphs": lambda: with_graphs("gqa", kv_cache_dtype_skip_layers=["0"]),
        "windowed layers, graphs": lambda: with_graphs("gemma3"),
        "sleep and wake up": sleep_and_wake,
        "weights fp8": lambda: quantised("fp8"),
        "weights bitsandbytes": bitsandbytes,
        "weights awq": lambda: packed("awq"),
        "weights gptq": lambda: packed("gptq"),
        "images = auto": images,
        "adapters": adapters,
        "tensor parallel 2 = 1": lambda: across(tensor_parallel_size=2),
        "pipeline parallel 2 = 1": lambda: across(pipeline_parallel_size=2),
        "a skipped layer, pipeline parallel 2": lambda: across(
            kv_cache_dtype_skip_layers=["0"], pipeline_parallel_size=2
        ),
        "tensor parallel 2 on Ray": ray_executor,
        "soak": soak,
    }


def guarded(name: str, check) -> dict:  # noqa: ANN001
    """A check whose engine died is a failed check, and the others still count."""
    try:
        return {"check": name, **check()}
    except (AssertionError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        return {"check": name, "ok": False, "error": str(error)[-1500:]}


def main(wanted: list[str]) -> int:
    everything = checks()
    assert set(MODELS) <= set(CATALOGUE)
    names = [n for n in everything if not wanted or any(w in n for w in wanted)]
    for name in MODELS:  # made once, before processes share them
        tiny_model(FOLDER, name)
    add_tokenizer(tiny_model(FOLDER, "gqa"))
    start, failed = time.time(), 0
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(guarded, n, everything[n]) for n in names]
        for future in concurrent.futures.as_completed(futures):
            result = future.result()
            print(json.dumps(result), flush=True)
            failed += not result["ok"]
    print(json.dumps({"passed": len(names) - failed, "failed": failed, "seconds": round(time.time() - start)}))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
