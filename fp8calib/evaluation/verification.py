"""Everything that `verify` found: the content of report.json, which docs/report.md explains."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from fp8calib.evaluation.attention_errors import LayerError
from fp8calib.evaluation.gates import GateResult
from fp8calib.evaluation.generation import GenerationCheck
from fp8calib.evaluation.needle import NeedleTest
from fp8calib.evaluation.summary import CalibrationEffect, NoiseFloor, VariantResult
from fp8calib.evaluation.tasks import TaskResult

SCHEMA = 1


@dataclass(frozen=True)
class Verification:
    """Everything that `verify` measured and judged.

    `layer_errors` holds, by variant, the error of each layer's attention, for gated variants that
    failed. `sensitivity`: what the checkpoint records of a search for skip layers. `partial`: the
    run was interrupted, and the numbers are over what it had measured.
    """

    model: str
    engine: str
    against: str | None
    dataset: dict[str, Any]
    skip_layers: list[str]
    skip_layers_recorded: bool
    reference: str
    variants: list[VariantResult]
    noise_floor: NoiseFloor | None
    effect: CalibrationEffect | None
    gates: list[GateResult]
    generation: GenerationCheck | None
    needle: NeedleTest | None
    tasks: list[TaskResult]
    layers: list[dict[str, Any]]
    layer_errors: dict[str, list[LayerError]]
    sensitivity: dict[str, Any] | None
    warnings: list[str]
    versions: dict[str, str]
    device: str
    dtype: str
    partial: bool = False
    command: str | None = field(default=None, compare=False)
    date: str = field(default="", compare=False)
    seconds: float = field(default=0.0, compare=False)

    @property
    def failed(self) -> list[GateResult]:
        return [gate for gate in self.gates if not gate.passed]

    @property
    def ok(self) -> bool:
        """Whether every gate passed; a run that was interrupted proves nothing."""
        return not self.failed and not self.partial

    def variant(self, key: str) -> VariantResult:
        return next(variant for variant in self.variants if variant.key == key)

    def to_dict(self) -> dict[str, Any]:
        content = {"schema": SCHEMA, "ok": self.ok} | asdict(self)
        for entry, gate in zip(content["gates"], self.gates, strict=True):
            entry |= {"passed": gate.passed, "conclusive": gate.conclusive}
        return content
