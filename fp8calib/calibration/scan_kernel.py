"""`statistics.scan` as one Triton kernel: |x| is read once, where torch would go over it ten times.

Each program looks at some tokens of one row's head. Maxima go through atomic_max on the bits of
float32 (which order like the values), counts through atomic_add into one of COPIES histograms, so
that programs rarely wait for each other's counters. Both are exact in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COPIES = 8


@triton.jit
def _scan(  # type: ignore[no-untyped-def]
    x_ptr,
    position_ptr,
    maxima_ptr,
    counts_ptr,
    stride_b,
    stride_h,
    stride_t,
    stride_d,
    tokens,
    rows,
    heads,
    SINKS: tl.constexpr,
    SHIFT: tl.constexpr,
    FIRST: tl.constexpr,
    BUCKETS: tl.constexpr,
    COPIES: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    part = tl.program_id(0)
    row = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    t = part * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    position = tl.load(position_ptr + row * tokens + t, mask=t < tokens, other=-1)
    real = (position >= 0)[:, None] & (d < D)[None, :]
    place = row.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    offset = t.to(tl.int64)[:, None] * stride_t + d[None, :] * stride_d
    x = tl.load(x_ptr + place + offset, mask=real, other=0.0).to(tl.float32)
    code = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    early = (position < SINKS)[:, None]
    slot = row * heads + head
    tl.atomic_max(maxima_ptr + slot, tl.max(tl.max(tl.where(early, code, 0), 1), 0))
    tl.atomic_max(maxima_ptr + rows * heads + slot, tl.max(tl.max(tl.where(early, 0, code), 1), 0))
    bucket = tl.minimum(tl.maximum((code >> SHIFT) - FIRST, 0), BUCKETS - 1)
    copy = (part + row) % COPIES
    counters = counts_ptr + (copy * heads + head).to(tl.int64) * BUCKETS + bucket
    tl.atomic_add(counters, 1, mask=real, sem="relaxed")


def scan(
    x: torch.Tensor,
    real: torch.Tensor | None,
    *,
    sinks: int,
    shift: int,
    first: int,
    buckets: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Maxima of |x| over each row's first `sinks` real tokens and over the rest, float32
    [B, heads], and the histogram, int64 [heads, buckets].

    Args:
        x: floating point [B, heads, T, D], any strides, on a GPU.
        real: bool [B, T], None when all tokens are real.
        shift, first: a value falls into bucket ``(bits >> shift) - first``, clamped to the ends.
    """
    rows, heads, tokens, dim = x.shape
    if real is None:
        position = torch.arange(tokens, dtype=torch.int32, device=x.device).repeat(rows, 1)
    else:
        position = (real.cumsum(1) - 1).masked_fill(~real, -1).to(torch.int32)
    maxima = torch.zeros(2, rows, heads, dtype=torch.int32, device=x.device)
    counts = torch.zeros(COPIES, heads, buckets, dtype=torch.int32, device=x.device)
    block_d = triton.next_power_of_2(dim)
    block_t = max(4096 // block_d, 1)
    _scan[(triton.cdiv(tokens, block_t), rows * heads)](
        x,
        position,
        maxima,
        counts,
        *x.stride(),
        tokens,
        rows,
        heads,
        SINKS=sinks,
        SHIFT=shift,
        FIRST=first,
        BUCKETS=buckets,
        COPIES=COPIES,
        D=dim,
        BLOCK_D=block_d,
        BLOCK_T=block_t,
    )
    early, late = maxima.view(torch.float32)
    return early, late, counts.sum(0)
