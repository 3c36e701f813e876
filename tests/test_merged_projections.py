"""Projections of one input as one product: the same numbers in the same memory, or left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fp8calib.runtime.loader import LoadedModel, load
from fp8calib.runtime.merged_projections import MLP, MergedLinear, MergedProduct, merge_projections

Tiny = Callable[..., Path]


def merged_in(model: nn.Module) -> list[MergedLinear]:
    return [module for module in model.modules() if isinstance(module, MergedLinear)]


def storages(model: nn.Module) -> dict[int, int]:
    """Bytes of each piece of memory that parameters lie in, by its address."""
    pieces = (parameter.untyped_storage() for parameter in model.parameters())
    return {piece.data_ptr(): piece.nbytes() for piece in pieces}


def distance(x: torch.Tensor, expected: torch.Tensor) -> float:
    return float((x - expected).norm() / expected.norm())


def merge(loaded: LoadedModel) -> None:
    merge_projections(loaded.model, loaded.layers)


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("llama", 10),
        ("qwen2", 10),  # with biases
        ("qwen3", 10),  # norms of Q and K
        ("gemma2", 10),
        ("gemma3n_text", 14),  # two layers of four have no K and V of their own
        ("qwen3_moe", 6),  # experts are no linears
        ("olmo2", 10),
        ("phi3", 0),  # comes merged
        ("gpt2", 0),
    ],
)
@torch.inference_mode()
def test_logits_names_values_and_memory_stay(kind: str, count: int, tiny: Tiny) -> None:
    """float32 logits to a few roundings: libraries may sum in another order at another width."""
    loaded = load(str(tiny(kind)))
    model = loaded.model
    texts = [torch.arange(10, 10 + length)[None] for length in (1, 7, 40)]
    logits = [model(text).logits for text in texts]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    memory = sum(storages(model).values())
    merge(loaded)
    assert len(merged_in(model)) == count
    for text, expected in zip(texts, logits, strict=True):
        assert distance(model(text).logits, expected) < 1e-5
    after = model.state_dict()
    assert list(after) == list(state)
    assert all(map(torch.equal, after.values(), state.values()))
    assert sum(storages(model).values()) == memory
    for linear in merged_in(model):
        own = linear.product.weight.untyped_storage().data_ptr()
        assert linear.weight.untyped_storage().data_ptr() == own
        assert linear.product._left is None  # nothing is kept from call to call


def test_values_written_into_a_projection_count(tiny: Tiny) -> None:
    loaded, other = load(str(tiny("qwen2"))), load(str(tiny("qwen2", seed=1)))
    merge(loaded)
    loaded.model.load_state_dict(other.model.state_dict())
    text = torch.arange(10, 30)[None]
    with torch.inference_mode():
        assert distance(loaded.model(text).logits, other.model(text).logits) < 1e-5


def test_merging_again_changes_nothing(tiny: Tiny) -> None:
    loaded = load(str(tiny("llama")))
    merge(loaded)
    before = merged_in(loaded.model), storages(loaded.model)
    merge(loaded)
    assert (merged_in(loaded.model), storages(loaded.model)) == before


def test_any_order_of_any_inputs() -> None:
    """Each part is of the tensor that it is asked about, whatever was asked before."""
    torch.manual_seed(0)
    linears = [nn.Linear(8, out) for out in (4, 2, 6)]
    expected = [nn.Linear(8, out) for out in (4, 2, 6)]
    for one, other in zip(expected, linears, strict=True):
        one.load_state_dict(other.state_dict())
    product = MergedProduct(linears)
    a, b = torch.randn(3, 8), torch.randn(3, 8)
    with torch.inference_mode():
        for index, x in ((0, a), (1, a), (2, a), (2, b), (0, b), (0, b), (1, a), (1, b), (0, a)):
            assert distance(product.part(index, x), expected[index](x)) < 1e-6, index
        calls = [(0, a), (2, a), (1, a)]
        whole = {product.part(index, x).untyped_storage().data_ptr() for index, x in calls}
    assert len(whole) == 1 and product._left is None


@pytest.mark.parametrize("what", ["hook", "function", "class", "bias", "dtype"])
def test_linears_that_are_not_plain_are_left_alone(what: str, tiny: Tiny) -> None:
    loaded = load(str(tiny("llama", num_hidden_layers=1)))
    mlp = loaded.model.model.layers[0].mlp
    gate = mlp.gate_proj
    if what == "hook":
        gate.register_forward_hook(lambda module, args, output: 2 * output)
    elif what == "function":
        gate.forward = lambda x: x
    elif what == "class":
        gate.__class__ = type("QuantizedLinear", (nn.Linear,), {})
    elif what == "bias":
        gate.bias = nn.Parameter(torch.zeros(gate.out_features))
    else:
        gate.to(torch.bfloat16)
    before = [getattr(mlp, name) for name in MLP]
    merge(loaded)
    assert [getattr(mlp, name) for name in MLP] == before
    assert len(merged_in(loaded.model)) == 3  # those of attention
