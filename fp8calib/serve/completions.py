"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

from fastapi import Request
from fastapi.responses import Response

from fp8calib.runtime.outputs import CompletionOutput
from fp8calib.runtime.sampling_params import SamplingParams
from fp8calib.serve.echo import with_prompts
from fp8calib.serve.errors import APIError
from fp8calib.serve.generation import (
    Answer,
    Delta,
    Tally,
    gather,
    generate,
    says_something,
    started,
)
from fp8calib.serve.logprobs import completion_logprobs
from fp8calib.serve.protocol import Completion, CompletionChoice, CompletionRequest
from fp8calib.serve.sampling import check_request, sampling_params
from fp8calib.serve.served_model import ServedModel
from fp8calib.serve.sse import EventStream, unless_disconnected

_DEFAULT_MAX_TOKENS = 16  # as OpenAI has it


async def complete(
    model: ServedModel, body: CompletionRequest, request: Request
) -> Completion | Response:
    """Answer a request as a whole, or by a stream of events."""
    model.check_running()
    model.check_name(body.model)
    check_request(body, model.limits)
    params = _sampling(model, body)
    prompts = await _prompts(model, body)
    for prompt in prompts:
        model.check_length(prompt, body.max_tokens)
    tally = Tally()
    deltas = generate(model.llm, prompts, params, tally)
    if body.echo:
        decode = model.tokenizer.decode
        texts = [decode(prompt, skip_special_tokens=False) for prompt in prompts]
        deltas = with_prompts(deltas, texts, prompts_alone=body.max_tokens == 0)
    if body.stream:
        events = _events(await started(deltas, request), model, body, params.n, tally)
        return EventStream(events, deltas)
    answers = await unless_disconnected(request, gather(deltas, len(prompts), params.n))
    choices = [_choice(model, index, answer) for index, answer in enumerate(answers)]
    return Completion(model=body.model or model.name, choices=choices, usage=tally.usage())


def _sampling(model: ServedModel, body: CompletionRequest) -> SamplingParams:
    max_tokens = body.max_tokens
    if max_tokens is None:
        max_tokens = min(_DEFAULT_MAX_TOKENS, model.limits.max_tokens or _DEFAULT_MAX_TOKENS)
    params = sampling_params(
        body,
        model.default_sampling,
        model.limits,
        max_tokens=max_tokens + int(bool(body.echo) and max_tokens == 0),
        logprobs=body.logprobs,
    )
    return replace(params, prompt_logprobs=body.logprobs) if body.echo else params


async def _prompts(model: ServedModel, body: CompletionRequest) -> list[list[int]]:
    """Token ids of each prompt."""
    given = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = cast(Any, [given])
    if not given:
        raise APIError("prompt: there is none", param="prompt")
    if len(given) > model.limits.prompts:
        raise APIError(
            f"prompt: {len(given)} are more than this server's limit of {model.limits.prompts}",
            param="prompt",
        )
    if isinstance(given[0], str):
        texts = cast(list[str], given)
        return await model.tokenize(texts, body.add_special_tokens is not False)
    return cast(list[list[int]], given)


def _choice(
    model: ServedModel, index: int, answer: Answer | CompletionOutput, text_offset: int = 0
) -> CompletionChoice:
    logprobs = None
    if answer.logprobs:
        logprobs = completion_logprobs(
            answer.token_ids, answer.logprobs, text_offset, model.llm.llm.decode_token
        )
    return CompletionChoice(
        index=index,
        text=answer.text,
        logprobs=logprobs,
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
    )


async def _events(
    deltas: AsyncIterator[Delta],
    model: ServedModel,
    body: CompletionRequest,
    n: int,
    tally: Tally,
) -> AsyncIterator[Completion]:
    head = Completion(model=body.model or model.name, choices=[])
    offsets: dict[int, int] = {}
    async for number, output in deltas:
        for news in filter(says_something, output.outputs):
            index = number * n + news.index
            choice = _choice(model, index, news, offsets.get(index, 0))
            if choice.logprobs is not None:
                offsets[index] = offsets.get(index, 0) + sum(map(len, choice.logprobs.tokens))
            yield head.model_copy(update={"choices": [choice]})
    if body.stream_options is not None and body.stream_options.include_usage:
        yield head.model_copy(update={"usage": tally.usage()})
