"""What a model card says of accuracy: the numbers of `verify`, as fp8calib.json keeps them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_COLUMNS = (
    ("perplexity", "perplexity", "{:.3f}"),
    ("ppl_increase", "change", "{:+.2%}"),
    ("kl", "mean KL, nats", "{:.5f}"),
    ("top1", "top-1 agreement", "{:.2%}"),
)


def accuracy_record(report: Mapping[str, Any]) -> dict[str, Any]:
    """What fp8calib.json keeps of a report (docs/report.md)."""
    data = report["dataset"]
    return {
        "ok": report["ok"],
        "date": report["date"],
        "dtype": report["dtype"],
        "text": {name: data[name] for name in ("name", "split", "documents", "tokens")},
        "fingerprint": data["fingerprint"],
        "versions": dict(report["versions"]),
        "variants": [
            {"title": variant["title"], "gated": variant["gated"]}
            | {name: variant[name] for name, _, _ in _COLUMNS}
            for variant in report["variants"]
        ],
    }


def accuracy_section(record: Any) -> str:
    """Markdown of such a record, with a heading; "" where there is none, or something else."""
    try:
        return _section(record)
    except (KeyError, TypeError, ValueError):
        return ""


def _section(record: Any) -> str:
    text = record["text"]
    split = f" ({text['split']})" if text["split"] else ""
    lines = [
        f"On {text['documents']} texts, {int(text['tokens']):,} tokens of {text['name']}{split}, "
        "against the native cache; in brackets 95 % intervals over texts.",
        "",
        "| KV cache | " + " | ".join(title for _, title, _ in _COLUMNS) + " |",
        "|---" * (len(_COLUMNS) + 1) + "|",
    ]
    for variant in record["variants"]:
        cells = [_estimate(variant[name], form) for name, _, form in _COLUMNS]
        if variant is record["variants"][0]:
            cells[1:] = [""] * (len(cells) - 1)  # native, compared with itself
        lines.append(f"| {' | '.join([_plain(variant['title']), *cells])} |")
    return "\n## Accuracy\n\n" + "\n".join(map(_line, lines)) + "\n"


def _estimate(found: Any, form: str) -> str:
    if not isinstance(found, Mapping):
        return form.format(float(found))
    shown = form.format(float(found["value"]))
    low, high = found["low"], found["high"]
    if low is None or high is None or not math.isfinite(float(low) + float(high)):
        return shown
    return f"{shown} ({form.format(float(low))} to {form.format(float(high))})"


def _plain(value: Any) -> str:
    return str(value).replace("|", "\\|")


def _line(text: str) -> str:
    return " ".join(text.split("\n"))
