"""Prefill for Hopper with explicit layouts, in Gluon: prefill.py's work shared among warps.

One warp copies tiles of K and V from the pages to shared memory with the copy engine (TMA); two
groups of four warps, the *consumers*, attend with 64 rows each; in ``accurate`` mode and for native
pages, four more warps put V into the order and dtype that 16-bit products want. Programs stay and
take one work item after the other.

1. A *work item* is 128 new tokens of one sequence and query head, those with the most keys first;
   programs take items to and fro, so that all end at about the same time. Items that follow one
   another share their sequence and often their KV head: their K and V come from the L2 cache.
2. The copying warp fills a ring of tiles, the newest tokens first. K lands swizzled, as the matrix
   instruction likes it; V as it lies in memory: its groups of 16 one-byte tokens are that
   instruction's unswizzled form (PTX ISA, wgmma, "core matrices" of 8 rows by 16 bytes).
3. A consumer writes its Q to shared memory once an item. ``accurate`` on FP8 pages writes
   q = hi + lo, both e4m3: two products into one sum, the small one first, because the instruction
   aligns what it adds with what is there.
4. For every tile, the next tile's Q K^T and this one's P V are started together, and the softmax of
   the next runs under P V and under the other consumer's products. With FP8 products the softmax is
   the longer part, and its chain of dependent steps decides: the maximum is a tree, sums stay apart
   by thread until the end. With 16-bit products the consumers take turns in starting them.
5. ``fp8``: P is 256 exp2(score - maximum) in e4m3, and V's order in the page makes a thread's
   scores the left operand of the second product as they are. ``accurate``: P and V are float16,
   into which FP8 codes fit exactly. (P as hi + lo in FP8 against V as it is was a little slower,
   and FP8 products are summed with some 14 bits: the error grew to 5e-3 at 32,768 tokens.)
6. Tokens of a page that no sequence owns may hold anything. Scores of such keys are masked; V is
   zeroed in shared memory in the rare tiles that have some.

The running maximum starts at -1e30, not at -inf: a tile can be masked for all rows of a consumer.

Gluon's interface changes between releases of Triton: ``GLUON_TESTED`` in triton_backend.py says
with which this kernel was tested. With others, and on other GPUs, prefill.py's kernel runs.
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOW = gl.constexpr(-1.0e30)
P_LOG2 = gl.constexpr(8.0)
CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)
BLOCK = gl.constexpr(128)
NO_BLOCK = gl.constexpr(1 << 23)

# Renamed in Triton 3.9.
_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@dataclass(frozen=True)
class PrefillConfig:
    """What a compiled kernel is for; one constant argument of all its functions."""

    head_dim_k: int
    head_dim_v: int
    """Both 64, 128 or 256."""
    page_size: int
    tile: int
    """Tokens at a time, at most 128."""
    box: int
    """Tokens that are copied at once: of a tile, or of a page if that is smaller."""
    stages: int
    fp8_pages: bool
    wide: bool
    """Whether P and V are multiplied in 16 bits."""
    fp8_query: bool
    k_scale: bool
    v_scale: bool
    q_scale: bool
    softcap: bool
    sinks: bool
    window: bool

    @property
    def split_query(self) -> bool:
        return self.fp8_pages and self.wide and not self.fp8_query

    @property
    def bytes(self) -> int:
        """Of an entry of the pages."""
        return 1 if self.fp8_pages else 2


@gluon.constexpr_function
def _v_operand(head_dim, tile):
    """FP8 V in shared memory, `[tile/16, head_dim, 16]`, seen as `[head_dim, tile]`."""
    token = [[0, 1 << i] for i in range(4)]
    dim = [[1 << i, 0] for i in range(head_dim.bit_length() - 1)]
    group = [[0, 16 << i] for i in range((tile // 16).bit_length() - 1)]
    return gl.SharedLinearLayout(token + dim + group, alignment=128)


@gluon.jit
def _seen_as(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The same shared memory with another dtype, shape and layout."""
    if _HAS_REINTERPRET:
        return memory.reinterpret(DTYPE, SHAPE, LAYOUT)
    else:
        return memory._reinterpret(DTYPE, SHAPE, LAYOUT)


