"""What stays of a calibration beside its scales: fp8calib.json for people, the histograms for
`rescale`.

The histograms lie in an .npz file: loaders take every .safetensors file of a folder for weights.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from fp8calib import __version__
from fp8calib.calibration.statistics import BUCKETS, SINK_POSITIONS, Ranges
from fp8calib.data import TokenData
from fp8calib.errors import CheckpointError
from fp8calib.layers import LayerSpec
from fp8calib.recipe import Recipe
from fp8calib.scales import KINDS, Kind

HISTOGRAMS = "fp8calib-histograms.npz"
_MAX_BYTES = 4 << 30  # unpacked; the statistics of a model with 100 layers of 64 heads take 200 MB
_PERCENTILES = {"p99_9": 99.9, "p99_99": 99.99, "p99_999": 99.999}
_PACKAGES = ("llmcompressor", "compressed-tensors", "transformers", "torch")

_LAYER = TypeAdapter(LayerSpec)

AllRanges = Mapping[int, Mapping[Kind, Ranges]]


def describe_data(data: TokenData) -> dict[str, Any]:
    return {
        "name": data.source,
        "split": data.split,
        "columns": list(data.columns),
        "samples": len(data.rows),
        "requested": data.requested,
        "tokens": data.num_tokens,
        "fingerprint": data.fingerprint,
    }


def sidecar(
    model: str,
    recipe: Recipe,
    dataset: Mapping[str, Any],
    layers: Sequence[LayerSpec],
    ranges: AllRanges,
    **more: Any,
) -> dict[str, Any]:
    """The content of fp8calib.json: the recipe as it was resolved, and every layer's statistics."""
    asked = recipe.calibration
    return {
        "model": model,
        "strategy": asked.strategy,
        "observer": asked.observer,
        "margin": asked.margin,
        "query": asked.query,
        "skip_layers": list(asked.kv_cache_dtype_skip_layers),
        "dataset": dict(dataset),
        "recipe": recipe.model_dump(mode="json", exclude_none=True),
        "versions": {"fp8calib": __version__} | {name: version(name) for name in _PACKAGES},
        **more,
        "layers": {
            str(layer.index): {"name": layer.name, "spec": asdict(layer)}
            | {kind: _statistics(found) for kind, found in ranges[layer.index].items()}
            for layer in layers
        },
    }


def _statistics(ranges: Ranges) -> dict[str, Any]:
    return {
        "amax": ranges.amax.tolist(),
        f"amax_after_{SINK_POSITIONS}": ranges.late_amax.tolist(),
        **{name: ranges.percentile(p).tolist() for name, p in _PERCENTILES.items()},
        "rms": ranges.rms().tolist(),
        "count": ranges.count,
        "text": ranges.text.tolist(),
    }


def layers_of(record: Mapping[str, Any], path: Path) -> list[LayerSpec]:
    """The attention layers that fp8calib.json (`record`) tells of; raises CheckpointError."""
    try:
        layers = [_LAYER.validate_python(layer["spec"]) for layer in record["layers"].values()]
    except (KeyError, TypeError, AttributeError, ValidationError):
        layers = []
    if not layers or len({layer.index for layer in layers}) != len(layers):
        raise CheckpointError(f"{path}: fp8calib.json does not describe the layers")
    if not all(0 <= layer.index < 10_000 and 0 < _heads(layer) < 100_000 for layer in layers):
        raise CheckpointError(f"{path}: fp8calib.json describes layers that no model has")
    return layers


def _heads(layer: LayerSpec) -> int:
    """Query heads; 0 for head counts that do not go together."""
    sound = layer.num_kv_heads > 0 and layer.num_heads % layer.num_kv_heads == 0
    return layer.num_heads if sound else 0


def pack(ranges: AllRanges) -> bytes:
    """The statistics of all layers as an .npz file with arrays ``LAYER.KIND.FIELD``; equal
    statistics give equal bytes."""
    arrays = {
        f"{index}.{kind}.{field.name}": getattr(found, field.name)
        for index, kinds in sorted(ranges.items())
        for kind, found in kinds.items()
        for field in fields(Ranges)
    }
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def unpack(path: Path) -> dict[int, dict[Kind, Ranges]]:
    """Read what `pack` made.

    Raises:
        CheckpointError: the file is missing, damaged, or holds something else.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > _MAX_BYTES:
                raise CheckpointError(f"{path}: unpacks to more than {_MAX_BYTES >> 30} GiB")
        with np.load(path, allow_pickle=False) as arrays:
            loaded = {name: arrays[name] for name in arrays.files}
        slots = {(int(index), kind) for index, kind, _ in (name.split(".") for name in loaded)}
        found: dict[int, dict[Kind, Ranges]] = {}
        for index, kind in sorted(slots, key=lambda slot: (slot[0], KINDS.index(slot[1]))):
            values = {f.name: loaded[f"{index}.{kind}.{f.name}"] for f in fields(Ranges)}
            found.setdefault(index, {})[kind] = _checked(Ranges(**values))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: calibrate again to have it") from None
    except (
        OSError, ValueError, KeyError, EOFError, RuntimeError, MemoryError, NotImplementedError,
        zipfile.BadZipFile, zlib.error,
    ) as problem:  # fmt: skip
        reason = str(problem).splitlines() or [type(problem).__name__]
        raise CheckpointError(f"{path} is damaged: {reason[0]:.200}") from None
    if not found:
        raise CheckpointError(f"{path} is damaged: it holds no statistics")
    return found


def check_ranges(layers: Sequence[LayerSpec], ranges: AllRanges, path: Path) -> None:
    """Raise CheckpointError unless `ranges` hold the statistics of `layers`."""
    for layer in layers:
        for kind in ("k", "v", "q"):
            found = ranges.get(layer.index, {}).get(kind)
            heads = layer.num_heads if kind == "q" else layer.num_kv_heads
            if (kind != "q" and found is None) or (found and len(found.amax) != heads):
                raise CheckpointError(
                    f"{path} does not fit fp8calib.json: layer {layer.index}'s {kind} has "
                    f"{len(found.amax) if found else 'no'} heads of {heads}"
                )
    if extra := sorted(ranges.keys() - {layer.index for layer in layers}):
        raise CheckpointError(f"{path} does not fit fp8calib.json: it has a layer {extra[0]}")


def _checked(ranges: Ranges) -> Ranges:
    heads = ranges.amax.shape
    sound = (
        len(heads) == 1
        and heads[0] > 0
        and ranges.late_amax.shape == ranges.text.shape == heads
        and ranges.histogram.shape == (*heads, BUCKETS)
        and ranges.text_amax.ndim == 1
        and ranges.histogram.dtype == ranges.text.dtype == np.int64
        and all(x.dtype == np.float32 for x in (ranges.amax, ranges.late_amax, ranges.text_amax))
    )
    if not sound:
        raise ValueError("arrays of unexpected shapes or types")
    counts = ranges.histogram
    maxima = (ranges.amax, ranges.late_amax)
    if (counts < 0).any() or (counts > 2**48).any() or not counts.sum():
        raise ValueError("counts that cannot be")
    if not all(np.isfinite(x).all() and (x >= 0).all() for x in maxima):
        raise ValueError("maxima that are not finite or negative")
    return ranges
