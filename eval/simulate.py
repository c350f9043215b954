# SPDX-License-Identifier: Apache-2.0
"""The format without an engine: transformers with the reference attention of `bie_kernels`, teacher-forced.

    python eval/simulate.py --model smollm2 --documents prose --tokens 2048 --dtype float32 \\
        --engine eval/results/quality_smollm2_fp32.json --out eval/results/simulate_smollm2_fp32.json

scores a document with plain attention and with the position rule over INT4 copies, and prints KL
and top-1 agreement; with --engine beside what `eval/quality.py` measured for the same document and
length through vLLM; with --out as records in a JSON file, with settings, versions and command. The two
share nothing but the number format: where they differ by more than the model's rounding, the engine
is wrong. Needs no plugin and no cache; slow (minutes on a CPU).
"""
from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent / "kernels")]

import models
import quality_data

from bie_kernels import reference
from bie_kernels.layout import PageLayout

QUERIES = 256
"""Queries attended at a time, so that scores of 32 heads x 256 x 8k are 0.3 GB."""
ROWS = 128
"""Rows of logits compared at a time."""


def rule_attention(sink: int, recent: int, layout_options: dict[str, Any], only: str | None = None) -> Any:
    """A transformers attention function (batch 1, no cache) that reads keys and values by the position rule.

    `only`: keys or values, the other side then is always exact.
    """

    def attention(module, query, key, value, mask, scaling, dropout=0.0, **kwargs):  # noqa: ANN001, ANN202
        layout = PageLayout(query.shape[-1], **layout_options)
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
        k4, v4 = reference.quantised_copy(k, v, layout, sink)
        k4, v4 = k if only == "values" else k4, v if only == "keys" else v4
        parts = []
        for start in range(0, len(q), QUERIES):
            end = min(start + QUERIES, len(q))
            parts.append(reference.attention(
                q[start:end], torch.arange(start, end), k[:end], v[:end], k4[:end], v4[:end],
                scale=scaling, sink_tokens=sink, recent_tokens=recent,
            ))  # fmt: skip
        return torch.cat(parts)[None].to(query.dtype), None

    return attention


def compare(model: Any, base: torch.Tensor, other: torch.Tensor, ids: list[int]) -> dict[str, float]:
    """Measures over last hidden states [T, H] of plain attention and of the format."""
    kl, agree, nll, nll_base = [], [], [], []
    for start in range(0, len(ids) - 1, ROWS):
        rows = slice(start, min(start + ROWS, len(ids) - 1))
        one, two = (model.lm_head(h[rows]).float().log_softmax(-1) for h in (base, other))
        goal = torch.tensor(ids[rows.start + 1 : rows.stop + 1])[:, None]
        kl.append(torch.nn.functional.kl_div(two, one, log_target=True, reduction="none").sum(-1))
        agree.append((one.argmax(-1) == two.argmax(-1)).float())
        nll_base.append(-one.gather(1, goal)[:, 0])
        nll.append(-two.gather(1, goal)[:, 0])
    mean = lambda parts: float(torch.cat(parts).mean())
    return {
        "kl_mean": mean(kl), "top1": mean(agree), "ppl": float(torch.cat(nll).mean().exp()),
        "ppl_base": float(torch.cat(nll_base).mean().exp()),
    }  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help=f"folder or one of {', '.join(models.PACKAGED)}")
    add("--documents", default="prose", help="texts of eval/texts")
    add("--tokens", type=int, default=2048)
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--sink-tokens", type=int, default=8)
    add("--recent-tokens", type=int, default=128)
    add("--key-axis", default="channel", choices=("channel", "head_dim"))
    add("--group-size", type=int, default=64, choices=(64, 32))
    add("--only", choices=("keys", "values"), help="quantise one side")
    add("--engine", type=Path, help="results of eval/quality.py to print beside")
    add("--out", type=Path, help="JSON file for the records")
    return parser


def simulate(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One record per document, printed as it is done: simulated measures and, with --engine, the engine's."""
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

    folder = models.resolve(args.model)
    layout = {"key_axis": args.key_axis, "group_size": args.group_size}
    rule = rule_attention(args.sink_tokens, args.recent_tokens, layout, args.only)
    AttentionInterface.register("int4_asym_rule", rule)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype)).eval()
    docs = quality_data.documents(AutoTokenizer.from_pretrained(folder), args.documents.split(","), [])
    engine = json.loads(args.engine.read_text())["records"] if args.engine else []
    records = []
    for name, ids in docs.items():
        ids = ids[: args.tokens]
        states = []
        for how in ("sdpa", "int4_asym_rule"):
            model.set_attn_implementation(how)
            with torch.inference_mode():
                states.append(model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0])
        with torch.inference_mode():
            found = compare(model, *states, ids)
        records.append({"document": name, "tokens": len(ids), "dtype": args.dtype, "simulated": found})
        for r in engine:
            if (r["document"], r["context"], r["mode"], r["format"]) == (name, len(ids), "score", "int4_asym"):
                records[-1]["engine"] = {key: r[key] for key in found}
        print(json.dumps(records[-1]), flush=True)
    return records


def main(argv: list[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    records = simulate(args)
    if args.out:
        from quality import versions

        settings = {
            "model": args.model, "sink_tokens": args.sink_tokens, "recent_tokens": args.recent_tokens,
            "key_axis": args.key_axis, "group_size": args.group_size, "only": args.only,
        }  # fmt: skip
        command = "python eval/simulate.py " + shlex.join(sys.argv[1:] if argv is None else argv)
        result = {"command": command, "versions": versions(engine=False), "settings": settings, "records": records}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
