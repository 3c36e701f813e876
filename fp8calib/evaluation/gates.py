"""Limits on what an FP8 cache may cost, and whether a measurement keeps to them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8calib.evaluation.bootstrap import Estimate
from fp8calib.evaluation.labels import GATES
from fp8calib.recipe import Gates

if TYPE_CHECKING:
    from fp8calib.evaluation.generation import GenerationCheck
    from fp8calib.evaluation.needle import NeedleTest
    from fp8calib.evaluation.summary import VariantResult
    from fp8calib.evaluation.tasks import TaskResult

_NOTHING = Estimate(float("nan"), None, None)


@dataclass(frozen=True)
class GateResult:
    """One limit on one variant, and for `max_task_drop` on one `task`. The point estimate decides;
    `conclusive` is False where the interval lies on both sides of the limit (or where there is
    none). A measurement that is not a number passes no gate."""

    gate: str
    variant: str
    limit: float
    measured: Estimate
    task: str | None = None

    @property
    def passed(self) -> bool:
        value = self.measured.value
        return value >= self.limit if self.gate.startswith("min_") else value <= self.limit

    @property
    def conclusive(self) -> bool:
        return not self.measured.straddles(self.limit)

    def sentence(self) -> str:
        """``mean KL 0.0123, at most 0.02``"""
        what, bound, form = GATES[self.gate]
        of = f" on {self.task}" if self.task else ""
        value = form.format(self.measured.value)
        if math.isnan(self.measured.value):
            value = "not measurable (native finds none)"
        return f"{what}{of} {value}, {bound} {form.format(self.limit)}"


def judge(
    gates: Gates, variant: str, measured: Mapping[str, Estimate], task: str | None = None
) -> Iterator[GateResult]:
    """The result of every gate of `measured` that has a limit."""
    for gate, estimate in measured.items():
        limit = getattr(gates, gate)
        if limit is not None:
            yield GateResult(gate, variant, limit, estimate, task)


def judge_all(
    gates: Gates,
    results: Sequence[VariantResult],
    generation: GenerationCheck | None,
    needle: NeedleTest | None,
    tasks: Sequence[TaskResult],
) -> list[GateResult]:
    """Every gate on every gated variant, as far as it was measured."""
    repeats = {v.key: v.repeat_increase for v in generation.variants} if generation else {}
    kept = {v.key: v.kept or _NOTHING for v in needle.variants} if needle else {}
    found: list[GateResult] = []
    for result in results:
        if not result.gated:
            continue
        measured = {
            "max_ppl_increase": result.ppl_increase,
            "max_kl": result.kl,
            "min_top1": result.top1,
        }
        if result.key in repeats:
            measured["max_repeat_increase"] = repeats[result.key]
        if result.key in kept:
            measured["min_needle"] = kept[result.key]
        found += judge(gates, result.key, measured)
        for task in tasks:
            for score in task.variants:
                if score.key == result.key and score.drop is not None:
                    name = f"{task.task} {task.metric}"
                    found += judge(gates, result.key, {"max_task_drop": score.drop}, name)
    return found
