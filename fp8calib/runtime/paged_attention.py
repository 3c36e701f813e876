"""The attention function of the runtime: store new K and V in pages, attend over the pages.

It is registered with transformers under PAGED_ATTENTION, without a mask function: no mask is built,
causality and windows are the kernels' work. torch.compile sees it as one custom operator, since
what it reads and writes is no argument of the model.
"""

from __future__ import annotations

from typing import Any

import fp8_paged_attention as fpa
import torch
from transformers import AttentionInterface

from fp8calib.runtime.forward_context import forward_context

PAGED_ATTENTION = "fp8calib_paged"
LAYER_NUMBER = "fp8calib_layer_number"
"""Attribute of attention modules that are compiled: the layer's index as a tensor, so that layers
that differ in nothing else share their code."""


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend T new tokens, all sequences of a step packed into one row.

    Args:
        query, key, value: [1, Hq, T, Dk], [1, Hkv, T, Dk], [1, Hkv, T, Dv], after RoPE.
    Returns:
        [1, T, Hq, Dv] in query's dtype.
    """
    attention = scaling, sliding_window, softcap, s_aux
    if torch.compiler.is_compiling():
        layer = getattr(module, LAYER_NUMBER)
        return torch.ops.fp8calib.paged_attention(layer, query, key, value, *attention), None
    return _store_and_attend(module.layer_idx, query, key, value, *attention), None  # type: ignore[arg-type]


def _store_and_attend(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    context = forward_context()
    cache = context.layers[layer]
    tables = context.groups[cache.group]
    plan = context.plans.get(layer)
    if cache.stores:
        fpa.store(
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            cache.k_pages,
            cache.v_pages,
            tables.slot_mapping,
            cache.k_scale,
            cache.v_scale,
            fp8_format=cache.fp8_format,
            plan=plan,
            backend=cache.backend,
        )
    out = fpa.attend(
        query[0].transpose(0, 1),
        cache.k_pages,
        cache.v_pages,
        tables.block_table,
        context.cu_seqlens_q,
        context.seq_lens,
        max_seqlen_q=context.max_seqlen_q,
        num_decodes=context.num_decodes,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
        q_scale=cache.q_scale,
        scale=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        arithmetic=cache.arithmetic,
        fp8_format=cache.fp8_format,
        plan=plan,
        backend=cache.backend,
    )
    return out[None]


@torch.library.custom_op("fp8calib::paged_attention", mutates_args=())
def _operator(
    layer: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    number = int(layer)  # on the CPU: nothing waits
    return _store_and_attend(number, query, key, value, scaling, sliding_window, softcap, sinks)


@_operator.register_fake
def _(
    layer: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


AttentionInterface.register(PAGED_ATTENTION, paged_attention)
