# SPDX-License-Identifier: Apache-2.0
"""A plan as rich tables for people, as JSON for programs, as Markdown for a README."""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bie_vllm_plugin.plan_fit import FormatPlan, Plan, needed_bytes, pool_of, spilled_step
from bie_vllm_plugin.plan_formats import FORMATS, text_only
from bie_vllm_plugin.plan_units import GIB, MIB, binary, both

if TYPE_CHECKING:
    from rich.console import Console

    from bie_vllm_plugin.plan_drafter import Drafter

JSON_VERSION = 1
"""Raised when a key of the JSON changes its meaning or goes away; new keys may come without."""


def deficit(plan: Plan) -> int:
    """Bytes that are missing on one GPU; 0 when it fits or the format is refused."""
    if plan.chosen.refused or plan.chosen.fits:
        return 0
    request = plan.request
    if request.pool is not None:
        return pool_of(plan).pool_bytes(request.context, request.concurrency) - request.pool
    return needed_bytes(plan.model, FORMATS[request.kv_cache_dtype], request, plan.weights) - plan.budget


# -- JSON ---------------------------------------------------------------------------------
def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data. All sizes are bytes on one GPU, all contexts tokens.

    Per format, `bytes_per_token` is the body that grows with the context,
    `bytes_per_sequence` what one sequence takes at the context in whole blocks.
    A format that the model cannot use has `supported: false` and a `reason`.
    """
    request, engine = plan.request, plan.request.engine
    formats: dict[str, Any] = {}
    for name, fmt in plan.formats.items():
        if fmt.refused:
            formats[name] = {"supported": False, "reason": fmt.refused, "fits": False, "max_context": 0}
            continue
        assert fmt.step is not None
        formats[name] = {
            "supported": True,
            "vllm_kv_cache_dtype": fmt.vllm,
            "bytes_per_token": fmt.per_token,
            "nominal_bytes_per_token": fmt.nominal_per_token,
            "bytes_per_sequence": fmt.per_sequence,
            "allocated_bytes": fmt.total,
            "nominal_bytes": fmt.nominal_total,
            "block_bytes": fmt.block_bytes,
            "num_blocks": fmt.blocks,
            "pool_bytes": fmt.pool_available,
            "max_context": fmt.max_context,
            "max_concurrency": fmt.max_concurrency,
            "nominal_sessions": fmt.nominal_sessions,
            "vllm_kv_cache_tokens": fmt.reported_tokens,
            "vllm_max_concurrency": round(fmt.reported_concurrency, 2),
            "fits": fmt.fits,
            "max_tokens_per_second": round(fmt.step.tokens_per_second, 2),
        }
    missing = deficit(plan)
    return {
        "version": JSON_VERSION,
        "model": plan.model.name,
        "attention": plan.model.attention,
        "model_max_context": plan.model.max_context,
        "context": request.context,
        "concurrency": request.concurrency,
        "tensor_parallel": engine.tp,
        "chunk": engine.chunk,
        "vram_bytes": request.vram,
        "budget_bytes": plan.budget,
        "weights_bytes": plan.weights.total,
        "weights_kind": plan.weights.kind,
        "weights_source": plan.weights.source,
        "drafter_bytes": plan.weights.drafter,
        "cuda_context_bytes": plan.context_bytes,
        "activation_bytes": plan.activation,
        "kv_cache_dtype": request.kv_cache_dtype,
        "fits": plan.chosen.fits,
        "missing_bytes": missing,
        "sentence": plan.sentence,
        "changes": list(plan.changes),
        "notes": list(plan.notes),
        "bandwidth_bytes_per_second": request.bandwidth,
        "pcie_bytes_per_second": request.pcie,
        "spill": _spill_rows(plan),
        "formats": formats,
    }


def _spill_rows(plan: Plan) -> list[dict[str, Any]]:
    """Decoding with nothing, 256 MiB, 1 GiB and, when it does not fit, the missing bytes over PCIe."""
    if plan.chosen.refused:
        return []
    sizes = sorted({0, 256 * MIB, GIB, deficit(plan)})
    rows = []
    for size in sizes:
        step = spilled_step(plan, size)
        rows.append(
            {
                "bytes": size,
                "seconds_per_step": round(step.seconds, 6),
                "max_tokens_per_second": round(step.tokens_per_second, 2),
            }
        )
    return rows


# -- terminal -----------------------------------------------------------------------------
def print_plan(plan: Plan, console: Console) -> None:
    """Tables of memory, formats and time, then the verdict."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    request = plan.request
    console.print(Text(f"{plan.model.name}: {plan.model.attention}"))
    memory = Table(
        title="Memory of one GPU" if request.engine.tp > 1 else "Memory", title_justify="left", box=SIMPLE_HEAD
    )
    memory.add_column("part")
    memory.add_column("size", justify="right")
    memory.add_column("from")
    target = plan.weights.total - plan.weights.drafter
    memory.add_row(f"weights, {plan.weights.kind}", both(target), plan.weights.source)
    if drafter := request.engine.drafter:
        memory.add_row(f"drafter, {drafter.method}", both(plan.weights.drafter), _drafter_source(drafter))
    if request.pool is None:
        stated = "--reserve" if request.reserve is not None else "estimate; --reserve replaces it"
        memory.add_row("CUDA context, libraries", both(plan.context_bytes), stated)
        memory.add_row(
            "activations", both(plan.activation), f"estimate by shapes, chunks of {request.engine.chunk:,} tokens"
        )
    if not plan.chosen.refused:
        need = pool_of(plan).pool_bytes(request.context, request.concurrency)
        memory.add_row(
            f"KV pool, {plan.chosen.name}", both(need), f"{request.context:,} tokens x {request.concurrency}, in blocks"
        )
        memory.add_row("KV pool available", both(plan.chosen.pool_available), _available(plan))
    if request.pool is None:
        memory.add_row("limit", both(plan.budget), f"{binary(request.vram)} x {request.utilization:g}")
    console.print(memory)

    _print_formats(plan, console)
    if any(fmt.vllm is None for fmt in plan.formats.values()):
        console.print("* not in vLLM 0.32", style="dim")
    _print_time(plan, console)
    for note in plan.notes:
        console.print(f"Note: {note}", soft_wrap=True, highlight=False)
    console.print(plan.sentence, style="bold", soft_wrap=True, highlight=False)


