"""The attention layers of a checkpoint, from config.json and the weights' names and shapes alone.

Calibration learns a model's layers from a forward pass; reading a checkpoint must not need one (nor
torch). Which modules hold a KV cache is told by the weights: a module with a query or fused
projection, in the language model's own stack of layers. Counts and windows come from config.json.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from fp8calib.checkpoint.config import layer_count, text_config
from fp8calib.layers import LayerSpec

_PROJECTIONS = {
    "q_proj", "k_proj", "qkv_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa",
    "query_key_value", "c_attn", "Wqkv", "wqkv", "W_pack", "attn_qkv",
}  # fmt: skip
# Stacks of other towers, and attention to something else than the text so far.
_FOREIGN = re.compile(
    r"vision|visual|image|video|audio|speech|encoder(?!_decoder)|\bvit\b|tower|qformer|resampler"
    r"|projector|cross|\bmtp\b|talker|code2wav"
)
_RECURRENT = ("A_log", "dt_bias", "q_conv1d", "conv1d")  # linear attention keeps a state, no cache
# Families that know no num_key_value_heads, whatever their config.json says.
_MULTI_HEAD = {"bloom", "gpt2", "gpt_neo", "gpt_neox", "gptj", "opt"}


def is_foreign(module: str) -> bool:
    """Whether a module is part of another tower, or attends to something else than the text."""
    return _FOREIGN.search(module) is not None


def layers_from_checkpoint(config: dict[str, Any], tensors: Iterable[str]) -> list[LayerSpec]:
    """The layers that own or share a KV cache, in order; empty when none can be recognised.

    Args:
        config: the content of config.json.
        tensors: the names of all weight tensors.
    """
    text = text_config(config)
    tensors = list(tensors)
    total = layer_count(text)
    names = {
        index: name
        for index, name in sorted(_attention_modules(tensors)[1].items())
        if (total is None or index < total) and _attends(text, index)
    }
    sinks = {name.rpartition(".")[0] for name in tensors if name.endswith(".sinks")}
    return [_layer(text, index, name, name in sinks) for index, name in names.items()]


def missing_layers(config: dict[str, Any], tensors: Iterable[str]) -> list[int]:
    """Layers that config.json claims and of which the weights hold no tensor at all; empty where
    the layers are not recognised."""
    tensors = list(tensors)
    total = layer_count(text_config(config))
    stack, modules = _attention_modules(tensors)
    if total is None or not modules:
        return []
    rest = (
        name.removeprefix(stack).partition(".")[0] for name in tensors if name.startswith(stack)
    )
    return sorted(set(range(total)) - {int(part) for part in rest if _is_number(part)})


def _attention_modules(tensors: Iterable[str]) -> tuple[str, dict[int, str]]:
    """The stack of layers that has the most attention layers (its name's beginning), and its
    attention modules by layer index."""
    stacks: dict[str, dict[int, str]] = defaultdict(dict)
    recurrent = set()
    for name in tensors:
        if place := _place(name):
            stack, index, attention = place
            if not is_foreign(stack + attention):
                stacks[stack].setdefault(index, f"{stack}{index}.{attention}")
        module, _, leaf = name.removesuffix(".weight").rpartition(".")
        if leaf in _RECURRENT:
            recurrent.add(module)
    stack = max(stacks, key=lambda name: len(stacks[name]), default="")
    return stack, {i: name for i, name in stacks[stack].items() if name not in recurrent}


def _place(name: str) -> tuple[str, int, str] | None:
    """``model.layers.0.self_attn.q_proj.weight`` as ("model.layers.", 0, "self_attn"); None for
    what is no projection of an attention layer."""
    parts = name.split(".")
    if len(parts) < 4 or parts[-2] not in _PROJECTIONS:
        return None
    at = next((i for i in range(len(parts) - 4, -1, -1) if _is_number(parts[i])), None)
    if at is None:
        return None
    return "".join(f"{part}." for part in parts[:at]), int(parts[at]), ".".join(parts[at + 1 : -2])


def _is_number(part: str) -> bool:
    return len(part) <= 6 and part.isascii() and part.isdecimal()


def _first(config: dict[str, Any], *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _layer_type(text: dict[str, Any], index: int) -> str:
    """What config.json calls the layer: full_attention, sliding_attention, linear_attention...;
    empty when it does not say."""
    for key in ("layer_types", "layers_block_type", "attention_layers"):
        types = text.get(key)
        if isinstance(types, list) and index < len(types):
            return str(types[index])
    return ""


def _attends(text: dict[str, Any], index: int) -> bool:
    kind = _layer_type(text, index)
    return not any(word in kind for word in ("linear", "mamba", "conv", "recurrent"))


def _layer(text: dict[str, Any], index: int, name: str, sinks: bool) -> LayerSpec:
    text = text | _overrides(text, index)
    heads = _count(text, index, "num_attention_heads", "n_head", "n_heads", "num_query_heads") or 1
    kv_heads = _count(text, index, "num_key_value_heads", "num_kv_heads", "n_head_kv") or heads
    if text.get("model_type") in _MULTI_HEAD:
        kv_heads = heads
    elif text.get("multi_query") is True and text.get("new_decoder_architecture") is not True:
        kv_heads = 1
    hidden = _count(text, index, "hidden_size", "n_embd", "d_model") or 0
    head_dim = _count(text, index, "head_dim", "attention_head_dim", "kv_channels")
    head_dim = value_dim = head_dim or hidden // heads
    if text.get("kv_lora_rank"):  # multi-head latent attention, as its forward pass expands it
        head_dim = (text.get("qk_nope_head_dim") or 0) + (text.get("qk_rope_head_dim") or 0)
        value_dim = text.get("v_head_dim") or head_dim
        kv_heads = heads
    return LayerSpec(
        index=index,
        name=name,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=value_dim,
        sliding_window=_window(text, index),
        softcap=text.get("attn_logit_softcapping"),
        sinks=sinks,
        kv_source=_kv_source(text, index),
    )


def _overrides(text: dict[str, Any], index: int) -> dict[str, Any]:
    """What this layer has otherwise than the model: transformers' `per_layer_config`, or the keys
    of Gemma-4's own configs from which it is made."""
    if isinstance(layers := text.get("per_layer_config"), dict):
        own = layers.get(str(index))
        return own if isinstance(own, dict) else {}
    if not str(text.get("model_type")).startswith("gemma4"):
        return {}
    if _layer_type(text, index) != "full_attention":
        return {}
    own = {"head_dim": text.get("global_head_dim") or 512}
    if text.get("attention_k_eq_v", True) and text.get("num_global_key_value_heads"):
        own["num_key_value_heads"] = text["num_global_key_value_heads"]
    return own


def _count(text: dict[str, Any], index: int, *keys: str) -> int | None:
    """A number that config.json gives for the whole model, or in a list by layer."""
    value = _first(text, *keys)
    if isinstance(value, list):
        value = value[index] if index < len(value) else None
    return value if isinstance(value, int) else None


def _window(text: dict[str, Any], index: int) -> int | None:
    """The layer's sliding window in tokens: `layer_types` says which layers have one; configs
    older than that key say it in as many ways as there are families."""
    window = _first(text, "sliding_window", "window_size")
    if not isinstance(window, int) or window <= 0:
        return None
    kind = _layer_type(text, index)
    if kind:
        return window if kind in ("sliding_attention", "local") else None
    if text.get("use_sliding_window") is False:
        return None
    if isinstance(first := text.get("max_window_layers"), int) and "use_sliding_window" in text:
        return window if index >= first else None
    pattern = text.get("sliding_window_pattern")
    if pattern is None and text.get("model_type") == "gemma2":
        pattern = 2
    if isinstance(pattern, int) and pattern > 0:
        return window if (index + 1) % pattern else None
    return window


def _kv_source(text: dict[str, Any], index: int) -> int | None:
    """Gemma-3n and 4: the last layers re-use K and V of the last own-cache layer of their type."""
    shared = text.get("num_kv_shared_layers")
    total = text.get("num_hidden_layers")
    if not isinstance(shared, int) or not isinstance(total, int) or index < total - shared:
        return None
    kind = _layer_type(text, index)
    owners = [i for i in range(total - shared) if _layer_type(text, i) == kind]
    return owners[-1] if owners else None
