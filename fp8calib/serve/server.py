"""Runs the application: the socket, uvicorn, and an end that lets running requests finish."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from fp8calib.errors import UserError
from fp8calib.runtime.async_llm import AsyncLLM
from fp8calib.serve.app import create_app
from fp8calib.serve.middleware import EndCancelled
from fp8calib.serve.settings import ServerSettings

_LAST_WORDS = 3  # seconds that clients have to read the ends of answers that were given up


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address, not listening yet; port 0 is any that is free.

    Raises:
        UserError: the address is taken, or is none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, OverflowError, UnicodeError) as problem:
        raise UserError(f"--host {host} --port {port}: {_reason(problem)}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as problem:
        bound.close()
        raise UserError(
            f"--host {host} --port {port}: {_reason(problem)}; choose another --port"
        ) from None
    return bound


def _reason(problem: Exception) -> str:
    return (getattr(problem, "strerror", None) or str(problem)).lower()


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if bound.family == socket.AF_INET6 else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn, telling when it listens, and ending what runs once `drain_seconds` are over."""

    def __init__(
        self,
        config: uvicorn.Config,
        llm: AsyncLLM,
        drain_seconds: int,
        on_start: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._llm = llm
        self._drain_seconds = drain_seconds
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Requests that the engine ends are answered with what they have, as "abort".
        giving_up = asyncio.get_running_loop().call_later(self._drain_seconds, self._llm.shutdown)
        try:
            await super().shutdown(sockets)
        finally:
            giving_up.cancel()


def make_server(
    llm: AsyncLLM, settings: ServerSettings, on_start: Callable[[], None] = lambda: None
) -> Server:
    """A server that is not running yet; `run(sockets=[...])` runs it until it is told to stop.

    SIGTERM and Ctrl-C stop it: no new connections, running requests have
    `settings.drain_seconds` to finish, then they end with what they have, for which their clients
    have a little longer. A second Ctrl-C does not wait.
    """
    config = uvicorn.Config(
        EndCancelled(create_app(llm, settings)),
        log_config=None,
        access_log=settings.access_log,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=settings.drain_seconds + _LAST_WORDS,
    )
    return Server(config, llm, settings.drain_seconds, on_start)


def serve(server: Server, bound: socket.socket) -> None:
    """Run `server` in the main thread until a signal stops it; SIGTERM is a normal end.

    Raises:
        UserError: another process has begun to listen at the address.
        KeyboardInterrupt: Ctrl-C ended it.
    """
    try:
        bound.listen()
    except OSError as problem:
        host, port = bound.getsockname()[:2]
        raise UserError(f"--host {host} --port {port}: {_reason(problem)}") from None
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    with _sigterm_is_no_error():
        server.run(sockets=[bound])


@contextmanager
def _sigterm_is_no_error() -> Iterator[None]:
    """uvicorn raises the signal that stopped it once more when it is done."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
