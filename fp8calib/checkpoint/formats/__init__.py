"""The forms in which scales travel apart from weights, and what each of them can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fp8calib.errors import ScaleError
from fp8calib.scales import ScaleSet


@dataclass(frozen=True)
class ScaleFile:
    """Scales as they lie in a file. A layer's name is empty where the format knows none; `notes`
    say what the reader of it had to decide."""

    scales: ScaleSet
    model_type: str | None = None
    skip_layers: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Format:
    """What a format can hold. `with_weights`: it is a whole checkpoint, not a file of scales, whose
    name would end in `suffix`."""

    name: str
    title: str
    per_head: bool = False
    query: bool = False
    separate: bool = True  # K and V have scales of their own
    skip_layers: bool = False
    with_weights: bool = False
    suffix: str = ".json"


_ALL = (
    Format("json", "fp8calib's own JSON", True, True, True, True),
    Format(
        "compressed-tensors",
        "a checkpoint as vLLM, SGLang and fp8calib read it",
        True,
        True,
        True,
        True,
        with_weights=True,
    ),
    Format(
        "modelopt",
        "a checkpoint with ModelOpt's names and hf_quant_config.json",
        skip_layers=True,
        with_weights=True,
    ),
    Format(
        "sglang",
        "the JSON of --quantization-param-path (SGLang, and older vLLM)",
        separate=False,
    ),
    Format(
        "trtllm",
        "TensorRT-LLM's kv_cache_scaling_factor tensors",
        separate=False,
        suffix=".safetensors",
    ),
)
FORMATS = {entry.name: entry for entry in _ALL}


def format_named(name: str) -> Format:
    if name not in FORMATS:
        raise ScaleError(f"there is no format {name!r:.40}; there are {', '.join(FORMATS)}")
    return FORMATS[name]


def losses(scales: ScaleSet, target: Format, skip_layers: Sequence[str] = ()) -> list[str]:
    """What `target` cannot hold of `scales`, one sentence each."""
    lost = []
    if scales.strategy == "attn_head" and not target.per_head:
        spread = max(
            float(scale.max()) / float(scale.min())
            for layer in scales.layers.values()
            for _, scale in layer.items()
        )
        lost.append(
            f"{target.name} has one scale a layer: heads share the largest, up to {spread:.3g} "
            "times what they need"
        )
    if scales.has_query and not target.query:
        lost.append(f"{target.name} has no q_scale: it is left out")
    apart = sum(not np.array_equal(layer.k, layer.v) for layer in scales.layers.values())
    if apart and not target.separate:
        lost.append(f"{target.name} has one scale for K and V: the larger, in {apart} layers")
    if skip_layers and not target.skip_layers:
        lost.append(f"{target.name} has no place for skip layers ({' '.join(skip_layers)})")
    return lost


def read_scale_file(path: Path) -> ScaleFile:
    """The scales in a file of any of the formats, checked.

    Raises:
        ScaleError: scales that cannot be used.
        CheckpointError: a file that is damaged, or holds no scales.
    """
    from fp8calib.checkpoint.formats import own_json, param_json, tensors, trtllm

    if path.is_dir():
        return trtllm.read_folder(path)
    if path.suffix == ".safetensors":
        return tensors.read(path)
    if path.suffix != ".json":
        raise ScaleError(f"{path} is neither a checkpoint folder, a .json nor a .safetensors file")
    return param_json.read(path) if param_json.recognise(path) else own_json.read(path)
