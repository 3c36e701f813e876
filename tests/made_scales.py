"""Scales made up for tests that write checkpoints: every value differs from every other."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from fp8calib.checkpoint import open_checkpoint, read_scales, write_checkpoint
from fp8calib.layers import LayerSpec
from fp8calib.scales import LayerScales, ScaleSet, Strategy


def make_scales(layers: Sequence[LayerSpec], strategy: Strategy, query: bool = True) -> ScaleSet:
    """Scales around 0.01 to 1, none of which a 16-bit float could hold exactly."""
    rng = np.random.default_rng(7)

    def draw(heads: int) -> np.ndarray:
        count = 1 if strategy == "tensor" else heads
        return np.exp(rng.uniform(-4.5, 0, count)).astype(np.float32)

    return ScaleSet(
        strategy,
        {
            layer.index: LayerScales(
                layer.name,
                draw(layer.num_kv_heads),
                draw(layer.num_kv_heads),
                draw(layer.num_heads) if query else None,
            )
            for layer in layers
        },
    )


def calibrated(
    source: Path,
    output: Path,
    strategy: Strategy = "tensor",
    query: bool = True,
    skip_layers: Sequence[str] = (),
    **options: bool,
) -> ScaleSet:
    """Write `source` with made-up scales to `output`; returns the scales."""
    layers = open_checkpoint(source).layers
    scales = make_scales(layers, strategy, query)
    sidecar = {"model": "someone/tiny", "strategy": strategy, "observer": "absmax"}
    if skip_layers:
        sidecar["skip_layers"] = list(skip_layers)
    write_checkpoint(source, output, scales, sidecar, layers=layers, **options)
    return scales


def rewritten(output: Path, rename: Callable[[str, np.ndarray], dict[str, np.ndarray]]) -> None:
    """Replace the scales' shard of a checkpoint by `rename` of each of its tensors."""
    shard = output / "model-00002-of-00002.safetensors"
    tensors: dict[str, np.ndarray] = {}
    for name, values in load_file(shard).items():
        tensors |= rename(name, values)
    save_file(tensors, shard, metadata={"format": "pt"})
    index = json.loads((output / "model.safetensors.index.json").read_text())
    weights = {
        name: file for name, file in index["weight_map"].items() if not name.endswith("_scale")
    }
    index["weight_map"] = weights | dict.fromkeys(tensors, shard.name)
    (output / "model.safetensors.index.json").write_text(json.dumps(index))


def in_file(folder: Path) -> dict[tuple[int, str], np.ndarray]:
    """Scales of a checkpoint by layer and kind."""
    return {
        (index, kind): scale
        for index, layer in read_scales(folder).layers.items()
        for kind, scale in layer.items()
    }
