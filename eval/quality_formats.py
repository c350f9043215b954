# SPDX-License-Identifier: Apache-2.0
"""KV formats as the command line names them, and the variants of the ablation table.

    int4_asym                                      defaults
    int4_asym+recent_tokens=64+key_axis=head_dim   with settings of the plugin
    int4_asym+skip_layers=0/1                      layers kept in the model's dtype
    int4_asym+only=keys, +only=values              one side quantised (CPU)
    int4_asym+fault=scale                          deliberately broken (CPU), to test this harness
    auto+chunk=512                                 another prefill chunk: the noise of rounding
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

PLUGIN = "int4_asym"
CPU_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", PLUGIN)
"""What vLLM's CPU backend computes. It starts with any other name too and casts keys and values to
bytes: SmolLM2's perplexity is then 900,000, which says nothing about the format."""


@dataclass(frozen=True)
class Format:
    """One KV format with its settings; `label` is what tables and records call it."""

    label: str
    dtype: str
    settings: dict[str, Any] = field(default_factory=dict)
    skip_layers: tuple[str, ...] = ()
    patches: dict[str, str] = field(default_factory=dict)
    chunk: int | None = None

    @property
    def is_base(self) -> bool:
        """Whether every other format is compared with this one."""
        return self.label == "auto"

    def llm_arguments(self) -> dict[str, Any]:
        """What this format adds to the arguments of `LLM`."""
        arguments: dict[str, Any] = {"kv_cache_dtype": self.dtype}
        if self.settings:
            arguments["additional_config"] = {PLUGIN: self.settings}
        if self.skip_layers:
            arguments["kv_cache_dtype_skip_layers"] = list(self.skip_layers)
        if self.chunk:
            arguments["max_num_batched_tokens"] = self.chunk
        return arguments


def unsupported(fmt: Format, on_cpu: bool) -> str | None:
    """Why this machine cannot measure a format, if so."""
    if on_cpu and fmt.dtype not in CPU_DTYPES:
        return f"{fmt.dtype} needs a GPU (vLLM's CPU backend takes the name and computes nonsense)"
    return None


def known_dtypes() -> tuple[str, ...]:
    """Every `kv_cache_dtype` that this vLLM and the plugin know."""
    from vllm.config.cache import CacheDType

    return tuple(dict.fromkeys((*get_args(CacheDType), PLUGIN)))


def parse_format(text: str, known: tuple[str, ...] | None = None) -> Format:
    """One format from its text; see the module's docstring.

    Raises:
        ValueError: one sentence that names the unknown format, setting or value.
    """
    dtype, *options = text.strip().split("+")
    known = known or known_dtypes()
    if dtype not in known:
        raise ValueError(f"{dtype!r} is not a KV format of this vLLM; known are {', '.join(known)}.")
    settings: dict[str, Any] = {}
    patches: dict[str, str] = {}
    skip_layers: tuple[str, ...] = ()
    chunk = None
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise ValueError(f"{option!r} in {text!r} must be written key=value.")
        if key == "skip_layers":
            skip_layers = tuple(value.split("/"))
        elif key == "chunk":
            if not value.isdigit():
                raise ValueError(f"chunk={value} in {text!r} must be a number of tokens.")
            chunk = int(value)
        elif key in ("only", "fault"):
            if (key, value) not in (("only", "keys"), ("only", "values"), ("fault", "scale")):
                raise ValueError(f"{option!r} in {text!r} is unknown; there are only=keys, only=values, fault=scale.")
            patches[key] = value
        else:
            settings[key] = int(value) if value.lstrip("-").isdigit() else value
    if (settings or patches) and dtype != PLUGIN:
        raise ValueError(f"{text!r}: settings belong to {PLUGIN} and not to {dtype}.")
    if settings:
        from bie_vllm_plugin.config import Int4AsymConfig

        Int4AsymConfig.parse(settings)
    return Format(text.strip(), dtype, settings, skip_layers, patches, chunk)


def parse_formats(text: str) -> list[Format]:
    """A comma-separated list; `auto` comes first and is added where it is missing."""
    known = known_dtypes()
    formats = [parse_format(part, known) for part in text.split(",") if part.strip()]
    base = [fmt for fmt in formats if fmt.is_base] or [parse_format("auto", known)]
    rest = [fmt for fmt in formats if not fmt.is_base]
    return [base[0], *{fmt.label: fmt for fmt in rest}.values()]


def ablation(layers: int, on_cpu: bool) -> list[Format]:
    """The variants of the ablation table for a model of `layers` attention layers."""
    texts = [PLUGIN]
    texts += [f"{PLUGIN}+sink_tokens={n}" for n in (0, 4, 16)]  # 8 is the default
    texts += [f"{PLUGIN}+recent_tokens={n}" for n in (64, 256, 512)]  # 128 is the default
    texts += [f"{PLUGIN}+group_size=32", f"{PLUGIN}+key_axis=head_dim"]
    texts += [f"{PLUGIN}+key_axis=head_dim+group_size=32"]
    texts += [f"{PLUGIN}+key_axis=head_dim+sink_tokens=0+recent_tokens=0"]
    if on_cpu:
        texts += [f"{PLUGIN}+only=keys", f"{PLUGIN}+only=values"]
    texts += [f"{PLUGIN}+skip_layers=0", f"{PLUGIN}+skip_layers=0/{layers - 1}"]
    known = known_dtypes()
    return [parse_format(text, known) for text in texts]
