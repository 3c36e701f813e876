"""What is checked before a request is read: its Host, the API key, the size of its body and
how long that takes; and how a cancelled one ends."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import Sequence
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fp8calib.serve.errors import APIError, error_response


class RequireHost:
    """Lets requests through that name one of `hosts`, without a port, in their Host header. It
    stops web pages that reach a server on the visitor's own machine by DNS rebinding: to their
    browser the server's name is still theirs."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self.app = app
        self._hosts = set(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._named(scope) in self._hosts:
            return await self.app(scope, receive, send)
        error = APIError("this server answers to its local names alone: use --host, or a key")
        await error_response(error)(scope, receive, send)

    def _named(self, scope: Scope) -> str:
        given = next((value for name, value in scope["headers"] if name == b"host"), b"")
        return re.sub(r":\d*$", "", given.decode("latin-1")).lower()


class RequireKey:
    """Lets requests under /v1 through that carry ``Authorization: Bearer KEY``; /health and
    /metrics are open. Digests are compared, in constant time, so that not even the key's length is
    told by how long the answer takes."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app = app
        self._digest = _digest(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1") or self._knows(scope):
            return await self.app(scope, receive, send)
        error = APIError("the API key is missing or wrong", status=401, code="invalid_api_key")
        await error_response(error)(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(_digest(key), self._digest)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class EndCancelled:
    """Lets a request that the server cancels, because it has to end, end like any other: to
    uvicorn it would be an error, with a traceback in the log."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(asyncio.CancelledError):
            await self.app(scope, receive, send)


class LimitBody:
    """Refuses bodies above a number of bytes: by the length they announce, else while they come
    in, so that no more than that is ever held; and bodies that are not there `max_seconds` after
    their header, whose connection is closed: a client could hold it forever by a byte a minute."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_seconds: int) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.max_seconds = max_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self.max_bytes:
            return await error_response(self._too_large())(scope, receive, send)
        deadline: float | None = asyncio.get_running_loop().time() + self.max_seconds
        seen = 0

        async def limited() -> Message:
            nonlocal deadline, seen
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise self._too_slow() from None
            if not message.get("more_body"):
                deadline = None  # what is received from now on is that the client has gone
            seen += len(message.get("body", b""))
            if seen > self.max_bytes:
                raise self._too_large()
            return message

        await self.app(scope, limited, send)

    def _too_large(self) -> APIError:
        return APIError(
            f"the request is larger than {self.max_bytes:,} bytes, this server's limit", status=413
        )

    def _too_slow(self) -> APIError:
        return APIError(
            f"the request's body took longer than {self.max_seconds} s, this server's limit",
            status=408,
            headers={"Connection": "close"},
        )
