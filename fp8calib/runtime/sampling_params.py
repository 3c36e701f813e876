"""How the tokens of a request are chosen and when it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fp8calib.errors import UserError

GREEDY_BELOW = 1e-5  # temperatures below it are greedy: dividing by them would overflow
_MOST = 1000.0  # of what logits are divided or multiplied by: no more can be told from infinity


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request, named and meant as in vLLM.

    n: completions of the prompt, each with random numbers of its own; they share its pages.
    max_tokens: the most tokens to generate; None: as many as the model's length allows.
    min_tokens: so many tokens come before one that ends the text, or a stop string may.
    temperature: 0 is greedy. top_p: the smallest set of tokens that holds this probability.
    top_k: the k most likely tokens; 0 or -1 is all.
    min_p: tokens at least this likely, as a share of the likeliest token's probability.
    presence_penalty, frequency_penalty: taken off the logit of each token of the output so far,
        once and once for each time that it is there.
    repetition_penalty: logits of tokens of prompt and output are divided by it where positive and
        multiplied where negative.
    seed: the random numbers depend on it and on a token's position alone; None draws one.
        Completion i of n has seed + i.
    stop: texts that end the request; they are not part of the output.
    stop_token_ids: tokens that end it. ignore_eos: go on after the end-of-text token.
    logprobs: for each token of the output, log probabilities of itself and of so many likeliest
        tokens, by the model's own logits, before temperature and penalties.
    prompt_logprobs: the same for each token of the prompt.

    Raises:
        UserError: a value out of its range.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        )
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        most = math.inf if self.max_tokens is None else self.max_tokens
        for name, ok, wanted in (
            ("n", self.n >= 1, "at least 1"),
            ("max_tokens", most >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= most, "from 0 to max_tokens"),
            ("temperature", 0 <= self.temperature <= _MOST, f"from 0 to {_MOST:g}"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= -1, "0 (all), -1 (all) or more"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "from -2 to 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "from -2 to 2"),
            (
                "repetition_penalty",
                1 / _MOST <= self.repetition_penalty <= _MOST,
                f"from {1 / _MOST:g} to {_MOST:g}",
            ),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "from 0 to 2**63 - 1"),
            ("stop", all(self.stop), "texts that are not empty"),
            ("logprobs", (self.logprobs or 0) >= 0, "0 or more"),
            ("prompt_logprobs", (self.prompt_logprobs or 0) >= 0, "0 or more"),
        ):
            if not ok:
                raise UserError(f"{name} must be {wanted}, got {getattr(self, name)}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalized(self) -> bool:
        """Whether tokens that were there before change the next one's logits."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )
