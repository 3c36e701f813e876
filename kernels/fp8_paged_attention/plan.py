"""The work plan of decode: which program attends which tokens of which sequence and KV head.

A plan lives on the device and is remade by one small kernel from ``seq_lens``, so that one captured
CUDA graph follows growing sequences. A *tile* is the number of tokens a program attends at a time.
The T tiles of all (sequence, KV head) pairs are shared out among N programs (as many as run at
once) in one of two ways:

In pieces: one program for each pair, those with most tiles first, and pairs with more than a limit
of tiles cut into equal pieces, which are put together afterwards. With many pairs the limit is T/N
(at least 4), so that few pairs are cut; with few pairs it is the smallest with which the pieces
number at most N.

Flat, for few pairs that would need a limit of more than a tile above T/N: program c takes the tiles
``c*T/N .. (c+1)*T/N`` of all in a row. All programs have the same work, but a program whose range
crosses from one pair to the next starts twice.

How long a tile is, and how many programs run at once, is decided on the host, by the number of
pairs and, with many, by a bound on their length: short pairs do better in small tiles, by more
programs at once.

An entry of the plan is eight int32: sequence (-1: no work), KV head, first tile, end tile, slot of
the partial result (-1: the pair is whole), the next entry of the same program (-1: none), the
sequence's length, one unused.
"""

import torch
import triton
import triton.language as tl

from .device import hardware
from .tuning import KINDS, DecodeConfig, decode_config

MANY_PAIRS = 160
"""From so many (sequence, KV head) pairs on, most pairs stay whole."""

FIELDS = 8
_BLOCK = 16


@triton.jit
def _tiles(seq_lens_ptr, i, num_seqs, TILE: tl.constexpr, WINDOW: tl.constexpr, window, new_tokens):
    """Of sequences i: the length, first and end tile and their number (at least 1; 0 past the
    last sequence)."""
    length = tl.load(seq_lens_ptr + i, mask=i < num_seqs, other=0)
    end = (length + TILE - 1) // TILE
    first = tl.zeros_like(end)
    if WINDOW:
        first = tl.maximum(length - new_tokens - window + 1, 0) // TILE
    return length, first, end, tl.where(i < num_seqs, tl.maximum(end - first, 1), 0)


@triton.jit
def _write(entry_ptr, sequence, head, first, end, slot, following, length, mask):
    tl.store(entry_ptr, sequence, mask=mask)
    tl.store(entry_ptr + 1, head, mask=mask)
    tl.store(entry_ptr + 2, first, mask=mask)
    tl.store(entry_ptr + 3, end, mask=mask)
    tl.store(entry_ptr + 4, slot, mask=mask)
    tl.store(entry_ptr + 5, following, mask=mask)
    tl.store(entry_ptr + 6, length, mask=mask)


