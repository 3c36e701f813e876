"""Decoder layers compiled by torch.compile, one piece of code for all that are alike.

What stands between two matrix products (norms, RoPE, activations, residuals) becomes one kernel
instead of many, and products of the same input become one. Attention stays the operator that it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from fp8calib.layers import LayerSpec
from fp8calib.runtime.merged_projections import merge_projections
from fp8calib.runtime.paged_attention import LAYER_NUMBER


def compile_layers(
    model: PreTrainedModel, layers: Sequence[LayerSpec], backend: str = "inductor"
) -> None:
    """Have the decoder layers of `model`, those that hold its attention `layers`, compiled when
    they run first; for one token, and for any number of them."""
    merge_projections(model, layers)
    modules = dict(model.named_modules())
    for layer in layers:
        setattr(modules[layer.name], LAYER_NUMBER, torch.tensor(layer.index))
        modules[layer.name.rpartition(".")[0]].compile(backend=backend)
