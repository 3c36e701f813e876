"""Sources whose weights are quantized already: KV scales are added where vLLM reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import write_texts
from made_scales import in_file
from qkv_reference import maxima
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fp8calib.calibration import calibrate
from fp8calib.checkpoint import inspect
from fp8calib.errors import CheckpointError, ModelError
from fp8calib.model_loading import load_model

WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("data"), (f"abc xyz {n} " * n for n in range(1, 6)))


@pytest.fixture(scope="module")
def compressed(
    tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A checkpoint that llm-compressor has quantized with one of its schemes."""
    made: dict[str, Path] = {}

    def make(scheme: str) -> Path:
        if scheme not in made:
            from llmcompressor import oneshot
            from llmcompressor.modifiers.quantization import QuantizationModifier
            from torch.utils.data import DataLoader

            source = tiny("llama", **WIDE)
            model = AutoModelForCausalLM.from_pretrained(source)
            rows: Any = [{"input_ids": torch.tensor([[1, 50, 60, 70]])}]
            made[scheme] = tmp_path_factory.mktemp(scheme)
            oneshot(
                model=model,
                processor=AutoTokenizer.from_pretrained(source),
                dataset=DataLoader(rows, batch_size=None) if scheme == "FP8" else None,
                recipe=QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"]),
                output_dir=str(made[scheme]),
            )
        return made[scheme]

    return make


def weights(folder: Path) -> dict[str, bytes]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if not name.endswith((".q_scale", ".k_scale", ".v_scale")):
                    tensor = file.get_tensor(name)
                    found[name] = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return found


def shards(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))]


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8", "W4A16"])
def test_compressed_tensors_weights_gain_kv_scales(
    compressed: Callable[[str], Path], texts: Path, tmp_path: Path, scheme: str, strategy: str
) -> None:
    source = compressed(scheme)
    options: dict[str, Any] = {"dataset": str(texts), "strategy": strategy, "batch_size": 1}
    result = calibrate(source, tmp_path / "out", **options)
    assert shards(tmp_path / "out")[:-1] == shards(source)  # byte for byte
    before, after = (
        config_of(folder)["quantization_config"] for folder in (source, tmp_path / "out")
    )
    assert after.pop("kv_cache_scheme")["strategy"] == strategy
    assert after == {name: value for name, value in before.items() if name != "kv_cache_scheme"}
    assert inspect(tmp_path / "out").problems == []
    model = load_model(source, "cpu")
    seen = maxima(model, ([row] for row in result.data.rows))
    for slot, scale in in_file(tmp_path / "out").items():
        expected = seen[slot].numpy() / np.float32(448)
        expected = expected.max(keepdims=True) if strategy == "tensor" else expected
        np.testing.assert_allclose(scale, expected, rtol=1e-6)


