"""What one pass keeps of Q, K and V: exact maxima and a logarithmic histogram, per layer and head.

Everything a scale or a report needs follows from these two, without touching the model again. Both
are mergeable and do not depend on the order of texts or on how they were batched: the maximum is
exact in float32, the histogram holds integer counts. Its buckets are the leading bits of a float32
(exponent and MANTISSA_BITS of the mantissa), so each spans at most 1/64 of its value: a quantile,
a share of clipped values or the rms read off it are right to within 1.6 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch

from fp8calib.scales import E4M3_HALF_SUBNORMAL, E4M3_MAX

MANTISSA_BITS = 6
MIN_EXPONENT, MAX_EXPONENT = -32, 20  # |x| outside [2^-32, 2^20) is counted in the end buckets
BUCKETS = (MAX_EXPONENT - MIN_EXPONENT) << MANTISSA_BITS
SINK_POSITIONS = 4  # the first tokens of a text, where attention sinks live
_TOKENS = 256
_SHIFT = 23 - MANTISSA_BITS
_FIRST = (127 + MIN_EXPONENT) << MANTISSA_BITS


def bucket_edges() -> np.ndarray:
    """Lower edges of the buckets and the upper edge of the last, float64 [BUCKETS + 1].

    Bucket 0 also holds zero and everything below its edge."""
    codes = np.arange(_FIRST, _FIRST + BUCKETS + 1, dtype=np.int64) << _SHIFT
    return codes.astype(np.uint32).view(np.float32).astype(np.float64)


def bucket_middles() -> np.ndarray:
    """What stands for a bucket's values, float64 [BUCKETS]; zero for the first."""
    edges = bucket_edges()
    middles = (edges[:-1] + edges[1:]) / 2
    middles[0] = 0.0
    return middles


@dataclass
class RangeStatistics:
    """Running statistics of |x| of one layer's q, k or v; tensors are on the layer's device.

    amax: float32 [heads]; text: int64 [heads], the text that holds the maximum (the lowest index
    among equals); late_amax: float32 [heads], without each text's first SINK_POSITIONS tokens;
    text_amax: float32 [texts], the maximum of each text over all heads, -1 where not seen;
    histogram: int64 [heads, BUCKETS].
    """

    amax: torch.Tensor
    text: torch.Tensor
    late_amax: torch.Tensor
    text_amax: torch.Tensor
    histogram: torch.Tensor

    @classmethod
    def empty(cls, heads: int, device: torch.device | str = "cpu") -> RangeStatistics:
        return cls(
            amax=torch.full((heads,), -1.0, device=device),
            text=torch.zeros(heads, dtype=torch.int64, device=device),
            late_amax=torch.zeros(heads, device=device),
            text_amax=torch.empty(0, device=device),
            histogram=torch.zeros(heads, BUCKETS, dtype=torch.int64, device=device),
        )

    def observe(self, x: torch.Tensor, texts: torch.Tensor, real: torch.Tensor | None) -> None:
        """Take in `x` [B, heads, T, D]; `texts` int64 [B] numbers the rows' texts, for which there
        must be room (`reserve`); `real` bool [B, T] marks real tokens, None when all are. NaN and
        infinity end up in amax."""
        early, late, counts = scan(x, real)
        amax = torch.maximum(early, late)
        self._take_maximum(amax, texts[:, None])
        self.text_amax[texts] = torch.maximum(self.text_amax[texts], amax.amax(1))
        self.late_amax = torch.maximum(self.late_amax, late.amax(0))
        self.histogram += counts

    def _take_maximum(self, amax: torch.Tensor, texts: torch.Tensor) -> None:
        """`amax` [N, heads]; `texts` [N, heads] or [N, 1] holds the texts that these are of."""
        # NaN compares with nothing: make it infinity's equal here, the caller refuses both.
        amax = amax.nan_to_num(nan=torch.inf, posinf=torch.inf)
        best = amax.amax(0)
        none = torch.iinfo(torch.int64).max
        text = torch.where(amax == best, texts, none).amin(0)
        self.text = torch.where(
            best > self.amax,
            text,
            torch.where(best == self.amax, torch.minimum(text, self.text), self.text),
        )
        self.amax = torch.maximum(best, self.amax)

    def reserve(self, texts: int) -> None:
        """Have room for that many texts."""
        if (more := texts - len(self.text_amax)) > 0:
            self.text_amax = torch.nn.functional.pad(self.text_amax, (0, more), value=-1.0)

    def merge(self, other: RangeStatistics) -> None:
        """Take in what another pass over other texts (numbered apart) has seen."""
        device = self.amax.device
        self._take_maximum(other.amax[None].to(device), other.text[None].to(device))
        self.late_amax = torch.maximum(self.late_amax, other.late_amax.to(device))
        self.reserve(len(other.text_amax))
        ours = self.text_amax[: len(other.text_amax)]
        torch.maximum(ours, other.text_amax.to(device), out=ours)
        self.histogram += other.histogram.to(device)

    def numpy(self) -> Ranges:
        return Ranges(**{name: value.cpu().numpy() for name, value in vars(self).items()})


