"""What stays of a calibration beside its scales: fp8calib.json for people, the histograms for
`rescale`.

The histograms lie in an .npz file: loaders take every .safetensors file of a folder for weights.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

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
        return [LayerSpec(**layer["spec"]) for layer in record["layers"].values()]
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path}: fp8calib.json does not describe the layers") from None


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
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as problem:
        raise CheckpointError(f"{path} is damaged: {problem}") from None
    return found


def _checked(ranges: Ranges) -> Ranges:
    heads = ranges.amax.shape
    sound = (
        len(heads) == 1
        and ranges.late_amax.shape == ranges.text.shape == heads
        and ranges.histogram.shape == (*heads, BUCKETS)
        and ranges.text_amax.ndim == 1
        and ranges.histogram.dtype == ranges.text.dtype == np.int64
        and all(x.dtype == np.float32 for x in (ranges.amax, ranges.late_amax, ranges.text_amax))
    )
    if not sound:
        raise ValueError("arrays of unexpected shapes or types")
    return ranges
