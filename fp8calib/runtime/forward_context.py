"""What attention needs to know about the forward pass it is part of.

It travels beside the model, not through its arguments: some models drop keyword arguments on the
way to their attention layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from fp8calib.runtime.kv_store import LayerCache

if TYPE_CHECKING:
    from fp8_paged_attention import DecodePlan, StepPlan


@dataclass(frozen=True)
class GroupTables:
    """Where the tokens of this pass lie in the pages of one group of layers.

    slot_mapping: int64 [T], the slot of each new token; block_table: int32 [B, max_blocks].
    """

    slot_mapping: torch.Tensor
    block_table: torch.Tensor


@dataclass(frozen=True)
class ForwardContext:
    """One forward pass over T new tokens of B sequences, packed into one row.

    layers: the cache of each layer; groups: the tables of each group of layers;
    cu_seqlens_q: int32 [B + 1], first row of each sequence; seq_lens: int32 [B], tokens of each
    sequence, the new ones included; max_seqlen_q: the most new tokens of a sequence; num_decodes:
    so many sequences have one new token each and come before longer ones; plans: of each layer,
    where its kernels take one.
    """

    layers: Mapping[int, LayerCache]
    groups: list[GroupTables]
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    max_seqlen_q: int
    num_decodes: int = 0
    plans: Mapping[int, DecodePlan | StepPlan] = field(default_factory=dict)


_current: ContextVar[ForwardContext] = ContextVar("fp8calib_forward_context")


def forward_context() -> ForwardContext:
    """The context of the running forward pass; LookupError outside of one."""
    return _current.get()


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[None]:
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)
