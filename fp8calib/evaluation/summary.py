"""From the metrics of tokens to numbers with intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from fp8calib.evaluation.bootstrap import Estimate, Resampled
from fp8calib.evaluation.metrics import METRICS, NOISE, TokenTable
from fp8calib.evaluation.variants import Variant
from fp8calib.layers import LayerSpec

# Rounding does not teach a model anything: a perplexity this much better has another cause, such as
# attention that looks ahead.
_SUSPICIOUS_GAIN = 0.02
ENOUGH_DOCUMENTS = 8  # for an interval that means something
_FIRST_EDGE, _EDGE_FACTOR = 1024, 4
_TAIL = 0.1
_CONTEXT = 15  # tokens shown before the worst one

Statistic = Callable[[Mapping[Any, Any]], Any]


@dataclass(frozen=True)
class WorstToken:
    """The predicted token at which KL(native || variant) is largest: `position` counts in document
    `document`, both from 0; `token` is the text to predict after `text_before`."""

    kl: float
    document: int
    position: int
    text_before: str
    token: str


@dataclass(frozen=True)
class PositionKL:
    """Mean KL over the tokens predicted at positions `start` up to and without `end`."""

    start: int
    end: int
    tokens: int
    kl: Estimate


@dataclass(frozen=True)
class Divergence:
    """How far predictions are from native's, over all predicted tokens.

    ppl_increase: relative to native's perplexity; kl: mean KL(native || this) per token, nats;
    reverse_kl: the other way round; top1, top5: share of tokens at which native's most likely token
    is this one's, or among its five; worst_decile_kl: mean KL over the tenth of the tokens with
    the largest.
    """

    perplexity: float
    ppl_increase: Estimate
    kl: Estimate
    reverse_kl: Estimate
    top1: Estimate
    top5: Estimate
    worst_decile_kl: Estimate
    kl_by_position: list[PositionKL]


@dataclass(frozen=True)
class NoiseFloor(Divergence):
    """Native against itself, `how`: what the dtype's own rounding does."""

    how: str


@dataclass(frozen=True)
class VariantResult(Divergence):
    """One cache format against native.

    fp8_layers: indices of the layers with FP8 pages; kv_bytes_per_token: K and V of all layers.
    kl_above_noise: mean KL less that of the noise floor, None without one; within_noise: whether
    that difference may be zero or less, None where there is no interval.
    """

    key: str
    title: str
    kv_cache: str
    attention: str
    gated: bool
    fp8_layers: list[int]
    kv_bytes_per_token: int
    kl_above_noise: Estimate | None
    within_noise: bool | None
    worst: WorstToken


@dataclass(frozen=True)
class CalibrationEffect:
    """The checkpoint's scales against scale 1.0, everything else equal.

    kl_difference: of mean KL; below zero, calibration brings the cache closer to native.
    ppl_difference: of perplexity, relative to that at scale 1.0.
    """

    kl_scale_1: float
    kl_calibrated: float
    kl_difference: Estimate
    ppl_difference: Estimate

    def sentence(self) -> str:
        kl, ppl = self.kl_difference, self.ppl_difference
        if kl.low is None or kl.high is None or ppl.low is None or ppl.high is None:
            verdict = "One document cannot show whether calibration makes a difference"
            return (
                f"{verdict}: mean KL {self.kl_scale_1:.4g} at scale 1.0, "
                f"{self.kl_calibrated:.4g} calibrated."
            )
        if kl.high < 0:
            verdict = "Calibration brings the cache closer to native than scale 1.0"
        elif kl.low > 0:
            verdict = "The calibrated scales are further from native than scale 1.0"
        else:
            verdict = "Calibration makes no significant difference to scale 1.0"
        return (
            f"{verdict} on this text: mean KL {self.kl_calibrated:.4g} against "
            f"{self.kl_scale_1:.4g}, by {kl.value:+.2g} ({kl.low:+.2g} to {kl.high:+.2g}); "
            f"perplexity by {ppl.value:+.2%} ({ppl.low:+.2%} to {ppl.high:+.2%})."
        )


