"""Metrics where only the most likely tokens of each position are told.

The divergence is that between the distributions over the tokens that both sides tell and one bucket
of all others. Merging outcomes never makes a divergence larger, so this is a lower bound, and as
close as the tail is thin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fp8calib.evaluation.metrics import TokenMetrics, TokenTable

_REST = 1e-9  # probability of all other tokens, at least: logprobs are rounded to float32


@dataclass(frozen=True)
class TopLogprobs:
    """Of n predicted tokens, `ids` and `logprobs` [n, 1 + top]: first the token that does follow,
    then the most likely ones in order."""

    ids: np.ndarray
    logprobs: np.ndarray

    def __getitem__(self, part: slice) -> TopLogprobs:
        return TopLogprobs(self.ids[part], self.logprobs[part].astype(np.float64))


def table_of(native: TopLogprobs, other: TopLogprobs, rows: Sequence[Sequence[int]]) -> TokenTable:
    """The metrics of every predicted token; the arrays hold row after row."""
    table, start = TokenTable(), 0
    for number, row in enumerate(rows):
        part = slice(start, start + len(row) - 1)
        table.add(number, 0, compare_top(native[part], other[part]))
        start = part.stop
    return table


def compare_top(native: TopLogprobs, other: TopLogprobs) -> TokenMetrics:
    """As `metrics.compare` does of whole distributions."""
    divergences = [
        _bucket_kl(*tokens)
        for tokens in zip(
            native.ids[:, 1:],
            native.logprobs[:, 1:],
            other.ids[:, 1:],
            other.logprobs[:, 1:],
            strict=True,
        )
    ]
    kl, reverse = np.array(divergences).reshape(-1, 2).T.copy()
    best = native.ids[:, 1:2]
    return TokenMetrics(
        nll=torch.tensor(-other.logprobs[:, 0]),
        kl=torch.tensor(kl),
        reverse_kl=torch.tensor(reverse),
        top1=torch.tensor((other.ids[:, 1:2] == best).any(1).astype(np.float64)),
        top5=torch.tensor((other.ids[:, 1:6] == best).any(1).astype(np.float64)),
    )


def _bucket_kl(
    ids: np.ndarray, log_p: np.ndarray, other_ids: np.ndarray, log_q: np.ndarray
) -> tuple[float, float]:
    """KL(p || q) and KL(q || p), nats."""
    _, mine, theirs = np.intersect1d(ids, other_ids, assume_unique=True, return_indices=True)
    log_p, log_q = log_p[mine], log_q[theirs]
    p, q = np.exp(log_p), np.exp(log_q)
    rest_p, rest_q = max(_REST, 1 - p.sum()), max(_REST, 1 - q.sum())
    ratio, rest = log_p - log_q, np.log(rest_p / rest_q)
    forward, backward = p @ ratio + rest_p * rest, -(q @ ratio) - rest_q * rest
    return np.maximum(0.0, forward), np.maximum(0.0, backward)
