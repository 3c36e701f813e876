"""`merge`: scales from elsewhere are put into a checkpoint, or refused layer by layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_checkpoints import attention, declared, equal, write_scaled, write_source
from made_scales import make_scales
from test_convert import random_set

from fp8calib.checkpoint import inspect, open_checkpoint, read_scales
from fp8calib.checkpoint.conversion import convert, load_scales, merge
from fp8calib.checkpoint.formats import ScaleFile, own_json
from fp8calib.cli import main
from fp8calib.errors import CheckpointError, ScaleError
from fp8calib.scales import LayerScales, ScaleSet

Tiny = Callable[..., Path]


def written(scales: ScaleSet, path: Path, **more: Any) -> Path:
    path.write_bytes(own_json.write(ScaleFile(scales, **more)))
    return path


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "phi3"])
def test_a_real_model_takes_them(
    model_type: str, strategy: Any, tiny: Tiny, tmp_path: Path
) -> None:
    source = tiny(model_type)
    scales = make_scales(open_checkpoint(source).layers, strategy)
    result = merge(source, written(scales, tmp_path / "s.json"), tmp_path / "out")
    assert (result.lost, result.notes) == ([], [])
    assert result.serve == inspect(tmp_path / "out").serve
    assert equal(read_scales(tmp_path / "out"), scales)
    weights = (tmp_path / "out" / "model-00001-of-00002.safetensors").read_bytes()
    assert weights == (source / "model.safetensors").read_bytes()
    sidecar = json.loads((tmp_path / "out" / "fp8calib.json").read_text())
    assert sidecar["merged_from"] == "s.json"


def test_scales_of_another_checkpoint(tmp_path: Path) -> None:
    """The way from a tool that rewrites weights to the original's own bytes."""
    scales = random_set("tensor")
    theirs = {
        f"{attention(i)}.{kind}_scale": values
        for i, layer in scales.layers.items()
        for kind, values in layer.items()
    }
    other = write_scaled(tmp_path / "theirs", theirs, **declared("tensor"))
    merge(write_source(tmp_path / "mine"), other, tmp_path / "out")
    assert equal(read_scales(tmp_path / "out"), scales)


def test_scales_that_are_there_are_replaced_only_when_asked(tmp_path: Path) -> None:
    source, first, second = write_source(tmp_path / "src"), random_set(), random_set("tensor")
    merge(source, written(first, tmp_path / "a.json"), tmp_path / "one")
    with pytest.raises(CheckpointError, match="already has KV-cache scales"):
        merge(tmp_path / "one", written(second, tmp_path / "b.json"), tmp_path / "two")
    merge(tmp_path / "one", tmp_path / "b.json", tmp_path / "two", overwrite_scales=True)
    assert equal(read_scales(tmp_path / "two"), second)
    assert equal(read_scales(tmp_path / "one"), first)


def test_modelopts_form(tmp_path: Path) -> None:
    source, scales = write_source(tmp_path / "src"), random_set("tensor")
    result = merge(source, written(scales, tmp_path / "s.json"), tmp_path / "out", to="modelopt")
    assert result.lost == ["modelopt has no q_scale: it is left out"]
    assert result.serve is None and "vLLM stops" in result.notes[0]
    names = {name for name in open_checkpoint(tmp_path / "out").tensors if "_scale" in name}
    assert names == {f"{attention(i)}.{k}_proj.{k}_scale" for i in (0, 1) for k in "kv"}
    declared = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert declared["quantization"]["kv_cache_quant_algo"] == "FP8"
    with pytest.raises(ScaleError, match="use `fp8calib convert --to json`"):
        merge(source, tmp_path / "s.json", tmp_path / "x", to="json")


