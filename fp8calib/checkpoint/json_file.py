"""JSON files read without trust: in bounded time and memory, and never with a traceback."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fp8calib.errors import CheckpointError

MAX_DEPTH = 64  # of nesting; a model's files have less than ten levels
_MAX_BYTES = 128 << 20  # an index of a million tensors has 100 MB
_MAX_VALUES = 4_000_000  # each takes up to a hundred times its size in the file


def read_json(path: Path, *, unique: bool = False) -> dict[str, Any]:
    """The object in a JSON file. With `unique`, a key that occurs twice is refused instead of the
    last one counting.

    Raises:
        CheckpointError: it cannot be read, is no JSON object, or is too large or deep to be one.
    """
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise CheckpointError(f"{path} is {size:,} bytes: too large to be true")
        return parse_object(path.read_bytes(), unique=unique)
    except OSError as problem:
        raise CheckpointError(f"{path}: {problem.strerror or problem}") from None
    except ValueError as problem:
        raise CheckpointError(f"{path} {problem}") from None


def parse_object(text: bytes, *, unique: bool = False, values: int = _MAX_VALUES) -> dict[str, Any]:
    """The JSON object in `text`, which has at most `values` values.

    Raises:
        ValueError: what is wrong with it, as the end of a sentence that the file's name begins.
    """
    if text.count(b",") + text.count(b"[") + text.count(b"{") > values:
        raise ValueError(f"holds more than {values:,} values: too many to be true")
    try:
        content = json.loads(text.decode(), object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as problem:
        raise ValueError(f"is not valid JSON: {problem}") from None
    if not isinstance(content, dict):
        raise ValueError("holds no JSON object")
    if _deeper_than(content, MAX_DEPTH):
        raise ValueError("is nested too deeply")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r:.80} occurs twice")
    return result


def _deeper_than(content: Any, depth: int) -> bool:
    """Whether any value lies more than `depth` levels down; recursion later is then harmless."""
    level: list[Any] = [content]
    for _ in range(depth):
        level = [item for value in level for item in _children(value)]
        if not level:
            return False
    return True


def _children(value: Any) -> Iterable[Any]:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (item for item in inside if isinstance(item, dict | list))
