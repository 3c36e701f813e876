"""Independent maxima of post-RoPE Q, K and V; nothing here shares code with fp8calib.

`maxima` is for Llama-shaped models: forward hooks on the projections and plain RoPE. For any other
model `cached_maxima` looks at what the model puts into its KV cache, and at the queries that its
own attention function gets.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Maxima = dict[tuple[int, str], torch.Tensor]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


@torch.no_grad()
def maxima(model: Any, batches: Iterable[list[list[int]]]) -> Maxima:
    """max |x| per layer, kind and head: float32 [heads]. Rows of a batch are padded on the right
    with token 0, which the causal mask keeps from every real token; padding is not looked at."""
    found: Maxima = {}
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
                _raise(found, index, kind, amax)
    for handle in handles:
        handle.remove()
    return found


def _raise(found: Maxima, index: int, kind: str, amax: torch.Tensor) -> None:
    before = found.get((index, kind), torch.zeros_like(amax))
    found[index, kind] = torch.maximum(before, amax)


class _RecordingCache(DynamicCache):
    """Looks at the K and V of every update before windows cut them."""

    found: Maxima

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kw: Any):
        for kind, x in (("k", key_states), ("v", value_states)):
            _raise(self.found, layer_idx, kind, x.abs().float().amax((0, 2, 3)))
        return super().update(key_states, value_states, layer_idx, *args, **kw)


@contextmanager
def _queries(decoder: Any, implementation: str, found: Maxima) -> Iterator[None]:
    """Look at the queries on their way into transformers' own attention function."""
    module = sys.modules[type(decoder).__module__]
    eager = implementation == "eager"
    plain = module.eager_attention_forward if eager else ALL_ATTENTION_FUNCTIONS[implementation]

    def attention(layer: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        _raise(found, layer.layer_idx, "q", query.abs().float().amax((0, 2, 3)))
        return plain(layer, query, *args, **kwargs)

    try:
        if eager:
            module.eager_attention_forward = attention
        else:
            ALL_ATTENTION_FUNCTIONS[implementation] = attention
        yield
    finally:
        if eager:
            module.eager_attention_forward = plain
        else:
            del ALL_ATTENTION_FUNCTIONS[implementation]


@torch.no_grad()
def cached_maxima(model: Any, rows: list[list[int]], implementation: str) -> Maxima:
    """max |x| per layer, kind and head: float32 [heads]; rows one by one, without padding.

    `implementation` is transformers' ``eager`` or ``sdpa``. Layers that re-use the K and V of
    another have an entry for q only.
    """
    found: Maxima = {}
    model.set_attn_implementation(implementation)
    with _queries(model.get_decoder(), implementation, found):
        for row in rows:
            cache = _RecordingCache(config=model.config)
            cache.found = found
            model(input_ids=torch.tensor([row]), past_key_values=cache, use_cache=True)
    return found