@gluon.jit
def _turns(sizes):
    """How many items each program takes."""
    num_blocks, num_sequences, q_heads, _, _ = sizes
    return gl.cdiv(num_blocks * num_sequences * q_heads, gl.num_programs(0))


@gluon.jit
def _item(turn, sizes):
    """Block of rows, sequence and query head of this program's turn; a block beyond all rows when
    there is none."""
    num_blocks, num_sequences, q_heads, _, _ = sizes
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    if turn % 2 == 1:
        place = programs - 1 - place
    item = turn * programs + place
    sequence = item // (num_blocks * q_heads)
    block = num_blocks - 1 - item // q_heads % num_blocks
    if sequence >= num_sequences:
        sequence = 0
        block = NO_BLOCK
    return block, sequence, item % q_heads


@gluon.jit
def _sequence(lens_ptr, starts_ptr, sequence):
    """A sequence's first row in the batch, its new tokens, and its length."""
    start = gl.load(starts_ptr + sequence)
    return start, gl.load(starts_ptr + sequence + 1) - start, gl.load(lens_ptr + sequence)


@gluon.jit
def _tiles(block, new, length, sizes, C: gl.constexpr):
    """First tile that the block sees, the one after its last, and the first token it sees."""
    oldest = length - new + block * BLOCK
    end = (gl.minimum(oldest + BLOCK, length) + C.tile - 1) // C.tile
    begin = 0
    if C.window:
        begin = gl.maximum(oldest - sizes[4] + 1, 0)
    return begin // C.tile, end, begin


@gluon.jit
def _page_row(table, token, head, heads, length, begin, C: gl.constexpr):
    """The row of a token in the pages of all heads; in page 0 where no token of a box lives."""
    live = (token < length) & (token + C.box > begin)
    page = gl.load(table + token // C.page_size, mask=live, other=0)
    return (gl.maximum(page, 0) * heads + head) * C.page_size + token % C.page_size


@gluon.jit
def _clean(v_buffer, tile, begin, length, C: gl.constexpr, COPY: gl.constexpr):
    """Zero V's tokens outside of begin..length in shared memory."""
    CODE: gl.constexpr = gl.int8 if C.fp8_pages else gl.int16
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 1, [1, 0])
    GROUPS: gl.constexpr = C.tile // 16
    HEAD_DIM: gl.constexpr = C.head_dim_v
    groups = _seen_as(v_buffer, CODE, (GROUPS, HEAD_DIM, 16), LAYOUT)
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, COPY))
    for group in range(GROUPS):
        token = tile * C.tile + group * 16 + i // 2 % 2 * 8 + i // 4 * 2 + i % 2
        live = (token < length) & (token >= begin)
        codes = groups.index(group).load(COPY)
        groups.index(group).store(gl.where(live[None, :], codes, gl.zeros_like(codes)))
    fence_async_shared()


