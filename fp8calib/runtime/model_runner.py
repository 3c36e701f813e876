"""Runs the model over one step: the new tokens of some sequences, packed into one row."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from fp8calib.attention import attention_configs
from fp8calib.runtime.attention_plans import AttentionPlans
from fp8calib.runtime.cuda_graphs import DecodeGraphs, Result
from fp8calib.runtime.forward_context import ForwardContext, GroupTables, set_forward_context
from fp8calib.runtime.kv_store import KVStore
from fp8calib.runtime.paged_attention import PAGED_ATTENTION
from fp8calib.runtime.sampler import Sampler
from fp8calib.runtime.step_inputs import Chunk, HostBuffers, StepInputs, shape_of, write_step


class ModelRunner:
    """A model on a KVStore. The model's attention is the paged one from here on; several runners
    may share a model, each with its own store.

    Args:
        graphs: captures decode steps; None runs everything eagerly.
        max_num_seqs: the most sequences of a decode step, if it is known.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        store: KVStore,
        graphs: DecodeGraphs | None = None,
        max_num_seqs: int = 0,
    ) -> None:
        for config in attention_configs(model):
            config._attn_implementation_internal = PAGED_ATTENTION
        self.model = model.eval()
        self.store = store
        self.graphs = graphs
        self._plans = AttentionPlans(store, max_num_seqs)
        self._hosts = HostBuffers(store.device)
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Store and attend the new tokens of `chunks`; those with a single one should come first.
        Nothing waits for the device.

        Returns:
            logits [sum of num_logits, vocabulary], chunk by chunk, in the model's dtype; they may
            be overwritten by the next call.
        """
        (logits,) = self._forward(chunks, None)
        return logits

    @torch.inference_mode()
    def step(self, chunks: Sequence[Chunk], sampler: Sampler) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward`, and `sampler.choose_likeliest` of the logits, as part of the same graph.
        Pending tokens are the sampler's newest; it must always be the same one."""
        logits, likeliest = self._forward(chunks, sampler)
        return logits, likeliest

    def _forward(self, chunks: Sequence[Chunk], sampler: Sampler | None) -> Result:
        shape = shape_of(chunks)
        decode = shape.num_tokens == shape.num_seqs == shape.num_rows
        padded = self.graphs.padded(shape) if self.graphs is not None and decode else None
        shape = padded or shape
        host = self._hosts.next(shape.size)
        write_step(chunks, shape, self.store.block_size, host)
        result = None
        if self.graphs is not None and padded is not None:
            result = self.graphs.run(
                padded,
                self._plans.max_seq_len(chunks, padded.num_seqs),
                host,
                self._hosts.note_copy,
                lambda inputs: self._run(inputs, sampler),
            )
        if result is None:
            on_device = host.to(self.store.device, non_blocking=True)
            self._hosts.note_copy()
            lengths = [chunk.num_tokens for chunk in chunks]
            longer = (row for row, length in enumerate(lengths) if length > 1)
            num_decodes = next(longer, len(chunks))
            bound = None
            if num_decodes:
                bound = self._plans.max_seq_len(chunks[:num_decodes], num_decodes)
            inputs = StepInputs.of(shape, on_device, max(lengths), num_decodes, bound)
            result = self._run(inputs, sampler)
        rows = sum(chunk.num_logits for chunk in chunks)
        return tuple(part[:rows] for part in result)

    def _run(self, inputs: StepInputs, sampler: Sampler | None) -> Result:
        ids = inputs.input_ids.long()
        if sampler is not None:
            ids = torch.where(ids < 0, sampler.last_tokens[(-1 - ids).clamp(min=0)], ids)
        context = ForwardContext(
            layers=self.store.layers,
            groups=[
                GroupTables(slots, table)
                for slots, table in zip(inputs.slot_mappings, inputs.block_tables, strict=True)
            ],
            cu_seqlens_q=inputs.cu_seqlens_q,
            seq_lens=inputs.seq_lens,
            max_seqlen_q=inputs.max_seqlen_q,
            num_decodes=inputs.num_decodes,
            plans=self._plans.update(inputs),
        )
        arguments: dict[str, Any] = {
            "input_ids": ids[None],
            "position_ids": inputs.positions.long()[None],
            "use_cache": False,
        }
        rows = None if inputs.wants_all_rows else inputs.rows.long()
        if rows is not None and self._keeps_rows:
            arguments["logits_to_keep"] = rows
        with set_forward_context(context):
            logits = self.model(**arguments).logits[0]
        if rows is not None and not self._keeps_rows:
            logits = logits[rows]
        if sampler is None:
            return (logits,)
        return logits, sampler.choose_likeliest(logits, inputs.slots)
