"""Server-sent events, and noticing that nobody reads them any more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from fp8calib.serve.errors import as_api_error

T = TypeVar("T")

# Some clients split lines at these too, though server-sent events do not (httpx does).
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


class EventStream(StreamingResponse):
    """Sends models as JSON events and ``[DONE]`` after the last. A failure in between becomes an
    event with an error: the status has been sent by then. `source`, which the events are made of,
    is closed in any case, also when the client goes away."""

    def __init__(self, events: AsyncIterator[BaseModel], source: AsyncGenerator) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_as_text(events), media_type="text/event-stream", headers=headers)
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._source):
            await super().__call__(scope, receive, send)


async def _as_text(events: AsyncIterator[BaseModel]) -> AsyncIterator[str]:
    try:
        async for event in events:
            yield f"data: {event.model_dump_json().translate(_LINE_ENDS)}\n\n"
    except Exception as problem:
        yield f"data: {json.dumps(as_api_error(problem).body())}\n\n"
    yield "data: [DONE]\n\n"


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; if the client goes away before, `work` is cancelled.

    Raises:
        ClientDisconnect: the client went away.
    """
    working, waiting = asyncio.create_task(work), asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
