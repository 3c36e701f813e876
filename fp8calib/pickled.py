"""Weights in pickle files, read only when the user says so (`--allow-pickle`).

A pickle can run code when it is loaded. torch's restricted loader builds tensors and nothing else,
which is safe as far as it has no mistakes of its own; so the weights are read once, and kept as
safetensors in the cache.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from fp8calib import console
from fp8calib.checkpoint.folder import copy_file, staged
from fp8calib.checkpoint.paths import safe_file
from fp8calib.checkpoint.reader import INDEX
from fp8calib.checkpoint.writer import companions
from fp8calib.errors import ModelError
from fp8calib.models import cache_dir


def with_safetensors(folder: Path) -> Path:
    """`folder` where it has safetensors weights; else a copy in the cache whose .bin weights are.

    Raises:
        ModelError: a .bin file that holds anything but tensors, or is damaged.
    """
    pickles = sorted(folder.glob("*.bin"))
    if not pickles or any(folder.glob("*.safetensors")):
        return folder
    files = [safe_file(folder, path.name) for path in pickles]
    facts = [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:20]
    made = cache_dir() / "unpickled" / f"{folder.resolve().name}-{digest}"
    if (made / "config.json").exists():
        return made
    console.info(f"reading pickled weights, as --allow-pickle says; kept as safetensors in {made}")
    with staged(made, overwrite=False) as staging:
        where: dict[str, str] = {}
        for number, file in enumerate(files, start=1):
            name = f"model-{number:05}-of-{len(files):05}.safetensors"
            where |= dict.fromkeys(_rewrite(file, staging / name), name)
        for companion in companions(folder):
            (staging / companion).parent.mkdir(parents=True, exist_ok=True)
            copy_file(safe_file(folder, str(companion)), staging / companion)
        index = {"metadata": {}, "weight_map": where}
        (staging / INDEX).write_text(json.dumps(index, indent=2))
        copy_file(safe_file(folder, "config.json"), staging / "config.json")
    return made


def _rewrite(source: Path, target: Path) -> list[str]:
    """Write the tensors of a .bin file as safetensors; their names."""
    import torch
    from safetensors.torch import save_file

    try:
        content = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    except (UnpicklingError, RuntimeError, ValueError, EOFError, KeyError, OSError) as problem:
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise ModelError(f"{source}: not only tensors, or damaged: {reason:.200}") from None
    if not (isinstance(content, dict) and all(map(_is_tensor, content.items()))):
        raise ModelError(f"{source}: no table of tensors by name, so no weights of a model")
    tensors, seen = {}, set()
    for name, tensor in content.items():
        storage = tensor.untyped_storage().data_ptr()
        plain = tensor.contiguous()
        tensors[name] = plain.clone() if storage in seen and plain is tensor else plain
        seen.add(storage)
    save_file(tensors, target, metadata={"format": "pt"})
    return list(tensors)


def _is_tensor(entry: tuple[Any, Any]) -> bool:
    import torch

    return isinstance(entry[0], str) and isinstance(entry[1], torch.Tensor)