def test_scales_that_are_there_are_replaced_only_when_asked(
    compressed: Callable[[str], Path], texts: Path, tmp_path: Path
) -> None:
    """In a shard of their own, and among the weights: as llm-compressor writes them."""
    source = compressed("FP8_DYNAMIC")
    calibrate(source, tmp_path / "right", dataset=str(texts))
    calibrate(source, tmp_path / "old", dataset=str(texts), margin=4.0)
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for file in source.iterdir():
        (mixed / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    for layer in range(2):
        for kind in "qkv":
            tensors[f"model.layers.{layer}.self_attn.{kind}_scale"] = torch.tensor([0.3])
            tensors[f"model.layers.{layer}.self_attn.{kind}_zero_point"] = torch.tensor([0.0])
    save_file(tensors, mixed / "model.safetensors", metadata={"format": "pt"})
    config = config_of(mixed)
    scheme = config_of(tmp_path / "old")["quantization_config"]["kv_cache_scheme"]
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (mixed / "config.json").write_text(json.dumps(config))
    for folder in (tmp_path / "old", mixed):
        with pytest.raises(CheckpointError, match="--overwrite-scales"):
            calibrate(folder, tmp_path / "out", dataset=str(texts))
        assert not (tmp_path / "out").exists()
        out = tmp_path / f"new-{folder.name}"
        calibrate(folder, out, dataset=str(texts), overwrite_scales=True)
        found, expected = in_file(out), in_file(tmp_path / "right")
        assert all(np.array_equal(found[slot], expected[slot]) for slot in expected)
        assert weights(out) == weights(source)
        assert inspect(out).problems == []
        assert len(list(out.glob("*.safetensors"))) == 2


def quantized_by_hand(source: Path, folder: Path, method: str) -> Path:
    """FP8 weights of the `fp8` (blocks of 32 x 48) or `modelopt` (one scale) method."""
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].float()
        module = name.removesuffix("weight")
        if method == "fp8":
            rows, columns = -(-weight.shape[0] // 32), -(-weight.shape[1] // 48)
            scale = torch.zeros(rows, columns)
            spread = torch.zeros_like(weight)
            for i in range(rows):
                for j in range(columns):
                    place = slice(32 * i, 32 * i + 32), slice(48 * j, 48 * j + 48)
                    scale[i, j] = weight[place].abs().max() / 448
                    spread[place] = scale[i, j]
            tensors[module + "weight_scale_inv"] = scale
        else:
            spread = tensors[module + "weight_scale"] = weight.abs().max() / 448
            tensors[module + "input_scale"] = torch.tensor(0.02)
        tensors[name] = (weight / spread).to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    section: dict[str, Any] = {"quant_method": method, "weight_block_size": [32, 48]}
    if method == "modelopt":
        section = {"quant_method": method, "quant_algo": "FP8", "ignore": ["lm_head"]}
    config = config_of(folder) | {"quantization_config": section}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("method", ["fp8", "modelopt"])
def test_fp8_and_modelopt_weights_gain_per_tensor_scales(
    tiny: Callable[..., Path], texts: Path, tmp_path: Path, method: str
) -> None:
    plain = tiny("llama", hidden_size=112, num_attention_heads=7, num_key_value_heads=1)
    source = quantized_by_hand(plain, tmp_path / "source", method)
    result = calibrate(source, tmp_path / "out", dataset=str(texts), batch_size=1)
    assert shards(tmp_path / "out")[:-1] == shards(source)
    section = config_of(tmp_path / "out")["quantization_config"]
    scheme = section.pop("kv_cache_scheme", None)
    assert section == config_of(source)["quantization_config"]
    assert result.serve is not None
    card = (tmp_path / "out" / "README.md").read_text()
    if method == "modelopt":
        assert scheme == {"dynamic": False, "num_bits": 8, "type": "float"}
        assert "--kv-cache-dtype" not in result.serve
    else:
        assert scheme is None
        assert "--kv-cache-dtype fp8" in result.serve and result.serve.split()[0] in card
        assert "--kv-cache-dtype fp8" in card
    report = inspect(tmp_path / "out")
    assert report.problems == [] and report.strategy == "tensor"
    assert report.serve == result.serve

    model = AutoModelForCausalLM.from_pretrained(plain)  # the same values, by another way
    stored = load_file(source / "model.safetensors")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_proj.weight"):
                module = name.removesuffix("weight")
                if method == "modelopt":
                    weight.copy_(stored[name].float() * stored[module + "weight_scale"])
                else:
                    scale = stored[module + "weight_scale_inv"]
                    for i, j in np.ndindex(*scale.shape):
                        place = slice(32 * i, 32 * i + 32), slice(48 * j, 48 * j + 48)
                        weight[place] = stored[name][place].float() * scale[i, j]
    seen = maxima(model, ([row] for row in result.data.rows))
    for slot, scale in in_file(tmp_path / "out").items():
        np.testing.assert_allclose(scale[0], seen[slot].max() / 448, rtol=1e-6)
    with pytest.raises(CheckpointError, match=f"{method}.*--strategy tensor"):
        calibrate(source, tmp_path / "heads", dataset=str(texts), strategy="attn_head")
    assert not (tmp_path / "heads").exists()


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "mxfp4", "quark"])
def test_methods_whose_kv_scales_vllm_does_not_read(
    tiny: Callable[..., Path], texts: Path, tmp_path: Path, method: str
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for file in tiny().iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    config = config_of(source) | {"quantization_config": {"quant_method": method, "bits": 4}}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"quantized with {method}") as problem:
        calibrate(source, tmp_path / "out", dataset=str(texts))
    assert problem.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_modelopt_without_a_section_in_config_json(
    tiny: Callable[..., Path], texts: Path, tmp_path: Path
) -> None:
    source = quantized_by_hand(tiny(), tmp_path / "source", "modelopt")
    config = config_of(source)
    section = config.pop("quantization_config")
    (source / "config.json").write_text(json.dumps(config))
    (source / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    with pytest.raises(CheckpointError, match="older modelopt"):
        calibrate(source, tmp_path / "out", dataset=str(texts))


def test_fp8_weights_without_a_scale(
    tiny: Callable[..., Path], texts: Path, tmp_path: Path
) -> None:
    source = quantized_by_hand(tiny(), tmp_path / "source", "modelopt")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight_scale"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight .* no scale"):
        calibrate(source, tmp_path / "out", dataset=str(texts))
    assert not (tmp_path / "out").exists()