@gluon.jit
def _producer(tensors, rings, barriers, sizes, table_stride, C: gl.constexpr):
    """The copying warp."""
    k_desc, v_desc, table_ptr, lens_ptr, starts_ptr = tensors
    k_ring, v_ring = rings
    k_full, k_empty, v_full, v_empty, landed = barriers
    group = sizes[3]
    heads = sizes[2] // group
    COPY: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [1, 1], [1, 0])
    V_ROW: gl.constexpr = v_desc.block_type.shape[1]
    V_BOX: gl.constexpr = v_desc.block_type.shape[0]
    BOXES: gl.constexpr = C.tile // C.box
    count = 0
    cleaned = 0
    for turn in range(_turns(sizes)):
        block, sequence, q_head = _item(turn, sizes)
        _, new, length = _sequence(lens_ptr, starts_ptr, sequence)
        if block * BLOCK < new:
            head = q_head // group
            table = table_ptr + sequence.to(gl.int64) * table_stride
            first, end, begin = _tiles(block, new, length, sizes, C)
            for step in range(end - first):
                tile = end - 1 - step
                stage = count % C.stages
                phase = count // C.stages % 2 ^ 1
                k_buffer = k_ring.index(stage)
                v_buffer = v_ring.index(stage)
                mbarrier.wait(k_empty.index(stage), phase)
                mbarrier.expect(k_full.index(stage), C.tile * C.head_dim_k * C.bytes)
                for box in gl.static_range(BOXES):
                    row = _page_row(
                        table, tile * C.tile + box * C.box, head, heads, length, begin, C
                    )
                    part = k_buffer
                    if C.box < C.tile:
                        part = k_buffer.slice(box * C.box, C.box)
                    _tma_load(k_desc, [row, 0], k_full.index(stage), part)
                # A tile with dead tokens lands for this warp first, which zeroes them.
                dirty = not C.wide and (((tile + 1) * C.tile > length) | (tile * C.tile < begin))
                full = v_full.index(stage)
                if dirty:
                    full = landed
                mbarrier.wait(v_empty.index(stage), phase)
                mbarrier.expect(full, C.tile * C.head_dim_v * C.bytes)
                for box in gl.static_range(BOXES):
                    row = _page_row(
                        table, tile * C.tile + box * C.box, head, heads, length, begin, C
                    )
                    part = v_buffer
                    if C.box < C.tile:
                        part = v_buffer.slice(box * V_BOX, V_BOX)
                    _tma_load(v_desc, [row * C.head_dim_v // V_ROW, 0], full, part)
                if dirty:
                    mbarrier.wait(landed, cleaned % 2)
                    cleaned += 1
                    _clean(v_buffer, tile, begin, length, C, COPY)
                    mbarrier.arrive(v_full.index(stage), count=1)
                count += 1


@gluon.jit
def _converter(tensors, rings, barriers, sizes, C: gl.constexpr):
    """Four warps that make `[head_dim, tile]` in 16 bits, in the order of the tokens, of V."""
    lens_ptr, starts_ptr = tensors
    v_ring, wide_ring = rings
    v_full, v_empty, wide_full, wide_empty = barriers
    HEAD_DIM: gl.constexpr = C.head_dim_v
    DIMS: gl.constexpr = 32  # at a time: registers are few
    GROUPS: gl.constexpr = C.tile // 16
    WORDS: gl.constexpr = 4 * C.bytes
    V_WORDS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [2, 1, 0])
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, WORDS], [1, 32, 1], [4, 1, 1], [2, 1, 0])
    CLEAN: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [4, 1], [1, 0])
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    count = 0
    for turn in range(_turns(sizes)):
        block, sequence, _ = _item(turn, sizes)
        _, new, length = _sequence(lens_ptr, starts_ptr, sequence)
        if block * BLOCK < new:
            first, end, begin = _tiles(block, new, length, sizes, C)
            for step in range(end - first):
                tile = end - 1 - step
                stage = count % C.stages
                phase = count // C.stages % 2
                v_buffer = v_ring.index(stage)
                words = _seen_as(v_buffer, gl.int32, (GROUPS, HEAD_DIM, WORDS), V_WORDS)
                wide = wide_ring.index(stage)
                wide = _seen_as(wide, gl.int32, (HEAD_DIM, GROUPS * 8), PAIRS)
                mbarrier.wait(wide_empty.index(stage), phase ^ 1)
                mbarrier.wait(v_full.index(stage), phase)
                if ((tile + 1) * C.tile > length) | (tile * C.tile < begin):
                    _clean(v_buffer, tile, begin, length, C, CLEAN)
                for dim in gl.static_range(0, HEAD_DIM, DIMS):
                    v = words.slice(dim, DIMS, dim=1).load(COPY)
                    # To words of two tokens: 2 q and 2 q + 1, and those 8 further.
                    if C.fp8_pages:
                        low, high = _to_float16(v, v_ring.dtype == gl.float8e5)
                        v = gl.join(low, high)
                    else:
                        v = v.reshape([GROUPS, DIMS, 4, 2])
                    wide.slice(dim, DIMS).store(v.permute((1, 0, 3, 2)).reshape([DIMS, GROUPS * 8]))
                fence_async_shared()
                mbarrier.arrive(wide_full.index(stage), count=1)
                mbarrier.arrive(v_empty.index(stage), count=1)
                count += 1


