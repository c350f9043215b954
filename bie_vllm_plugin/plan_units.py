# SPDX-License-Identifier: Apache-2.0
"""Sizes as people write and read them, and the one error of `bie-plan`."""
from __future__ import annotations

import re

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_UNITS = {
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


class PlanError(ValueError):
    """Bad input, as one sentence that names the setting, the value and the way out."""


class ModelNotFound(PlanError):
    """The model's config is neither on this machine nor to be had from the Hub."""


def parse_bytes(text: str, setting: str) -> int:
    """Bytes of `8GiB`, `8192MiB`, `8.6GB` (decimal) or a plain number, which counts GiB.

    Args:
        text: what the user wrote.
        setting: the flag, for the message.

    Raises:
        PlanError: not a size, or not above zero.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", text.lower())
    unit = _UNITS.get(match[2] or "gib") if match else None
    if match is None or unit is None or float(match[1]) <= 0:
        raise PlanError(
            f"{setting} {text!r} is not a size above zero; write 8GiB, 8192MiB or 8.6GB (a plain number counts GiB)."
        )
    return round(float(match[1]) * unit)


def parse_rate(text: str, setting: str) -> float:
    """Bytes per second of `1008` or `1008GB/s` (decimal GB, as vendors give them) or `939GiB/s`.

    Raises:
        PlanError: not a rate, or not above zero.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)(?:/s)?\s*", text.lower())
    unit = _UNITS.get(match[2] or "gb") if match else None
    if match is None or unit is None or float(match[1]) <= 0:
        raise PlanError(f"{setting} {text!r} is not a bandwidth above zero; write 1008 or 1008GB/s.")
    return float(match[1]) * unit


def binary(size: float) -> str:
    """`size` bytes in the largest binary unit that keeps a digit before the point: `2.25 GiB`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size) >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size:,.0f} B"


def both(size: float) -> str:
    """Binary units with decimal GB beside them: `2.25 GiB (2.42 GB)`."""
    return f"{binary(size)} ({size / 1e9:,.2f} GB)"
