# SPDX-License-Identifier: Apache-2.0
"""The settings of `int4_asym`: one frozen object, validated where it is read.

They live in vLLM's `additional_config` under the key `int4_asym`, so that they
travel to every process and enter vLLM's compile-cache hash:

    LLM(model, kv_cache_dtype="int4_asym", additional_config={"int4_asym": {"recent_tokens": 256}})
"""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, StrictInt, ValidationError, field_validator, model_validator

from bie_kernels.layout import GROUP_SIZES, PAGE_TOKENS, PageLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DTYPE_NAME = "int4_asym"
"""The value of `--kv-cache-dtype`, and the key in `additional_config`."""

MAX_SINK_TOKENS = PAGE_TOKENS
"""Sinks must lie in the first body page: its key statistics leave them out."""


class Int4AsymConfig(BaseModel):
    """Settings of the cache; every field has its documented default.

    Attributes:
        sink_tokens: first tokens of a sequence that are always read in 16 bits (0 to 64).
        recent_tokens: distance below which a key is read in 16 bits (at least 64 for
            `channel`, whose pages are quantised when complete; 0 or more for `head_dim`).
        group_size: elements per scale, 64 (4.5 bits) or 32 (5 bits).
        key_axis: `channel` (a key group is one channel over 64 tokens) or `head_dim`.
        prefix_hits: `relaxed` (a prefix hit needs the INT4 pages and the sinks) or
            `strict` (the 16-bit window as well: warm equals cold exactly).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sink_tokens: StrictInt = 8
    recent_tokens: StrictInt = 128
    group_size: StrictInt = 64
    key_axis: Literal["channel", "head_dim"] = "channel"
    prefix_hits: Literal["relaxed", "strict"] = "relaxed"

    @field_validator("sink_tokens")
    @classmethod
    def _check_sinks(cls, value: int) -> int:
        if not 0 <= value <= MAX_SINK_TOKENS:
            raise ValueError(f"must be from 0 to {MAX_SINK_TOKENS}")
        return value

    @field_validator("group_size")
    @classmethod
    def _check_group(cls, value: int) -> int:
        if value not in GROUP_SIZES:
            raise ValueError(f"must be one of {', '.join(map(str, GROUP_SIZES))}")
        return value

    @model_validator(mode="after")
    def _check_window(self) -> Int4AsymConfig:
        if self.recent_tokens < 0:
            raise ValueError(f"recent_tokens={self.recent_tokens} must not be negative")
        if self.key_axis == "channel" and self.recent_tokens < PAGE_TOKENS:
            raise ValueError(
                f"recent_tokens={self.recent_tokens} must be at least {PAGE_TOKENS} with key_axis='channel', "
                "whose pages are quantised when their last token arrives; raise it or use key_axis='head_dim'"
            )
        return self

    @classmethod
    def parse(cls, raw: Any) -> Int4AsymConfig:
        """Validate the mapping under `additional_config['int4_asym']` (None for all defaults).

        Raises:
            ValueError: one sentence naming the setting, the value and what is allowed.
        """
        if raw is None:
            return cls()
        if isinstance(raw, cls):
            return raw
        if not isinstance(raw, dict):
            raise ValueError(
                f"additional_config['{DTYPE_NAME}']={raw!r} must be a mapping with keys among "
                f"{', '.join(cls.model_fields)}."
            )
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            raise ValueError(_sentence(error)) from None

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> Int4AsymConfig:
        """The settings of this engine; see `parse`."""
        extra = vllm_config.additional_config
        return cls.parse(extra.get(DTYPE_NAME) if isinstance(extra, dict) else None)

    def page_layout(self, head_size: int, head_size_v: int | None = None) -> PageLayout:
        """The body page of a layer with these head sizes; raises ValueError if there is none."""
        return _page_layout(head_size, head_size_v, self.group_size, self.key_axis)


@functools.cache
def _page_layout(*arguments: Any) -> PageLayout:
    """Asked for once a layer and step: built once."""
    return PageLayout(*arguments)


def _sentence(error: ValidationError) -> str:
    """pydantic's first complaint as one sentence that names setting, value and remedy."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    known = ", ".join(Int4AsymConfig.model_fields)
    if first["type"] == "extra_forbidden":
        return f"{DTYPE_NAME}.{where}={first['input']!r} is not a setting; known settings are {known}."
    message = first["msg"].removeprefix("Value error, ")
    if not where:  # a rule between settings names them itself
        return f"{DTYPE_NAME}.{message}."
    return f"{DTYPE_NAME}.{where}={first['input']!r}: {message[0].lower()}{message[1:]}."
