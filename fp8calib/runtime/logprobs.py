"""Log probabilities of tokens at their places, and of the likeliest ones there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8calib.runtime.device_copy import to_host
from fp8calib.runtime.request import TokenLogprobs

_ROWS = 256  # rows of float32 log probabilities at a time: their vocabulary can be large


@dataclass(frozen=True)
class LogprobTensors:
    """Of R places: token_ids int64 and logprobs float32 [R, 1 + k], first the token that is there,
    then the k likeliest; ranks int64 [R] of the first."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, tokens: torch.Tensor, k: int) -> LogprobTensors:
        """For `tokens` int64 [R] under `logits` [R, vocabulary]."""
        parts = [
            _of_rows(rows, chosen, min(k, logits.shape[1]))
            for rows, chosen in zip(logits.split(_ROWS), tokens.split(_ROWS), strict=True)
        ]
        return cls(*(torch.cat(part) for part in zip(*parts, strict=True)))

    def to_host(self) -> LogprobTensors:
        """A copy on the CPU that is complete once the device has come this far."""
        return LogprobTensors(*(to_host(x) for x in (self.token_ids, self.logprobs, self.ranks)))

    def lists(self) -> list[TokenLogprobs]:
        """For each place, entries of the token that is there and of the likeliest ones."""
        k = self.token_ids.shape[1] - 1
        return [
            list(zip(ids, values, [rank, *range(1, k + 1)], strict=True))
            for ids, values, rank in zip(
                self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), strict=True
            )
        ]


def _of_rows(
    logits: torch.Tensor, tokens: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, tokens[:, None])
    ranks = 1 + (logprobs > own).sum(-1)
    best, ids = logprobs.topk(k)
    return torch.cat([tokens[:, None], ids], 1), torch.cat([own, best], 1), ranks
