"""What the pages of each layer hold, and how attention reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from fp8calib.layers import LayerSpec
from fp8calib.runtime.cache_words import Arithmetic
from fp8calib.scales import ScaleSet


@dataclass(frozen=True)
class KVFormat:
    """The cache's format, layer by layer.

    native: dtype of the pages of layers that are not FP8.
    fp8_layers: indices of the layers with FP8 pages.
    native_k, native_v: indices of those among them whose K, or V, is native all the same. vLLM
        cannot do this; here such layers take the torch backend, and accurate arithmetic.
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
    native_k: frozenset[int] = frozenset()
    native_v: frozenset[int] = frozenset()

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
        native_k: Iterable[int] = (),
        native_v: Iterable[int] = (),
    ) -> KVFormat:
        """FP8 in all of `layers` but `skip`. A layer that re-uses another's K and V is what that
        other one is."""
        bare_k, bare_v = frozenset(native_k), frozenset(native_v)
        both = bare_k & bare_v
        return cls(
            native,
            frozenset(layer.index for layer in layers) - set(skip) - both,
            fp8_format,
            scales,
            arithmetic,
            bare_k - both,
            bare_v - both,
        )

    def page_dtypes(self, layer: LayerSpec) -> tuple[torch.dtype, torch.dtype]:
        """Of the layer's K and V pages."""
        k, v = (torch.uint8 if fp8 else self.native for fp8 in self.fp8_kinds(layer).values())
        return k, v

    def fp8_kinds(self, layer: LayerSpec) -> dict[str, bool]:
        """Whether the layer's "k" and "v" are in FP8."""
        owner, fp8 = owner_of(layer), self.is_fp8(layer)
        return {"k": fp8 and owner not in self.native_k, "v": fp8 and owner not in self.native_v}

    def is_fp8(self, layer: LayerSpec) -> bool:
        """Whether anything of the layer is in FP8."""
        return owner_of(layer) in self.fp8_layers

    def arithmetic_of(self, layer: LayerSpec) -> Arithmetic:
        return self.arithmetic if all(self.fp8_kinds(layer).values()) else "accurate"

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
        for kind, bare in (("K", self.native_k), ("V", self.native_v)):
            if bare & self.fp8_layers:
                listed = " ".join(map(str, sorted(bare & self.fp8_layers)))
                text += f", {kind} of layers {listed} {native}"
        return text


def owner_of(layer: LayerSpec) -> int:
    """Index of the layer whose K and V this one reads: its own, mostly."""
    return layer.index if layer.kv_source is None else layer.kv_source
