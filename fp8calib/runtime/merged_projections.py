"""Projections of the same input as one product: Q, K and V of attention, gate and up of an MLP.

At few tokens a product takes as long as its weights take to read, and small ones are not read at
the full rate. The merged weight is the memory of both: those of the projections become views of
it, so that names, values and `state_dict` stay what they were. (torch.compile merges products of
its own accord only where it freezes weights, which copies them and compiles each layer by itself.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from fp8calib.layers import LayerSpec

ATTENTION = ("q_proj", "k_proj", "v_proj")
MLP = ("gate_proj", "up_proj")

_Parts = tuple[torch.Tensor | None, ...]


class MergedProduct:
    """The product of several `linears`, computed when the first of them is asked for its part; the
    others take theirs of it, if they are asked about the same tensor."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.sizes = [linear.out_features for linear in linears]
        self.weight = _merged([linear.weight for linear in linears])
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.bias = _merged(biases) if biases else None
        self._left: tuple[torch.Tensor, _Parts] | None = None

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Of x [..., in], what linear `index` makes [..., its out]: a view of the whole product."""
        left = self._left
        parts = left[1] if left is not None and left[0] is x else ()
        part = parts[index] if parts else None
        if part is None:
            parts = nn.functional.linear(x, self.weight, self.bias).split(self.sizes, -1)
            part = parts[index]
        parts = (*parts[:index], None, *parts[index + 1 :])
        # Nothing outlives a layer: compiled, there is no state to keep or to look at.
        self._left = (x, parts) if any(other is not None for other in parts) else None
        return part


class MergedLinear(nn.Linear):
    """Linear `index` of a MergedProduct, with the parameters of the `linear` it stands for."""

    def __init__(self, linear: nn.Linear, product: MergedProduct, index: int) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, "meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)
        self.product, self.index = product, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product.part(self.index, x)


def merge_projections(model: nn.Module, layers: Iterable[LayerSpec]) -> None:
    """Merge what can be merged in the decoder layers of `model`, those that hold its attention
    `layers`. Whatever is not plain (quantized, hooked, of another kind) is left as it is."""
    modules = dict(model.named_modules())
    for layer in layers:
        _merge(modules[layer.name], ATTENTION)
        for module in modules[layer.name.rpartition(".")[0]].modules():
            _merge(module, MLP)


@torch.inference_mode(False)
@torch.no_grad()
def _merge(parent: nn.Module, names: Sequence[str]) -> None:
    linears = [getattr(parent, name, None) for name in names]
    plain = [linear for linear in linears if isinstance(linear, nn.Linear) and is_plain(linear)]
    kinds = {(one.in_features, one.weight.dtype, one.bias is None) for one in plain}
    if len(plain) < len(names) or len(kinds) > 1:
        return
    product = MergedProduct(plain)
    for index, (name, linear) in enumerate(zip(names, plain, strict=True)):
        setattr(parent, name, MergedLinear(linear, product, index))


def is_plain(linear: nn.Linear) -> bool:
    """Whether this multiplies by its weight and does nothing else: quantization and offloading
    come as classes, hooks or functions of their own."""
    hooks = (linear._forward_hooks, linear._forward_pre_hooks)
    return type(linear) is nn.Linear and "forward" not in vars(linear) and not any(hooks)


def _merged(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parameters one after the other along their first axis; they become views of it."""
    merged = torch.cat([parameter.detach() for parameter in parameters])
    sizes = [len(parameter) for parameter in parameters]
    for parameter, part in zip(parameters, merged.split(sizes), strict=True):
        parameter.data = part
    return merged
