"""Paged attention over an FP8 KV cache, in Triton for GPUs and in torch for CPUs.

    store(key, value, k_pages, v_pages, slot_mapping, k_scale, v_scale)
        writes new tokens' K and V into pages;
    attend(query, k_pages, v_pages, block_table, cu_seqlens_q, seq_lens, max_seqlen_q=..., ...)
        attends new tokens to everything stored: prefill, chunked prefill, decode, mixed.

Tensors (T new tokens of B sequences, flattened; Hq query and Hkv KV heads):

    query         `[T, Hq, Dk]`   bfloat16, float16, float32, or float8_e4m3fn with ``q_scale``
    key, value    `[T, Hkv, Dk]`, `[T, Hkv, Dv]`  bfloat16, float16 or float32
    k_pages       `[num_pages, Hkv, page_size, Dk]`           uint8 (FP8) or native
    v_pages       `[num_pages, Hkv, page_size/16, Dv, 16]`    see :mod:`.layout`
    slot_mapping  `[T]`           int32 or int64: page * page_size + offset; -1 is not stored
    block_table   `[B, max_pages]` int32: the pages of each sequence; other entries are not read
    cu_seqlens_q  `[B + 1]`       int32: sequence b's new tokens are rows cu[b] to cu[b+1]
    seq_lens      `[B]`           int32: tokens of each sequence, the new ones included; 0 allowed
    k_scale, v_scale, q_scale     float32 `[1]` or `[Hkv]`; None is 1.0

The new tokens are a sequence's last ones and must have been stored. Query i of n sees keys up to
position ``seq_len - n + i`` (causal, aligned at the bottom right) and, with a sliding window of w,
the last w of them. A query that sees nothing (sequence length 0: padding) gives 0.

The arithmetic of FP8 pages is ``"accurate"`` (queries and probabilities as good as in 16 bit:
relative error below 5e-3 against float64 on the dequantised values) or ``"fp8"``
(FlashAttention-3's: queries quantised by ``q_scale``, probabilities in e4m3; about 2e-2).

``backend`` is ``"triton"`` or ``"torch"``; by default the tensors' device decides (CUDA: triton).
The torch backend also takes FP8 pages of K beside native ones of V, or the other way round.
"""

from typing import TYPE_CHECKING

import torch

from .layout import allocate, from_nhd, k_page_shape, page_bytes, to_nhd, v_page_shape
from .scale import E4M3, E5M2, FORMATS, Fp8Format, dequantize, quantize
from .torch_plan import StepPlan
from .validate import check_attend, check_decodes, check_plan, check_store, load_backend

if TYPE_CHECKING:
    from .plan import DecodePlan

__all__ = [
    "E4M3",
    "E5M2",
    "FORMATS",
    "DecodePlan",
    "Fp8Format",
    "StepPlan",
    "allocate",
    "attend",
    "dequantize",
    "from_nhd",
    "k_page_shape",
    "page_bytes",
    "quantize",
    "store",
    "to_nhd",
    "v_page_shape",
]


def store(
    key: torch.Tensor,
    value: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    *,
    fp8_format: str = "e4m3",
    plan: "DecodePlan | StepPlan | None" = None,
    backend: str | None = None,
) -> None:
    """Write new tokens' K and V into their slots, in place.

    FP8 pages get ``clamp(x / scale)`` rounded to nearest even, NaN as NaN; native pages get a
    cast. Slots must be distinct; -1 marks a row that is not stored.

    Args:
        key: `[T, Hkv, Dk]`, last axis contiguous.
        value: `[T, Hkv, Dv]`, last axis contiguous.
        k_pages: `[num_pages, Hkv, page_size, Dk]`.
        v_pages: `[num_pages, Hkv, page_size / 16, Dv, 16]`.
        slot_mapping: `[T]`, int32 or int64.
        k_scale, v_scale: float32 `[1]` or `[Hkv]` on the same device; only for FP8 pages.
        fp8_format: ``"e4m3"`` or ``"e5m2"``: what uint8 pages hold.
        plan: as in ``attend``, updated with ``slot_mapping`` too; the torch backend's saves it
            working out the slots.
        backend: ``"triton"``, ``"torch"`` or None.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit together.
    """
    check_store(key, value, k_pages, v_pages, slot_mapping, k_scale, v_scale, fp8_format)
    module = load_backend(backend, k_pages, v_pages)
    if isinstance(plan, StepPlan):
        plan.check_store(k_pages, v_pages, slot_mapping)
    module.store(
        key,
        value,
        k_pages,
        v_pages,
        slot_mapping,
        k_scale,
        v_scale,
        plan=plan,
        fp8_format=fp8_format,
    )


