"""Plots of a report as inline SVG. Colours come from report.css, so that they follow the reader's
light or dark scheme; every text that goes in is escaped here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH = 420  # units; a phone shows them a little smaller, a desktop half as large again
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 30


@dataclass(frozen=True)
class Mark:
    """A value at x with its interval; low and high None where there is none."""

    x: float
    value: float
    low: float | None = None
    high: float | None = None
    title: str = ""


def heat_map(
    rows: Sequence[Sequence[float | None]],
    *,
    x_name: str,
    y_name: str,
    columns: Sequence[str],
    form: Callable[[float], str],
    logarithmic: bool = False,
    alarm: float | None = None,
    row_names: Sequence[str] | None = None,
    bounds: tuple[float, float] | None = None,
) -> str:
    """Cells [row][column], darker for larger; those above `alarm` get a frame. None leaves a gap.
    Colours run from the smallest to the largest value (from 0 if not logarithmic), or between
    `bounds`."""
    known = [x for row in rows for x in row if x is not None and math.isfinite(x)]
    if not known:
        return ""
    names = row_names or [str(number) for number in range(len(rows))]
    low, high = bounds or (min(known) if logarithmic else min(0.0, *known), max(known))
    place = _scale(known, logarithmic, low, high)
    width = (_WIDTH - _LEFT - _RIGHT) / len(columns)
    height = max(9.0, min(22.0, 170 / len(rows)))
    bottom = _TOP + height * len(rows)
    cells = []
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            if value is None:
                continue
            finite = math.isfinite(value)
            share = min(max(place(value), 0.0), 1.0) if finite else 1.0
            frame = " alarm" if alarm is not None and (not finite or value > alarm) else ""
            title = f"{x_name} {columns[x]}, {y_name} {names[y]}: {form(value)}"
            cells.append(
                f'<rect class="cell{frame}" style="--v:{100 * share:.0f}%" '
                f'x="{_LEFT + x * width:.2f}" y="{_TOP + y * height:.2f}" '
                f'width="{max(width - 0.6, 0.4):.2f}" height="{height - 0.6:.2f}">'
                f"<title>{escape(title)}</title></rect>"
            )
    labels = [
        _text(_LEFT - 5, _TOP + (y + 0.5) * height + 4, names[y], "end") for y in _few(len(rows), 8)
    ]
    labels += [
        _text(_LEFT + (x + 0.5) * width, bottom + 13, columns[x], "middle")
        for x in _few(len(columns), 10)
    ]
    labels.append(_text(_LEFT, bottom + 28, f"{x_name}s across, {y_name}s down"))
    legend = _legend(bottom + 20, form(low), form(high))
    return _svg(bottom + 36, [*cells, *labels, legend], f"{y_name} by {x_name}")


def _legend(y: float, low: str, high: str) -> str:
    right, width, steps = _WIDTH - _RIGHT, 80, 16
    start = right - width - 8 * len(high) * 0.8
    boxes = "".join(
        f'<rect class="cell" style="--v:{100 * i / (steps - 1):.0f}%" '
        f'x="{start + i * width / steps:.1f}" y="{y}" '
        f'width="{width / steps + 0.3:.1f}" height="9"/>'
        for i in range(steps)
    )
    ends = _text(start - 4, y + 9, low, "end") + _text(start + width + 4, y + 9, high)
    return boxes + ends


def _scale(
    known: Sequence[float], logarithmic: bool, low: float, high: float
) -> Callable[[float], float]:
    """Values to 0..1."""
    if logarithmic and high > 0:
        smallest = min(x for x in known if x > 0)
        low, high = math.log(max(low, smallest)), math.log(high)
        return lambda x: (math.log(max(x, smallest)) - low) / (high - low) if high > low else 1.0
    return lambda x: (x - low) / (high - low) if high > low else 0.0


def line_plot(
    series: Sequence[tuple[str, Sequence[Mark]]],
    *,
    x_name: str,
    y_name: str,
    x_labels: Sequence[tuple[float, str]],
    form: Callable[[float], str],
    limit: float | None = None,
) -> str:
    """Lines with interval bars, from zero up; `limit` is drawn across."""
    marks = [mark for _, points in series for mark in points]
    if not marks:
        return ""
    top = max(x for m in marks for x in (m.value, m.high, limit) if x is not None) or 1.0
    xs = [mark.x for mark in marks] + [x for x, _ in x_labels]
    left, right = min(xs), max(xs)
    height = 190
    bottom = _TOP + height

    def at(x: float, y: float) -> tuple[float, float]:
        share = (x - left) / (right - left) if right > left else 0.5
        inner = _WIDTH - _LEFT - _RIGHT - 24
        return _LEFT + 12 + share * inner, bottom - y / top * (height - 6)

    parts = [
        f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>'
    ]
    for share in (0, 0.5, 1):
        y = at(left, top * share)[1]
        parts.append(_text(_LEFT - 5, y + 4, form(top * share), "end"))
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
    if limit is not None:
        y = at(left, limit)[1]
        parts.append(
            f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
    parts += [_text(at(x, 0)[0], bottom + 14, label, "middle") for x, label in x_labels]
    parts.append(_text(_WIDTH - _RIGHT, bottom + 28, x_name, "end"))
    for number, (name, points) in enumerate(series):
        parts.append(_series(number % 6, name, points, at, form))
    return _svg(bottom + 34, parts, f"{y_name} by {x_name}")


def _series(
    number: int,
    name: str,
    points: Sequence[Mark],
    at: Callable[[float, float], tuple[float, float]],
    form: Callable[[float], str],
) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(m.x, m.value) for m in points))
    parts = [f'<polyline class="line" points="{path}"/>']
    for mark in points:
        x, y = at(mark.x, mark.value)
        x += 2.5 * (number - 1)  # intervals of several series stay apart
        if mark.low is not None and mark.high is not None:
            low, high = at(mark.x, mark.low)[1], at(mark.x, mark.high)[1]
            parts.append(
                f'<line class="bar" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
            )
        title = escape(f"{name}, {mark.title}: {form(mark.value)}")
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2"><title>{title}</title></circle>')
    return f'<g class="s{number}">{"".join(parts)}</g>'


def legend(names: Sequence[str]) -> str:
    """What the colours of a line plot mean, as HTML."""
    items = (
        f'<li class="s{number % 6}"><i></i>{escape(name)}</li>' for number, name in enumerate(names)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _few(count: int, most: int) -> range:
    return range(0, count, -(-count // most))


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, parts: Sequence[str], name: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(name)}">'
        f"{''.join(parts)}</svg>"
    )
