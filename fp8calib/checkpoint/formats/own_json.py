"""fp8calib's own JSON, described in docs/scales.md: everything that a ScaleSet holds.

Scales are written with the fewest digits that give the same float32 back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fp8calib.checkpoint.formats import ScaleFile
from fp8calib.checkpoint.json_file import read_json
from fp8calib.errors import ScaleError
from fp8calib.scales import LayerScales, ScaleSet, Strategy, label, problems, require

SCHEMA_VERSION = 1
_Values = Annotated[list[float], Field(min_length=1, max_length=65_536)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Layer(_Strict):
    """One attention layer. `name` is its module's path in the checkpoint."""

    index: Annotated[int, Field(ge=0, lt=10_000)]
    name: str = ""
    k_scale: _Values
    v_scale: _Values
    q_scale: _Values | None = None


class Scales(_Strict):
    """The file."""

    format: Literal["fp8calib-scales"]
    schema_version: Literal[1]
    strategy: Strategy
    dtype: Literal["float8_e4m3fn"]
    model_type: str | None = None
    skip_layers: list[str] = []
    layers: Annotated[list[Layer], Field(min_length=1)]


def read(path: Path) -> ScaleFile:
    """The scales in `path`; raises ScaleError for anything that is not as described."""
    content = read_json(path, unique=True)
    version = content.get("schema_version")
    if content.get("format") != "fp8calib-scales":
        raise ScaleError(f"{path} is no JSON of scales: it has no format fp8calib-scales")
    if isinstance(version, int) and SCHEMA_VERSION < version < 1000:
        raise ScaleError(f"{path} has schema_version {version}: a newer fp8calib wrote it")
    try:
        file = Scales.model_validate(content)
    except ValidationError as problem:
        raise ScaleError(f"{path}: {explain(problem)}") from None
    layers: dict[int, LayerScales] = {}
    for layer in file.layers:
        if layer.index in layers:
            raise ScaleError(f"{path}: {label(layer.index, layer.name)} occurs twice")
        q = None if layer.q_scale is None else _array(layer.q_scale)
        name = layer.name[:300]
        layers[layer.index] = LayerScales(name, _array(layer.k_scale), _array(layer.v_scale), q)
    scales = ScaleSet(file.strategy, layers)
    require(problems(scales, None), str(path))
    return ScaleFile(scales, file.model_type, tuple(file.skip_layers))


def write(file: ScaleFile) -> bytes:
    """The content of the file."""
    content = Scales(
        format="fp8calib-scales",
        schema_version=1,
        strategy=file.scales.strategy,
        dtype="float8_e4m3fn",
        model_type=file.model_type,
        skip_layers=list(file.skip_layers),
        layers=[
            Layer(
                index=index,
                name=layer.name,
                k_scale=_shortest(layer.k),
                v_scale=_shortest(layer.v),
                q_scale=None if layer.q is None else _shortest(layer.q),
            )
            for index, layer in sorted(file.scales.layers.items())
        ],
    )
    return (json.dumps(content.model_dump(exclude_none=True), indent=1) + "\n").encode()


def explain(problem: ValidationError) -> str:
    """The first two of pydantic's complaints in one line."""
    errors = problem.errors(include_url=False, include_input=False)
    found = [f"{'.'.join(map(str, error['loc']))[:80]}: {error['msg']}" for error in errors[:2]]
    return "; ".join(found)


def _array(values: list[float]) -> np.ndarray:
    with np.errstate(over="ignore"):  # beyond float32 becomes inf, and is reported as such
        return np.asarray(values, dtype=np.float64).astype(np.float32)


def _shortest(values: np.ndarray) -> list[float]:
    return [float(str(value)) for value in values.astype(np.float32)]
