"""A search for skip layers as one HTML file: see report_html.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fp8calib.evaluation import report_sections
from fp8calib.evaluation.report_html import estimate, how, number, page, section, table, text


def sensitivity_html(found: Mapping[str, Any], verdict: Sequence[str]) -> str:
    """The page of `Sensitivity.to_dict()` content; `verdict` says in lines what to do."""
    scaled = [
        {
            "index": layer["index"],
            "errors": {"served": layer["errors"], "scale_1": layer["errors_at_1"]},
        }
        for layer in found["layers"]
    ]
    variants = [
        {"key": "served", "title": found["kv_cache"]},
        {"key": "scale_1", "title": "FP8 at scale 1.0"},
    ]
    if found["kv_cache"].endswith("scale 1.0"):
        for layer in scaled:
            del layer["errors"]["scale_1"]
    kind = "partial" if found["partial"] else "passed"
    lines = verdict or ["Interrupted: what follows is partial."]
    strong, *rest = map(text, lines)
    parts = [
        f'<section class="verdict {kind}"><p><b>{strong}</b></p>'
        + "".join(f"<p>{line}</p>" for line in rest)
        + "</section>",
        report_sections.sensitivity(
            {
                "budget": found["budget"],
                "skip_layers": found["skip_layers"],
                "curve": [
                    {
                        "skip_layers": point["exempt"]["layers"],
                        "share": point["share"],
                        "kl": point["loss"]["kl"],
                    }
                    for point in found["curve"]
                ],
            }
        ),
        _layers(found),
        report_sections.layer_errors({"layers": scaled, "variants": variants}),
        how(found),
    ]
    return page(f"FP8 KV cache of {found['model']}, layer by layer", parts)


def _layers(found: Mapping[str, Any]) -> str:
    """What each layer costs alone, the costliest first."""
    known = [layer for layer in found["layers"] if layer["alone"]]
    known.sort(key=lambda layer: -layer["alone"]["kl"]["value"])
    rows = [
        [
            f"{layer['index']}{' (16 bit)' if layer['exempt'] else ''}",
            *(
                estimate(layer[name]["kl"], "{:.5f}") if layer[name] else ""
                for name in ("alone", "k_alone", "v_alone")
            ),
            *(
                number(layer["errors"][f"{kind}_{what}"], "{:.2%}")
                for what in ("clipped", "flushed")
                for kind in "kv"
            ),
        ]
        for layer in known
    ]
    head = ["layer", "KL alone", "its K", "its V"]
    head += ["K clipped", "V clipped", "K to zero", "V to zero"]
    return section(
        "Each layer alone in FP8",
        table(head, rows) if rows else "",
        note="Mean KL from the native cache in nats a token, on a quarter of the texts; K and V "
        "apart for the layers that matter. Clipped and flushed to zero: shares of all values.",
    )
