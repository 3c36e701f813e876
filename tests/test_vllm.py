"""vLLM itself loads what we calibrate, with exactly the file's scales.

`make test-vllm` builds vLLM's own environment and runs this; FP8CALIB_VLLM_PYTHON names its Python.
vLLM runs on the CPU here. It holds per-head scales as they are in the file, and the CPU's attention
then computes with the largest of each layer (`_k_scale_float`); GPU backends use them head by head.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fp8calib import calibrate
from fp8calib.checkpoint import inspect, read_scales
from fp8calib.scales import Strategy

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parent.parent
PYTHON = Path(os.environ.get("FP8CALIB_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
SCALES = "model-00002-of-00002.safetensors"


def calibrated(output: Path, strategy: Strategy) -> Path:
    calibrate("demo:smollm2-135m-instruct", output, strategy=strategy, samples=16, max_seq_len=256)
    return output


@pytest.fixture(scope="module")
def tensor_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated(tmp_path_factory.mktemp("vllm") / "tensor", "tensor")


@pytest.fixture(scope="module")
def head_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated(tmp_path_factory.mktemp("vllm") / "attn_head", "attn_head")


def load(checkpoint: Path, *options: str) -> subprocess.CompletedProcess[str]:
    if not PYTHON.exists():
        pytest.fail(f"there is no {PYTHON}: `make test-vllm` builds it")
    script = Path(__file__).with_name("vllm_probe.py")
    command = [PYTHON, script, checkpoint, *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=checkpoint.parent)


def seen_by_vllm(checkpoint: Path, *options: str) -> dict[str, Any]:
    done = load(checkpoint, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_vllm_holds_exactly_the_files_scales(
    strategy: Strategy, request: pytest.FixtureRequest
) -> None:
    name = "tensor_checkpoint" if strategy == "tensor" else "head_checkpoint"
    checkpoint = request.getfixturevalue(name)
    scales = read_scales(checkpoint)
    seen = seen_by_vllm(checkpoint)
    assert seen["kv_cache_dtype"] == "fp8", "auto resolves to fp8 by the checkpoint's own word"
    assert len(seen["layers"]) == len(scales.layers) == 30
    for index, layer in scales.layers.items():
        held = seen["layers"][f"{layer.name}.attn"]
        grouped = scales.grouped_query(index)
        assert grouped is not None
        for kind, meant in (("k", layer.k), ("v", layer.v), ("q", grouped)):
            assert meant.size == (1 if strategy == "tensor" else 3)
            assert np.float32(held[f"{kind}_scale"]).tolist() == meant.tolist()
            assert np.float32(held[f"{kind}_scale_float"]) == meant.max()
        assert held["kv_cache_dtype"] == "fp8"
    assert "Paris" in seen["text"]


def test_the_skip_layers_flag_keeps_those_layers_in_16_bit(tensor_checkpoint: Path) -> None:
    seen = seen_by_vllm(tensor_checkpoint, "--kv-cache-dtype-skip-layers", "0", "29")
    native = [name for name, layer in seen["layers"].items() if layer["kv_cache_dtype"] != "fp8"]
    assert native == ["model.layers.0.self_attn.attn", "model.layers.29.self_attn.attn"]
    assert "Paris" in seen["text"]


def test_fp8_e5m2_is_refused(tensor_checkpoint: Path) -> None:
    done = load(tensor_checkpoint, "--kv-cache-dtype", "fp8_e5m2")
    assert done.returncode != 0
    assert "fp8_e5m2 kv-cache is not supported with fp8 checkpoints" in done.stderr


def renamed(checkpoint: Path, output: Path, kind: str) -> Path:
    """A copy of `checkpoint` whose k_scale goes by an older name, without the others."""
    output.mkdir()
    for file in checkpoint.iterdir():
        (output / file.name).hardlink_to(file)
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    weights = {name: file for name, file in index["weight_map"].items() if file != SCALES}
    tensors = {
        name.replace("k_scale", kind): values
        for name, values in load_file(checkpoint / SCALES).items()
        if name.endswith("k_scale")
    }
    for name in (SCALES, "model.safetensors.index.json"):
        (output / name).unlink()
    save_file(tensors, output / SCALES)
    index["weight_map"] = weights | dict.fromkeys(tensors, SCALES)
    (output / "model.safetensors.index.json").write_text(json.dumps(index))
    return output


def test_c08_kv_scale_leaves_v_at_one_as_inspect_says(
    tensor_checkpoint: Path, tmp_path: Path
) -> None:
    broken = renamed(tensor_checkpoint, tmp_path / "kv_scale", "kv_scale")
    assert "leaves v at 1.0" in " ".join(inspect(broken).problems)
    held = seen_by_vllm(broken)["layers"]
    assert all(layer["v_scale"] == [1.0] != layer["k_scale"] for layer in held.values())


def test_c08_output_scale_stops_vllm_as_inspect_says(
    tensor_checkpoint: Path, tmp_path: Path
) -> None:
    broken = renamed(tensor_checkpoint, tmp_path / "output_scale", "k_proj.output_scale")
    assert "vLLM stops while loading it" in " ".join(inspect(broken).problems)
    assert load(broken).returncode != 0
