"""How far one set of logits is from another, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

# Tokens compared at a time: what a CPU's cache holds of a large vocabulary; enough to fill a GPU.
_CHUNK = {"cpu": 16, "cuda": 256}
NOISE = "noise_floor"  # the key of native computed otherwise, where that is measured
METRICS = ("nll", "kl", "reverse_kl", "top1", "top5")


@dataclass(frozen=True)
class TokenMetrics:
    """Of n predicted tokens, each a float64 tensor [n].

    nll: negative log-likelihood of the token that follows, nats;
    kl: KL(native || this), nats, >= 0, exactly 0 for equal logits;
    reverse_kl: KL(this || native), likewise;
    top1, top5: 1 where native's most likely token is this one's, or among its five, else 0.
    """

    nll: torch.Tensor
    kl: torch.Tensor
    reverse_kl: torch.Tensor
    top1: torch.Tensor
    top5: torch.Tensor


def compare(logits: Sequence[torch.Tensor], targets: torch.Tensor) -> list[TokenMetrics]:
    """Compare several predictions of the same tokens with the first of them.

    Args:
        logits: [n, vocabulary] each, any floating dtype; the first is native. Where vocabularies
            are padded to different sizes, the common part counts.
        targets: int64 [n], the tokens that did follow.
    """
    width = min(part.shape[-1] for part in logits)
    size = _CHUNK[targets.device.type]
    chunks = [
        _compare(
            [part[start : start + size, :width].float() for part in logits], targets[start:][:size]
        )
        for start in range(0, len(targets), size)
    ]
    return [
        TokenMetrics(
            *(torch.cat([getattr(chunk[i], name) for chunk in chunks]) for name in METRICS)
        )
        for i in range(len(logits))
    ]


def _compare(logits: Sequence[torch.Tensor], targets: torch.Tensor) -> list[TokenMetrics]:
    native = logits[0]
    exponentials, total, norm, best = _normalise(native)
    probability = exponentials.div_(total[:, None])
    zero, one = torch.zeros_like(norm), torch.ones_like(norm)
    found = [TokenMetrics(norm - _at(native, targets), zero, zero, one, one)]
    for other in logits[1:]:
        exponentials, total, other_norm, other_best = _normalise(other)
        # sum p (log p - log q), the norms outside the sum: the logits' differences are small, so
        # float32 keeps them
        difference, shift = native - other, other_norm - norm
        forward = probability.mul(difference).sum(-1) + shift
        backward = exponentials.mul_(difference).sum(-1).div(-total) - shift
        ahead = (other > _at(other, best)[:, None]).sum(-1)
        found.append(
            TokenMetrics(
                other_norm - _at(other, targets),
                forward.clamp_(min=0),
                backward.clamp_(min=0),
                (other_best == best).double(),
                (ahead < 5).double(),
            )
        )
    return found


def _normalise(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """exp(x - max), its sum over the vocabulary, logsumexp(x) in float64, the largest's place."""
    largest, best = logits.max(-1)
    exponentials = (logits - largest[:, None]).exp_()
    total = exponentials.sum(-1)
    return exponentials, total, largest.double() + total.double().log(), best


def _at(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.gather(-1, tokens[:, None])[:, 0]


class TokenTable:
    """The metrics of every token of a text, in the order measured.

    They stay on the device until they are asked for: reading each would make a GPU wait. Reading
    is possible at any time and gives what has been added so far.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int, torch.Tensor]] = []  # the last float64 [metric, n]

    def add(self, document: int, start: int, metrics: TokenMetrics) -> None:
        """Take in the predictions made at positions `start` and on of a document."""
        stacked = torch.stack([getattr(metrics, name) for name in METRICS])
        self._pieces.append((document, start, stacked))

    def __len__(self) -> int:
        return sum(part.shape[1] for _, _, part in self._pieces)

    def columns(self) -> dict[str, np.ndarray]:
        """By name, an array [tokens]: METRICS, `document`, and `position`, the predicting token's
        in its document; both count from 0."""
        joined = torch.cat([part for _, _, part in self._pieces], dim=1).cpu().numpy()
        sizes = [part.shape[1] for _, _, part in self._pieces]
        return {
            **dict(zip(METRICS, joined, strict=True)),
            "document": np.repeat([document for document, _, _ in self._pieces], sizes),
            "position": np.concatenate(
                [
                    start + np.arange(size)
                    for (_, start, _), size in zip(self._pieces, sizes, strict=True)
                ]
            ),
        }
