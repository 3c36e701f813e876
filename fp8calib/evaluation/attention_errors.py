"""What an FP8 cache does to each attention layer: where a loss comes from."""

from __future__ import annotations

from collections import Counter
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
from fp8calib.runtime.kv_store import KVStore
from fp8calib.runtime.model_runner import Chunk, ModelRunner
from fp8calib.runtime.paged_attention import paged_attention

_BLOCK_SIZE = 16

# Rounding to e4m3 alone costs an attention layer 0.05 to 0.11 on SmolLM2, with either arithmetic.
UNUSUAL_ERROR = 0.2


@dataclass(frozen=True)
class LayerError:
    """One layer under a cache format, its inputs being those of the native model.

    error: relative error of the attention output, root of summed squares over that of the output;
    k_clipped, v_clipped: shares of values beyond the largest that the format and scale can hold.
    """

    index: int
    name: str
    error: float
    k_clipped: float
    v_clipped: float


def layer_errors(
    model: PreTrainedModel,
    layers: Sequence[LayerSpec],
    kv_format: KVFormat,
    rows: Sequence[Sequence[int]],
) -> list[LayerError]:
    """Run `rows` through the model with a native cache and, at each layer, attend over a second
    cache in `kv_format` too. Layers that are native in it are left out."""
    sums = {layer.index: _Sums() for layer in layers if kv_format.is_fp8(layer)}
    for row in rows:
        watch = _SecondCache(_store(model, layers, kv_format, len(row)), sums)
        _forward(model, layers, KVFormat(kv_format.native), row, watch)
    return [sums[layer.index].error(layer) for layer in layers if layer.index in sums]


@dataclass
class _Sums:
    """Of one layer: squared errors, squared outputs, values clipped and values, by kind."""

    wrong: float = 0.0
    whole: float = 0.0
    clipped: Counter[str] = field(default_factory=Counter)
    values: Counter[str] = field(default_factory=Counter)

    def error(self, layer: LayerSpec) -> LayerError:
        return LayerError(
            layer.index,
            layer.name,
            (self.wrong / self.whole) ** 0.5 if self.whole else 0.0,
            self.clipped["k"] / self.values["k"],
            self.clipped["v"] / self.values["v"],
        )


@dataclass
class _SecondCache:
    """Attends over the native cache, and over another one to add up how far that is off."""

    store: KVStore
    sums: dict[int, _Sums]

    def __call__(self, module: Any, q: Any, k: Any, v: Any, kwargs: Any) -> torch.Tensor:
        out = paged_attention(module, q, k, v, None, **kwargs)[0]
        sums = self.sums.get(module.layer_idx)
        if sums is not None:
            with set_forward_context(replace(forward_context(), layers=self.store.layers)):
                other = paged_attention(module, q, k, v, None, **kwargs)[0]
            sums.wrong += float((other.float() - out.float()).square().sum())
            sums.whole += float(out.float().square().sum())
            cache = self.store.layers[module.layer_idx]
            largest = fpa.FORMATS[cache.fp8_format].max
            for kind, x, scale in (("k", k, cache.k_scale), ("v", v, cache.v_scale)):
                bound = largest if scale is None else largest * scale.reshape(1, -1, 1, 1)
                sums.clipped[kind] += int((x.float().abs() > bound).sum())
                sums.values[kind] += x.numel()
        return out


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
