"""What `calibrate` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8calib.calibration import record
from fp8calib.calibration.report import KindReport
from fp8calib.checkpoint import serve_command
from fp8calib.data import TokenData
from fp8calib.layers import LayerSpec
from fp8calib.recipe import Recipe
from fp8calib.scales import ScaleSet


@dataclass(frozen=True)
class CalibrationResult:
    """What a calibration made. `output` is None after a dry run, and so is everything that only a
    forward pass can tell. `reasons` say what `auto` chose and why."""

    model: str
    output: Path | None
    recipe: Recipe
    data: TokenData
    skip_layers: list[str] = field(default_factory=list)
    layers: list[LayerSpec] = field(default_factory=list)
    scales: ScaleSet | None = None
    reports: list[KindReport] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    kv_cache_dtype: str = "auto"
    reasons: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def serve(self) -> str | None:
        if self.output is None:
            return None
        return serve_command(str(self.output), self.skip_layers, self.kv_cache_dtype)

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "output": str(self.output) if self.output else None,
            "recipe": self.recipe.model_dump(mode="json", exclude_none=True),
            "dataset": record.describe_data(self.data),
            "skip_layers": self.skip_layers,
            "layers": [report.to_dict() for report in self.reports],
            "warnings": self.warnings,
            "reasons": self.reasons,
            "seconds": round(self.seconds, 2),
            "serve": self.serve,
        }
