"""What generating returns, shaped as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from fp8calib.runtime.request import Request


@dataclass(frozen=True)
class CompletionOutput:
    """One completion. finish_reason is None while it grows, then "stop" or "length"; stop_reason
    is the stop string or token id that ended it, None for the end-of-text token."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its completions. `prompt` is None for a prompt given as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool

    @classmethod
    def of(cls, request: Request) -> RequestOutput:
        completion = CompletionOutput(
            index=0,
            text=request.text,
            token_ids=request.output_token_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )
        return cls(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[completion],
            finished=request.finish_reason is not None,
        )
