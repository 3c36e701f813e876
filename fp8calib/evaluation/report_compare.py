"""Two reports side by side. Works on what `verify --report FILE.json` wrote; imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fp8calib.errors import DataError

_MAX_BYTES = 64 << 20
_METRICS = (
    "perplexity",
    "ppl_increase",
    "kl",
    "reverse_kl",
    "worst_decile_kl",
    "top1",
    "top5",
    "kv_bytes_per_token",
)
# What must be equal for numbers to be comparable, and what is good to know.
_SAME = (
    ("model", "different models"),
    ("against", "compared with different originals"),
    ("engine", "different engines"),
    ("dtype", "different dtypes"),
    ("device", "different devices"),
)


@dataclass(frozen=True)
class Difference:
    """One number in both reports; None where one lacks it. apart: its intervals do not overlap,
    None where there are none, or the texts differ."""

    variant: str
    metric: str
    a: float | None
    b: float | None
    difference: float | None
    apart: bool | None


@dataclass(frozen=True)
class Comparison:
    """mismatches: what makes the numbers incomparable or explains them, one line each."""

    a: str
    b: str
    mismatches: list[str]
    differences: list[Difference]
    verdicts: tuple[str, str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_report(path: Path | str) -> dict[str, Any]:
    """A report.json; raises DataError for anything else."""
    path = Path(path)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DataError(f"{path}: larger than {_MAX_BYTES >> 20} MiB, so not a report")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise DataError(f"{path}: {problem.strerror or problem}") from None
    except (ValueError, RecursionError) as problem:
        raise DataError(f"{path}: not JSON: {problem}") from None
    variants = content.get("variants") if isinstance(content, dict) else None
    if not (
        isinstance(variants, list)
        and variants
        and all(isinstance(v, dict) and isinstance(v.get("key"), str) for v in variants)
    ):
        raise DataError(f"{path}: not a report of `fp8calib verify --report FILE.json`")
    if content.get("schema") != 1:
        raise DataError(f"{path}: schema {content.get('schema')!r:.40}, this fp8calib knows 1")
    return content


def compare_reports(a: Path | str, b: Path | str) -> Comparison:
    """Raises DataError for files that are no reports."""
    one, other = read_report(a), read_report(b)
    return Comparison(
        str(a),
        str(b),
        list(_mismatches(one, other)),
        list(_differences(one, other)),
        (_verdict(one), _verdict(other)),
    )


def _mismatches(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    for name, words in _SAME:
        if a.get(name) != b.get(name):
            yield f"{words}: {a.get(name)} and {b.get(name)}"
    texts = [_mapping(report.get("dataset")) for report in (a, b)]
    if not _same_text(a, b):
        names = [f"{t.get('name')} ({t.get('tokens')} tokens)" for t in texts]
        yield f"different texts, so no number can be compared: {names[0]} and {names[1]}"
    versions = [_mapping(report.get("versions")) for report in (a, b)]
    for name in sorted({*versions[0], *versions[1]}):
        pair = [found.get(name) for found in versions]
        if pair[0] != pair[1]:
            yield f"different versions of {name}: {pair[0]} and {pair[1]}"
    for report, which in ((a, "first"), (b, "second")):
        if report.get("partial"):
            yield f"the {which} report was interrupted: its numbers are partial"


def _same_text(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    prints = [_mapping(report.get("dataset")).get("fingerprint") for report in (a, b)]
    return bool(prints[0] == prints[1])


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    one, other = _numbers(a), _numbers(b)
    same_text = _same_text(a, b)  # else intervals apart would say nothing of the caches
    for variant, metric in dict.fromkeys([*one, *other]):
        left, right = one.get((variant, metric)), other.get((variant, metric))
        pair = [None if found is None else found[0] for found in (left, right)]
        known = pair[0] is not None and pair[1] is not None
        yield Difference(
            variant,
            metric,
            pair[0],
            pair[1],
            pair[1] - pair[0] if known else None,  # type: ignore[operator]
            _apart(left, right) if same_text else None,
        )


_Number = tuple[float | None, float | None, float | None]


def _numbers(report: Mapping[str, Any]) -> dict[tuple[str, str], _Number]:
    """Value, low and high of everything measured, by variant and metric."""
    found: dict[tuple[str, str], _Number] = {}
    for variant in report["variants"]:
        for metric in _METRICS:
            found[variant["key"], metric] = _number(variant.get(metric))
    for check, metrics in (
        ("needle", ("found", "kept", "logprob")),
        ("generation", ("agreement", "repeat_rate", "compression_ratio")),
    ):
        for variant in _mappings(_mapping(report.get(check)).get("variants")):
            for metric in metrics:
                key = str(variant.get("key")), f"{check}: {metric}"
                found[key] = _number(variant.get(metric))
    for task in _mappings(report.get("tasks")):
        for variant in _mappings(task.get("variants")):
            key = str(variant.get("key")), f"{task.get('task')}: {task.get('metric')}"
            found[key] = _number(variant.get("value"))
    return {key: number for key, number in found.items() if number[0] is not None}


def _number(found: Any) -> _Number:
    if isinstance(found, Mapping):
        value, low, high = (_float(found.get(name)) for name in ("value", "low", "high"))
        return value, low, high
    return _float(found), None, None


def _float(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:  # JSON's integers have no end
        return None


def _apart(a: _Number | None, b: _Number | None) -> bool | None:
    if a is None or b is None or None in (*a, *b):
        return None
    return a[2] < b[1] or b[2] < a[1]  # type: ignore[operator]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _verdict(report: Mapping[str, Any]) -> str:
    failed = [
        f"{gate.get('gate')} ({gate.get('variant')})"
        for gate in _mappings(report.get("gates"))
        if not gate.get("passed")
    ]
    return "passes" if not failed else f"fails {', '.join(failed)}"
