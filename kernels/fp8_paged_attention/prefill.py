"""Prefill: many new tokens a sequence attend to its pages, the new ones included.

A chunk of a prompt has hundreds of rows for every key it reads, so prefill is bound by matrix
products and exponentials, where decode is bound by memory. Chunks of several sequences lie packed
in one batch, and each sees what its sequence has in the pages already: cached context and new
tokens are one thing here, since `store` has run before.

1. A program takes TILE_Q new tokens of one sequence and query head; those with the most keys (the
   last of a sequence) start first. Programs beyond a sequence's tokens end at once.
2. It loads its Q, scales it by row where float16 could not hold it, and keeps it in registers.
3. Tile by tile it reads K in the order in which V's tokens lie in their groups of 16 (layout.py),
   so that no probability has to move, and V by whole groups.
4. FP8 codes are widened to float16 in registers, exactly. ``fp8`` arithmetic rounds Q and P to e4m3
   first: the numbers are those of FP8 products, the speed is not.
5. The softmax is the online one: a running maximum, a running sum, and a running output that both
   rescale (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). The maximum
   starts at -1e30 and not at -inf, so that a tile without a visible key gives zeros, not NaN.
6. k_scale goes into the scores, v_scale into the output, once.

Tokens that no sequence owns may hold anything: they are not loaded. Rows that see no key give 0.

This kernel is for every GPU and for Triton's interpreter, and is what prefill_hopper.py is compared
with. Left out: sharing K and V among the query heads of a group, FP8 products, and warps with
different jobs; prefill_hopper.py has the last two, where they gain most.
"""

import triton
import triton.language as tl

from .codec import decode, round_e4m3


@triton.jit
def _widen(x, FORMAT: tl.constexpr, DOT: tl.constexpr, CAST: tl.constexpr):
    return x.to(DOT) if FORMAT == 0 or CAST else decode(x, FORMAT == 2, DOT)


