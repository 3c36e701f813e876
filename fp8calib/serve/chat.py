"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from fp8calib.runtime.chat_template import render_chat
from fp8calib.runtime.outputs import CompletionOutput
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
from fp8calib.serve.logprobs import chat_logprobs
from fp8calib.serve.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ContentPart,
)
from fp8calib.serve.sampling import check_request, sampling_params
from fp8calib.serve.served_model import ServedModel
from fp8calib.serve.sse import EventStream, unless_disconnected


async def chat(
    model: ServedModel, body: ChatCompletionRequest, request: Request
) -> ChatCompletion | Response:
    """Answer a conversation as a whole, or by a stream of events."""
    model.check_running()
    model.check_name(body.model)
    check_request(body, model.limits)
    if body.top_logprobs is not None and not body.logprobs:
        raise APIError("top_logprobs needs logprobs: true", param="top_logprobs")
    max_tokens, length_field = body.max_tokens, "max_tokens"
    if body.max_completion_tokens is not None:
        max_tokens, length_field = body.max_completion_tokens, "max_completion_tokens"
    params = sampling_params(
        body,
        model.default_sampling,
        model.limits,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        names={"logprobs": "top_logprobs", "max_tokens": length_field},
    )
    prompt = await asyncio.to_thread(_prompt, model, body)
    model.check_length(prompt, max_tokens, "messages", length_field)
    tally = Tally()
    deltas = generate(model.llm, [prompt], params, tally)
    if body.stream:
        events = _events(await started(deltas, request), model, body, params.n, tally)
        return EventStream(events, deltas)
    answers = await unless_disconnected(request, gather(deltas, 1, params.n))
    choices = [
        ChatChoice(
            index=index,
            message=AssistantMessage(content=answer.text),
            logprobs=_logprobs(body, answer),
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
        )
        for index, answer in enumerate(answers)
    ]
    return ChatCompletion(model=body.model or model.name, choices=choices, usage=tally.usage())


def _prompt(model: ServedModel, body: ChatCompletionRequest) -> list[int]:
    """Token ids of the conversation."""
    if body.tool_choice not in (None, "auto", "none"):
        raise APIError("tool_choice: only auto and none are supported", param="tool_choice")
    _, token_ids = render_chat(
        model.tokenizer,
        [_message(message) for message in body.messages],
        tools=None if body.tool_choice == "none" else body.tools,
        add_generation_prompt=_add_generation_prompt(body),
        continue_final_message=bool(body.continue_final_message),
        variables=body.template_variables,
    )
    return token_ids


def _add_generation_prompt(body: ChatCompletionRequest) -> bool:
    if not body.continue_final_message:
        return body.add_generation_prompt is not False
    if body.add_generation_prompt:
        raise APIError(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    return False


def _message(message: ChatMessage) -> dict[str, Any]:
    """A message as templates read it: its content one text, arguments of tool calls as objects."""
    plain = message.model_dump(exclude_unset=True)
    plain["content"] = _text(message.content)
    for call in plain.get("tool_calls") or ():
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str):
            try:
                call["function"]["arguments"] = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise APIError(
                    "messages: the arguments of a tool call are not JSON", param="messages"
                ) from None
    return plain


def _text(content: str | list[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type != "text":
            what = f"a content part of type {part.type!r}; this server takes text alone"
            raise APIError(f"messages: {what}", param="messages")
        if part.text is None:
            raise APIError("messages: a text part without its text", param="messages")
    return "\n".join(part.text or "" for part in content)


def _logprobs(
    body: ChatCompletionRequest, tokens: Answer | CompletionOutput
) -> ChatLogprobs | None:
    if not body.logprobs:
        return None
    places = [place for place in tokens.logprobs or () if place is not None]
    return chat_logprobs(tokens.token_ids, places, body.top_logprobs or 0)


async def _events(
    deltas: AsyncIterator[Delta],
    model: ServedModel,
    body: ChatCompletionRequest,
    n: int,
    tally: Tally,
) -> AsyncIterator[ChatCompletionChunk]:
    head = ChatCompletionChunk(model=body.model or model.name, choices=[])
    opening = ChatDelta(role="assistant", content="")
    for index in range(n):
        choice = ChatChunkChoice(index=index, delta=opening)
        yield head.model_copy(update={"choices": [choice]})
    async for _, output in deltas:
        for news in filter(says_something, output.outputs):
            choice = ChatChunkChoice(
                index=news.index,
                delta=ChatDelta(content=news.text or None),
                logprobs=_logprobs(body, news),
                finish_reason=news.finish_reason,
                stop_reason=news.stop_reason,
            )
            yield head.model_copy(update={"choices": [choice]})
    if body.stream_options is not None and body.stream_options.include_usage:
        yield head.model_copy(update={"usage": tally.usage()})
