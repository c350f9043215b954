# SPDX-License-Identifier: Apache-2.0
"""Records, tables and pictures from the arrays of finished units."""
from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
POSITION_BINS = 16
LOWEST_KL = 1e-5
"""Smaller values are drawn at this one: equal numbers have no place on a logarithmic axis."""


def token_record(arrays: Arrays, **facts: Any) -> dict[str, Any]:
    """One line of results from per-token arrays [n] with nll, nll_base, kl (nats) and agree (0/1)."""
    nll, base = float(arrays["nll"].mean()), float(arrays["nll_base"].mean())
    return {
        **facts,
        "tokens": len(arrays["nll"]),
        "ppl": math.exp(min(nll, 50.0)),
        "ppl_base": math.exp(min(base, 50.0)),
        "delta_nll": nll - base,
        "kl_mean": float(arrays["kl"].mean()),
        "kl_p99": float(np.percentile(arrays["kl"], 99)),
        "top1": float(arrays["agree"].mean()),
    }


def by_position(parts: list[Arrays]) -> list[dict[str, float]]:
    """Mean KL and loss by position, over documents, in bins of equal width in log2(position)."""
    longest = max(len(part["kl"]) for part in parts)
    edges = np.unique(np.round(np.geomspace(16, longest, POSITION_BINS + 1)).astype(int))
    rows = []
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        kl = np.concatenate([part["kl"][low:high] for part in parts])
        rise = np.concatenate([part["nll"][low:high] - part["nll_base"][low:high] for part in parts])
        if len(kl):
            bin_ = {"from": int(low), "to": int(high)}
            rows.append({**bin_, "kl_mean": float(kl.mean()), "delta_nll": float(rise.mean())})
    return rows


def pooled(records: list[dict[str, Any]], mode: str = "score") -> list[dict[str, Any]]:
    """Records over all documents, one per format and context."""
    rows = []
    keys = dict.fromkeys((r["format"], r["context"]) for r in records if r["mode"] == mode)
    for fmt, context in keys:
        parts = [r for r in records if (r["format"], r["context"], r["mode"]) == (fmt, context, mode)]
        weights = [r["tokens"] for r in parts]
        mean = partial(np.average, weights=weights)
        rows.append({
            "format": fmt, "context": context, "documents": len(parts), "tokens": sum(weights),
            "ppl": math.exp(mean([math.log(r["ppl"]) for r in parts])),
            "ppl_base": math.exp(mean([math.log(r["ppl_base"]) for r in parts])),
            "kl_mean": float(mean([r["kl_mean"] for r in parts])), "kl_p99": max(r["kl_p99"] for r in parts),
            "top1": float(mean([r["top1"] for r in parts])),
        })  # fmt: skip
    return rows


def token_table(rows: list[dict[str, Any]], over: str) -> str:
    """Markdown of token records; `over` names the column after the format (context or document)."""
    lines = [
        f"| format | {over} | tokens | PPL auto | PPL | change | KL mean | KL p99 | top-1 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        change = 100 * (r["ppl"] / r["ppl_base"] - 1)
        lines.append(
            f"| {r['format']} | {r[over]} | {r['tokens']} | {r['ppl_base']:.3f} | {r['ppl']:.3f} | {change:+.2f} % "
            f"| {r['kl_mean']:.4f} | {r['kl_p99']:.3f} | {100 * r['top1']:.2f} % |"
        )
    return "\n".join(lines)


def needle_table(needles: list[dict[str, Any]]) -> str:
    """Markdown: found of asked and mean log-probability of the answer, per kind, context and format."""
    lines = ["| needles | context | format | found | log-probability of the answer |", "|---|---|---|---|---|"]
    for key in dict.fromkeys((n["kind"], n["context"], n["format"]) for n in needles):
        cell = [n for n in needles if (n["kind"], n["context"], n["format"]) == key]
        found = sum(n["exact"] for n in cell)
        logprob = sum(n["logprob"] for n in cell) / len(cell)
        lines.append(f"| {key[0]} | {key[1]} | {key[2]} | {found} of {len(cell)} | {logprob:.2f} |")
    return "\n".join(lines)


def plot_positions(positions: dict[str, list[dict[str, float]]], path: Path, title: str) -> None:
    """Mean KL against position, one line per format, both axes logarithmic; the lowest line stands for less."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.8), layout="constrained")
    axes = figure.subplots()
    if len(positions) > 10:  # an ablation: no colour twice
        axes.set_prop_cycle(color=colormaps["tab20"].colors)
    for (name, rows), marker in zip(positions.items(), "osD^vPX*<>" * 3, strict=False):
        centres = [math.sqrt(r["from"] * r["to"]) for r in rows]
        axes.plot(centres, [max(r["kl_mean"], LOWEST_KL) for r in rows], marker=marker, markersize=4, label=name)
    axes.set(xscale="log", yscale="log", xlabel="position (tokens)", ylabel="KL from auto (nats, mean)", title=title)
    ticks = [t for t in 2 ** np.arange(4, 18) if t <= max(r["to"] for rows in positions.values() for r in rows)]
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.legend(fontsize=7, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120)


def plot_needles(needles: list[dict[str, Any]], path: Path, title: str) -> None:
    """Heat maps: colour is the share found, the number the mean log-probability of the answer.

    One row per kind of needle, one column per format; in each, depth against context.
    """
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(n["kind"] for n in needles))
    formats = list(dict.fromkeys(n["format"] for n in needles))
    contexts = sorted({n["context"] for n in needles})
    depths = sorted({n["depth"] for n in needles})
    width = 1.6 + max(1.3, 0.8 * len(contexts)) * len(formats)
    height = 1.6 + (0.3 + 0.33 * len(depths)) * len(kinds)
    figure = Figure(figsize=(max(width, 5), max(height, 3)), layout="constrained")
    grid = figure.subplots(len(kinds), len(formats), squeeze=False, sharex=True, sharey=True)
    for axes_row, kind in zip(grid, kinds, strict=True):
        for axes, fmt in zip(axes_row, formats, strict=True):
            found = np.full((len(depths), len(contexts)), np.nan)
            for i, depth in enumerate(depths):
                for j, context in enumerate(contexts):
                    want = (kind, fmt, context, depth)
                    cell = [n for n in needles if (n["kind"], n["format"], n["context"], n["depth"]) == want]
                    if cell:
                        found[i, j] = np.mean([n["exact"] for n in cell])
                        logprob = np.mean([n["logprob"] for n in cell])
                        axes.text(j, i, f"{logprob:.1f}", ha="center", va="center", fontsize=7)
            image = axes.imshow(found, vmin=0, vmax=1, cmap="RdYlGn", alpha=0.75, aspect="auto")
            axes.set_xticks(range(len(contexts)), [str(c) for c in contexts], fontsize=7)
            axes.set_yticks(range(len(depths)), [f"{100 * d:.0f} %" for d in depths], fontsize=7)
            if kind == kinds[0]:
                axes.set_title(fmt.replace("+", "\n"), fontsize=7)
            if fmt == formats[0]:
                axes.set_ylabel(kind, fontsize=9)
    figure.supxlabel("context (tokens)", fontsize=9)
    figure.supylabel("depth of the needle", fontsize=9)
    figure.suptitle(title, fontsize=10)
    figure.colorbar(image, ax=grid, label="share found", shrink=0.8)
    figure.savefig(path, dpi=120)
