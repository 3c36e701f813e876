"""The command as the user wrote it, for reports."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

_words: list[str] = []


def remember(words: Sequence[str]) -> None:
    """Note the words that follow `fp8calib`; called once a command starts."""
    _words[:] = words


def command_line() -> str:
    return shlex.join(["fp8calib", *_words])
