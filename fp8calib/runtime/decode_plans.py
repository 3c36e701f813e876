"""The decode plans of a step: one for each kind of layer, shared by all layers of that kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from fp8calib.layers import LayerSpec
from fp8calib.runtime.kv_store import KVStore, LayerCache

if TYPE_CHECKING:
    from fp8_paged_attention import DecodePlan

_ROOM = 64  # sequences; a plan is made for at least so many


class DecodePlans:
    """Plans of `fp8_paged_attention` for steps of one new token a sequence. The CPU's backend
    needs none.

    A captured step holds on to its plans: with graphs, `max_num_seqs` must cover all steps.
    """

    def __init__(self, store: KVStore, max_num_seqs: int = 0) -> None:
        self._kinds: dict[Any, list[LayerSpec]] = {}
        self._store = store
        self._plans: dict[Any, DecodePlan] = {}
        self._expected = max_num_seqs
        self._room = 0
        for group in store.groups:
            for layer in group.layers:
                cache = store.layers[layer.index]
                if cache.backend == "triton" or (cache.k_pages.is_cuda and cache.backend is None):
                    self._kinds.setdefault(_kind(layer, cache), []).append(layer)

    def update(self, seq_lens: torch.Tensor) -> Mapping[int, DecodePlan]:
        """Plan a step for sequences of these lengths, int32 [B]; the plan of each layer. Empty
        when there are no sequences."""
        if not len(seq_lens):
            return {}
        if len(seq_lens) > self._room:
            self._make(max(_ROOM, self._expected, len(seq_lens)))
        for plan in self._plans.values():
            plan.update(seq_lens)
        return {
            layer.index: self._plans[kind]
            for kind, layers in self._kinds.items()
            for layer in layers
        }

    def _make(self, num_seqs: int) -> None:
        self._room = num_seqs
        if not self._kinds:
            return
        from fp8_paged_attention.plan import DecodePlan

        for kind, layers in self._kinds.items():
            cache = self._store.layers[layers[0].index]
            self._plans[kind] = DecodePlan(
                cache.k_pages,
                cache.v_pages,
                num_q_heads=layers[0].num_heads,
                max_num_seqs=num_seqs,
                sliding_window=layers[0].sliding_window,
            )


def _kind(layer: LayerSpec, cache: LayerCache) -> tuple[Any, ...]:
    """What layers with the same plan have in common."""
    pages = (cache.k_pages.shape[1:], cache.v_pages.shape[1:], cache.k_pages.dtype)
    return (*pages, layer.num_heads, layer.sliding_window)
