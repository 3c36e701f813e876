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
    num_logits: of how many of the last new tokens the logits are wanted.
    """

    token_ids: Sequence[int]
    start: int
    block_tables: Sequence[Sequence[int]]
    num_logits: int


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
    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Store and attend the new tokens of `chunks`.

        Returns:
            logits [sum of num_logits, vocabulary], chunk by chunk, in the model's dtype.
        """
        device = self.store.device
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        lengths = [len(chunk.token_ids) for chunk in chunks]
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
        with set_forward_context(context):
            return self._logits(torch.tensor([tokens], device=device), positions[None], rows)

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
