"""Reading a checkpoint: which files its loaders take, its layers, and every scale in it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from fp8calib.checkpoint import names
from fp8calib.checkpoint.folder import SIDECAR
from fp8calib.checkpoint.safetensors_file import TensorInfo, read_header, read_scale
from fp8calib.checkpoint.scheme import check_scheme
from fp8calib.checkpoint.structure import layers_from_checkpoint
from fp8calib.errors import CheckpointError, ScaleError
from fp8calib.layers import LayerSpec
from fp8calib.scales import Kind, LayerScales, ScaleSet, Strategy, problems, require

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_JSON_BYTES = 256_000_000


@dataclass(frozen=True)
class FoundScale:
    """One scale tensor of a checkpoint. `values` are float32, flat; `dtype` is the file's;
    `loaded` says whether vLLM reads `file`, the one that it lies in."""

    tensor: str
    form: str
    file: str
    dtype: str
    values: np.ndarray
    loaded: bool


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder as its loaders see it: `files` are those that the index lists (all
    safetensors files when there is no index) and `tensors` what they hold; `unlisted` are the other
    files and `stray` what those hold."""

    path: Path
    config: dict[str, Any]
    has_index: bool
    files: tuple[str, ...]
    unlisted: tuple[str, ...]
    tensors: Mapping[str, TensorInfo]
    stray: Mapping[str, TensorInfo]

    @property
    def weight_files(self) -> list[Path]:
        """The real paths of the weight files that transformers takes, in the order of the names."""
        alone = not self.has_index and SINGLE in self.files
        return [safe_file(self.path, file) for file in ((SINGLE,) if alone else self.files)]

    @cached_property
    def strategy(self) -> Strategy | None:
        """The declared strategy; raises CheckpointError for a scheme that is refused."""
        return check_scheme(self.config)

    @cached_property
    def layers(self) -> list[LayerSpec]:
        return layers_from_checkpoint(self.config, self.tensors)

    @cached_property
    def scales(self) -> dict[int, dict[Kind, FoundScale]]:
        """Every scale, by layer index and kind. The current form of a name goes before older ones,
        a file that loaders read before one they do not."""
        modules = {layer.name: layer.index for layer in self.layers}
        found: dict[int, dict[Kind, FoundScale]] = {}
        ranked = []
        for tensors, loaded in ((self.tensors, True), (self.stray, False)):
            for name, info in tensors.items():
                meaning = names.parse(name, modules)
                if meaning is not None:
                    ranked.append((not loaded, meaning.form != names.CURRENT, name, meaning, info))
        for stray, _, name, meaning, info in sorted(ranked, key=lambda item: item[:3]):
            index = modules.get(meaning.module, _last_number(meaning.module))
            if index is None:
                continue
            values = read_scale(name, info).reshape(-1)
            for kind in meaning.kinds:
                scale = FoundScale(
                    name, meaning.form, info.file.name, info.dtype, values, not stray
                )
                found.setdefault(index, {}).setdefault(kind, scale)
        return dict(sorted(found.items()))

    @cached_property
    def scale_tensors(self) -> frozenset[str]:
        """The names of all KV-cache scales and zero points that loaders would find."""
        modules = {layer.name for layer in self.layers}
        return frozenset(
            name
            for name in self.tensors
            if names.parse(name, modules) or names.is_kv_zero_point(name)
        )

    @cached_property
    def sidecar(self) -> dict[str, Any] | None:
        """What fp8calib recorded beside the checkpoint; None when it was made by something else."""
        there = (self.path / SIDECAR).exists()
        return read_json(safe_file(self.path, SIDECAR)) if there else None

    @property
    def recorded_skip_layers(self) -> list[str]:
        """The skip list that fp8calib recorded, in vLLM's words; raises CheckpointError for one
        that is no list of words."""
        recorded = (self.sidecar or {}).get("skip_layers") or []
        if not (isinstance(recorded, list) and all(isinstance(w, str | int) for w in recorded)):
            raise CheckpointError(f"{self.path / SIDECAR}: skip_layers is not a list of layers")
        return [str(word) for word in recorded]


