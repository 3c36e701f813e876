"""Decode for Hopper with explicit layouts, in Gluon: the kernel of decode.py, step for step.

What it adds is control that plain Triton does not give:

1. V's groups are copied as they lie in memory, 512 consecutive bytes by a warp, and go from shared
   memory to the registers of the matrix instruction's left operand, while the instruction that
   multiplies K runs. (Copying a group's 16-byte rows straight into the swizzled tile that the
   instruction could read itself splits every 32-byte sector of memory in two: 1.4 times slower.)
2. The rows of K are ordered so that the four keys whose scores a thread holds are neighbours in
   P, which goes through shared memory: words are stored instead of bytes.
3. The copies of a later tile are issued before the softmax, and run under it.
4. Dead tokens of V are zeroed in shared memory, in the rare tiles that have some, so one pipelined
   loop covers all tiles.

Gluon's interface changes between releases of Triton: ``GLUON_TESTED`` in triton_backend.py says
with which this kernel was tested. With others, and on other GPUs, decode.py's kernel runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ACCURATE = gl.constexpr(0)
FP8 = gl.constexpr(1)
WIDE = gl.constexpr(2)
LOW = gl.constexpr(-1.0e30)
Q_LO = gl.constexpr(16.0)
P_LO = gl.constexpr(32.0)

# Renamed in Triton 3.9.
_copy = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)


@gluon.constexpr_function
def _v_operand(tile, head_dim, entry_bytes):
    """Registers of the left operand `[head_dim, tile]`, by groups `[tile/16, head_dim, 16]`.

    A thread holds 4 consecutive bytes of rows r and r + 8, and the same 16 bytes on (PTX ISA,
    wgmma register fragments).
    """
    per_word = 4 // entry_bytes
    tokens = [1 << i for i in range(tile.bit_length() - 1)]
    in_word = [t for t in tokens if t < per_word]
    lane = [t for t in tokens if per_word <= t < 4 * per_word]
    further = [t for t in tokens if t >= 4 * per_word]
    rows = [64 << i for i in range((head_dim // 64).bit_length() - 1)]

    def at(token, row=0):
        return [token // 16, row, token % 16]

    return gl.DistributedLinearLayout(
        reg_bases=[*map(at, in_word), [0, 8, 0], *map(at, further), *([0, r, 0] for r in rows)],
        lane_bases=[*map(at, lane), [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[0, 16, 0], [0, 32, 0]],
        block_bases=[],
        shape=[tile // 16, head_dim, 16],
    )


@gluon.jit
def _token_of_row(row, TILE: gl.constexpr):
    """The token that row of K's tile holds.

    A thread of the instruction has rows r, r + 8, and in a tile of 128 also r + 64, r + 72: they
    take consecutive positions of P and V. Where V has which token: layout.py.
    """
    position = (row // 16 % 4 * 8 + row % 8) * (TILE // 32) + row // 64 * 2 + row // 8 % 2
    return position // 16 * 16 + position // 2 % 2 * 8 + position % 16 // 4 * 2 + position % 2


@gluon.jit
def _in_order(p, TILE: gl.constexpr):
    """Rows of a tile `[TILE, N]` in the order of their positions, a renaming of registers."""
    p = p.reshape([TILE // 64, 4, 2, 8, p.shape[1]]).permute((1, 3, 0, 2, 4))
    return p.reshape([TILE, p.shape[4]])


@gluon.jit
def _pages(
    table,
    tile,
    begin,
    length,
    there,
    TILE: gl.constexpr,
    PAGE: gl.constexpr,
    K_COPY: gl.constexpr,
    V_COPY: gl.constexpr,
):
    """The page of a tile, twice; or of each row of K and each group of V, if it spans pages.

    Pages without a live token may be anything: they become page 0.
    """
    if PAGE >= TILE:
        page = gl.maximum(
            gl.load(table + gl.maximum(tile, 0) // (PAGE // TILE), mask=there, other=0), 0
        )
        return page, page
    else:
        row = gl.arange(0, TILE, layout=gl.SliceLayout(1, K_COPY))
        token = tile * TILE + _token_of_row(row, TILE)
        live = (token < length) & (token >= begin) & there
        k_page = gl.load(table + token // PAGE, mask=live, other=0)
        group = gl.arange(0, TILE // 16, layout=gl.SliceLayout(1, gl.SliceLayout(2, V_COPY)))
        token = tile * TILE + group * 16
        live = (token < length) & (token + 16 > begin) & there
        return k_page, gl.load(table + token // PAGE, mask=live, other=0)


@gluon.jit
def _copy_tile(
    k_smem,
    v_smem,
    k_ptr,
    v_ptr,
    k_page,
    v_page,
    tile,
    head,
    length,
    there,
    HEADS: gl.constexpr,
    DK: gl.constexpr,
    DV: gl.constexpr,
    DK_PAD: gl.constexpr,
    DV_PAD: gl.constexpr,
    PAGE: gl.constexpr,
    TILE: gl.constexpr,
    K_COPY: gl.constexpr,
    V_COPY: gl.constexpr,
):
    """Start copying a tile if it is there; what lies behind the last token becomes zero."""
    row = gl.arange(0, TILE, layout=gl.SliceLayout(1, K_COPY))
    dk = gl.arange(0, DK_PAD, layout=gl.SliceLayout(0, K_COPY))
    group = gl.arange(0, TILE // 16, layout=gl.SliceLayout(1, gl.SliceLayout(2, V_COPY)))
    dv = gl.arange(0, DV_PAD, layout=gl.SliceLayout(0, gl.SliceLayout(2, V_COPY)))
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, V_COPY)))
    token = _token_of_row(row, TILE)
    dv_i = (dv * 16)[None, :, None] + i[None, None, :]
    if PAGE >= TILE:
        first = (k_page.to(gl.int64) * HEADS + head) * PAGE + tile % (PAGE // TILE) * TILE
        k_at = k_ptr + first * DK + ((token * DK)[:, None] + dk[None, :])
        v_at = v_ptr + first * DV + ((group * (DV * 16))[:, None, None] + dv_i)
    else:
        k_row = (k_page.to(gl.int64) * HEADS + head) * (PAGE * DK) + token % PAGE * DK
        v_group = (v_page.to(gl.int64) * HEADS + head) * (PAGE * DV)
        v_group += group % (PAGE // 16) * (DV * 16)
        k_at = k_ptr + k_row[:, None] + dk[None, :]
        v_at = v_ptr + v_group[:, None, None] + dv_i
    left = gl.where(there, length - tile * TILE, 0)
    _copy(k_smem, k_at, mask=(dk < DK)[None, :] & (token < left)[:, None])
    _copy(v_smem, v_at, mask=(dv < DV)[None, :, None] & (group * 16 < left)[:, None, None])
    async_copy.commit_group()


@gluon.jit
def _halves(x, LAYOUT: gl.constexpr):
    """`[M, 2N]` as its left and right halves, a renaming of registers."""
    left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
    return (
        gl.convert_layout(left, LAYOUT, assert_trivial=True),
        gl.convert_layout(right, LAYOUT, assert_trivial=True),
    )


@gluon.jit
def _both(left, right):
    """`[M, N]` twice as `[M, 2N]`."""
    x = gl.join(left, right).permute((0, 2, 1))
    return x.reshape([left.shape[0], 2 * left.shape[1]])


@gluon.jit(do_not_specialize=["window", "table_stride"])
def _decode_hopper_kernel(
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
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    MAX_NEW: gl.constexpr,
    COLUMNS: gl.constexpr,
    DK: gl.constexpr,
    DV: gl.constexpr,
    DK_PAD: gl.constexpr,
    DV_PAD: gl.constexpr,
    PAGE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    MODE: gl.constexpr,
    FORMAT: gl.constexpr,
    DOT: gl.constexpr,
    Q_FP8: gl.constexpr,
    QUANTIZE: gl.constexpr,
    K_SCALE: gl.constexpr,
    V_SCALE: gl.constexpr,
    Q_SCALE: gl.constexpr,
    SOFTCAP: gl.constexpr,
    SINKS: gl.constexpr,
    WINDOW: gl.constexpr,
    CAST: gl.constexpr,
    PDL: gl.constexpr,
):
    gl.static_assert(CAST and not QUANTIZE)
    PAGES: gl.constexpr = k_ptr.dtype.element_ty
    BYTES: gl.constexpr = 1 if FORMAT != 0 else 2
    OPERAND: gl.constexpr = DOT if FORMAT == 0 else gl.float8e4nv
    VECTOR: gl.constexpr = 16 // BYTES
    OFFSET: gl.constexpr = 0.0 if MODE == WIDE else 8.0
    WIDTH: gl.constexpr = 2 * COLUMNS if MODE == ACCURATE else COLUMNS
    K_DEPTH: gl.constexpr = 32 // BYTES
    ROW: gl.constexpr = DK_PAD // VECTOR
    ROW_THREADS: gl.constexpr = ROW if ROW < 32 else 32
    K_COPY: gl.constexpr = gl.BlockedLayout(
        [1, VECTOR], [32 // ROW_THREADS, ROW_THREADS], [4, 1], [1, 0]
    )
    V_COPY: gl.constexpr = gl.BlockedLayout(
        [1, 1, VECTOR], [1, 32 // BYTES, BYTES], [1, 4, 1], [2, 1, 0]
    )
    K_SWIZZLE: gl.constexpr = DK_PAD * BYTES if DK_PAD * BYTES < 128 else 128
    P_SWIZZLE: gl.constexpr = TILE * BYTES if TILE * BYTES < 128 else 128
    K_SHARED: gl.constexpr = gl.NVMMASharedLayout(K_SWIZZLE, BYTES * 8, 2)
    V_SHARED: gl.constexpr = gl.SwizzledSharedLayout(VECTOR, 1, 1, [2, 1, 0])
    P_SHARED: gl.constexpr = gl.NVMMASharedLayout(P_SWIZZLE, BYTES * 8, 2, transposed=True)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, K_DEPTH])
    V_GROUPS: gl.constexpr = _v_operand(TILE, DV_PAD, BYTES)
    V_OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 4 // BYTES)
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, K_DEPTH])
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0",
            "=r",
            [],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )

    k_smem = gl.allocate_shared_memory(PAGES, [STAGES, TILE, DK_PAD], K_SHARED)
    v_smem = gl.allocate_shared_memory(PAGES, [STAGES, TILE // 16, DV_PAD, 16], V_SHARED)
    q_smem = gl.allocate_shared_memory(OPERAND, [WIDTH, DK_PAD], K_SHARED)
    p_smem = gl.allocate_shared_memory(OPERAND, [TILE, WIDTH], P_SHARED)

    column = gl.program_id(1) * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, HALF))
    q_column = gl.program_id(1) * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, K_COPY))
    dk = gl.arange(0, DK_PAD, layout=gl.SliceLayout(0, K_COPY))
    row = gl.arange(0, TILE, layout=gl.SliceLayout(1, HALF))
    token = _token_of_row(row, TILE)
    dv = gl.arange(0, DV_PAD, layout=gl.SliceLayout(1, HALF))
    group = gl.arange(0, TILE // 16, layout=gl.SliceLayout(1, gl.SliceLayout(2, V_COPY)))
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, V_COPY)))
    v_token = (group * 16)[:, None, None] + (i // 2 % 2 * 8 + i // 4 * 2 + i % 2)[None, None, :]

    entry = gl.program_id(0)
    if gl.load(entries_ptr + entry * 8) < 0:
        entry = -1
    while entry >= 0:
        fields = entries_ptr + entry * 8
        sequence = gl.load(fields)
        head = gl.load(fields + 1)
        first = gl.load(fields + 2)
        end = gl.load(fields + 3)
        slot = gl.load(fields + 4)
        entry = gl.load(fields + 5)
        length = gl.load(fields + 6)
        start = gl.load(starts_ptr + sequence)
        new = gl.load(starts_ptr + sequence + 1) - start
        table = table_ptr + sequence.to(gl.int64) * table_stride
        begin = 0
        unwindowed = 0
        if WINDOW:
            begin = gl.maximum(length - new - window + 1, 0)
            unwindowed = length - window
        k_page, v_page = _pages(
            table, first, begin, length, first < end, TILE, PAGE, K_COPY, V_COPY
        )
        if PDL:
            gl.inline_asm_elementwise(
                "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
            )

        for ring in gl.static_range(STAGES - 1):
            _copy_tile(
                k_smem.index(ring),
                v_smem.index(ring),
                k_ptr,
                v_ptr,
                k_page,
                v_page,
                first + ring,
                head,
                length,
                first + ring < end,
                HEADS,
                DK,
                DV,
                DK_PAD,
                DV_PAD,
                PAGE,
                TILE,
                K_COPY,
                V_COPY,
            )
            k_page, v_page = _pages(
                table,
                first + ring + 1,
                begin,
                length,
                first + ring + 1 < end,
                TILE,
                PAGE,
                K_COPY,
                V_COPY,
            )

        scale = score_scale
        if K_SCALE:
            scale = scale * gl.load(k_scale_ptr + head * k_scale_stride)
        q_scale = 1.0
        if Q_SCALE:
            q_scale = gl.load(q_scale_ptr + head * q_scale_stride)
        at = (start + q_column // GROUP).to(gl.int64) * q_stride
        at += (head * GROUP + q_column % GROUP) * q_head_stride
        q = gl.load(
            q_ptr + at[:, None] + dk[None, :],
            mask=(q_column < GROUP * new)[:, None] & (dk < DK)[None, :],
            other=0.0,
        )
        if MODE == ACCURATE:
            if Q_FP8:
                scales = gl.full([COLUMNS], 0.0, gl.float32, gl.SliceLayout(0, HALF))
                scales += scale * q_scale
                q_smem.slice(0, COLUMNS).store(q)
                q_smem.slice(COLUMNS, COLUMNS).store((q.to(gl.float32) * 0.0).to(gl.float8e4nv))
            else:
                x = q.to(gl.float32)
                largest = gl.maximum(gl.max(gl.abs(x), 1), 1e-20)
                x = x * (448.0 / largest)[:, None]
                hi = x.to(gl.float8e4nv)
                q_smem.slice(0, COLUMNS).store(hi)
                q_smem.slice(COLUMNS, COLUMNS).store(
                    ((x - hi.to(gl.float32)) * Q_LO).to(gl.float8e4nv)
                )
                scales = gl.convert_layout(scale * (largest / 448.0), gl.SliceLayout(0, HALF))
        else:
            scales = gl.full([COLUMNS], 0.0, gl.float32, gl.SliceLayout(0, HALF))
            scales += scale * q_scale
            if MODE == FP8:
                if Q_FP8:
                    q_smem.store(q)
                else:
                    x = q.to(gl.float32) / q_scale
                    x = gl.minimum(gl.maximum(x, -448.0), 448.0)
                    q_smem.store(x.to(gl.float8e4nv))
            else:
                x = q.to(gl.float32)
                if DOT == gl.float16:  # wider numbers must fit float16
                    largest = gl.maximum(gl.max(gl.abs(x), 1), 1e-20)
                    x = x / largest[:, None]
                    scales *= gl.convert_layout(largest, gl.SliceLayout(0, HALF))
                q_smem.store(x.to(DOT))
        fence_async_shared()

        maximum = gl.full([COLUMNS], LOW, gl.float32, gl.SliceLayout(0, HALF))
        total = gl.zeros([TILE, COLUMNS], gl.float32, HALF)
        acc = gl.zeros([DV_PAD, COLUMNS], gl.float32, HALF)
        no_scores = gl.zeros([TILE, WIDTH], gl.float32, MMA)
        no_output = gl.zeros([DV_PAD, WIDTH], gl.float32, MMA)
        for tile in range(first, end):
            stage = (tile - first) % STAGES
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()
            if ((tile + 1) * TILE > length) | (tile * TILE < begin):
                position = tile * TILE + v_token
                live = (position < length) & (position >= begin)
                v_buffer = v_smem.index(stage)
                dirty = v_buffer.load(V_COPY)
                v_buffer.store(gl.where(live, dirty, gl.zeros_like(dirty)))
            s_token = warpgroup_mma(
                k_smem.index(stage), q_smem.permute((1, 0)), no_scores, use_acc=False, is_async=True
            )
            v = v_smem.index(stage).load(V_GROUPS)
            v = v.permute((1, 0, 2)).reshape([DV_PAD, TILE])
            v = gl.convert_layout(v, V_OPERAND, assert_trivial=True)
            # The buffers copied into were read by the tile before, whose instructions have ended.
            ahead = tile + STAGES - 1
            _copy_tile(
                k_smem.index((ahead - first) % STAGES),
                v_smem.index((ahead - first) % STAGES),
                k_ptr,
                v_ptr,
                k_page,
                v_page,
                ahead,
                head,
                length,
                ahead < end,
                HEADS,
                DK,
                DV,
                DK_PAD,
                DV_PAD,
                PAGE,
                TILE,
                K_COPY,
                V_COPY,
            )
            k_page, v_page = _pages(
                table, ahead + 1, begin, length, ahead + 1 < end, TILE, PAGE, K_COPY, V_COPY
            )
            s = warpgroup_mma_wait(0, deps=[s_token])
            if MODE == ACCURATE:
                s_hi, s_lo = _halves(s, HALF)
                s = s_hi + s_lo * (1.0 / Q_LO)
            else:
                s = gl.convert_layout(s, HALF, assert_trivial=True)
            s = s * scales[None, :]
            if SOFTCAP:  # tanh; scale and cap come prepared
                s = cap - 2.0 * cap / (1.0 + gl.exp2(s * 2.8853900817779268))
            if ((tile + 1) * TILE > length - new + 1) | (tile * TILE < unwindowed):
                position = tile * TILE + token
                newest = length - new + column // GROUP
                seen = position[:, None] <= newest[None, :]
                if WINDOW:
                    seen = seen & (position[:, None] > (newest - window)[None, :])
                s = gl.where(seen, s, float("-inf"))
            larger = gl.maximum(maximum, gl.max(s, 0))
            fade = gl.exp2(maximum - larger)
            p = gl.exp2(s - (larger - OFFSET)[None, :])
            total = total * fade[None, :] + p
            maximum = larger
            if MODE == ACCURATE:
                p_hi = p.to(gl.float8e4nv)
                p_lo = ((p - p_hi.to(gl.float32)) * P_LO).to(gl.float8e4nv)
                p_smem.store(_in_order(_both(p_hi, p_lo), TILE))
            else:
                p_smem.store(_in_order(p.to(OPERAND), TILE))
            fence_async_shared()
            o_token = warpgroup_mma(v, p_smem, no_output, use_acc=False, is_async=True)
            acc = acc * fade[None, :]
            o = warpgroup_mma_wait(0, deps=[o_token])
            if MODE == ACCURATE:
                o_hi, o_lo = _halves(o, HALF)
                acc += o_hi + o_lo * (1.0 / P_LO)
            else:
                acc += gl.convert_layout(o, HALF, assert_trivial=True)
        async_copy.wait_group(0)

        total_sum = gl.sum(total, 0)
        v_scale = 1.0
        if V_SCALE:
            v_scale = gl.load(v_scale_ptr + head * v_scale_stride)
        live_column = column < GROUP * new
        mask = live_column[None, :] & (dv < DV)[:, None]
        if slot < 0:
            if SINKS:
                sink = gl.load(
                    sinks_ptr + head * GROUP + column % GROUP, mask=live_column, other=0.0
                )
                total_sum += gl.exp2(sink.to(gl.float32) * 1.4426950408889634 - maximum + OFFSET)
            inverse = gl.where(total_sum > 0, v_scale / total_sum, 0.0)
            to = (start + column // GROUP).to(gl.int64) * out_stride
            to += (head * GROUP + column % GROUP) * out_head_stride
            gl.store(
                out_ptr + to[None, :] + dv[:, None],
                (acc * inverse[None, :]).to(out_ptr.dtype.element_ty),
                mask=mask,
            )
        else:
            inverse = gl.where(total_sum > 0, v_scale / total_sum, 0.0)
            lse = gl.where(total_sum > 0, maximum + gl.log2(total_sum) - OFFSET, LOW)
            to = slot.to(gl.int64) * (GROUP * MAX_NEW) + column
            gl.store(
                partial_ptr + to[None, :] * DV + dv[:, None], acc * inverse[None, :], mask=mask
            )
            gl.store(lse_ptr + to, lse, mask=live_column)
