"""Runs the model over one step: the new tokens of some sequences, packed into one row."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from transformers import PreTrainedModel

from fp8calib.attention import attention_configs
from fp8calib.runtime.forward_context import ForwardContext, GroupTables, set_forward_context
from fp8calib.runtime.kv_store import KVStore
from fp8calib.runtime.paged_attention import PAGED_ATTENTION


@dataclass(frozen=True)
class Chunk:
    """New tokens of one sequence.

    token_ids: the new tokens, at least one; start: how many tokens of the sequence lie in the cache
    already; block_tables: its blocks in each group of layers, enough for the new tokens too;
    num_logits: of how many of the last new tokens the logits are wanted; pending_slot: one more
    token follows, the newest of this slot, which only the device knows.
    """

    token_ids: Sequence[int]
    start: int
    block_tables: Sequence[Sequence[int]]
    num_logits: int
    pending_slot: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + (self.pending_slot is not None)


class ModelRunner:
    """A model on a KVStore. The model's attention is the paged one from here on; several runners
    may share a model, each with its own store."""

    def __init__(self, model: PreTrainedModel, store: KVStore) -> None:
        for config in attention_configs(model):
            config._attn_implementation_internal = PAGED_ATTENTION
        self.model = model.eval()
        self.store = store
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def forward(
        self, chunks: Sequence[Chunk], last_tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Store and attend the new tokens of `chunks`.

        Args:
            last_tokens: int64, the newest token of each slot.
        Returns:
            logits [sum of num_logits, vocabulary], chunk by chunk, in the model's dtype.
        """
        device = self.store.device
        tokens: list[int] = []
        for chunk in chunks:
            tokens += chunk.token_ids
            if chunk.pending_slot is not None:
                tokens.append(-1 - chunk.pending_slot)
        lengths = [chunk.num_tokens for chunk in chunks]
        ends = list(accumulate(lengths))
        sequence = torch.repeat_interleave(torch.tensor(lengths, device=device))
        before = torch.tensor(
            [chunk.start - end + n for chunk, end, n in zip(chunks, ends, lengths, strict=True)],
            device=device,
        )
        positions = before[sequence] + torch.arange(len(tokens), device=device)
        context = ForwardContext(
            layers=self.store.layers,
            groups=[
                self._tables([chunk.block_tables[group] for chunk in chunks], sequence, positions)
                for group in range(len(self.store.groups))
            ],
            cu_seqlens_q=torch.tensor([0, *ends], dtype=torch.int32, device=device),
            seq_lens=torch.tensor(
                [chunk.start + n for chunk, n in zip(chunks, lengths, strict=True)],
                dtype=torch.int32,
                device=device,
            ),
            max_seqlen_q=max(lengths),
        )
        rows = [
            row
            for chunk, end in zip(chunks, ends, strict=True)
            for row in range(end - chunk.num_logits, end)
        ]
        input_ids = torch.tensor([tokens], device=device)
        if last_tokens is not None:
            pending = last_tokens[(-1 - input_ids).clamp(min=0)]
            input_ids = torch.where(input_ids < 0, pending, input_ids)
        with set_forward_context(context):
            return self._logits(input_ids, positions[None], rows)

    def _tables(
        self, tables: Sequence[Sequence[int]], sequence: torch.Tensor, positions: torch.Tensor
    ) -> GroupTables:
        width = max(map(len, tables))
        padded = [[*table, *[0] * (width - len(table))] for table in tables]
        block_table = torch.tensor(padded, dtype=torch.int32, device=self.store.device)
        size = self.store.block_size
        blocks = block_table[sequence, positions // size].long()
        return GroupTables(blocks * size + positions % size, block_table)

    def _logits(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, rows: list[int]
    ) -> torch.Tensor:
        arguments = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        everything = len(rows) == input_ids.shape[1]
        if self._keeps_rows and not everything:
            arguments["logits_to_keep"] = torch.tensor(
                rows, dtype=torch.long, device=input_ids.device
            )
            return self.model(**arguments).logits[0]
        logits = self.model(**arguments).logits[0]
        return logits if everything else logits[rows]