@gluon.jit
def _to_float16(words, E5M2: gl.constexpr):
    """Four FP8 codes in a word as two words of two float16."""
    KIND: gl.constexpr = "e5m2x2" if E5M2 else "e4m3x2"
    return gl.inline_asm_elementwise(
        "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2."
        + KIND
        + " $0, l; cvt.rn.f16x2."
        + KIND
        + " $1, h; }",
        "=r,=r,r",
        [words],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _load_query(
    q_ptr, turn, batch, sizes, PART: gl.constexpr, C: gl.constexpr, LAYOUT: gl.constexpr
):
    """Q `[64, head_dim]` of a consumer's rows in a turn; 0 where there are none."""
    lens_ptr, starts_ptr, q_stride, q_head_stride = batch
    block, sequence, q_head = _item(turn, sizes)
    start, new, _ = _sequence(lens_ptr, starts_ptr, sequence)
    row = block * BLOCK + PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    dk = gl.arange(0, C.head_dim_k, layout=gl.SliceLayout(0, LAYOUT))
    at = (start + row).to(gl.int64) * q_stride + q_head * q_head_stride
    return gl.load(q_ptr + at[:, None] + dk[None, :], mask=(row < new)[:, None], other=0.0)


@gluon.jit
def _store_query(q, q_hi, q_lo, q_scale, C: gl.constexpr):
    """Write Q to shared memory as the products want it; returns a factor of each row's scores."""
    factor = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, q.type.layout))
    if C.fp8_pages and C.fp8_query:
        q_hi.store(q)
    elif C.split_query:
        x = q.to(gl.float32)
        largest = gl.maximum(gl.max(gl.abs(x), 1), 1e-20)
        x = x * (448.0 / largest)[:, None]
        hi = x.to(gl.float8e4nv)
        q_hi.store(hi)
        q_lo.store((x - hi.to(gl.float32)).to(gl.float8e4nv))
        factor = largest * (1.0 / 448.0)
    elif C.fp8_pages:
        x = q.to(gl.float32) / q_scale
        q_hi.store(gl.minimum(gl.maximum(x, -448.0), 448.0).to(gl.float8e4nv))
    elif q_hi.dtype == gl.float16 and q.dtype != gl.float16:  # wider numbers must fit
        x = q.to(gl.float32)
        factor = gl.maximum(gl.max(gl.abs(x), 1), 1e-20)
        q_hi.store((x / factor[:, None]).to(gl.float16))
    else:
        q_hi.store(q.to(gl.float32).to(q_hi.dtype))
    fence_async_shared()
    return factor


