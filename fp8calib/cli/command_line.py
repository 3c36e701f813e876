"""The command as the user wrote it, for reports."""

from __future__ import annotations

import shlex
import sys


def command_line() -> str:
    return shlex.join(["fp8calib", *sys.argv[1:]])
