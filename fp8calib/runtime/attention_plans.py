"""The attention plans of a step: one for each kind of layer, shared by all layers of that kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import fp8_paged_attention as fpa

from fp8calib.layers import LayerSpec
from fp8calib.runtime.kv_store import KVStore, LayerCache
from fp8calib.runtime.step_inputs import Chunk, StepInputs

if TYPE_CHECKING:
    from fp8_paged_attention import DecodePlan, StepPlan

_ROOM = 64  # sequences; a decode plan is made for at least so many


class AttentionPlans:
    """Plans of `fp8_paged_attention`: for its Triton kernels of the sequences with one new token,
    for its torch backend of the whole step.

    A captured step holds on to its plans: with graphs, `max_num_seqs` must cover all steps.
    """

    def __init__(self, store: KVStore, max_num_seqs: int = 0) -> None:
        self._store = store
        self._kinds: dict[Any, list[LayerSpec]] = {}
        self._decode_plans: dict[Any, DecodePlan] = {}
        self._step_plans: dict[Any, StepPlan] = {}
        self._expected = max_num_seqs
        self._room = 0
        for group in store.groups:
            for layer in group.layers:
                kind = _kind(layer, store.layers[layer.index])
                self._kinds.setdefault(kind, []).append(layer)
        for kind, layers in self._kinds.items():
            cache = store.layers[layers[0].index]
            if not _uses_triton(cache):
                self._step_plans[kind] = fpa.StepPlan(
                    cache.k_pages, cache.v_pages, sliding_window=layers[0].sliding_window
                )

    def update(self, inputs: StepInputs) -> Mapping[int, DecodePlan | StepPlan]:
        """Plan a step; the plan of each layer. Layers of Triton's have none when no sequence has
        one new token."""
        plans: dict[Any, DecodePlan | StepPlan] = {}
        for kind, plan in self._step_plans.items():
            group = self._store.layers[self._kinds[kind][0].index].group
            plans[kind] = plan.update(
                inputs.block_tables[group],
                inputs.cu_seqlens_q,
                inputs.seq_lens,
                inputs.slot_mappings[group],
            )
        if inputs.num_decodes:
            self._make_decode_plans(inputs.num_decodes)
            for kind, decode_plan in self._decode_plans.items():
                plans[kind] = decode_plan.update(
                    inputs.seq_lens[: inputs.num_decodes], inputs.max_seq_len
                )
        return {layer.index: plan for kind, plan in plans.items() for layer in self._kinds[kind]}

    def max_seq_len(self, chunks: Sequence[Chunk], num_seqs: int) -> int | None:
        """The bound on the length of sequences with one new token to plan a step for: None unless
        plans for `num_seqs` of them depend on it. Few values, since each has CUDA graphs."""
        self._make_decode_plans(num_seqs)
        plans = (p for p in self._decode_plans.values() if p.depends_on_length(num_seqs))
        plan = next(plans, None)
        if plan is None or max(chunk.start + 1 for chunk in chunks) > plan.SHORT_TOKENS:
            return None
        return plan.SHORT_TOKENS

    def _make_decode_plans(self, num_seqs: int) -> None:
        """Make sure that there are plans with room for so many sequences."""
        if num_seqs <= self._room:
            return
        self._room = max(_ROOM, self._expected, num_seqs)
        for kind, layers in self._kinds.items():
            cache = self._store.layers[layers[0].index]
            if _uses_triton(cache):
                self._decode_plans[kind] = fpa.DecodePlan(
                    cache.k_pages,
                    cache.v_pages,
                    num_q_heads=layers[0].num_heads,
                    max_num_seqs=self._room,
                    sliding_window=layers[0].sliding_window,
                )


def _uses_triton(cache: LayerCache) -> bool:
    return cache.backend == "triton" or (cache.k_pages.is_cuda and cache.backend is None)


def _kind(layer: LayerSpec, cache: LayerCache) -> tuple[Any, ...]:
    """What layers with the same plan have in common."""
    pages = (cache.k_pages.shape[1:], cache.v_pages.shape[1:], cache.k_pages.dtype, cache.backend)
    return (*pages, layer.num_heads, layer.sliding_window, cache.group)
