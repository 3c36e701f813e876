"""Picks the next token of each sequence, on the device that holds the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fp8calib.runtime.device_copy import Landing, to_device
from fp8calib.runtime.logprobs import LogprobTensors
from fp8calib.runtime.penalties import Penalties
from fp8calib.runtime.request import TokenLogprobs
from fp8calib.runtime.sampling_params import SamplingParams

NAN = -1
"""In place of the token of a row whose logits hold NaN."""


class SamplingRow(NamedTuple):
    """What the choice of one token depends on besides the logits.

    seed: 0 to 2**63 - 1; position: of the token in its sequence; slot: the sequence's place among
    those that run; banned: tokens that may not come (those that would end a text too early).
    """

    params: SamplingParams
    seed: int
    position: int
    slot: int = 0
    banned: Sequence[int] = ()


class SampledTokens:
    """The tokens of one step on their way to the host.

    Args:
        asked: rows with log probabilities, and of how many likeliest tokens.
        landings: places for tokens that steps before this one are done with; this one takes one of
            them, and gives it back once its tokens were waited for.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        logprobs: LogprobTensors | None,
        asked: dict[int, int],
        landings: list[Landing],
    ) -> None:
        self._logprobs = None if logprobs is None else logprobs.to_host()
        self._asked = asked
        self._landings = landings
        self._landing = landings.pop() if landings else Landing(tokens.device)
        self._landing.take(tokens)

    def wait(self) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """The token of each row (NAN where the logits were), and the log probabilities of those
        rows that asked for them. To be called once."""
        tokens = self._landing.wait()
        self._landings.append(self._landing)
        if self._logprobs is None:
            return tokens, {}
        entries = self._logprobs.lists()
        return tokens, {
            row: entry[: 1 + k]
            for (row, k), entry in zip(self._asked.items(), entries, strict=True)
        }


class Sampler:
    """Greedy, or by one uniform random number a token, which depends on the request's seed and the
    token's position alone: not on the batch, the device or the scheduling.

    `last_tokens`, int64 [num_slots + 1] on the device, holds the newest token of each slot, so that
    the next step can start before the host has seen it; the last place is for those of no slot.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.last_tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=self.device)
        self.penalties = Penalties(num_slots, vocab_size, self.device)
        self._landings: list[Landing] = []

    def choose_likeliest(self, logits: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The likeliest token of each row of `logits` [B, vocabulary], NAN where they hold NaN;
        it is the newest one of the row's slot, `slots` int32 [B], -1 for none."""
        best, tokens = _max(logits)
        # A slot of -1 becomes the last place.
        self.last_tokens.index_copy_(0, slots.long() % len(self.last_tokens), tokens)
        return tokens.masked_fill(best.isnan(), NAN)

    @torch.inference_mode()
    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        likeliest: torch.Tensor | None = None,
    ) -> SampledTokens:
        """The next token of each row of `logits` [B, vocabulary]; nothing waits for the device.

        Args:
            likeliest: what `choose_likeliest` has chosen for these rows and their slots already.
        """
        if likeliest is not None and all(map(_is_plain, rows)):
            return SampledTokens(likeliest, None, {}, self._landings)
        slots = self._upload([row.slot for row in rows])
        raw, logits = logits, self._changed(logits.float(), rows, slots)
        best, tokens = logits.max(-1)
        for filtered in (False, True):
            # Each row by itself: a neighbour's filter must not move its random number's token.
            drawn = [
                i
                for i, row in enumerate(rows)
                if not row.params.greedy and _is_filtered(row.params) == filtered
            ]
            if drawn:
                at = self._upload(drawn)
                tokens.index_copy_(0, at, _draw(logits[at], [rows[i] for i in drawn], filtered))
        self.last_tokens.index_copy_(0, slots, tokens)
        if penalized := [i for i, row in enumerate(rows) if row.params.penalized]:
            at = self._upload(penalized)
            self.penalties.count(slots[at], tokens[at])
        asked = {i: r.params.logprobs for i, r in enumerate(rows) if r.params.logprobs is not None}
        logprobs = None
        if asked:
            at = self._upload(list(asked))
            logprobs = LogprobTensors.of(raw[at], tokens[at], max(asked.values()))
        tokens = tokens.masked_fill(best.isnan(), NAN)
        return SampledTokens(tokens, logprobs, asked, self._landings)

    def _changed(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], slots: torch.Tensor
    ) -> torch.Tensor:
        """Logits after penalties, and without tokens that may not come."""
        if penalized := [i for i, row in enumerate(rows) if row.params.penalized]:
            at = self._upload(penalized)
            params = [rows[i].params for i in penalized]
            logits = logits.index_copy(0, at, self.penalties.apply(logits[at], slots[at], params))
        if banned := [(i, token) for i, row in enumerate(rows) for token in row.banned]:
            where = self._upload(banned)
            least = torch.full((), -torch.inf, device=self.device)
            logits = logits.index_put((where[:, 0], where[:, 1]), least)
        return logits

    def _upload(self, values: Sequence[int] | Sequence[tuple[int, int]]) -> torch.Tensor:
        return to_device(values, torch.int64, self.device)


