"""TensorRT-LLM's checkpoints: ``transformer.layers.N.attention.kv_cache_scaling_factor``.

One float32 [1] a layer for K and V, a dequantization multiplier (docs/source/architecture/
checkpoint.md of TensorRT-LLM 0.17; ModelOpt 0.47 writes it as the larger of its k_cache_ and
v_cache_scaling_factor, which are read where they are there too). Weights of such a checkpoint have
their own layout, so what is written is a file of factors to put beside them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from fp8calib.checkpoint.config import layer_count
from fp8calib.checkpoint.formats import ScaleFile
from fp8calib.checkpoint.json_file import read_json
from fp8calib.checkpoint.paths import safe_file
from fp8calib.checkpoint.safetensors_file import TensorInfo, read_header, read_scale
from fp8calib.errors import ScaleError
from fp8calib.scales import LayerScales, ScaleSet, problems, require

_FACTOR = re.compile(r".*?\b(?P<index>\d{1,6})\.attention\.(?P<of>kv|k|v)_cache_scaling_factor")


def is_factor(name: str) -> bool:
    return _FACTOR.fullmatch(name) is not None


def recognise(folder: Path) -> bool:
    """Whether `folder` is a checkpoint of TensorRT-LLM rather than of transformers."""
    config = folder / "config.json"
    return config.is_file() and (folder / "rank0.safetensors").is_file()


def read_folder(folder: Path) -> ScaleFile:
    """The scales of a TensorRT-LLM checkpoint.

    Raises:
        ScaleError: no factors there, or some that cannot be used.
        CheckpointError: a damaged folder.
    """
    if not recognise(folder):
        raise ScaleError(f"{folder} is no checkpoint: it has no config.json and rank0.safetensors")
    config = read_json(safe_file(folder, "config.json"))
    quantization = config.get("quantization")
    algorithm = quantization.get("kv_cache_quant_algo") if isinstance(quantization, dict) else None
    if algorithm != "FP8":
        raise ScaleError(f"{folder}: kv_cache_quant_algo is {algorithm!r:.40}, not FP8")
    mapping = config.get("mapping")
    if isinstance(mapping, dict) and mapping.get("pp_size", 1) != 1:
        raise ScaleError(f"{folder} is divided by pipeline stages, which number layers anew")
    ranks = sorted(file.name for file in folder.glob("rank*.safetensors"))
    file = read_tensors([read_header(safe_file(folder, name)) for name in ranks], str(folder))
    total = layer_count(config)
    require(
        (f"layer {i} is missing" for i in range(total or 0) if i not in file.scales.layers),
        str(folder),
    )
    return file


def read_tensors(headers: Sequence[Mapping[str, TensorInfo]], where: str) -> ScaleFile:
    """The factors among the tensors of `headers`, one for each rank; the largest where they
    differ."""
    found: dict[int, dict[str, list[np.ndarray]]] = {}
    for header in headers:
        for name, info in header.items():
            if match := _FACTOR.fullmatch(name):
                value = read_scale(name, info)
                found.setdefault(int(match["index"]), {}).setdefault(match["of"], []).append(value)
    if not found:
        raise ScaleError(f"{where} has no kv_cache_scaling_factor")
    layers, notes = {}, []
    for index, factors in sorted(found.items()):
        both = factors.get("kv", [])
        k, v = factors.get("k", both), factors.get("v", both)
        if not k or not v:
            raise ScaleError(f"{where}: layer {index}: a factor of K or of V is missing")
        layers[index] = LayerScales("", _largest(k), _largest(v))
    if not any("k" in factors for factors in found.values()):
        notes.append("one factor a layer stands for both K and V")
    scales = ScaleSet("tensor", layers)
    require(problems(scales, None), where)
    return ScaleFile(scales, notes=notes)


def _largest(values: list[np.ndarray]) -> np.ndarray:
    """Per tensor, of all ranks; a factor that cannot be one stays as it is, to be refused."""
    odd = (value for value in values if value.size != 1 or not 0 < value[0] < np.inf)
    wrong = next(odd, None)
    return wrong if wrong is not None else np.concatenate(values).max(keepdims=True)


def write(file: ScaleFile) -> bytes:
    """A safetensors file of the factors."""
    return save(
        {
            f"transformer.layers.{index}.attention.kv_cache_scaling_factor": np.maximum(
                layer.k, layer.v
            ).astype(np.float32)
            for index, layer in sorted(file.scales.collapse_heads().layers.items())
        },
        metadata={"format": "pt"},
    )
