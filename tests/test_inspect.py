"""`fp8calib inspect`: what it says, what it exits with, and how little it needs for that."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_scales import calibrated, make_scales
from safetensors.numpy import load_file, save_file

from fp8calib.checkpoint import inspect, open_checkpoint, write_checkpoint
from fp8calib.cli import main
from fp8calib.errors import CheckpointError, UserError
from fp8calib.scales import LayerScales, ScaleSet

Tiny = Callable[..., Path]
Tensors = dict[str, np.ndarray]
INDEX = "model.safetensors.index.json"
SCALES = "model-00002-of-00002.safetensors"
LAYER = "model.layers.1.self_attn"


def tampered(folder: Path, change: Callable[[Tensors], Any]) -> Path:
    """Change the scales of a checkpoint, keeping its index true."""
    tensors = load_file(folder / SCALES)
    change(tensors)
    save_file(tensors, folder / SCALES, metadata={"format": "pt"})
    index = json.loads((folder / INDEX).read_text())
    weights = {name: file for name, file in index["weight_map"].items() if file != SCALES}
    index["weight_map"] = weights | dict.fromkeys(tensors, SCALES)
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def set_all(value: float, *kinds: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name, values in tensors.items():
            if name.endswith(tuple(f".{kind}_scale" for kind in kinds)):
                tensors[name] = np.full_like(values, value)

    return change


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


# --- sound checkpoints -----------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_a_calibrated_checkpoint_is_in_order(strategy: Any, tiny: Tiny, tmp_path: Path) -> None:
    scales = calibrated(tiny(), tmp_path / "out", strategy)
    found = inspect(tmp_path / "out")
    assert (found.problems, found.ok) == ([], True)
    assert (found.strategy, found.kv_cache_dtype) == (strategy, "fp8")
    assert found.serve == f"vllm serve {tmp_path / 'out'}"
    for layer in found.layers:
        for kind, values in scales.layers[layer.index].items():
            assert layer.scale(kind) == values.tolist()
    notes = " ".join(found.notes)
    assert ("FlashAttention 3 or 4" in notes) == (strategy == "attn_head")
    assert "fp8_e5m2 is refused" in notes


def test_recorded_skip_layers_are_shown_with_vllms_flag(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("gemma3_text")  # layer 0 has a window, layer 1 has none
    layers = open_checkpoint(source).layers
    sidecar = {"skip_layers": ["sliding_window"]}
    scales = make_scales(layers, "tensor")
    write_checkpoint(source, tmp_path / "out", scales, sidecar, layers=layers)
    found = inspect(tmp_path / "out")
    assert found.ok
    assert [layer.skipped for layer in found.layers] == [True, False]
    assert found.serve.endswith(" --kv-cache-dtype-skip-layers sliding_window")


def test_skip_layers_that_do_not_exist_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    calibrated(tiny(), tmp_path / "out")
    (tmp_path / "out" / "fp8calib.json").write_text('{"skip_layers": ["7"]}')
    with pytest.raises(UserError, match=r"fp8calib\.json: skip layers: there is no .* layer 7"):
        inspect(tmp_path / "out")


def test_table_heads_and_json(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    scales = calibrated(tiny(), output, "attn_head")
    code, out, err = run(["inspect", str(output)], capsys)
    assert (code, out) == (0, "")
    assert "vllm serve" in err
    code, _, err = run(["inspect", str(output), "--heads"], capsys)
    assert code == 0
    for values in (scales.layers[1].k, scales.layers[1].v, scales.layers[1].q):
        assert values is not None
        assert all(f"{value:.6g}" in err for value in values)
    code, out, _ = run(["inspect", str(output), "--json"], capsys)
    shown = json.loads(out)
    assert (code, shown["ok"], shown["strategy"]) == (0, True, "attn_head")
    assert np.float32(shown["layers"][1]["k_scale"]).tolist() == scales.layers[1].k.tolist()


# --- checkpoints that would silently run at 1.0 ----------------------------------------------


def test_a_plain_model_is_not_calibrated(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(["inspect", str(tiny())], capsys)
    assert code == 1
    assert "not calibrated: there are no KV-cache scales" in err.replace("\n", " ")


def test_a_scheme_without_scales(tiny: Tiny, tmp_path: Path) -> None:
    tampered_config = inspect(tampered(_made(tiny, tmp_path), dict.clear))
    assert tampered_config.kv_cache_dtype == "fp8"
    assert "declares an FP8 cache but there are no scales" in tampered_config.problems[0]


def _made(tiny: Tiny, tmp_path: Path, strategy: Any = "tensor") -> Path:
    calibrated(tiny(), tmp_path / "out", strategy)
    return tmp_path / "out"


def test_scales_without_a_scheme(tiny: Tiny, tmp_path: Path) -> None:
    output = _made(tiny, tmp_path, "attn_head")
    shutil.copy(tiny() / "config.json", output / "config.json")
    found = inspect(output)
    assert found.problems == ["config.json declares no kv_cache_scheme: vLLM ignores the scales"]


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_c07_all_ones(strategy: Any, tiny: Tiny, tmp_path: Path) -> None:
    found = inspect(tampered(_made(tiny, tmp_path, strategy), set_all(1.0, "k", "v")))
    assert found.problems == [
        "not calibrated: k_scale is exactly 1.0 in every layer",
        "not calibrated: v_scale is exactly 1.0 in every layer",
    ]


def test_c07_constant_scales_of_a_cast(tiny: Tiny, tmp_path: Path) -> None:
    found = inspect(tampered(_made(tiny, tmp_path), set_all(0.25, "k", "v")))
    assert len(found.problems) == 2
    for problem, kind in zip(found.problems, "kv", strict=True):
        assert problem.startswith(f"not calibrated: {kind}_scale is 0.25 in every layer")


def test_one_layer_at_one_is_believed_only_with_a_record(tiny: Tiny, tmp_path: Path) -> None:
    output = _made(tiny, tmp_path)
    tampered(output, lambda t: t.update({f"{LAYER}.v_scale": np.ones(1, np.float32)}))
    assert inspect(output).problems == ["not calibrated: v_scale is exactly 1.0 in layers 1"]
    for amax, believed in ([0.0, 0.0], True), ([448.0, 1.0], True), ([3.0, 0.0], False):
        record = {"layers": {"1": {"v": {"amax": amax}}}}
        (output / "fp8calib.json").write_text(json.dumps(record))
        assert inspect(output).ok == believed


def test_layers_that_share_a_cache_repeat_its_scales(tiny: Tiny, tmp_path: Path) -> None:
    shared = {"num_hidden_layers": 4, "num_kv_shared_layers": 3, "head_dim": 16}
    extra = {
        "laurel_rank": 4,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 320,
        "layer_types": ["full_attention"] * 4,
    }
    source = tiny("gemma3n_text", **shared, **extra)
    layers = open_checkpoint(source).layers
    assert [layer.kv_source for layer in layers] == [None, 0, 0, 0]
    first = make_scales(layers, "tensor").layers[0]
    scales = {layer.index: LayerScales(layer.name, first.k, first.v, first.q) for layer in layers}
    write_checkpoint(source, tmp_path / "out", ScaleSet("tensor", scales), {}, layers=layers)
    assert inspect(tmp_path / "out").ok


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda t: t.pop(f"{LAYER}.k_scale"), "k_scale is missing", id="no-k"),
        pytest.param(lambda t: t.pop(f"{LAYER}.q_scale"), "q_scale is missing", id="no-q"),
        pytest.param(
            lambda t: [t.pop(name) for name in list(t) if name.startswith(LAYER)],
            "q_scale are missing",
            id="no-layer",
        ),
        pytest.param(
            lambda t: t.update({f"{LAYER}.v_scale": np.float32([np.inf])}), "not finite", id="inf"
        ),
        pytest.param(
            lambda t: t.update({f"{LAYER}.v_scale": np.float32([0])}), "not positive", id="zero"
        ),
        pytest.param(
            lambda t: t.update({f"{LAYER}.v_scale": np.float32([1e-3, 1e-2])}),
            "has shape",
            id="shape",
        ),
    ],
)
def test_unusable_scales_name_their_layer(
    change: Callable[[Tensors], Any], message: str, tiny: Tiny, tmp_path: Path
) -> None:
    found = inspect(tampered(_made(tiny, tmp_path), change))
    assert [problem for problem in found.problems if message in problem and LAYER in problem]


def test_scales_in_a_shard_that_the_index_does_not_list(tiny: Tiny, tmp_path: Path) -> None:
    output = _made(tiny, tmp_path)
    index = json.loads((output / INDEX).read_text())
    index["weight_map"] = {n: file for n, file in index["weight_map"].items() if file != SCALES}
    (output / INDEX).write_text(json.dumps(index))
    assert any(
        f"6 scales lie in {SCALES}, which the index does not list" in problem
        for problem in inspect(output).problems
    )


def test_a_model_safetensors_beside_the_index(tiny: Tiny, tmp_path: Path) -> None:
    output = _made(tiny, tmp_path)
    shutil.copy(tiny() / "model.safetensors", output)
    assert "transformers takes it and ignores the scales" in inspect(output).problems[0]


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        (lambda n: n.replace("k_scale", "kv_scale"), "leaves v at 1.0"),
        (lambda n: n.replace("self_attn.", "self_attn.attn."), "a runtime name"),
        (
            lambda n: n.replace("k_scale", "k_proj.output_scale"),
            "vLLM stops while loading it",
        ),
    ],
    ids=["kv_scale", "runtime", "output_scale"],
)
def test_c08_names_that_vllm_misreads(
    rename: Callable[[str], str], message: str, tiny: Tiny, tmp_path: Path
) -> None:
    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[rename(name)] = tensors.pop(name)

    found = inspect(tampered(_made(tiny, tmp_path), change))
    assert [problem for problem in found.problems if message in problem]


def test_c15_refused_scheme_exits_2(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = _made(tiny, tmp_path)
    config = json.loads((output / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"]["dynamic"] = True
    (output / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError):
        inspect(output)
    code, out, err = run(["inspect", str(output)], capsys)
    assert (code, out) == (2, "")
    assert "dynamic true is not supported" in err.replace("\n", " ")


# --- worth knowing ---------------------------------------------------------------------------


def test_rounded_scales_and_zero_points_are_mentioned(tiny: Tiny, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name] = tensors[name].astype(np.float16)
        tensors[f"{LAYER}.k_zero_point"] = np.zeros(1, np.float16)

    found = inspect(tampered(_made(tiny, tmp_path), change))
    assert found.ok
    assert any("stored as F16" in note for note in found.notes)
    assert any("1 zero points" in note for note in found.notes)


def test_other_methods_need_the_dtype_on_the_command_line(tiny: Tiny, tmp_path: Path) -> None:
    """vLLM reads the scales of e.g. an `fp8` checkpoint, but `auto` stays in 16 bit there."""
    output = _made(tiny, tmp_path)
    config = json.loads((output / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (output / "config.json").write_text(json.dumps(config))
    found = inspect(output)
    assert found.ok
    assert found.kv_cache_dtype == "auto"
    assert found.serve == f"vllm serve {output} --kv-cache-dtype fp8"


# --- how little it needs ---------------------------------------------------------------------

_MEASURED = r"""
import re, sys
from pathlib import Path
from fp8calib.checkpoint import inspect
found = inspect(sys.argv[1])
print(found.ok, len(found.layers), "torch" in sys.modules)
# Not ru_maxrss, which a child inherits from the process that started it.
print(1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]))
"""


def llama_70b(folder: Path, shards: int = 30) -> Path:
    """A checkpoint of Llama-3.1-70B's shape, calibrated per head, whose weights are holes."""
    hidden, inner, kv = 8192, 28672, 1024
    one = {
        "self_attn.q_proj": [hidden, hidden],
        "self_attn.k_proj": [kv, hidden],
        "self_attn.v_proj": [kv, hidden],
        "self_attn.o_proj": [hidden, hidden],
        "mlp.gate_proj": [inner, hidden],
        "mlp.up_proj": [inner, hidden],
        "mlp.down_proj": [hidden, inner],
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
    }
    shapes = {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(80)
        for name, shape in one.items()
    }
    shapes |= {"model.embed_tokens.weight": [128256, hidden], "lm_head.weight": [128256, hidden]}
    where: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards + 1:05}.safetensors"
        header, position = {}, 0
        for name in list(shapes)[number::shards]:
            size = 2 * int(np.prod(shapes[name]))
            span = [position, position + size]
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": span}
            position += size
            where[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + position)
    rng = np.random.default_rng(0)
    scales = {
        f"model.layers.{layer}.self_attn.{kind}_scale": rng.uniform(
            0.01, 0.1, (64 if kind == "q" else 8, 1, 1)
        ).astype(np.float32)
        for layer in range(80)
        for kind in "qkv"
    }
    last = f"model-{shards + 1:05}-of-{shards + 1:05}.safetensors"
    save_file(scales, folder / last)
    where |= dict.fromkeys(scales, last)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    scheme = {"num_bits": 8, "type": "float", "strategy": "attn_head", "symmetric": True}
    config = {
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "hidden_size": hidden,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {},
            "kv_cache_scheme": scheme | {"dynamic": False},
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_70b_checkpoint_is_inspected_without_torch_and_in_little_memory(tmp_path: Path) -> None:
    folder = llama_70b(tmp_path)
    assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) > 140e9
    command = [sys.executable, "-c", _MEASURED, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    verdict, peak = done.stdout.splitlines()
    assert verdict == "True 80 False"
    assert int(peak) < 200e6


def test_the_command_imports_no_torch(tiny: Tiny, tmp_path: Path) -> None:
    output = _made(tiny, tmp_path)
    code = (
        "import sys\nfrom fp8calib.cli import main\n"
        f"try:\n    main(['inspect', {str(output)!r}])\nexcept SystemExit as stop:\n"
        "    print(stop.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "0 False\n"


@pytest.mark.parametrize("recorded", [7, "0", {"0": 1}, [["0"]], [0.5]])
def test_a_skip_list_that_is_none_is_refused(
    tiny: Callable[..., Path], tmp_path: Path, recorded: Any
) -> None:
    calibrated(tiny(), tmp_path / "out")
    sidecar = tmp_path / "out" / "fp8calib.json"
    content = json.loads(sidecar.read_text()) | {"skip_layers": recorded}
    sidecar.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="skip_layers is not a list of layers"):
        inspect(tmp_path / "out")
