"""Paired bootstrap intervals over documents.

Documents are what is drawn at random when an evaluation is repeated: tokens of one text depend on
one another. Each resample draws as many documents as there are, with replacement, and the same ones
for every variant (paired), so that what makes a text hard cancels out of differences.
Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13: percentile intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 4000
_BLOCK = 100  # resamples drawn at a time
_SEED = 0


@dataclass(frozen=True)
class Estimate:
    """A number measured, and the ends of its 95 % interval: None with one document only."""

    value: float
    low: float | None
    high: float | None

    def straddles(self, limit: float) -> bool:
        """Whether the interval leaves open on which side of `limit` the true value is."""
        return self.low is None or self.high is None or self.low <= limit < self.high


class Resampled:
    """Totals over documents, and over `RESAMPLES` draws of as many documents.

    Args:
        sums: by key, an array [documents] of sums.
    """

    def __init__(self, sums: Mapping[Any, np.ndarray]) -> None:
        table = np.stack(list(sums.values()), axis=1)
        self.documents = len(table)
        self._total = dict(zip(sums, table.sum(0), strict=True))
        rng = np.random.default_rng(_SEED)
        each = np.full(self.documents, 1 / self.documents)
        draws = np.concatenate(
            [
                rng.multinomial(self.documents, each, size=_BLOCK) @ table
                for _ in range(RESAMPLES // _BLOCK)
            ]
        )
        self._draws = dict(zip(sums, draws.T, strict=True))

    def estimate(self, statistic: Callable[[Mapping[Hashable, Any]], Any]) -> Estimate:
        """`statistic` of the totals (numbers, or arrays of resampled ones, by key). Draws for which
        it is not defined are left out: there may be none of the few documents that it is over."""
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(statistic(self._total))
            drawn = np.asarray(statistic(self._draws)) if self.documents > 1 else np.empty(0)
        drawn = drawn[np.isfinite(drawn)]
        if drawn.size < RESAMPLES / 2:
            return Estimate(value, None, None)
        tail = 100 * (1 - CONFIDENCE) / 2
        low, high = np.percentile(drawn, [tail, 100 - tail])
        return Estimate(value, float(low), float(high))


def paired_means(
    **samples: np.ndarray,
) -> Callable[[Callable[[Mapping[Hashable, Any]], Any]], Estimate]:
    """For numbers that documents have one each: estimates of functions of their means, by name.

    >>> estimate = paired_means(a=np.array([1.0, 2.0]), b=np.array([2.0, 4.0]))
    >>> estimate(lambda mean: mean["b"] - mean["a"]).value
    1.5
    """
    totals = Resampled(samples)
    count = totals.documents
    return lambda f: totals.estimate(lambda t: f({name: t[name] / count for name in samples}))
