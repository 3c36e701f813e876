"""Writing K and V into pages.

Two kernels, because V is stored transposed in groups of 16 tokens:
``_store_tokens`` takes one token and head a program and writes V byte by byte: decode.
``_store_groups`` takes some consecutive rows and looks for whole groups among them, which it
transposes and writes 16 contiguous entries at a time; other rows go byte by byte: prefill.
"""

import torch
import triton
import triton.language as tl

from .codec import encode
from .device import hardware
from .layout import GROUP
from .scale import get_format

MAX_TOKENS_ONE_BY_ONE = 1024
"""Up to so many tokens a call, a program for each is faster than looking for groups."""

GROUP_ROWS = 16
GROUP_WARPS = 2


@triton.jit
def _values(
    x,
    scale_ptr,
    head,
    scale_stride,
    SCALE: tl.constexpr,
    FORMAT: tl.constexpr,
    CAST: tl.constexpr,
    PAGES: tl.constexpr,
):
    """Input as page entries: FP8 codes, or a cast."""
    if FORMAT == 0:
        return x.to(PAGES)
    else:
        x = x.to(tl.float32)
        if SCALE:
            # Correctly rounded: the faster division of Triton changes codes at ties.
            x = tl.div_rn(x, tl.load(scale_ptr + head * scale_stride))
        return encode(x, FORMAT == 2, CAST)


@triton.jit
def _position(offset):
    """Where token ``offset`` of a page lies in its group; see layout.py."""
    return (offset % 8) // 2 * 4 + offset % 16 // 8 * 2 + offset % 2


