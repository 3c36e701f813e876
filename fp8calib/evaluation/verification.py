"""What `verify` found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fp8calib.evaluation.attention_errors import LayerError
from fp8calib.evaluation.bootstrap import Estimate, Resampled
from fp8calib.evaluation.gates import GateResult
from fp8calib.evaluation.metrics import Tally, WorstToken
from fp8calib.evaluation.variants import Variant

# Rounding does not teach a model anything: a perplexity this much better has another cause, such as
# attention that looks ahead.
_SUSPICIOUS_GAIN = 0.02
_ENOUGH_DOCUMENTS = 8  # for an interval that means something


@dataclass(frozen=True)
class VariantResult:
    """One cache format against native, over all predicted tokens.

    ppl_increase: relative to native's perplexity; kl: mean KL(native || this) per token, nats;
    top1: share of tokens whose most likely prediction is native's; worst: the largest single KL.
    """

    key: str
    title: str
    kv_cache: str
    attention: str
    gated: bool
    perplexity: float
    ppl_increase: Estimate
    kl: Estimate
    top1: Estimate
    worst: WorstToken


@dataclass(frozen=True)
class CalibrationEffect:
    """The checkpoint's scales against scale 1.0, both with accurate attention.

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


@dataclass(frozen=True)
class Verification:
    """Everything that `verify` measured and judged.

    `variants` begins with native. `layer_errors` holds, by variant, the error of each layer's
    attention, for gated variants that failed. `worst_text` is what stands at the worst token of
    each variant: what came before, and the token to predict.
    """

    model: str
    against: str | None
    dataset: dict[str, Any]
    skip_layers: list[str]
    skip_layers_recorded: bool
    variants: list[VariantResult]
    effect: CalibrationEffect | None
    gates: list[GateResult]
    layer_errors: dict[str, list[LayerError]]
    worst_text: dict[str, tuple[str, str]]
    warnings: list[str]
    versions: dict[str, str]
    device: str
    dtype: str
    seconds: float = field(compare=False)

    @property
    def failed(self) -> list[GateResult]:
        return [gate for gate in self.gates if not gate.passed]

    @property
    def ok(self) -> bool:
        return not self.failed

    def variant(self, key: str) -> VariantResult:
        return next(variant for variant in self.variants if variant.key == key)

    def to_dict(self) -> dict[str, Any]:
        content = {"ok": self.ok} | asdict(self)
        for entry, gate in zip(content["gates"], self.gates, strict=True):
            entry |= {"passed": gate.passed, "conclusive": gate.conclusive}
        for entry in content["variants"]:
            before, token = self.worst_text[entry["key"]]
            entry["worst"] |= {"text_before": before, "token": token}
        del content["worst_text"]
        return content


def summarise(
    variants: Sequence[Variant], descriptions: Sequence[str], tallies: Sequence[Tally]
) -> tuple[list[VariantResult], CalibrationEffect | None]:
    """Point estimates and paired intervals of every variant against the first."""
    sums: dict[Any, np.ndarray] = {"tokens": tallies[0].tokens}
    for variant, tally in zip(variants, tallies, strict=True):
        sums |= {(variant.key, name): getattr(tally, name) for name in ("nll", "kl", "agrees")}
    totals = Resampled(sums)
    results = []
    for variant, text, tally in zip(variants, descriptions, tallies, strict=True):
        key = variant.key
        assert tally.worst is not None
        results.append(
            VariantResult(
                key=key,
                title=variant.title,
                kv_cache=text,
                attention=variant.kv_format.arithmetic,
                gated=variant.gated,
                perplexity=float(np.exp(tally.nll.sum() / tally.tokens.sum())),
                ppl_increase=totals.estimate(_ppl_increase(variants[0].key, key)),
                kl=totals.estimate(_mean(key, "kl")),
                top1=totals.estimate(_mean(key, "agrees")),
                worst=tally.worst,
            )
        )
    return results, _effect(results, totals)


def _mean(key: str, name: str) -> Any:
    return lambda t: t[key, name] / t["tokens"]


def _ppl_increase(native: str, key: str) -> Any:
    return lambda t: np.expm1((t[key, "nll"] - t[native, "nll"]) / t["tokens"])


def _effect(results: Sequence[VariantResult], totals: Resampled) -> CalibrationEffect | None:
    kl = {result.key: result.kl.value for result in results}
    if not {"scale_1", "calibrated"} <= kl.keys():
        return None
    difference = totals.estimate(
        lambda t: (t["calibrated", "kl"] - t["scale_1", "kl"]) / t["tokens"]
    )
    return CalibrationEffect(
        kl["scale_1"],
        kl["calibrated"],
        difference,
        totals.estimate(_ppl_increase("scale_1", "calibrated")),
    )


def suspicious(results: Sequence[VariantResult], documents: int) -> list[str]:
    """A line for each variant whose perplexity is better than native's beyond chance."""
    if documents < _ENOUGH_DOCUMENTS:
        return []
    return [
        f"{result.title}: perplexity is {-result.ppl_increase.value:.1%} better than native's, "
        "which rounding cannot do: suspect attention that looks ahead, or damaged text"
        for result in results
        if result.ppl_increase.high is not None and result.ppl_increase.high < -_SUSPICIOUS_GAIN
    ]
