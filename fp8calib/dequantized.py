"""Weights of FP8 checkpoints that transformers loads on some devices only, or wrongly: dequantized.

Two methods store float8_e4m3fn weights beside their scales: ``fp8`` (DeepSeek's and Qwen's,
``weight_scale_inv`` by blocks, or one ``weight_scale``) and ``modelopt`` (one ``weight_scale``).
A weight is its stored value times its scale, in both; the names notwithstanding. Transformers takes
modelopt's for unquantized weights, without a scale.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from fp8calib.checkpoint import open_checkpoint
from fp8calib.errors import ModelError

METHODS = ("fp8", "modelopt")
_SCALES = ("weight_scale_inv", "weight_scale")


def state_dict(source: Path, section: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """All weights of the checkpoint in `source` in `dtype`; `section` is its quantization config.

    Raises:
        ModelError: something other than FP8 weights with one scale, or one a row or a block.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in open_checkpoint(source).weight_files:
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    block = section.get("weight_block_size")
    for name in [name for name, value in tensors.items() if value.dtype == torch.float8_e4m3fn]:
        module = name.removesuffix("weight")
        scale = next((tensors[module + leaf] for leaf in _SCALES if module + leaf in tensors), None)
        if scale is None:
            raise ModelError(f"{source}: {name} is FP8 and has no scale beside it")
        tensors[name] = _dequantize(name, tensors[name], scale.float(), block).to(dtype)
    packed = [name for name, value in tensors.items() if value.dtype == torch.uint8]
    if packed:
        raise ModelError(
            f"{source}: {packed[0]} is packed; of {section['quant_method']} checkpoints only those "
            "with FP8 weights can be calibrated"
        )
    extra = (*_SCALES, "input_scale", "activation_scale")
    return {
        name: value
        for name, value in tensors.items()
        if not name.endswith(extra) and not name.endswith((".k_scale", ".v_scale", ".q_scale"))
    }


def _dequantize(
    name: str, weight: torch.Tensor, scale: torch.Tensor, block: list[int] | None
) -> torch.Tensor:
    """`weight` [rows, columns] times `scale`: one, [rows] or [rows, 1], or one of each block."""
    rows, columns = weight.shape
    if scale.numel() == 1:
        return weight.float() * scale.reshape(())
    if scale.numel() == rows:
        return weight.float() * scale.reshape(rows, 1)
    if block and scale.shape == (-(-rows // block[0]), -(-columns // block[1])):
        spread = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        return weight.float() * spread[:rows, :columns]
    raise ModelError(f"{name} of shape {list(weight.shape)} has a scale of {list(scale.shape)}")
