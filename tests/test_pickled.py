"""Pickled weights: refused, unless the user allows them; and then tensors only."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8calib.cli import main
from fp8calib.errors import ModelError
from fp8calib.pickled import with_safetensors

Tiny = Callable[..., Path]


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "t.txt").write_text("some text to calibrate with, and a little more of it\n" * 4)
    return str(tmp_path / "t.txt")


def as_bin(source: Path, folder: Path, parts: int = 1) -> Path:
    """A copy of a model whose weights are .bin files."""
    import torch
    from safetensors.torch import load_file

    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(source / "model.safetensors")
    names = list(weights)
    for part in range(parts):
        name = "pytorch_model.bin" if parts == 1 else f"pytorch_model-{part + 1:05}-of-00002.bin"
        torch.save({name: weights[name] for name in names[part::parts]}, folder / name)
    return folder


def calibrate(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main(["calibrate", *arguments, "--max-seq-len", "32"])
    return int(stop.value.code or 0), capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize("parts", [1, 2])
def test_pickled_weights_only_when_allowed(
    parts: int, tiny: Tiny, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from fp8calib.checkpoint import read_scales

    monkeypatch.setenv("FP8CALIB_CACHE", str(tmp_path / "cache"))
    source = as_bin(tiny(), tmp_path / "bin", parts)
    code, line = calibrate(capsys, str(source), "-o", str(tmp_path / "a"), "--dataset", text)
    assert code == 2 and "--allow-pickle" in line and not (tmp_path / "cache").exists()
    command = [str(source), "-o", str(tmp_path / "a"), "--dataset", text, "--allow-pickle"]
    assert calibrate(capsys, *command)[0] == 0
    plain = [str(tiny()), "-o", str(tmp_path / "b"), "--dataset", text]
    assert calibrate(capsys, *plain)[0] == 0
    mine, theirs = read_scales(tmp_path / "a"), read_scales(tmp_path / "b")
    for index, layer in theirs.layers.items():
        assert mine.layers[index].k.tolist() == layer.k.tolist()
    made = list((tmp_path / "cache" / "unpickled").iterdir())
    assert len(made) == 1 and with_safetensors(source) == made[0]


def test_tied_weights_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from safetensors.torch import load_file

    monkeypatch.setenv("FP8CALIB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    weight = torch.arange(12.0).reshape(3, 4)
    content = {"a": weight, "b": weight, "c": weight.T}
    torch.save(content, tmp_path / "m" / "pytorch_model.bin")
    loaded = load_file(next(with_safetensors(tmp_path / "m").glob("*.safetensors")))
    assert all(torch.equal(loaded[name], content[name]) for name in content)


class Evil:
    def __reduce__(self) -> Any:
        return (open, (Evil.target, "w"))

    target = ""


@pytest.mark.parametrize("content", ["code", "list", "text", "noise", "nothing"])
def test_what_is_no_table_of_tensors_is_refused_and_not_run(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setenv("FP8CALIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Evil, "target", str(tmp_path / "it-ran"))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps({}))
    path = tmp_path / "m" / "pytorch_model.bin"
    if content == "code":
        path.write_bytes(pickle.dumps({"a": Evil()}))
    elif content == "list":
        torch.save([torch.ones(2)], path)
    elif content == "text":
        torch.save({"a": "text"}, path)
    else:
        path.write_bytes(b"\x80\x04noise" if content == "noise" else b"")
    with pytest.raises(ModelError) as problem:
        with_safetensors(tmp_path / "m")
    assert "\n" not in str(problem.value)
    assert not (tmp_path / "it-ran").exists()
    assert not list((tmp_path / "cache" / "unpickled").iterdir())
