"""`rescale`: other scales from what a calibration saw, without running the model again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8calib.calibration import record
from fp8calib.calibration.findings import range_findings
from fp8calib.calibration.observers import make_scales
from fp8calib.calibration.report import KindReport, kind_reports
from fp8calib.checkpoint import (
    check_output,
    check_source,
    needed_kv_cache_dtype,
    serve_command,
    write_checkpoint,
)
from fp8calib.checkpoint.paths import safe_file
from fp8calib.errors import CheckpointError, UserError
from fp8calib.layers import resolve_skip_layers
from fp8calib.recipe import Recipe, parse_content
from fp8calib.scales import ScaleSet


@dataclass(frozen=True)
class RescaleResult:
    checkpoint: str
    output: Path
    recipe: Recipe
    scales: ScaleSet
    reports: list[KindReport]
    warnings: list[str]
    kv_cache_dtype: str

    @property
    def serve(self) -> str:
        skip = self.recipe.calibration.kv_cache_dtype_skip_layers
        return serve_command(str(self.output), skip, self.kv_cache_dtype)

    def to_dict(self) -> dict[str, Any]:
        return {
            "checkpoint": self.checkpoint,
            "output": str(self.output),
            "recipe": self.recipe.model_dump(mode="json", exclude_none=True),
            "layers": [report.to_dict() for report in self.reports],
            "warnings": self.warnings,
            "serve": self.serve,
        }


def rescale(
    checkpoint: str | Path,
    output: str | Path,
    *,
    link: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> RescaleResult:
    """Write `checkpoint`, which `calibrate` made, with other scales from the same statistics.

    Args:
        checkpoint: the folder of a calibrated checkpoint.
        output: the folder to make.
        link: hard-link the weight files instead of copying them.
        overwrite: replace an earlier checkpoint at `output`.
        options: what to do otherwise than before: ``observer``, ``margin``, ``strategy``, ``query``
            or ``kv_cache_dtype_skip_layers``.

    Raises:
        UserError: the checkpoint was not made by fp8calib, or has no queries where they are asked
            for; nothing has been written then.
    """
    folder, output = Path(checkpoint), Path(output)
    check_output(output, overwrite, folder)
    source = check_source(folder, replace_scales=True)
    dtype = needed_kv_cache_dtype(source.config)
    sidecar = source.sidecar
    if sidecar is None or "recipe" not in sidecar:
        raise CheckpointError(
            f"{folder} was not calibrated by fp8calib: it has no fp8calib.json with a recipe"
        )
    recipe = parse_content(sidecar["recipe"], f"{folder}/fp8calib.json").with_options(**options)
    layers = record.layers_of(sidecar, folder)
    skip, _ = resolve_skip_layers(recipe.calibration.kv_cache_dtype_skip_layers, layers)
    recipe = recipe.with_options(kv_cache_dtype_skip_layers=skip)
    histograms = safe_file(folder, record.HISTOGRAMS)
    ranges = record.unpack(histograms)
    record.check_ranges(layers, ranges, histograms)
    if recipe.calibration.query and not all("q" in kinds for kinds in ranges.values()):
        raise UserError(f"{folder} was calibrated without queries: pass --no-query")
    if not recipe.calibration.query:
        ranges = {i: {k: kinds[k] for k in kinds if k != "q"} for i, kinds in ranges.items()}
    scales = make_scales(layers, ranges, recipe.calibration)
    warnings = list(range_findings(scales, ranges))
    new = record.sidecar(
        str(sidecar.get("model")),
        recipe,
        dataset if isinstance(dataset := sidecar.get("dataset"), dict) else {},
        layers,
        ranges,
        dtype=sidecar.get("dtype"),
        warnings=warnings,
        rescaled=True,
    )
    write_checkpoint(
        folder,
        output,
        scales,
        new,
        layers=layers,
        link=link,
        overwrite=overwrite,
        replace_scales=True,
        more_files={record.HISTOGRAMS: histograms.read_bytes()},
    )
    reports = kind_reports(scales, ranges)
    return RescaleResult(str(checkpoint), output, recipe, scales, reports, warnings, dtype)
