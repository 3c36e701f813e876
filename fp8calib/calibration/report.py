"""What calibration saw, in numbers a person can judge: ranges, clipping and flushing to zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fp8calib.calibration.statistics import Ranges
from fp8calib.scales import Kind, ScaleSet

_ONE = np.ones(1, dtype=np.float32)


@dataclass(frozen=True)
class KindReport:
    """One layer's q, k or v. Shares are of all values, 0 to 1; `binades` is log2 of the largest
    |x| over the median one: how much of e4m3's range (18 binades with subnormals) is in use."""

    layer: int
    kind: Kind
    amax: float
    scale_min: float
    scale_max: float
    binades: float
    clipped_at_one: float
    flushed_at_one: float
    clipped: float
    flushed: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def kind_reports(scales: ScaleSet, ranges: Mapping[int, Mapping[Kind, Ranges]]) -> list[KindReport]:
    """Reports of every layer and kind, in the order of layers, then q, k, v."""
    return [
        _report(index, kind, scale, ranges[index][kind])
        for index, layer in sorted(scales.layers.items())
        for kind, scale in layer.items()
    ]


def _report(layer: int, kind: Kind, scale: np.ndarray, ranges: Ranges) -> KindReport:
    amax = float(ranges.amax.max())
    median = float(ranges.pooled().percentile(50)[0])
    return KindReport(
        layer=layer,
        kind=kind,
        amax=amax,
        scale_min=float(scale.min()),
        scale_max=float(scale.max()),
        binades=float(np.log2(amax / median)) if amax and median else 0.0,
        clipped_at_one=ranges.clipped(_ONE),
        flushed_at_one=ranges.flushed(_ONE),
        clipped=ranges.clipped(scale),
        flushed=ranges.flushed(scale),
    )