def scan(
    x: torch.Tensor, real: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Maxima of |x| over each row's first SINK_POSITIONS real tokens and over the rest, both
    float32 [B, heads] (0 where there are none), and the histogram of all, int64 [heads, BUCKETS].

    On a GPU it is one Triton kernel. On a CPU it goes row by row, _TOKENS at a time: what one step
    leaves in the cache, the next finds there.
    """
    batch, heads = x.shape[:2]
    if x.is_cuda and find_spec("triton") is not None:
        from fp8calib.calibration import scan_kernel

        return scan_kernel.scan(
            x, real, sinks=SINK_POSITIONS, shift=_SHIFT, first=_FIRST, buckets=BUCKETS
        )
    maxima = torch.zeros(2, batch, heads, device=x.device)
    histogram = torch.zeros(heads * BUCKETS, dtype=torch.int64, device=x.device)
    slots = torch.empty(x[0].numel(), dtype=torch.int32, device=x.device)
    first = torch.arange(heads, dtype=torch.int32, device=x.device)[:, None, None] * BUCKETS
    for row in range(batch):
        tokens = x[row] if real is None else x[row][:, real[row]]
        filled = 0
        for start in (0, *range(SINK_POSITIONS, tokens.shape[1], _TOKENS)):
            stop = SINK_POSITIONS if start == 0 else start + _TOKENS
            codes, dropped = _codes(tokens[:, start:stop])
            amax = (codes.amax((1, 2)).to(torch.int32) << dropped).view(torch.float32)
            which = maxima[0 if start == 0 else 1, row]
            # NaN sorts above infinity among the codes, and comes out of this comparison as NaN.
            which.copy_(torch.maximum(which, amax))
            codes.bitwise_right_shift_(_SHIFT - dropped).sub_(_FIRST).clamp_(0, BUCKETS - 1)
            place = slots[filled : filled + codes.numel()].view(codes.shape)
            torch.add(codes, first, out=place)
            filled += codes.numel()
        histogram += torch.bincount(slots[:filled], minlength=heads * BUCKETS)
    return maxima[0], maxima[1], histogram.view(heads, BUCKETS)


def _codes(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """|x| as the leading bits of a float32, and how many of its trailing bits were left out.

    Integers of this form order like the values they stand for, infinity and NaN last, and cost a
    fraction of floating-point reductions on a CPU. A bfloat16 is the upper half of a float32.
    """
    x = x.detach().contiguous()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16) & 0x7FFF, 16
    return x.float().view(torch.int32) & 0x7FFFFFFF, 0


@dataclass(frozen=True)
class Ranges:
    """RangeStatistics at rest, as numpy arrays of the same names, shapes and types."""

    amax: np.ndarray
    text: np.ndarray
    late_amax: np.ndarray
    text_amax: np.ndarray
    histogram: np.ndarray

    @property
    def count(self) -> int:
        """Values seen per head."""
        return int(self.histogram[0].sum())

    def pooled(self) -> Ranges:
        """All heads as if they were one."""
        return Ranges(
            amax=self.amax.max(keepdims=True),
            text=self.text[[self.amax.argmax()]],
            late_amax=self.late_amax.max(keepdims=True),
            text_amax=self.text_amax,
            histogram=self.histogram.sum(axis=0, keepdims=True),
        )

    def percentile(self, p: float) -> np.ndarray:
        """The p-th percentile of |x| per head, float32 [heads]: of torch.quantile's value with
        ``interpolation="higher"`` the upper edge of its bucket, at most 1/64 (1.6 %) above it, and
        never above amax."""
        below = np.cumsum(self.histogram, axis=1)
        rank = np.ceil((below[:, -1:] - 1) * (p / 100.0)) + 1
        bucket = (below < rank).sum(axis=1).clip(max=BUCKETS - 1)
        return np.minimum(bucket_edges()[bucket + 1].astype(np.float32), self.amax)

    def rms(self) -> np.ndarray:
        """Root mean square per head, float32 [heads]."""
        square = (self.histogram * bucket_middles() ** 2).sum(axis=1) / max(self.count, 1)
        return np.sqrt(square).astype(np.float32)

    def clipped(self, scale: np.ndarray) -> float:
        """Share of values beyond e4m3's largest at `scale` ([1] or [heads])."""
        above = bucket_edges()[:-1] >= (E4M3_MAX * scale.astype(np.float64))[:, None]
        # The exact maximum decides whether anything is clipped, the buckets how much.
        share = (self.histogram * above).sum(axis=1) * (self.amax > E4M3_MAX * scale)
        return float(share.sum() / max(self.histogram.sum(), 1))

    def below(self, limit: np.float32, scale: np.ndarray) -> float:
        """Share of values whose |x| / scale is at most `limit`; scale is [1] or [heads]."""
        below = bucket_edges()[1:] <= (limit * scale.astype(np.float64))[:, None]
        below = np.broadcast_to(below, self.histogram.shape)
        return float(self.histogram[below].sum() / max(self.histogram.sum(), 1))

    def flushed(self, scale: np.ndarray) -> float:
        """Share of values that e4m3 rounds to zero at `scale` ([1] or [heads])."""
        return self.below(E4M3_HALF_SUBNORMAL, scale)
