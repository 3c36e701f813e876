"""The torch backend's plan: where a step's tokens lie in the pages, as indices to gather them by.

A plan is worked out once a step and serves all layers with such pages and window, since what these
differ in is not where tokens lie. Its unit is the group of 16 tokens (see :mod:`.layout`), so page
sizes make no difference either: seen as groups, K pages are `[num_groups, 16, head_dim]` and V
pages `[num_groups, head_dim, 16]`, and one number means the same tokens of the same head in both.
"""

from dataclasses import dataclass

import torch

from .layout import GROUP, POSITION, TOKEN

MAX_GATHERED = 1 << 20
"""Bytes of K or V in float32 that are gathered at a time: what stays in a core's cache."""


@dataclass(frozen=True)
class Slots:
    """Where new tokens are stored. k_rows: `[T * num_kv_heads]`, tokens of K pages; page, group,
    position: `[T]`, places in V pages; kept: the tokens that are stored, None for all. All int64.
    """

    k_rows: torch.Tensor
    page: torch.Tensor
    group: torch.Tensor
    position: torch.Tensor
    kept: torch.Tensor | None

    @classmethod
    def of(cls, slot_mapping: torch.Tensor, num_kv_heads: int, page_size: int) -> "Slots":
        slots, kept, device = slot_mapping.long(), None, slot_mapping.device
        if bool((slots < 0).any()):
            kept = (slots >= 0).nonzero()[:, 0]
            slots = slots[kept]
        page, offset = slots // page_size, slots % page_size
        heads = page[:, None] * num_kv_heads + torch.arange(num_kv_heads, device=device)
        k_rows = (heads * page_size + offset[:, None]).flatten()
        position = torch.tensor(POSITION, device=device)[offset % GROUP]
        return cls(k_rows, page, offset // GROUP, position, kept)


@dataclass(frozen=True)
class Part:
    """Some of the groups that a step's decodes see, N of them, for each KV head.

    place: which of all groups that are; k_rows: `[N * num_kv_heads * 16]`, tokens of K pages, of
    each group in V's order; groups: `[N * num_kv_heads]`, groups of V pages; sequence: `[N]`, whose
    they are (of the decodes); hidden: bool `[N, 1, 1, 16]`, in V's order, tokens that are not seen;
    hidden_values: numbers of their values in `[N, num_kv_heads, head_dim, 16]`.
    """

    place: slice
    k_rows: torch.Tensor
    groups: torch.Tensor
    sequence: torch.Tensor
    hidden: torch.Tensor
    hidden_values: torch.Tensor


@dataclass(frozen=True)
class Decodes:
    """The sequences with one new token.

    rows: which of the step's tokens these are, a slice where they follow each other; width: the
    most groups that one of them sees; place: `[N]`, where each of all groups lies if all sequences
    had so many, None if they have.
    """

    num_seqs: int
    rows: torch.Tensor | slice
    width: int
    place: torch.Tensor | None
    parts: list[Part]


@dataclass(frozen=True)
class Chunk:
    """A sequence with several new tokens: rows `start` to `stop` of the step, of which those before
    `seeing` see nothing; groups: `[num_kv_heads * N]`, all groups that it sees; first, end: of its
    tokens, counted from the first of these groups."""

    start: int
    seeing: int
    stop: int
    groups: torch.Tensor
    first: int
    end: int


class StepPlan:
    """The plan of one kind of layer, and the memory that its pages are gathered into.

    Layers with equal page shapes and windows share a plan; a plan can serve one step after the
    other. The lengths are read on the host, so on a GPU :meth:`update` waits for it.
    """

    def __init__(
        self,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        *,
        sliding_window: int | None = None,
    ) -> None:
        """
        Args:
            k_pages: `[num_pages, num_kv_heads, page_size, head_dim_k]` of any layer of the kind.
            v_pages: `[num_pages, num_kv_heads, page_size / 16, head_dim_v, 16]`.
            sliding_window: as in ``attend``.
        """
        self.page_shapes = k_pages.shape[1:], v_pages.shape[1:]
        self.sliding_window = sliding_window
        self.step: tuple[torch.Tensor, ...] = ()
        self.slot_mapping: torch.Tensor | None = None
        self.slots: Slots | None = None
        self.decodes: Decodes | None = None
        self.chunks: list[Chunk] = []
        self._memory: dict[torch.dtype, torch.Tensor] = {}
        self._views: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}  # of this step

    def update(
        self,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        slot_mapping: torch.Tensor | None = None,
    ) -> "StepPlan":
        """Plan a step; its tensors are as in ``attend``, and ``slot_mapping`` as in ``store``."""
        self.step = block_table, cu_seqlens_q, seq_lens
        self.slot_mapping = slot_mapping
        self._views.clear()
        self.slots = None
        if slot_mapping is not None:
            self.slots = Slots.of(slot_mapping, *self.page_shapes[0][:2])
        starts, lens = cu_seqlens_q.tolist(), seq_lens.tolist()
        single = [b for b in range(len(lens)) if starts[b + 1] - starts[b] == 1]
        self.decodes = self._decodes(single, starts, lens) if single else None
        self.chunks = [
            self._chunk(b, starts[b], starts[b + 1], lens[b])
            for b in range(len(lens))
            if starts[b + 1] - starts[b] > 1
        ]
        return self

    def check_store(
        self, k_pages: torch.Tensor, v_pages: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Raise ValueError unless the plan is for such pages and this step."""
        self._check_pages(k_pages, v_pages)
        if self.slot_mapping is not slot_mapping:
            raise ValueError("the plan was not updated with this slot_mapping")

    def check_attend(
        self,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        sliding_window: int | None,
    ) -> None:
        """Raise ValueError unless the plan is for such a layer and this step."""
        self._check_pages(k_pages, v_pages)
        if self.sliding_window != sliding_window:
            raise ValueError(
                f"the plan is for sliding_window {self.sliding_window}, got {sliding_window}"
            )
        given = block_table, cu_seqlens_q, seq_lens
        if not (self.step and all(a is b for a, b in zip(self.step, given, strict=True))):
            raise ValueError(
                "the plan was not updated with this block_table, cu_seqlens_q and seq_lens"
            )

    def _check_pages(self, k_pages: torch.Tensor, v_pages: torch.Tensor) -> None:
        shapes = k_pages.shape[1:], v_pages.shape[1:]
        if self.page_shapes != shapes:
            raise ValueError(
                f"the plan is for pages of {' and '.join(str(list(s)) for s in self.page_shapes)}, "
                f"got {' and '.join(str(list(s)) for s in shapes)}"
            )

    def memory(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Memory to compute in, the same at every call: fresh memory costs more than what is
        computed in it."""
        if (view := self._views.get((shape, dtype))) is not None:
            return view
        count, memory = shape.numel(), self._memory.get(dtype)
        if memory is None or len(memory) < count:
            memory = torch.empty(count, dtype=dtype, device=self.step[0].device)
            self._memory[dtype] = memory
        view = self._views[shape, dtype] = memory[:count].view(shape)
        return view

    def _decodes(self, seqs: list[int], starts: list[int], lens: list[int]) -> Decodes:
        table, device = self.step[0], self.step[0].device
        ends = [lens[b] for b in seqs]
        firsts = [self._first_seen(end, 1) for end in ends]
        counts = [
            -(-end // GROUP) - first // GROUP for first, end in zip(firsts, ends, strict=True)
        ]
        seq, first, end, count = torch.tensor([seqs, firsts, ends, counts], device=device)
        sequence = torch.arange(len(seqs), device=device).repeat_interleave(count)
        nth = torch.arange(len(sequence), device=device) - (count.cumsum(0) - count)[sequence]
        group = (first // GROUP)[sequence] + nth
        groups = self._groups(table, seq[sequence], group)  # [N, num_kv_heads]
        order = torch.tensor(TOKEN, device=device)
        token = group[:, None] * GROUP + order
        hidden = (token >= end[sequence, None]) | (token < first[sequence, None])
        k_rows = groups[..., None] * GROUP + order
        width = max(1, *counts)
        parts = [
            Part(
                part,
                k_rows[part].flatten(),
                groups[part].flatten(),
                sequence[part],
                hidden[part, None, None],
                self._values_of(hidden[part]),
            )
            for part in self._slices(len(group))
        ]
        full = all(count == width for count in counts)
        place = None if full else sequence * width + nth
        rows = _rows([starts[b] for b in seqs], device)
        return Decodes(len(seqs), rows, width, place, parts)

    def _values_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Numbers of the values of some tokens, bool `[N, 16]`, in `[N, num_kv_heads, head_dim_v,
        16]`."""
        num_kv_heads, _, head_dim, _ = self.page_shapes[1]
        group, position = tokens.nonzero().unbind(1)
        size = num_kv_heads * head_dim
        values = group[:, None] * size + torch.arange(size, device=tokens.device)
        return (values * GROUP + position[:, None]).flatten()

    def _chunk(self, seq: int, start: int, stop: int, end: int) -> Chunk:
        new = min(stop - start, end)  # a query before the sequence's first token sees nothing
        first = self._first_seen(end, new)
        group = torch.arange(first // GROUP, -(-end // GROUP), device=self.step[0].device)
        groups = self._groups(self.step[0], torch.full_like(group, seq), group).T.flatten()
        skipped = first // GROUP * GROUP
        return Chunk(start, stop - new, stop, groups, first - skipped, end - skipped)

    def _first_seen(self, end: int, new: int) -> int:
        """The first token that any of the `new` last ones sees."""
        window = self.sliding_window
        return 0 if window is None else max(0, end - new - window + 1)

    def _groups(self, table: torch.Tensor, seq: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
        """Where groups `[N]` of sequences lie, for each KV head: `[N, num_kv_heads]`."""
        num_kv_heads, per_page = self.page_shapes[1][:2]
        page = table[seq, group // per_page].long()
        heads = torch.arange(num_kv_heads, device=table.device)
        return (page[:, None] * num_kv_heads + heads) * per_page + (group % per_page)[:, None]

    def _slices(self, count: int) -> list[slice]:
        """Groups in parts that stay in a cache; at least one part."""
        (num_kv_heads, _, head_dim_k), (_, _, head_dim_v, _) = self.page_shapes
        step = max(1, MAX_GATHERED // (4 * GROUP * num_kv_heads * max(head_dim_k, head_dim_v)))
        return [slice(start, start + step) for start in range(0, max(1, count), step)]


def _rows(rows: list[int], device: torch.device) -> torch.Tensor | slice:
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows, device=device)
