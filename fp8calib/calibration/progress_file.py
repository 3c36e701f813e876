"""State of an unfinished calibration on disk, from which `--resume` goes on.

It lies in a hidden folder beside the output, one file a process, and goes away when the output is
there. A file is an .npz: the statistics so far, the number of batches behind them, and a
fingerprint of everything that they depend on.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp8calib.calibration.statistics import RangeStatistics
from fp8calib.errors import UserError
from fp8calib.scales import Kind

Statistics = dict[tuple[int, Kind], RangeStatistics]


def state_folder(output: Path) -> Path:
    output = output.resolve()
    return output.parent / f".{output.name}.fp8calib-state"


def fingerprint(**facts: Any) -> str:
    """Of all that the statistics depend on: a resumed run must have the same."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


@contextmanager
def claimed(output: Path, rank: int) -> Iterator[None]:
    """Keep the state of `output` for this process while the block runs: two runs that saved into
    the same folder would mix what they have seen.

    Raises:
        UserError: another run has it.
    """
    folder = state_folder(output)
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / f"rank-{rank}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another calibration into {output} is running and saves its state in {folder}: "
                "choose another output with -o, or wait for it"
            ) from None
        try:
            yield
        finally:
            if not any(folder.glob("*.npz")):
                discard(output)
    finally:
        os.close(lock)


class ProgressFile:
    def __init__(self, output: Path, rank: int, identity: str) -> None:
        self.path = state_folder(output) / f"rank-{rank}.npz"
        self.identity = identity

    def save(self, batches: int, statistics: Statistics) -> None:
        """Record that `batches` batches are in `statistics`; whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = {"batches": np.int64(batches), "identity": self.identity}
        for (layer, kind), found in statistics.items():
            arrays |= {
                f"{layer}.{kind}.{name}": value.cpu().numpy() for name, value in vars(found).items()
            }
        unfinished = self.path.with_suffix(".tmp")
        with unfinished.open("wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.path)

    def load(self) -> tuple[int, Statistics]:
        """The number of batches done and their statistics; (0, {}) where there is no file.

        Raises:
            UserError: it belongs to another run, or is damaged.
        """
        try:
            with np.load(self.path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            batches, identity = int(arrays.pop("batches")), str(arrays.pop("identity"))
            slots: dict[tuple[int, Kind], dict[str, torch.Tensor]] = {}
            for name, array in arrays.items():
                layer, kind, field = name.split(".")
                slots.setdefault((int(layer), kind), {})[field] = torch.from_numpy(array)
            statistics = {slot: RangeStatistics(**fields) for slot, fields in slots.items()}
        except FileNotFoundError:
            return 0, {}
        except (
            OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError,
            zipfile.BadZipFile, zlib.error,
        ) as problem:  # fmt: skip
            raise UserError(
                f"{self.path} is damaged ({problem}): start again without --resume"
            ) from None
        if identity != self.identity:
            raise UserError(
                f"{self.path.parent} belongs to a run with another model, data or options: start "
                "again without --resume"
            )
        return batches, statistics


def discard(output: Path) -> None:
    shutil.rmtree(state_folder(output), ignore_errors=True)
