"""One prompt on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from fp8calib.runtime.detokenizer import Detokenizer, StopStrings
from fp8calib.runtime.sampling_params import SamplingParams


@dataclass(eq=False)
class Request:
    """A sequence that is generated.

    token_ids: prompt and output; num_computed: how many of them lie in the cache.
    max_tokens: of output, with the model's length in view. text: what may be shown of the output.
    finish_reason: None while it runs, then "stop", "length" or "abort"; stop_reason: the stop
    string or token id that ended it, None for the end-of-text token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    eos_token_ids: frozenset[int]
    detokenizer: Detokenizer
    stop_strings: StopStrings
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    block_tables: list[list[int]] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_new(self) -> int:
        """Tokens that are not in the cache yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    def append(self, token_id: int) -> None:
        """Take in the next token: extend the text and see whether the request is done."""
        self.token_ids.append(token_id)
        if token_id in self.eos_token_ids and not self.params.ignore_eos:
            self._finish("stop")
        elif token_id in self.params.stop_token_ids:
            self._finish("stop", token_id)
        else:
            self.text += self.stop_strings.add(self.detokenizer.add(token_id))
            if self.stop_strings.found is not None:
                self.finish_reason, self.stop_reason = "stop", self.stop_strings.found
            elif len(self.token_ids) - len(self.prompt_token_ids) >= self.max_tokens:
                self._finish("length")

    def _finish(self, reason: str, stop_reason: int | None = None) -> None:
        self.text += self.stop_strings.add(self.detokenizer.finish())
        self.text += self.stop_strings.finish()
        self.finish_reason, self.stop_reason = reason, stop_reason
