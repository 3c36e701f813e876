"""The layers of a report: what each is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fp8calib.layers import LayerSpec

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


def layer_table(layers: Sequence[LayerSpec]) -> list[dict[str, Any]]:
    """One entry per attention layer."""
    return [{name: asdict(layer)[name] for name in _FACTS} for layer in layers]
