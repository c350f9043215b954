# SPDX-License-Identifier: Apache-2.0
"""Memory against context, with the card's limit as a line."""
from __future__ import annotations

from pathlib import Path

from bie_vllm_plugin.plan_fit import Plan, activation_bytes
from bie_vllm_plugin.plan_formats import FORMATS
from bie_vllm_plugin.plan_pool import build_pool
from bie_vllm_plugin.plan_units import GIB, PlanError, binary

PLOTTED = ("bf16", "fp8", "nvfp4", "int4_per_token_head", "turboquant_4bit_nc", "int4_asym")
"""Formats drawn, where the model can use them; the others crowd the picture and lie between."""

STYLES = {
    "bf16": ("#444444", "-"),
    "fp8": ("#1f77b4", "-"),
    "nvfp4": ("#9467bd", "--"),
    "int4_per_token_head": ("#8c564b", ":"),
    "turboquant_4bit_nc": ("#2ca02c", "-."),
    "int4_asym": ("#d62728", "-"),
}


def plot(plan: Plan, path: str) -> None:
    """Write the picture; the suffix chooses the file type.

    Raises:
        PlanError: matplotlib is missing, or the path cannot be written.
    """
    try:
        import matplotlib
    except ImportError:
        raise PlanError("--plot needs matplotlib; install it with: pip install matplotlib.") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter

    request = plan.request
    longest = max(2 * request.context, 4096)
    contexts = [round(longest * step / 128) or 1 for step in range(129)]
    figure, axes = plt.subplots(figsize=(9, 5), dpi=150)
    top = plan.budget
    for name in PLOTTED:
        fmt = plan.formats[name]
        if fmt.refused:
            continue
        pool = build_pool(plan.model, FORMATS[name], request.engine, request.context)
        fixed = plan.weights.total + plan.context_bytes + activation_bytes(plan.model, request, FORMATS[name])
        totals = [fixed + pool.pool_bytes(context, request.concurrency) for context in contexts]
        colour, line = STYLES[name]
        width = 2.5 if name == request.kv_cache_dtype else 1.5
        axes.plot(contexts, [total / GIB for total in totals], line, color=colour, linewidth=width, label=name)
        if name == "int4_asym" or name == request.kv_cache_dtype:
            top = max(top, totals[-1])
    limit, weights = plan.budget / GIB, plan.weights.total / GIB
    axes.axhline(weights, color="#999999", linewidth=1, linestyle=":", label=f"weights: {weights:.2f} GiB")
    card = f"limit: {limit:.2f} GiB\n({request.utilization:.0%} of {binary(request.vram)})"
    axes.axhline(limit, color="black", linewidth=2, label=card)
    axes.axvline(request.context, color="#999999", linewidth=1, linestyle="--")
    axes.set_xlim(0, longest)
    axes.set_ylim(0, max(top, plan.budget) / GIB * 1.25)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1024:.0f}k" if value else "0"))
    axes.set_xticks([longest * step / 8 for step in range(9)])
    sequences = f" x {request.concurrency} sequences" if request.concurrency > 1 else ""
    axes.set_xlabel(f"context, tokens{sequences}")
    axes.set_ylabel("memory of one GPU, GiB" if request.engine.tp > 1 else "memory, GiB")
    axes.set_title(f"{Path(plan.model.name).name or plan.model.name}, weights {plan.weights.kind}", fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, fontsize=9, frameon=False)
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise PlanError(f"--plot {path} cannot be written ({error}); name a .png, .svg or .pdf file.") from None
    finally:
        plt.close(figure)