def _is_plain(row: SamplingRow) -> bool:
    """Whether the likeliest token is all that is wanted."""
    params = row.params
    return params.greedy and not (params.penalized or row.banned or params.logprobs is not None)


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow], filtered: bool) -> torch.Tensor:
    """Tokens [B] by the inverse of each row's cumulative distribution: of the whole vocabulary in
    its order, or where there are filters, of what they leave, the likeliest first. float64: a sum
    over a large vocabulary in float32 is off by more than rare tokens weigh."""
    device = logits.device
    uniform = uniforms(
        to_device([row.seed for row in rows], torch.int64, device),
        to_device([row.position for row in rows], torch.int64, device),
    )
    params = [row.params for row in rows]
    logits = logits / to_device([[one.temperature] for one in params], torch.float32, device)
    if not filtered:
        return _invert(logits.double().softmax(-1), uniform)
    probabilities, order = _filter(logits, params)
    return order.gather(1, _invert(probabilities, uniform)[:, None])[:, 0]


def _filter(
    logits: torch.Tensor, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of what min-p, top-k and then top-p leave (0 for the rest; not normalised), and
    their tokens, both with the likeliest first."""
    device, vocab_size = logits.device, logits.shape[1]
    top_k = [min(one.top_k, vocab_size) if one.top_k > 0 else vocab_size for one in params]
    numbers = to_device(
        [(k, one.min_p, one.top_p) for k, one in zip(top_k, params, strict=True)],
        torch.float64,
        device,
    )
    most, min_p, top_p = numbers[:, :, None].unbind(1)
    kept = max(top_k)
    values, order = logits.topk(kept) if kept < vocab_size else logits.sort(descending=True)
    values = values.double()
    rank = torch.arange(kept, device=device)
    out = (rank >= most) | (values < values[:, :1] + min_p.log())
    probabilities = values.masked_fill(out, -torch.inf).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    return probabilities.masked_fill(before >= top_p, 0), order


def _invert(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Where each row's cumulative sum passes `uniform` [B] of its total."""
    cumulative = probabilities.cumsum(-1)
    # A sum that rounding left at its total would point beyond the last possible token.
    target = (uniform[:, None] * cumulative[:, -1:]).minimum(
        cumulative[:, -1:] * (1 - torch.finfo(torch.float64).eps)
    )
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return index.clamp(max=cumulative.shape[1] - 1)  # NaN lies beyond the end


def _max(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum of each row, NaN if it holds one, and its first place. In two steps where the length
    allows it: one reduction of few long rows leaves most of a GPU idle."""
    length = logits.shape[-1]
    width = next((width for width in (512, 256, 128, 64) if length % width == 0), length)
    best, places = logits.unflatten(-1, (-1, width)).max(-1)
    best, part = best.max(-1)
    return best, part * width + places.gather(-1, part[:, None])[:, 0]


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
