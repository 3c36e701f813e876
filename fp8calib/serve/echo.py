"""`echo` of /v1/completions: the prompt in front of each completion, with its log probabilities.

Evaluation harnesses score text that way: they send it as a prompt, with `logprobs`, and ask for one
token or none.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fp8calib.runtime.outputs import CompletionOutput, RequestOutput
from fp8calib.serve.generation import Delta


async def with_prompts(
    deltas: AsyncGenerator[Delta, None], texts: Sequence[str], prompts_alone: bool
) -> AsyncGenerator[Delta, None]:
    """The same deltas, the first of each completion with its prompt in front.

    Args:
        texts: of the prompts.
        prompts_alone: leave out what was generated (`max_tokens` is 0; the engine makes one token).
    """
    begun = set()
    async with aclosing(deltas):
        async for number, output in deltas:
            pieces = []
            for news in output.outputs:
                if prompts_alone:
                    news = replace(
                        news, text="", token_ids=[], logprobs=news.logprobs and [], stop_reason=None
                    )
                if (number, news.index) not in begun:
                    begun.add((number, news.index))
                    news = _begun(news, output, texts[number])
                pieces.append(news)
            yield number, replace(output, outputs=pieces)


def _begun(news: CompletionOutput, output: RequestOutput, text: str) -> CompletionOutput:
    logprobs: list[Any] | None = None
    if news.logprobs is not None:
        places = output.prompt_logprobs or []
        # A request that is given up may have only some of its prompt's.
        unknown = [None] * (len(output.prompt_token_ids) - len(places))
        logprobs = [*places, *unknown, *news.logprobs]
    return replace(
        news,
        text=text + news.text,
        token_ids=[*output.prompt_token_ids, *news.token_ids],
        logprobs=logprobs,
    )
