"""How far one set of logits is from another, token by token, and the sums of that by document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

# Tokens compared at a time: what a CPU's cache holds of a large vocabulary; enough to fill a GPU.
_CHUNK = {"cpu": 16, "cuda": 256}


@dataclass(frozen=True)
class TokenMetrics:
    """Of n predicted tokens, each a tensor [n].

    nll: float64, negative log-likelihood of the token that follows, nats;
    kl: float64, KL(native || this), nats, >= 0, exactly 0 for equal logits;
    agrees: bool, whether native's most likely token is this one's too.
    """

    nll: torch.Tensor
    kl: torch.Tensor
    agrees: torch.Tensor


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
            torch.cat([chunk[i].nll for chunk in chunks]),
            torch.cat([chunk[i].kl for chunk in chunks]),
            torch.cat([chunk[i].agrees for chunk in chunks]),
        )
        for i in range(len(logits))
    ]


def _compare(logits: Sequence[torch.Tensor], targets: torch.Tensor) -> list[TokenMetrics]:
    native = logits[0]
    exponentials, total, norm, best = _normalise(native)
    probability = exponentials.div_(total[:, None])
    found = [
        TokenMetrics(norm - _at(native, targets), torch.zeros_like(norm), torch.ones_like(best) > 0)
    ]
    for other in logits[1:]:
        _, _, other_norm, other_best = _normalise(other)
        # sum p (log p - log q), the norms outside the sum: the logits' differences are small, so
        # float32 keeps them
        kl = (native - other).mul_(probability).sum(-1) + (other_norm - norm)
        found.append(
            TokenMetrics(other_norm - _at(other, targets), kl.clamp_(min=0), other_best == best)
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


@dataclass(frozen=True)
class WorstToken:
    """The predicted token at which KL(native || variant) is largest: `position` counts in document
    `document`, both from 0."""

    kl: float
    document: int
    position: int


@dataclass
class Tally:
    """Sums of TokenMetrics by document: float64 arrays [documents]."""

    documents: int
    tokens: np.ndarray = field(init=False)
    nll: np.ndarray = field(init=False)
    kl: np.ndarray = field(init=False)
    agrees: np.ndarray = field(init=False)
    worst: WorstToken | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "nll", "kl", "agrees"):
            setattr(self, name, np.zeros(self.documents))

    def add(self, document: int, start: int, metrics: TokenMetrics) -> None:
        """Count the tokens at positions `start` and on of a document."""
        self.tokens[document] += len(metrics.nll)
        self.nll[document] += float(metrics.nll.sum())
        self.kl[document] += float(metrics.kl.sum())
        self.agrees[document] += int(metrics.agrees.sum())
        kl, at = metrics.kl.max(0)
        if self.worst is None or float(kl) > self.worst.kl:
            self.worst = WorstToken(float(kl), document, start + int(at))
