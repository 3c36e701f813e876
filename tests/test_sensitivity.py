"""Where a loss comes from: layers made fragile on purpose are found, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fp8_paged_attention as fpa
import numpy as np
import pytest
import torch
from made_scales import make_scales

from fp8calib.attention import handle_attention, plain_attention
from fp8calib.evaluation.attention_errors import layer_errors
from fp8calib.runtime.kv_format import KVFormat
from fp8calib.runtime.kv_store import KVStore
from fp8calib.runtime.loader import LoadedModel, load
from fp8calib.runtime.scoring import score
from fp8calib.scales import LayerScales, ScaleSet, scale_from_amax

Tiny = Callable[..., Path]
ROWS = [list(range(5, 45)), [20, 21, 3], list(range(60, 77))]


# --- pages of K and V in different formats


@pytest.mark.parametrize("native", ["k", "v"])
@pytest.mark.parametrize("arithmetic", ["accurate", "fp8"])
def test_a_layer_may_keep_k_or_v_native(native: str, arithmetic: Any, tiny: Tiny) -> None:
    """The oracle: plain attention over K or V that went through the codec and back."""
    loaded = load(str(tiny()))
    scales = make_scales(loaded.layers, "attn_head")
    bare: dict[str, Any] = {f"native_{native}": [layer.index for layer in loaded.layers]}
    fmt = KVFormat.fp8(loaded.layers, torch.float32, scales=scales, arithmetic=arithmetic, **bare)

    def rounded(x: torch.Tensor, scale: Any) -> torch.Tensor:
        codes = fpa.quantize(x.transpose(1, 2), torch.tensor(scale))
        return fpa.dequantize(codes, torch.tensor(scale)).transpose(1, 2)

    def handler(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        own = scales.layers[module.layer_idx]
        k, v = (k, rounded(v, own.v)) if native == "k" else (rounded(k, own.k), v)
        return plain_attention(module, q, k, v, mask, **kwargs)

    with torch.inference_mode(), handle_attention(loaded.model, handler):
        expected = torch.cat([loaded.model(torch.tensor([row])).logits[0] for row in ROWS])
    for limit in (512, 1):  # whole prompts, then token by token
        ours = torch.cat(
            [
                part.logits
                for part in score(loaded.model, loaded.layers, fmt, ROWS, max_batched_tokens=limit)
            ]
        )
        assert float((ours - expected).norm() / expected.norm()) < 2e-3


def test_pages_of_two_dtypes_are_counted_and_refused_by_triton(tiny: Tiny) -> None:
    layers = load(str(tiny())).layers
    sizes = [
        KVStore(layers, KVFormat.fp8(layers, torch.bfloat16, **bare), [1], 16).block_bytes()[0]
        for bare in ({}, {"native_k": [0]}, {"native_k": [0], "native_v": [0]})
    ]
    assert sizes[1] / sizes[0] == 1.25 and sizes[2] / sizes[0] == 1.5
    fmt = KVFormat.fp8(layers, torch.bfloat16, native_v=[1])
    assert fmt.describe(layers) == "fp8_e4m3 with scale 1.0, V of layers 1 bfloat16"
    pages = fpa.allocate(1, 2, 16, 8, 8, torch.uint8, v_dtype=torch.bfloat16)
    kv = torch.zeros(1, 2, 8)
    with pytest.raises(ValueError, match="different dtypes are for the torch backend"):
        fpa.store(kv, kv, *pages, torch.zeros(1, dtype=torch.long), backend="triton")
    pages = fpa.allocate(1, 2, 16, 8, 8, torch.float16, v_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="v_pages must be"):
        fpa.store(kv, kv, *pages, torch.zeros(1, dtype=torch.long))


# --- errors of attention, layer by layer


def test_layer_errors_tell_k_v_and_q_apart(tiny: Tiny) -> None:
    """One layer's K passes 448, another's V is too small for e4m3 at scale 1.0, in a third one
    everything is as usual; scales that fit take the errors away."""

    def edit(model: Any) -> None:
        layers = [layer.self_attn for layer in model.model.layers]
        _scale_kv_head(layers[0], "k", 0, 512.0)
        for head in (0, 1):
            _scale_kv_head(layers[2], "v", head, 2.0**-14)

    loaded = load(str(tiny(num_hidden_layers=3, edit=edit)))
    at_one = KVFormat.fp8(loaded.layers, torch.float32)
    ranges = _amax(loaded)
    fitted = ScaleSet(
        "attn_head",
        {
            layer.index: LayerScales(
                layer.name, *(scale_from_amax(ranges[layer.index][kind]) for kind in "kvq")
            )
            for layer in loaded.layers
        },
    )
    calibrated = KVFormat.fp8(loaded.layers, torch.float32, scales=fitted)
    before, after = layer_errors(loaded.model, loaded.layers, [at_one, calibrated], ROWS)
    first, usual, third = before
    assert first.k_error > 0.2 > 0.1 > first.v_error and first.k_clipped > 0.1
    assert first.heads[0] > 3 * first.heads[1]  # the head that was scaled
    assert third.v_error > 0.2 > 0.1 > third.k_error and third.v_flushed > 0.5
    assert max(usual.k_error, usual.v_error, usual.q_error) < 0.1
    assert usual.k_clipped == usual.v_clipped == 0 and usual.v_flushed < 0.01
    for layer in after:
        assert max(layer.error, layer.k_error, layer.v_error, layer.q_error) < 0.1
        assert layer.k_clipped == layer.v_clipped == layer.q_clipped == 0
        assert layer.k_flushed < 0.01 and layer.v_flushed < 0.01
    assert "of K clipped" in first.describe() and "flushed to zero" in third.describe()


def test_layer_errors_equal_their_definition(tiny: Tiny) -> None:
    """Against plain attention over K, V and Q that went through the codec, with FP8 attention's
    grouped query scales; a layer that is native in the format is left out."""
    loaded = load(str(tiny()))
    scales = make_scales(loaded.layers, "attn_head")
    fmt = KVFormat.fp8(loaded.layers, torch.float32, scales=scales, skip=[1])
    (found,) = layer_errors(loaded.model, loaded.layers, [fmt], ROWS[:1])
    assert [layer.index for layer in found] == [0]
    own = scales.layers[0]
    expected: dict[str, float] = {}

    def rounded(x: torch.Tensor, scale: Any) -> torch.Tensor:
        codes = fpa.quantize(x.transpose(1, 2), torch.tensor(scale))
        return fpa.dequantize(codes, torch.tensor(scale)).transpose(1, 2)

    def handler(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        out = plain_attention(module, q, k, v, mask, **kwargs)
        if module.layer_idx == 0:
            grouped = scales.grouped_query(0).repeat(2)  # type: ignore[union-attr]
            others = {
                "k_error": (q, rounded(k, own.k), v),
                "v_error": (q, k, rounded(v, own.v)),
                "q_error": (rounded(q, grouped), k, v),
                "error": (q, rounded(k, own.k), rounded(v, own.v)),
            }
            for name, parts in others.items():
                wrong = plain_attention(module, *parts, mask, **kwargs) - out
                expected[name] = float(wrong.norm() / out.norm())
        return out

    with torch.inference_mode(), handle_attention(loaded.model, handler):
        loaded.model(torch.tensor(ROWS[:1]))
    for name, value in expected.items():
        assert getattr(found[0], name) == pytest.approx(value, rel=1e-3), name


def _scale_kv_head(attention: Any, kind: str, head: int, factor: float) -> None:
    """Multiply K (or V) of one KV head by a power of two and undo it in the queries of its group
    (or in the output projection): the same function, bit for bit."""
    dim, group = attention.head_dim, attention.num_key_value_groups
    mine = slice(head * dim, (head + 1) * dim)
    readers = slice(head * group * dim, (head + 1) * group * dim)
    if kind == "k":
        attention.k_proj.weight[mine] *= factor
        attention.q_proj.weight[readers] /= factor
    else:
        attention.v_proj.weight[mine] *= factor
        attention.o_proj.weight[:, readers] /= factor


def _amax(loaded: LoadedModel) -> dict[int, dict[str, Any]]:
    """Maxima of |q|, |k| and |v| by head over ROWS."""
    found: dict[int, dict[str, Any]] = {}

    def handler(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        mine = found.setdefault(module.layer_idx, {})
        for kind, x in (("q", q), ("k", k), ("v", v)):
            mine[kind] = np.maximum(mine.get(kind, 0), x.abs().amax((0, 2, 3)).numpy())
        return plain_attention(module, q, k, v, mask, **kwargs)

    with torch.inference_mode(), handle_attention(loaded.model, handler):
        for row in ROWS:
            loaded.model(torch.tensor([row]))
    return found