@triton.jit
def _flat(
    tiles,
    total,
    seq_lens_ptr,
    entries_ptr,
    pairs_ptr,
    num_seqs,
    window,
    new_tokens,
    num_programs,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SEQS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    j = tl.arange(0, SEQS)
    ends = tl.cumsum(tiles, 0).to(tl.int64) * HEADS
    programs = tl.minimum(total, num_programs)
    # Entry i < num_programs begins program i's range; entry num_programs + p begins pair p.
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = i - num_programs
    of_pair = pair >= 0
    sequence = tl.maximum(pair, 0) // HEADS
    begin = i.to(tl.int64) * total // programs
    own = j[None, :] == sequence[:, None]
    pair_begin = tl.sum(tl.where(own, (ends - tiles * HEADS)[None, :], 0), 1)
    pair_tiles = tl.sum(tl.where(own, tiles[None, :], 0), 1)
    pair_begin += (tl.maximum(pair, 0) % HEADS) * pair_tiles
    begin = tl.where(of_pair, pair_begin, begin)
    program = ((begin + 1) * programs - 1) // total
    exists = tl.where(of_pair, pair < num_seqs * HEADS, i < programs)
    # A pair that begins with a program's range is that program's first entry already.
    used = exists & ((program * total // programs < begin) | (i < num_programs))

    sequence = tl.sum((ends[None, :] <= begin[:, None]).to(tl.int32), 1)
    sequence = tl.minimum(sequence, num_seqs - 1)
    mine = j[None, :] == sequence[:, None]
    count = tl.sum(tl.where(mine, tiles[None, :], 0), 1)
    inside = begin - tl.sum(tl.where(mine, (ends - tiles * HEADS)[None, :], 0), 1)
    head = inside // count
    first = inside % count
    end = tl.minimum(count, first + (program + 1) * total // programs - begin)
    pair = sequence * HEADS + head
    from_program = ((begin - first + 1) * programs - 1) // total
    to_program = ((begin - first + count) * programs - 1) // total
    following = tl.where(
        begin + end - first < (program + 1) * total // programs, num_programs + pair + 1, -1
    )
    slot = tl.where(to_program > from_program, program + pair, -1)
    length, low, high, _ = _tiles(
        seq_lens_ptr, sequence, num_seqs, TILE, WINDOW, window, new_tokens
    )
    _write(
        entries_ptr + i * 8,
        sequence,
        head.to(tl.int32),
        (low + first).to(tl.int32),
        tl.minimum(low + end, high).to(tl.int32),
        slot.to(tl.int32),
        following.to(tl.int32),
        length,
        used,
    )
    tl.store(entries_ptr + i * 8, -1, mask=(i < num_programs) & (i >= programs))
    entry = pairs_ptr + pair * 4
    pair_mask = exists & (i >= num_programs)
    tl.store(entry, sequence, mask=pair_mask)
    tl.store(entry + 1, head.to(tl.int32), mask=pair_mask)
    tl.store(entry + 2, (from_program + pair).to(tl.int32), mask=pair_mask)
    tl.store(entry + 3, (to_program - from_program + 1).to(tl.int32), mask=pair_mask)


@triton.jit
def _in_pieces(
    tiles,
    limit,
    seq_lens_ptr,
    entries_ptr,
    pairs_ptr,
    num_seqs,
    window,
    new_tokens,
    num_entries,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SEQS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    j = tl.arange(0, SEQS)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length, low, high, own_tiles = _tiles(
        seq_lens_ptr, i, num_seqs, TILE, WINDOW, window, new_tokens
    )
    cuts = tl.cdiv(tiles, limit)
    own_cuts = tl.cdiv(own_tiles, limit)
    # Pairs that are cut come first, so that the kernel that joins them finds them there.
    key = tl.cdiv(tiles, tl.maximum(cuts, 1)) + tl.where(cuts > 1, 1 << 30, 0)
    own_key = tl.cdiv(own_tiles, tl.maximum(own_cuts, 1)) + tl.where(own_cuts > 1, 1 << 30, 0)
    before = (key[None, :] > own_key[:, None]) | (
        (key[None, :] == own_key[:, None]) & (j[None, :] < i[:, None])
    )
    rank = tl.sum((before & (j < num_seqs)[None, :]).to(tl.int32), 1)
    start = tl.sum(tl.where(before, cuts[None, :], 0), 1) * HEADS
    pieces = tl.where(i < num_seqs, own_cuts, 0)[:, None] * HEADS
    own_cuts = tl.maximum(own_cuts, 1)[:, None]
    own_length = (high - low).to(tl.int64)[:, None]
    sequence = i[:, None] + tl.zeros([BLOCK, BLOCK], tl.int32)
    for done in range(0, tl.max(pieces), BLOCK):
        piece = done + tl.arange(0, BLOCK)[None, :]
        head = piece // own_cuts
        cut = piece % own_cuts
        mask = piece < pieces
        first = low[:, None] + (cut * own_length // own_cuts).to(tl.int32)
        end = low[:, None] + ((cut + 1) * own_length // own_cuts).to(tl.int32)
        entry = start[:, None] + piece
        _write(
            entries_ptr + entry * 8,
            sequence,
            head,
            first,
            end,
            tl.where(own_cuts > 1, entry, -1),
            tl.full([BLOCK, BLOCK], -1, tl.int32),
            length[:, None] + tl.zeros_like(sequence),
            mask,
        )
        pair = pairs_ptr + (rank[:, None] * HEADS + head) * 4
        begins = mask & (cut == 0)
        tl.store(pair, sequence, mask=begins)
        tl.store(pair + 1, head, mask=begins)
        tl.store(pair + 2, entry, mask=begins)
        tl.store(pair + 3, own_cuts + tl.zeros_like(sequence), mask=begins)
    # Other programs of the grid have no work.
    entry = tl.sum(cuts, 0) * HEADS + i
    while tl.min(entry, 0) < num_entries:
        tl.store(entries_ptr + entry * 8, -1, mask=entry < num_entries)
        entry += tl.num_programs(0) * BLOCK


@triton.jit(do_not_specialize=["num_seqs", "window", "new_tokens", "num_programs"])
def _plan_kernel(
    seq_lens_ptr,
    entries_ptr,
    pairs_ptr,
    num_seqs,
    window,
    new_tokens,
    num_programs,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SEQS: tl.constexpr,
    BLOCK: tl.constexpr,
    MANY: tl.constexpr,
):
    _, _, _, tiles = _tiles(
        seq_lens_ptr, tl.arange(0, SEQS), num_seqs, TILE, WINDOW, window, new_tokens
    )
    total = tl.sum(tiles.to(tl.int64), 0) * HEADS
    share = tl.cdiv(total, num_programs).to(tl.int32)
    if MANY:
        _in_pieces(
            tiles,
            tl.maximum(share, 4),
            seq_lens_ptr,
            entries_ptr,
            pairs_ptr,
            num_seqs,
            window,
            new_tokens,
            num_programs + num_seqs * HEADS,
            HEADS,
            TILE,
            WINDOW,
            SEQS,
            BLOCK,
        )
    else:
        low = share
        high = tl.max(tiles, 0)
        while low < high:  # the smallest limit with which the pieces fit the programs
            limit = (low + high) // 2
            fits = tl.sum(tl.cdiv(tiles, limit), 0) * HEADS <= num_programs
            low = tl.where(fits, low, limit + 1)
            high = tl.where(fits, limit, high)
        fits = tl.sum(tl.cdiv(tiles, high), 0) * HEADS <= num_programs
        if fits & (high <= share + 1):  # starting twice costs about as much as a tile
            _in_pieces(
                tiles,
                high,
                seq_lens_ptr,
                entries_ptr,
                pairs_ptr,
                num_seqs,
                window,
                new_tokens,
                num_programs,
                HEADS,
                TILE,
                WINDOW,
                SEQS,
                BLOCK,
            )
        else:
            _flat(
                tiles,
                total,
                seq_lens_ptr,
                entries_ptr,
                pairs_ptr,
                num_seqs,
                window,
                new_tokens,
                num_programs,
                HEADS,
                TILE,
                WINDOW,
                SEQS,
                BLOCK,
            )


class DecodePlan:
    """The plan of one kind of layer, and the buffers of its partial results.

    Layers with equal pages (heads, head sizes, page size, dtype), query heads and window share a
    plan. :meth:`update` launches one kernel, allocates nothing and waits for nothing: call it once
    a step, inside the CUDA graph, before the first layer's ``attend(..., plan=plan)``.
    """

    SHORT_TOKENS = 1024
    """A sequence of at most so many tokens is short."""

    def __init__(
        self,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        *,
        num_q_heads: int,
        max_num_seqs: int,
        max_seqlen_q: int = 1,
        sliding_window: int | None = None,
        config: DecodeConfig | None = None,
    ) -> None:
        """
        Args:
            k_pages: `[num_pages, num_kv_heads, page_size, head_dim_k]` of any layer of the kind.
            v_pages: `[num_pages, num_kv_heads, page_size / 16, head_dim_v, 16]`.
            num_q_heads: query heads of the layer.
            max_num_seqs: most sequences in a batch.
            max_seqlen_q: most new tokens of a sequence.
            sliding_window: as in ``attend``.
            config: how the kernel is cut; by default as measured for such pages.
        """
        device = k_pages.device
        num_kv_heads, head_dim_v = k_pages.shape[1], v_pages.shape[3]
        self.configs = {kind: config or decode_config(k_pages, v_pages, kind) for kind in KINDS}
        self.num_kv_heads = num_kv_heads
        self.num_q_heads = num_q_heads
        self.head_dim_v = head_dim_v
        self.page_dtype = torch.uint8 if k_pages.element_size() == 1 else k_pages.dtype
        self.max_num_seqs = max_num_seqs
        self.max_seqlen_q = max_seqlen_q
        self.sliding_window = sliding_window
        self.num_sms = hardware(device).num_sms
        pairs = max_num_seqs * num_kv_heads
        columns = num_q_heads // num_kv_heads * max_seqlen_q
        programs = self.num_sms * max(one.programs_per_sm for one in self.configs.values())
        self.max_entries = programs + pairs
        self.entries = torch.zeros(self.max_entries, FIELDS, dtype=torch.int32, device=device)
        self.pairs = torch.zeros(pairs, 4, dtype=torch.int32, device=device)
        self.partial = torch.empty(self.max_entries, columns, head_dim_v, device=device)
        self.partial_lse = torch.empty(self.max_entries, columns, device=device)
        self.num_seqs = 0
        self.kind = "few"

    @property
    def num_pairs(self) -> int:
        """(sequence, KV head) pairs of the batch planned last."""
        return self.num_seqs * self.num_kv_heads

    @property
    def many(self) -> bool:
        """Whether there are so many pairs that most stay whole."""
        return self.kind != "few"

    @property
    def config(self) -> DecodeConfig:
        """How the kernel is cut for the batch planned last."""
        return self.configs[self.kind]

    @property
    def num_programs(self) -> int:
        """Programs that run at once."""
        return self._at_once(self.kind)

    @property
    def grid(self) -> int:
        """Programs to launch."""
        return self.num_programs + (self.num_pairs if self.many else 0)

    @property
    def join_grid(self) -> int:
        """Pairs that may be cut: all, or those planned first (fewer than programs are cut)."""
        return min(self.num_pairs, self.num_programs) if self.many else self.num_pairs

    def depends_on_length(self, num_seqs: int) -> bool:
        """Whether, for so many sequences, it matters to :meth:`update` that all are short."""
        return (
            self._kind(num_seqs, self.SHORT_TOKENS) != self._kind(num_seqs, None)
            and self.configs["short"] != self.configs["many"]
        )

    def _kind(self, num_seqs: int, max_seq_len: int | None) -> str:
        pairs = num_seqs * self.num_kv_heads
        if pairs < MANY_PAIRS:
            return "few"
        bounds = [bound for bound in (max_seq_len, self.sliding_window) if bound is not None]
        short = min(bounds, default=self.SHORT_TOKENS + 1) <= self.SHORT_TOKENS
        # Pairs that all run at once anyway are better off with large tiles.
        return "short" if short and pairs > self._at_once("many") else "many"

    def _at_once(self, kind: str) -> int:
        return self.num_sms * self.configs[kind].programs_per_sm

    def update(self, seq_lens: torch.Tensor, max_seq_len: int | None = None) -> "DecodePlan":
        """Plan a batch.

        Args:
            seq_lens: `[B]`, int32, B at most ``max_num_seqs``; inside a CUDA graph always the same
                tensor.
            max_seq_len: a bound on ``seq_lens``, if there is one: batches of short sequences are
                cut in another way. Longer ones are attended all the same, but not as fast.

        Raises:
            ValueError: another dtype, device or too many sequences.
        """
        if (
            seq_lens.dtype != torch.int32
            or seq_lens.dim() != 1
            or seq_lens.device != self.entries.device
        ):
            raise ValueError(
                "seq_lens must be int32 of shape [B] on the plan's device, got "
                f"{seq_lens.dtype} {list(seq_lens.shape)} on {seq_lens.device}"
            )
        if len(seq_lens) > self.max_num_seqs:
            raise ValueError(
                f"the plan is for at most {self.max_num_seqs} sequences, got {len(seq_lens)}"
            )
        self.num_seqs = len(seq_lens)
        self.kind = self._kind(self.num_seqs, max_seq_len)
        if self.num_seqs == 0:
            return self
        # Flat plans are made an entry at a time, pieces a sequence at a time.
        items = self.num_seqs if self.many else self.num_programs + self.num_pairs
        _plan_kernel[(triton.cdiv(items, _BLOCK),)](
            seq_lens,
            self.entries,
            self.pairs,
            self.num_seqs,
            self.sliding_window or 0,
            self.max_seqlen_q,
            self.num_programs,
            HEADS=self.num_kv_heads,
            TILE=self.config.tile,
            WINDOW=self.sliding_window is not None,
            SEQS=max(16, triton.next_power_of_2(self.num_seqs)),
            BLOCK=_BLOCK,
            MANY=self.many,
            num_warps=4,
        )
        return self


assert FIELDS == 8  # the kernels spell it out
