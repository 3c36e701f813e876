"""From the fields of a request to SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8calib.errors import UserError
from fp8calib.runtime.sampling_params import SamplingParams
from fp8calib.serve.errors import APIError
from fp8calib.serve.protocol import (
    NOT_SUPPORTED,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from fp8calib.serve.settings import Limits

_FIELDS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "min_tokens", "ignore_eos"),
)
_OTHERS = {
    CompletionRequest: ChatCompletionRequest.model_fields,
    ChatCompletionRequest: CompletionRequest.model_fields,
}
"""The fields that only a request of the other kind has: here they are extra ones."""


def check_request(request: GenerationRequest, limits: Limits) -> None:
    """Raise APIError for what is not supported, or is more than a request may ask for."""
    for name, value in (request.model_extra or {}).items():
        if value not in NOT_SUPPORTED.get(name, (value,)):
            raise APIError(f"{name} is not supported by this server", param=name)
        if value and name in _OTHERS[type(request)]:
            raise APIError(f"{name} is a field of the other endpoint", param=name)
    if request.stream_options is not None and not request.stream:
        raise APIError("stream_options needs stream: true", param="stream_options")
    _at_most("n", request.n, limits.n)
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    _at_most("stop", len(stops), limits.stop, "strings")
    for stop in stops:
        _at_most("stop", len(stop.encode()), limits.stop_bytes, "bytes")
    _at_most("stop_token_ids", len(request.stop_token_ids or ()), limits.stop, "tokens")


def _at_most(name: str, value: int | None, limit: int | None, unit: str = "") -> None:
    if value is not None and limit is not None and value > limit:
        most = f"{limit} {unit}".strip()
        raise APIError(f"{name}: {value} is more than this server's limit of {most}", param=name)


def sampling_params(
    request: GenerationRequest,
    defaults: dict[str, Any],
    limits: Limits,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    names: Mapping[str, str] | None = None,
) -> SamplingParams:
    """The parameters of one request.

    Args:
        defaults: fields that hold where the request is silent.
        max_tokens: of the request, or the endpoint's default; None is what the model allows.
        logprobs: alternatives to each token.
        names: what the request calls a field, where it is another name than SamplingParams'.

    Raises:
        APIError: more than the limits allow, or a value out of its range.
    """
    names = names or {}
    if max_tokens is None:
        max_tokens = limits.max_tokens
    _at_most(names.get("max_tokens", "max_tokens"), max_tokens, limits.max_tokens)
    _at_most(names.get("logprobs", "logprobs"), logprobs, limits.logprobs)
    given = {name: getattr(request, name) for name in _FIELDS}
    chosen = defaults | {name: value for name, value in given.items() if value is not None}
    chosen.setdefault("temperature", 1.0)
    try:
        return SamplingParams(
            **chosen,
            max_tokens=max_tokens,
            seed=None if request.seed is None else request.seed % 2**63,
            stop=() if request.stop is None else request.stop,
            stop_token_ids=request.stop_token_ids or (),
            logprobs=logprobs,
        )
    except UserError as problem:
        field, _, what = str(problem).partition(" ")
        field = names.get(field, field)
        raise APIError(f"{field} {what}", param=field) from None
