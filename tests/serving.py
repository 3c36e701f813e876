"""A real server in a thread, for tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fp8calib.runtime.async_llm import AsyncLLM
from fp8calib.serve.server import Server, bind, make_server, url_of
from fp8calib.serve.settings import ServerSettings


@dataclass
class Running:
    """A server that listens at `url`."""

    url: str
    llm: AsyncLLM
    server: Server
    thread: threading.Thread

    def wait_until_idle(self) -> None:
        """Until no request runs; fails where one never ends."""
        stats = self.llm.stats
        wait_for(lambda: not (stats.running or stats.waiting or stats.pages_used))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextmanager
def serving(llm: AsyncLLM, settings: ServerSettings) -> Iterator[Running]:
    """Run a server with `llm`, which it shuts down at its end."""
    started = threading.Event()
    server = make_server(llm, settings, started.set)
    with bind("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        url = url_of(bound)
        thread.start()
        try:
            assert started.wait(30)
            yield Running(url, llm, server, thread)
        finally:
            server.should_exit = True
            thread.join(30)
    assert not thread.is_alive()
