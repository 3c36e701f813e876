"""Recipes: one schema, unknown keys refused with the nearest known one; weights quantized first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fp8calib.calibration import calibrate
from fp8calib.checkpoint import inspect, read_scales
from fp8calib.errors import RecipeError
from fp8calib.recipe import Recipe, load_recipe, parse_recipe


@pytest.mark.parametrize(
    "name", ["fp8_kv_tensor", "fp8_kv_head", "fp8_weights_and_kv", "w4a16_and_kv"]
)
def test_built_in_recipes_load_by_name(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.calibration.strategy == ("attn_head" if name == "fp8_kv_head" else "tensor")
    assert (recipe.llmcompressor is not None) == ("and_kv" in name)


def test_a_recipe_survives_its_yaml() -> None:
    recipe = load_recipe("fp8_kv_head").with_options(samples=3, kv_cache_dtype_skip_layers=["0,-1"])
    assert parse_recipe(recipe.to_yaml(), "again") == recipe
    assert recipe.calibration.kv_cache_dtype_skip_layers == ("0", "-1")


def test_options_win_over_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("calibration: {strategy: attn_head, samples: 7}\n")
    recipe = load_recipe(str(path)).with_options(samples=9, seed=None)
    assert recipe.calibration.samples == 9
    assert recipe.calibration.seed == Recipe().calibration.seed
    assert recipe.calibration.strategy == "attn_head"
    with pytest.raises(RecipeError, match=r"^--samples: Input should be .*, got 0$"):
        recipe.with_options(samples=0)
    with pytest.raises(RecipeError, match=r"^--max-kl: Input should be .*, got -1"):
        recipe.with_gates(max_kl=-1)
    with pytest.raises(RecipeError, match=r"^unknown key sample \(did you mean samples\?\)$"):
        recipe.with_options(sample=9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("calibration: {stratgy: tensor}", r"unknown key calibration\.stratgy .*mean strategy\?"),
        ("gate: {max_kl: 1}", r"unknown key gate .*mean gates\?"),
        ("gates: {xyzzy: 1}", r"unknown key gates\.xyzzy \(known: max_ppl_increase"),
        ("calibration: {strategy: channel}", r"calibration\.strategy: .*'channel'"),
        ("calibration: {samples: none}", r"calibration\.samples: .*'none'"),
        ("calibration: {margin: 0.5}", r"calibration\.margin: .*0\.5"),
        ("[calibration]", "a recipe is a mapping"),
        ("calibration: {", "not YAML"),
        ("llmcompressor: {quant: {}}", "must end in _stage"),
        ("llmcompressor: {q_stage: {q_modifiers: {GPTQModifier: }}}", "write `GPTQModifier: {}`"),
        (
            "llmcompressor: {q_stage: {q_modifiers: {X: {kv_cache_scheme: {}}}}}",
            "leave kv_cache_scheme out",
        ),
        ("calibration: {samples: yes}", r"calibration\.samples: must not be true or false"),
        ("gates: {max_kl: true}", r"gates\.max_kl: must not be true or false, got True"),
        ("gates: {max_kl: .inf}", r"gates\.max_kl: .*finite number"),
        ("llmcompressor: &x {a_stage: *x}", "mine.yaml: more than 100,000 values"),
        (
            "llmcompressor: {a: &a [1, 1], b: &b [*a, *a]"
            + "".join(f", {y}: &{y} [{', '.join([f'*{x}'] * 99)}]" for x, y in ("bc", "cd", "de"))
            + "}",
            "counting what aliases repeat",
        ),
    ],
)
def test_what_a_recipe_cannot_say(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as problem:
        parse_recipe(text, "mine.yaml")
    assert "\n" not in str(problem.value)


def test_a_recipe_that_is_not_there() -> None:
    with pytest.raises(RecipeError, match="one of fp8_kv_head, fp8_kv_tensor"):
        load_recipe("fp8_kv")
    with pytest.raises(RecipeError, match=r"missing\.yaml: cannot be read"):
        load_recipe("missing.yaml")
    with pytest.raises(RecipeError, match="there is no recipe ''"):
        load_recipe("")


FP8 = {
    "QuantizationModifier": {"targets": ["Linear"], "ignore": ["lm_head"], "scheme": "FP8_DYNAMIC"}
}
W4 = {
    "GPTQModifier": {
        "targets": ["Linear"],
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "strategy": "group", "group_size": 16},
            }
        },
    }
}


@pytest.mark.parametrize("modifiers", [FP8, W4], ids=["fp8", "w4a16"])
def test_kv_scales_are_those_of_the_model_with_quantized_weights(
    tiny: Callable[..., Path], tmp_path: Path, modifiers: dict[str, Any]
) -> None:
    source = tiny(dtype="bfloat16")
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": f"text {n} " * (3 + n)}) + "\n" for n in range(6)))
    recipe = Recipe(llmcompressor={"weights_stage": {"weights_modifiers": modifiers}})
    out = tmp_path / "out"
    result = calibrate(source, out, recipe=recipe, dataset=str(data), batch_size=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts.jsonl"]
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["config_groups"] and config["kv_cache_scheme"]["strategy"] == "tensor"
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert inspect(out).ok

    # The cache of the quantized model itself, loaded plainly, is what the scales must fit.
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in out.iterdir():
        (plain / file.name).write_bytes(file.read_bytes())
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = None
    (plain / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(plain)
    scales = read_scales(out)
    for index, layer in scales.layers.items():
        amax = {"k": 0.0, "v": 0.0}
        for row in result.data.rows:
            with torch.no_grad():
                cache = model(torch.tensor([row]), use_cache=True).past_key_values
            amax["k"] = max(amax["k"], cache.layers[index].keys.abs().max().item())
            amax["v"] = max(amax["v"], cache.layers[index].values.abs().max().item())
        np.testing.assert_allclose(
            [layer.k[0], layer.v[0]], [amax["k"] / 448, amax["v"] / 448], 1e-6
        )


def test_a_native_recipe_that_llm_compressor_refuses(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    modifiers = {"QuantizationModifier": {"targets": ["Linear"], "scheme": "FP9"}}
    recipe = Recipe(llmcompressor={"weights_stage": {"weights_modifiers": modifiers}})
    data = tmp_path / "texts.txt"
    data.write_text("some text\n")
    with pytest.raises(RecipeError, match="llmcompressor section: not accepted"):
        calibrate(tiny(), tmp_path / "out", recipe=recipe, dataset=str(data))
    assert [path.name for path in tmp_path.iterdir()] == ["texts.txt"]