def _drafter_source(drafter: Drafter) -> str:
    layers = f"{len(drafter.layers)} layers in the KV pool" if drafter.layers else "no model, no cache"
    if drafter.method == "mtp":
        layers += "; in the weights where those are from files"
    return f"{drafter.drafts} drafts a step; {layers}"


def _print_formats(plan: Plan, console: Console) -> None:
    """Two tables of at most 80 columns: what a format costs, and what fits with it."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    request = plan.request
    what = f"{request.context:,} tokens x {request.concurrency}"
    cost = Table(title=f"KV cache by format: {what}", title_justify="left", box=SIMPLE_HEAD)
    fits = Table(title="What fits", title_justify="left", box=SIMPLE_HEAD)
    for table, columns in (
        (cost, ("B/token\nnominal", "B/token\nallocated", "GiB\nnominal", "GiB\nallocated", "GB\nallocated")),
        (fits, ("GiB per\nsequence", "longest\ncontext", "sequences\nat most", "fits", "tokens/s\nat most")),
    ):
        table.add_column("format", no_wrap=True)
        for column in columns:
            table.add_column(column, justify="right", no_wrap=True)
    for name, fmt in plan.formats.items():
        style = "bold" if name == request.kv_cache_dtype else None
        label = name + ("" if fmt.vllm else " *")
        if fmt.refused:
            cost.add_row(label, *["-"] * 5, style=style)
            fits.add_row(label, "-", "-", "-", "no", "-", style=style)
            continue
        assert fmt.step is not None
        cost.add_row(
            label,
            f"{fmt.nominal_per_token:,.0f}",
            f"{fmt.per_token:,}",
            f"{fmt.nominal_total / GIB:,.3f}",
            f"{fmt.total / GIB:,.3f}",
            f"{fmt.total / 1e9:,.3f}",
            style=style,
        )
        fits.add_row(
            label,
            f"{fmt.per_sequence / GIB:,.3f}",
            f"{fmt.max_context:,}",
            f"{fmt.max_concurrency:,}",
            "yes" if fmt.fits else "no",
            f"{fmt.step.tokens_per_second:,.0f}",
            style=style,
        )
    console.print(cost)
    console.print(fits)


def _available(plan: Plan) -> str:
    fmt = plan.chosen
    return (
        f"{fmt.blocks:,} blocks of {binary(fmt.block_bytes)}; "
        f"vLLM will say {fmt.reported_tokens:,} tokens, {fmt.reported_concurrency:.2f}x"
    )


def _print_time(plan: Plan, console: Console) -> None:
    if plan.chosen.refused:
        return
    assert plan.chosen.step is not None
    request = plan.request
    console.print(
        f"Decoding reads {binary(plan.chosen.step.bytes_read)} per step: at {request.bandwidth / 1e9:,.0f} GB/s "
        f"at most {plan.chosen.step.tokens_per_second:,.1f} tokens/s.",
        soft_wrap=True,
        highlight=False,
    )
    parts = [
        f"{binary(row['bytes'])}: {row['max_tokens_per_second']:,.1f} tokens/s"
        for row in _spill_rows(plan)
        if row["bytes"]
    ]
    console.print(
        f"Spilled over PCIe at {request.pcie / 1e9:,.1f} GB/s instead, {'; '.join(parts)}.",
        soft_wrap=True,
        highlight=False,
    )


# -- Markdown -----------------------------------------------------------------------------
MARKDOWN_HEADER = (
    "| model | weights | longest context, bf16 | fp8 | {fmt} | {context:,} tokens with {fmt}? |\n"
    "|---|---|---|---|---|---|"
)


def markdown_header(plan: Plan) -> str:
    """The two lines above `markdown_row`s."""
    return MARKDOWN_HEADER.format(fmt=plan.chosen.name, context=plan.request.context)


def markdown_row(plan: Plan) -> str:
    """A row of a README's table: model, weights, longest contexts, yes or no and why not."""
    fmt, limit = plan.chosen, plan.model.max_context
    name = Path(plan.model.name).name if Path(plan.model.name).exists() else plan.model.name
    common = " | ".join(_longest(plan.formats[other], limit) for other in ("bf16", "fp8"))
    head = f"| {name} | {binary(plan.weights.total)}, {plan.weights.kind} | {common}"
    if fmt.refused:
        return f"{head} | - | no: {fmt.refused} |"
    if not fmt.fits:
        change = plan.changes[0].split(" (")[0] if plan.changes else ""
        verdict = "no" + (f"; {change} would fit" if change else "")
    elif limit and limit < plan.request.context:
        verdict = f"the memory yes, the model no: made for {limit:,}"
    else:
        verdict = "yes, with --language-model-only" if text_only(plan.model, FORMATS[fmt.name]) else "yes"
    return f"{head} | {_longest(fmt, limit)} | {verdict} |"


def _longest(fmt: FormatPlan, limit: int | None) -> str:
    """The longest context by memory, and the model's own limit where that is lower."""
    if fmt.refused or not fmt.max_context:
        return "none"
    if limit and limit < fmt.max_context:
        return f"{limit:,} (the model's; memory {fmt.max_context:,})"
    return f"{fmt.max_context:,}"