def changed(scales: ScaleSet, index: int, **change: Any) -> ScaleSet:
    layer = scales.layers[index]
    values = {"name": layer.name, "k": layer.k, "v": layer.v, "q": layer.q} | change
    return ScaleSet(scales.strategy, {**scales.layers, index: LayerScales(**values)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s: ScaleSet(s.strategy, {0: s.layers[0]}), "layer 1 .*: no scales"),
        (
            lambda s: ScaleSet(s.strategy, s.layers | {7: s.layers[1]}),
            "layer 7 .*: the model has no such attention layer",
        ),
        (
            lambda s: changed(s, 1, name="model.layers.1.cross_attn"),
            r"layer 1 \(model.layers.1.cross_attn\): the model's is model.layers.1.self_attn",
        ),
        (
            lambda s: changed(s, 0, name="model.layers.1.self_attn"),
            r"layer 0 \(model.layers.1.self_attn\): the model's is model.layers.0.self_attn",
        ),
        (
            lambda s: changed(s, 1, k=np.ones(4, "f4"), v=np.ones(4, "f4")),
            r"layer 1 .*: k_scale has shape \[4\], expected \[2\]",
        ),
    ],
    ids=["missing", "extra", "other-module", "swapped", "heads"],
)
def test_scales_must_fit_layer_by_layer(
    make: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(make(random_set()), tmp_path / "s.json")
    with pytest.raises(ScaleError, match=message):
        merge(write_source(tmp_path / "src"), path, tmp_path / "out")
    with pytest.raises(SystemExit) as stop:
        main(["merge", str(tmp_path / "src"), str(path), "-o", str(tmp_path / "out")])
    assert stop.value.code == 2 and not (tmp_path / "out").exists()


def test_a_composite_models_own_beginning_of_names_may_differ(tmp_path: Path) -> None:
    """The same language model alone and inside a vision model."""
    scales = random_set()
    layers = {
        i: LayerScales(f"model.language_model.layers.{i}.self_attn", a.k, a.v, a.q)
        for i, a in scales.layers.items()
    }
    path = written(ScaleSet(scales.strategy, layers), tmp_path / "s.json")
    merge(write_source(tmp_path / "src"), path, tmp_path / "out")
    assert equal(read_scales(tmp_path / "out"), scales)


def test_what_the_scales_were_made_for_is_told(tmp_path: Path) -> None:
    source = write_source(tmp_path / "src")
    path = written(random_set(), tmp_path / "s.json", model_type="qwen3", skip_layers=("-1",))
    result = merge(source, path, tmp_path / "out")
    assert result.notes == ["the scales are those of a qwen3 model, the checkpoint's type is llama"]
    assert result.serve is not None and result.serve.endswith("--kv-cache-dtype-skip-layers 1")


def test_a_converted_calibration_can_be_rescaled(tmp_path: Path, tiny: Tiny) -> None:
    from fp8calib import calibrate
    from fp8calib.calibration.rescale import rescale

    (tmp_path / "t.txt").write_text("some text to calibrate with, and a little more of it\n" * 4)
    calibrate(
        tiny(), tmp_path / "heads", strategy="attn_head", dataset=str(tmp_path / "t.txt"),
        max_seq_len=32,
    )  # fmt: skip
    convert(tmp_path / "heads", "compressed-tensors", tmp_path / "tensor", collapse_heads="max")
    again = rescale(tmp_path / "tensor", tmp_path / "again")
    assert again.scales.strategy == "tensor"
    assert equal(again.scales, read_scales(tmp_path / "tensor"))


def test_c20_scales_from_a_file_go_into_a_live_engine(tiny: Tiny, tmp_path: Path) -> None:
    """The file's side: what `load_scales` reads of any format is what a fresh load would hold."""
    from fp8calib import LLM, SamplingParams

    source = tiny()
    layers = open_checkpoint(source).layers
    first = make_scales(layers, "tensor")
    second = ScaleSet(
        "tensor",
        {i: LayerScales(a.name, a.k / 64, a.v / 64, a.q) for i, a in first.layers.items()},
    )
    merge(source, written(first, tmp_path / "1.json"), tmp_path / "one")
    merge(source, written(second, tmp_path / "2.json"), tmp_path / "two")
    greedy = SamplingParams(temperature=0, max_tokens=8)
    llm = LLM(str(tmp_path / "one"))
    before = llm.generate(["some text"], greedy)[0].outputs[0].token_ids
    llm.reload_scales(load_scales(tmp_path / "2.json"))
    after = llm.generate(["some text"], greedy)[0].outputs[0].token_ids
    fresh = LLM(str(tmp_path / "two")).generate(["some text"], greedy)[0].outputs[0].token_ids
    assert list(after) == list(fresh) and list(after) != list(before)
