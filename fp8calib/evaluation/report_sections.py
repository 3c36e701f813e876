"""Sections of the HTML report that show more than a table: see report_html.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fp8calib.checkpoint.serving import SKIP_FLAG
from fp8calib.evaluation.labels import GENERATION, NEEDLE, Label, thousands
from fp8calib.evaluation.report_html import (
    Report,
    estimate,
    metric,
    number,
    section,
    table,
    text,
    titles,
)
from fp8calib.evaluation.report_svg import Mark, heat_map, legend, line_plot

_OUTPUTS_SHOWN = 3
_CLIPPED, _FLUSHED = 1e-4, 0.02  # shares of values worth a line
_UNUSUAL_ERROR = 0.2  # attention_errors.UNUSUAL_ERROR, which would bring torch along


def positions(report: Report) -> str:
    """Mean KL by position in the text."""
    variants = [v for v in report.get("variants") or [] if v.get("key") != report.get("reference")]
    series = []
    edges: dict[int, str] = {}
    for variant in variants:
        marks = []
        for number_, bucket in enumerate(variant.get("kl_by_position") or []):
            label = f"{thousands(bucket['start'])}-{thousands(bucket['end'])}"
            edges[number_] = label
            marks.append(_mark(number_, bucket.get("kl"), label))
        if marks:
            series.append((str(variant.get("title")), marks))
    if len(edges) < 2:  # a single point says nothing that the table does not
        return ""
    plot = line_plot(
        series,
        x_name="position in the text",
        y_name="mean KL",
        x_labels=list(edges.items()),
        form=lambda x: f"{x:.2g}",
    )
    return section(
        "Mean KL by position",
        legend([name for name, _ in series]),
        f"<figure>{plot}</figure>",
        note="Nats a token, with 95 % intervals: does the loss grow with the context?",
    )


def _mark(x: float, found: Any, title: str) -> Mark:
    if not isinstance(found, Mapping):
        found = {"value": found}
    value, low, high = (_finite(found.get(name)) for name in ("value", "low", "high"))
    return Mark(x, value or 0.0, low, high, title)


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e30 else None


def layer_errors(report: Report) -> str:
    """Relative error of the attention outputs: by head, and by what is quantized."""
    layers = report.get("layers") or []
    names = titles(report)
    figures = []
    everything = [
        _of(entry, name)
        for layer in layers
        for entry in (layer.get("errors") or {}).values()
        for name in ("error", "k_error", "v_error", "q_error")
    ]
    largest = max((x for x in everything if x is not None), default=0.0)
    for key in dict.fromkeys(key for layer in layers for key in layer.get("errors") or {}):
        found = [(layer.get("errors") or {}).get(key) for layer in layers]
        columns = [str(layer.get("index")) for layer in layers]
        causes = {
            "all": "error", "K": "k_error", "V": "v_error", "Q": "q_error",
        }  # fmt: skip
        by_cause = [[_of(entry, name) for entry in found] for name in causes.values()]
        title = f"<h3>{text(names.get(key, key))}</h3>"
        plot = _errors_map(by_cause, columns, "cause", list(causes), largest)
        figures.append(f"<figure>{title}{plot}</figure>")
        heads = [(entry or {}).get("heads") or [] for entry in found]
        by_head = _by_head(heads)
        if len(by_head) > 1:
            title = f"<h3>{text(names.get(key, key))}, by KV head</h3>"
            plot = _errors_map(by_head, columns, "KV head", None, largest)
            figures.append(f"<figure>{title}{plot}</figure>")
    lost = _lost_values(layers, names)
    plots = f'<div class="plots">{"".join(figures)}</div>' if figures else ""
    return section(
        "Where it hurts: error of each layer's attention output",
        plots,
        lost,
        note="Relative to the output of the native cache on the same inputs; below, when K, V or "
        f"the queries alone are quantized. Framed: above {_UNUSUAL_ERROR:.0%}, which rounding to "
        "FP8 alone does not make.",
    )


def _errors_map(
    rows: list[list[float | None]],
    columns: list[str],
    y_name: str,
    names: list[str] | None,
    largest: float,
) -> str:
    return heat_map(
        rows,
        x_name="layer",
        y_name=y_name,
        columns=columns,
        row_names=names,
        form=lambda x: f"{x:.1%}",
        alarm=_UNUSUAL_ERROR,
        bounds=(0.0, largest),
    )


def _of(entry: Any, name: str) -> float | None:
    return _finite(entry.get(name)) if isinstance(entry, Mapping) else None


def _by_head(heads: Sequence[Sequence[Any]]) -> list[list[float | None]]:
    """[head][layer]; layers with fewer heads leave gaps."""
    most = max((len(layer) for layer in heads), default=0)
    return [
        [_finite(layer[head]) if head < len(layer) else None for layer in heads]
        for head in range(most)
    ]


def _lost_values(layers: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> str:
    """The layers that lose most values to clipping and to zero."""
    rows, seen = [], set()
    for layer in layers:
        for key, entry in (layer.get("errors") or {}).items():
            shares = [
                _finite(entry.get(f"{kind}_{what}")) or 0.0
                for what in ("clipped", "flushed")
                for kind in "kv"
            ]
            clipped, flushed = max(shares[:2]), max(shares[2:])
            known = (layer.get("index"), *shares)  # of the same scales with other arithmetic
            if (clipped > _CLIPPED or flushed > _FLUSHED) and known not in seen:
                seen.add(known)
                cells = [str(layer.get("index")), text(names.get(key, key))]
                cells += [number(share, "{:.2%}") for share in shares]
                rows.append((-clipped, -flushed, cells))
    if not rows:
        none = (
            f"No layer clips more than {_CLIPPED:.2%} of K or V or flushes more than "
            f"{_FLUSHED:.0%} to zero."
        )
        return f'<p class="note">{none}</p>' if any(layer.get("errors") for layer in layers) else ""
    rows.sort(key=lambda row: row[:2])
    more = f'<p class="note">and {len(rows) - 12} more</p>' if len(rows) > 12 else ""
    head = ["layer", "cache", "K clipped", "V clipped", "K to zero", "V to zero"]
    return table(head, [cells for _, _, cells in rows[:12]], words=True) + more


def ranges(report: Report) -> str:
    """Largest |K|, |V| and |Q| that calibration saw, by head."""
    layers = report.get("layers") or []
    columns = [str(layer.get("index")) for layer in layers]
    figures = []
    recorded = any(layer.get("amax") for layer in layers)
    for kind, name in (("k", "K"), ("v", "V"), ("q", "Q")):
        if recorded:
            heads = [(layer.get("amax") or {}).get(kind) or [] for layer in layers]
        else:
            known = [(layer.get("scales") or {}).get(kind) or [] for layer in layers]
            heads = [[448 * (_finite(scale) or 0.0) for scale in layer] for layer in known]
        plot = heat_map(
            _by_head(heads),
            x_name="layer",
            y_name="query head" if kind == "q" else "KV head",
            columns=columns,
            form=lambda x: f"{x:.3g}",
            logarithmic=True,
            alarm=448.0,
        )
        if plot:
            figures.append(f"<figure><h3>largest |{name}|</h3>{plot}</figure>")
    return section(
        "Ranges that calibration saw" if recorded else "Ranges that the scales stand for",
        f'<div class="plots">{"".join(figures)}</div>' if figures else "",
        note="Logarithmic colours. Framed: beyond 448, e4m3's largest value, so clipped at scale "
        "1.0. Heads of one layer far apart are what attn_head scales are for.",
    )


def needle(report: Report) -> str:
    """Found needles by length and depth, a map for each variant."""
    found = report.get("needle")
    if not isinstance(found, Mapping):
        return ""
    names = titles(report)
    figures: list[str] = []
    rows: list[list[str]] = []
    for variant in found.get("variants") or []:
        title = names.get(variant.get("key"), variant.get("key"))
        grid = variant.get("grid") or []
        lengths = sorted({cell["length"] for cell in grid})
        depths = sorted({cell["depth"] for cell in grid})
        share = {(cell["length"], cell["depth"]): _finite(cell.get("found")) for cell in grid}
        plot = heat_map(
            [[share.get((length, depth)) for length in lengths] for depth in depths],
            x_name="length",
            y_name="depth",
            columns=[str(length) for length in lengths],
            row_names=[f"{depth:.0%}" for depth in depths],
            form=lambda x: f"{x:.0%}",
            bounds=(0.0, 1.0),
        )
        if plot:
            figures.append(f"<figure><h3>{text(title)}</h3>{plot}</figure>")
        rows.append([text(title), *_cells(NEEDLE, variant, not rows)])
    head = ["", *(label.name for label in NEEDLE.values())]
    return section(
        "Needles in long text",
        table(head, rows),
        f'<div class="plots">{"".join(figures)}</div>',
        note="A number hidden in real text at some depth, asked for at the end.",
    )


def _cells(labels: Mapping[str, Label], variant: Mapping[str, Any], is_native: bool) -> list[str]:
    return [metric(label, variant, field, is_native) for field, label in labels.items()]


def generation(report: Report) -> str:
    """Greedy text against native's."""
    found = report.get("generation")
    if not isinstance(found, Mapping):
        return ""
    names = titles(report)
    variants = found.get("variants") or []
    rows = [
        [text(names.get(v.get("key"), v.get("key"))), *_cells(GENERATION, v, v is variants[0])]
        for v in variants
    ]
    samples = "".join(_outputs(v, names) for v in variants)
    note = (
        f"{found.get('tokens')} tokens after each of {found.get('prompts')} prompts. Endless "
        "repetition: outputs whose second half repeats itself where native's does not."
    )
    head = ["", *(label.name for label in GENERATION.values())]
    return section("Greedy generation", table(head, rows), samples, note=note)


