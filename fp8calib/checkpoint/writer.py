"""Writing a checkpoint: the source's weights byte for byte, and the scales as one more shard.

A lone ``model.safetensors`` must not stay under that name: transformers would take it, ignore the
index, and run on scales that were never set. So all shards are renumbered, the scales are the last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from fp8calib.checkpoint.card import model_card
from fp8calib.checkpoint.config import layer_count, text_config
from fp8calib.checkpoint.folder import SIDECAR, check_output, check_room, copy_file, staged
from fp8calib.checkpoint.json_file import read_json
from fp8calib.checkpoint.names import CURRENT, PROJECTION, scale_name
from fp8calib.checkpoint.paths import safe_file
from fp8calib.checkpoint.reader import INDEX, MODELOPT, Checkpoint, open_checkpoint
from fp8calib.checkpoint.safetensors_file import copy_without
from fp8calib.checkpoint.scheme import (
    METHOD,
    check_method,
    check_scheme,
    modelopt_file,
    needed_kv_cache_dtype,
    quantization_config,
    with_modelopt,
    with_scheme,
)
from fp8calib.console import progress
from fp8calib.errors import CheckpointError
from fp8calib.layers import LayerSpec
from fp8calib.scales import ScaleSet, Strategy, problems, require

SCHEMA_VERSION = 1
_WEIGHTS = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".ot", ".gguf", ".onnx",
    ".onnx_data", ".tflite", ".mlmodel", ".npz", ".pdparams",
}  # fmt: skip
_REPLACED = {"config.json", "README.md", SIDECAR}


def check_source(
    source: Path | str, replace_scales: bool = False, strategy: Strategy = "tensor"
) -> Checkpoint:
    """Open a model that scales are to be added to; what stands in the way is found here, before any
    expensive work. With `replace_scales` it may have KV scales already.

    Raises:
        CheckpointError: unreadable; weights that are not safetensors; quantized by a method whose
            scale names we do not write; a scheme that is refused; KV scales that are there already.
    """
    checkpoint = open_checkpoint(source)
    check_method(checkpoint.config, strategy)
    quantization = (checkpoint.modelopt or {}).get("quantization")
    if isinstance(quantization, dict) and quantization.get("quant_algo"):
        raise CheckpointError(
            f"{source} is quantized by an older modelopt ({MODELOPT}, nothing in config.json): "
            "export it again with a newer one"
        )
    if absent := checkpoint.missing_layers:
        raise CheckpointError(
            f"{source}: config.json has {layer_count(text_config(checkpoint.config))} layers, the "
            f"weights hold nothing of {'layers' if len(absent) > 1 else 'layer'} "
            f"{', '.join(map(str, absent[:8]))}: a file is missing, or config.json is another's"
        )
    _ = checkpoint.strategy  # refuses a scheme that we would not know how to continue
    for file in companions(checkpoint.path):
        safe_file(checkpoint.path, str(file))
    there = [scale.tensor for kinds in checkpoint.scales.values() for scale in kinds.values()]
    if there and not replace_scales:
        raise CheckpointError(
            f"{source} already has KV-cache scales ({there[0]}): start from the original model, or "
            "replace them with --overwrite-scales"
        )
    return checkpoint


def write_checkpoint(
    source: Path | str,
    output: Path | str,
    scales: ScaleSet,
    sidecar: dict[str, Any],
    *,
    layers: Sequence[LayerSpec],
    link: bool = False,
    overwrite: bool = False,
    replace_scales: bool = False,
    more_files: Mapping[str, bytes] | None = None,
    form: str = CURRENT,
    name: str | None = None,
) -> None:
    """Write `source` with `scales` added as a new checkpoint folder, whole or not at all.

    Args:
        source: a Hugging Face folder with safetensors weights; it is only read.
        output: the folder to make.
        scales: one LayerScales for each of `layers`.
        sidecar: how the scales came about; becomes fp8calib.json (`schema_version` is added).
        layers: the model's attention layers, as calibration found them.
        link: hard-link the weights instead of copying them. Editing one then edits the other.
        overwrite: replace an earlier output of fp8calib at `output`.
        replace_scales: leave out KV scales that `source` has, instead of refusing it.
        more_files: contents of further files by name.
        form: of the scales' names, CURRENT or PROJECTION (ModelOpt's, per tensor and without q).
        name: what the model card calls the checkpoint; the folder's name where None.

    Raises:
        ScaleError: scales that are missing or unfit; nothing is written.
        CheckpointError: a source or output that is refused, a full disk, or a result that does not
            read back as what was meant.
    """
    source, output = Path(source), Path(output)
    require(problems(scales, layers), "the scales cannot be written")
    check_output(output, overwrite, source)
    checkpoint = check_source(source, replace_scales, scales.strategy)
    if not link:
        check_room(output, checkpoint.weight_files)
    modelopt = form == PROJECTION
    config = (with_modelopt if modelopt else with_scheme)(checkpoint.config, scales.strategy)
    tensors = _scale_tensors(checkpoint, scales, form)
    with staged(output, overwrite) as folder:
        _write_weights(checkpoint, folder, tensors, link)
        _write_companions(checkpoint.path, folder, more_files or {})
        _write_modelopt_file(checkpoint.path, folder, config, modelopt)
        _write_json(folder / SIDECAR, {"schema_version": SCHEMA_VERSION} | sidecar)
        dtype = needed_kv_cache_dtype(config)
        card = model_card(source, name or output.resolve().name, scales, sidecar, dtype)
        (folder / "README.md").write_text(card, encoding="utf-8")
        _write_json(folder / "config.json", config)  # last: without it, no loader takes the folder
        _check_written(folder, scales, layers, config)


def _write_companions(source: Path, folder: Path, more_files: Mapping[str, bytes]) -> None:
    for file in companions(source):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        copy_file(safe_file(source, str(file)), folder / file)
    for name, content in more_files.items():
        (folder / name).write_bytes(content)


def _write_modelopt_file(
    source: Path, folder: Path, config: dict[str, Any], modelopt: bool
) -> None:
    """Let hf_quant_config.json say what config.json does: ModelOpt's form has one, and of other
    forms only those whose weights ModelOpt quantized."""
    there = (source / MODELOPT).exists()
    if modelopt:
        earlier = read_json(safe_file(source, MODELOPT)) if there else None
        _write_json(folder / MODELOPT, modelopt_file(config, earlier))
    elif there and (quantization_config(config) or {}).get("quant_method") == METHOD:
        (folder / MODELOPT).unlink()


def _scale_tensors(checkpoint: Checkpoint, scales: ScaleSet, form: str) -> dict[str, np.ndarray]:
    """The scale tensors by name, in the shapes that vLLM and transformers read: [1] for `tensor`,
    [heads, 1, 1] for `attn_head`; ModelOpt's are scalars.

    The modules of a loaded model may be called otherwise than in the file (a composite model's
    language part, GPT-2 without its prefix); the file's own name of the layer is the one written.
    """
    own = {layer.index: layer.name for layer in checkpoint.layers}
    tensors = {}
    for index, layer in scales.layers.items():
        module = own.get(index, layer.name)
        if not any(name.startswith(f"{module}.") for name in checkpoint.tensors):
            raise CheckpointError(
                f"{checkpoint.path} has no weights of an attention module {module}"
            )
        for kind, values in layer.items():
            shape: tuple[int, ...] = (1,) if scales.strategy == "tensor" else (-1, 1, 1)
            shape = () if form == PROJECTION else shape
            tensors[scale_name(module, kind, form)] = values.astype("<f4").reshape(shape)
    return tensors


def _write_weights(
    checkpoint: Checkpoint, folder: Path, tensors: dict[str, np.ndarray], link: bool
) -> None:
    """Copy the weight files under new numbers, without KV scales that they may have had; write the
    scales' shard and the index of all."""
    dropped: dict[Path, set[str]] = {}
    for name in checkpoint.scale_tensors:
        dropped.setdefault(checkpoint.tensors[name].file, set()).add(name)
    kept = {
        name: info
        for name, info in checkpoint.tensors.items()
        if info.file in checkpoint.weight_files and name not in checkpoint.scale_tensors
    }
    filled = {info.file for info in kept.values()}
    files = [path for path in checkpoint.weight_files if path in filled or path not in dropped]
    *shards, last = (
        f"model-{number:05}-of-{len(files) + 1:05}.safetensors"
        for number in range(1, len(files) + 2)
    )
    renamed = dict(zip(files, shards, strict=True))
    size = sum(path.stat().st_size for path in files)
    with progress("writing weights (MB)", size // 10**6) as bar:
        for path, new in renamed.items():
            if path in dropped:
                copy_without(path, folder / new, dropped[path])
            else:
                copy_file(path, folder / new, link)
            bar.advance(path.stat().st_size // 10**6)
    (folder / last).write_bytes(save(tensors, metadata={"format": "pt"}))
    metadata = _index_metadata(checkpoint)
    metadata["total_size"] = sum(info.end - info.start for info in kept.values()) + sum(
        values.nbytes for values in tensors.values()
    )
    where = {name: renamed[info.file] for name, info in kept.items()}
    where |= dict.fromkeys(tensors, last)
    _write_json(folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(where.items()))})


