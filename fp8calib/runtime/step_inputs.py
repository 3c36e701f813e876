"""What a step's forward pass needs as numbers, in one buffer, so that one copy brings it in.

On a GPU the buffer lies in page-locked memory, and there are two: the copy out of one may still
wait for its turn while the other is filled for the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

_FIXED = 6  # sections before those that there are for each group
_ALIGNMENT = 16  # int32 numbers: kernels want sections that start at multiples of 16 bytes


class Chunk(NamedTuple):
    """New tokens of one sequence.

    token_ids: the new tokens; start: how many tokens of the sequence lie in the cache already;
    block_tables: its blocks in each group of layers, enough for the new tokens too; num_logits: of
    how many of the last new tokens the logits are wanted; slot: where the device keeps the newest
    token of the sequence; pending: that token, which only the device knows, follows those of
    token_ids. There is at least one new token.
    """

    token_ids: Sequence[int]
    start: int
    block_tables: Sequence[Sequence[int]]
    num_logits: int
    slot: int = 0
    pending: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.pending


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step: new tokens T, sequences B, columns of each group's block table, and rows of
    logits R. A step with as many tokens as sequences is a decode step: one new token each."""

    num_tokens: int
    num_seqs: int
    table_widths: tuple[int, ...]
    num_rows: int

    def sections(self) -> list[tuple[int, ...]]:
        """Shapes of the parts of the buffer, in the order of StepInputs' fields."""
        tokens, rows = (self.num_tokens,), (self.num_rows,)
        return [
            tokens,
            tokens,
            (self.num_seqs + 1,),
            (self.num_seqs,),
            rows,
            rows,
            *[tokens for _ in self.table_widths],
            *[(self.num_seqs, width) for width in self.table_widths],
        ]

    @property
    def size(self) -> int:
        """Of the buffer, in int32 numbers."""
        return _layout(self)[-1][0].stop


@lru_cache(maxsize=64)
def _layout(shape: StepShape) -> list[tuple[slice, tuple[int, ...]]]:
    """Where each section lies, and its shape."""
    sections = shape.sections()
    sizes = [prod(section) for section in sections]
    starts = accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
    places = (slice(at, at + size) for at, size in zip(starts, sizes, strict=False))
    return list(zip(places, sections, strict=True))


@dataclass(frozen=True)
class StepInputs:
    """A step's numbers, all int32 views of one buffer.

    input_ids [T]: a token, or -1 - slot for the newest token of a slot; positions [T];
    cu_seqlens_q [B + 1]: first row of each sequence; seq_lens [B]: tokens of each, the new ones
    included; rows [R]: of which of the T tokens logits are wanted; slots [R]: where to keep the
    token that follows them, -1 for rows that none is chosen for; slot_mappings: of each group [T],
    the slot of each token in the pages, -1 for padding; block_tables: of each group [B, width].
    max_seqlen_q: the most new tokens of a sequence; num_decodes: so many sequences at the start
    have one; max_seq_len: a bound on their length, if it matters.
    """

    shape: StepShape
    input_ids: torch.Tensor
    positions: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor
    slot_mappings: list[torch.Tensor]
    block_tables: list[torch.Tensor]
    max_seqlen_q: int
    num_decodes: int
    max_seq_len: int | None = None

    @classmethod
    def of(
        cls,
        shape: StepShape,
        buffer: torch.Tensor,
        max_seqlen_q: int,
        num_decodes: int,
        max_seq_len: int | None = None,
    ) -> StepInputs:
        """The views of `buffer`, which holds a step of this shape."""
        views = _views(shape, buffer)
        mappings, tables = _by_group(shape, views)
        ids, positions, starts, lens, rows, slots = views[:_FIXED]
        fixed = (ids, positions, starts, lens, rows, slots)
        return cls(shape, *fixed, mappings, tables, max_seqlen_q, num_decodes, max_seq_len)

    @property
    def wants_all_rows(self) -> bool:
        return self.shape.num_rows == self.shape.num_tokens


def _views(shape: StepShape, buffer: Any) -> list[Any]:
    """The sections of a buffer, which is a tensor or an array."""
    return [
        buffer[place] if len(section) == 1 else buffer[place].reshape(section)
        for place, section in _layout(shape)
    ]


def _by_group(shape: StepShape, views: list[Any]) -> tuple[list[Any], list[Any]]:
    """Slot mappings and block tables among a step's sections."""
    tables = _FIXED + len(shape.table_widths)
    return views[_FIXED:tables], views[tables:]


