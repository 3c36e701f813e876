"""Observers: from what a calibration saw of a layer's q, k or v to its scale.

All of them read the same statistics (statistics.py), so they do not depend on the order or the
batching of texts, and another one can be tried without running the model again:

- ``absmax``: amax / 448, nothing is clipped.
- ``percentile:P``: the P-th percentile of |x| takes the maximum's place; larger values are clipped.
- ``mse``: the scale with the least squared e4m3 rounding error, clipping included.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from fp8calib.calibration.record import AllRanges
from fp8calib.calibration.statistics import (
    BUCKETS,
    MANTISSA_BITS,
    MAX_EXPONENT,
    MIN_EXPONENT,
    Ranges,
    bucket_edges,
)
from fp8calib.errors import ModelError
from fp8calib.layers import LayerSpec
from fp8calib.recipe import Calibration, parse_observer
from fp8calib.scales import (
    E4M3_MAX,
    KINDS,
    Kind,
    LayerScales,
    ScaleSet,
    Strategy,
    amax_problems,
    problems,
    require,
    scale_from_amax,
)

_STEPS = 32  # candidate scales of the mse search in each binade
_DOWN, _UP = 8, 1  # binades below and above amax/448 that are searched
# Binades of the scales that a maximum within the histogram may lead to; 448 is 2^8.8.
_SMALLEST, _LARGEST = MIN_EXPONENT - 9 - _DOWN, MAX_EXPONENT - 9 + _UP
_POINTS = 4  # values that stand for those of a bucket


def observed_scale(
    observer: str, ranges: Ranges, strategy: Strategy, margin: float = 1.0
) -> np.ndarray:
    """The scale of what `ranges` saw, float32 [1] for strategy tensor, else [heads], times
    `margin`; 1.0 for a head that holds nothing but zeros.

    `observer` is a recipe's: absmax, percentile:P or mse."""
    name, percentile = parse_observer(observer)
    if strategy == "tensor":
        ranges = ranges.pooled()
    limit = ranges.amax
    if percentile is not None:
        limit = ranges.percentile(percentile)
        # A percentile may lie among zeros where the maximum does not.
        limit = np.where(limit > bucket_edges()[1], limit, ranges.amax)
    elif name == "mse":
        limit = _least_error(ranges) * E4M3_MAX
    return scale_from_amax(limit, margin)


def make_scales(layers: Sequence[LayerSpec], ranges: AllRanges, asked: Calibration) -> ScaleSet:
    """Scales of every layer as `asked`, past the gate that nothing unfit passes.

    Raises:
        ModelError: a layer that was not observed; all such layers are named.
        ScaleError: scales that do not fit what was seen.
    """
    unseen = [layer for layer in layers if layer.index not in ranges]
    if unseen:
        names = ", ".join(f"{layer.index} ({layer.name})" for layer in unseen)
        raise ModelError(f"no K and V were observed in layer {names}; nothing was written")
    kinds: tuple[Kind, ...] = KINDS if asked.query else ("k", "v")
    scales = ScaleSet(
        asked.strategy,
        {
            layer.index: LayerScales(
                layer.name,
                **{
                    kind: observed_scale(asked.observer, found, asked.strategy, asked.margin)
                    for kind, found in ranges[layer.index].items()
                    if kind in kinds
                },
            )
            for layer in layers
        },
    )
    amax = {
        index: {kind: found.amax for kind, found in kinds.items()}
        for index, kinds in ranges.items()
    }
    may_clip = asked.observer != "absmax"
    found = problems(scales, layers, query=asked.query)
    require(
        found or amax_problems(scales, amax, asked.margin, may_clip),
        "calibration gave unfit scales",
    )
    return scales


def share_ranges(layers: Sequence[LayerSpec], ranges: AllRanges) -> dict[int, dict[Kind, Ranges]]:
    """`ranges` in which a layer that reads another's cache has the K and V of that other."""
    shared = {index: dict(kinds) for index, kinds in ranges.items()}
    for layer in layers:
        if layer.kv_source is not None and layer.index in shared:
            source = ranges[layer.kv_source]
            shared[layer.index] |= {"k": source["k"], "v": source["v"]}
    return shared


def _least_error(ranges: Ranges) -> np.ndarray:
    """Scales with the least sum of squared errors over the histogram, float32 [heads]; the largest
    among equals. Zero where nothing but zeros was seen."""
    return np.array(
        [
            _search(histogram, amax / E4M3_MAX) if amax > 0 else 0
            for histogram, amax in zip(ranges.histogram, ranges.amax, strict=True)
        ],
        dtype=np.float32,
    )


def _search(histogram: np.ndarray, full: np.float32) -> float:
    """The best scale for one head's `histogram` [BUCKETS], in steps of 2^(1/32) from 2^-8 to 2
    times `full`, its amax / 448.

    A scale 2^k times larger makes the errors of values 2^k times larger 4^k times larger, so the
    table of one binade of scales serves for all."""
    table, first = _errors()
    counts = histogram.astype(np.float64)
    counts[0] = 0  # zero, and what no scale in reach tells from it
    best, error = float(full), np.inf
    binade = int(np.floor(np.log2(full)))
    if not counts.any() or not _SMALLEST + _DOWN <= binade <= _LARGEST - _UP:
        return best
    for k in range(binade + _UP, binade - _DOWN - 1, -1):
        start = (MIN_EXPONENT - k - first) << MANTISSA_BITS
        errors = 4.0**k * (table[:, start : start + BUCKETS] @ counts)
        scales = 2.0**k * _binade()
        errors[(scales > full * 2**_UP) | (scales < full / 2**_DOWN)] = np.inf
        place = len(errors) - 1 - int(errors[::-1].argmin())
        if errors[place] < error:
            best, error = float(scales[place]), errors[place]
    return best


def _binade() -> np.ndarray:
    return 2.0 ** (np.arange(_STEPS) / _STEPS)


@cache
def _errors() -> tuple[np.ndarray, int]:
    """Mean squared rounding error of a bucket's values at the scales of the binade [1, 2), float64
    [scales, buckets], and the exponent of the first bucket. There are buckets for every shift of
    the histogram by a power of two that a scale may need."""
    first, last = MIN_EXPONENT - _LARGEST, MAX_EXPONENT - _SMALLEST
    width = 1 << MANTISSA_BITS
    inside = (np.arange(width)[:, None] + (np.arange(_POINTS) + 0.5) / _POINTS) / width
    mantissa = 1 + inside.reshape(-1)
    values = (2.0 ** np.arange(first, last)[:, None] * mantissa).reshape(-1, _POINTS)
    errors = [
        ((round_e4m3(values / scale) * scale - values) ** 2).mean(axis=1) for scale in _binade()
    ]
    return np.stack(errors), first


def round_e4m3(x: np.ndarray) -> np.ndarray:
    """float64 values >= 0 rounded to the nearest float8_e4m3fn, ties to even, saturating at 448:
    steps of 2^-3 of the binade, and of 2^-9 below the smallest normal number 2^-6 (OCP FP8)."""
    exponent = np.clip(np.frexp(x)[1] - 1, -6, None)
    step = np.ldexp(1.0, exponent - 3)
    return np.minimum(np.rint(x / step) * step, float(E4M3_MAX))
