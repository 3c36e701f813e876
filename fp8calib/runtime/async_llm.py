"""AsyncLLM: one engine in a thread of its own, used by many asyncio tasks at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any
from uuid import uuid4

import torch

from fp8calib.errors import Fp8CalibError, ModelError, UserError
from fp8calib.runtime.llm import LLM
from fp8calib.runtime.metrics import EngineStats
from fp8calib.runtime.outputs import RequestOutput
from fp8calib.runtime.request import Request, RequestGroup
from fp8calib.runtime.sampling_params import SamplingParams
from fp8calib.scales import ScaleSet


@dataclass(eq=False)
class _Stream:
    """The way of one request's news from the engine's thread to the task that waits for them."""

    request_id: str
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[RequestOutput | BaseException]
    group: RequestGroup | None = None


class AsyncLLM:
    """An LLM whose engine runs in a background thread; many asyncio tasks use it.

    >>> llm = AsyncLLM("demo:smollm2-135m-instruct")
    >>> async for news in llm.generate("The capital of France is"):
    ...     print(news.outputs[0].text, end="")

    Args:
        model, options: as of LLM. Loading takes place here, in the caller's thread.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.llm = LLM(model, **options)
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._streams: dict[str, _Stream] = {}  # used by the engine's thread alone
        self._draining = False
        self._stopped = False  # the thread does no more work; under the lock
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="fp8calib-engine", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> EngineStats:
        return self.llm.engine.stats

    @property
    def is_running(self) -> bool:
        """Whether the engine's thread is alive and takes requests."""
        return self._thread.is_alive() and not self._draining and self._failure is None

    async def generate(
        self,
        prompt: str | None = None,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt, and yield what is new as it comes.

        Each RequestOutput holds, for each completion in order of its index, the text, token ids
        and log probabilities that were not yielded before; any of them may be empty. Those of the
        prompt come with the first output.
        finish_reason is set once a completion has ended, `finished` on the last output. Closing
        the generator, or cancelling the task, aborts the request and frees its pages.

        Args:
            prompt: a text, tokenized as it is; or give `prompt_token_ids`, or both.
            request_id: for `abort`; by default a new one.

        Raises:
            UserError: at the first step: a prompt that does not fit (with the number of tokens
                that would), parameters that cannot be had, an id in use, or a shut-down engine.
            ModelError: the engine failed.
        """
        if prompt_token_ids is None:
            prompt_token_ids = await asyncio.to_thread(self.llm.engine.tokenize, prompt or "")
        request_id = request_id or uuid4().hex
        stream = _Stream(request_id, asyncio.get_running_loop(), asyncio.Queue())
        wanted, ids = params or SamplingParams(), prompt_token_ids
        if not (self.is_running and self._submit(lambda: self._add(stream, wanted, prompt, ids))):
            raise self._refusal()
        finished = False
        try:
            while not finished:
                item = await stream.queue.get()
                if isinstance(item, BaseException):
                    finished = True
                    raise item
                finished = item.finished
                yield item
        finally:
            if not finished:
                self._submit(lambda: self._end(stream))

    async def abort(self, request_id: str) -> None:
        """End a request: its generator yields a last output with finish_reason "abort". An id that
        is not running is ignored."""
        self._submit(lambda: self._abort(request_id))

    async def reload_scales(self, scales: ScaleSet) -> None:
        """LLM.reload_scales between two steps; requests that run go on with the new scales.

        Raises:
            UserError, ScaleError: as LLM.reload_scales, or a shut-down engine.
            ModelError: the engine failed.
        """
        done: Future[None] = Future()

        def reload() -> None:
            if not done.set_running_or_notify_cancel():
                return  # nobody waits for it any more
            try:
                if self._stopped:
                    raise self._refusal()
                self.llm.reload_scales(scales)
            except BaseException as problem:
                done.set_exception(problem)
                if not isinstance(problem, Fp8CalibError):
                    raise
            else:
                done.set_result(None)

        if not self._submit(reload):
            raise self._refusal()
        await asyncio.wrap_future(done)

    async def drain(self) -> None:
        """Take no more requests, and return when those that run are done."""
        self._draining = True
        await asyncio.to_thread(self._wait_until_idle)

    def _wait_until_idle(self) -> None:
        asked = threading.Event()
        self._submit(asked.set)  # requests submitted before this are known to the engine after it
        while self._thread.is_alive() and not (asked.is_set() and self._idle.is_set()):
            self._idle.wait(0.1)
            asked.wait(0.1)

    def shutdown(self) -> None:
        """Stop the engine's thread; requests that still run are aborted."""
        self._draining = True
        self._work.put(None)
        self._thread.join()

    def _refusal(self) -> UserError:
        if self._failure is not None:
            why = str(self._failure) or type(self._failure).__name__
            failed = ModelError(f"the engine has failed: {why}")
            failed.__cause__ = self._failure  # with its traceback, for whoever logs this
            return failed
        return UserError("the engine takes no more requests: it is shutting down")

    def _submit(self, task: Callable[[], None]) -> bool:
        """Have the engine's thread do something; False when it has ended."""
        with self._lock:
            if not self._stopped:
                self._work.put(task)
            return not self._stopped

    # From here on everything runs in the engine's thread.

    def _run(self) -> None:
        try:
            device = self.llm.engine.store.device
            if device.type == "cuda" and device.index:  # a new thread begins with device 0
                torch.cuda.set_device(device)
            while self._do_tasks():
                if self._streams:
                    self._hand_out(self.llm.engine.step())
        except BaseException as problem:
            self._failure = problem
            for stream in list(self._streams.values()):
                self._fail(stream, problem if isinstance(problem, UserError) else self._refusal())
        finally:
            with self._lock:
                self._stopped = True
            self._do_what_is_left()
            for request_id in list(self._streams):
                self._abort(request_id)
            self._idle.set()

    def _do_what_is_left(self) -> None:
        while not self._work.empty():
            if (task := self._work.get()) is not None:
                task()

    def _do_tasks(self) -> bool:
        """Do what was submitted; without requests, wait for more. False when it is time to stop."""
        while True:
            if not self._streams:
                self._idle.set()
            try:
                task = self._work.get(block=not self._streams)
            except Empty:
                return True
            if task is None:
                return False
            self._idle.clear()
            task()

    def _add(
        self,
        stream: _Stream,
        params: SamplingParams,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
    ) -> None:
        try:
            if self._stopped:
                raise self._refusal()
            if stream.request_id in self._streams:
                raise UserError(f"request id {stream.request_id!r} is in use")
            stream.group = self.llm.engine.add_group(
                params, prompt, prompt_token_ids, stream.request_id
            )
        except Exception as problem:  # its own, whatever it is: nothing was added
            self._send([(stream, problem)])
        else:
            self._streams[stream.request_id] = stream

    def _end(self, stream: _Stream) -> None:
        """Nobody waits for this request any more."""
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self._abort_group(stream)

    def _abort(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            self._abort_group(stream)
            self._hand_out(stream.group.requests if stream.group else [])

    def _abort_group(self, stream: _Stream) -> None:
        for request in stream.group.requests if stream.group else []:
            self.llm.engine.abort(request)

    def _hand_out(self, requests: Sequence[Request]) -> None:
        """Send what is new of these requests to whoever waits for it."""
        streams = {
            request.request_id: self._streams.get(request.request_id) for request in requests
        }
        news: list[tuple[_Stream, RequestOutput | BaseException]] = []
        for stream in streams.values():
            if stream is None or stream.group is None:
                continue
            if stream.group.error is not None:
                self._abort_group(stream)
                news.append((stream, stream.group.error))
            else:
                news.append((stream, RequestOutput.new_of(stream.group, self.llm.decode_token)))
            if stream.group.finished:
                del self._streams[stream.request_id]
        self._send(news)

    def _fail(self, stream: _Stream, problem: BaseException) -> None:
        self._streams.pop(stream.request_id, None)
        self._abort_group(stream)
        self._send([(stream, problem)])

    def _send(self, news: Sequence[tuple[_Stream, RequestOutput | BaseException]]) -> None:
        """Put items into their queues, with one wake-up for each event loop."""
        loops = {stream.loop for stream, _ in news}
        for loop in loops:
            items = [(s.queue, item) for s, item in news if s.loop is loop]
            try:
                loop.call_soon_threadsafe(_put_all, items)
            except RuntimeError:  # the loop is closed, and with it everyone who waited
                continue


def _put_all(items: Sequence[tuple[asyncio.Queue[Any], Any]]) -> None:
    for queue, item in items:
        queue.put_nowait(item)
