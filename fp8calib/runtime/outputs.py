"""What generating returns, shaped as in vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fp8calib.runtime.request import Request, RequestGroup, TokenLogprobs


@dataclass(frozen=True)
class Logprob:
    """What the model makes of a token at its place: natural log of its probability, its rank (1 is
    the likeliest), and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One completion, or what is new of it.

    finish_reason: None while it grows, then "stop", "length" or "abort"; stop_reason: the stop
    string or token id that ended it, None for the end-of-text token.
    logprobs: for each of token_ids, by token id: first the token itself, then the likeliest ones;
    None unless they were asked for. cumulative_logprob: the sum of those of all tokens so far.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its completions. `prompt` is None for a prompt given as token ids.

    prompt_logprobs: as CompletionOutput.logprobs, for each token of the prompt; None for the first,
    which nothing comes before, and None altogether unless they were asked for.
    num_cached_tokens: tokens of the prompt whose K and V were in the cache already.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0

    @classmethod
    def of(cls, group: RequestGroup, decode: Callable[[int], str]) -> RequestOutput:
        """All that there is so far. `decode` gives the text of one token."""
        return cls._of(group, [_completion(r, decode, 0, 0) for r in group.requests], decode)

    @classmethod
    def new_of(cls, group: RequestGroup, decode: Callable[[int], str]) -> RequestOutput:
        """What has come since this was called last; it is remembered as given out. The prompt's log
        probabilities come with the first tokens alone."""
        is_first = not any(request.tokens_given for request in group.requests)
        outputs = []
        for request in group.requests:
            outputs.append(_completion(request, decode, request.tokens_given, request.text_given))
            request.tokens_given = len(request.output_token_ids)
            request.text_given = len(request.text)
        return cls._of(group, outputs, decode if is_first else None)

    @classmethod
    def _of(
        cls,
        group: RequestGroup,
        outputs: list[CompletionOutput],
        decode: Callable[[int], str] | None,
    ) -> RequestOutput:
        """`decode` is None where the prompt's log probabilities are not wanted."""
        first = group.requests[0]
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if decode is not None and first.params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(_named(entry, decode) for entry in first.prompt_logprobs)]
        return cls(
            request_id=group.request_id,
            prompt=first.prompt,
            prompt_token_ids=first.prompt_token_ids,
            outputs=outputs,
            finished=group.finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=first.num_cached_tokens,
        )


def _completion(
    request: Request, decode: Callable[[int], str], first_token: int, first_character: int
) -> CompletionOutput:
    wanted = request.params.logprobs is not None
    return CompletionOutput(
        index=request.index,
        text=request.text[first_character:],
        token_ids=request.output_token_ids[first_token:],
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        logprobs=[_named(entry, decode) for entry in request.logprobs[first_token:]]
        if wanted
        else None,
        cumulative_logprob=request.cumulative_logprob if wanted else None,
    )


def _named(entry: TokenLogprobs, decode: Callable[[int], str]) -> dict[int, Logprob]:
    named: dict[int, Logprob] = {}
    for token, logprob, rank in entry:
        named.setdefault(token, Logprob(logprob, rank, decode(token)))
    return named
