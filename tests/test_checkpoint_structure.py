"""The layers read off names and config.json are those that a forward pass finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8calib.checkpoint import layers_from_checkpoint, open_checkpoint

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "cohere2": {"num_hidden_layers": 4},
    "deepseek_v3": {},
    "gemma2": {},
    "gemma3n_text": {},
    "gemma4_text": {},
    "gpt2": {},
    "gpt_neox": {},
    "gpt_oss": {},
    "mistral": {},
    "opt": {},
    "phi3": {},
    "qwen3_next": {},
}


@pytest.mark.parametrize("model_type", MODELS)
def test_layers_equal_those_of_a_forward_pass(model_type: str, tiny: Callable[..., Path]) -> None:
    from transformers import AutoModelForCausalLM

    from fp8calib.attention import probe

    folder = tiny(model_type, **MODELS[model_type])
    seen = probe(AutoModelForCausalLM.from_pretrained(folder))
    assert open_checkpoint(folder).layers == [replace(layer, scaling=None) for layer in seen]


def projections(*modules: str) -> list[str]:
    return [f"{module}.{kind}_proj.weight" for module in modules for kind in "qkv"]


SIMPLE = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}


def test_only_the_language_model_of_a_composite_is_meant() -> None:
    names = projections(
        *(f"model.vision_tower.encoder.layers.{n}.self_attn" for n in range(27)),
        *(f"model.visual.blocks.{n}.attn" for n in range(27)),
        *(f"model.language_model.layers.{n}.self_attn" for n in range(2)),
        "model.language_model.layers.1.cross_attn",
    )
    config = {"num_attention_heads": 16, "text_config": SIMPLE | {"num_key_value_heads": 2}}
    layers = layers_from_checkpoint(config, names)
    assert [(layer.name, layer.num_heads, layer.num_kv_heads) for layer in layers] == [
        ("model.language_model.layers.0.self_attn", 4, 2),
        ("model.language_model.layers.1.self_attn", 4, 2),
    ]


def test_layers_past_the_last_belong_to_multi_token_prediction() -> None:
    names = projections(
        *(f"model.layers.{n}.self_attn" for n in range(3)), "mtp.layers.0.self_attn"
    )
    assert len(layers_from_checkpoint(SIMPLE, names)) == 2


def test_unknown_names_give_no_layers() -> None:
    assert layers_from_checkpoint(SIMPLE, ["encoder.block.0.attention.x.weight", "lm_head"]) == []


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"sliding_window": 8}, [8, 8, 8, 8]),
        ({"sliding_window": None}, [None] * 4),
        ({"sliding_window": 8, "use_sliding_window": False}, [None] * 4),
        (
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
            [None, None, 8, 8],
        ),
        ({"sliding_window": 8, "model_type": "gemma2"}, [8, None, 8, None]),
        ({"sliding_window": 8, "sliding_window_pattern": 4}, [8, 8, 8, None]),
        (
            {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 2},
            [None, 8, None, 8],
        ),
    ],
    ids=["all", "none", "qwen-off", "qwen-upper", "gemma2", "gemma3", "layer-types"],
)
def test_windows_in_the_ways_configs_have_told_them(
    config: dict[str, Any], windows: list[int | None]
) -> None:
    names = projections(*(f"model.layers.{n}.self_attn" for n in range(4)))
    layers = layers_from_checkpoint(SIMPLE | {"num_hidden_layers": 4} | config, names)
    assert [layer.sliding_window for layer in layers] == windows
