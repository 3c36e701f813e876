"""Log probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fp8calib.runtime.outputs import Logprob
from fp8calib.serve.protocol import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

Places = Sequence[Mapping[int, Logprob]]

_LEAST = -9999.0  # JSON has no infinity; vLLM sends the same


def completion_logprobs(
    token_ids: Sequence[int], places: Places, text_offset: int
) -> CompletionLogprobs:
    """Of /v1/completions. `text_offset` is how many characters the tokens before these have."""
    own = [place[token] for token, place in zip(token_ids, places, strict=True)]
    offsets = []
    for entry in own:
        offsets.append(text_offset)
        text_offset += len(entry.decoded_token)
    return CompletionLogprobs(
        text_offset=offsets,
        token_logprobs=[_finite(entry) for entry in own],
        tokens=[entry.decoded_token for entry in own],
        top_logprobs=[
            {entry.decoded_token: _finite(entry) for entry in place.values()} for place in places
        ],
    )


def chat_logprobs(token_ids: Sequence[int], places: Places, top: int) -> ChatLogprobs:
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


def _token(entry: Logprob) -> dict:
    text = entry.decoded_token
    return {"token": text, "logprob": _finite(entry), "bytes": list(text.encode())}


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, _LEAST)
