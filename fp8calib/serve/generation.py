"""The completions of one request: several prompts at once, as they come or gathered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from fastapi import Request

from fp8calib.runtime.async_llm import AsyncLLM
from fp8calib.runtime.outputs import CompletionOutput, Logprob, RequestOutput
from fp8calib.runtime.sampling_params import SamplingParams
from fp8calib.serve.protocol import PromptTokensDetails, Usage
from fp8calib.serve.sse import unless_disconnected

Delta = tuple[int, RequestOutput]
"""The number of a prompt in its request, and what is new of its completions."""


class Tally:
    """Counts the tokens of a request as its deltas pass."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}  # tokens, and how many of them were cached
        self._completion_tokens = 0

    def add(self, number: int, output: RequestOutput) -> None:
        self._prompts[number] = (len(output.prompt_token_ids), output.num_cached_tokens)
        self._completion_tokens += sum(len(one.token_ids) for one in output.outputs)

    def usage(self) -> Usage:
        prompt_tokens = sum(tokens for tokens, _ in self._prompts.values())
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(cached for _, cached in self._prompts.values())
            ),
        )


async def generate(
    llm: AsyncLLM, prompts: Sequence[Sequence[int]], params: SamplingParams, tally: Tally
) -> AsyncGenerator[Delta, None]:
    """Complete all prompts, given as token ids, at the same time; `tally` counts.

    Each has a task of its own that closes its generator when it ends or is cancelled; so pages are
    freed however this generator is left.
    """
    news: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()

    async def follow(number: int, prompt: Sequence[int]) -> None:
        try:
            outputs = llm.generate(params=params, prompt_token_ids=list(prompt))
            async with aclosing(outputs):
                async for output in outputs:
                    news.put_nowait((number, output))
            news.put_nowait(None)
        except Exception as problem:
            news.put_nowait(problem)

    tasks = [asyncio.create_task(follow(*item)) for item in enumerate(prompts)]
    try:
        unfinished = len(tasks)
        while unfinished:
            item = await news.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                unfinished -= 1
            else:
                tally.add(*item)
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def started(deltas: AsyncGenerator[Delta, None], request: Request) -> AsyncIterator[Delta]:
    """The same deltas, once there is a first one: until then a mistake can be told by a status.

    Raises:
        UserError: the engine refuses a prompt. ClientDisconnect: nobody waits any more.
    """

    async def first() -> Delta:
        return await anext(deltas)

    delta = await unless_disconnected(request, first())

    async def again() -> AsyncIterator[Delta]:
        yield delta
        async for later in deltas:
            yield later

    return again()


@dataclass
class Answer:
    """One completion, put together from its deltas."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Mapping[int, Logprob] | None] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, news: CompletionOutput) -> None:
        self.text += news.text
        self.token_ids += news.token_ids
        self.logprobs += news.logprobs or []
        self.finish_reason, self.stop_reason = news.finish_reason, news.stop_reason


async def gather(deltas: AsyncGenerator[Delta, None], num_prompts: int, n: int) -> list[Answer]:
    """All completions, those of the first prompt first."""
    answers = [Answer() for _ in range(num_prompts * n)]
    async with aclosing(deltas):
        async for number, output in deltas:
            for news in output.outputs:
                answers[number * n + news.index].add(news)
    return answers


def says_something(news: CompletionOutput) -> bool:
    """Whether a delta is worth an event: text that is held back makes empty ones."""
    return bool(news.text or news.finish_reason or news.logprobs)
