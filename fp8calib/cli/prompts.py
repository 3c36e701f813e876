"""The prompts of a command: from its options, a file or stdin."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fp8calib.errors import UserError


def read_prompts(given: Sequence[str] | None, file: Path | None) -> list[str]:
    """The prompts that are given, then those of a file; all of stdin as one where there are none.

    Raises:
        UserError: there is no prompt, a file that cannot be read, or text that is not UTF-8.
    """
    texts = [*(given or ()), *(_from_file(file) if file is not None else ())]
    if not given and file is None:
        texts = [_from_stdin()]
    for number, text in enumerate(texts, 1):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"prompt {number} is not UTF-8 text") from None
    return texts


def _from_stdin() -> str:
    if sys.stdin.isatty():
        raise UserError("no prompt: use -p TEXT, --prompts FILE, or pipe text into the command")
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError:
        raise UserError("the prompt on stdin is not UTF-8 text") from None


def _from_file(file: Path) -> Iterator[str]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not UTF-8 text"
        raise UserError(f"{file}: {reason}") from None
    if file.suffix == ".json":
        raise UserError(f"{file}: prompts are read from text, one a line, or from .jsonl")
    found = False
    # not splitlines: that also splits at form feeds and other characters inside a line
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removesuffix("\r")
        if line.strip():
            found = True
            yield _of_json(line, f"{file}, line {number}") if file.suffix == ".jsonl" else line
    if not found:
        raise UserError(f"{file} holds no prompt")


def _of_json(line: str, where: str) -> str:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise UserError(f"{where} is not JSON: {problem}") from None
    if isinstance(value, dict):
        value = value.get("prompt")
    if not isinstance(value, str):
        raise UserError(f"{where} is neither a string nor an object with a `prompt` that is one")
    return value
