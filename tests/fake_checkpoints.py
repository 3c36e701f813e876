"""Checkpoints without a model behind them, made in a millisecond: names, shapes and scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from safetensors.numpy import save_file

from fp8calib.scales import LayerScales, ScaleSet, Strategy

HEADS, KV_HEADS = 4, 2
SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


def write_source(folder: Path, layers: int = 2, **config: Any) -> Path:
    """A llama of `layers` layers, four heads and two KV heads, that no loader would mind."""
    folder.mkdir(parents=True)
    tensors = {
        f"model.layers.{layer}.self_attn.{projection}.weight": np.ones((2, 2), np.float16)
        for layer in range(layers)
        for projection in ("q_proj", "k_proj", "v_proj")
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    content = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "hidden_size": 8,
    }
    (folder / "config.json").write_text(json.dumps(content | config))
    return folder


def declared(strategy: str) -> dict[str, Any]:
    """What config.json says of an FP8 cache with scales of `strategy`."""
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {},
            "kv_cache_scheme": SCHEME | {"strategy": strategy},
        }
    }


def write_scaled(folder: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    """A source with `tensors` in a second file, both in the index."""
    write_source(folder, **config)
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    (folder / "model.safetensors").rename(folder / files[0])
    save_file(tensors, folder / files[1], metadata={"format": "pt"})
    layers = config.get("layers", 2)
    where = {
        f"model.layers.{layer}.self_attn.{projection}.weight": files[0]
        for layer in range(layers)
        for projection in ("q_proj", "k_proj", "v_proj")
    }
    where |= dict.fromkeys(tensors, files[1])
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def attention(layer: int) -> str:
    return f"model.layers.{layer}.self_attn"


positive = st.floats(min_value=2.0**-126, max_value=1e4, width=32)


@st.composite
def scale_sets(draw: Any, strategy: Strategy | None = None, query: bool | None = None) -> ScaleSet:
    """Sets that fit `write_source`: any float32 that a scale may be."""
    strategy = strategy or draw(st.sampled_from(["tensor", "attn_head"]))
    query = draw(st.booleans()) if query is None else query

    def values(heads: int) -> np.ndarray:
        count = 1 if strategy == "tensor" else heads
        return np.array(draw(st.lists(positive, min_size=count, max_size=count)), np.float32)

    layers = {
        layer: LayerScales(
            attention(layer), values(KV_HEADS), values(KV_HEADS), values(HEADS) if query else None
        )
        for layer in range(2)
    }
    return ScaleSet(strategy, layers)


def equal(one: ScaleSet, other: ScaleSet) -> bool:
    """The same strategy and the same float32 to the last bit."""
    return (one.strategy, one.layers.keys()) == (other.strategy, other.layers.keys()) and all(
        [(kind, values.tobytes()) for kind, values in layer.items()]
        == [(kind, values.tobytes()) for kind, values in other.layers[index].items()]
        for index, layer in one.layers.items()
    )
