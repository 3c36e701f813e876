"""Limits on what an FP8 cache may cost, and whether a measurement keeps to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fp8calib.evaluation.bootstrap import Estimate
from fp8calib.recipe import Gates


@dataclass(frozen=True)
class GateResult:
    """One limit on one variant. The point estimate decides; `conclusive` is False where the
    interval lies on both sides of the limit (or where there is none)."""

    gate: str
    variant: str
    limit: float
    measured: Estimate

    @property
    def passed(self) -> bool:
        value = self.measured.value
        return value >= self.limit if self.gate.startswith("min_") else value <= self.limit

    @property
    def conclusive(self) -> bool:
        return not self.measured.straddles(self.limit)


def judge(
    gates: Gates, variant: str, ppl_increase: Estimate, kl: Estimate, top1: Estimate
) -> Iterator[GateResult]:
    """The result of every gate that has a limit."""
    for gate, measured in (
        ("max_ppl_increase", ppl_increase),
        ("max_kl", kl),
        ("min_top1", top1),
    ):
        limit = getattr(gates, gate)
        if limit is not None:
            yield GateResult(gate, variant, limit, measured)
