# SPDX-License-Identifier: Apache-2.0
"""Does the 8 GB profile stay under 8 GB? Measured on any NVIDIA GPU, as the driver counts.

    python eval/fit_8gb.py --out fit_8gb.json       # on a host with a GPU and vLLM
    python eval/fit_8gb.py --plan-only              # anywhere: what the planner expects

A 4-bit (AWQ, run by Marlin) model of Mistral-7B-v0.3's shape with random weights,
`configs/8gb.yaml` as it is, and a KV pool sized by the planner for a budget of
8,192 MiB. 65,536 tokens are prefilled in chunks of 512 and decoded on. Passes if

* the process's peak, sampled from the driver (NVML) from its first allocation on,
  is at most the budget, and
* memory grows by less than 64 MiB between the end of the start-up and the end of decoding.

On a GPU host without network access build the vLLM bundle with its PTX kernels
(`--keep-ptx`), which Marlin needs. Exit status: 0 passed, 1 failed, 2 no GPU.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import yaml

from bie_vllm_plugin.config import Int4AsymConfig
from bie_vllm_plugin.plan_fit import Plan, Request, make_plan
from bie_vllm_plugin.plan_model import load_model
from bie_vllm_plugin.plan_pool import EngineOptions
from bie_vllm_plugin.plan_time import CARDS
from bie_vllm_plugin.plan_units import MIB, PlanError, binary

PROFILE = Path(__file__).resolve().parent.parent / "configs" / "8gb.yaml"
BUDGET = 8192 * MIB
GROWTH = 64 * MIB
RESERVE = 960 * MIB
"""CUDA context, libraries and vLLM's buffers: 810 and 150 MiB on an H200, whose 132 multiprocessors want more of it
than a small card's 24 to 36; the planner's own estimate of 512 MiB is for those."""
CONTEXT = 65536
DECODED = 64

SHAPE = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
    # The published model stops at 32,768; memory does not care, and vLLM would refuse 65,536.
    "max_position_embeddings": CONTEXT,
    "sliding_window": None,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float16",
    "quantization_config": {
        "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"
    },
}  # fmt: skip
"""Mistral-7B-v0.3, AWQ."""


def model_folder(folder: Path) -> str:
    """Write the config into `folder`; weights are random (`load_format=dummy`)."""
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return str(folder)


def planned(model: str, profile: dict[str, Any], budget: int, reserve: int | None) -> Plan:
    """The plan of the profile for a card of `budget` bytes."""
    card = CARDS["rtx-4060"]
    request = Request(
        vram=budget,
        bandwidth=card.bandwidth,
        pcie=card.pcie,
        utilization=profile["gpu-memory-utilization"],
        context=CONTEXT,
        max_seqs=profile["max-num-seqs"],
        reserve=reserve,
        engine=EngineOptions(
            chunk=profile["max-num-batched-tokens"],
            settings=Int4AsymConfig.parse(profile["additional-config"]["int4_asym"]),
        ),
    )
    return make_plan(load_model(model), request)


class DriverMemory:
    """Samples what the driver counts for this process, from construction on.

    The per-process figure where the driver shows one for us, else the device's use
    beyond what it was before we touched it.
    """

    def __init__(self, index: int) -> None:
        from vllm.third_party import pynvml

        self.nvml = pynvml
        pynvml.nvmlInit()
        self.handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self.baseline = self._device()
        self.samples: list[tuple[float, int]] = []
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _device(self) -> int:
        # Version 2 leaves out what the driver reserves for itself on every card.
        version = getattr(self.nvml, "nvmlMemory_v2", None)
        info = self.nvml.nvmlDeviceGetMemoryInfo(self.handle, version=version) if version else None
        return int((info or self.nvml.nvmlDeviceGetMemoryInfo(self.handle)).used)

    def now(self) -> int:
        """Bytes of this process."""
        for process in self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return int(process.usedGpuMemory)
        return self._device() - self.baseline

    def _run(self) -> None:
        while not self.done.wait(0.01):
            self.samples.append((time.monotonic(), self.now()))

    def peak(self, since: float = 0.0) -> int:
        """Highest sample from `since` (monotonic seconds) on."""
        return max((size for moment, size in self.samples if moment >= since), default=self.now())

    def stop(self) -> None:
        """End sampling."""
        self.done.set()
        self.thread.join()


def measure(model: str, profile: dict[str, Any], pool: int, device: int) -> dict[str, Any]:
    """Boot the engine, prefill, decode; all sizes in bytes, times in seconds."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process, so that the driver's figure is all of it
    memory = DriverMemory(device)
    import torch
    from vllm import LLM, SamplingParams

    options = {key.replace("-", "_"): value for key, value in profile.items() if key != "gpu-memory-utilization"}
    started = time.monotonic()
    llm = LLM(
        model=model, load_format="dummy", skip_tokenizer_init=True, kv_cache_memory_bytes=pool,
        disable_log_stats=True, **options,
    )  # fmt: skip
    ready = time.monotonic()
    at_start, reserved_at_start = memory.now(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, SHAPE["vocab_size"], (CONTEXT - DECODED - 1,), generator=generator).tolist()

    def generate(tokens: int) -> float:
        begin = time.monotonic()
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        (output,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == tokens
        return time.monotonic() - begin

    prefill = generate(1)
    decode = generate(DECODED)  # the prompt comes from the prefix cache
    end = memory.now()
    memory.stop()
    cache = llm.llm_engine.vllm_config.cache_config
    return {
        "device": torch.cuda.get_device_name(),
        "start_seconds": round(ready - started, 1),
        "peak_bytes": memory.peak(),
        "peak_while_serving_bytes": memory.peak(ready),
        "at_start_bytes": at_start,
        "at_end_bytes": end,
        "growth_bytes": max(memory.peak(ready), end) - at_start,
        "torch_reserved_at_start_bytes": reserved_at_start,
        "torch_reserved_growth_bytes": torch.cuda.max_memory_reserved() - reserved_at_start,
        "weights_and_buffers_bytes": torch.cuda.memory_allocated() - pool,
        "num_gpu_blocks": cache.num_gpu_blocks,
        "kv_cache_size_tokens": cache.kv_cache_size_tokens,
        "prefill_seconds": round(prefill, 2),
        "decode_tokens_per_second": round(DECODED / decode, 1),
    }


def main() -> int:
    """Returns 0 passed, 1 failed, 2 no GPU or bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan-only", action="store_true", help="print the planner's figures, touch no GPU")
    parser.add_argument("--device", type=int, default=0, help="GPU to use (0)")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    profile = yaml.safe_load(PROFILE.read_text())
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(Path(folder))
        try:
            plan = planned(model, profile, BUDGET, None if args.plan_only else RESERVE)
        except PlanError as error:
            print(f"fit_8gb: {error}", file=sys.stderr)
            return 2
        result: dict[str, Any] = {
            "budget_bytes": BUDGET,
            "growth_limit_bytes": GROWTH,
            "context": CONTEXT,
            "plan": {
                "weights_bytes": plan.weights.total,
                "cuda_context_bytes": plan.context_bytes,
                "activation_bytes": plan.activation,
                "pool_bytes": plan.chosen.pool_available,
                "num_blocks": plan.chosen.blocks,
                "kv_cache_tokens": plan.chosen.reported_tokens,
                "sentence": plan.sentence,
            },
        }
        print(plan.sentence)
        if args.plan_only:
            print(json.dumps(result, indent=2))
            return 0 if plan.chosen.fits else 1
        os.environ["CUDA_VISIBLE_DEVICES"] = str(args.device)  # before torch looks; vLLM takes the first it sees
        import torch

        if not torch.cuda.is_available():
            print("fit_8gb: no NVIDIA GPU here; run it on a GPU host, or with --plan-only.", file=sys.stderr)
            return 2
        result["measured"] = measured = measure(model, profile, plan.chosen.pool_available, args.device)
    under, still = measured["peak_bytes"] <= BUDGET, measured["growth_bytes"] < GROWTH
    same = measured["num_gpu_blocks"] == plan.chosen.blocks
    result["passed"] = under and still and same
    print(json.dumps(result, indent=2))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(
        f"peak {binary(measured['peak_bytes'])} of {binary(BUDGET)}: {'under' if under else 'OVER'}; "
        f"growth after start {binary(measured['growth_bytes'])}: {'under' if still else 'OVER'} {binary(GROWTH)}; "
        f"{measured['num_gpu_blocks']} blocks, planned {plan.chosen.blocks}"
    )
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