@gluon.jit
def _start_scores(q_hi, q_lo, k, zeros, C: gl.constexpr):
    """Q K^T, started."""
    s = zeros
    if C.split_query:
        s = warpgroup_mma(q_lo, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma(q_hi, k.permute((1, 0)), s, use_acc=C.split_query, is_async=True)


@gluon.jit
def _start_output(p, v, acc, C: gl.constexpr, CODES: gl.constexpr):
    """acc + P V, started."""
    TILE: gl.constexpr = C.tile
    DV: gl.constexpr = C.head_dim_v
    O_MMA: gl.constexpr = acc.type.layout
    if C.wide:
        p = gl.convert_layout(p, gl.DotOperandLayout(0, O_MMA, 2), assert_trivial=True)
    else:
        # In the order of V's tokens in the page (layout.py), which moves nothing.
        v = _seen_as(v, CODES, (DV, TILE), _v_operand(DV, TILE))
        p = p.to(gl.float8e4nv)
        p = p.reshape([ROWS, TILE // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, TILE])
        p = gl.convert_layout(p, gl.DotOperandLayout(0, O_MMA, 4), assert_trivial=True)
    return warpgroup_mma(p, v.permute((1, 0)), acc, is_async=True)


@gluon.jit
def _sums(p):
    """Of each row of `[rows, tile]`, apart for the four threads that hold it: `[rows, 4]`."""
    ROWS_: gl.constexpr = p.shape[0]
    TILE: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(p.reshape([ROWS_, TILE // 8, 4, 2]), 3), 1)


@gluon.jit
def _largest(s):
    """Of each row of `[rows, tile]`: many short chains of comparisons instead of a long one."""
    ROWS_: gl.constexpr = s.shape[0]
    TILE: gl.constexpr = s.shape[1]
    of_four = gl.max(s.reshape([ROWS_, 4, TILE // 32, 4, 2]), 1)
    largest = gl.max(gl.max(gl.max(of_four, 3), 1), 1)
    return gl.convert_layout(largest, gl.SliceLayout(1, s.type.layout))


@gluon.jit
def _softmax(
    s, scales, maximum, total, tile, row, oldest, cap, window, C: gl.constexpr, DTYPE: gl.constexpr
):
    """A step of the online softmax: P times 256, the maximum, the sums of P by thread, and the
    factor of what was summed before. `oldest` is the position of row 0."""
    if C.softcap:  # tanh; scale and cap come prepared
        s = cap - 2.0 * cap / (1.0 + gl.exp2(s * (scales * 2.8853900817779268)[:, None]))
        scales = gl.full_like(scales, 1.0)
    masked = (tile + 1) * C.tile > oldest + 1
    if C.window:
        masked = masked | (tile * C.tile < oldest + ROWS - window)
    if masked:
        position = tile * C.tile + gl.arange(0, C.tile, layout=gl.SliceLayout(0, s.type.layout))
        seen = position[None, :] <= (oldest + row)[:, None]
        if C.window:
            seen = seen & (position[None, :] > (oldest + row - window)[:, None])
        s = gl.where(seen, s, float("-inf"))
    larger = gl.maximum(maximum, _largest(s) * scales)
    fade = gl.exp2(maximum - larger)
    p = gl.exp2(s * scales[:, None] - (larger - P_LOG2)[:, None])
    sums = _sums(p)
    total *= gl.convert_layout(fade, gl.SliceLayout(1, sums.type.layout))[:, None]
    return p.to(DTYPE), larger, total + sums, fade


@gluon.jit
def _consumer(
    PART: gl.constexpr, tensors, rings, barriers, sizes, strides, scalars, C: gl.constexpr
):
    """Four warps that attend with 64 rows of a block."""
    q_ptr, out_ptr, lens_ptr, starts_ptr, k_scale_ptr, v_scale_ptr, q_scale_ptr, sinks_ptr = tensors
    q_smem, k_ring, v_ring = rings
    k_full, k_empty, v_full, v_empty, turns = barriers
    q_stride, q_head_stride, out_stride, out_head_stride = strides[:4]
    k_scale_stride, v_scale_stride, q_scale_stride = strides[4:]
    score_scale, cap = scalars
    group, window = sizes[3], sizes[4]
    TILE: gl.constexpr = C.tile
    DV: gl.constexpr = C.head_dim_v
    VECTOR: gl.constexpr = 16 if C.fp8_query else 8
    Q_COPY: gl.constexpr = gl.BlockedLayout(
        [1, VECTOR], [32 * VECTOR // C.head_dim_k, C.head_dim_k // VECTOR], [4, 1], [1, 0]
    )
    S_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32 // C.bytes])
    O_MMA: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, 64 if DV == 64 else 128, 16 if C.wide else 32]
    )
    # FP8 values that live through a loop would take a register each: those are float32 meanwhile.
    P_DTYPE: gl.constexpr = v_ring.dtype if C.wide else gl.float32
    CODES: gl.constexpr = v_ring.dtype
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_MMA))
    out_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, O_MMA))
    dv = gl.arange(0, DV, layout=gl.SliceLayout(0, O_MMA))
    no_scores = gl.zeros([ROWS, TILE], gl.float32, S_MMA)
    q_hi = q_smem.index(PART)
    q_lo = q_smem.index(CONSUMERS + PART if C.split_query else PART)
    batch = (lens_ptr, starts_ptr, q_stride, q_head_stride)

    q = _load_query(q_ptr, 0, batch, sizes, PART, C, Q_COPY)
    count = 0
    for turn in range(_turns(sizes)):
        block, sequence, q_head = _item(turn, sizes)
        start, new, length = _sequence(lens_ptr, starts_ptr, sequence)
        if block * BLOCK < new:
            head = q_head // group
            scale = score_scale
            if C.k_scale:
                scale = scale * gl.load(k_scale_ptr + head * k_scale_stride)
            q_scale = 1.0
            if C.q_scale:
                q_scale = gl.load(q_scale_ptr + head * q_scale_stride)
                scale = scale * q_scale
            factor = _store_query(q, q_hi, q_lo, q_scale, C)
            scales = gl.convert_layout(factor, gl.SliceLayout(1, S_MMA)) * scale

            row0 = block * BLOCK + PART * ROWS
            oldest = length - new + row0
            first, end, _ = _tiles(block, new, length, sizes, C)
            acc = gl.zeros([ROWS, DV], gl.float32, O_MMA)
            if end > first:  # else no row has a key
                maximum = gl.full([ROWS], LOW, gl.float32, gl.SliceLayout(1, S_MMA))
                total = _sums(no_scores)
                stage = count % C.stages
                phase = count // C.stages % 2
                if C.wide:
                    mbarrier.wait(turns.index(PART), count & 1 ^ 1 - PART)
                mbarrier.wait(k_full.index(stage), phase)
                s = _start_scores(q_hi, q_lo, k_ring.index(stage), no_scores, C)
                if C.wide:
                    mbarrier.arrive(turns.index(1 - PART), count=1)
                s = warpgroup_mma_wait(0, deps=[s])
                mbarrier.arrive(k_empty.index(stage), count=1)
                p, maximum, total, fade = _softmax(
                    s, scales, maximum, total, end - 1, row, oldest, cap, window, C, P_DTYPE
                )
                if not C.wide:
                    mbarrier.wait(v_full.index(stage), phase)
                for step in range(1, end - first):
                    v_stage = stage
                    v_phase = phase
                    count += 1
                    stage = count % C.stages
                    phase = count // C.stages % 2
                    if C.wide:
                        mbarrier.wait(turns.index(PART), count & 1 ^ 1 - PART)
                    mbarrier.wait(k_full.index(stage), phase)
                    s = _start_scores(q_hi, q_lo, k_ring.index(stage), no_scores, C)
                    if C.wide:
                        mbarrier.wait(v_full.index(v_stage), v_phase)
                    acc = _start_output(p, v_ring.index(v_stage), acc, C, CODES)
                    if C.wide:
                        mbarrier.arrive(turns.index(1 - PART), count=1)
                    s = warpgroup_mma_wait(1, deps=[s])
                    mbarrier.arrive(k_empty.index(stage), count=1)
                    tile = end - 1 - step
                    p, maximum, total, fade = _softmax(
                        s, scales, maximum, total, tile, row, oldest, cap, window, C, P_DTYPE
                    )
                    if not C.wide:
                        # The loop in here keeps ptxas from moving the next line above the softmax.
                        # (In 16 bits that order is the faster one.)
                        mbarrier.wait(v_full.index(stage), phase)
                    acc = warpgroup_mma_wait(0, deps=[acc])
                    mbarrier.arrive(v_empty.index(v_stage), count=1)
                    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, O_MMA))[:, None]

                if C.wide:
                    mbarrier.wait(v_full.index(stage), phase)
                acc = _start_output(p, v_ring.index(stage), acc, C, CODES)
                count += 1
                total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, S_MMA))
                if C.sinks:
                    sink = gl.load(sinks_ptr + q_head).to(gl.float32)
                    total += gl.exp2(sink * 1.4426950408889634 - maximum + P_LOG2)
                v_scale = 1.0
                if C.v_scale:
                    v_scale = gl.load(v_scale_ptr + head * v_scale_stride)
                inverse = gl.where(total > 0, v_scale / total, 0.0)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(v_empty.index(stage), count=1)
                acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, O_MMA))[:, None]
            q = _load_query(q_ptr, turn + 1, batch, sizes, PART, C, Q_COPY)
            to = (start + row0 + out_row).to(gl.int64) * out_stride + q_head * out_head_stride
            gl.store(
                out_ptr + to[:, None] + dv[None, :],
                acc.to(out_ptr.dtype.element_ty),
                mask=(row0 + out_row < new)[:, None],
            )
        else:
            q = _load_query(q_ptr, turn + 1, batch, sizes, PART, C, Q_COPY)


