"""The JSON that SGLang takes as --quantization-param-path, and vLLM took until 0.6.

One factor a layer and tensor-parallel rank, for K and V alike: ``{"model_type": ..., "kv_cache":
{"dtype": "float8_e4m3fn", "scaling_factor": {RANK: {LAYER: factor}}}}``. A factor is a
dequantization multiplier, as here. SGLang 0.5.23 (model_loader/weight_utils.py) wants `model_type`
to be the model's, as many ranks as it runs on, and an entry for each of the layers; where a file
is otherwise it logs a warning and runs at 1.0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from fp8calib.checkpoint.formats import ScaleFile
from fp8calib.checkpoint.formats.own_json import explain
from fp8calib.checkpoint.json_file import read_json
from fp8calib.checkpoint.sharding import shard
from fp8calib.errors import ScaleError
from fp8calib.scales import LayerScales, ScaleSet, problems, require

MAX_RANKS = 1024


class _KVCache(BaseModel):
    model_config = ConfigDict(strict=True)

    dtype: Literal["float8_e4m3fn"]
    scaling_factor: dict[str, dict[str, float]]


class _File(BaseModel):
    model_config = ConfigDict(strict=True, protected_namespaces=())

    model_type: str | None = None
    kv_cache: _KVCache


def recognise(path: Path) -> bool:
    return "kv_cache" in read_json(path)


def read(path: Path) -> ScaleFile:
    """The scales in `path`: per tensor, K's and V's the same; where ranks differ, the largest.

    Raises:
        ScaleError: anything that SGLang would not take, or factors that cannot be used.
    """
    try:
        file = _File.model_validate(read_json(path, unique=True))
    except ValidationError as problem:
        raise ScaleError(f"{path}: {explain(problem)}") from None
    ranks = [_rank(path, *entry) for entry in file.kv_cache.scaling_factor.items()]
    if not ranks:
        raise ScaleError(f"{path}: scaling_factor has no ranks")
    require(_disagreements(ranks), str(path))
    merged, differ = {}, 0
    for index in sorted(ranks[0][1]):
        factors = np.concatenate([factors[index].k for _, factors in ranks])
        differ += len(set(factors.tolist())) > 1
        largest = factors.max(keepdims=True)
        merged[index] = LayerScales("", largest, largest)
    notes = ["one factor a layer stands for both K and V"]
    if differ:
        notes.append(f"ranks have different factors in {differ} layers: the largest counts")
    return ScaleFile(ScaleSet("tensor", merged), file.model_type, notes=notes)


def _rank(path: Path, rank: str, factors: dict[str, float]) -> tuple[int, dict[int, LayerScales]]:
    layers: dict[int, LayerScales] = {}
    for layer, factor in factors.items():
        if not _number(layer):
            raise ScaleError(f"{path}: rank {rank:.20}: {layer!r:.40} is no layer's index")
        if int(layer) in layers:
            raise ScaleError(f"{path}: rank {rank:.20}: layer {int(layer)} occurs twice")
        with np.errstate(over="ignore"):
            value = np.asarray([factor], dtype=np.float64).astype(np.float32)
        layers[int(layer)] = LayerScales("", value, value)
    if not _number(rank):
        raise ScaleError(f"{path}: {rank!r:.40} is no rank")
    require(problems(ScaleSet("tensor", layers), None), f"{path}: rank {rank}")
    return int(rank), layers


def _number(text: str) -> bool:
    return len(text) <= 6 and text.isascii() and text.isdecimal()


def _disagreements(ranks: list[tuple[int, dict[int, LayerScales]]]) -> Iterator[str]:
    numbers = [rank for rank, _ in ranks]
    if sorted(numbers) != list(range(len(numbers))):
        yield f"ranks are {', '.join(map(str, sorted(numbers)[:8]))}, expected 0, 1 and so on"
    every = {index for _, factors in ranks for index in factors}
    for rank, factors in ranks:
        for index in sorted(every - factors.keys()):
            yield f"layer {index} is missing in rank {rank}"
    for index in sorted(set(range(max(every) + 1)) - every):
        yield f"layer {index} is missing"


def write(file: ScaleFile, tp: int = 1) -> bytes:
    """The content of the file for `tp` ranks. From per-head scales, a rank's factor is the maximum
    over its own heads.

    Raises:
        ScaleError: scales that the format cannot hold.
    """
    if not file.model_type:
        raise ScaleError("the sglang format names the model's type, which the source does not tell")
    layers = file.scales.layers
    require(
        (f"layer {i} is missing" for i in sorted(set(range(max(layers) + 1)) - layers.keys())),
        "the sglang format has a factor for every layer",
    )
    if not 1 <= tp <= MAX_RANKS:
        raise ScaleError(f"--tp {tp}: a number of ranks is 1 to {MAX_RANKS}")
    ranks = {str(rank): _factors(shard(file.scales, tp, rank)) for rank in range(tp)}
    content = {
        "model_type": file.model_type,
        "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": ranks},
    }
    return (json.dumps(content, indent=1) + "\n").encode()


def _factors(scales: ScaleSet) -> dict[str, float]:
    return {
        str(index): float(str(max(layer.k[0], layer.v[0])))
        for index, layer in sorted(scales.collapse_heads().layers.items())
    }