def _outputs(variant: Mapping[str, Any], names: Mapping[str, str]) -> str:
    outputs = (variant.get("outputs") or [])[:_OUTPUTS_SHOWN]
    if not outputs:
        return ""
    shown = "".join(f"<pre>{text(o.get('prompt'))}\n\n{text(o.get('text'))}</pre>" for o in outputs)
    title = text(names.get(variant.get("key", ""), variant.get("key")))
    return f"<details><summary>{title}: first outputs</summary>{shown}</details>"


def tasks(report: Report) -> str:
    names = titles(report)
    rows = []
    for task in report.get("tasks") or []:
        for variant in task.get("variants") or []:
            error = number(variant.get("stderr"), " ± {:.4f}")
            rows.append(
                [
                    f"{text(task.get('task'))}, {text(task.get('metric'))}",
                    text(names.get(variant.get("key"), variant.get("key"))),
                    number(variant.get("value"), "{:.4f}") + error,
                    estimate(variant.get("drop"), "{:+.4f}"),
                ]
            )
    head = ["task", "cache", "value", "worse than native by"]
    return section("Tasks", table(head, rows, words=True) if rows else "")


def sensitivity(found: Any) -> str:
    """KL against bytes as layers stay in 16 bit; `found` is a `Sensitivity.record`."""
    if not isinstance(found, Mapping):
        return ""
    marks = [
        _mark(
            100 * point["share"],
            point.get("kl"),
            f"{100 * point['share']:.1f} % of the bytes, {len(point['skip_layers'])} layers",
        )
        for point in found.get("curve") or []
    ]
    plot = line_plot(
        [("whole layers in 16 bit", marks)],
        x_name="bytes of the cache, % of 16 bit",
        y_name="mean KL",
        x_labels=[(m.x, f"{m.x:.0f}") for m in (*marks[:1], *marks[1:][-1:])],
        form=lambda x: f"{x:.2g}",
        limit=_finite((found.get("budget") or {}).get("kl")),
    )
    skipped = " ".join(map(str, found.get("skip_layers") or []))
    line = (
        f"<p>Layers to leave in 16 bit: {text(skipped)}. vLLM needs "
        f"<code>{SKIP_FLAG} {text(skipped)}</code>.</p>"
        if skipped
        else "<p>No layer need stay in 16 bit.</p>"
    )
    return section(
        "Leaving layers in 16 bit",
        line,
        f"<figure>{plot}</figure>" if plot else "",
        note="Mean KL against the bytes of the cache, as the layers that cost most stay in 16 bit; "
        "dashed: the budget.",
    )
