"""What the pages of each layer hold, and how attention reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from fp8calib.layers import LayerSpec
from fp8calib.scales import ScaleSet

Arithmetic = Literal["accurate", "fp8"]
ARITHMETICS: tuple[Arithmetic, ...] = get_args(Arithmetic)


@dataclass(frozen=True)
class KVFormat:
    """The cache's format, layer by layer.

    native: dtype of the pages of layers that are not FP8.
    fp8_layers: indices of the layers with FP8 pages.
    fp8_format: "e4m3" or "e5m2".
    scales: of the FP8 layers; None is 1.0 for all.
    arithmetic: of attention over FP8 pages; "fp8" quantises queries (by q_scale, grouped) and
        probabilities as FlashAttention-3 does. Native layers are always "accurate".
    """

    native: torch.dtype
    fp8_layers: frozenset[int] = field(default_factory=frozenset)
    fp8_format: str = "e4m3"
    scales: ScaleSet | None = None
    arithmetic: Arithmetic = "accurate"

    @classmethod
    def fp8(
        cls,
        layers: Iterable[LayerSpec],
        native: torch.dtype,
        *,
        skip: Iterable[int] = (),
        scales: ScaleSet | None = None,
        arithmetic: Arithmetic = "accurate",
        fp8_format: str = "e4m3",
    ) -> KVFormat:
        """FP8 in all of `layers` but `skip`. A layer that re-uses another's K and V is what that
        other one is."""
        fp8_layers = {layer.index for layer in layers} - set(skip)
        return cls(native, frozenset(fp8_layers), fp8_format, scales, arithmetic)

    def page_dtype(self, layer: LayerSpec) -> torch.dtype:
        return torch.uint8 if self.is_fp8(layer) else self.native

    def is_fp8(self, layer: LayerSpec) -> bool:
        return _owner(layer) in self.fp8_layers

    def describe(self, layers: Sequence[LayerSpec]) -> str:
        """One line: ``fp8_e4m3 with tensor scales (28 of 30 layers; the others bfloat16)``."""
        native = str(self.native).removeprefix("torch.")
        count = sum(map(self.is_fp8, layers))
        if not count:
            return native
        scales = "scale 1.0" if self.scales is None else f"{self.scales.strategy} scales"
        text = f"fp8_{self.fp8_format} with {scales}"
        if count < len(layers):
            text += f" ({count} of {len(layers)} layers; the others {native})"
        return text


def _owner(layer: LayerSpec) -> int:
    return layer.index if layer.kv_source is None else layer.kv_source