@triton.jit(do_not_specialize=["window", "table_stride"])
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    lens_ptr,
    starts_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_scale_ptr,
    sinks_ptr,
    score_scale,
    cap,
    window,
    q_stride,
    q_head_stride,
    out_stride,
    out_head_stride,
    table_stride,
    k_scale_stride,
    v_scale_stride,
    q_scale_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,
    DOT: tl.constexpr,
    Q_FP8: tl.constexpr,
    QUANTIZE: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    Q_SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAST: tl.constexpr,
):
    OFFSET: tl.constexpr = 8.0 if QUANTIZE else 0.0
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    q_head = tl.program_id(1)
    sequence = tl.program_id(2)
    head = q_head // GROUP
    start = tl.load(starts_ptr + sequence)
    new = tl.load(starts_ptr + sequence + 1) - start
    length = tl.load(lens_ptr + sequence)
    if block * TILE_Q < new:
        row = block * TILE_Q + tl.arange(0, TILE_Q)
        dk = tl.arange(0, DK_PAD)
        dv = tl.arange(0, DV_PAD)
        j = tl.arange(0, TILE)
        i = tl.arange(0, 16)
        group = tl.arange(0, TILE // 16)
        # K in the order of V's positions; see layout.py.
        token = j // 16 * 16 + j // 2 % 2 * 8 + j % 16 // 4 * 2 + j % 2
        group_token = group[:, None] * 16 + (i // 2 % 2 * 8 + i // 4 * 2 + i % 2)[None, :]
        scale = score_scale
        if K_SCALE:
            scale = scale * tl.load(k_scale_ptr + head * k_scale_stride)
        at = (start + row).to(tl.int64) * q_stride + q_head * q_head_stride
        q = tl.load(
            q_ptr + at[:, None] + dk[None, :],
            mask=(row < new)[:, None] & (dk < DK)[None, :],
            other=0.0,
        )
        q_scale = 1.0
        if Q_SCALE:
            q_scale = tl.load(q_scale_ptr + head * q_scale_stride)
            scale = scale * q_scale
        if Q_FP8:
            x = _widen(q, 1, tl.float32, CAST)
        else:
            x = q.to(tl.float32)
            if QUANTIZE:
                x = round_e4m3(tl.div_rn(x, q_scale), CAST, tl.float32)
        scales = tl.zeros([TILE_Q], tl.float32) + scale
        if DOT == tl.float16:  # wider numbers must fit float16
            largest = tl.maximum(tl.max(tl.abs(x), 1), 1e-20)
            x = x / largest[:, None]
            scales = scales * largest
        q = x.to(DOT)

        newest = length - new + row
        begin = 0
        if WINDOW:
            begin = tl.maximum(length - new + block * TILE_Q - window + 1, 0)
        end = tl.minimum(length, length - new + block * TILE_Q + TILE_Q)
        maximum = tl.full([TILE_Q], -1.0e30, tl.float32)
        total = tl.zeros([TILE_Q], tl.float32)
        acc = tl.zeros([TILE_Q, DV_PAD], tl.float32)
        table = table_ptr + sequence.to(tl.int64) * table_stride
        for tile in range(begin // TILE, (end + TILE - 1) // TILE):
            position = tile * TILE + token
            live = (position < end) & (position >= begin)
            page = tl.load(table + position // PAGE, mask=live, other=0).to(tl.int64)
            k_at = ((page * HEADS + head) * PAGE + position % PAGE) * DK
            k = tl.load(
                k_ptr + k_at[None, :] + dk[:, None],
                mask=live[None, :] & (dk < DK)[:, None],
                other=0.0,
            )
            group_position = tile * TILE + group_token
            group_live = (group_position < end) & (group_position >= begin)
            first = tile * TILE + group * 16
            page = tl.load(
                table + first // PAGE, mask=tl.max(group_live.to(tl.int32), 1) > 0, other=0
            ).to(tl.int64)
            v_at = ((page * HEADS + head) * (PAGE // 16) + first % PAGE // 16) * (DV * 16)
            v = tl.load(
                v_ptr + v_at[:, None, None] + (dv * 16)[None, :, None] + i[None, None, :],
                mask=group_live[:, None, :] & (dv < DV)[None, :, None],
                other=0.0,
            )
            v = tl.reshape(tl.permute(v, [0, 2, 1]), [TILE, DV_PAD])

            s = tl.dot(q, _widen(k, FORMAT, DOT, CAST)) * scales[:, None]
            if SOFTCAP:  # tanh; scale and cap come prepared
                s = cap - 2.0 * cap / (1.0 + tl.exp2(s * 2.8853900817779268))
            seen = position[None, :] <= newest[:, None]
            if WINDOW:
                seen = seen & (position[None, :] > (newest - window)[:, None])
            s = tl.where(seen, s, float("-inf"))
            larger = tl.maximum(maximum, tl.max(s, 1))
            fade = tl.exp2(maximum - larger)
            p = tl.exp2(s - (larger - OFFSET)[:, None])
            total = total * fade + tl.sum(p, 1)
            if QUANTIZE:
                p = round_e4m3(p, CAST, tl.float32)
            acc = acc * fade[:, None] + tl.dot(p.to(DOT), _widen(v, FORMAT, DOT, CAST))
            maximum = larger
        if SINKS:
            sink = tl.load(sinks_ptr + q_head).to(tl.float32)
            total += tl.exp2(sink * 1.4426950408889634 - maximum + OFFSET)
        v_scale = 1.0
        if V_SCALE:
            v_scale = tl.load(v_scale_ptr + head * v_scale_stride)
        acc = acc * tl.where(total > 0, v_scale / total, 0.0)[:, None]
        at = (start + row).to(tl.int64) * out_stride + q_head * out_head_stride
        tl.store(
            out_ptr + at[:, None] + dv[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=(row < new)[:, None] & (dv < DV)[None, :],
        )
