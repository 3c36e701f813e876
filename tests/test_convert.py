"""`convert`: every format read and written, what is lost is said, what is wrong is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_checkpoints import (
    HEADS,
    KV_HEADS,
    attention,
    declared,
    equal,
    scale_sets,
    write_scaled,
    write_source,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from fp8calib.checkpoint import check_scheme, check_source, open_checkpoint, read_scales
from fp8calib.checkpoint.conversion import convert, merge
from fp8calib.checkpoint.formats import FORMATS, ScaleFile, losses, own_json, read_scale_file
from fp8calib.checkpoint.sharding import shard
from fp8calib.cli import main
from fp8calib.errors import CheckpointError, ScaleError
from fp8calib.scales import LayerScales, ScaleSet

quick = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def checkpoint_of(scales: ScaleSet, folder: Path) -> Path:
    """A checkpoint that holds `scales`, by way of `merge`."""
    folder.mkdir()
    source = write_source(folder / "source")
    (folder / "scales.json").write_bytes(own_json.write(ScaleFile(scales)))
    merge(source, folder / "scales.json", folder / "made")
    return folder / "made"


def fresh(folder: Path) -> Path:
    """A folder of its own for each example of a property."""
    number = sum(1 for _ in folder.iterdir())
    return folder / f"example-{number}"


def random_set(strategy: Any = "attn_head", query: bool = True) -> ScaleSet:
    rng = np.random.default_rng(3)

    def draw(heads: int) -> np.ndarray:
        return np.exp(rng.uniform(-4, 0, heads if strategy == "attn_head" else 1)).astype("<f4")

    layers = {
        i: LayerScales(attention(i), draw(KV_HEADS), draw(KV_HEADS), draw(HEADS) if query else None)
        for i in range(2)
    }
    return ScaleSet(strategy, layers)


# --- round trips -----------------------------------------------------------------------------


@given(scales=scale_sets())
@quick
def test_json_and_checkpoints_hold_everything(scales: ScaleSet, tmp_path: Path) -> None:
    place = fresh(tmp_path)
    made = checkpoint_of(scales, place)
    assert equal(read_scales(made), scales)
    result = convert(made, "json", place / "again.json")
    assert (result.lost, result.strategy, result.layers) == ([], scales.strategy, 2)
    assert equal(read_scale_file(place / "again.json").scales, scales)
    names = [layer.name for layer in read_scale_file(place / "again.json").scales.layers.values()]
    assert names == [attention(0), attention(1)]


@given(scales=scale_sets("tensor", query=False))
@quick
def test_modelopts_form_holds_per_tensor_scales(scales: ScaleSet, tmp_path: Path) -> None:
    place = fresh(tmp_path)
    made = checkpoint_of(scales, place)
    assert convert(made, "modelopt", place / "modelopt").lost == []
    assert equal(read_scales(place / "modelopt"), scales)
    back = convert(place / "modelopt", "compressed-tensors", place / "back")
    assert back.lost == []
    assert equal(read_scales(place / "back"), scales)
    assert not (place / "back" / "hf_quant_config.json").exists()


@given(scales=scale_sets(), target=st.sampled_from(["sglang", "trtllm"]), tp=st.integers(1, 8))
@quick
def test_formats_of_one_factor_hold_the_largest(
    scales: ScaleSet, target: str, tp: int, tmp_path: Path
) -> None:
    tp = tp if target == "sglang" and tp not in (3, 5, 6, 7) else 1
    place = fresh(tmp_path)
    place.mkdir()
    source = place / "scales.json"
    source.write_bytes(own_json.write(ScaleFile(scales, "llama")))
    out = place / ("out.json" if target == "sglang" else "out.safetensors")
    result = convert(source, target, out, tp=tp, collapse_heads="max")
    read = read_scale_file(out)
    for index, layer in scales.layers.items():
        largest = np.float32(max(layer.k.max(), layer.v.max()))
        for found in (read.scales.layers[index].k, read.scales.layers[index].v):
            assert found.tolist() == [largest]
    assert result.lost == losses(scales, FORMATS[target])
    # What came back fits the format, so that it goes out again unchanged.
    again = convert(out, target, place / f"again{out.suffix}", tp=1)
    assert again.lost == []
    assert equal(read_scale_file(place / f"again{out.suffix}").scales, read.scales)


def test_what_is_lost_is_said(tmp_path: Path) -> None:
    made = checkpoint_of(random_set(), tmp_path / "a")
    lost = convert(made, "trtllm", tmp_path / "x.safetensors", collapse_heads="max").lost
    assert ["heads share" in lost[0], "no q_scale" in lost[1], "K and V" in lost[2]] == [True] * 3
    sidecar = json.loads((made / "fp8calib.json").read_text()) | {"skip_layers": ["0"]}
    (made / "fp8calib.json").write_text(json.dumps(sidecar))
    lost = convert(made, "sglang", tmp_path / "x.json", collapse_heads="max").lost
    assert lost[-1] == "sglang has no place for skip layers (0)"
    assert convert(made, "json", tmp_path / "y.json").lost == []
    assert read_scale_file(tmp_path / "y.json").skip_layers == ("0",)


# --- collapsing heads ------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["modelopt", "sglang", "trtllm"])
def test_heads_are_collapsed_only_when_asked(target: str, tmp_path: Path) -> None:
    made = checkpoint_of(random_set(), tmp_path / "a")
    with pytest.raises(ScaleError, match="pass --collapse-heads max"):
        convert(made, target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_collapsed_heads_clip_nothing(tmp_path: Path) -> None:
    scales = random_set()
    made = checkpoint_of(scales, tmp_path / "a")
    result = convert(made, "compressed-tensors", tmp_path / "out", collapse_heads="max")
    collapsed = read_scales(tmp_path / "out")
    assert (collapsed.strategy, result.strategy) == ("tensor", "tensor")
    for index, layer in scales.layers.items():
        for kind, values in layer.items():
            assert getattr(collapsed.layers[index], kind).tolist() == [values.max()]
    assert check_scheme(open_checkpoint(tmp_path / "out").config) == "tensor"


def test_heads_cannot_be_made_of_one_scale(tmp_path: Path) -> None:
    content = json.loads(own_json.write(ScaleFile(random_set("tensor"))))
    (tmp_path / "s.json").write_text(json.dumps(content | {"strategy": "attn_head"}))
    source = write_source(tmp_path / "source")
    with pytest.raises(ScaleError, match=r"k_scale has shape \[1\], expected \[2\]"):
        merge(source, tmp_path / "s.json", tmp_path / "out")
    with pytest.raises(ScaleError, match="max is the one way"):
        convert(tmp_path / "s.json", "json", tmp_path / "x.json", collapse_heads="mean")


def test_ranks_take_the_largest_of_their_own_heads(tmp_path: Path) -> None:
    """Two KV heads on 1, 2, 4 and 8 ranks: as vLLM divides them."""
    scales = random_set()
    made = checkpoint_of(scales, tmp_path / "a")
    for tp in (1, 2, 4, 8):
        convert(made, "sglang", tmp_path / f"{tp}.json", tp=tp, collapse_heads="max")
        factors = json.loads((tmp_path / f"{tp}.json").read_text())["kv_cache"]["scaling_factor"]
        assert list(factors) == [str(rank) for rank in range(tp)]
        for rank in range(tp):
            for index, layer in scales.layers.items():
                mine = slice(None) if tp == 1 else slice(rank * 2 // tp, rank * 2 // tp + 1)
                meant = max(layer.k[mine].max(), layer.v[mine].max())
                assert np.float32(factors[str(rank)][str(index)]) == meant
    with pytest.raises(ScaleError, match="2 KV heads cannot be divided among 3 ranks"):
        convert(made, "sglang", tmp_path / "3.json", tp=3, collapse_heads="max")
    assert shard(scales, 4, 3).layers[0].q.tolist() == [scales.layers[0].q[2:].max()]


# --- what is read ----------------------------------------------------------------------------


def names(form: str) -> dict[str, np.ndarray]:
    """Scales of two layers under older names; 0.25 for K, 0.5 for V, or 0.5 for both."""
    made: dict[str, np.ndarray] = {}
    for layer in range(2):
        module = attention(layer)
        k, v = np.float32([0.25]), np.float32([0.5])
        made |= {
            "kv_scale": {f"{module}.kv_scale": v},
            "output_scale": {
                f"{module}.k_proj.output_scale": k,
                f"{module}.v_proj.output_scale": v,
            },
            "modelopt": {f"{module}.k_proj.k_scale": k[0], f"{module}.v_proj.v_scale": v[0]},
            "bfloat16": {f"{module}.k_scale": k, f"{module}.v_scale": v},
            "scalars": {f"{module}.k_scale": k[0], f"{module}.v_scale": v[0]},
            "runtime": {f"{module}.attn.k_scale": k, f"{module}.attn.v_scale": v},
        }[form]
    return {name: np.asarray(values) for name, values in made.items()}


@pytest.mark.parametrize("form", ["kv_scale", "output_scale", "modelopt", "scalars", "runtime"])
def test_c08_c09_old_names_are_read_and_the_current_ones_written(form: str, tmp_path: Path) -> None:
    old = write_scaled(tmp_path / "old", names(form), **declared("tensor"))
    convert(old, "compressed-tensors", tmp_path / "out")
    shard_file = tmp_path / "out" / "model-00002-of-00002.safetensors"
    tensors = load_file(shard_file)
    assert sorted(tensors) == [f"{attention(i)}.{kind}_scale" for i in (0, 1) for kind in "kv"]
    for layer in range(2):
        k, v = tensors[f"{attention(layer)}.k_scale"], tensors[f"{attention(layer)}.v_scale"]
        assert (k.tolist(), v.tolist()) == ([0.5 if form == "kv_scale" else 0.25], [0.5])
    save_file(names(form), tmp_path / "alone.safetensors")
    assert equal(
        read_scale_file(tmp_path / "alone.safetensors").scales, read_scales(tmp_path / "out")
    )


@pytest.mark.parametrize("shape", [(KV_HEADS,), (KV_HEADS, 1, 1)])
def test_per_head_scales_of_llm_compressor_with_zero_points(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    """bfloat16, q, float8 zero points, an attention group: read, and written without the noise."""
    import torch
    from safetensors.torch import save_file as save_torch

    tensors = {}
    for layer in range(2):
        for kind, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            values = torch.linspace(0.01, 0.5, heads).reshape(-1, *shape[1:]).bfloat16()
            tensors[f"{attention(layer)}.{kind}_scale"] = values
            zeros = torch.zeros(heads).to(torch.float8_e4m3fn)
            tensors[f"{attention(layer)}.{kind}_zero_point"] = zeros
    config = declared("attn_head")
    group = {"targets": ["LlamaAttention"], "input_activations": {"num_bits": 8}}
    config["quantization_config"]["config_groups"] = {"group_0": group}
    old = write_scaled(tmp_path / "old", {"x": np.ones(1, np.float32)}, **config)
    last = old / "model-00002-of-00002.safetensors"
    save_torch(tensors, last)
    index = json.loads((old / "model.safetensors.index.json").read_text())
    index["weight_map"].pop("x")
    index["weight_map"] |= dict.fromkeys(tensors, last.name)
    (old / "model.safetensors.index.json").write_text(json.dumps(index))
    convert(old, "compressed-tensors", tmp_path / "out")
    written = open_checkpoint(tmp_path / "out")
    assert not [name for name in written.tensors if "zero_point" in name]
    assert written.tensors[f"{attention(1)}.q_scale"].shape == (HEADS, 1, 1)
    assert written.tensors[f"{attention(1)}.q_scale"].dtype == "F32"
    kept = written.config["quantization_config"]["config_groups"]
    assert kept == {"group_0": group}
    meant = torch.linspace(0.01, 0.5, HEADS).bfloat16().float().tolist()
    assert read_scales(tmp_path / "out").layers[0].q.tolist() == meant


def test_an_older_modelopt_declares_its_cache_in_a_file_of_its_own(tmp_path: Path) -> None:
    old = write_scaled(tmp_path / "old", names("modelopt"))
    content = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (old / "hf_quant_config.json").write_text(json.dumps(content))
    assert read_scales(old).strategy == "tensor"
    convert(old, "compressed-tensors", tmp_path / "out")
    assert equal(read_scales(tmp_path / "out"), read_scales(old))
    content["quantization"]["kv_cache_quant_algo"] = "NVFP4"
    (old / "hf_quant_config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="'NVFP4' is not FP8"):
        convert(old, "json", tmp_path / "x.json")
    content["quantization"] = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    (old / "hf_quant_config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="quantized by an older modelopt"):
        convert(old, "compressed-tensors", tmp_path / "new")


def trtllm_checkpoint(folder: Path, factors: list[dict[str, float]], **config: Any) -> Path:
    folder.mkdir()
    content = {"architecture": "LlamaForCausalLM", "num_hidden_layers": 2}
    content |= {"quantization": {"kv_cache_quant_algo": "FP8"}} | config
    (folder / "config.json").write_text(json.dumps(content))
    for rank, of_rank in enumerate(factors):
        tensors = {
            f"transformer.layers.{layer}.attention.kv_cache_scaling_factor": np.float32([factor])
            for layer, factor in of_rank.items()
        }
        save_file(tensors, folder / f"rank{rank}.safetensors")
    return folder


def test_a_checkpoint_of_tensorrt_llm(tmp_path: Path) -> None:
    folder = trtllm_checkpoint(tmp_path / "a", [{"0": 0.5, "1": 0.25}, {"0": 0.125, "1": 1.5}])
    assert convert(folder, "json", tmp_path / "s.json").layers == 2
    read = read_scale_file(tmp_path / "s.json").scales
    assert [layer.k.tolist() for layer in read.layers.values()] == [[0.5], [1.5]]
    for number, (factors, config, message) in enumerate(
        (
            ([{"0": 0.5}], {}, "layer 1 is missing"),
            ([{"0": 0.5, "1": -1.0}, {"0": 0.5, "1": 1.0}], {}, "layer 1: k_scale is not positive"),
            ([{"0": 0.5, "1": 0.5}], {"quantization": {}}, "is None, not FP8"),
            ([{"0": 0.5, "1": 0.5}], {"mapping": {"pp_size": 2}}, "pipeline stages"),
        )
    ):
        bad = trtllm_checkpoint(tmp_path / f"bad{number}", factors, **config)
        with pytest.raises(ScaleError, match=message):
            convert(bad, "json", tmp_path / "x.json")


# --- one validator at every door -------------------------------------------------------------

WRONG: dict[str, tuple[float, str]] = {
    "zero": (0.0, "is not positive"),
    "negative": (-0.5, "is not positive"),
    "nan": (float("nan"), "is not finite"),
    "inf": (float("inf"), "is not finite"),
    "denormal": (1e-40, "is subnormal"),
    "absurd": (20000.0, "is absurdly large"),
}


def by_json(values: list[float], folder: Path) -> Path:
    layers = [
        {"index": i, "name": attention(i), "k_scale": [0.5], "v_scale": [0.5]} for i in range(2)
    ]
    layers[1]["v_scale"] = values
    content = {
        "format": "fp8calib-scales", "schema_version": 1, "strategy": "tensor",
        "dtype": "float8_e4m3fn", "layers": layers,
    }  # fmt: skip
    (folder / "s.json").write_text(json.dumps(content))
    return folder / "s.json"


def by_param_json(values: list[float], folder: Path) -> Path:
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.5, "1": values[0]}}}
    (folder / "p.json").write_text(json.dumps({"model_type": "llama", "kv_cache": cache}))
    return folder / "p.json"


def by_tensors(values: list[float], folder: Path) -> Path:
    tensors = {f"{attention(i)}.{kind}_scale": np.float32([0.5]) for i in (0, 1) for kind in "kv"}
    tensors[f"{attention(1)}.v_scale"] = np.float32(values)
    save_file(tensors, folder / "s.safetensors")
    return folder / "s.safetensors"


def by_trtllm(values: list[float], folder: Path) -> Path:
    name = "transformer.layers.{}.attention.kv_cache_scaling_factor"
    tensors = {name.format(0): np.float32([0.5]), name.format(1): np.float32(values)}
    save_file(tensors, folder / "t.safetensors")
    return folder / "t.safetensors"


def by_checkpoint(values: list[float], folder: Path) -> Path:
    tensors = {f"{attention(i)}.{kind}_scale": np.float32([0.5]) for i in (0, 1) for kind in "kv"}
    tensors[f"{attention(1)}.v_scale"] = np.float32(values)
    return write_scaled(folder / "checkpoint", tensors, **declared("tensor"))


DOORS: list[Callable[[list[float], Path], Path]] = [
    by_json, by_param_json, by_tensors, by_trtllm, by_checkpoint,
]  # fmt: skip


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
@pytest.mark.parametrize("value", WRONG)
def test_every_door_refuses_what_is_no_scale(
    value: str, door: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    number, message = WRONG[value]
    source = door([number], tmp_path)
    plain = write_source(tmp_path / "plain")
    for command in (
        ["convert", str(source), "--to", "json", "-o", str(tmp_path / "out")],
        ["merge", str(plain), str(source), "-o", str(tmp_path / "out")],
    ):
        with pytest.raises(SystemExit) as stop:
            main(command)
        error = capsys.readouterr().err.strip()
        assert stop.value.code == 2
        assert "layer 1" in error and message in error and "\n" not in error
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("door", [by_json, by_tensors, by_checkpoint])
def test_every_door_refuses_the_wrong_length(door: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ScaleError, match=r"layer 1 .*v_scale has shape \[3\], expected"):
        convert(door([0.5, 0.5, 0.5], tmp_path), "json", tmp_path / "out.json")


def edited(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("layers"), "layers: Field required"),
        (lambda c: c.update(layers=[]), "layers: List should have at least 1 item"),
        (lambda c: c["layers"].append(c["layers"][0]), r"layer 0 \(.*\) occurs twice"),
        (lambda c: c["layers"][0].update(extra=1), "layers.0.extra: Extra inputs"),
        (lambda c: c["layers"][0].pop("k_scale"), "layers.0.k_scale: Field required"),
        (lambda c: c["layers"][0].update(k_scale=[]), "layers.0.k_scale: List should have at"),
        (lambda c: c["layers"][0].update(k_scale=["0.5"]), "layers.0.k_scale.0: Input should be"),
        (lambda c: c["layers"][0].update(k_scale=[True]), "layers.0.k_scale.0: Input should be"),
        (lambda c: c["layers"][0].update(index=-1), "layers.0.index: Input should be greater"),
        (lambda c: c["layers"][0].update(q_scale=[0.5]), "layer 1 .*: q_scale is missing"),
        (lambda c: c.update(strategy="channel"), "strategy: Input should be"),
        (lambda c: c.update(dtype="float8_e5m2"), "dtype: Input should be"),
        (lambda c: c.update(schema_version=2), "a newer fp8calib wrote it"),
        (lambda c: c.update(format="other"), "is no JSON of scales"),
    ],
)
def test_our_json_is_validated(change: Any, message: str, tmp_path: Path) -> None:
    path = edited(by_json([0.5], tmp_path), change)
    with pytest.raises(ScaleError, match=message) as problem:
        convert(path, "json", tmp_path / "out.json")
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.pop("0"), "has no ranks"),
        (lambda f: f.update({"2": f["0"]}), "ranks are 0, 2, expected"),
        (lambda f: f.update({"1": {"0": 0.5}}), "layer 1 is missing in rank 1"),
        (lambda f: f["0"].pop("0"), "layer 0 is missing"),
        (lambda f: f["0"].update({"01": 0.5}), "layer 1 occurs twice"),
        (lambda f: f["0"].update({"x": 0.5}), "'x' is no layer's index"),
        (lambda f: f["0"].update({"1": "0.5"}), "Input should be a valid number"),
    ],
)
def test_sglangs_json_is_validated(change: Any, message: str, tmp_path: Path) -> None:
    path = by_param_json([0.5], tmp_path)
    edited(path, lambda content: change(content["kv_cache"]["scaling_factor"]))
    with pytest.raises(ScaleError, match=message):
        convert(path, "json", tmp_path / "out.json")


def test_keys_that_occur_twice_are_refused(tmp_path: Path) -> None:
    path = by_param_json([0.5], tmp_path)
    path.write_text(path.read_text().replace('"1": 0.5', '"1": 0.5, "1": 0.25'))
    with pytest.raises(CheckpointError, match="'1' occurs twice"):
        convert(path, "json", tmp_path / "out.json")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"lm_head.weight": [1.0]}, "'lm_head.weight' is no KV-cache scale"),
        ({"other.layers.0.self_attn.k_scale": [0.5]}, "layer 0 occurs twice"),
        ({f"{attention(0)}.k_proj.k_scale": [0.5]}, "layer 0: k_scale occurs twice"),
        ({f"{attention(2)}.k_scale": [0.5]}, r"layer 2 \(.*\): v_scale is missing"),
    ],
)
def test_files_of_tensors_hold_each_layers_scales_once(
    tensors: dict[str, list[float]], message: str, tmp_path: Path
) -> None:
    path = by_tensors([0.5], tmp_path)
    more = {name: np.float32(values) for name, values in tensors.items()}
    save_file(load_file(path) | more, path)
    with pytest.raises(ScaleError, match=message):
        convert(path, "json", tmp_path / "out.json")


# --- the command -----------------------------------------------------------------------------


def test_c07_constants_are_called_not_calibrated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for value, said in ((1.0, "exactly 1.0 in every layer"), (0.5, "exporters that only cast")):
        place = tmp_path / str(value)
        tensors = {
            f"{attention(i)}.{kind}_proj.{kind}_scale": np.array(value, np.float32)
            for i in (0, 1)
            for kind in "kv"
        }
        place.mkdir()
        old = write_scaled(place / "old", tensors, **declared("tensor"))
        result = convert(old, "json", place / "s.json")
        assert said in " ".join(result.notes)
        with pytest.raises(SystemExit) as stop:
            main(["inspect", str(old)])
        err = capsys.readouterr().err
        assert stop.value.code == 1 and "not calibrated" in err and said in err.replace("\n", " ")


@pytest.mark.parametrize(
    "change",
    [
        {"num_bits": 4},
        {"type": "int"},
        {"strategy": "channel"},
        {"strategy": "token"},
        {"strategy": "block"},
        {"symmetric": False},
        {"dynamic": True},
        {"strategy": "heads"},
    ],
)
def test_c15_refused_schemes_are_refused_at_every_door(
    change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = declared("tensor")
    config["quantization_config"]["kv_cache_scheme"] |= change
    old = write_scaled(tmp_path / "old", names("scalars"), **config)
    said = set()
    for command in (
        ["inspect", str(old)],
        ["inspect", str(old), "--runtime", "sglang"],
        ["convert", str(old), "--to", "json", "-o", str(tmp_path / "out.json")],
        ["merge", str(write_source(tmp_path / "new")), str(old), "-o", str(tmp_path / "out")],
        ["merge", str(old), str(by_json([0.5], tmp_path)), "-o", str(tmp_path / "out")],
    ):
        with pytest.raises(SystemExit) as stop:
            main(command)
        assert stop.value.code == 2
        said.add(capsys.readouterr().err.strip().splitlines()[-1])
    assert len(said) == 1 and "kv_cache_scheme" in said.pop()
    with pytest.raises(CheckpointError, match="kv_cache_scheme"):
        check_source(old, replace_scales=True)


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = checkpoint_of(random_set(), tmp_path / "a")
    out = tmp_path / "kv.json"
    command = ["convert", str(made), "--to", "sglang", "-o", str(out), "--collapse-heads", "max"]
    with pytest.raises(SystemExit) as stop:
        main([*command, "--tp", "2"])
    err = capsys.readouterr().err
    assert stop.value.code == 0
    assert "lost: sglang has no q_scale" in err and "2 layers, tensor scales" in err
    with pytest.raises(SystemExit) as stop:
        main(command)
    assert stop.value.code == 2 and "exists: choose another" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main([*command, "--overwrite", "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert stop.value.code == 0 and shown["format"] == "sglang" and len(shown["lost"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "gguf", "-o", "x"], "there is no format 'gguf'"),
        (["--to", "json", "--tp", "2", "-o", "x"], "--tp is for the sglang format"),
        (["--to", "compressed-tensors", "-o", "x"], "fp8calib merge CHECKPOINT"),
        (["--to", "sglang", "-o", "x"], "names the model's type"),
        (["--to", "json", "-o", "."], "exists"),
        (["--to", "json", "-o", "n" * 300], "cannot write"),
    ],
)
def test_wrong_usage(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    by_json([0.5], tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["convert", "s.json", *arguments])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_converting_imports_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    made = checkpoint_of(random_set(), tmp_path / "a")
    code = (
        "import sys\nfrom fp8calib.checkpoint.conversion import convert\n"
        f"convert({str(made)!r}, 'json', {str(tmp_path / 's.json')!r})\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_link_that_is_overwritten_stays_a_link(tmp_path: Path) -> None:
    made = checkpoint_of(random_set(), tmp_path / "a")
    (tmp_path / "real.json").write_text("{}")
    (tmp_path / "link.json").symlink_to("real.json")
    convert(made, "json", tmp_path / "link.json", overwrite=True)
    assert (tmp_path / "link.json").is_symlink()
    assert equal(read_scale_file(tmp_path / "real.json").scales, read_scales(made))


@pytest.mark.parametrize("target", ["json", "sglang"])
def test_scales_that_are_text_go_to_stdout(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = checkpoint_of(random_set("tensor", query=False), tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    for output in ("-", "x.json"):
        with pytest.raises(SystemExit) as stop:
            main(["convert", str(made), "--to", target, "-o", output])
        shown = capsys.readouterr()
        assert stop.value.code == 0
        if output == "-":
            printed = shown.out
            assert "wrote to stdout: 2 layers" in shown.err
    assert printed == (tmp_path / "x.json").read_text()
    assert {place.name for place in tmp_path.iterdir()} == {"a", "x.json"}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["convert", "MADE", "--to", "trtllm", "-o", "-"], "scales are no text: name a file"),
        (["convert", "MADE", "--to", "json", "-o", "-", "--json"], "both write to stdout"),
        (["convert", "MADE", "--to", "modelopt", "-o", "-"], "is a folder: name one"),
        (["merge", "SOURCE", "MADE", "-o", "-"], "is a folder: name one"),
        (["rescale", "MADE", "-o", "-"], "is a folder: name one"),
        (["calibrate", "SOURCE", "-o", "-"], "is a folder: name one"),
        (["verify", "MADE", "--report", "-"], "--report -: name a file; the report goes to stdout"),
        (["verify", "MADE", "--junit", "-"], "--junit -: name a file"),
        (["sensitivity", "MADE", "--report", "-"], "--report -: name a file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_no_other_output_goes_to_stdout(
    command: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = checkpoint_of(random_set("tensor"), tmp_path / "a")
    places = {"MADE": str(made), "SOURCE": str(tmp_path / "a" / "source")}
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(SystemExit) as stop:
        main([places.get(word, word) for word in command])
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize(("target", "name"), [("trtllm", "x.json"), ("json", "x.safetensors")])
def test_a_name_that_would_not_be_read_back_is_refused(
    target: str, name: str, tmp_path: Path
) -> None:
    made = checkpoint_of(random_set("tensor"), tmp_path / "a")
    with pytest.raises(ScaleError, match="go into a file named"):
        convert(made, target, tmp_path / name)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("target", "kept"), [("compressed-tensors", True), ("modelopt", False), ("collapsed", False)]
)
def test_what_was_measured_with_other_scales_is_not_carried_over(
    target: str, kept: bool, tmp_path: Path
) -> None:
    made = checkpoint_of(
        random_set("attn_head" if target == "collapsed" else "tensor"), tmp_path / "a"
    )
    record = json.loads((made / "fp8calib.json").read_text())
    measured = {"accuracy": {"ok": True}, "sensitivity": {"budget": 1}}
    (made / "fp8calib.json").write_text(json.dumps(record | measured))
    to, how = (target, None) if target != "collapsed" else ("compressed-tensors", "max")
    convert(made, to, tmp_path / "out", collapse_heads=how)
    found = json.loads((tmp_path / "out" / "fp8calib.json").read_text())
    assert [name in found for name in measured] == [kept, kept]
