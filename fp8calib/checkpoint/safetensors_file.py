"""Headers and small tensors of safetensors files, read with numpy alone and without trust.

The format (https://huggingface.co/docs/safetensors): eight bytes, the header's length as a
little-endian u64; the header, a JSON object from tensor names to ``dtype``, ``shape`` and
``data_offsets`` (bytes from the header's end); the data. A 70B model's headers are a few megabytes
beside 140 GB of data, so that looking at scales costs next to nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fp8calib.checkpoint.json_file import parse_object
from fp8calib.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
MAX_TENSORS = 500_000  # in a file; the largest public models have 300,000 in all of theirs
MAX_SCALE_VALUES = 65_536  # a scale holds one value per head at most
_MAX_NAME = 300  # characters
_MAX_DIMENSIONS = 16

_CHUNK_BYTES = 16 << 20

_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_FLOATS = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "F64": "<f8"}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `start` and `end` are byte positions in `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file, by name.

    Raises:
        CheckpointError: the file cannot be read, is no safetensors file, or is cut short.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            text, data = _header_bytes(file, size)
        if text.count(b'"data_offsets"') > MAX_TENSORS:
            raise ValueError(f"holds more than {MAX_TENSORS:,} tensors")
        header = parse_object(text, unique=True, values=10 * MAX_TENSORS)
    except OSError as problem:
        raise CheckpointError(f"{path}: {problem.strerror or problem}") from None
    except ValueError as problem:
        raise CheckpointError(f"{path} is no safetensors file: its header {problem}") from None
    metadata = header.pop("__metadata__", {})
    if not (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())):
        raise CheckpointError(f"{path} is no safetensors file: its metadata are not text")
    tensors = {name: _tensor(path, name, entry, data) for name, entry in header.items()}
    _check_layout(path, tensors, data, size)
    return tensors


def _header_bytes(file: BinaryIO, size: int) -> tuple[bytes, int]:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"would have {length} bytes in a file of {size}")
    return file.read(length), 8 + length


def _tensor(path: Path, name: str, entry: Any, data: int) -> TensorInfo:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, start, end)
        sound = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in numbers)
        sound = sound and start <= end and len(name) <= _MAX_NAME and len(shape) <= _MAX_DIMENSIONS
        if sound and dtype in _BYTES:
            sound = end - start == math.prod(shape) * _BYTES[dtype]
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise CheckpointError(f"{path}: the header's entry for {name:.80} makes no sense")
    return TensorInfo(path, dtype, shape, data + start, data + end)


def _check_layout(path: Path, tensors: dict[str, TensorInfo], data: int, size: int) -> None:
    """Tensors must cover the file from byte `data` to its end, as the format demands."""
    last = data
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start < last:
            raise CheckpointError(f"{path}: {name} overlaps another tensor")
        if info.start > last:
            raise CheckpointError(f"{path} is no safetensors file: a gap lies before {name}")
        if info.end > size:
            raise CheckpointError(
                f"{path} is cut short: {name} ends at byte {info.end}, the file at {size}; "
                "download it again"
            )
        last = info.end
    if last != size:
        raise CheckpointError(
            f"{path} is no safetensors file: {size - last} bytes follow its tensors"
        )


def copy_without(source: Path, target: Path, names: Collection[str]) -> None:
    """Write the safetensors file `source` without the tensors `names` to `target`; the others keep
    their bytes and their order."""
    with source.open("rb") as reader, target.open("xb") as writer:
        text, data = _header_bytes(reader, source.stat().st_size)
        header = json.loads(text)
        kept = {"__metadata__": header.pop("__metadata__")} if "__metadata__" in header else {}
        ranges, position = [], 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if name not in names:
                start, end = entry["data_offsets"]
                kept[name] = entry | {"data_offsets": [position, position + end - start]}
                ranges.append((data + start, end - start))
                position += end - start
        encoded = json.dumps(kept, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)  # tensors start at a multiple of eight bytes
        writer.write(len(encoded).to_bytes(8, "little") + encoded)
        for start, length in ranges:
            reader.seek(start)
            while length:
                chunk = reader.read(min(length, _CHUNK_BYTES))
                writer.write(chunk)
                length -= len(chunk)


def read_scale(name: str, info: TensorInfo) -> np.ndarray:
    """A scale's values as a flat float32 array ([1] for a scalar).

    Raises:
        CheckpointError: the tensor is not of a floating dtype, or too large to be a scale.
    """
    if info.dtype not in _FLOATS:
        raise CheckpointError(f"{info.file}: {name} is {info.dtype}, a scale is floating point")
    if math.prod(info.shape) > MAX_SCALE_VALUES:
        raise CheckpointError(f"{info.file}: {name} has shape {list(info.shape)}: no scale")
    with info.file.open("rb") as file:
        file.seek(info.start)
        values = np.frombuffer(file.read(info.end - info.start), dtype=_FLOATS[info.dtype])
    if info.dtype == "BF16":  # the upper half of a float32
        return (values.astype("<u4") << 16).view("<f4")
    with np.errstate(over="ignore"):  # an F64 beyond float32 becomes inf, and is reported as such
        return values.astype(np.float32)
