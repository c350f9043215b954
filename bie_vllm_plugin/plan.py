# SPDX-License-Identifier: Apache-2.0
"""`bie-plan`: what fits on a card, before anything is downloaded.

    bie-plan Qwen/Qwen3-8B-AWQ --vram 8GiB --context 65536

Nothing but the config and the safetensors index is fetched, and neither torch nor
vLLM is imported.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from bie_vllm_plugin.config import DTYPE_NAME, Int4AsymConfig
from bie_vllm_plugin.plan_drafter import Drafter, load_drafter, parse_speculation
from bie_vllm_plugin.plan_fit import Plan, Request, make_plan
from bie_vllm_plugin.plan_formats import FORMATS, format_of
from bie_vllm_plugin.plan_model import ModelShape, load_model
from bie_vllm_plugin.plan_pool import MAX_TOKENS, EngineOptions
from bie_vllm_plugin.plan_time import find_card, typical_card
from bie_vllm_plugin.plan_units import GIB, PlanError, parse_bytes, parse_rate
from bie_vllm_plugin.plan_weights import WEIGHT_CHOICES

EXIT_FITS, EXIT_ERROR, EXIT_DOES_NOT_FIT = 0, 2, 3


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise PlanError(f"{message}; see {self.prog} --help.")


def _count(least: int) -> type:
    def parse(text: str) -> int:
        value = int(text)
        if not least <= value <= MAX_TOKENS:
            raise argparse.ArgumentTypeError(f"{value} must be from {least} to {MAX_TOKENS}")
        return value

    parse.__name__ = "number"  # argparse names it in its messages
    return parse  # type: ignore[return-value]


def build_parser() -> argparse.ArgumentParser:
    """The command line of `bie-plan`."""
    parser = _Parser(
        prog="bie-plan",
        description="Memory and speed of a model on a card, for every KV-cache format of vLLM and for int4_asym.",
        epilog="Exit status: 0 fits, 3 does not fit, 2 bad input.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=100),
        usage="bie-plan MODEL [options]",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="Hugging Face id, local folder or config.json")
    add("--vram", metavar="SIZE", help="memory of one card (default 8GiB)")
    add("--card", metavar="NAME", help="a card by name, e.g. rtx-4060: sets --vram, --bandwidth, --pcie")
    add("--context", metavar="N", type=_count(1), default=65536, help="tokens per sequence (65536)")
    add("--concurrency", metavar="N", type=_count(1), default=1, help="sequences at a time (1)")
    choices = "|".join(WEIGHT_CHOICES)
    add("--weights", choices=WEIGHT_CHOICES, metavar=choices, default="auto", help="precision (as the checkpoint)")
    add("--tensor-parallel", metavar="N", type=_count(1), default=1, help="GPUs; figures are of one (1)")
    add("--kv-cache-dtype", metavar="F", default=DTYPE_NAME, help=f"format of the verdict ({DTYPE_NAME})")
    add("--chunked-prefill-size", metavar="N", type=_count(1), default=2048, help="tokens of a prefill chunk (2048)")
    add("--max-num-seqs", metavar="N", type=_count(1), default=16, help="sequences that a step samples (16)")
    add("--block-size", metavar="N", type=_count(1), help="page of vLLM's own formats (16; CPU 128)")
    add("--kv-sink-tokens", metavar="N", type=int, help="int4_asym: first tokens in 16 bits (8)")
    add("--kv-recent-tokens", metavar="N", type=int, help="int4_asym: recent tokens in 16 bits (128)")
    add("--kv-group-size", metavar="N", type=int, help="int4_asym: elements per scale, 64 or 32 (64)")
    add("--skip-layers", metavar="I,J", default="", help="layers kept in 16 bits")
    add("--speculative-draft-tokens", metavar="N", type=_count(0), default=0, help="drafts per step by n-gram (0)")
    add("--speculative-config", metavar="JSON", help="a draft model, EAGLE head or MTP, as vLLM takes it")
    add("--pool", metavar="SIZE", help="plan for a KV pool of this size instead of a card")
    add("--utilization", metavar="X", type=float, default=0.92, help="share of the card for vLLM (0.92)")
    add("--reserve", metavar="SIZE", help="CUDA context and libraries (estimate: 512MiB)")
    add("--bandwidth", metavar="GB/S", help="of the card's memory (a common card's)")
    add("--pcie", metavar="GB/S", help="of the bus, one way (a common card's)")
    add("--cpu", action="store_true", help="vLLM's CPU platform; --vram is the memory it may use")
    add("--json", action="store_true", help="print JSON and nothing else")
    add("--markdown", action="store_true", help="print a Markdown table of one row")
    add("--plot", metavar="FILE", help="draw memory against context")
    return parser


def request_of(args: argparse.Namespace, model: ModelShape) -> Request:
    """The planner's request of parsed arguments; a drafter is looked up beside its target.

    Raises:
        PlanError: one sentence that names setting, value and way out.
    """
    name = format_of(args.kv_cache_dtype)
    if not name:
        raise PlanError(f"--kv-cache-dtype {args.kv_cache_dtype} is not planned; choose from {', '.join(FORMATS)}.")
    if not 0 < args.utilization <= 1:
        raise PlanError(f"--utilization {args.utilization:g} must be above 0 and at most 1.")
    if args.card and args.vram:
        raise PlanError(f"--card {args.card} and --vram {args.vram} say the same twice; leave one out.")
    card = find_card(args.card) if args.card else None
    vram = card.memory if card else parse_bytes(args.vram, "--vram") if args.vram else 8 * GIB
    card = card or typical_card(vram)
    window = {
        "sink_tokens": args.kv_sink_tokens,
        "recent_tokens": args.kv_recent_tokens,
        "group_size": args.kv_group_size,
    }
    try:
        settings = Int4AsymConfig.parse({key: value for key, value in window.items() if value is not None})
    except ValueError as error:
        raise PlanError(str(error)) from None
    try:
        skip = frozenset(int(part) for part in args.skip_layers.split(",") if part.strip())
    except ValueError:
        raise PlanError(f"--skip-layers {args.skip_layers} must be layer numbers, such as 0,31.") from None
    return Request(
        vram=vram,
        bandwidth=parse_rate(args.bandwidth, "--bandwidth") if args.bandwidth else card.bandwidth,
        pcie=parse_rate(args.pcie, "--pcie") if args.pcie else card.pcie,
        utilization=args.utilization,
        context=args.context,
        concurrency=args.concurrency,
        weights=args.weights,
        kv_cache_dtype=name,
        max_seqs=max(args.max_num_seqs, args.concurrency),
        reserve=parse_bytes(args.reserve, "--reserve") if args.reserve else None,
        pool=parse_bytes(args.pool, "--pool") if args.pool else None,
        engine=EngineOptions(
            block_size=args.block_size,
            tp=args.tensor_parallel,
            chunk=args.chunked_prefill_size,
            drafter=_drafter_of(args, model),
            skip=skip,
            cpu=args.cpu,
            settings=settings,
        ),
    )


def _drafter_of(args: argparse.Namespace, model: ModelShape) -> Drafter | None:
    drafts, config = args.speculative_draft_tokens, args.speculative_config
    if config is None:
        return Drafter("ngram", drafts) if drafts else None
    if drafts:
        raise PlanError(
            f"--speculative-draft-tokens {drafts} and --speculative-config say the same twice; leave one out."
        )
    return load_drafter(parse_speculation(config), model, args.tensor_parallel)


def plan_of(argv: Sequence[str]) -> Plan:
    """The plan that a command line asks for; `argv` is without the program's name.

    Raises:
        PlanError: bad input, as one sentence.
    """
    args = build_parser().parse_args(list(argv))
    return _planned(args)


def _planned(args: argparse.Namespace) -> Plan:
    model = load_model(args.model)
    return make_plan(model, request_of(args, model))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 fits, 3 does not fit, 2 bad input."""
    try:
        args = build_parser().parse_args(argv)
        plan = _planned(args)
        if args.plot:
            from bie_vllm_plugin.plan_plot import plot

            plot(plan, args.plot)
    except PlanError as error:
        print(f"bie-plan: {error}", file=sys.stderr)
        return EXIT_ERROR
    try:
        _print(plan, args)
        sys.stdout.flush()
    except BrokenPipeError:  # `bie-plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_FITS if plan.chosen.fits else EXIT_DOES_NOT_FIT


def _print(plan: Plan, args: argparse.Namespace) -> None:
    from bie_vllm_plugin import plan_report

    if args.json:
        print(json.dumps(plan_report.as_json(plan), indent=2))
    elif args.markdown:
        print(plan_report.markdown_header(plan))
        print(plan_report.markdown_row(plan))
    else:
        from rich.console import Console

        console = Console()
        plan_report.print_plan(plan, console if console.is_terminal else Console(width=100))
        if args.plot:
            print(f"Plot: {args.plot}")


if __name__ == "__main__":
    sys.exit(main())