class HostBuffers:
    """Two buffers in host memory that take turns; they grow as they need to."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.int32) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]

    def next(self, size: int) -> torch.Tensor:
        """A buffer of `size` int32 numbers, once the copy out of it that was noted is done."""
        self._buffers.reverse()
        self._copied.reverse()
        if (event := self._copied[0]) is not None:
            event.synchronize()
        if len(self._buffers[0]) < size:
            self._buffers[0] = torch.empty(2 * size, dtype=torch.int32, pin_memory=self._on_gpu)
        return self._buffers[0][:size]

    def note_copy(self) -> None:
        """A copy out of the newest buffer has been started."""
        if self._on_gpu:
            event = self._copied[0] = self._copied[0] or torch.cuda.Event()
            event.record()


def shape_of(chunks: Sequence[Chunk]) -> StepShape:
    """The sizes of a step of these chunks, without padding."""
    groups = range(len(chunks[0].block_tables))
    return StepShape(
        sum(chunk.num_tokens for chunk in chunks),
        len(chunks),
        tuple(max(len(chunk.block_tables[group]) for chunk in chunks) for group in groups),
        sum(chunk.num_logits for chunk in chunks),
    )


def write_step(
    chunks: Sequence[Chunk], shape: StepShape, block_size: int, buffer: torch.Tensor
) -> None:
    """Fill `buffer`, on the host, with the numbers of these chunks. What `shape` has beyond them is
    padding: sequences of length 0 with one new token each, which is neither stored nor kept."""
    views = _views(shape, buffer.numpy())
    decodes = shape.num_tokens == shape.num_seqs == shape.num_rows
    if decodes and all(chunk.num_tokens == chunk.num_logits == 1 for chunk in chunks):
        _write_decodes(chunks, shape, block_size, views)
    else:
        _write_chunks(chunks, shape, block_size, views)


def _write_decodes(
    chunks: Sequence[Chunk], shape: StepShape, block_size: int, views: list[np.ndarray]
) -> None:
    """As `_write_chunks`, with few calls of numpy: what a step of a model costs the host is mostly
    code that has left the processor's caches since the step before."""
    input_ids, positions, starts, seq_lens, rows, slots = views[:_FIXED]
    slot_mappings, tables = _by_group(shape, views)
    count = len(chunks)
    if count < shape.num_seqs:
        for part, padding in ((input_ids, 0), (positions, 0), (seq_lens, 0), (slots, -1)):
            part[count:] = padding
        for mapping in slot_mappings:
            mapping[count:] = -1
    before = [chunk.start for chunk in chunks]
    input_ids[:count] = [
        -1 - chunk.slot if chunk.pending else chunk.token_ids[0] for chunk in chunks
    ]
    positions[:count] = before
    seq_lens[:count] = [start + 1 for start in before]
    slots[:count] = [chunk.slot for chunk in chunks]
    starts[:] = numbers = np.arange(shape.num_seqs + 1)
    rows[:] = numbers[:-1]
    for group, (table, mapping) in enumerate(zip(tables, slot_mappings, strict=True)):
        lists = [chunk.block_tables[group] for chunk in chunks]
        for row, blocks in enumerate(lists):
            table[row, : len(blocks)] = blocks
        mapping[:count] = [
            blocks[start // block_size] * block_size + start % block_size
            for blocks, start in zip(lists, before, strict=True)
        ]


def _write_chunks(
    chunks: Sequence[Chunk], shape: StepShape, block_size: int, views: list[np.ndarray]
) -> None:
    input_ids, positions, starts, seq_lens, rows, slots = views[:_FIXED]
    slot_mappings, tables = _by_group(shape, views)
    lengths = np.array([chunk.num_tokens for chunk in chunks], np.int32)
    before = np.array([chunk.start for chunk in chunks], np.int32)
    ends = np.cumsum(lengths)
    count, tokens = len(chunks), int(lengths.sum())
    _write_ids(chunks, input_ids, rows, slots)
    starts[0] = 0
    starts[1 : count + 1] = ends
    starts[count + 1 :] = tokens + np.arange(1, shape.num_seqs - count + 1)
    seq_lens[:count] = before + lengths
    seq_lens[count:] = 0
    sequence = np.repeat(np.arange(count), lengths)
    positions[:tokens] = np.arange(tokens) + (before - (ends - lengths))[sequence]
    positions[tokens:] = 0
    block, offset = np.divmod(positions[:tokens], block_size)
    for group, (table, mapping) in enumerate(zip(tables, slot_mappings, strict=True)):
        for row, chunk in zip(table, chunks, strict=False):
            blocks = chunk.block_tables[group]
            row[: len(blocks)] = blocks
        mapping[:tokens] = table[sequence, block] * block_size + offset
        mapping[tokens:] = -1


def _write_ids(
    chunks: Sequence[Chunk], input_ids: np.ndarray, rows: np.ndarray, slots: np.ndarray
) -> None:
    slots[:] = -1
    at = row = 0
    for chunk in chunks:
        known = len(chunk.token_ids)
        input_ids[at : at + known] = chunk.token_ids
        if chunk.pending:
            input_ids[at + known] = -1 - chunk.slot
        at += chunk.num_tokens
        if chunk.num_logits:
            rows[row : row + chunk.num_logits] = np.arange(at - chunk.num_logits, at)
            row += chunk.num_logits
            slots[row - 1] = chunk.slot
    input_ids[at:] = 0
    rows[row:] = np.arange(at, at + len(rows) - row)
