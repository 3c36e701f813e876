"""Ways to damage a checkpoint: bytes, JSON values, safetensors headers, files. All by a seed."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

Files = dict[str, bytes]

NASTY: list[Any] = [
    None, True, 0, -1, 1, 2**31, 2**63, 10**30, -(10**30), 0.0, -0.5, 1e-320, 1e308, float("nan"),
    float("inf"), "", "x", "a\nb", "\x1b[2J", "../../outside", "/etc/passwd", "n" * 5000, "tensor",
    "attn_head", "F32", [], [1], [[]], [0, 2**40], [4, 0], {}, {"a": 1}, ["q"] * 50, {"": {}},
]  # fmt: skip


def mutate(files: Files, rng: random.Random) -> Files:
    """`files` with one to three kinds of damage."""
    files = dict(files)
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(sorted(files))
        change = rng.choice([*BY_SUFFIX.get(Path(name).suffix, []), _bytes])
        files[name] = change(files[name], rng)
    return files


def _bytes(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    at = rng.randrange(len(data) + 1)
    what = rng.randrange(6)
    if what == 0:
        return bytes(data[:at])
    if what == 1:
        return bytes(data[:at] + rng.randbytes(rng.randint(1, 64)) + data[at:])
    if what == 2:
        return bytes(data[:at] + data[at + rng.randint(1, 64) :])
    if what == 3:
        return bytes(data + data[:at])
    if what == 4:
        return rng.choice([b"", b"[" * 100_000, b'{"a":' * 5000, b"\xff" * 16, b"null", b"[]"])
    for _ in range(rng.randint(1, 8)):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def _json(content: bytes, rng: random.Random) -> bytes:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return _bytes(content, rng)
    if not isinstance(value, dict | list):
        return _bytes(content, rng)
    _spoil(value, rng)
    text = json.dumps(value)
    if rng.random() < 0.1 and text.startswith("{") and len(text) > 2:
        text = "{" + text[1:-1] + "," + text[1:]  # every key twice
    return text.encode()


def _spoil(value: Any, rng: random.Random) -> None:
    """Replace, remove or add one value somewhere inside."""
    places: list[tuple[Any, Any]] = []
    level = [value]
    while level:
        node = level.pop()
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, inner in list(items):
            places.append((node, key))
            if isinstance(inner, dict | list):
                level.append(inner)
    if not places:
        return
    node, key = rng.choice(places)
    what = rng.randrange(4)
    if what == 0:
        del node[key]
    elif what == 1 and isinstance(node, dict):
        node[str(rng.choice(NASTY))[:300]] = node.pop(key)
    elif what == 2 and isinstance(node[key], int | float):
        node[key] = node[key] * rng.choice([-1, 2, 1000, 0])
    else:
        node[key] = rng.choice(NASTY)


def _header(content: bytes, rng: random.Random) -> bytes:
    """Damage a safetensors header and keep its length true; now and then only the length."""
    length = int.from_bytes(content[:8], "little")
    if length > len(content) - 8:
        return _bytes(content, rng)
    if rng.random() < 0.2:
        wrong = rng.choice([0, 1, max(length, 1) - 1, length + 1, 2**40, 2**64 - 1, len(content)])
        return wrong.to_bytes(8, "little") + content[8:]
    header = _json(content[8 : 8 + length], rng)
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


BY_SUFFIX: dict[str, list[Callable[[bytes, random.Random], bytes]]] = {
    ".json": [_json, _json, _json],
    ".safetensors": [_header, _header, _header],
}


def write(files: Files, folder: Path, rng: random.Random) -> None:
    """Put `files` on disk; sometimes one of them as something that is no plain file."""
    folder.mkdir()
    odd = rng.choice(sorted(files)) if rng.random() < 0.15 else None
    for name, content in files.items():
        path = folder / name
        if name != odd:
            path.write_bytes(content)
            continue
        match rng.randrange(7):
            case 0:
                path.symlink_to("/etc/passwd")
            case 1:
                path.symlink_to(path)
            case 2:
                path.mkdir()
            case 3:
                os.mkfifo(path)
            case 4:
                path.symlink_to("/dev/zero")
            case 5:
                path.write_bytes(content)
                os.truncate(path, 10**11)  # sparse
            case _:
                pass  # missing
