# SPDX-License-Identifier: Apache-2.0
"""What `bie-serve` reads: its own flags, a profile, and those of vLLM's flags that decide about memory.

Every flag that is not bie-serve's goes to vLLM unchanged; a few are looked at on
the way, since the plan depends on them.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bie_vllm_plugin.config import DTYPE_NAME, Int4AsymConfig
from bie_vllm_plugin.plan_units import GIB, PlanError

PROFILES = ("8gb", "12gb", "16gb", "24gb", "server")
"""From small to large; each is `configs/<name>.yaml`."""

PROFILE_MEMORY = {"8gb": 8 * GIB, "12gb": 12 * GIB, "16gb": 16 * GIB, "24gb": 24 * GIB, "server": 40 * GIB}

DEFAULT_PORT = 8000

MAX_COUNT = 1 << 50
"""No count of tokens, bytes or GPUs is larger."""


def config_path(profile: str) -> Path:
    """The profile's vLLM config file: of the source tree, else of the installation.

    Raises:
        PlanError: the installation lacks it.
    """
    here, share = Path(__file__).resolve().parent.parent, Path("share") / "bie-vllm-plugin" / "configs"
    # A source tree, an environment, and `pip install --target`.
    folders = (here / "configs", Path(sysconfig.get_path("data")) / share, here / share)
    for folder in folders:
        if (path := folder / f"{profile}.yaml").exists():
            return path
    raise PlanError(f"--profile {profile} has no file in {folders[0]} or {folders[1]}; reinstall bie-vllm-plugin.")


def profile_for(memory: int) -> str:
    """The largest profile made for a card of so many bytes (the smallest if none is)."""
    fitting = [name for name in PROFILES if PROFILE_MEMORY[name] <= memory * 1.08]  # drivers hold some back
    return fitting[-1] if fitting else PROFILES[0]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise PlanError(f"{message}; see bie-serve --help.")


def build_parser() -> argparse.ArgumentParser:
    """bie-serve's own flags; what it does not know is vLLM's."""
    parser = _Parser(
        prog="bie-serve",
        usage="bie-serve MODEL [options] [any flag of vllm serve]",
        description=f"vLLM's OpenAI server with the {DTYPE_NAME} KV cache, planned before anything is loaded.",
        epilog="Other flags go to vLLM unchanged, e.g. --port 8001 --max-model-len 32768 --enable-auto-tool-choice.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=100),
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="Hugging Face id or local folder; comes first")
    add("--profile", choices=PROFILES, metavar="|".join(PROFILES), help="configs/<name>.yaml (by the card found)")
    add("--kv-sink-tokens", metavar="N", type=int, help="first tokens in 16 bits (8)")
    add("--kv-recent-tokens", metavar="N", type=int, help="recent tokens in 16 bits (128)")
    add("--kv-group-size", metavar="N", type=int, help="elements per scale, 64 or 32 (64)")
    add("--chunked-prefill-size", metavar="N", type=int, help="tokens of a prefill chunk (the profile's)")
    add("--speculative-draft-tokens", metavar="N", type=int, help="drafts per step, by n-gram look-up (0)")
    add("--speculative-draft-model", metavar="M", help="draft with this model instead of by n-gram look-up")
    add("--paged-block-size", metavar="N", type=int, help=f"tokens of a page (64 with {DTYPE_NAME})")
    add("--dry-run", action="store_true", help="print the plan's sentence and the vLLM command, start nothing")
    add("--force", action="store_true", help="start although the plan says that it cannot fit")
    return parser


def human_int(text: str) -> int:
    """vLLM's `1k` (1,000) and `1K` (1,024) notation."""
    scale = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    if not text or text[-1] not in scale:
        return int(text)
    value = float(text[:-1]) * scale[text[-1]]
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a number")
    return int(value)


def _count(text: str) -> int:
    value = human_int(text)
    if not 1 <= value <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text} must be from 1 to {MAX_COUNT}")
    return value


def _context(text: str) -> int:
    return -1 if text in ("auto", "-1") else _count(text)


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and at most 1")
    return value


human_int.__name__ = _count.__name__ = _context.__name__ = _share.__name__ = "number"  # argparse names them


