"""What an FP8 cache does to each attention layer: where a loss comes from, K, V or Q."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import fp8_paged_attention as fpa
import torch
from transformers import PreTrainedModel

from fp8calib.attention import handle_attention
from fp8calib.layers import LayerSpec
from fp8calib.runtime.forward_context import forward_context, set_forward_context
from fp8calib.runtime.kv_format import KVFormat
from fp8calib.runtime.kv_store import KVStore, LayerCache
from fp8calib.runtime.model_runner import ModelRunner
from fp8calib.runtime.paged_attention import paged_attention
from fp8calib.runtime.step_inputs import Chunk
from fp8calib.scales import ScaleSet

_BLOCK_SIZE = 16

# Rounding to e4m3 alone costs an attention layer 0.05 to 0.11 on SmolLM2, with either arithmetic.
UNUSUAL_ERROR = 0.2


@dataclass(frozen=True)
class LayerError:
    """One layer under a cache format, its inputs being those of the native model.

    error: relative error of the attention output, root of summed squares over that of the output,
        as the format attends; heads: the same for the query heads of each KV head;
    k_error, v_error, q_error: the error when K, V or the queries alone are quantized, the rest
        being native (queries are quantized by FP8 attention only, whatever the format says);
    *_clipped: shares of values beyond the largest that the format and scale can hold;
    *_flushed: shares of values that are not zero and become zero.
    """

    index: int
    name: str
    error: float
    k_error: float
    v_error: float
    q_error: float
    k_clipped: float
    v_clipped: float
    q_clipped: float
    k_flushed: float
    v_flushed: float
    q_flushed: float
    heads: list[float]

    def describe(self) -> str:
        """``layer 2 (model.layers.2.self_attn) 45%: K 44%, V 6%, Q 5%, 0.013 of K clipped``."""
        parts = [f"{kind.upper()} {getattr(self, f'{kind}_error'):.0%}" for kind in "kvq"]
        for what in ("clipped", "flushed"):
            parts += [
                f"{share:.2g} of {kind.upper()} {what}{' to zero' if what == 'flushed' else ''}"
                for kind in "kv"
                if (share := getattr(self, f"{kind}_{what}")) > (0 if what == "clipped" else 0.01)
            ]
        return f"layer {self.index} ({self.name}) {self.error:.0%}: {', '.join(parts)}"


def layer_errors(
    model: PreTrainedModel,
    layers: Sequence[LayerSpec],
    formats: Sequence[KVFormat],
    rows: Sequence[Sequence[int]],
) -> list[list[LayerError]]:
    """Run `rows` through the model with a native cache once and, at each layer, attend over other
    caches too: one of each of `formats`, and such in which K or V alone is quantized.

    Returns:
        for each format, its layers; those that are native in it are left out.
    """
    sums = [
        {layer.index: _Sums(layer.num_kv_heads) for layer in layers if kv_format.is_fp8(layer)}
        for kv_format in formats
    ]
    for row in rows:
        watch = _Compared(
            [
                _FormatCaches.make(model, layers, kv_format, len(row), found)
                for kv_format, found in zip(formats, sums, strict=True)
            ]
        )
        _forward(model, layers, KVFormat(formats[0].native), row, watch)
    return [
        [found[layer.index].error(layer) for layer in layers if layer.index in found]
        for found in sums
    ]


@dataclass
class _Sums:
    """Of one layer: squared errors by cause and squared outputs, float64 [num_kv_heads]; values
    clipped, flushed and all, by kind."""

    num_kv_heads: int
    wrong: dict[str, torch.Tensor] = field(default_factory=dict)
    whole: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def add(self, out: torch.Tensor, by_cause: dict[str, torch.Tensor]) -> None:
        """Outputs are [1, T, Hq, Dv]."""
        self.whole = self.whole + self._by_head(out)
        for cause, other in by_cause.items():
            self.wrong[cause] = self.wrong.get(cause, 0) + self._by_head(other.float() - out)

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        squares = x.double().square().sum((0, 1, 3))
        return squares.reshape(self.num_kv_heads, -1).sum(1).cpu()

    def error(self, layer: LayerSpec) -> LayerError:
        shares = {
            f"{kind}_{what}": counted[what] / counted["values"]
            for kind, counted in self.counts.items()
            for what in ("clipped", "flushed")
        }
        errors = {f"{kind}_error": self._relative(self.wrong[kind].sum()) for kind in "kvq"}
        return LayerError(
            index=layer.index,
            name=layer.name,
            error=self._relative(self.wrong["all"].sum()),
            heads=[
                float((wrong / whole) ** 0.5) if whole else 0.0
                for wrong, whole in zip(self.wrong["all"], self.whole, strict=True)
            ],
            **errors,
            **shares,
        )

    def _relative(self, wrong: torch.Tensor) -> float:
        whole = self.whole.sum()
        return float((wrong / whole) ** 0.5) if whole else 0.0


@dataclass
class _FormatCaches:
    """The caches of one format beside the native one: as it is, and with K or V alone quantized."""

    stores: dict[str, KVStore]
    scales: ScaleSet | None
    sums: dict[int, _Sums]

    @classmethod
    def make(
        cls,
        model: PreTrainedModel,
        layers: Sequence[LayerSpec],
        kv_format: KVFormat,
        num_tokens: int,
        sums: dict[int, _Sums],
    ) -> _FormatCaches:
        every = kv_format.fp8_layers
        formats = {
            "all": kv_format,
            "k": replace(kv_format, native_v=every),
            "v": replace(kv_format, native_k=every),
        }
        stores = {cause: _store(model, layers, each, num_tokens) for cause, each in formats.items()}
        return cls(stores, kv_format.scales, sums)

    def query_scale(self, index: int, num_heads: int) -> torch.Tensor | None:
        """float32 [num_heads]: what FP8 attention quantizes queries by."""
        scale = None if self.scales is None else self.scales.grouped_query(index)
        if scale is None:
            return None
        return torch.tensor(scale).repeat_interleave(num_heads // scale.size)


@dataclass
class _Compared:
    """Attends over the native cache, and over the others to add up how far they are off."""

    formats: Sequence[_FormatCaches]

    def __call__(self, module: Any, q: Any, k: Any, v: Any, kwargs: Any) -> torch.Tensor:
        out = paged_attention(module, q, k, v, None, **kwargs)[0]
        for caches in self.formats:
            sums = caches.sums.get(module.layer_idx)
            if sums is None:
                continue
            found = self._attend(module, caches, q, k, v, kwargs)
            scale = caches.query_scale(module.layer_idx, q.shape[1])
            if scale is not None:
                scale = scale.to(q.device)
            # [1, Hq, T, D] with heads next to last, as the codec wants them
            codes = fpa.quantize(q.transpose(1, 2), scale)
            rounded = fpa.dequantize(codes, scale, dtype=q.dtype).transpose(1, 2)
            found["q"] = paged_attention(module, rounded, k, v, None, **kwargs)[0]
            sums.add(out.float(), found)
            cache = caches.stores["all"].layers[module.layer_idx]
            _count(sums, cache, q, k, v, scale)
        return out

    @staticmethod
    def _attend(
        module: Any, caches: _FormatCaches, q: Any, k: Any, v: Any, kwargs: Any
    ) -> dict[str, torch.Tensor]:
        found = {}
        for cause, store in caches.stores.items():
            with set_forward_context(replace(forward_context(), layers=store.layers)):
                found[cause] = paged_attention(module, q, k, v, None, **kwargs)[0]
        return found


def _count(
    sums: _Sums,
    cache: LayerCache,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: torch.Tensor | None,
) -> None:
    """Count what is clipped and what is flushed to zero."""
    kv_format = fpa.FORMATS[cache.fp8_format]
    for kind, x, scale, fmt in (
        ("k", k, cache.k_scale, kv_format),
        ("v", v, cache.v_scale, kv_format),
        ("q", q, q_scale, fpa.E4M3),
    ):
        limits = torch.finfo(fmt.dtype)
        size = x.float().abs()
        if scale is not None:
            size = size / scale.reshape(1, -1, 1, 1)
        half_subnormal = limits.smallest_normal * limits.eps / 2  # rounds to even: to zero
        sums.counts[kind]["clipped"] += int((size > fmt.max).sum())
        sums.counts[kind]["flushed"] += int(((size <= half_subnormal) & (x != 0)).sum())
        sums.counts[kind]["values"] += x.numel()


def culprits(errors: Sequence[LayerError]) -> list[LayerError]:
    """The layers that explain a loss, worst first: those whose error FP8's rounding alone does not
    make, or the three worst when there are none such."""
    ordered = sorted(errors, key=lambda layer: -layer.error)
    return [layer for layer in ordered if layer.error > UNUSUAL_ERROR] or ordered[:3]


def first_nonfinite_layer(
    model: PreTrainedModel, layers: Sequence[LayerSpec], kv_format: KVFormat, row: Sequence[int]
) -> str | None:
    """Where NaN or infinity first shows in a pass over `row`, in words; None if in no attention
    layer."""
    names = {layer.index: layer.name for layer in layers}
    found: list[str] = []

    def watch(module: Any, q: Any, k: Any, v: Any, kwargs: Any) -> torch.Tensor:
        out = paged_attention(module, q, k, v, None, **kwargs)[0]
        parts = {"q": q, "k": k, "v": v, "the attention output": out}
        bad = [part for part, x in parts.items() if not bool(torch.isfinite(x).all())]
        if bad:
            found.append(f"layer {module.layer_idx} ({names[module.layer_idx]}), in {bad[0]}")
        return out

    _forward(model, layers, kv_format, row, watch)
    return found[0] if found else None


Watch = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]], torch.Tensor]


def _forward(
    model: PreTrainedModel,
    layers: Sequence[LayerSpec],
    kv_format: KVFormat,
    row: Sequence[int],
    watch: Watch,
) -> None:
    """One pass over `row` in which `watch` computes the attention of every layer."""
    store = _store(model, layers, kv_format, len(row))
    runner = ModelRunner(model, store)
    table = range(store.num_blocks[0])

    def handler(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> torch.Tensor:
        return watch(module, q, k, v, kwargs)

    with handle_attention(model, handler):
        runner.forward([Chunk(row, 0, [table] * len(store.groups), 1)])


def _store(
    model: PreTrainedModel, layers: Sequence[LayerSpec], kv_format: KVFormat, num_tokens: int
) -> KVStore:
    blocks = [-(-num_tokens // _BLOCK_SIZE)] * len(layers)
    return KVStore(layers, kv_format, blocks, _BLOCK_SIZE, model.device)
