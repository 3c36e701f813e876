"""What each attention layer of a model is, and how the user names layers to leave in 16 bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fp8calib.errors import UserError


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer that reads a KV cache, as a forward pass shows it.

    `name` is the attention module's path in the checkpoint. Head counts and sizes are those of
    the cached tensors. `kv_source` is the index of the layer whose K and V this one re-uses
    (Gemma-3n), None when it has its own.
    """

    index: int
    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scaling: float | None = None
    kv_source: int | None = None


def split_skip_layers(values: Iterable[str | int]) -> list[str]:
    """vLLM's space-separated form, commas and repeats, all at once: ["0,1", "sliding_window"]."""
    return [word for value in values for word in str(value).replace(",", " ").split()]


def resolve_skip_layers(
    values: Iterable[str | int], layers: Sequence[LayerSpec]
) -> tuple[list[str], frozenset[int]]:
    """The skip list in the form vLLM takes, and the layer indices that it means.

    Indices are sorted and free of repeats; negative ones count from the end and are resolved.
    ``sliding_window`` stays a word in the list and means every layer with a window.

    Raises:
        UserError: a word that is neither, an index the model does not have, or
            ``sliding_window`` for a model without windows.
    """
    indices = [layer.index for layer in layers]
    chosen: set[int] = set()
    windows: set[int] = set()
    for word in split_skip_layers(values):
        if word == "sliding_window":
            windows = {layer.index for layer in layers if layer.sliding_window is not None}
            if not windows:
                raise UserError("skip layers: sliding_window, but no layer of this model has one")
            continue
        try:
            index = int(word)
        except ValueError:
            raise UserError(
                f"skip layers: {word!r} is neither a layer index nor sliding_window"
            ) from None
        resolved = index + max(indices) + 1 if index < 0 else index
        if resolved not in indices:
            raise UserError(
                f"skip layers: there is no attention layer {index} "
                f"(this model's are {min(indices)} to {max(indices)})"
            )
        chosen.add(resolved)
    flag = [str(index) for index in sorted(chosen)] + (["sliding_window"] if windows else [])
    return flag, frozenset(chosen | windows)
