"""Commands in the test's own process, and the text they are given."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from fp8calib.cli import main


def call(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """Run a command in this process: exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as stop:
        main(list(map(str, args)))
    out, err = capsys.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, out, err


def call_flat(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """As `call`; the titles of tables wrap, so white space in stderr is one space each time."""
    code, out, err = call(capsys, *args)
    return code, out, " ".join(err.split())


def write_texts(folder: Path, texts: Iterable[str]) -> Path:
    """A dataset of a column `text`."""
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def powers(count: int) -> list[str]:
    """Texts that differ in each number."""
    return [f"{n} squared is {n * n}, and {n} cubed is {n**3}; " * 3 for n in range(count)]
