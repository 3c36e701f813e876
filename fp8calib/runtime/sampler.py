"""Picks the next token of each sequence, on the device that holds the logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8calib.errors import ModelError
from fp8calib.runtime.sampling_params import SamplingParams


class Sampler:
    """Greedy, or by one uniform random number a token, which depends on the request's seed and the
    token's position alone: not on the batch, the device or the scheduling."""

    @torch.inference_mode()
    def sample(
        self,
        logits: torch.Tensor,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        positions: Sequence[int],
    ) -> list[int]:
        """The next token of each row of `logits` [B, vocabulary].

        Args:
            seeds: 0 to 2**63 - 1, one a row; positions: of the token to pick, in its sequence.
        Raises:
            ModelError: a row of logits holds NaN.
        """
        logits = logits.float()
        best, tokens = logits.max(-1)
        if bool(best.isnan().any()):
            raise ModelError(
                "the model's logits are NaN: its values overflow. Try --dtype float32 or bfloat16; "
                "if --kv-cache-dtype bfloat16 helps, the cache's scales are wrong"
            )
        rows = [row for row, one in enumerate(params) if not one.greedy]
        if rows:
            chosen = [params[row] for row in rows]
            device = logits.device
            uniform = uniforms(
                torch.tensor([seeds[row] for row in rows], device=device),
                torch.tensor([positions[row] for row in rows], device=device),
            )
            tokens[rows] = _draw(logits[rows], chosen, uniform)
        return tokens.tolist()


def _draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniform: torch.Tensor
) -> torch.Tensor:
    """Tokens [B] for `uniform` [B] by the inverse of each row's cumulative distribution, with the
    tokens in order of probability. float64: a sum over a large vocabulary in float32 is off by
    more than rare tokens weigh."""
    device, vocab_size = logits.device, logits.shape[1]
    temperature = torch.tensor([[one.temperature] for one in params], device=device)
    top_p = torch.tensor([[one.top_p] for one in params], device=device, dtype=torch.float64)
    top_k = [min(one.top_k, vocab_size) if one.top_k > 0 else vocab_size for one in params]
    kept = min(max(top_k), vocab_size)
    logits = logits / temperature
    values, order = logits.topk(kept) if kept < vocab_size else logits.sort(descending=True)
    rank = torch.arange(kept, device=device)
    values = values.masked_fill(rank >= torch.tensor(top_k, device=device)[:, None], -torch.inf)
    probabilities = values.double().softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(before >= top_p, 0)
    cumulative = probabilities.cumsum(-1)
    target = uniform[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).clamp(max=kept - 1)
    return order.gather(1, index)[:, 0]


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Uniform random numbers in [0, 1), float64 [B], from int64 seeds and positions [B].

    SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) with the seed's own mix as its start and the
    position as its counter.
    """
    bits = _mix(_mix(seeds + _GAMMA) + (positions + 1) * _GAMMA)
    return ((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLIERS = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser. int64 wraps as uint64 does; its right shift needs the sign masked."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MULTIPLIERS[0]
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MULTIPLIERS[1]
    return x ^ ((x >> 31) & ((1 << 33) - 1))
