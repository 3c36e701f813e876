"""The conversation of `fp8calib chat`, and the terminal or pipe that it is held in."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fp8calib.console import info, warn
from fp8calib.errors import UserError
from fp8calib.runtime.default_sampling import default_sampling
from fp8calib.runtime.llm import LLM
from fp8calib.runtime.outputs import RequestOutput
from fp8calib.runtime.sampling_params import SamplingParams

HELP = "/system TEXT: another system message; /reset: forget the conversation; /exit or Ctrl-D: end"
_PROMPT = "> "


class Conversation:
    """The messages so far. Each answer is made of all of them; those that were there before lie in
    the prefix cache."""

    def __init__(
        self, llm: LLM, system: str | None, max_tokens: int | None, sampling: dict[str, Any]
    ) -> None:
        self.llm = llm
        chosen = {"temperature": 0.0} | default_sampling(llm.engine.loaded.model) | sampling
        self._params = SamplingParams(max_tokens=max_tokens, **chosen)
        self._system = system
        self._turns: list[dict[str, str]] = []
        self.stopped = False
        llm.render_chat(self._messages("hello"))  # a model that cannot chat is told at once

    def reset(self) -> None:
        self._turns = []

    def set_system(self, text: str | None) -> None:
        """Take another system message and begin anew: what was said before had the old one."""
        before = self._system
        self._system = text
        try:
            self.llm.render_chat(self._messages("hello"))
        except UserError:
            self._system = before
            raise
        self.reset()

    def answer(self, text: str) -> Iterator[RequestOutput]:
        """The answer as it grows. It ends early once `stopped` is set; what there is of it is kept
        as the model's turn.

        Raises:
            UserError: the conversation has become longer than the model or its cache can hold.
        """
        self.stopped = False
        output = None
        prompt = self.llm.render_chat(self._messages(text))
        length, most = len(prompt["prompt_token_ids"]), self.llm.max_model_len
        if length >= most:
            raise UserError(
                f"the conversation has {length} tokens; with an answer, {most} fit: say less, or "
                "begin anew with /reset"
            )
        stream = self.llm.stream(prompt, self._params)
        try:
            for output in stream:
                yield output
                if self.stopped:
                    break
        finally:
            stream.close()  # type: ignore[attr-defined]
            if output is not None:
                self._turns += [
                    {"role": "user", "content": text},
                    {"role": "assistant", "content": output.outputs[0].text},
                ]

    def _messages(self, text: str) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *self._turns, {"role": "user", "content": text}]


class Terminal:
    """Reads lines, obeys commands, prints answers as they come."""

    def __init__(self, conversation: Conversation, *, stats: bool, json: bool) -> None:
        self.conversation = conversation
        self._stats, self._json = stats, json
        self._interactive = sys.stdin.isatty()

    def run(self) -> None:
        """Until the input ends. Ctrl-C during an answer stops the answer; elsewhere it ends all.

        Raises:
            UserError: the input is a pipe and a message of it cannot be answered.
        """
        if self._interactive:
            import readline  # noqa: F401  (input() then edits lines and remembers them)

            info(HELP)
        for line in self._lines():
            if line.strip() in ("/exit", "/quit"):
                break
            try:
                self._do(line.strip())
            except UserError as problem:
                if not self._interactive:
                    raise
                warn(str(problem))

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                yield input(_PROMPT if self._interactive else "")
            except EOFError:
                if self._interactive:
                    info("")
                return
            except UnicodeDecodeError:
                raise UserError("a line on stdin is not UTF-8 text") from None

    def _do(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if not line:
            return
        if not command.startswith("/"):
            self._answer(line)
        elif command == "/reset":
            self.conversation.reset()
        elif command == "/system":
            self.conversation.set_system(rest.strip() or None)
        elif command == "/help":
            info(HELP)
        else:
            raise UserError(f"unknown command {command}; {HELP}")

    def _answer(self, line: str) -> None:
        started = time.perf_counter()
        shown, output = 0, None
        with self._ctrl_c_stops():
            for output in self.conversation.answer(line):
                text = output.outputs[0].text
                if not self._json:
                    print(text[shown:], end="", flush=True)
                shown = len(text)
        assert output is not None  # an answer has at least one token
        seconds = time.perf_counter() - started
        if self._json:
            print(json.dumps(self._report(output, seconds), ensure_ascii=False), flush=True)
        else:
            print(flush=True)
        if self._stats:
            tokens = len(output.outputs[0].token_ids)
            info(
                f"{tokens} tokens in {seconds:.1f} s: {tokens / seconds:.1f} tokens/s; "
                f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached"
            )

    def _report(self, output: RequestOutput, seconds: float) -> dict[str, Any]:
        (answer,) = output.outputs
        reason = "abort" if self.conversation.stopped else answer.finish_reason
        return {
            "role": "assistant",
            "content": answer.text,
            "finish_reason": reason,
            "prompt_tokens": len(output.prompt_token_ids),
            "cached_tokens": output.num_cached_tokens,
            "completion_tokens": len(answer.token_ids),
            "seconds": round(seconds, 3),
        }

    @contextmanager
    def _ctrl_c_stops(self) -> Iterator[None]:
        """Ctrl-C takes effect between two steps of the engine, never inside of one. Of a pipe's
        conversation it is the end, as of any command."""

        def stop(*_: Any) -> None:
            self.conversation.stopped = True

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
        if self.conversation.stopped and not self._interactive:
            raise KeyboardInterrupt
