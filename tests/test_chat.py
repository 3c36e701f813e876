"""`fp8calib chat`: turns, commands, and an answer that is stopped."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8calib import LLM, SamplingParams
from fp8calib.cli import main
from fp8calib.cli.conversation import Conversation
from fp8calib.errors import UserError

Tiny = Callable[..., Path]
SHORT = ("--max-tokens", "6")


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> LLM:
    return LLM(str(tiny()))


@pytest.fixture
def chat(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Hold a conversation whose lines come from a pipe: exit code, stdout, stderr."""

    def run(text: str, *args: str, folder: Path | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        with pytest.raises(SystemExit) as stop:
            main(["chat", str(folder or tiny()), *args])
        out, err = capsys.readouterr()
        assert isinstance(stop.value.code, int)
        return stop.value.code, out, err

    return run


def by_llm(llm: LLM, *turns: str, system: str | None = None, **params: Any) -> list[str]:
    """The answers to `turns`, one after the other."""
    messages = [{"role": "system", "content": system}] if system else []
    answers = []
    sampling = SamplingParams(**{"max_tokens": 6, "temperature": 0} | params)
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        answers.append(llm.chat(messages, sampling)[0].outputs[0].text)
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_answers_on_stdout_see_the_turns_before(chat: Callable[..., Any], llm: LLM) -> None:
    code, out, err = chat("hello\n\nhow are you?\n", *SHORT)
    first, second = by_llm(llm, "hello", "how are you?")
    assert (code, out) == (0, f"{first}\n{second}\n")
    assert by_llm(llm, "how are you?") != [second], "the first turn makes no difference"
    assert "KV cache: float32" in err and "QK and PV in float32" in err


def test_earlier_turns_are_cached(chat: Callable[..., Any]) -> None:
    long = "a sentence of more than one page of tokens. " * 2
    _, out, err = chat(f"{long}\nand now?\n", *SHORT, "--json", "--stats")
    first, second = map(json.loads, out.splitlines())
    assert first["cached_tokens"] == 0 and first["completion_tokens"] <= 6
    assert second["cached_tokens"] >= first["prompt_tokens"] // 16 * 16 > 64
    assert (first["role"], first["finish_reason"]) == ("assistant", "length")
    told = f"{second['cached_tokens']} of {second['prompt_tokens']} prompt tokens cached"
    assert told in err and "tokens/s" in err


def test_commands(chat: Callable[..., Any], llm: LLM) -> None:
    lines = ["one", "/reset", "two", "/system Be brief.", "three", "four", "/system", "five"]
    lines += ["/help", "/exit", "six"]
    code, out, err = chat("\n".join(lines), *SHORT, "--system", "Be long.", "--json")
    answers = [json.loads(line)["content"] for line in out.splitlines()]
    assert code == 0
    assert answers == [
        *by_llm(llm, "one", system="Be long."),
        *by_llm(llm, "two", system="Be long."),
        *by_llm(llm, "three", "four", system="Be brief."),
        *by_llm(llm, "five"),
    ]
    assert "/reset: forget the conversation" in err


def test_sampling_options(chat: Callable[..., Any], llm: LLM) -> None:
    chosen = ("--temperature", "1", "--top-k", "50", "--seed", "3", "--repetition-penalty", "1.3")
    _, out, _ = chat("hello\n", *SHORT, *chosen)
    params = {"temperature": 1.0, "top_k": 50, "seed": 3, "repetition_penalty": 1.3}
    assert out == by_llm(llm, "hello", **params)[0] + "\n"
    assert out != by_llm(llm, "hello")[0] + "\n"


@pytest.mark.parametrize(
    ("text", "args", "message"),
    [
        ("/nonsense\n", (), "unknown command /nonsense"),
        ("x" * 300, (), "with an answer, 256 fit: say less, or begin anew with /reset"),
        ("caf\udce9\n", (), "a text is not Unicode"),
        ("", ("--system", "caf\udce9"), "a text is not Unicode"),
        ("", ("--temperature", "-1"), "temperature must be from 0 to 1000"),
        ("", ("--kv-cache-memory", "1"), "KV cache hold 0 tokens"),
    ],
)
def test_mistakes(chat: Callable[..., Any], text: str, args: tuple[str, ...], message: str) -> None:
    code, out, err = chat(text, *SHORT, *args)
    assert (code, out) == (2, "") and message in err and "Traceback" not in err


def test_a_model_without_a_template_is_told_at_once(chat: Callable[..., Any], tiny: Tiny) -> None:
    folder = tiny(tokenizer={"chat_template": None})
    code, _, err = chat("hello\n", folder=folder)
    assert code == 2 and "has no chat template" in err


def test_a_wrong_number_is_told_before_the_model_is_loaded(
    chat: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8calib.runtime.llm.LLM", None)
    code, out, err = chat("hello\n", "--temperature", "-1")
    assert (code, out, err) == (2, "", "error: temperature must be from 0 to 1000, got -1.0\n")


def test_a_refused_system_message_leaves_the_old_one(tiny: Tiny) -> None:
    template = (
        "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    llm = LLM(str(tiny(tokenizer={"chat_template": template})))
    conversation = Conversation(llm, "good", 4, {})
    with pytest.raises(UserError, match="refuses"):
        conversation.set_system("bad")
    (*_, last) = conversation.answer("x")
    assert last.prompt == "goodx"


class Keyboard(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def typed(monkeypatch: pytest.MonkeyPatch, lines: list[str | type[BaseException]]) -> None:
    """What a person enters: lines, Ctrl-C or Ctrl-D."""
    rest = iter(lines)

    def enter(prompt: str = "") -> str:
        line = next(rest)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(sys, "stdin", Keyboard())
    monkeypatch.setattr("builtins.input", enter)


class Interrupting(io.StringIO):
    """Sends Ctrl-C once, when the second piece of an answer is printed."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = 0

    def write(self, text: str) -> int:
        self.pieces += 1
        if self.pieces == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, ["hello", "/nonsense", "go on", EOFError])
    stdout = Interrupting()
    monkeypatch.setattr(sys, "stdout", stdout)
    with pytest.raises(SystemExit) as stop:
        main(["chat", str(tiny()), "--max-tokens", "60"])
    assert stop.value.code == 0
    first, second = stdout.getvalue().splitlines()[0], stdout.getvalue().splitlines()[1:]
    assert 0 < len(first) < 40 and second


def test_ctrl_c_at_the_prompt_ends(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, [KeyboardInterrupt])
    with pytest.raises(SystemExit) as stop:
        main(["chat", str(tiny())])
    assert stop.value.code == 130


def test_an_answer_left_early_frees_its_pages_and_is_remembered(llm: LLM) -> None:
    conversation = Conversation(llm, None, 50, {})
    for output in conversation.answer("hello"):
        if len(output.outputs[0].token_ids) == 5:
            conversation.stopped = True
    assert not llm.engine.has_unfinished_requests
    assert llm.engine.stats.pages_used == 0
    (*_, last) = conversation.answer("and?")
    assert last.prompt is not None
    assert f"<assistant>{output.outputs[0].text}</s>" in last.prompt