class Summary:
    """Point estimates and paired intervals of variants against the reference, and of the noise
    floor where it was measured.

    Args:
        tables: by key, the metrics of a variant, all over the same tokens.
        reference: the key of native.
    """

    def __init__(self, tables: Mapping[str, TokenTable], reference: str) -> None:
        self.reference = reference
        common = min(map(len, tables.values()))  # an interrupt may leave some with more
        self.columns = {
            key: {name: values[:common] for name, values in table.columns().items()}
            for key, table in tables.items()
        }
        native = self.columns[reference]
        _, document = np.unique(native["document"], return_inverse=True)
        self.documents = int(document.max()) + 1

        def total(values: np.ndarray) -> np.ndarray:
            return np.bincount(document, weights=values, minlength=self.documents)

        self._buckets = _buckets(native["position"])
        self._cut: dict[str, float] = {}
        sums: dict[Any, np.ndarray] = {"tokens": total(np.ones(len(document)))}
        for edges, inside in self._buckets.items():
            sums["tokens", edges] = total(inside)
        for key, columns in self.columns.items():
            sums |= {(key, name): total(columns[name]) for name in METRICS}
            self._cut[key] = cut = float(np.quantile(columns["kl"], 1 - _TAIL))
            sums[key, "tail"] = total(np.maximum(columns["kl"] - cut, 0))
            for edges, inside in self._buckets.items():
                sums[key, edges] = total(columns["kl"] * inside)
        self.totals = Resampled(sums)

    def estimate(self, statistic: Statistic) -> Estimate:
        return self.totals.estimate(statistic)

    def divergence(self, key: str) -> dict[str, Any]:
        """The fields of a Divergence."""
        nll = self.columns[key]["nll"]
        return {
            "perplexity": float(np.exp(nll.mean())),
            "ppl_increase": self.estimate(ppl_increase(self.reference, key)),
            **{
                name: self.estimate(_mean(key, name))
                for name in ("kl", "reverse_kl", "top1", "top5")
            },
            "worst_decile_kl": self.estimate(_tail_mean(key, self._cut[key])),
            "kl_by_position": [
                PositionKL(*edges, int(inside.sum()), self._in_bucket(key, edges))
                for edges, inside in self._buckets.items()
            ],
        }

    def _in_bucket(self, key: str, edges: tuple[int, int]) -> Estimate:
        found = self.estimate(lambda t: t[key, edges] / t["tokens", edges])
        native = self.columns[self.reference]
        inside = native["document"][self._buckets[edges] > 0]
        return found if len(np.unique(inside)) > 1 else replace(found, low=None, high=None)

    def variant(
        self, variant: Variant, layers: Sequence[LayerSpec], worst: WorstToken
    ) -> VariantResult:
        above = within = None
        if NOISE in self.columns and variant.key != self.reference:
            above = self.estimate(kl_difference(NOISE, variant.key))
            within = None if above.low is None else above.low <= 0
        return VariantResult(
            **self.divergence(variant.key),
            key=variant.key,
            title=variant.title,
            attention=variant.kv_format.arithmetic,
            gated=variant.gated,
            kl_above_noise=above,
            within_noise=within,
            worst=worst,
            **variant.facts(layers),
        )

    def noise_floor(self, how: str) -> NoiseFloor | None:
        """None where it was not measured."""
        return NoiseFloor(**self.divergence(NOISE), how=how) if NOISE in self.columns else None

    def worst(
        self, key: str, rows: Sequence[Sequence[int]], decode: Callable[[Sequence[int]], str]
    ) -> WorstToken:
        columns = self.columns[key]
        at = int(columns["kl"].argmax())
        document, position = int(columns["document"][at]), int(columns["position"][at])
        row = rows[document]
        return WorstToken(
            float(columns["kl"][at]),
            document,
            position,
            decode(row[max(0, position - _CONTEXT) : position + 1]),
            decode([row[position + 1]]),
        )

    def effect(self, variants: Sequence[Variant]) -> CalibrationEffect | None:
        """Of the first two variants that differ in their scales alone, 1.0 and others."""
        for one, other in product(variants, variants):
            ours = other.kv_format
            same = ours.scales is not None and replace(ours, scales=None) == one.kv_format
            if same and one.model == other.model:
                return CalibrationEffect(
                    float(self.columns[one.key]["kl"].mean()),
                    float(self.columns[other.key]["kl"].mean()),
                    self.estimate(kl_difference(one.key, other.key)),
                    self.estimate(ppl_increase(one.key, other.key)),
                )
        return None


def _buckets(position: np.ndarray) -> dict[tuple[int, int], np.ndarray]:
    """By (start, end): which tokens lie there, of [0, 1024), [1024, 4096) and so on."""
    found, start, end = {}, 0, _FIRST_EDGE
    while start <= position.max():
        inside = (position >= start) & (position < end)
        if inside.any():
            found[start, end] = inside.astype(float)
        start, end = end, end * _EDGE_FACTOR
    return found


def _mean(key: str, name: str) -> Statistic:
    return lambda t: t[key, name] / t["tokens"]


def ppl_increase(base: str, key: str) -> Statistic:
    return lambda t: np.expm1((t[key, "nll"] - t[base, "nll"]) / t["tokens"])


def kl_difference(base: str, key: str) -> Statistic:
    return lambda t: (t[key, "kl"] - t[base, "kl"]) / t["tokens"]


def _tail_mean(key: str, cut: float) -> Statistic:
    """Mean of the largest tenth, as `cut` + mean excess over it / 0.1: as the cut is the quantile
    that minimises this, resampling it along would change the interval in second order only.
    Rockafellar and Uryasev, Optimization of conditional value-at-risk (2000), theorem 1."""
    return lambda t: cut + t[key, "tail"] / t["tokens"] / _TAIL


def suspicious(results: Sequence[VariantResult], documents: int) -> list[str]:
    """A line for each variant whose perplexity is better than native's beyond chance."""
    if documents < ENOUGH_DOCUMENTS:
        return []
    return [
        f"{result.title}: perplexity is {-result.ppl_increase.value:.1%} better than native's, "
        "which rounding cannot do: suspect attention that looks ahead, or damaged text"
        for result in results
        if result.ppl_increase.high is not None and result.ppl_increase.high < -_SUSPICIOUS_GAIN
    ]
