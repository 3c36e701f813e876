"""Where a loss comes from: layers made fragile on purpose are found, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fp8_paged_attention as fpa
import pytest
import torch
from made_scales import make_scales

from fp8calib.attention import handle_attention, plain_attention
from fp8calib.runtime.kv_format import KVFormat
from fp8calib.runtime.kv_store import KVStore
from fp8calib.runtime.loader import load
from fp8calib.runtime.scoring import score

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
