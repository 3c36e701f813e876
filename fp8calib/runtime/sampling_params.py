"""How the tokens of a request are chosen and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8calib.errors import UserError

GREEDY_BELOW = 1e-5  # temperatures below it are greedy: dividing by them would overflow


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request, named and meant as in vLLM.

    max_tokens: the most tokens to generate; None: as many as the model's length allows.
    temperature: 0 is greedy. top_p: the smallest set of tokens that holds this probability.
    top_k: the k most likely tokens; 0 or -1 is all.
    seed: the random numbers depend on it and on a token's position alone; None draws one.
    stop: texts that end the request; they are not part of the output.
    stop_token_ids: tokens that end it. ignore_eos: go on after the end-of-text token.

    Raises:
        UserError: a value out of its range.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        )
        for name, ok, wanted in (
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= -1, "0 (all), -1 (all) or more"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "from 0 to 2**63 - 1"),
            ("stop", all(self.stop), "texts that are not empty"),
        ):
            if not ok:
                raise UserError(f"{name} must be {wanted}, got {getattr(self, name)}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW
