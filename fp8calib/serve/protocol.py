"""Requests and answers of OpenAI's API, with the extra sampling fields that vLLM takes.

Fields that are not known are ignored, as vLLM does; those that are known and would change the
answer, but are not supported or belong to the other endpoint, are refused (NOT_SUPPORTED).
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator

# Each with the values that ask for nothing.
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (None,),
    "audio": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "chat_template": (None,),
    "detokenize": (None, True),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1),
    "logit_bias": (None, {}),
    "logits_processors": (None, []),
    "modalities": (None, ["text"]),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "response_format": (None, {"type": "text"}),
    "return_token_ids": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(_Request):
    include_usage: bool | None = None


class GenerationRequest(_Request):
    """What both endpoints share."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_unicode(cls, data: Any) -> Any:
        """JSON can write half of a surrogate pair, which no tokenizer takes."""
        try:
            if isinstance(data, dict):
                json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a text holds half of a surrogate pair: it is no Unicode") from None
        except RecursionError:
            raise ValueError("the body is nested too deeply") from None
        return data


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: str | list[str] | list[NonNegativeInt] | list[list[NonNegativeInt]]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class ContentPart(_Request):
    type: str
    text: str | None = None


class FunctionCall(_Request):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(_Request):
    function: FunctionCall


class ChatMessage(_Request):
    """Fields beside these are handed to the chat template as they are."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[ToolCall] | None = None


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the chat template may read besides messages and tools."""
        named = {"documents": self.documents, "reasoning_effort": self.reasoning_effort}
        given = {name: value for name, value in named.items() if value is not None}
        return given | (self.chat_template_kwargs or {})


def _optional() -> Any:
    """A field that is left out of an answer when it is None; others are sent as null."""
    return Field(default=None, exclude_if=lambda value: value is None)


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


class _Choice(BaseModel):
    """`stop_reason`, as vLLM has it: the stop string or token id that ended the completion."""

    index: int
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None = None


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(_Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = _optional()
    content: str | None = _optional()


class ChatChunkChoice(_Choice):
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None


def _now() -> int:
    return int(time.time())


class _Answer(BaseModel):
    created: int = Field(default_factory=_now)
    model: str
    usage: Usage | None = _optional()


class Completion(_Answer):
    """The answer of /v1/completions, and each event of its stream."""

    id: str = Field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class _ChatAnswer(_Answer):
    id: str = Field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")


class ChatCompletion(_ChatAnswer):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatCompletionChunk(_ChatAnswer):
    """An event of the stream of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int = Field(default_factory=_now)
    owned_by: str = "fp8calib"
    root: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
