"""Reading and writing checkpoints: bytes, names, refusals, and what a crash leaves behind."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from fake_checkpoints import equal
from made_scales import calibrated, make_scales, rewritten
from safetensors.numpy import load_file, save, save_file

from fp8calib.checkpoint import (
    check_output,
    check_room,
    check_scheme,
    check_source,
    folder,
    open_checkpoint,
    read_scales,
    serve_command,
    write_checkpoint,
    writer,
)
from fp8calib.checkpoint.safetensors_file import read_header, read_scale
from fp8calib.errors import CheckpointError, ScaleError
from fp8calib.scales import LayerScales, ScaleSet

Tiny = Callable[..., Path]
SCHEME = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}


def copied(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def weight_files(place: Path) -> list[str]:
    return sorted(file.name for file in place.glob("*.safetensors"))


def leftovers(place: Path) -> list[str]:
    return sorted(entry.name for entry in place.iterdir() if ".fp8calib-" in entry.name)


# --- safetensors headers ---------------------------------------------------------------------


def raw_file(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_header_agrees_with_the_library(tmp_path: Path) -> None:
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float16)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert {name: info.shape for name, info in header.items()} == {"a": (2, 3), "b": (4,)}
    for name, values in tensors.items():
        assert np.array_equal(read_scale(name, header[name]), values.reshape(-1))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_scales_of_every_float_dtype_become_float32(dtype: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file as save_torch

    values = torch.tensor([[0.1], [3.25e-5], [448.0]], dtype=getattr(torch, dtype))
    save_torch({"s": values}, tmp_path / "x.safetensors")
    read = read_scale("s", read_header(tmp_path / "x.safetensors")["s"])
    assert read.dtype == np.float32
    assert read.tolist() == values.float().reshape(-1).tolist()


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        pytest.param(b"{", b"", "no safetensors file", id="no-json"),
        pytest.param([], b"", "no JSON object", id="no-object"),
        pytest.param(b"[" * 100_000, b"", "no safetensors file", id="deep"),
        pytest.param(b'{"a": 1, "a": 2}', b"", "twice", id="duplicate-names"),
        pytest.param({"a": 1}, b"", "makes no sense", id="no-entry"),
        pytest.param({"a": entry(0, 8, [2])}, bytes(4), "cut short", id="past-the-end"),
        pytest.param({"a": entry(0, 8, [3])}, bytes(8), "makes no sense", id="wrong-size"),
        pytest.param({"a": entry(8, 0, [2])}, bytes(8), "makes no sense", id="backwards"),
        pytest.param({"a": entry(-8, 0, [2])}, bytes(8), "makes no sense", id="negative"),
        pytest.param({"a": entry(0, 8, [True, 2])}, bytes(8), "makes no sense", id="bool-shape"),
        pytest.param(
            {"a": entry(0, 8, [2]), "b": entry(4, 8, [1])}, bytes(8), "overlaps", id="overlap"
        ),
    ],
)
def test_damaged_headers_are_refused(
    header: Any, data: bytes, message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_header(raw_file(tmp_path / "x.safetensors", header, data))


@pytest.mark.parametrize(
    "content", [b"", b"short", b"\xff" * 8, (200_000_000).to_bytes(8, "little")]
)
def test_header_length_is_checked_before_it_is_read(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="no safetensors file: its header would have"):
        read_header(tmp_path / "x.safetensors")


def test_only_small_floating_tensors_are_read_as_scales(tmp_path: Path) -> None:
    save_file({"big": np.zeros(70_000, np.float32), "int": np.ones(1, np.int64)}, tmp_path / "x")
    header = read_header(tmp_path / "x")
    for name, message in (("big", "no scale"), ("int", "floating point")):
        with pytest.raises(CheckpointError, match=message):
            read_scale(name, header[name])


# --- what is written -------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
@pytest.mark.parametrize("shard", ["1GB", "60KB"], ids=["single", "sharded"])
def test_weights_are_kept_byte_for_byte(
    strategy: Any, shard: str, tiny: Tiny, tmp_path: Path
) -> None:
    """Saving through a model would re-write all weights and may untie embeddings."""
    source = tiny("llama", max_shard_size=shard, tie_word_embeddings=True, dtype="bfloat16")
    before = weight_files(source)
    assert (len(before) > 1) == (shard != "1GB")
    scales = calibrated(source, tmp_path / "out", strategy)
    count = len(before) + 1
    names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    assert weight_files(tmp_path / "out") == names
    for old, new in zip(before, names, strict=False):
        assert (source / old).read_bytes() == (tmp_path / "out" / new).read_bytes()
    assert equal(read_scales(tmp_path / "out"), scales)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    there = {name: file for file in names for name in load_names(tmp_path / "out" / file)}
    assert index["weight_map"] == there
    total = sum(
        info.end - info.start
        for file in names
        for info in read_header(tmp_path / "out" / file).values()
    )
    assert index["metadata"]["total_size"] == total


def load_names(path: Path) -> list[str]:
    return list(read_header(path))


def test_c05_c09_scale_tensors_have_the_current_names_shapes_and_float32(
    tiny: Tiny, tmp_path: Path
) -> None:
    source = tiny("llama", dtype="bfloat16")
    for strategy, shapes in (
        ("tensor", {"q": (1,), "k": (1,), "v": (1,)}),
        ("attn_head", {"q": (4, 1, 1), "k": (2, 1, 1), "v": (2, 1, 1)}),
    ):
        scales = calibrated(source, tmp_path / strategy, strategy)  # type: ignore[arg-type]
        written = load_file(tmp_path / strategy / "model-00002-of-00002.safetensors")
        assert {name: values.shape for name, values in written.items()} == {
            f"model.layers.{layer}.self_attn.{kind}_scale": shape
            for layer in range(2)
            for kind, shape in shapes.items()
        }
        for name, values in written.items():
            assert values.dtype == np.float32
            layer, kind = int(name.split(".")[2]), name[-7]
            assert values.reshape(-1).tolist() == getattr(scales.layers[layer], kind).tolist()


def test_without_query_no_q_scale_is_written(tiny: Tiny, tmp_path: Path) -> None:
    calibrated(tiny(), tmp_path / "out", query=False)
    written = load_names(tmp_path / "out" / "model-00002-of-00002.safetensors")
    assert sorted({name[-7:] for name in written}) == ["k_scale", "v_scale"]


def test_config_gains_the_scheme_and_nothing_else(tiny: Tiny, tmp_path: Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    calibrated(tiny(), tmp_path / "out", "attn_head")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    section = config.pop("quantization_config")
    assert config == json.loads((tiny() / "config.json").read_text())
    assert section["config_groups"] == {}
    assert section["ignore"] == []
    assert section["quant_method"] == "compressed-tensors"
    assert section["format"] == "dense"
    assert section["quantization_status"] == "compressed"
    assert section["kv_cache_scheme"].items() >= (SCHEME | {"strategy": "attn_head"}).items()
    QuantizationConfig.model_validate(section)


def test_compressed_tensors_source_keeps_its_section(tiny: Tiny, tmp_path: Path) -> None:
    source = copied(tiny(), tmp_path / "in")
    section = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}}},
        "ignore": ["lm_head"],
        "some_key": {"of": "a newer version"},
    }
    edit_json(source / "config.json", quantization_config=section)
    calibrated(source, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert written.pop("kv_cache_scheme").items() >= SCHEME.items()
    assert written == section


def test_files_beside_the_weights_are_carried_over(tiny: Tiny, tmp_path: Path) -> None:
    source = copied(tiny(), tmp_path / "in")
    kept = {
        "chat_template.jinja": "{{ messages }}",
        "modeling_custom.py": "raise SystemExit('never run')",
        "generation_config.json": '{"eos_token_id": 2}',
        "LICENSE": "Apache",
        "additional_chat_templates/tool.jinja": "{{ tools }}",
    }
    left = {
        ".gitattributes": "x",
        ".git/config": "x",
        "model.gguf": "x",
        "pytorch_model.bin": "x",
        "pytorch_model.bin.index.json": "{}",
        "consolidated.00.pth": "x",
        "onnx/model.onnx": "x",
        "onnx/config.json": "{}",
        "__pycache__/modeling_custom.pyc": "x",
    }
    for name, text in (kept | left).items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    calibrated(source, tmp_path / "out")
    output = tmp_path / "out"
    for name, text in kept.items():
        assert (output / name).read_text() == text
    assert not [name for name in left if (output / name).exists()]
    for name in ("tokenizer.json", "tokenizer_config.json"):  # untouched by any tokenizer object
        assert (output / name).read_bytes() == (source / name).read_bytes()


def test_sidecar_and_card(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny()
    layers = open_checkpoint(source).layers
    sidecar = {
        "model": "someone/tiny",
        "skip_layers": ["0", "1"],
        "dataset": {"name": "builtin:pydoc", "samples": 12, "fingerprint": "abc123"},
    }
    scales = make_scales(layers, "tensor")
    write_checkpoint(source, tmp_path / "out", scales, sidecar, layers=layers)
    written = json.loads((tmp_path / "out" / "fp8calib.json").read_text())
    assert written == {"schema_version": 1} | sidecar
    card = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["base_model"] == "someone/tiny"
    assert "vllm serve out --kv-cache-dtype-skip-layers 0 1" in card
    assert "abc123" in card
    assert "weights are those of the original model, unchanged" in card
    sidecar["recipe"] = {"llmcompressor": {"stage": {}}}
    write_checkpoint(source, tmp_path / "two", scales, sidecar, layers=layers)
    assert "quantized by llm-compressor" in (tmp_path / "two" / "README.md").read_text()


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: apache-2.0\nlanguage:\n- en\nbase_model: a/b\n---\n# Old\n", "apache-2.0"),
        ("---\nlicense: apache-2.0\nx: !!python/object/apply:os.getcwd []\n---\n# Old\n", None),
        ("---\nlicense: [unclosed\n---\n# Old\n", None),
        ("# Old\n", None),
    ],
    ids=["matter", "unsafe", "malformed", "no-matter"],
)
def test_card_carries_the_licence(
    card: str, licence: str | None, tiny: Tiny, tmp_path: Path
) -> None:
    source = copied(tiny(), tmp_path / "in")
    (source / "README.md").write_text(card)
    calibrated(source, tmp_path / "out")
    written = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(written.split("---\n")[1])
    assert front.get("license") == licence
    assert front["base_model"] == "someone/tiny"
    assert "Old" not in written


@pytest.mark.parametrize(
    ("model", "base"),
    [
        ("someone/tiny", "someone/tiny"),
        ("demo:tiny", "upstream/tiny"),
        ("/home/me/models/tiny", "upstream/tiny"),
        ("models/tiny", "upstream/tiny"),
    ],
)
def test_card_names_a_hub_id_as_base_model_and_never_a_path(
    model: str, base: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = copied(tiny(), tmp_path / "models" / "tiny")
    (source / "README.md").write_text("---\nbase_model: upstream/tiny\n---\n")
    layers = open_checkpoint(source).layers
    scales = make_scales(layers, "tensor")
    write_checkpoint(source, tmp_path / "out", scales, {"model": model}, layers=layers)
    written = (tmp_path / "out" / "README.md").read_text()
    assert yaml.safe_load(written.split("---\n")[1])["base_model"] == base
    assert "/home/me" not in written


def test_serve_command_has_vllms_space_separated_flag() -> None:
    assert serve_command("my model", ["0", "sliding_window"]) == (
        "vllm serve 'my model' --kv-cache-dtype-skip-layers 0 sliding_window"
    )


def test_link_shares_the_weights_and_a_copy_does_not(tiny: Tiny, tmp_path: Path) -> None:
    source = copied(tiny(), tmp_path / "in")
    calibrated(source, tmp_path / "copy")
    calibrated(source, tmp_path / "link", link=True)
    weights = "model-00001-of-00002.safetensors"
    original = source / "model.safetensors"
    assert (tmp_path / "link" / weights).samefile(original)
    assert not (tmp_path / "copy" / weights).samefile(original)
    assert not (tmp_path / "link" / "config.json").samefile(source / "config.json")
    assert not (tmp_path / "link" / "tokenizer.json").samefile(source / "tokenizer.json")


# --- the gate --------------------------------------------------------------------------------


def broken(scales: ScaleSet, **changes: Any) -> ScaleSet:
    layer = scales.layers[1]
    values = {"k": layer.k, "v": layer.v, "q": layer.q} | changes
    return ScaleSet(scales.strategy, {0: scales.layers[0], 1: LayerScales(layer.name, **values)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"k": np.float32([np.nan])}, "k_scale is not finite", id="nan"),
        pytest.param({"v": np.float32([0])}, "v_scale is not positive", id="zero"),
        pytest.param({"q": np.float32([-4e-21])}, "q_scale is not positive", id="negative"),
        pytest.param({"q": np.float32([2.3e38])}, "q_scale is absurdly large", id="garbage"),
        pytest.param({"k": np.float32([1, 2])}, "k_scale has shape", id="shape"),
        pytest.param({"q": None}, "q_scale is missing", id="one-q-missing"),
    ],
)
def test_unfit_scales_are_not_written(
    change: dict[str, Any], message: str, tiny: Tiny, tmp_path: Path
) -> None:
    layers = open_checkpoint(tiny()).layers
    scales = broken(make_scales(layers, "tensor"), **change)
    with pytest.raises(ScaleError, match=rf"layer 1 .*{message}"):
        write_checkpoint(tiny(), tmp_path / "out", scales, {}, layers=layers)
    assert list(tmp_path.iterdir()) == []


def test_a_layer_without_scales_is_refused_even_when_nobody_listed_it(
    tiny: Tiny, tmp_path: Path
) -> None:
    """Ignored or unobserved layers must not reach the file as uninitialised memory, nor be left
    out: vLLM would run them at 1.0."""
    layers = open_checkpoint(tiny()).layers
    scales = make_scales(layers[:1], "tensor")
    with pytest.raises(ScaleError, match=r"layer 1 .*no scales"):
        write_checkpoint(tiny(), tmp_path / "out", scales, {}, layers=layers)
    with pytest.raises(CheckpointError, match=r"no scales: model\.layers\.1\.self_attn"):
        write_checkpoint(tiny(), tmp_path / "out", scales, {}, layers=layers[:1])
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_is_read_back_and_compared(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(tensors: dict[str, np.ndarray], metadata: Any) -> bytes:
        first = next(iter(tensors))
        return save(tensors | {first: np.nextafter(tensors[first], np.float32(9))}, metadata)

    monkeypatch.setattr(writer, "save", wrong)
    with pytest.raises(CheckpointError, match="does not read back"):
        calibrated(tiny(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# --- refused sources -------------------------------------------------------------------------


def test_bin_weights_are_refused_with_the_line_that_converts_them(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shlex

    import torch
    from safetensors.torch import load_file as load_torch

    source = copied(tiny(), tmp_path / "it's old")
    torch.save(load_torch(source / "model.safetensors"), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"only \.bin weights") as refused:
        check_source(source)
    python, flag, code = shlex.split(str(refused.value).split("convert them first: ")[1])
    assert (python, flag) == ("python", "-c")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    check_source(tmp_path / "it's old-safetensors")


def test_other_quantization_methods_are_refused_by_name(tiny: Tiny, tmp_path: Path) -> None:
    source = copied(tiny(), tmp_path / "in")
    edit_json(source / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(CheckpointError, match="quantized with gptq"):
        check_source(source)


def test_a_source_that_has_scales_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    calibrated(tiny(), tmp_path / "out")
    with pytest.raises(CheckpointError, match="already has KV-cache scales"):
        check_source(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"num_bits": 4}, "num_bits 4 and type float", id="num_bits-4"),
        pytest.param({"type": "int"}, "num_bits 8 and type int", id="type-int"),
        pytest.param({"strategy": "channel"}, "strategy channel", id="channel"),
        pytest.param({"strategy": "token"}, "strategy token", id="token"),
        pytest.param({"strategy": "block"}, "strategy block", id="block"),
        pytest.param({"symmetric": False}, "symmetric false", id="asymmetric"),
        pytest.param({"dynamic": True}, "dynamic true", id="dynamic"),
        pytest.param({"strategy": "per_planet"}, "strategy per_planet", id="unknown-strategy"),
        pytest.param({"strategy": None}, "strategy None", id="no-strategy"),
        pytest.param({"symmetric": None}, "symmetric none", id="no-symmetric"),
    ],
)
def test_c15_refused_schemes(
    change: dict[str, Any], message: str, tiny: Tiny, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    calibrated(tiny(), output)
    config = json.loads((output / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"].update(change)
    (output / "config.json").write_text(json.dumps(config))
    for refuse in (lambda: check_scheme(config), lambda: read_scales(output)):
        with pytest.raises(CheckpointError, match=f"{message}.* is not supported: vLLM") as refused:
            refuse()
        assert "\n" not in str(refused.value)
    source = copied(tiny(), tmp_path / "in")
    shutil.copy(output / "config.json", source / "config.json")
    with pytest.raises(CheckpointError, match=message):
        check_source(source)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    for place, message in ((tmp_path / "x", "no folder"), (tmp_path, "no config.json")):
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(place)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no safetensors weights"):
        open_checkpoint(tmp_path)


# --- names that lead out of the folder -------------------------------------------------------


def with_index(place: Path, file: str) -> Path:
    place.mkdir()
    (place / "config.json").write_text("{}")
    index = {"weight_map": {"x": file}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    return place


@pytest.mark.parametrize("name", ["../secret.safetensors", "a/../../secret.safetensors", "/etc/x"])
def test_index_must_not_name_files_outside(name: str, tmp_path: Path) -> None:
    save_file({"x": np.ones(1, np.float32)}, tmp_path / "secret.safetensors")
    with pytest.raises(CheckpointError, match="leads out of the checkpoint"):
        open_checkpoint(with_index(tmp_path / "in", name))


def test_links_must_not_lead_outside(tmp_path: Path) -> None:
    save_file({"x": np.ones(1, np.float32)}, tmp_path / "secret.safetensors")
    place = with_index(tmp_path / "in", "link.safetensors")
    (place / "link.safetensors").symlink_to("../secret.safetensors")
    with pytest.raises(CheckpointError, match="a link that leads out"):
        open_checkpoint(place)


def test_other_files_must_not_lead_outside(tiny: Tiny, tmp_path: Path) -> None:
    source = copied(tiny(), tmp_path / "in")
    (tmp_path / "private").write_text("x")
    (source / "vocab.txt").symlink_to("../private")
    os.mkfifo(source / "pipe")
    with pytest.raises(CheckpointError, match="pipe is no regular file"):
        calibrated(source, tmp_path / "out")
    (source / "pipe").unlink()
    with pytest.raises(CheckpointError, match=r"vocab\.txt is a link that leads out"):
        calibrated(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_hub_cache_snapshots_are_read_through_their_links(tiny: Tiny, tmp_path: Path) -> None:
    repository = tmp_path / "models--someone--tiny"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(tiny().iterdir())):
        shutil.copy(file, repository / "blobs" / f"{number:064}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064}")
    calibrated(snapshot, tmp_path / "out")
    assert not [file for file in (tmp_path / "out").iterdir() if file.is_symlink()]
    weights = (tmp_path / "out" / "model-00001-of-00002.safetensors").read_bytes()
    assert weights == (tiny() / "model.safetensors").read_bytes()


# --- outputs ---------------------------------------------------------------------------------


def test_existing_output_is_refused_before_any_work(tiny: Tiny, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    check_output(output, overwrite=False)  # empty: fine
    (output / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="--overwrite"):
        check_output(output, overwrite=False)
    with pytest.raises(CheckpointError, match="not written by fp8calib"):
        check_output(output, overwrite=True)
    with pytest.raises(CheckpointError, match="not written by fp8calib"):
        calibrated(tiny(), output, overwrite=True)
    assert (output / "notes.txt").read_text() == "mine"
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="not a folder"):
            check_output(place, overwrite=True)


def test_output_and_source_must_be_apart(tiny: Tiny, tmp_path: Path) -> None:
    source = copied(tiny(), tmp_path / "models" / "in")
    (tmp_path / "alias").symlink_to(source)
    for place in (source, source / "out", tmp_path / "alias" / "out", tmp_path / "models"):
        with pytest.raises(CheckpointError, match="source model's folder"):
            check_output(place, overwrite=True, source=source)
    calibrated(source, tmp_path / "models" / "in-fp8")


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two-renames"])
def test_overwrite_replaces_an_earlier_output(
    exchange: bool, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(folder, "_exchange", lambda one, other: False)
    calibrated(tiny(), tmp_path / "out", "tensor")
    (tmp_path / "out" / "old.txt").write_text("x")
    scales = calibrated(tiny(), tmp_path / "out", "attn_head", overwrite=True)
    assert equal(read_scales(tmp_path / "out"), scales)
    assert not (tmp_path / "out" / "old.txt").exists()
    assert leftovers(tmp_path) == []


def test_failed_overwrite_leaves_the_earlier_output(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales = calibrated(tiny(), tmp_path / "out")
    monkeypatch.setattr(writer, "_check_written", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        calibrated(tiny(), tmp_path / "out", "attn_head", overwrite=True)
    assert equal(read_scales(tmp_path / "out"), scales)
    assert leftovers(tmp_path) == []


def test_an_output_lost_between_two_renames_is_put_back(tiny: Tiny, tmp_path: Path) -> None:
    scales = calibrated(tiny(), tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / ".out.fp8calib-old-1-abcd")
    with pytest.raises(CheckpointError, match="--overwrite"):
        check_output(tmp_path / "out", overwrite=False)
    assert equal(read_scales(tmp_path / "out"), scales)
    assert leftovers(tmp_path) == []


def test_output_through_a_link_replaces_what_it_points_to(tiny: Tiny, tmp_path: Path) -> None:
    calibrated(tiny(), tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    calibrated(tiny(), tmp_path / "link", "attn_head", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert read_scales(tmp_path / "real").strategy == "attn_head"


def test_an_output_that_another_run_made_meanwhile_is_left(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(*_: Any) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "config.json").write_text("theirs")

    monkeypatch.setattr(writer, "_check_written", meanwhile)
    with pytest.raises(CheckpointError, match="made by another run"):
        calibrated(tiny(), tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == "theirs"
    assert leftovers(tmp_path) == []


def test_no_room_is_seen_before_anything_is_copied(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000))
    monkeypatch.setattr(folder, "_share_blocks", lambda *_: False)
    with pytest.raises(CheckpointError, match=r"has 10\.0 kB free, the weights .* or share"):
        calibrated(tiny(), tmp_path / "deep" / "out")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(folder, "_share_blocks", lambda *_: True)
    check_room(tmp_path / "out", [tiny() / "model.safetensors"])


# --- crashes ---------------------------------------------------------------------------------

_HANGING_WRITE = """
import sys, time
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from fp8calib.checkpoint import folder, writer
from made_scales import calibrated

