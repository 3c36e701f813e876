"""The one place that knows rich: messages, tables and progress on stderr, JSON on stdout."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

stderr = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


def info(message: str) -> None:
    stderr.print(escape(message))


def warn(message: str) -> None:
    stderr.print(f"[yellow]warning:[/] {escape(message)}")


def error(message: str) -> None:
    stderr.print(f"[bold red]error:[/] {escape(message)}")


def print_json(data: Any) -> None:
    """Write `data` as JSON to stdout."""
    print(json_text(data))


def json_text(data: Any) -> str:
    """`data` as JSON. NaN and infinities become strings: JSON has none."""
    return json.dumps(_finite(data), indent=2)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table to stderr: numbers right-aligned, words left-aligned."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for number, column in enumerate(columns):
        cells = [row[number] for row in rows if row[number]]
        words = number == 0 or any(cell[0].isalpha() for cell in cells)
        table.add_column(column, justify="left" if words else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    stderr.print(table, soft_wrap=False)


def print_side_by_side(
    title: str,
    left: tuple[str, tuple[str, str, str]],
    right: tuple[str, tuple[str, str, str]],
    caption: str,
) -> None:
    """Print two texts to stdout, each below its heading and in three parts: what they share, where
    they part (marked by brackets, and by colour on a terminal), and the rest."""
    table = Table(expand=True, header_style="bold")
    cells = []
    for heading, (shared, differing, rest) in (left, right):
        table.add_column(heading, ratio=1, overflow="fold")
        cells.append(Text(shared))
        if differing:
            cells[-1].append(f"[{differing}]", style="bold reverse").append(rest)
    table.add_row(*cells)
    stdout = Console(highlight=False, emoji=False)
    stdout.print(Text(title, style="italic"), soft_wrap=True)
    stdout.print(table)
    stdout.print(Text(caption), "", soft_wrap=True, sep="\n")


class Bar:
    """Handle of one progress bar: `advance` by units done, optionally with a rate to show."""

    def __init__(self, progress: Progress, task: Any) -> None:
        self._progress, self._task = progress, task

    def advance(self, amount: float = 1, note: str = "") -> None:
        self._progress.update(self._task, advance=amount, note=note)


@contextmanager
def progress(description: str, total: float | None) -> Iterator[Bar]:
    """A progress bar with counts and time left; nothing is drawn where stderr is no terminal."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn() if total is not None else TextColumn(""),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=stderr, disable=not stderr.is_terminal) as bars:
        yield Bar(bars, bars.add_task(description, total=total, note=""))
