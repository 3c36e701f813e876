"""Reading a checkpoint: which files its loaders take, its layers, and every scale in it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fp8calib.checkpoint import names
from fp8calib.checkpoint.config import read_config
from fp8calib.checkpoint.folder import SIDECAR
from fp8calib.checkpoint.json_file import read_json
from fp8calib.checkpoint.paths import safe_file
from fp8calib.checkpoint.safetensors_file import TensorInfo, read_header, read_scale
from fp8calib.checkpoint.scheme import check_modelopt, check_scheme, quantization_config
from fp8calib.checkpoint.structure import is_foreign, layers_from_checkpoint, missing_layers
from fp8calib.errors import CheckpointError, ScaleError
from fp8calib.layers import LayerSpec
from fp8calib.scales import Kind, LayerScales, ScaleSet, Strategy, label, problems, require

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MODELOPT = "hf_quant_config.json"
_MAX_TENSORS = 1_000_000  # in all files together
_MAX_SCALES = 100_000


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
        return check_scheme(self.config) or check_modelopt(self.modelopt)

    @cached_property
    def modelopt(self) -> dict[str, Any] | None:
        """What modelopt's own file says of the quantization, which counts where config.json says
        nothing; None where there is no such file."""
        if quantization_config(self.config) is not None or not (self.path / MODELOPT).exists():
            return None
        return read_json(safe_file(self.path, MODELOPT))

    @cached_property
    def layers(self) -> list[LayerSpec]:
        return layers_from_checkpoint(self.config, self.tensors)

    @cached_property
    def missing_layers(self) -> list[int]:
        """Layers that config.json claims, of which the weights hold nothing."""
        return missing_layers(self.config, self.tensors)

    @property
    def scales(self) -> dict[int, dict[Kind, FoundScale]]:
        """Every scale, by layer index and kind. The current form of a name goes before older ones,
        a file that loaders read before one they do not."""
        return self._found[0]

    @property
    def misplaced(self) -> list[str]:
        """What makes `scales` doubtful, one line each: a scale given twice with different values,
        or for a module that is no attention layer of the model."""
        return self._found[1]

    @cached_property
    def _found(self) -> tuple[dict[int, dict[Kind, FoundScale]], list[str]]:
        found: dict[int, dict[Kind, FoundScale]] = {}
        misplaced = []
        for name, meaning, info, loaded in self._ranked():
            index = self._index(meaning.module)
            if index is None:
                misplaced.append(f"{name}: the model has no such attention layer")
                continue
            values = read_scale(name, info).reshape(-1)
            new = FoundScale(name, meaning.form, info.file.name, info.dtype, values, loaded)
            for kind in meaning.kinds:
                old = found.setdefault(index, {}).setdefault(kind, new)
                if loaded and old.loaded and old.values.tobytes() != values.tobytes():
                    misplaced.append(
                        f"layer {index}: {kind}_scale is given twice, by {old.tensor} and {name}"
                    )
        return dict(sorted(found.items())), misplaced

    def _ranked(self) -> list[tuple[str, names.ScaleName, TensorInfo, bool]]:
        modules = {layer.name for layer in self.layers}
        ranked = []
        for tensors, loaded in ((self.tensors, True), (self.stray, False)):
            for name, info in tensors.items():
                if meaning := names.parse(name, modules):
                    rank = (not loaded, meaning.form != names.CURRENT, name)
                    ranked.append((rank, (name, meaning, info, loaded)))
        if len(ranked) > _MAX_SCALES:
            raise CheckpointError(f"{self.path} has {len(ranked):,} scales: too many to be true")
        return [entry for _, entry in sorted(ranked, key=lambda item: item[0])]

    def _index(self, module: str) -> int | None:
        """Which layer's attention `module` is. Where the layers are recognised, only a module of
        their stack counts, or of one that is called otherwise and is none of another tower."""
        known = {layer.name: layer.index for layer in self.layers}
        if module in known:
            return known[module]
        return None if known and is_foreign(module) else last_number(module)

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


def last_number(module: str) -> int | None:
    parts = reversed(module.split("."))
    return next((int(part) for part in parts if part.isdecimal() and len(part) <= 6), None)


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
        if len(tensors) > _MAX_TENSORS:
            raise CheckpointError(f"{path} has more than {_MAX_TENSORS:,} tensors: no model does")
    for name, file in (mapping or {}).items():
        if name not in tensors:
            raise CheckpointError(f"{index} places {name!r:.80} in {file!r:.80}, which lacks it")
    unlisted = tuple(name for name in on_disk if name not in files)
    stray: dict[str, TensorInfo] = {}
    for name in unlisted:
        with suppress(CheckpointError):  # nobody loads it, so it may be anything
            stray.update(read_header(safe_file(path, name)))
    return Checkpoint(path, config, mapping is not None, files, unlisted, tensors, stray)


def read_scales(path: Path | str) -> ScaleSet:
    """The scales of a calibrated checkpoint, complete and checked; older names are understood.

    Raises:
        CheckpointError: the folder cannot be read, or declares a scheme that is refused.
        ScaleError: it has no scales, or some that cannot be used.
    """
    return scales_of(open_checkpoint(path))


def scales_of(checkpoint: Checkpoint) -> ScaleSet:
    """The scales of an open checkpoint; as `read_scales`."""
    path, strategy = checkpoint.path, checkpoint.strategy
    found = checkpoint.scales
    if not found:
        raise ScaleError(f"{path} has no KV-cache scales")
    if strategy is None:
        sizes = {scale.values.size for kinds in found.values() for scale in kinds.values()}
        strategy = "tensor" if sizes == {1} else "attn_head"
    require([*checkpoint.misplaced, *_incomplete(checkpoint)], str(path))
    scales = scale_set(checkpoint, strategy)
    require(problems(scales, checkpoint.layers or None), str(path))
    return scales


def _incomplete(checkpoint: Checkpoint) -> Iterator[str]:
    known = {layer.index: layer.name for layer in checkpoint.layers}
    for index in known or checkpoint.scales:
        for kind in ("k", "v"):
            if kind not in checkpoint.scales.get(index, {}):
                yield f"{label(index, known.get(index, ''))}: {kind}_scale is missing"


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
        return (
            f"{path} has only .bin weights; calibrate with --allow-pickle, or convert them first: "
            f"python -c {shlex.quote(code)}"
        )
    return f"{path} has no safetensors weights"