def _drafted(text: str) -> dict[str, Any]:
    """vLLM's speculative_config, of which the plan reads the number of drafts."""
    content = _json_mapping(text)
    drafts = content.get("num_speculative_tokens")
    if drafts is not None and (not isinstance(drafts, int) or isinstance(drafts, bool) or drafts < 1):
        raise argparse.ArgumentTypeError(f"num_speculative_tokens={drafts!r} must be a whole number of drafts")
    return content


def _json_mapping(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError:
        content = None
    if not isinstance(content, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return content


def _watched() -> argparse.ArgumentParser:
    """vLLM's flags that the plan depends on; everything else is skipped."""
    parser = _Parser(prog="vllm serve", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for flags, kind in (
        (("--max-model-len",), _context),
        (("--max-num-batched-tokens",), _count),
        (("--max-num-seqs",), _count),
        (("--kv-cache-dtype",), str),
        (("--tensor-parallel-size", "-tp"), _count),
        (("--gpu-memory-utilization",), _share),
        (("--kv-cache-memory-bytes",), _count),
        (("--block-size",), _count),
        (("--quantization", "-q"), str),
        (("--dtype",), str),
        (("--host",), str),
        (("--port",), int),
        (("--uds",), str),
        (("--config",), str),
        (("--additional-config",), _json_mapping),
        (("--speculative-config",), _drafted),
        (("--hf-overrides",), str),
    ):
        parser.add_argument(*flags, type=kind)
    parser.add_argument("--kv-cache-dtype-skip-layers", nargs="+")
    return parser


@dataclass
class Settings:
    """Everything known before a model is touched.

    Attributes:
        model: as the user wrote it.
        own: bie-serve's flags.
        rest: vLLM's flags, unchanged.
        config: the config file (`--config`, else the profile's).
        profile: name of the profile, '' with `--config`.
        explicit: vLLM options that the user gave on the command line.
        merged: the same over those of the config file; keys with underscores.
    """

    model: str
    own: argparse.Namespace
    rest: list[str]
    config: Path
    profile: str
    explicit: dict[str, Any] = field(default_factory=dict)
    merged: dict[str, Any] = field(default_factory=dict)

    @property
    def window(self) -> Any:
        """int4_asym's settings: the config file's, then --additional-config's, then the short flags'.

        Not a mapping if the user's was none; `Int4AsymConfig.parse` says so.
        """
        base = (self.merged.get("additional_config") or {}).get(DTYPE_NAME)
        if base is None:
            base = {}
        return {**base, **self.short_window} if isinstance(base, dict) else base

    @property
    def short_window(self) -> dict[str, Any]:
        """int4_asym's settings among the short flags."""
        flags = {
            "sink_tokens": self.own.kv_sink_tokens,
            "recent_tokens": self.own.kv_recent_tokens,
            "group_size": self.own.kv_group_size,
        }
        return {key: value for key, value in flags.items() if value is not None}


def read(argv: list[str], profile: str) -> Settings:
    """Parse a command line.

    Args:
        argv: without the program's name.
        profile: the profile to take when neither `--profile` nor `--config` is given.

    Raises:
        PlanError: bad input, as one sentence.
    """
    if argv and argv[0].startswith("-") and not {"-h", "--help"} & set(argv):
        raise PlanError(f"MODEL comes first, before {argv[0]}; see bie-serve --help.")
    own, rest = build_parser().parse_known_args(argv)
    explicit = vars(_watched().parse_known_args([_dashed(part) for part in rest])[0])
    if "config" in explicit and own.profile:
        raise PlanError(f"--config {explicit['config']} and --profile {own.profile} both name a config; leave one out.")
    _check_twice(own, explicit)
    config = Path(explicit.pop("config")) if "config" in explicit else config_path(own.profile or profile)
    settings = Settings(own.model, own, rest, config, "" if "--config" in rest else own.profile or profile, explicit)
    settings.merged = {**_read_yaml(config), **explicit}
    _apply_short_flags(settings)
    if settings.merged.get("kv_cache_dtype", DTYPE_NAME) == DTYPE_NAME:
        try:
            Int4AsymConfig.parse(settings.window)
        except ValueError as error:
            raise PlanError(str(error)) from None
    return settings


def _dashed(part: str) -> str:
    """`--max_model_len=5` as vLLM reads it: `--max-model-len=5`."""
    if not part.startswith("--"):
        return part
    name, equals, value = part.partition("=")
    return name.replace("_", "-") + equals + value


ALIASES = {
    "chunked_prefill_size": "max_num_batched_tokens",
    "paged_block_size": "block_size",
    "speculative_draft_tokens": "speculative_config",
}
"""Short flags and what they set."""


def _check_twice(own: argparse.Namespace, explicit: dict[str, Any]) -> None:
    for short, option in ALIASES.items():
        if getattr(own, short) is not None and option in explicit:
            raise PlanError(
                f"--{short.replace('_', '-')} {getattr(own, short)} and --{option.replace('_', '-')} set the same; "
                "leave one out."
            )
    for name in ("chunked_prefill_size", "paged_block_size", "speculative_draft_tokens"):
        value = getattr(own, name)
        if value is not None and not (
            (0 if name == "speculative_draft_tokens" else 1) <= value <= MAX_COUNT
        ):
            raise PlanError(f"--{name.replace('_', '-')} {value} is too {'large' if value > 0 else 'small'}.")
    if own.speculative_draft_model and not own.speculative_draft_tokens:
        raise PlanError(
            f"--speculative-draft-model {own.speculative_draft_model} needs --speculative-draft-tokens N, the drafts "
            "per step."
        )


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise PlanError(f"--config {path} cannot be read ({reason}); name a vLLM config file (YAML).") from None
    if not isinstance(content, dict):
        raise PlanError(f"--config {path} is not a mapping of vLLM flags to values.")
    options = {str(key).replace("-", "_"): value for key, value in content.items() if value is not None}
    try:
        return {**options, **vars(_watched().parse_known_args(_as_flags(options))[0])}
    except PlanError as error:
        raise PlanError(f"--config {path}: {error}") from None


def _as_flags(options: dict[str, Any]) -> list[str]:
    """A config file's options as vLLM reads them: as flags."""
    flags = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, list) and name == "kv_cache_dtype_skip_layers":
            flags += [flag, *map(str, value)]
        else:
            flags.append(f"{flag}={value if isinstance(value, str) else json.dumps(value, default=str)}")
    return flags


def _apply_short_flags(settings: Settings) -> None:
    own, merged = settings.own, settings.merged
    if own.chunked_prefill_size is not None:
        merged["max_num_batched_tokens"] = own.chunked_prefill_size
    if own.paged_block_size is not None:
        merged["block_size"] = own.paged_block_size
    if own.speculative_draft_tokens:
        merged["speculative_config"] = speculation(own)


def speculation(own: argparse.Namespace) -> dict[str, Any]:
    """vLLM's speculative_config of the short flags."""
    if own.speculative_draft_model:
        return {"model": own.speculative_draft_model, "num_speculative_tokens": own.speculative_draft_tokens}
    return {
        "method": "ngram",
        "num_speculative_tokens": own.speculative_draft_tokens,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }


def vllm_flags(settings: Settings) -> list[str]:
    """The short flags as vLLM's own."""
    own = settings.own
    flags: list[str] = []
    if settings.short_window:
        additional = {**(settings.merged.get("additional_config") or {}), DTYPE_NAME: settings.window}
        flags += ["--additional-config", json.dumps(additional)]
    if own.chunked_prefill_size is not None:
        flags += ["--max-num-batched-tokens", str(own.chunked_prefill_size)]
    if own.paged_block_size is not None:
        flags += ["--block-size", str(own.paged_block_size)]
    if own.speculative_draft_tokens:
        flags += ["--speculative-config", json.dumps(speculation(own))]
    return flags


def kv_space_of_environment() -> int | None:
    """Bytes of VLLM_CPU_KVCACHE_SPACE (GiB), None if unset."""
    value = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    if not value:
        return None
    try:
        return int(value) * GIB
    except ValueError:
        raise PlanError(f"VLLM_CPU_KVCACHE_SPACE={value} must be a whole number of GiB.") from None
