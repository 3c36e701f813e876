"""The plots of a report as PNG files, for slides and pages that take no SVG. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fp8calib.errors import UserError

_DPI = 150


def check_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise UserError("PNG plots need matplotlib: pip install 'fp8calib[report]'")


def write_pngs(report: Mapping[str, Any], beside: Path) -> list[Path]:
    """Write each plot of `report` that has data as ``STEM-NAME.png`` beside that file, replacing
    earlier ones; returns them.

    Raises:
        UserError: no matplotlib, or they cannot be written.
    """
    check_matplotlib()
    written = []
    for name, figure in _figures(report):
        path = beside.with_name(f"{beside.stem}-{name}.png")
        try:
            figure.savefig(path, dpi=_DPI, bbox_inches="tight")
        except OSError as problem:
            raise UserError(f"cannot write {path}: {problem.strerror}") from None
        written.append(path)
    return written


def _figures(report: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    titles = {v["key"]: v["title"] for v in report.get("variants") or []}
    others = [v for v in report.get("variants") or [] if v["key"] != report.get("reference")]
    if others:
        yield "kl", _intervals([(v["title"], v["kl"]) for v in others], "mean KL, nats a token")
    layers = report.get("layers") or []
    for kind in ("k", "v", "q"):
        heads = [(layer.get("amax") or {}).get(kind) or [] for layer in layers]
        if any(heads):
            yield f"amax-{kind}", _map(heads, f"largest |{kind.upper()}|", "head", logarithmic=True)
    for key, title in titles.items():
        heads = [(layer.get("errors") or {}).get(key, {}).get("heads") or [] for layer in layers]
        if any(heads):
            label = f"relative error of attention outputs: {title}"
            yield f"error-{key}", _map(heads, label, "KV head")
    curve = (report.get("sensitivity") or {}).get("curve") or []
    if curve:
        yield "sensitivity", _curve(curve)


def _axes(height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, height))
    return figure, figure.add_subplot()


def _bars(estimates: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[list[float]]]:
    """Values, and how far their intervals reach down and up."""
    values = [float(e["value"]) for e in estimates]
    ends = [
        [abs(float(e[end]) - value) if e[end] is not None else 0.0 for end in ("low", "high")]
        for e, value in zip(estimates, values, strict=True)
    ]
    return values, [list(side) for side in zip(*ends, strict=True)]


def _intervals(items: Sequence[tuple[str, Mapping[str, Any]]], label: str) -> Any:
    figure, axes = _axes(1 + 0.45 * len(items))
    values, reach = _bars([estimate for _, estimate in items])
    places = range(len(items))
    axes.errorbar(values, places, xerr=reach, fmt="o", capsize=3)
    axes.set_yticks(places, [_plain(title) for title, _ in items])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{label}, 95 % intervals")
    axes.grid(axis="x", alpha=0.3)
    return figure


def _map(
    heads: Sequence[Sequence[float]], label: str, y_name: str, logarithmic: bool = False
) -> Any:
    from matplotlib.colors import LogNorm

    most = max(map(len, heads))
    cells = [
        [float(layer[head]) if head < len(layer) else math.nan for layer in heads]
        for head in range(most)
    ]
    figure, axes = _axes(min(1.4 + 0.22 * most, 6))
    positive = [x for row in cells for x in row if x > 0]
    norm = LogNorm(min(positive), max(positive)) if logarithmic and positive else None
    image = axes.imshow(cells, aspect="auto", cmap="viridis", norm=norm)
    axes.set_xlabel("layer")
    axes.set_ylabel(y_name)
    axes.set_title(_plain(label), fontsize=10)
    figure.colorbar(image, ax=axes)
    return figure


def _curve(points: Sequence[Mapping[str, Any]]) -> Any:
    figure, axes = _axes(3)
    values, reach = _bars([point["kl"] for point in points])
    axes.errorbar([100 * p["share"] for p in points], values, yerr=reach, fmt="o-", capsize=3)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bytes of the cache, % of 16 bit")
    axes.set_ylabel("mean KL, nats a token")
    axes.grid(alpha=0.3)
    return figure


def _plain(text: str) -> str:
    """matplotlib takes what stands between dollar signs for a formula."""
    return str(text).replace("$", r"\$")
