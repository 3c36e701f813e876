"""report.json as one HTML file for people: no network, no scripts, light and dark.

Everything in a report may come from a checkpoint or a data set, so every text goes through `text`.
The writer takes a dictionary (docs/report.md), not our classes: reports of other runs and versions
can be shown too, and what one of them lacks is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from fp8calib.evaluation.labels import GATES, METRICS, Label

Report = Mapping[str, Any]


def write_html(report: Report, path: Path | str) -> None:
    """Write `report` (the content of report.json) as a page. Raises OSError."""
    Path(path).write_text(report_html(report), encoding="utf-8", errors="replace")


def report_html(report: Report) -> str:
    """The page of a `verify` report."""
    from fp8calib.evaluation import report_sections as sections

    parts = [
        _verdict(report),
        _metrics(report),
        _gates(report),
        sections.positions(report),
        sections.layer_errors(report),
        sections.ranges(report),
        sections.needle(report),
        sections.generation(report),
        sections.tasks(report),
        sections.sensitivity(report.get("sensitivity")),
        how(report),
    ]
    return page(f"FP8 KV cache of {report.get('model')}", parts)


def page(title: str, parts: Sequence[str]) -> str:
    style = (files("fp8calib.evaluation") / "report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{text(title)}</title>\n<style>\n{style}</style></head>\n<body>\n"
        f"<h1>{text(title)}</h1>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def text(value: Any) -> str:
    """Any value as HTML text or attribute."""
    return escape("" if value is None else str(value), quote=True)


def section(heading: str, *parts: str, note: str = "") -> str:
    """A section; empty where all its parts are."""
    if not any(parts):
        return ""
    below = f'<p class="note">{text(note)}</p>' if note else ""
    return f"<section><h2>{text(heading)}</h2>{below}{''.join(parts)}</section>"


def number(value: Any, form: str) -> str:
    """A number as text; "" for None. Reports hold NaN and infinity as strings."""
    if value is None:
        return ""
    try:
        value = float(value)
    except (TypeError, ValueError):
        return text(value)
    return form.format(value) if math.isfinite(value) else str(value)


def estimate(value: Any, form: str) -> str:
    """An estimate with its interval under it, or a plain number."""
    if not isinstance(value, Mapping):
        return number(value, form)
    low, high = value.get("low"), value.get("high")
    shown = number(value.get("value"), form)
    if low is None or high is None:
        return shown
    interval = f"{number(low, form)} to {number(high, form)}"
    return f'{shown}<span class="interval">{interval}</span>'


def metric(label: Label, variant: Mapping[str, Any], field: str, is_native: bool) -> str:
    """A variant's number; "" where it would compare native with itself."""
    if label.against_native and is_native:
        return ""
    return estimate(variant.get(field), label.form)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: bool = False) -> str:
    """Cells are HTML already; the head is not. `words` aligns every column to the left."""
    first = "".join(f"<th>{text(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    kind = ' class="words"' if words else ""
    return f'<div class="wide"><table{kind}><tr>{first}</tr>{body}</table></div>'


def tag(kind: str, word: str) -> str:
    return f'<span class="tag {kind}">{text(word)}</span>'


def titles(report: Report) -> dict[str, str]:
    """What variants are called, by key."""
    return {str(v.get("key")): str(v.get("title")) for v in report.get("variants") or []}


def _verdict(report: Report) -> str:
    gates = report.get("gates") or []
    failed = [gate for gate in gates if not gate.get("passed")]
    if report.get("partial"):
        kind, word = "partial", "Interrupted: the numbers are partial and prove nothing"
    elif failed:
        kind, word = "failed", f"Fails {len(failed)} of {len(gates)} gates"
    elif gates:
        kind, word = "passed", f"Passes all {len(gates)} gates"
    else:
        kind, word = "partial", "Measured; no gates were set"
    judged = [v for v in report.get("variants") or [] if v.get("gated")]
    lines = [_sentence(variant, report) for variant in judged]
    lines += [text(_effect(report.get("effect")))]
    lines += [f"Warning: {text(warning)}" for warning in report.get("warnings") or []]
    body = "".join(f"<p>{line}</p>" for line in lines if line)
    return f'<section class="verdict {kind}"><strong>{text(word)}</strong>{body}</section>'


def _sentence(variant: Mapping[str, Any], report: Report) -> str:
    """One variant in words."""

    def of(name: str, form: str) -> str:
        found = variant.get(name)
        if not isinstance(found, Mapping):
            return number(found, form)
        low, high = (number(found.get(end), form) for end in ("low", "high"))
        return number(found.get("value"), form) + (f" ({low} to {high})" if low and high else "")

    said = (
        f"<b>{text(variant.get('title'))}</b>: mean KL {of('kl', '{:.4g}')} nats a token, "
        f"perplexity {of('ppl_increase', '{:+.2%}')}, native's top prediction kept at "
        f"{of('top1', '{:.1%}')} of tokens."
    )
    floor = (report.get("noise_floor") or {}).get("kl")
    if variant.get("within_noise"):
        said += f" Indistinguishable from {text(report.get('dtype'))}'s own rounding."
    elif isinstance(floor, Mapping) and (noise := _float(floor.get("value"))):
        times = (_float(variant["kl"].get("value")) or 0) / noise
        said += (
            f" {text(report.get('dtype'))}'s own rounding alone costs {noise:.2g} nats; this is "
            f"{times:.2g} times that."
        )
    return said


def _float(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _effect(effect: Any) -> str:
    if not isinstance(effect, Mapping):
        return ""
    from fp8calib.evaluation.bootstrap import Estimate
    from fp8calib.evaluation.summary import CalibrationEffect

    try:
        differences = (Estimate(**effect[f"{name}_difference"]) for name in ("kl", "ppl"))
        return CalibrationEffect(
            effect["kl_scale_1"], effect["kl_calibrated"], *differences
        ).sentence()
    except (KeyError, TypeError, ValueError):
        return ""


def _metrics(report: Report) -> str:
    variants = list(report.get("variants") or [])
    floor = report.get("noise_floor")
    if floor:
        variants.append({"title": "noise: native against itself", **floor})
    reference = report.get("reference", "native")
    rows = []
    for field, label in METRICS.items():
        cells = [metric(label, v, field, v.get("key") == reference) for v in variants]
        if any(cells):
            rows.append([text(label.name), *cells])
    data = report.get("dataset") or {}
    split = f" ({data['split']})" if data.get("split") else ""
    tokens = number(data.get("tokens"), "{:,.0f}")
    note = (
        f"{data.get('name')}{split}: {data.get('documents')} texts, {tokens} tokens. Differences "
        "are to the native cache; 95 % intervals from a paired bootstrap over texts."
    )
    head = ["", *(str(v.get("title")) for v in variants)]
    return section("What the cache costs", table(head, rows), note=note)


def _gates(report: Report) -> str:
    names, rows = titles(report), []
    for gate in report.get("gates") or []:
        what, bound, form = GATES.get(gate.get("gate"), (gate.get("gate"), "limit", "{:.4g}"))
        if gate.get("task"):
            what = f"{what} ({gate['task']})"
        verdict = tag("good", "passes") if gate.get("passed") else tag("bad", "fails")
        if not gate.get("conclusive", True):
            verdict += " " + tag("open", "inconclusive")
        rows.append(
            [
                text(what),
                verdict,
                estimate(gate.get("measured"), form),
                f"{bound} {number(gate.get('limit'), form)}",
                text(names.get(gate.get("variant"), gate.get("variant"))),
            ]
        )
    note = "The point estimate decides; inconclusive: its interval lies on both sides of the limit."
    head = ["gate", "", "measured", "limit", "cache"]
    return section("Gates", table(head, rows, words=True) if rows else "", note=note)


def how(report: Report) -> str:
    """Command, versions and text."""
    versions = ", ".join(f"{name} {v}" for name, v in (report.get("versions") or {}).items())
    data = report.get("dataset") or {}
    facts: list[tuple[str, Any]] = [
        ("engine", report.get("engine")),
        ("device", report.get("device")),
        ("dtype", report.get("dtype")),
        ("compared with", report.get("against")),
        ("layers in 16 bit", " ".join(map(str, report.get("skip_layers") or []))),
        ("versions", versions),
        ("text", " ".join(map(str, filter(None, (data.get("name"), data.get("split")))))),
        ("text fingerprint", data.get("fingerprint")),
        ("date", report.get("date")),
        ("seconds", number(report.get("seconds"), "{:,.1f}")),
    ]
    rows = [[text(name), text(value)] for name, value in facts if value]
    command = report.get("command")
    shown = f"<pre>{text(command)}</pre>" if command else ""
    return section("How it was measured", shown, table(["", ""], rows, words=True))
