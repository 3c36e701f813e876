"""The layers of a report: what each is, what calibration saw of it, what FP8 does to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fp8calib.evaluation.attention_errors import LayerError
from fp8calib.layers import LayerSpec
from fp8calib.scales import KINDS, ScaleSet

_FACTS = (
    "index",
    "name",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "v_head_dim",
    "sliding_window",
    "kv_source",
)


def layer_table(
    layers: Sequence[LayerSpec],
    record: Mapping[str, Any],
    errors: Mapping[str, Sequence[LayerError]],
    scales: ScaleSet | None = None,
) -> list[dict[str, Any]]:
    """One entry per attention layer; `record` is the content of fp8calib.json, which may say
    anything, `errors` are by variant, `scales` those of the checkpoint."""
    by_layer: dict[int, dict[str, Any]] = {layer.index: {} for layer in layers}
    for key, found in errors.items():
        for error in found:
            entry = asdict(error)
            del entry["index"], entry["name"]
            by_layer[error.index][key] = entry
    return [
        {name: asdict(layer)[name] for name in _FACTS}
        | {
            "amax": _amax(record, layer),
            "scales": _scales(scales, layer),
            "errors": by_layer[layer.index],
        }
        for layer in layers
    ]


def _amax(record: Mapping[str, Any], layer: LayerSpec) -> dict[str, list[float]]:
    """By kind, the maxima of the heads as calibration recorded them."""
    layers = record.get("layers")
    entry = layers.get(str(layer.index)) if isinstance(layers, dict) else None
    found: dict[str, list[float]] = {}
    for kind in KINDS:
        statistics = entry.get(kind) if isinstance(entry, dict) else None
        amax = statistics.get("amax") if isinstance(statistics, dict) else None
        heads = layer.num_heads if kind == "q" else layer.num_kv_heads
        if (
            isinstance(amax, list)
            and len(amax) == heads
            and all(isinstance(x, int | float) for x in amax)
        ):
            found[kind] = [float(x) for x in amax]
    return found


def _scales(scales: ScaleSet | None, layer: LayerSpec) -> dict[str, list[float]]:
    own = None if scales is None else scales.layers.get(layer.index)
    return {} if own is None else {kind: values.tolist() for kind, values in own.items()}


def recorded_search(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """What `sensitivity --apply` left in fp8calib.json (`Sensitivity.record`); None where there is
    nothing, or something else."""
    found = record.get("sensitivity")
    try:
        curve = [
            {
                "skip_layers": [str(word) for word in point["skip_layers"]],
                "share": float(point["share"]),
                "kl": _estimate(point["kl"]),
            }
            for point in found["curve"]  # type: ignore[index]
        ]
        budget = found["budget"]["kl"]  # type: ignore[index]
        return {
            "budget": {"kl": None if budget is None else float(budget)},
            "skip_layers": [str(word) for word in found["skip_layers"]],  # type: ignore[index]
            "curve": curve,
        }
    except (KeyError, TypeError, ValueError):
        return None


def _estimate(found: Any) -> dict[str, float | None]:
    return {
        name: None if found[name] is None else float(found[name])
        for name in ("value", "low", "high")
    }
