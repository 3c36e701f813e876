"""Penalties for tokens that were there before, with their counts kept on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8calib.runtime.device_copy import to_device
from fp8calib.runtime.sampling_params import SamplingParams


class Penalties:
    """How often each token occurs in the output, and whether in the prompt, of each slot.

    A slot is the place of a running sequence. The memory, five bytes for each slot and token of the
    vocabulary, is taken when a request first asks for a penalty.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._shape = num_slots, vocab_size
        self._device = device
        self._counts: torch.Tensor | None = None  # int32 [slots, vocabulary]
        self._in_prompt: torch.Tensor | None = None  # bool [slots, vocabulary]

    def begin(self, slot: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """A sequence with penalties takes a slot."""
        if self._counts is None or self._in_prompt is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
            self._in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        self._counts[slot] = 0
        self._in_prompt[slot] = False
        self._in_prompt[slot].index_fill_(0, to_device(prompt, torch.int64, self._device), True)
        self.count(
            to_device([slot] * len(output), torch.int64, self._device),
            to_device(output, torch.int64, self._device),
        )

    def count(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Each of `slots` int64 [N] has gained one of `tokens` int64 [N]."""
        assert self._counts is not None
        one = torch.ones((), dtype=torch.int32, device=self._device)
        self._counts.index_put_((slots, tokens), one, accumulate=True)

    def apply(
        self, logits: torch.Tensor, slots: torch.Tensor, params: Sequence[SamplingParams]
    ) -> torch.Tensor:
        """Penalised float32 `logits` [N, vocabulary] of the sequences in `slots` int64 [N]."""
        assert self._counts is not None and self._in_prompt is not None
        values = [
            (one.repetition_penalty, one.frequency_penalty, one.presence_penalty) for one in params
        ]
        repetition, frequency, presence = to_device(values, torch.float32, self._device)[
            :, :, None
        ].unbind(1)
        counts = self._counts[slots]
        seen = self._in_prompt[slots] | (counts > 0)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, repeated, logits)
        return logits - frequency * counts - presence * (counts > 0)