def _index_metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    if not checkpoint.has_index:
        return {}
    metadata = read_json(safe_file(checkpoint.path, INDEX)).get("metadata")
    return dict(metadata) if isinstance(metadata, dict) else {}


def companions(source: Path) -> Iterator[Path]:
    """The files that belong to the model beside its weights, relative to `source`: tokenizer, chat
    templates, generation config, code, licence. Not weights in any format (nor folders that hold
    some: the same model in another form), not hidden files, not what the output has its own of."""
    for path in sorted(source.iterdir()):
        if path.name.startswith(".") or path.name == "__pycache__":
            continue
        if path.is_dir():
            inside = [file for file in sorted(path.rglob("*")) if file.is_file()]
            if not any(map(_is_weights, inside)):
                yield from (
                    file.relative_to(source)
                    for file in inside
                    if not any(part.startswith(".") for part in file.relative_to(source).parts)
                )
        elif not _is_weights(path) and path.name not in _REPLACED:
            yield path.relative_to(source)


def _is_weights(path: Path) -> bool:
    name = path.name.removesuffix(".index.json")
    return any(name.endswith(suffix) for suffix in _WEIGHTS)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_written(
    folder: Path, scales: ScaleSet, layers: Sequence[LayerSpec], config: dict[str, Any]
) -> None:
    """Read everything back and compare bit for bit, before the folder gets its name."""
    written = open_checkpoint(folder)
    found = {
        (index, kind): scale.values.tobytes()
        for index, kinds in written.scales.items()
        for kind, scale in kinds.items()
    }
    meant = {
        (index, kind): values.astype("<f4").tobytes()
        for index, layer in scales.layers.items()
        for kind, values in layer.items()
    }
    declared = check_scheme(config)
    if found != meant or written.strategy != declared or written.stray:
        raise CheckpointError("the checkpoint does not read back as it was meant to be written")
    unobserved = {layer.index: layer.name for layer in written.layers}
    for layer in layers:
        unobserved.pop(layer.index, None)
    if unobserved:
        listed = ", ".join(unobserved.values())
        raise CheckpointError(f"the weights hold attention layers that have no scales: {listed}")
