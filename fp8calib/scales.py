"""ScaleSet, the project's currency: per attention layer, the float32 scales of Q, K and V.

A scale is a *dequantisation multiplier*, as in compressed-tensors: ``stored = sat_e4m3(x / scale)``
and ``x ~ stored * scale``. Everything here is numpy, so that reading scales needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from fp8calib.errors import ScaleError
from fp8calib.layers import LayerSpec

Strategy = Literal["tensor", "attn_head"]
Kind = Literal["q", "k", "v"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
KINDS: tuple[Kind, ...] = get_args(Kind)

E4M3_MAX = np.float32(448)  # largest finite float8_e4m3fn
E4M3_HALF_SUBNORMAL = np.float32(2.0**-10)  # at or below it, e4m3 rounds to zero
_TINY = np.finfo(np.float32).tiny  # smallest normal float32
MAX_SCALE = np.float32(
    1e4
)  # a scale beyond it stands for |x| > 4e6: no attention input is that large
MAX_SLACK = np.float32(16)  # a scale this far above amax/448 wastes four of e4m3's binades


def scale_from_amax(amax: np.ndarray, margin: float = 1.0) -> np.ndarray:
    """The smallest float32 scale with which no |x| <= amax is clipped, times `margin`.

    ``amax / 448`` rounded to float32 lies below the true quotient for about 8 % of inputs; then
    amax / scale exceeds 448, so the scale moves up by one ulp until it does not. A head whose
    maximum is zero (or so small that its scale would be subnormal) holds nothing to scale: 1.0.

    Args:
        amax: maxima of |x|, any shape, finite, >= 0.
        margin: factor >= 1 of headroom.
    Returns:
        float32 scales of amax's shape.
    """
    amax = np.asarray(amax, dtype=np.float32)
    if not np.isfinite(amax).all() or (amax < 0).any():
        raise ScaleError("amax must be finite and not negative")
    if not (np.isfinite(margin) and margin >= 1.0):
        raise ScaleError(f"margin must be a number >= 1, got {margin}")
    scale = (amax / E4M3_MAX * np.float32(margin)).astype(np.float32)
    empty = scale < _TINY
    scale = np.where(empty, np.float32(1), scale)
    while (low := ~empty & (amax / scale > E4M3_MAX)).any():
        scale = np.where(low, np.nextafter(scale, np.float32(np.inf), dtype=np.float32), scale)
    return scale


@dataclass(frozen=True)
class LayerScales:
    """Scales of one layer. `name` is the attention module's path in the checkpoint
    (``model.layers.0.self_attn``); k, v (and q, unless None) are float32 arrays of shape [1], or
    [num_kv_heads] for k and v and [num_heads] for q."""

    name: str
    k: np.ndarray
    v: np.ndarray
    q: np.ndarray | None = None

    def items(self) -> Iterator[tuple[Kind, np.ndarray]]:
        for kind in KINDS:
            scale = getattr(self, kind)
            if scale is not None:
                yield kind, scale


@dataclass(frozen=True)
class ScaleSet:
    """The scales of a model: strategy and, by layer index, its LayerScales."""

    strategy: Strategy
    layers: Mapping[int, LayerScales]

    @property
    def has_query(self) -> bool:
        return any(layer.q is not None for layer in self.layers.values())

    def grouped_query(self, index: int) -> np.ndarray | None:
        """q_scale as attention kernels use it, float32 [1] or [num_kv_heads]: the maximum over the
        query heads that share a KV head (what vLLM makes of q_scale when it loads it)."""
        layer = self.layers[index]
        return None if layer.q is None else grouped_maximum(layer.q, layer.k.size)

    def collapse_heads(self) -> ScaleSet:
        """The per-tensor set that clips nothing this one does not: the maximum over heads."""
        return ScaleSet(
            "tensor",
            {
                index: LayerScales(
                    layer.name, **{kind: scale.max(keepdims=True) for kind, scale in layer.items()}
                )
                for index, layer in self.layers.items()
            },
        )


def grouped_maximum(q: np.ndarray, num_kv_heads: int) -> np.ndarray:
    """q scales [num_heads] as [num_kv_heads], the largest of each group; one scale stays one."""
    return q if q.size == 1 else q.reshape(num_kv_heads, -1).max(axis=1)


def expected_shape(strategy: Strategy, kind: Kind, layer: LayerSpec) -> tuple[int]:
    if strategy == "tensor":
        return (1,)
    return (layer.num_heads if kind == "q" else layer.num_kv_heads,)


def problems(
    scales: ScaleSet, layers: Sequence[LayerSpec] | None, *, query: bool | None = None
) -> list[str]:
    """Everything that makes `scales` unfit for a model of `layers`, one line each; empty when fit.

    `layers` None stands for a model that is not at hand: scales must then agree with each other.
    `query` says whether every layer must have a q scale; None asks for all or none.
    """
    if scales.strategy not in STRATEGIES:
        return [f"unknown strategy {scales.strategy!r} (known: {', '.join(STRATEGIES)})"]
    if layers is None:
        layers = _layers_that_fit(scales)
    if not scales.layers:
        return ["there are no scales"]
    query = scales.has_query if query is None else query
    found = []
    for layer in layers:
        have = scales.layers.get(layer.index)
        if have is None:
            found.append(f"{label(layer.index, layer.name)}: no scales")
            continue
        for kind in KINDS:
            scale = getattr(have, kind)
            if scale is None:
                if kind != "q" or query:
                    found.append(f"{label(layer.index, have.name)}: {kind}_scale is missing")
                continue
            found += [
                f"{label(layer.index, have.name)}: {kind}_scale {trouble}"
                for trouble in _troubles(scale, expected_shape(scales.strategy, kind, layer))
            ]
    known = {layer.index for layer in layers}
    found += [
        f"{label(index, layer.name)}: the model has no such attention layer"
        for index, layer in scales.layers.items()
        if index not in known
    ]
    return found


def label(index: int, name: str) -> str:
    """How messages name a layer; files of some formats know no names."""
    return f"layer {index} ({name})" if name else f"layer {index}"


def _layers_that_fit(scales: ScaleSet) -> list[LayerSpec]:
    """Layers whose head counts are those of their own k_scale, query heads a multiple of it."""
    layers = []
    for index, layer in sorted(scales.layers.items()):
        kv_heads = layer.k.size if layer.k is not None else 1
        groups = 1 if layer.q is None else max(1, -(-layer.q.size // max(kv_heads, 1)))
        layers.append(LayerSpec(index, layer.name, groups * kv_heads, kv_heads, 0, 0))
    return layers


def _troubles(scale: np.ndarray, shape: tuple[int]) -> Iterator[str]:
    if scale.shape != shape or not scale.size:
        yield f"has shape {list(scale.shape)}, expected {list(shape)}"
    elif not np.isfinite(scale).all():
        yield f"is not finite ({_first(scale, ~np.isfinite(scale))})"
    elif (scale <= 0).any():
        yield f"is not positive ({_first(scale, scale <= 0)})"
    elif (scale < _TINY).any():
        yield f"is subnormal ({_first(scale, scale < _TINY)})"
    elif (scale > MAX_SCALE).any():
        yield f"is absurdly large ({_first(scale, scale > MAX_SCALE)})"


def _first(scale: np.ndarray, where: np.ndarray) -> str:
    head = int(np.argmax(where))
    return f"{scale[head]:g} at head {head}" if scale.size > 1 else f"{scale[0]:g}"


def amax_problems(
    scales: ScaleSet,
    amax: Mapping[int, Mapping[Kind, np.ndarray]],
    margin: float,
    may_clip: bool = False,
) -> list[str]:
    """Where scales do not fit the maxima of the data they were made from: amax of every layer and
    kind, float32 [heads]; a tensor scale answers for all heads. `may_clip` is for observers other
    than the maximum, which leave the largest values out on purpose."""
    found = []
    for index, layer in scales.layers.items():
        for kind, scale in layer.items():
            if kind not in amax.get(index, {}):
                found.append(f"{label(index, layer.name)}: {kind} was never observed")
                continue
            seen = amax[index][kind]
            seen = seen.max(keepdims=True) if scale.size == 1 else seen
            full = seen >= _TINY * E4M3_MAX
            if not may_clip and (full & (seen / scale > E4M3_MAX)).any():
                found.append(f"{label(index, layer.name)}: {kind}_scale clips its own maximum")
            slack = MAX_SLACK * np.float32(max(margin, 1.0)) * seen / E4M3_MAX
            if (full & (scale > slack)).any():
                found.append(f"{label(index, layer.name)}: {kind}_scale is far above amax/448")
    return found


def require(found: Iterable[str], what: str) -> None:
    """Raise ScaleError naming the first few of `found`, if there are any."""
    found = list(found)
    if found:
        more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
        raise ScaleError(f"{what}: " + "; ".join(found[:5]) + more)
