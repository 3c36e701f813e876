"""Independent maxima of post-RoPE Q, K and V: forward hooks on the projections and plain RoPE.

For Llama-shaped models only; shares no code with fp8calib.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


@torch.no_grad()
def maxima(model: Any, batches: Iterable[list[list[int]]]) -> dict[tuple[int, str], torch.Tensor]:
    """max |x| per layer, kind and head: float32 [heads]. Rows of a batch are padded on the right
    with token 0, which the causal mask keeps from every real token; padding is not looked at."""
    found: dict[tuple[int, str], torch.Tensor] = {}
    last: dict[Any, Any] = {}
    handles = []

    def keep(key: Any) -> Any:
        return lambda module, args, output: last.__setitem__(key, output)

    handles.append(model.model.rotary_emb.register_forward_hook(keep("rope")))
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        for kind in "qkv":
            projection = getattr(attention, f"{kind}_proj")
            handles.append(projection.register_forward_hook(keep((index, kind))))
    for batch in batches:
        longest = max(map(len, batch))
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in batch])
        real = torch.tensor([[token < len(row) for token in range(longest)] for row in batch])
        model.model(input_ids=ids, use_cache=False)
        cos, sin = last["rope"]
        for index, layer in enumerate(model.model.layers):
            for kind in "qkv":
                x = last[index, kind]
                x = x.view(*x.shape[:2], -1, layer.self_attn.head_dim).transpose(1, 2)
                x = x if kind == "v" else rotate(x, cos, sin)
                amax = (x.abs().float() * real[:, None, :, None]).amax((0, 2, 3))
                before = found.get((index, kind), torch.zeros_like(amax))
                found[index, kind] = torch.maximum(before, amax)
    for handle in handles:
        handle.remove()
    return found