def _last_number(module: str) -> int | None:
    return next((int(part) for part in reversed(module.split(".")) if part.isdecimal()), None)


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Read config.json, the index and all headers of a checkpoint folder.

    Raises:
        CheckpointError: no checkpoint with safetensors weights, or a damaged one.
    """
    path = Path(path)
    config = read_config(path)
    index = path / INDEX
    on_disk = sorted(file.name for file in path.glob("*.safetensors"))
    mapping = _weight_map(index) if index.is_file() else None
    files = tuple(on_disk if mapping is None else sorted(set(mapping.values())))
    if not files:
        raise CheckpointError(_no_safetensors(path))
    tensors: dict[str, TensorInfo] = {}
    for name in files:
        tensors.update(read_header(safe_file(path, name)))
    for name, file in (mapping or {}).items():
        if name not in tensors:
            raise CheckpointError(f"{index} places {name} in {file}, which does not hold it")
    unlisted = tuple(name for name in on_disk if name not in files)
    stray: dict[str, TensorInfo] = {}
    for name in unlisted:
        with suppress(CheckpointError):  # nobody loads it, so it may be anything
            stray.update(read_header(safe_file(path, name)))
    return Checkpoint(path, config, mapping is not None, files, unlisted, tensors, stray)


def read_config(path: Path | str) -> dict[str, Any]:
    """The content of a checkpoint's config.json."""
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder: expected a checkpoint with a config.json")
    if not (path / "config.json").exists():
        raise CheckpointError(f"{path} has no config.json: it is no Hugging Face checkpoint")
    return read_json(safe_file(path, "config.json"))


def read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is {path.stat().st_size:,} bytes: too large to be true")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise CheckpointError(f"{path}: {problem.strerror or problem}") from None
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(f"{path} is not valid JSON: {problem}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return content


def read_scales(path: Path | str) -> ScaleSet:
    """The scales of a calibrated checkpoint, complete and checked; older names are understood.

    Raises:
        CheckpointError: the folder cannot be read, or declares a scheme that is refused.
        ScaleError: it has no scales, or some that cannot be used.
    """
    checkpoint = open_checkpoint(path)
    strategy = checkpoint.strategy
    found = checkpoint.scales
    if not found:
        raise ScaleError(f"{path} has no KV-cache scales")
    if strategy is None:
        sizes = {scale.values.size for kinds in found.values() for scale in kinds.values()}
        strategy = "tensor" if sizes == {1} else "attn_head"
    require(
        (
            f"layer {layer.index} ({layer.name}): {kind}_scale is missing"
            for layer in checkpoint.layers
            for kind in ("k", "v")
            if kind not in found.get(layer.index, {})
        ),
        str(path),
    )
    scales = scale_set(checkpoint, strategy)
    require(problems(scales, checkpoint.layers), str(path))
    return scales


def scale_set(checkpoint: Checkpoint, strategy: Strategy) -> ScaleSet:
    """The layers of `checkpoint` that have at least k and v, as a ScaleSet."""
    modules = {layer.index: layer.name for layer in checkpoint.layers}
    layers = {}
    for index, kinds in checkpoint.scales.items():
        if "k" in kinds and "v" in kinds:
            meaning = names.parse(kinds["k"].tensor, modules.values())
            name = modules.get(index) or (meaning.module if meaning else "")
            values = {kind: scale.values for kind, scale in kinds.items()}
            layers[index] = LayerScales(name, values["k"], values["v"], values.get("q"))
    return ScaleSet(strategy, layers)


def safe_file(folder: Path, name: str) -> Path:
    """The real path of file `name` of a checkpoint folder, which must not lead out of it.

    Links into the blobs of the same Hugging Face cache entry (``models--X/snapshots/REV/file ->
    ../../blobs/HASH``) are what a downloaded model consists of, and are followed.

    Raises:
        CheckpointError: a name or link that leads elsewhere, or nowhere.
    """
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or name.startswith("/") or "\\" in name or "\0" in name:
        raise CheckpointError(f"{folder}: the file name {name!r} leads out of the checkpoint")
    root = folder.resolve()
    try:
        real = (root / name).resolve(strict=True)
    except (OSError, RuntimeError):
        raise CheckpointError(f"{folder}: the file {name} is missing") from None
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not any(real.is_relative_to(place) for place in allowed):
        raise CheckpointError(f"{folder}: {name} is a link that leads out of the checkpoint")
    if not real.is_file():
        raise CheckpointError(f"{folder}: {name} is no regular file")
    return real


def _weight_map(index: Path) -> dict[str, str]:
    mapping = read_json(safe_file(index.parent, index.name)).get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(f, str) for f in mapping.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files")
    return mapping


def _no_safetensors(path: Path) -> str:
    if any(path.glob("*.bin")):
        source, into = json.dumps(str(path)), json.dumps(f"{path.resolve().name}-safetensors")
        code = (
            "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
            f'M.from_pretrained({source}, dtype="auto").save_pretrained({into}); '
            f"T.from_pretrained({source}).save_pretrained({into})"
        )
        return f"{path} has only .bin weights; convert them first: python -c {shlex.quote(code)}"
    return f"{path} has no safetensors weights"
