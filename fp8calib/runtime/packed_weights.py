"""Weights of linear layers in the order in which a CPU's matrix instructions read them.

For bfloat16 weights torch calls oneDNN, which puts the whole weight in its own order at every call:
at few tokens that takes longer than the product. Packed once, the weight is read as it lies;
products are the same, but for the order of their sums in a few shapes. torch.compile does the same
where it freezes weights, and these are the operators that it calls.
"""

from __future__ import annotations

import torch
from torch import nn

from fp8calib.runtime.merged_projections import is_plain


class PackedLinear(nn.Module):
    """What `linear` does, without its weight: that is kept packed alone, and is unpacked when it is
    asked for."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.train(linear.training)

    @property
    def weight(self) -> torch.Tensor:
        return self._packed.to_dense()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self.out_features)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


def pack_weights(model: nn.Module) -> None:
    """Replace the linear layers of `model` that gain by it: those in bfloat16 on a CPU. Whatever is
    not plain (quantized, hooked) is left as it is."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, nn.Linear) and is_plain(module) and _gains(module.weight):
                setattr(parent, name, PackedLinear(module))


def _gains(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    available = torch.backends.mkldnn.is_available()
    return available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
