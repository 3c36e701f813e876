"""Which models the runtime refuses, and why: those that it would run wrongly.

`fp8calib.attention.probe` refuses what never reaches the attention function (Falcon, Bloom, GPT-J)
or is not plain causal attention. Calibration can do with less than running: what is refused here
has layers whose K and V can be observed, but whose outputs need something the runtime has not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

from fp8calib.errors import ModelError
from fp8calib.layers import LayerSpec

_ATTENTION_TYPES = {"full_attention", "sliding_attention", "attention"}
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_UNKNOWN_LENGTH = 4096


def check_supported(config: PretrainedConfig, layers: Sequence[LayerSpec] | None = None) -> None:
    """Refuse by name and reason what the runtime cannot run; `layers` are those that `probe` saw.

    Raises:
        ModelError: a layer that is not attention over a KV cache, or attends in chunks.
    """
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or []
    for index, kind in enumerate(kinds):
        if kind not in _ATTENTION_TYPES:
            raise _refused(config, f"layer {index} is {kind.replace('_', ' ')}", _why(kind))
    if layers is not None:
        missing = set(range(text.num_hidden_layers)) - {layer.index for layer in layers}
        if missing:
            first = min(missing)
            raise _refused(config, f"layer {first} has no attention with a KV cache", _why("state"))


def _why(kind: str) -> str:
    if "chunked" in kind:
        return "the paged kernels have full and sliding-window attention only"
    return "the runtime keeps no recurrent state"


def _refused(config: PretrainedConfig, what: str, why: str) -> ModelError:
    name = (config.architectures or [type(config).__name__])[0]
    return ModelError(f"{name} cannot be run here: {what}, and {why}; vLLM may serve it")


def context_limit(config: PretrainedConfig) -> int:
    """Tokens that a sequence may have.

    RoPE of type `dynamic` and `longrope` changes for all tokens, cached ones too, once a sequence
    grows beyond the length of pre-training; such models are run up to that length.
    """
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None) or _UNKNOWN_LENGTH
    for rope in _length_dependent(text):
        original = rope.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        limit = min(limit, original or limit)
    return limit


def length_dependent_rope(config: PretrainedConfig) -> str | None:
    """The type of RoPE that chooses its frequencies by the largest position of a pass, if the model
    has one: such a pass cannot be a CUDA graph."""
    ropes = _length_dependent(config.get_text_config(decoder=True))
    return next((rope["rope_type"] for rope in ropes), None)


def _length_dependent(text: PretrainedConfig) -> list[dict[str, Any]]:
    ropes = _rope_parameters(text)
    return [rope for rope in ropes if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE]


def _rope_parameters(text: PretrainedConfig) -> list[dict[str, Any]]:
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict):
        return []
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]
