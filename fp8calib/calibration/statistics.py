"""What one pass keeps of Q, K and V: exact maxima and a logarithmic histogram, per layer and head.

Everything a scale or a report needs follows from these two, without touching the model again. Both
are mergeable and do not depend on the order of texts or on how they were batched: the maximum is
exact in float32, the histogram holds integer counts. Its buckets are the leading bits of a float32
(exponent and MANTISSA_BITS of the mantissa), so each spans at most 1/64 of its value: a quantile,
a share of clipped values or the rms read off it are right to within 1.6 %.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fp8calib.scales import E4M3_HALF_SUBNORMAL, E4M3_MAX

MANTISSA_BITS = 6
MIN_EXPONENT, MAX_EXPONENT = -32, 20  # |x| outside [2^-32, 2^20) is counted in the end buckets
BUCKETS = (MAX_EXPONENT - MIN_EXPONENT) << MANTISSA_BITS
_SHIFT = 23 - MANTISSA_BITS
_FIRST = (127 + MIN_EXPONENT) << MANTISSA_BITS


def bucket_edges() -> np.ndarray:
    """Lower edges of the buckets and the upper edge of the last, float64 [BUCKETS + 1].

    Bucket 0 also holds zero and everything below its edge."""
    codes = np.arange(_FIRST, _FIRST + BUCKETS + 1, dtype=np.int64) << _SHIFT
    return codes.astype(np.uint32).view(np.float32).astype(np.float64)


@dataclass
class RangeStatistics:
    """Running statistics of |x| of one layer's q, k or v; tensors are on the layer's device.

    amax: float32 [heads]; text: int64 [heads], the text that holds the maximum (the lowest index
    among equals); histogram: int64 [heads, BUCKETS].
    """

    amax: torch.Tensor
    text: torch.Tensor
    histogram: torch.Tensor

    @classmethod
    def empty(cls, heads: int, device: torch.device | str = "cpu") -> RangeStatistics:
        return cls(
            amax=torch.full((heads,), -1.0, device=device),
            text=torch.zeros(heads, dtype=torch.int64, device=device),
            histogram=torch.zeros(heads, BUCKETS, dtype=torch.int64, device=device),
        )

    def observe(self, x: torch.Tensor, texts: torch.Tensor, real: torch.Tensor | None) -> None:
        """Take in `x` [B, heads, T, D]; `texts` int64 [B] numbers the rows' texts; `real` bool
        [B, T] marks real tokens, None when all are. NaN and infinity end up in amax."""
        codes, dropped = _codes(x)
        padding: torch.Tensor | int = 0
        if real is not None:
            codes.masked_fill_(~real[:, None, :, None], 0)
            padding = (~real).sum() * x.shape[3]
        amax = (codes.amax((2, 3)).to(torch.int32) << dropped).view(torch.float32)
        self._take_maximum(amax, texts)
        self.histogram += _count(codes, _SHIFT - dropped)
        self.histogram[:, 0] -= padding

    def _take_maximum(self, amax: torch.Tensor, texts: torch.Tensor) -> None:
        # NaN compares with nothing: make it infinity's equal here, the caller refuses both.
        amax = amax.nan_to_num(nan=torch.inf, posinf=torch.inf)
        best = amax.amax(0)
        none = torch.iinfo(torch.int64).max
        text = torch.where(amax == best, texts[:, None], none).amin(0)
        self.text = torch.where(
            best > self.amax,
            text,
            torch.where(best == self.amax, torch.minimum(text, self.text), self.text),
        )
        self.amax = torch.maximum(best, self.amax)

    def merge(self, other: RangeStatistics) -> None:
        """Take in what another pass over other texts (numbered apart) has seen."""
        self._take_maximum(other.amax[None].to(self.amax.device), other.text[None])
        self.histogram += other.histogram.to(self.histogram.device)

    def numpy(self) -> Ranges:
        return Ranges(
            amax=self.amax.cpu().numpy(),
            text=self.text.cpu().numpy(),
            histogram=self.histogram.cpu().numpy(),
        )


def _codes(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """|x| as the leading bits of a float32, and how many of its trailing bits were left out.

    Integers of this form order like the values they stand for, infinity and NaN last, and cost a
    fraction of floating-point reductions on a CPU. A bfloat16 is the upper half of a float32.
    """
    if x.dtype == torch.bfloat16:
        return x.detach().view(torch.int16) & 0x7FFF, 16
    return x.detach().float().view(torch.int32) & 0x7FFFFFFF, 0


def _count(codes: torch.Tensor, shift: int) -> torch.Tensor:
    """Histogram of `codes` [B, heads, T, D], which it overwrites: int64 [heads, BUCKETS]."""
    heads = codes.shape[1]
    bucket = codes.bitwise_right_shift_(shift).sub_(_FIRST).clamp_(0, BUCKETS - 1)
    first = torch.arange(heads, dtype=torch.int32, device=codes.device) * BUCKETS
    slot = (bucket + first[:, None, None]).flatten()
    return torch.bincount(slot, minlength=heads * BUCKETS).view(heads, BUCKETS)


@dataclass(frozen=True)
class Ranges:
    """RangeStatistics at rest, numpy: amax float32 [heads], text int64 [heads], histogram int64
    [heads, BUCKETS]."""

    amax: np.ndarray
    text: np.ndarray
    histogram: np.ndarray

    @property
    def count(self) -> int:
        """Values seen per head."""
        return int(self.histogram[0].sum())

    def percentile(self, p: float) -> np.ndarray:
        """The p-th percentile of |x| per head, float32 [heads], at most 1.6 % above the true one
        (the upper edge of its bucket, never above amax)."""
        below = np.cumsum(self.histogram, axis=1)
        rank = np.ceil(below[:, -1:] * (p / 100.0))
        bucket = (below < rank).sum(axis=1).clip(max=BUCKETS - 1)
        return np.minimum(bucket_edges()[bucket + 1].astype(np.float32), self.amax)

    def rms(self) -> np.ndarray:
        """Root mean square per head, float32 [heads]."""
        edges = bucket_edges()
        middle = (edges[:-1] + edges[1:]) / 2
        middle[0] = 0.0
        square = (self.histogram * middle**2).sum(axis=1) / max(self.count, 1)
        return np.sqrt(square).astype(np.float32)

    def clipped(self, scale: np.ndarray) -> float:
        """Share of values beyond e4m3's largest at `scale` ([1] or [heads])."""
        above = bucket_edges()[:-1] >= (E4M3_MAX * scale.astype(np.float64))[:, None]
        # The exact maximum decides whether anything is clipped, the buckets how much.
        share = (self.histogram * above).sum(axis=1) * (self.amax > E4M3_MAX * scale)
        return float(share.sum() / max(self.histogram.sum(), 1))

    def flushed(self, scale: np.ndarray) -> float:
        """Share of values that e4m3 rounds to zero at `scale` ([1] or [heads])."""
        below = bucket_edges()[1:] <= (E4M3_HALF_SUBNORMAL * scale.astype(np.float64))[:, None]
        below = np.broadcast_to(below, self.histogram.shape)
        return float(self.histogram[below].sum() / max(self.histogram.sum(), 1))
