"""Errors as OpenAI's API shapes them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from fp8calib.errors import UserError


class APIError(HTTPException):
    """A request that is answered with an error.

    status: HTTP status; message: one line for a person; param: the field that is wrong;
    code: a word for programs.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(status, message)
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
    """What a client is told of an exception that is raised while its request is worked on."""
    if isinstance(problem, APIError):
        return problem
    if isinstance(problem, UserError):
        return APIError(str(problem))
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
        return error_response(as_api_error(problem))


def _invalid(errors: Sequence[Any]) -> APIError:
    """pydantic's findings in one line. A field with alternatives, like `prompt`, has one finding
    for each; they are joined."""
    first = errors[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return APIError(f"the body is not JSON: {reason}")
    places: dict[str, list[str]] = {}
    for error in errors:
        path = [part for part in error["loc"] if part != "body"]
        name = path[0] if path else None
        if name is None:
            message = "the body must be a JSON object, sent with Content-Type: application/json"
            return APIError(message)
        places.setdefault(str(name), []).append(error["msg"])
    name, messages = next(iter(places.items()))
    told = "; ".join(dict.fromkeys(messages))
    return APIError(f"{name}: {told}", param=name)
