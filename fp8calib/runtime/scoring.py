"""Teacher-forced logits through the paged cache: what `verify` compares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from fp8calib.layers import LayerSpec
from fp8calib.runtime.kv_format import KVFormat
from fp8calib.runtime.kv_store import KVStore, cache_groups
from fp8calib.runtime.model_runner import ModelRunner
from fp8calib.runtime.step_inputs import Chunk


@dataclass(frozen=True)
class Scored:
    """Logits of consecutive tokens of one row: `logits[i]`, of [n, vocabulary] in the model's
    dtype, is what the model expects to follow token `start + i` of row number `row`."""

    row: int
    start: int
    logits: torch.Tensor


def score(
    model: PreTrainedModel,
    layers: Sequence[LayerSpec],
    kv_format: KVFormat,
    rows: Sequence[Sequence[int]],
    *,
    max_batched_tokens: int = 512,
    block_size: int = 16,
) -> Iterator[Scored]:
    """Run every row through the model with its K and V stored in, and read from, pages.

    Short rows share a forward pass, long ones take several: at most `max_batched_tokens` tokens
    each. Memory holds the cache of the rows of one pass and its logits, however many rows there
    are. Calls with the same rows and limits yield the same (row, start, length) in the same order,
    so formats can be compared by zipping them; they may share the model.

    Args:
        model, layers: as in the LoadedModel that `load` returns.
        rows: token ids, none of them empty.
    """
    passes = list(_plan([len(row) for row in rows], max_batched_tokens))
    width = max(sum(-(-end // block_size) for _, _, end in part) for part in passes)
    blocks = [width] * len(cache_groups(layers))
    runner = ModelRunner(model, KVStore(layers, kv_format, blocks, block_size, model.device))
    for part in passes:
        chunks, first = [], 0
        for row, start, end in part:
            table = range(first, first + -(-end // block_size))
            first = table.stop
            chunks.append(Chunk(rows[row][start:end], start, [table] * len(blocks), end - start))
        logits = runner.forward(chunks).split([chunk.num_logits for chunk in chunks])
        for (row, start, _), rows_logits in zip(part, logits, strict=True):
            yield Scored(row, start, rows_logits)


def _plan(lengths: Sequence[int], limit: int) -> Iterator[list[tuple[int, int, int]]]:
    """The passes: each a list of (row, start, end). A row longer than `limit` is cut into passes of
    its own, in which it keeps its blocks; others are packed together whole."""
    part: list[tuple[int, int, int]] = []
    used = 0
    for row, length in enumerate(lengths):
        if used + length > limit and part:
            yield part
            part, used = [], 0
        if length > limit:
            for start in range(0, length, limit):
                yield [(row, start, min(start + limit, length))]
        else:
            part.append((row, 0, length))
            used += length
    if part:
        yield part
