"""`convert` and `merge`: the same scales in another form, and scales put into a checkpoint.

Every way in ends in one validator (`fp8calib.scales.problems`) before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fp8calib.checkpoint import names
from fp8calib.checkpoint.config import text_config
from fp8calib.checkpoint.findings import uncalibrated
from fp8calib.checkpoint.folder import STDOUT, check_file, check_output, write_file
from fp8calib.checkpoint.formats import (
    Format,
    ScaleFile,
    format_named,
    losses,
    own_json,
    param_json,
    read_scale_file,
    trtllm,
)
from fp8calib.checkpoint.inspection import inspect
from fp8calib.checkpoint.paths import safe_file
from fp8calib.checkpoint.reader import Checkpoint, open_checkpoint, scales_of
from fp8calib.checkpoint.writer import check_source, write_checkpoint
from fp8calib.errors import CheckpointError, ScaleError
from fp8calib.layers import LayerSpec, resolve_skip_layers
from fp8calib.scales import LayerScales, ScaleSet, label, problems, require

HISTOGRAMS = "fp8calib-histograms.npz"  # what `rescale` needs; see calibration/record.py


@dataclass(frozen=True)
class Conversion:
    """What was written. `lost` is what the format could not hold; `notes` are worth knowing."""

    source: str
    output: Path
    format: str
    strategy: str
    layers: int
    lost: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    serve: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"output": str(self.output)}


@dataclass(frozen=True)
class _Source:
    """Scales from anywhere, and the checkpoint they lay in if they lay in one."""

    file: ScaleFile
    checkpoint: Checkpoint | None = None


def convert(
    source: str | Path,
    to: str,
    output: str | Path,
    *,
    collapse_heads: str | None = None,
    tp: int = 1,
    link: bool = False,
    overwrite: bool = False,
    name: str | None = None,
) -> Conversion:
    """Write the scales of `source` in the format `to`.

    Args:
        source: a checkpoint (folder, Hub id, embedded model) or a file of scales in any format.
        to: a name in `fp8calib.checkpoint.formats.FORMATS`.
        output: the file to make, ``-`` for standard output, or the folder where the format is a
            checkpoint.
        collapse_heads: ``max`` makes one scale of a layer's per-head ones.
        tp: ranks that an sglang file is for.
        link: hard-link the weights instead of copying them.
        overwrite: replace an earlier output.
        name: what the model card calls the checkpoint.

    Raises:
        ScaleError: scales that cannot be used, or that the format cannot hold.
        CheckpointError: an unreadable source, or an output that is in the way.
    """
    target, output = format_named(to), Path(output)
    _check_target(target, output, tp, overwrite)
    found = _read(str(source))
    lost, file = _fit(found.file, target, collapse_heads, sharded=target.name == "sglang")
    notes = [*found.file.notes, *uncalibrated(found.file.scales)]
    if target.with_weights:
        if found.checkpoint is None:
            raise CheckpointError(
                f"{source} holds no weights: `fp8calib merge CHECKPOINT {source}` puts its scales "
                "into a checkpoint"
            )
        serve, found_in_it = _write_into(
            found.checkpoint, file, output, target,
            _sidecar(found.checkpoint, found.file.scales, file.scales),
            link=link, overwrite=overwrite, name=name, same_calibration=True,
        )  # fmt: skip
        notes = [*found.file.notes, *found_in_it]
    else:
        serve = None
        write_file(output, _content(file, target, tp), overwrite)
    strategy, count = file.scales.strategy if target.per_head else "tensor", len(file.scales.layers)
    return Conversion(str(source), output, to, strategy, count, lost, notes, serve)


def _content(file: ScaleFile, target: Format, tp: int) -> bytes:
    if target.name == "sglang":
        return param_json.write(file, tp)
    return trtllm.write(file) if target.name == "trtllm" else own_json.write(file)


def merge(
    checkpoint: str | Path,
    scales: str | Path,
    output: str | Path,
    *,
    to: str = "compressed-tensors",
    collapse_heads: str | None = None,
    link: bool = False,
    overwrite: bool = False,
    overwrite_scales: bool = False,
    name: str | None = None,
) -> Conversion:
    """Write `checkpoint` with `scales`, which may be a file in any format or another checkpoint.

    Args:
        checkpoint: the model that the scales are for.
        scales: where they come from.
        output: the folder to make.
        to: the form of the checkpoint: compressed-tensors or modelopt.
        collapse_heads, link, overwrite, name: as in `convert`.
        overwrite_scales: replace scales that `checkpoint` has.

    Raises:
        ScaleError: scales that do not fit the model, layer by layer.
        CheckpointError: a checkpoint that is refused, or an output that is in the way.
    """
    target, output = format_named(to), Path(output)
    if not target.with_weights:
        raise ScaleError(f"{to} is a file without weights: use `fp8calib convert --to {to}`")
    folder = _local(str(checkpoint))
    check_output(output, overwrite, folder)
    found = _read(str(scales))
    lost, file = _fit(found.file, target, collapse_heads)
    opened = check_source(folder, overwrite_scales, file.scales.strategy)
    notes = list(found.file.notes)
    sidecar = {
        "model": str(checkpoint),
        "strategy": file.scales.strategy,
        "merged_from": Path(scales).name,
        "skip_layers": list(file.skip_layers),
    }
    notes += _other_model(found.file.model_type, opened)
    serve, found_in_it = _write_into(
        opened, file, output, target, sidecar,
        link=link, overwrite=overwrite, name=name, replace=overwrite_scales,
    )  # fmt: skip
    notes += found_in_it
    strategy, count = file.scales.strategy, len(file.scales.layers)
    return Conversion(str(scales), output, to, strategy, count, lost, notes, serve)


def _other_model(theirs: str | None, checkpoint: Checkpoint) -> list[str]:
    ours = text_config(checkpoint.config).get("model_type")
    if theirs in (None, ours):
        return []
    return [f"the scales are those of a {theirs} model, the checkpoint's type is {ours}"]


def load_scales(source: str | Path) -> ScaleSet:
    """The scales of a checkpoint or of a file in any format, checked; what `LLM.reload_scales`
    takes.

    Raises:
        ScaleError: none there, or some that cannot be used.
        CheckpointError: an unreadable source.
    """
    return _read(str(source)).file.scales


def _check_target(target: Format, output: Path, tp: int, overwrite: bool) -> None:
    if tp != 1 and target.name != "sglang":
        raise ScaleError("--tp is for the sglang format, whose file is for a number of ranks")
    if target.with_weights:
        check_output(output, overwrite)
    elif {output.suffix, target.suffix} == {".json", ".safetensors"}:  # it would not be read back
        raise ScaleError(f"{output}: {target.name} scales go into a file named {target.suffix}")
    elif output == STDOUT and target.suffix != ".json":
        raise ScaleError(
            f"the output - is stdout, and {target.name} scales are no text: name a file"
        )
    else:
        check_file(output, overwrite)


def _local(source: str) -> Path:
    from fp8calib.models import resolve_model

    return Path(source) if source and Path(source).is_dir() else resolve_model(source)


def _read(source: str) -> _Source:
    path = Path(source)
    if path.is_file() or (source and path.is_dir() and trtllm.recognise(path)):
        return _Source(read_scale_file(path))
    checkpoint = open_checkpoint(_local(source))
    model_type = text_config(checkpoint.config).get("model_type")
    skip = tuple(checkpoint.recorded_skip_layers)
    return _Source(ScaleFile(scales_of(checkpoint), model_type, skip), checkpoint)


def _fit(
    file: ScaleFile, target: Format, collapse_heads: str | None, sharded: bool = False
) -> tuple[list[str], ScaleFile]:
    """What is lost, and the scales as `target` can hold them. `sharded`: heads are collapsed by
    the writer, rank by rank."""
    if collapse_heads not in (None, "max"):
        raise ScaleError(f"--collapse-heads {collapse_heads!s:.40}: max is the one way there is")
    lost = losses(file.scales, target, file.skip_layers)
    scales = file.scales
    if scales.strategy == "attn_head" and not target.per_head and collapse_heads is None:
        raise ScaleError(
            f"{target.name} holds one scale a layer and the source one per head: "
            "pass --collapse-heads max to keep the largest of each layer"
        )
    if collapse_heads and not sharded:
        if scales.strategy == "attn_head" and target.per_head:
            lost.append("heads share the largest scale of their layer, as asked for")
        scales = scales.collapse_heads()
    if not target.query:
        layers = {i: LayerScales(a.name, a.k, a.v) for i, a in scales.layers.items()}
        scales = ScaleSet(scales.strategy, layers)
    return lost, ScaleFile(scales, file.model_type, file.skip_layers, file.notes)


def _write_into(
    checkpoint: Checkpoint,
    file: ScaleFile,
    output: Path,
    target: Format,
    sidecar: dict[str, Any],
    *,
    link: bool,
    overwrite: bool,
    name: str | None,
    replace: bool = True,
    same_calibration: bool = False,
) -> tuple[str | None, list[str]]:
    """Write the checkpoint; returns the command that serves it, and what `inspect` finds in it."""
    layers = checkpoint.layers
    if not layers:
        raise CheckpointError(
            f"{checkpoint.path}: no attention layer is recognised in the weights, so scales cannot "
            "be placed"
        )
    require(_misnamed(file.scales, layers), "the scales do not fit the checkpoint")
    require(problems(file.scales, layers), "the scales do not fit the checkpoint")
    skip = list(file.skip_layers)
    if skip:
        skip, _ = resolve_skip_layers(skip, layers)
    histograms = checkpoint.path / HISTOGRAMS
    keep = same_calibration and histograms.is_file()
    write_checkpoint(
        checkpoint.path,
        output,
        file.scales,
        sidecar | {"skip_layers": skip},
        layers=layers,
        link=link,
        overwrite=overwrite,
        replace_scales=replace,
        more_files={HISTOGRAMS: safe_file(checkpoint.path, HISTOGRAMS).read_bytes()}
        if keep
        else {},
        form=names.PROJECTION if target.name == "modelopt" else names.CURRENT,
        name=name,
    )
    written = inspect(output)
    return (written.serve if written.ok else None), written.problems


def _misnamed(scales: ScaleSet, layers: Sequence[LayerSpec]) -> list[str]:
    """Scales whose module is another than the model has at that index. What comes before the
    layers' own part differs between a composite model and its language model, and may."""
    own = {layer.index: layer.name for layer in layers}
    return [
        f"{label(index, layer.name)}: the model's is {own[index]}"
        for index, layer in scales.layers.items()
        if layer.name and index in own and _tail(layer.name) != _tail(own[index])
    ]


def _tail(module: str) -> str:
    """``model.language_model.layers.3.self_attn`` as ``layers.3.self_attn``."""
    parts = module.split(".")
    at = max((i for i, part in enumerate(parts) if part.isdecimal()), default=1)
    return ".".join(parts[max(at - 1, 0) :])


def _sidecar(checkpoint: Checkpoint, before: ScaleSet, scales: ScaleSet) -> dict[str, Any]:
    """The source's own record, brought up to date; of a checkpoint by others, that it was so. What
    was measured with the scales `before` does not stand for others."""
    record = dict(checkpoint.sidecar or {"converted_from": checkpoint.path.name})
    record.pop("schema_version", None)
    record |= {"strategy": scales.strategy, "query": scales.has_query}
    if (before.strategy, before.has_query) != (scales.strategy, scales.has_query):
        for measured in ("accuracy", "sensitivity"):
            record.pop(measured, None)
    recipe = record.get("recipe")
    if isinstance(recipe, dict) and isinstance(recipe.get("calibration"), dict):
        asked = recipe["calibration"] | {"strategy": scales.strategy, "query": scales.has_query}
        record["recipe"] = recipe | {"calibration": asked}
    return record
