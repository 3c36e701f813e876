"""Errors as OpenAI's API shapes them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from fp8calib.errors import ModelError, UserError

_log = logging.getLogger(__name__)


class APIError(HTTPException):
    """A request that is answered with an error.

    status: HTTP status; message: one line for a person; param: the field that is wrong;
    code: a word for programs; headers: of the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    def body(self) -> dict[str, Any]:
        return error_body(self.detail, self.status_code, self.param, self.code)


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: APIError) -> JSONResponse:
    return JSONResponse(error.body(), error.status_code, error.headers)


def as_api_error(problem: Exception) -> APIError:
    """What a client is told of an exception that is raised while its request is worked on. What is
    no fault of the request is logged, too."""
    if isinstance(problem, APIError):
        return problem
    if isinstance(problem, UserError) and not isinstance(problem, ModelError):
        return APIError(str(problem))
    _log.error("a request failed", exc_info=problem)
    if isinstance(problem, ModelError):
        return APIError(str(problem), status=500)
    return _unexpected(problem)


def _unexpected(problem: Exception) -> APIError:
    return APIError(f"unexpected {type(problem).__name__}; the server's log has more", status=500)


def install(app: FastAPI) -> None:
    """Give every error of `app` OpenAI's shape."""

    @app.exception_handler(HTTPException)
    async def on_http_exception(request: Request, problem: HTTPException) -> JSONResponse:
        if isinstance(problem, APIError):
            return error_response(problem)
        body = error_body(str(problem.detail), problem.status_code)
        return JSONResponse(body, problem.status_code, problem.headers)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, problem: RequestValidationError) -> JSONResponse:
        return error_response(_invalid(problem.errors()))

    @app.exception_handler(UserError)
    async def on_user_error(request: Request, problem: UserError) -> JSONResponse:
        return error_response(as_api_error(problem))

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(request: Request, problem: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it; nginx logs such requests so

    @app.exception_handler(Exception)
    async def on_exception(request: Request, problem: Exception) -> JSONResponse:
        return error_response(_unexpected(problem))  # uvicorn logs it


def _invalid(errors: Sequence[Any]) -> APIError:
    """pydantic's findings about the first wrong field in one line, with the place that they share:
    one with alternatives, like `prompt`, has a finding for each of them."""
    first = errors[0]
    name = next(iter(first["loc"][1:]), None)  # the first part is "body"
    if first["type"] == "json_invalid":
        return APIError(f"the body is not JSON: {first['ctx']['error']}")
    if name is None:
        if first["type"] == "value_error":
            return APIError(str(first["ctx"]["error"]))
        return APIError("the body must be a JSON object, sent with Content-Type: application/json")
    found = [error for error in errors if error["loc"][1:2] == (name,)]
    levels = zip(*(error["loc"][1:] for error in found), strict=False)
    shared = [str(parts[0]) for parts in takewhile(lambda parts: len(set(parts)) == 1, levels)]
    told = dict.fromkeys(error["msg"] for error in found)
    return APIError(f"{'.'.join(shared)}: {'; '.join(told)}", param=name)