def hang(folder):
    print("writing", flush=True)
    time.sleep(60)

folder._flush = hang
calibrated(Path(sys.argv[1]), Path(sys.argv[2]))
"""


@contextmanager
def writing(source: Path, output: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has written everything but the last rename."""
    command = [sys.executable, "-c", _HANGING_WRITE, source, output, Path(__file__).parent]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "writing\n"
            yield process
        finally:
            process.kill()


def test_sigkill_leaves_no_checkpoint_and_the_next_run_cleans_up(
    tiny: Tiny, tmp_path: Path
) -> None:
    with writing(tiny(), tmp_path / "out") as process:
        calibrated(tiny(), tmp_path / "other")
        check_output(tmp_path / "out", overwrite=False)
        assert len(leftovers(tmp_path)) == 1, "a live writer's folder is left alone"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "out").exists()
    assert len(leftovers(tmp_path)) == 1
    calibrated(tiny(), tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_sigint_leaves_nothing(tiny: Tiny, tmp_path: Path) -> None:
    with writing(tiny(), tmp_path / "out") as process:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)
    assert list(tmp_path.iterdir()) == []


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a full disk needs the right to mount a tmpfs")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_full_disk_leaves_nothing(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny(num_hidden_layers=4)
    monkeypatch.setattr(writer, "check_room", lambda *_: None)  # it fills up while we write
    with small_disk(tmp_path / "disk") as disk:
        with pytest.raises(CheckpointError, match="No space left on device; nothing was left"):
            calibrated(source, disk / "out")
        assert list(disk.iterdir()) == []


