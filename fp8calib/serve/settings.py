"""What a server is told at its start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fp8calib.errors import UserError


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for; None: what the model's length allows.

    body_bytes: of the whole request, which must be there after body_seconds. prompt_tokens: of one
    prompt. max_tokens: of one completion. prompts: in one request. n: completions of one prompt.
    stop: strings, and stop_bytes each. logprobs: alternatives to each token.

    Raises:
        UserError: a limit below 1.
    """

    body_bytes: int = 16 << 20
    body_seconds: int = 60
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    prompts: int = 256
    n: int = 16
    stop: int = 16
    stop_bytes: int = 1024
    logprobs: int = 20

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise UserError(f"the limit of {name} must be at least 1, got {value}")


@dataclass(frozen=True)
class ServerSettings:
    """model_names: what the model is called in requests, the first in answers. api_key: None lets
    everyone in. drain_seconds: how long running requests may take once the server is to stop.
    access_log: a line on stderr for each request. hosts: the names that requests may call the
    server by; None is any.

    Raises:
        UserError: an empty key or name, or a negative time.
    """

    model_names: Sequence[str]
    api_key: str | None = None
    drain_seconds: int = 30
    access_log: bool = False
    limits: Limits = field(default_factory=Limits)
    hosts: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.api_key == "":
            raise UserError("the API key is empty")
        if not all(self.model_names):
            raise UserError("a served model's name is empty")
        if self.drain_seconds < 0:
            raise UserError(f"the time to drain must be 0 or more, got {self.drain_seconds}")
