"""Decode: a few new tokens a sequence attend to its pages.

What
    For every sequence and KV head, softmax(q K^T) V over all pages, for the G query heads of the
    group and the 1 to 8 new tokens: G times new tokens *columns*. The keys are thousands, the
    columns few, so time is reading K and V once; everything below serves keeping memory busy.

How
    1. Operands are swapped. A matrix instruction of Hopper has at least 64 rows, and a group has
       1 to 16 columns, so keys are the rows: S^T = K Q^T is `[tile, columns]`, and
       O^T = V^T P^T is `[head_dim, columns]`. With V stored transposed (layout.py) both FP8
       matrices go from memory to the tensor cores without a conversion.
    2. Q and P are written as two e4m3 numbers, ``x = hi + lo / F`` (F is 16 for Q and 32 for P).
       The instruction has at least 16 columns and most groups need at most 8: hi occupies one
       half and lo the other, and precision like that of 16 bits comes for nothing. ``fp8``
       arithmetic leaves lo out. P is scaled by 2^8 to use e4m3's range.
    3. The softmax runs online (Milakov and Gimelshein, 2018; FlashAttention) with a running maximum
       and sum for each column; each tile's P V is added in float32, so the error does not grow
       with the length.
    4. K is read in the order of V's positions, so P comes out in V's order; the sum over tokens
       does not care.
    5. A plan made once a step on the device (plan.py) says which tiles a program attends. Pairs cut
       into pieces leave partial results with their log-sum-exp, which a second small kernel joins.
       Programmatic dependent launch hides its start.
    6. The next tile's page number is loaded one tile ahead, so that loads of K and V never wait for
       the block table.
    7. Tiles with masked tokens (the sequence's end, the window's beginning) run in a loop of their
       own that zeroes dead tokens, NaN included; the loop over whole tiles masks nothing.

Why not one launch
    Letting the last piece of a pair join them costs more than the second launch once a pair has 16
    pieces, and the same where nothing is cut (measured).

Elsewhere
    Native pages and GPUs without FP8 (before SM 89) take the same kernel with 16-bit operands,
    FP8 codes widened in registers. The explicit Hopper version is decode_hopper.py.
"""

import triton
import triton.language as tl

from .codec import decode, round_e4m3, to_e4m3

ACCURATE = tl.constexpr(0)
FP8 = tl.constexpr(1)
WIDE = tl.constexpr(2)  # 16-bit operands
LOW = tl.constexpr(-1.0e30)  # a running maximum's start: finite, so that LOW - LOW is 0
Q_LO = tl.constexpr(16.0)
P_LO = tl.constexpr(32.0)


@triton.jit
def _halves(x):
    """`[M, 2N]` as its left and right halves, a renaming of registers."""
    x = tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2])
    return tl.split(tl.permute(x, [0, 2, 1]))


@triton.jit
def _both(left, right):
    """`[M, N]` twice as `[M, 2N]`."""
    x = tl.permute(tl.join(left, right), [0, 2, 1])
    return tl.reshape(x, [left.shape[0], 2 * left.shape[1]])


@triton.jit
def _operand(x, FORMAT: tl.constexpr, MODE: tl.constexpr, DOT: tl.constexpr, CAST: tl.constexpr):
    """Page entries as a matrix operand: FP8 as it is, or widened. Without CAST, FP8 is uint8."""
    if MODE != WIDE:
        return x if CAST else x.to(tl.float8e5 if FORMAT == 2 else tl.float8e4nv, bitcast=True)
    else:
        return x.to(DOT) if FORMAT == 0 or CAST else decode(x, FORMAT == 2, DOT)


@triton.jit
def _load_query(
    q_ptr,
    column_offset,
    live,
    scale,
    q_scale,
    DK: tl.constexpr,
    DK_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    MODE: tl.constexpr,
    Q_FP8: tl.constexpr,
    DOT: tl.constexpr,
    QUANTIZE: tl.constexpr,
    CAST: tl.constexpr,
):
    """Queries as the right operand `[DK_PAD, WIDTH]`, and the scale of each column's scores."""
    dk = tl.arange(0, DK_PAD)
    q = tl.load(
        q_ptr + column_offset[None, :] + dk[:, None],
        mask=live[None, :] & (dk < DK)[:, None],
        other=0.0,
    )
    if Q_FP8:
        q = _operand(q, 1, MODE, tl.float32, CAST)
    if MODE == ACCURATE:  # columns hold each query twice: the left half becomes hi, the right lo
        left = tl.arange(0, WIDTH) < WIDTH // 2
        if Q_FP8:
            x = q.to(tl.float32)
            scale = scale * q_scale + tl.zeros_like(column_offset).to(tl.float32)
        else:
            x = q.to(tl.float32)
            largest = tl.maximum(tl.max(tl.abs(x), 0), 1e-20)
            x = x * (448.0 / largest)[None, :]
            scale = scale * (largest / 448.0)
        hi = to_e4m3(x, CAST).to(tl.float32)
        q = to_e4m3(tl.where(left[None, :], hi, (x - hi) * Q_LO), CAST)
    else:
        scale = scale * q_scale + tl.zeros_like(column_offset).to(tl.float32)
        if MODE == FP8:
            if not Q_FP8:
                q = to_e4m3(tl.clamp(tl.div_rn(q.to(tl.float32), q_scale), -448.0, 448.0), CAST)
        else:
            x = q.to(tl.float32)
            if QUANTIZE and not Q_FP8:
                x = round_e4m3(tl.div_rn(x, q_scale), CAST, tl.float32)
            if DOT == tl.float16:  # wider numbers must fit float16
                largest = tl.maximum(tl.max(tl.abs(x), 0), 1e-20)
                x = x / largest[None, :]
                scale = scale * largest
            q = x.to(DOT)
    return q, scale


@triton.jit
def _probabilities(
    q,
    k,
    maximum,
    total,
    scale,
    cap,
    seen,
    MASK: tl.constexpr,
    MODE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """A tile's part of the online softmax: k `[tile, DK]`, seen `[tile, columns]`."""
    s = tl.dot(k, q)
    if MODE == ACCURATE:
        hi, lo = _halves(s)
        s = hi + lo * (1.0 / Q_LO)
    s = s * scale[None, :]
    if SOFTCAP:  # tanh; scale and cap come prepared
        s = cap - 2.0 * cap / (1.0 + tl.exp2(s * 2.8853900817779268))
    if MASK:
        s = tl.where(seen, s, float("-inf"))
    new = tl.maximum(maximum, tl.max(s, 0))
    fade = tl.exp2(maximum - new)
    p = tl.exp2(s - (new - OFFSET)[None, :])
    return p, new, total * fade[None, :] + p, fade


@triton.jit
def _output(
    p, v, MODE: tl.constexpr, DOT: tl.constexpr, QUANTIZE: tl.constexpr, CAST: tl.constexpr
):
    """V^T P^T of a tile: p `[tile, columns]`, v `[DV, tile]`."""
    if MODE == ACCURATE:
        hi = to_e4m3(p, CAST)
        lo = to_e4m3((p - hi.to(tl.float32)) * P_LO, CAST)
        o, rest = _halves(tl.dot(v, _both(hi, lo)))
        return o + rest * (1.0 / P_LO)
    elif MODE == FP8:
        return tl.dot(v, to_e4m3(p, CAST))
    else:
        if QUANTIZE:
            p = round_e4m3(p, CAST, tl.float32)
        return tl.dot(v, p.to(DOT))


@triton.jit
def _tile_pages(table_ptr, tile, live, UNIT: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr):
    """Page numbers of a tile: of the whole tile, or of each of its runs of UNIT tokens."""
    tile = tl.maximum(tile, 0)
    if PAGE >= TILE:
        return tl.load(table_ptr + tile // (PAGE // TILE))
    else:
        i = tile * (TILE // PAGE) + tl.arange(0, TILE // UNIT) * UNIT // PAGE
        return tl.load(table_ptr + i, mask=live, other=0)


@triton.jit
def _load_k(
    k_ptr,
    pages,
    tile,
    head,
    token,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DK_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
):
    """K of a tile `[TILE, DK_PAD]`, in the order of V's positions."""
    dk = tl.arange(0, DK_PAD)
    base = (pages.to(tl.int64) * HEADS + head) * (PAGE * DK)
    if PAGE >= TILE:
        rows = base + (tile % (PAGE // TILE) * TILE + token) * DK
    else:
        rows = base + token % PAGE * DK
    at = k_ptr + rows[:, None] + dk[None, :]
    if DK == DK_PAD:
        return tl.load(at, eviction_policy="evict_first")
    else:
        return tl.load(at, mask=(dk < DK)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_v(
    v_ptr,
    pages,
    tile,
    head,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
):
    """V of a tile `[DV_PAD, TILE]`: groups as they lie in memory, turned in registers."""
    dv = tl.arange(0, DV_PAD)
    group = tl.arange(0, TILE // 16)
    i = tl.arange(0, 16)
    base = (pages.to(tl.int64) * HEADS + head) * (PAGE * DV)
    if PAGE >= TILE:
        groups = base + (tile % (PAGE // TILE) * (TILE // 16) + group) * (DV * 16)
    else:
        groups = base + group % (PAGE // 16) * (DV * 16)
    at = v_ptr + groups[:, None, None] + (dv * 16)[None, :, None] + i[None, None, :]
    if DV == DV_PAD:
        v = tl.load(at, eviction_policy="evict_first")
    else:
        v = tl.load(at, mask=(dv < DV)[None, :, None], other=0.0, eviction_policy="evict_first")
    return tl.reshape(tl.permute(v, [1, 0, 2]), [DV_PAD, TILE])


@triton.jit(do_not_specialize=["window", "table_stride"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    entries_ptr,
    table_ptr,
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
    MAX_NEW: tl.constexpr,
    COLUMNS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    MODE: tl.constexpr,
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
    PDL: tl.constexpr,
):
    OFFSET: tl.constexpr = 0.0 if MODE == WIDE and not QUANTIZE else 8.0
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    WIDTH: tl.constexpr = 2 * COLUMNS if MODE == ACCURATE else COLUMNS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    q_column = tl.program_id(1) * COLUMNS + tl.arange(0, WIDTH) % COLUMNS
    row = tl.arange(0, TILE)
    token = row // 16 * 16 + row // 2 % 2 * 8 + row % 16 // 4 * 2 + row % 2
    group_row = tl.arange(0, TILE // 16)
    dv = tl.arange(0, DV_PAD)

    entry = tl.program_id(0)
    entry = tl.where(tl.load(entries_ptr + entry * 8) < 0, -1, entry)
    while entry >= 0:
        fields = entries_ptr + entry * 8
        sequence = tl.load(fields)
        head = tl.load(fields + 1)
        first = tl.load(fields + 2)
        end = tl.load(fields + 3)
        slot = tl.load(fields + 4)
        entry = tl.load(fields + 5)
        length = tl.load(fields + 6)
        start = tl.load(starts_ptr + sequence)
        new = tl.load(starts_ptr + sequence + 1) - start
        table = table_ptr + sequence.to(tl.int64) * table_stride
        # The first token that any query sees; the tiles in which all see all.
        begin = 0
        whole_first = first
        if WINDOW:
            begin = tl.maximum(length - new - window + 1, 0)
            whole_first = tl.maximum(first, (tl.maximum(length - window, 0) + TILE - 1) // TILE)
        whole_end = tl.minimum(end, tl.maximum(length - new + 1, 0) // TILE)
        whole_first = tl.minimum(whole_first, end)
        whole_end = tl.maximum(whole_end, whole_first)
        after = tl.minimum(whole_first, whole_end - 1)
        next_k = _tile_pages(table, after, row * 0 <= after, 1, TILE, PAGE)
        next_v = _tile_pages(table, after, group_row * 0 <= after, 16, TILE, PAGE)
        if PDL:
            tl.extra.cuda.gdc_wait()

        scale = score_scale
        if K_SCALE:
            scale = scale * tl.load(k_scale_ptr + head * k_scale_stride)
        q_scale = 1.0
        if Q_SCALE:
            q_scale = tl.load(q_scale_ptr + head * q_scale_stride)
        at_query = (start + q_column // GROUP).to(tl.int64) * q_stride
        at_query += (head * GROUP + q_column % GROUP) * q_head_stride
        q, scales = _load_query(
            q_ptr,
            at_query,
            q_column < GROUP * new,
            scale,
            q_scale,
            DK,
            DK_PAD,
            WIDTH,
            MODE,
            Q_FP8,
            DOT,
            QUANTIZE,
            CAST,
        )
        if MODE == ACCURATE:  # both halves have the same scales
            scales = tl.max(tl.reshape(scales, [2, COLUMNS]), 0)
        maximum = tl.full([COLUMNS], LOW, tl.float32)
        total = tl.zeros([TILE, COLUMNS], tl.float32)
        acc = tl.zeros([DV_PAD, COLUMNS], tl.float32)

        for tile in tl.range(whole_first, whole_end, num_stages=STAGES):
            k_pages = next_k
            v_pages = next_v
            after = tl.minimum(tile + 1, whole_end - 1)
            next_k = _tile_pages(table, after, row >= 0, 1, TILE, PAGE)
            next_v = _tile_pages(table, after, group_row >= 0, 16, TILE, PAGE)
            k = _load_k(k_ptr, k_pages, tile, head, token, HEADS, DK, DK_PAD, PAGE, TILE)
            k = _operand(k, FORMAT, MODE, DOT, CAST)
            p, maximum, total, fade = _probabilities(
                q, k, maximum, total, scales, cap, 0, False, MODE, SOFTCAP, OFFSET
            )
            v = _load_v(v_ptr, v_pages, tile, head, HEADS, DV, DV_PAD, PAGE, TILE)
            v = _operand(v, FORMAT, MODE, DOT, CAST)
            acc = acc * fade[None, :] + _output(p, v, MODE, DOT, QUANTIZE, CAST)

        # Two stages, so that V comes through shared memory as above: Triton 3.6 turns tiles that
        # come from registers wrongly (16-bit entries and four warps).
        before = whole_first - first
        for j in tl.range(0, before + end - whole_end, num_stages=2):
            tile = tl.where(j < before, first + j, whole_end + j - before)
            position = tile * TILE + token
            live = (position < length) & (position >= begin)
            # Pages without a live token may be anything; read page 0 instead.
            k_pages = _tile_pages(table, tile, live, 1, TILE, PAGE)
            group_token = tile * TILE + group_row * 16
            some = (group_token < length) & (group_token + 16 > begin)
            v_pages = _tile_pages(table, tile, some, 16, TILE, PAGE)
            if PAGE >= TILE:
                k_pages = tl.maximum(k_pages, 0)
                v_pages = k_pages
            k = _load_k(k_ptr, k_pages, tile, head, token, HEADS, DK, DK_PAD, PAGE, TILE)
            k = _operand(k, FORMAT, MODE, DOT, CAST)
            newest = length - new + column // GROUP
            seen = position[:, None] <= newest[None, :]
            if WINDOW:
                seen = seen & (position[:, None] > (newest - window)[None, :])
            p, maximum, total, fade = _probabilities(
                q, k, maximum, total, scales, cap, seen, True, MODE, SOFTCAP, OFFSET
            )
            v = _load_v(v_ptr, v_pages, tile, head, HEADS, DV, DV_PAD, PAGE, TILE)
            v = tl.where(live[None, :], v, tl.zeros_like(v))
            v = _operand(v, FORMAT, MODE, DOT, CAST)
            acc = acc * fade[None, :] + _output(p, v, MODE, DOT, QUANTIZE, CAST)

        total_sum = tl.sum(total, 0)
        v_scale = 1.0
        if V_SCALE:
            v_scale = tl.load(v_scale_ptr + head * v_scale_stride)
        live_column = column < GROUP * new
        if slot < 0:
            if SINKS:
                sink = tl.load(sinks_ptr + head * GROUP + column % GROUP, mask=live_column)
                total_sum += tl.exp2(sink.to(tl.float32) * 1.4426950408889634 - maximum + OFFSET)
            inverse = tl.where(total_sum > 0, v_scale / total_sum, 0.0)
            at = (start + column // GROUP).to(tl.int64) * out_stride
            at += (head * GROUP + column % GROUP) * out_head_stride
            tl.store(
                out_ptr + at[None, :] + dv[:, None],
                (acc * inverse[None, :]).to(out_ptr.dtype.element_ty),
                mask=live_column[None, :] & (dv < DV)[:, None],
            )
        else:
            inverse = tl.where(total_sum > 0, v_scale / total_sum, 0.0)
            lse = tl.where(total_sum > 0, maximum + tl.log2(total_sum) - OFFSET, LOW)
            at = slot.to(tl.int64) * (GROUP * MAX_NEW) + column
            tl.store(
                partial_ptr + at[None, :] * DV + dv[:, None],
                acc * inverse[None, :],
                mask=live_column[None, :] & (dv < DV)[:, None],
            )
            tl.store(lse_ptr + at, lse, mask=live_column)


@triton.jit
def _join_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    pairs_ptr,
    starts_ptr,
    sinks_ptr,
    out_stride,
    out_head_stride,
    GROUP: tl.constexpr,
    MAX_NEW: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    PIECES: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Join the pieces of pair program_id(0) for column program_id(1)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    at = pairs_ptr + tl.program_id(0) * 4
    column = tl.program_id(1)
    sequence = tl.load(at)
    head = tl.load(at + 1)
    slot = tl.load(at + 2)
    pieces = tl.load(at + 3)
    start = tl.load(starts_ptr + sequence)
    new = tl.load(starts_ptr + sequence + 1) - start
    if PDL:
        tl.extra.cuda.gdc_wait()
    if (pieces > 1) & (column < GROUP * new):
        dv = tl.arange(0, DV_PAD)
        i = tl.arange(0, PIECES)
        maximum = LOW
        total = 0.0
        acc = tl.zeros([DV_PAD], tl.float32)
        if SINKS:
            sink = tl.load(sinks_ptr + head * GROUP + column % GROUP).to(tl.float32)
            maximum = sink * 1.4426950408889634
            total = 1.0
        for done in range(0, pieces, PIECES):
            there = done + i < pieces
            piece = (slot + done + i).to(tl.int64) * (GROUP * MAX_NEW) + column
            lse = tl.load(lse_ptr + piece, mask=there, other=LOW)
            o = tl.load(
                partial_ptr + piece[:, None] * DV + dv[None, :],
                mask=there[:, None] & (dv < DV)[None, :],
                other=0.0,
            )
            larger = tl.maximum(maximum, tl.max(lse, 0))
            fade = tl.exp2(maximum - larger)
            weight = tl.where(lse > LOW, tl.exp2(lse - larger), 0.0)
            total = total * fade + tl.sum(weight, 0)
            acc = acc * fade + tl.sum(o * weight[:, None], 0)
            maximum = larger
        at_out = (start + column // GROUP).to(tl.int64) * out_stride
        at_out += (head * GROUP + column % GROUP) * out_head_stride
        o = tl.where(total > 0, acc / total, 0.0)
        tl.store(out_ptr + at_out + dv, o.to(out_ptr.dtype.element_ty), mask=dv < DV)
