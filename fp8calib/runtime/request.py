"""One prompt on its way through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fp8calib.errors import Fp8CalibError
from fp8calib.runtime.block_manager import BlockTable
from fp8calib.runtime.detokenizer import Detokenizer, StopStrings
from fp8calib.runtime.sampling_params import SamplingParams

TokenLogprobs = Sequence[tuple[int, float, int]]
"""Of one place: (token, log probability, rank), first of the token that is there."""


@dataclass(eq=False)
class Request:
    """A sequence that is generated: one completion of a prompt.

    token_ids: prompt and output; num_pending: how many tokens follow that the device has or will
    have chosen, but the host has not seen. num_computed: how many of all these lie in the cache, or
    will once the step that runs is done. max_tokens: of output, with the model's length in view.
    slot: its place among the running requests. block_hashes: of its full blocks, as far as they
    were needed; num_cached_blocks: how many of its blocks others can find.
    text: what may be shown of the output. logprobs: of each token of the output, and their sum;
    prompt_logprobs: of each of the prompt but the first.
    finish_reason: None while it runs, then "stop", "length" or "abort"; stop_reason: the stop
    string or token id that ended it, None for the end-of-text token; error: what made it fail.
    num_cached_tokens: of the prompt, those found in the cache. arrival_time, last_token_time:
    seconds of time.perf_counter. tokens_given, text_given: how much was handed out as news.
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
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    num_pending: int = 0
    num_computed: int = 0
    slot: int | None = None
    block_tables: list[BlockTable] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_cached_blocks: int = 0
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: Fp8CalibError | None = None
    num_cached_tokens: int = 0
    arrival_time: float = 0.0
    last_token_time: float | None = None
    tokens_given: int = 0
    text_given: int = 0

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_new(self) -> int:
        """Tokens to compute before the next one can be chosen; none when that will be the last."""
        if self.num_pending and self.num_output >= self.max_tokens:
            return 0
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def num_output(self) -> int:
        """Tokens of the output, those included that the host has not seen."""
        return len(self.token_ids) + self.num_pending - len(self.prompt_token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Those of a prompt are the same for all its completions: the first brings them."""
        return self.params.prompt_logprobs is not None and self.index == 0

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """The tokens that end this request."""
        eos = frozenset() if self.params.ignore_eos else self.eos_token_ids
        return eos.union(self.params.stop_token_ids)

    def append(self, token_id: int) -> None:
        """Take in the next token: extend the text and see whether the request is done."""
        self.token_ids.append(token_id)
        count = len(self.token_ids) - len(self.prompt_token_ids)
        if token_id in self.eos_token_ids and not self.params.ignore_eos:
            self._finish("stop")
        elif token_id in self.params.stop_token_ids:
            self._finish("stop", token_id)
        else:
            text = self.detokenizer.add(token_id)
            self.text += self.stop_strings.add(text, may_end=count > self.params.min_tokens)
            if self.stop_strings.found is not None:
                self.finish_reason, self.stop_reason = "stop", self.stop_strings.found
            elif count >= self.max_tokens:
                self._finish("length")

    def _finish(self, reason: str, stop_reason: int | None = None) -> None:
        self.text += self.stop_strings.add(self.detokenizer.finish())
        self.text += self.stop_strings.finish()
        self.finish_reason, self.stop_reason = reason, stop_reason


@dataclass(eq=False)
class RequestGroup:
    """The `n` completions of one prompt."""

    request_id: str
    requests: list[Request]

    @property
    def finished(self) -> bool:
        return all(request.finish_reason is not None for request in self.requests)

    @property
    def error(self) -> Fp8CalibError | None:
        return next((r.error for r in self.requests if r.error is not None), None)