def test_file_size_limit_leaves_nothing(tiny: Tiny, tmp_path: Path) -> None:
    """What a full disk or a quota does, without the right to mount one."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    source = tiny()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large; nothing was left"):
            calibrated(source, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert list(tmp_path.iterdir()) == []


# --- reading ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (-1,), (-1, 1, 1)], ids=str)
@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_every_shape_is_read(strategy: Any, shape: Any, tiny: Tiny, tmp_path: Path) -> None:
    if strategy == "attn_head" and shape in ((), (1,)):
        shape = (-1,)
    scales = calibrated(tiny(), tmp_path / "out", strategy)
    rewritten(tmp_path / "out", lambda name, values: {name: values.reshape(shape)})
    assert equal(read_scales(tmp_path / "out"), scales)


OLD_FORMS = {
    "projection": lambda module, kind: f"{module}.{kind}_proj.{kind}_scale",
    "output_scale": lambda module, kind: f"{module}.{kind}_proj.output_scale",
    "runtime": lambda module, kind: f"{module}.attn.{kind}_scale",
}


@pytest.mark.parametrize("form", OLD_FORMS)
def test_c08_older_names_are_read(form: str, tiny: Tiny, tmp_path: Path) -> None:
    scales = calibrated(tiny(), tmp_path / "out", query=False)

    def rename(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
        module, _, leaf = name.rpartition(".")
        return {OLD_FORMS[form](module, leaf[0]): values}

    rewritten(tmp_path / "out", rename)
    assert equal(read_scales(tmp_path / "out"), scales)


def test_c08_kv_scale_means_both_k_and_v(tiny: Tiny, tmp_path: Path) -> None:
    scales = calibrated(tiny(), tmp_path / "out", query=False)

    def rename(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
        return {name.replace("k_scale", "kv_scale"): values} if "k_scale" in name else {}

    rewritten(tmp_path / "out", rename)
    for index, layer in read_scales(tmp_path / "out").layers.items():
        assert layer.k.tolist() == layer.v.tolist() == scales.layers[index].k.tolist()


@pytest.mark.parametrize("factor", [1, 2])
def test_a_scale_under_two_names_must_be_the_same(factor: int, tiny: Tiny, tmp_path: Path) -> None:
    """Engines read both into the same place, and the order of files decides."""
    scales = calibrated(tiny(), tmp_path / "out")

    def add(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
        module, _, leaf = name.rpartition(".")
        return {name: values, f"{module}.{leaf[0]}_proj.{leaf}": values * factor}

    rewritten(tmp_path / "out", add)
    if factor == 1:
        assert equal(read_scales(tmp_path / "out"), scales)
    else:
        with pytest.raises(ScaleError, match="layer 0: k_scale is given twice"):
            read_scales(tmp_path / "out")


def test_incomplete_scales_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ScaleError, match="has no KV-cache scales"):
        read_scales(tiny())
    calibrated(tiny(), tmp_path / "out")
    rewritten(
        tmp_path / "out",
        lambda name, values: {} if name == "model.layers.1.self_attn.v_scale" else {name: values},
    )
    with pytest.raises(
        ScaleError, match=r"layer 1 \(model\.layers\.1\.self_attn\): v_scale is missing"
    ):
        read_scales(tmp_path / "out")


def test_weight_scales_are_no_kv_scales(tiny: Tiny, tmp_path: Path) -> None:
    calibrated(tiny(), tmp_path / "out", query=False)

    def add(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
        module, _, leaf = name.rpartition(".")
        others = ("weight_scale", "input_scale")
        return {name: values} | {f"{module}.{leaf[0]}_proj.{other}": values for other in others}

    before = read_scales(tmp_path / "out")
    rewritten(tmp_path / "out", add)
    assert equal(read_scales(tmp_path / "out"), before)
