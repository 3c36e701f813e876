"""Changes to what fp8calib itself wrote of a checkpoint: the record and the model card. Weights and
scales are never touched."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8calib.checkpoint.card import amended_card
from fp8calib.checkpoint.folder import SIDECAR
from fp8calib.checkpoint.reader import open_checkpoint, read_scales
from fp8calib.checkpoint.scheme import needed_kv_cache_dtype
from fp8calib.errors import CheckpointError


def check_amendable(model: str | Path) -> None:
    """Raise CheckpointError where `amend` would have nothing to change."""
    folder = Path(model)
    if not folder.is_dir() or open_checkpoint(folder).sidecar is None:
        raise CheckpointError(
            f"{model} has no {SIDECAR} to write into: it is no checkpoint that fp8calib calibrated"
        )


def amend(folder: Path, *, skip_layers: Sequence[str] | None = None, **entries: Any) -> None:
    """Put `entries` into fp8calib.json and bring the model card up to date; each file is replaced
    whole.

    Args:
        skip_layers: in vLLM's form; replaces the recorded list, in the recipe that `rescale`
            continues from too. Accuracy that was recorded with another list is dropped.
        entries: further keys of fp8calib.json and their new values, plain JSON.

    Raises:
        CheckpointError: the folder has no fp8calib.json, or cannot be written.
    """
    check_amendable(folder)
    checkpoint = open_checkpoint(folder)
    sidecar = dict(checkpoint.sidecar or {}) | entries
    if skip_layers is not None:
        if list(skip_layers) != sidecar.get("skip_layers", []) and "accuracy" not in entries:
            sidecar.pop("accuracy", None)
        sidecar["skip_layers"] = list(skip_layers)
        if isinstance(recipe := sidecar.get("recipe"), dict):
            calibration = dict(recipe.get("calibration") or {})
            calibration["kv_cache_dtype_skip_layers"] = list(skip_layers)
            sidecar["recipe"] = recipe | {"calibration": calibration}
    dtype = needed_kv_cache_dtype(checkpoint.config)
    card = amended_card(folder, read_scales(folder), sidecar, dtype)
    _replace(folder / SIDECAR, json.dumps(sidecar, indent=2, ensure_ascii=False) + "\n")
    _replace(folder / "README.md", card)


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with unfinished.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as problem:
        unfinished.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {path}: {problem.strerror or problem}") from None