@gluon.jit
def _ring_barriers(C: gl.constexpr, READERS: gl.constexpr):
    """Barriers that say of each stage of a ring that it is full, and that it is empty."""
    LAYOUT: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [C.stages, 1], LAYOUT)
    empty = gl.allocate_shared_memory(gl.int64, [C.stages, 1], LAYOUT)
    STAGES: gl.constexpr = C.stages
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=READERS)
    return full, empty


@gluon.jit(
    do_not_specialize=["window", "table_stride", "num_blocks", "num_sequences", "q_heads", "group"]
)
def _prefill_hopper_kernel(
    k_desc,
    v_desc,
    q_ptr,
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
    num_blocks,
    num_sequences,
    q_heads,
    group,
    C: gl.constexpr,
):
    Q_DTYPE: gl.constexpr = gl.float8e4nv if C.fp8_pages else k_desc.dtype
    WIDE: gl.constexpr = gl.float16 if C.fp8_pages else v_desc.dtype
    Q_ROW: gl.constexpr = C.head_dim_k * C.bytes
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout(Q_ROW if Q_ROW < 128 else 128, 8 * C.bytes, 2)
    q_smem = gl.allocate_shared_memory(
        Q_DTYPE, [2 * CONSUMERS if C.split_query else CONSUMERS, ROWS, C.head_dim_k], Q_SHARED
    )
    k_ring = gl.allocate_shared_memory(
        k_desc.dtype, [C.stages, C.tile, C.head_dim_k], k_desc.layout
    )
    V_ROW: gl.constexpr = v_desc.block_type.shape[1]
    v_ring = gl.allocate_shared_memory(
        v_desc.dtype, [C.stages, C.tile * C.head_dim_v // V_ROW, V_ROW], v_desc.layout
    )
    k_full, k_empty = _ring_barriers(C, CONSUMERS)
    v_full, v_empty = _ring_barriers(C, 1 if C.wide else CONSUMERS)
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for part in gl.static_range(CONSUMERS):
        mbarrier.init(turns.index(part), count=1)
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(landed, count=1)

    tensors = (
        q_ptr,
        out_ptr,
        lens_ptr,
        starts_ptr,
        k_scale_ptr,
        v_scale_ptr,
        q_scale_ptr,
        sinks_ptr,
    )
    sizes = (num_blocks, num_sequences, q_heads, group, window)
    strides = (
        q_stride,
        q_head_stride,
        out_stride,
        out_head_stride,
        k_scale_stride,
        v_scale_stride,
        q_scale_stride,
    )
    scalars = (score_scale, cap)
    copied = (k_desc, v_desc, table_ptr, lens_ptr, starts_ptr)
    copy_barriers = (k_full, k_empty, v_full, v_empty, landed)
    if C.wide:
        wide_ring = gl.allocate_shared_memory(
            WIDE, [C.stages, C.head_dim_v, C.tile], gl.NVMMASharedLayout(128, 16, 2)
        )
        wide_full, wide_empty = _ring_barriers(C, CONSUMERS)
        fence_async_shared()
        rings = (q_smem, k_ring, wide_ring)
        barriers = (k_full, k_empty, wide_full, wide_empty, turns)
        gl.warp_specialize(
            [
                (_consumer, (0, tensors, rings, barriers, sizes, strides, scalars, C)),
                (_consumer, (1, tensors, rings, barriers, sizes, strides, scalars, C)),
                (
                    _converter,
                    (
                        (lens_ptr, starts_ptr),
                        (v_ring, wide_ring),
                        (v_full, v_empty, wide_full, wide_empty),
                        sizes,
                        C,
                    ),
                ),
                (_producer, (copied, (k_ring, v_ring), copy_barriers, sizes, table_stride, C)),
            ],
            [4, 4, 1],
            [216, 40, 24],
        )
    else:
        fence_async_shared()
        rings = (q_smem, k_ring, v_ring)
        barriers = (k_full, k_empty, v_full, v_empty, turns)
        gl.warp_specialize(
            [
                (_consumer, (0, tensors, rings, barriers, sizes, strides, scalars, C)),
                (_consumer, (1, tensors, rings, barriers, sizes, strides, scalars, C)),
                (_producer, (copied, (k_ring, v_ring), copy_barriers, sizes, table_stride, C)),
            ],
            [4, 1],
            [240, 24],
        )
