# SPDX-License-Identifier: Apache-2.0
"""Paired bootstrap intervals and the verdict.

The rule, for every measure whose loss has a tolerance:
    reject        the lower end of the 95 % interval of the loss exceeds the tolerance
    accept        the upper end does not
    too little    otherwise

A format is rejected when any measure rejects it, and accepted when every measure with at
least `ENOUGH` paired items accepts it and there is one. Smaller samples can only reject.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

ENOUGH = 500
"""Paired items below which a measure cannot accept a format."""

RESAMPLES = 2000
BLOCK_TOKENS = 32
"""Neighbouring tokens share their fate; they are resampled together."""

ACCEPT, REJECT, UNSURE = "accepted", "rejected", "not enough evidence"
EXIT_STATUS = {ACCEPT: 0, REJECT: 1, UNSURE: 3}
"""2 is left for errors in the command line, as argparse uses it."""


@dataclass(frozen=True)
class Loss:
    """The loss of one measure.

    Attributes:
        measure: what was lost.
        value, low, high: mean and ends of the 95 % interval, in `unit`.
        tolerance: what is allowed, in `unit`.
        unit: "points" (of accuracy) or "%" (of perplexity).
        n: paired items.
    """

    measure: str
    value: float
    low: float
    high: float
    tolerance: float
    unit: str
    n: int

    @property
    def outcome(self) -> str:
        if self.low > self.tolerance:
            return REJECT
        return ACCEPT if self.high <= self.tolerance and self.n >= ENOUGH else UNSURE

    def __str__(self) -> str:
        return f"{self.measure} {self.value:+.2f} {self.unit} ({self._interval()}{self.n} pairs)"

    def _interval(self) -> str:
        """Bounds that are asked of the share itself (`quality_tasks.JSON_SHARE`) have none."""
        if self.low == self.high == self.value:
            return ""
        return f"95 % interval {self.low:+.2f} to {self.high:+.2f}, "


def interval(values: np.ndarray, seed: int = 0, resamples: int = RESAMPLES) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean of paired differences [n]; n >= 1."""
    from scipy.stats import bootstrap

    if len(values) < 2 or np.ptp(values) == 0:
        return float(values.mean()), float(values.mean())
    result = bootstrap(
        (values,), np.mean, n_resamples=resamples, method="percentile", rng=np.random.default_rng(seed), batch=64
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def accuracy_loss(measure: str, base: np.ndarray, other: np.ndarray, tolerance: float) -> Loss:
    """Loss in points of right answers, base and other being 0/1 per item [n].

    Zero losses in n items still leave room for a true rate of 1 - 0.05^(1/n): a bootstrap of
    equal pairs would see no spread at all, so the upper end is never below that.
    """
    lost = 100 * (base.astype(float) - other.astype(float))
    low, high = interval(lost)
    unseen = 100 * (1 - 0.05 ** (1 / len(lost)))
    return Loss(measure, float(lost.mean()), low, max(high, unseen), tolerance, "points", len(lost))


def _blocks(values: np.ndarray) -> np.ndarray:
    """Means over neighbouring tokens, the incomplete rest left out: [n] -> [n // BLOCK_TOKENS]."""
    whole = len(values) // BLOCK_TOKENS * BLOCK_TOKENS
    return values[:whole].reshape(-1, BLOCK_TOKENS).mean(1) if whole else values


def token_losses(scored: list[dict[str, np.ndarray]], tolerance: float, ppl_tolerance: float) -> list[Loss]:
    """Losses of next-token accuracy and of perplexity over scored documents (nll, top, nll_base, top_base: [n])."""
    top = np.concatenate([_blocks(x["top_base"] - x["top"]) for x in scored]) * 100
    nll = np.concatenate([_blocks(x["nll"] - x["nll_base"]) for x in scored])
    n = sum(len(x["top"]) for x in scored)
    (top_low, top_high), (nll_low, nll_high) = interval(top), interval(nll)
    percent = lambda x: 100 * (math.exp(min(x, 50.0)) - 1)
    return [
        Loss("next-token accuracy", float(top.mean()), top_low, top_high, tolerance, "points", n),
        Loss("perplexity", percent(nll.mean()), percent(nll_low), percent(nll_high), ppl_tolerance, "%", n),
    ]


@dataclass(frozen=True)
class Verdict:
    """What is said about one format: `outcome`, `sentence` and the losses behind it."""

    format: str
    outcome: str
    sentence: str
    losses: tuple[Loss, ...]

    def as_record(self) -> dict[str, Any]:
        """For the JSON results."""
        return {**asdict(self), "losses": [{**asdict(x), "outcome": x.outcome} for x in self.losses]}


def verdict(name: str, losses: list[Loss], notes: Sequence[str] = ()) -> Verdict:
    """The verdict of the rule above over all measures, in one sentence; `notes` say what could not be judged."""
    bad = [x for x in losses if x.outcome == REJECT]
    large = [x for x in losses if x.n >= ENOUGH]
    if bad:
        outcome = REJECT
        reason = "loses more than is tolerated: " + "; ".join(f"{x}, tolerated {x.tolerance:g}" for x in bad)
    elif large and all(x.outcome == ACCEPT for x in large):
        outcome = ACCEPT
        reason = "loses no more than is tolerated: " + "; ".join(f"{x}, tolerated {x.tolerance:g}" for x in large)
    else:
        outcome = UNSURE
        wide = [x for x in large if x.outcome == UNSURE]
        if wide:
            reason = "the interval is too wide: " + "; ".join(f"{x}, tolerated {x.tolerance:g}" for x in wide)
        else:
            reason = f"no measure has {ENOUGH} pairs"
    return Verdict(name, outcome, f"{name}: {outcome}: {'; '.join([reason, *notes])}.", tuple(losses))
