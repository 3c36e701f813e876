"""Log probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from fp8calib.runtime.outputs import Logprob
from fp8calib.serve.protocol import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

Place = Mapping[int, Logprob]
"""What the model makes of a token and of its likeliest alternatives, by token id."""

_LEAST = -9999.0  # JSON has no infinity; vLLM sends the same


def completion_logprobs(
    token_ids: Sequence[int],
    places: Sequence[Place | None],
    text_offset: int,
    decode: Callable[[int], str],
) -> CompletionLogprobs:
    """Of /v1/completions. `text_offset` is how many characters the tokens before these have.
    The first token of an echoed prompt has no place, since nothing comes before it."""
    tokens = [
        decode(token) if place is None else place[token].decoded_token
        for token, place in zip(token_ids, places, strict=True)
    ]
    return CompletionLogprobs(
        text_offset=[text_offset + end for end in accumulate(map(len, tokens), initial=0)][:-1],
        token_logprobs=[
            None if place is None else _finite(place[token])
            for token, place in zip(token_ids, places, strict=True)
        ],
        tokens=tokens,
        top_logprobs=[
            None
            if place is None
            else {entry.decoded_token: _finite(entry) for entry in place.values()}
            for place in places
        ],
    )


def chat_logprobs(token_ids: Sequence[int], places: Sequence[Place], top: int) -> ChatLogprobs:
    """Of /v1/chat/completions, with the `top` likeliest tokens of each place."""
    content = [
        TokenLogprob(
            **_token(place[token]),
            top_logprobs=[
                TopLogprob(**_token(entry))
                for entry in sorted(place.values(), key=lambda entry: entry.rank)
                if entry.rank <= top
            ],
        )
        for token, place in zip(token_ids, places, strict=True)
    ]
    return ChatLogprobs(content=content)


def _token(entry: Logprob) -> dict[str, Any]:
    text = entry.decoded_token
    return {"token": text, "logprob": _finite(entry), "bytes": list(text.encode())}


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, _LEAST)
