"""Warnings that calibration gives its user, each with the numbers behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from fp8calib.calibration.record import AllRanges
from fp8calib.calibration.statistics import SINK_POSITIONS, Ranges
from fp8calib.scales import E4M3_MAX, Kind, ScaleSet

_FEW_TOKENS = 256  # of a vocabulary that has a hundred times as many
_GROWTH = 1.05  # of a maximum over the last tenth of the texts
_SINK = 2.0  # times as large in the first positions as anywhere after
_ONE = np.ones(1, dtype=np.float32)
_SMALLEST_NORMAL = np.float32(2.0**-6)  # of e4m3
_LISTED = 4


def data_findings(rows: Sequence[Sequence[int]], vocabulary: int) -> Iterator[str]:
    """What is wrong with the tokens themselves."""
    counts = Counter(token for row in rows for token in row)
    total = counts.total()
    token, most = counts.most_common(1)[0]
    few = min(_FEW_TOKENS, vocabulary // 100 + 1)
    if len(counts) < few or most > total / 2:
        yield (
            f"too few distinct tokens: {len(counts)} among {total:,}, token {token} is "
            f"{100 * most / total:.0f} % of them; ranges of other text will differ"
        )


def range_findings(scales: ScaleSet, ranges: AllRanges) -> Iterator[str]:
    """What is remarkable in the ranges, and in how `scales` hold them."""
    slots = [
        (index, kind, found)
        for index, kinds in sorted(ranges.items())
        for kind, found in kinds.items()
    ]
    yield from _growing(slots)
    yield from _sinks(slots)
    over = [(found.amax.max(), index, kind, found) for index, kind, found in slots]
    over = [entry for entry in over if entry[0] > E4M3_MAX]
    if over:
        over.sort(key=lambda entry: -entry[0])
        yield "beyond 448, so clipped at scale 1.0: " + _list(
            f"layer {index} {kind} up to {amax:.4g} ({100 * found.clipped(_ONE):.2g} %)"
            for amax, index, kind, found in over
        )
    small = [
        (found.below(_SMALLEST_NORMAL, getattr(scales.layers[index], kind)), index, kind)
        for index, kind, found in slots
    ]
    small = sorted((entry for entry in small if entry[0] > 0.5), reverse=True)
    if small:
        yield (
            "the median |x| is subnormal at the chosen scale, so most values keep fewer than 3 "
            "mantissa bits: "
            + _list(f"layer {index} {kind}, {100 * share:.0f} %" for share, index, kind in small)
        )


def _growing(slots: Sequence[tuple[int, Kind, Ranges]]) -> Iterator[str]:
    """Maxima that the last tenth of the texts, in the order drawn, still raised."""
    grown = []
    for index, kind, found in slots:
        curve = growth_curve(found)
        if len(curve) == 10 and curve[8] * _GROWTH < 1:
            grown.append((curve[8], index, kind, curve))
    # One maximum in ten lies in the last tenth by chance; more than that say: not enough text.
    if len(grown) > len(slots) / 10:
        grown.sort(key=lambda entry: entry[:3])
        _, index, kind, curve = grown[0]
        yield (
            f"{len(grown)} of {len(slots)} maxima grew by more than {100 * (_GROWTH - 1):.0f} % in "
            f"the last tenth of the texts; most in layer {index} {kind}, where after each tenth "
            f"it was {' '.join(f'{100 * share:.0f}' for share in curve)} % of the final one: "
            "use more --samples"
        )


def growth_curve(ranges: Ranges) -> list[float]:
    """The maximum after each tenth of the texts as a share of the final one, in the order in which
    the texts were drawn; empty for fewer than ten texts."""
    texts = ranges.text_amax
    if len(texts) < 10 or texts.max() <= 0:
        return []
    ends = [round(len(texts) * tenth / 10) for tenth in range(1, 11)]
    return [float(max(texts[:end].max(), 0) / texts.max()) for end in ends]


def _sinks(slots: Sequence[tuple[int, Kind, Ranges]]) -> Iterator[str]:
    owned = []
    for index, kind, found in slots:
        amax, late = float(found.amax.max()), float(found.late_amax.max())
        if late > 0 and amax > _SINK * late:
            owned.append((amax / late, index, kind, amax, late))
    if owned:
        owned.sort(reverse=True)
        yield (
            f"the first {SINK_POSITIONS} positions (attention sinks) own the maximum of "
            f"{len(owned)} of {len(slots)}: "
            + _list(
                f"layer {index} {kind} {amax:.4g}, {late:.4g} without them"
                for _, index, kind, amax, late in owned
            )
        )


def _list(entries: Iterable[str]) -> str:
    entries = list(entries)
    more = f" and {len(entries) - _LISTED} more" if len(entries) > _LISTED else ""
    return "; ".join(entries[:_LISTED]) + more