@triton.jit
def _store_tokens(
    key_ptr,
    value_ptr,
    k_ptr,
    v_ptr,
    slot_ptr,
    k_scale_ptr,
    v_scale_ptr,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    k_scale_stride,
    v_scale_stride,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    FORMAT: tl.constexpr,
    CAST: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot >= 0:
        page_head = slot // PAGE * HEADS + head
        offset = slot % PAGE
        dk = tl.arange(0, DK_PAD)
        dv = tl.arange(0, DV_PAD)
        row = token.to(tl.int64)
        k = tl.load(key_ptr + row * key_stride + head * key_head_stride + dk, mask=dk < DK)
        v = tl.load(value_ptr + row * value_stride + head * value_head_stride + dv, mask=dv < DV)
        k = _values(
            k, k_scale_ptr, head, k_scale_stride, K_SCALE, FORMAT, CAST, k_ptr.dtype.element_ty
        )
        v = _values(
            v, v_scale_ptr, head, v_scale_stride, V_SCALE, FORMAT, CAST, v_ptr.dtype.element_ty
        )
        tl.store(k_ptr + (page_head * PAGE + offset) * DK + dk, k, mask=dk < DK)
        group = v_ptr + (page_head * (PAGE // 16) + offset // 16) * (DV * 16)
        tl.store(group + dv * 16 + _position(offset), v, mask=dv < DV)


@triton.jit
def _whole_groups(slot_ptr, first, num_tokens, ROWS: tl.constexpr):
    """Which of the runs of 16 rows from ``first`` on are one group's 16 tokens in order.

    Returns the slots of the runs' first rows and the flags, both `[ROWS / 16]`.
    """
    i = tl.arange(0, ROWS)
    row = first + i
    slot = tl.load(slot_ptr + row, mask=(row >= 0) & (row < num_tokens), other=-1).to(tl.int64)
    start = tl.reshape(slot - i % 16, [ROWS // 16, 16])
    smallest = tl.min(start, 1)
    whole = (smallest == tl.max(start, 1)) & (smallest >= 0) & (smallest % 16 == 0)
    return smallest, whole


@triton.jit
def _first_group(slot_ptr, block, num_tokens, ROWS: tl.constexpr):
    """The first row of a block whose token is the first of a group; past the block if none is."""
    row = block * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slot_ptr + row, mask=(row >= 0) & (row < num_tokens), other=-1)
    return tl.min(tl.where((slot >= 0) & (slot % 16 == 0), row, block * ROWS + ROWS), 0)


@triton.jit(do_not_specialize=["num_tokens"])
def _store_groups(
    key_ptr,
    value_ptr,
    k_ptr,
    v_ptr,
    slot_ptr,
    k_scale_ptr,
    v_scale_ptr,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    k_scale_stride,
    v_scale_stride,
    num_tokens,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    FORMAT: tl.constexpr,
    CAST: tl.constexpr,
    ROWS: tl.constexpr,
):
    block = tl.program_id(0)
    head = tl.program_id(1)
    GROUPS: tl.constexpr = ROWS // 16
    i = tl.arange(0, ROWS)
    dk = tl.arange(0, DK_PAD)
    dv = tl.arange(0, DV_PAD)
    rows = (block * ROWS + i).to(tl.int64)
    slot = tl.load(slot_ptr + rows, mask=rows < num_tokens, other=-1).to(tl.int64)
    page_head = slot // PAGE * HEADS + head
    offset = slot % PAGE
    stored = slot >= 0

    mask = stored[:, None] & (dk < DK)[None, :]
    k = tl.load(
        key_ptr + (rows * key_stride + head * key_head_stride)[:, None] + dk[None, :], mask=mask
    )
    k = _values(k, k_scale_ptr, head, k_scale_stride, K_SCALE, FORMAT, CAST, k_ptr.dtype.element_ty)
    tl.store(k_ptr + ((page_head * PAGE + offset) * DK)[:, None] + dk[None, :], k, mask=mask)

    # This block owns the groups that begin in it; its first rows may end a group of the last one.
    first = _first_group(slot_ptr, block, num_tokens, ROWS)
    start, whole = _whole_groups(slot_ptr, first, num_tokens, ROWS)
    before = _first_group(slot_ptr, block - 1, num_tokens, ROWS)
    _, whole_before = _whole_groups(slot_ptr, before, num_tokens, ROWS)
    g = tl.arange(0, GROUPS)
    begins_here = first + g * 16 < block * ROWS + ROWS
    whole = whole & begins_here
    whole_before = whole_before & (before + g * 16 < block * ROWS)
    mine = (rows[:, None] - first) // 16 == g[None, :]
    mine = mine & (rows[:, None] >= first)
    theirs = (rows[:, None] - before) // 16 == g[None, :]
    covered = tl.sum((mine & whole[None, :]).to(tl.int32), 1)
    covered += tl.sum((theirs & whole_before[None, :]).to(tl.int32), 1)

    if tl.max(whole.to(tl.int32), 0) > 0:
        # Read rows in the order of positions; transposed, 16 of them lie next to each other.
        token = i // 16 * 16 + i // 2 % 2 * 8 + i % 16 // 4 * 2 + i % 2
        source = (first + token).to(tl.int64)
        in_whole = tl.sum((((i // 16)[:, None] == g[None, :]) & whole[None, :]).to(tl.int32), 1) > 0
        v = tl.load(
            value_ptr + (source * value_stride + head * value_head_stride)[:, None] + dv[None, :],
            mask=in_whole[:, None] & (dv < DV)[None, :],
        )
        v = _values(
            v, v_scale_ptr, head, v_scale_stride, V_SCALE, FORMAT, CAST, v_ptr.dtype.element_ty
        )
        v = tl.permute(tl.reshape(v, [GROUPS, 16, DV_PAD]), [0, 2, 1])
        group = (start // PAGE * HEADS + head) * (PAGE // 16) + start % PAGE // 16
        target = v_ptr + (group * (DV * 16))[:, None, None] + (dv * 16)[None, :, None]
        tl.store(
            target + tl.arange(0, 16)[None, None, :],
            v,
            mask=whole[:, None, None] & (dv < DV)[None, :, None],
        )
    single = stored & (covered == 0)
    if tl.max(single.to(tl.int32), 0) > 0:
        mask = single[:, None] & (dv < DV)[None, :]
        v = tl.load(
            value_ptr + (rows * value_stride + head * value_head_stride)[:, None] + dv[None, :],
            mask=mask,
        )
        v = _values(
            v, v_scale_ptr, head, v_scale_stride, V_SCALE, FORMAT, CAST, v_ptr.dtype.element_ty
        )
        group = (page_head * (PAGE // 16) + offset // 16) * (DV * 16)
        tl.store(v_ptr + (group + _position(offset))[:, None] + (dv * 16)[None, :], v, mask=mask)


def store(
    key: torch.Tensor,
    value: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    *,
    plan: object,
    fp8_format: str,
) -> None:
    """Launch the kernel that suits the number of tokens; see :func:`fp8_paged_attention.store`
    (needs no plan)."""
    num_tokens, num_heads, head_dim_k = key.shape
    head_dim_v = value.shape[2]
    if num_tokens == 0:
        return
    code = 0
    if k_pages.dtype == torch.uint8:
        code = 2 if get_format(fp8_format).name == "e5m2" else 1
    args = (
        key,
        value,
        k_pages,
        v_pages,
        slot_mapping,
        k_pages if k_scale is None else k_scale,
        v_pages if v_scale is None else v_scale,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        scale_stride(k_scale),
        scale_stride(v_scale),
    )
    constants = {
        "HEADS": num_heads,
        "DK": head_dim_k,
        "DV": head_dim_v,
        "DK_PAD": triton.next_power_of_2(head_dim_k),
        "DV_PAD": triton.next_power_of_2(head_dim_v),
        "PAGE": k_pages.shape[2],
        "K_SCALE": k_scale is not None,
        "V_SCALE": v_scale is not None,
        "FORMAT": code,
        "CAST": hardware(k_pages.device).has_fp8,
    }
    if num_tokens <= MAX_TOKENS_ONE_BY_ONE:
        _store_tokens[(num_tokens, num_heads)](*args, **constants, num_warps=1)
    else:
        grid = (triton.cdiv(num_tokens, GROUP_ROWS), num_heads)
        _store_groups[grid](*args, num_tokens, **constants, ROWS=GROUP_ROWS, num_warps=GROUP_WARPS)


def scale_stride(scale: torch.Tensor | None) -> int:
    """Elements from one head's scale to the next: 0 for one scale for all."""
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)


assert GROUP == 16  # the kernels spell it out