def attend(
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seqlen_q: int,
    num_decodes: int = 0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    arithmetic: str = "accurate",
    fp8_format: str = "e4m3",
    out: torch.Tensor | None = None,
    plan: "DecodePlan | StepPlan | None" = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Attend each sequence's new tokens to all of its stored tokens.

    Args:
        query: `[T, Hq, Dk]`, last axis contiguous; Hq a multiple of Hkv.
        k_pages: `[num_pages, Hkv, page_size, Dk]`.
        v_pages: `[num_pages, Hkv, page_size / 16, Dv, 16]`.
        block_table: `[B, max_pages]`, int32.
        cu_seqlens_q: `[B + 1]`, int32.
        seq_lens: `[B]`, int32.
        max_seqlen_q: an upper bound of the new tokens of one sequence (1 for plain decode).
        num_decodes: the first so many sequences have one new token each; the triton backend then
            decodes them and attends the others apart.
        k_scale, v_scale: float32 `[1]` or `[Hkv]` on the same device; only for FP8 pages.
        q_scale: float32 `[1]` or `[Hkv]` (one for the query heads of a KV head, made from their
            maximum); for float8 queries or ``arithmetic="fp8"``.
        scale: factor of the scores; default ``Dk ** -0.5``.
        sliding_window: tokens a query sees, itself included.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        sinks: `[Hq]`, logits that only enlarge each softmax's denominator (attention sinks).
        arithmetic: ``"accurate"`` or ``"fp8"``; native pages take only the first.
        fp8_format: ``"e4m3"`` or ``"e5m2"``: what uint8 pages hold.
        out: `[T, Hq, Dv]` to fill; default new, in the query's dtype (bfloat16 for float8).
        plan: the plan of this step, without which it is made (and memory allocated) at every
            call. Triton: a DecodePlan, updated with ``seq_lens`` (of the num_decodes first
            sequences, if that is given); for sequences of at most 8 new tokens. Torch: a StepPlan,
            updated with these very tensors.
        backend: ``"triton"``, ``"torch"`` or None.

    Returns:
        `[T, Hq, Dv]`; rows that belong to no sequence hold nothing of meaning.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit together, or an option out
            of its range.
    """
    if out is None:
        dtype = torch.bfloat16 if query.dtype == E4M3.dtype else query.dtype
        out = query.new_empty(*query.shape[:-1], v_pages.shape[3], dtype=dtype)
    check_attend(
        query,
        k_pages,
        v_pages,
        block_table,
        cu_seqlens_q,
        seq_lens,
        max_seqlen_q,
        out,
        k_scale=k_scale,
        v_scale=v_scale,
        q_scale=q_scale,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        arithmetic=arithmetic,
        fp8_format=fp8_format,
    )
    check_decodes(num_decodes, seq_lens)
    module = load_backend(backend, k_pages, v_pages)
    if plan is not None:
        if not isinstance(plan, module.Plan):
            raise ValueError(f"the plan must be a {module.Plan.__name__}, got {plan!r}")
        if isinstance(plan, StepPlan):
            plan.check_attend(k_pages, v_pages, block_table, cu_seqlens_q, seq_lens, sliding_window)
        else:
            planned = (seq_lens[:num_decodes], 1) if num_decodes else (seq_lens, max_seqlen_q)
            check_plan(plan, query, k_pages, v_pages, *planned, sliding_window)
    module.attend(
        query,
        k_pages,
        v_pages,
        block_table,
        cu_seqlens_q,
        seq_lens,
        out,
        max_seqlen_q=max_seqlen_q,
        num_decodes=num_decodes,
        plan=plan,
        k_scale=k_scale,
        v_scale=v_scale,
        q_scale=q_scale,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        arithmetic=arithmetic,
        fp8_format=fp8_format,
    )
    return out


def __getattr__(name: str) -> object:
    if name == "DecodePlan":  # imports triton, which a CPU build of torch does not bring
        from .plan import DecodePlan

        return DecodePlan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
