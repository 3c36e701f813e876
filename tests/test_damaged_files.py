"""Damaged records, statistics and datasets, two runs at once, a full disk: one line each."""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_checkpoints import write_source
from safetensors.numpy import load_file, save_file

from fp8calib import calibrate
from fp8calib.calibration.progress_file import state_folder
from fp8calib.checkpoint import check_source, inspect
from fp8calib.cli import main
from fp8calib.errors import CheckpointError, RecipeError, UserError
from fp8calib.recipe import parse_recipe

Tiny = Callable[..., Path]
HISTOGRAMS = "fp8calib-histograms.npz"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_text("some text to calibrate with, and a little more of it\n" * 4)
    return path


@pytest.fixture(scope="module")
def calibrated(tiny: Tiny, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("calibrated") / "out"
    calibrate(tiny(), output, dataset=str(text), max_seq_len=32)
    return output


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command ends with, exit code 2."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    err = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and "Traceback" not in err, err
    return err.splitlines()[-1]


# --- rescale ---------------------------------------------------------------------------------

SIDECAR: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no-layers": lambda s: s.update(layers={}),
    "layers-list": lambda s: s.update(layers=[1]),
    "layers-text": lambda s: s.update(layers="x"),
    "spec-text": lambda s: s["layers"]["0"].update(spec="x"),
    "index-text": lambda s: s["layers"]["0"]["spec"].update(index="x"),
    "index-huge": lambda s: s["layers"]["0"]["spec"].update(index=10**30),
    "twice": lambda s: s["layers"]["1"]["spec"].update(index=0),
    "no-heads": lambda s: s["layers"]["0"]["spec"].update(num_kv_heads=0),
    "minus-heads": lambda s: s["layers"]["0"]["spec"].update(num_heads=-4),
    "odd-heads": lambda s: s["layers"]["0"]["spec"].update(num_heads=3),
    "other-heads": lambda s: s["layers"]["0"]["spec"].update(num_kv_heads=4),
    "recipe-text": lambda s: s.update(recipe="x"),
    "recipe-none": lambda s: s.update(recipe=None),
    "margin": lambda s: s["recipe"]["calibration"].update(margin=-1),
    "observer": lambda s: s["recipe"]["calibration"].update(observer="x" * 5000),
}


@pytest.mark.parametrize("name", SIDECAR)
def test_rescale_refuses_a_damaged_record(
    name: str, calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(calibrated, tmp_path / "copy"))
    content = json.loads((copy / "fp8calib.json").read_text())
    SIDECAR[name](content)
    (copy / "fp8calib.json").write_text(json.dumps(content))
    line = refused(capsys, "rescale", str(copy), "-o", str(tmp_path / "out"))
    assert "fp8calib.json" in line and len(line) < 600
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dataset", ["x", [1], 7, {"name": [1], "samples": {}}])
def test_rescale_needs_nothing_of_a_recorded_dataset(
    dataset: Any, calibrated: Path, tmp_path: Path
) -> None:
    from fp8calib.calibration.rescale import rescale

    copy = Path(shutil.copytree(calibrated, tmp_path / "copy"))
    content = json.loads((copy / "fp8calib.json").read_text()) | {"dataset": dataset}
    (copy / "fp8calib.json").write_text(json.dumps(content))
    rescale(copy, tmp_path / "out")
    assert inspect(tmp_path / "out").ok


def arrays(path: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    with np.load(path) as file:
        content = {name: file[name] for name in file.files}
    change(content)
    np.savez_compressed(path, **content)


def scrambled(path: Path) -> None:
    """Bytes inside a member changed: zlib's own error, or a checksum that does not fit."""
    data = bytearray(path.read_bytes())
    data[60:200] = bytes(140)
    path.write_bytes(bytes(data))


def encrypted(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for mark, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        start = -1
        while (start := data.find(mark, start + 1)) >= 0:
            data[start + at] |= 1
    path.write_bytes(bytes(data))


def bomb(path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("0.k.amax.npy", bytes(50_000_000))
    path.write_bytes(buffer.getvalue())


STATISTICS: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-40]),
    "scrambled": scrambled,
    "encrypted": encrypted,
    "bomb": bomb,
    "pickle": lambda path: np.savez(path, **{"0.k.amax": np.array([{}], dtype=object)}),
    "nothing": lambda path: np.savez(path),
    "name": lambda path: arrays(path, lambda a: a.update({"x": np.ones(1)})),
    "field-missing": lambda path: arrays(path, lambda a: a.pop("0.k.amax")),
    "layer-missing": lambda path: arrays(path, lambda a: [a.pop(n) for n in [*a] if n[0] == "1"]),
    "no-heads": lambda path: arrays(
        path, lambda a: a.update({n: a[n][:0] for n in a if n.startswith("0.k")})
    ),
    "negative": lambda path: arrays(path, lambda a: a["0.k.histogram"].fill(-5)),
    "no-counts": lambda path: arrays(path, lambda a: a["0.k.histogram"].fill(0)),
    "huge-counts": lambda path: arrays(path, lambda a: a["0.k.histogram"].fill(2**62)),
    "nan": lambda path: arrays(path, lambda a: a["0.k.amax"].fill(np.nan)),
    "minus": lambda path: arrays(path, lambda a: a["0.v.amax"].fill(-1)),
    "dtype": lambda path: arrays(path, lambda a: a.update({"0.k.text": a["0.k.text"] * 1.0})),
}  # fmt: skip


@pytest.mark.parametrize("name", STATISTICS)
def test_rescale_refuses_damaged_statistics(
    name: str, calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(calibrated, tmp_path / "copy"))
    STATISTICS[name](copy / HISTOGRAMS)
    line = refused(capsys, "rescale", str(copy), "-o", str(tmp_path / "out"))
    assert HISTOGRAMS in line and len(line) < 600
    assert not (tmp_path / "out").exists()


# --- weights that are not all there ----------------------------------------------------------


def test_config_that_claims_more_layers_than_the_weights_hold(
    calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(calibrated, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text()) | {"num_hidden_layers": 4}
    (copy / "config.json").write_text(json.dumps(config))
    assert "hold nothing of 2 of them (2, 3)" in inspect(copy).problems[0]
    line = refused(capsys, "rescale", str(copy), "-o", str(tmp_path / "out"))
    assert "config.json has 4 layers, the weights hold nothing of layers 2, 3" in line
    with pytest.raises(SystemExit) as stop:
        main(["inspect", str(copy)])
    assert stop.value.code == 1


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3_next", "gemma3n_text", "deepseek_v3"])
def test_other_layouts_hold_all_their_layers(model_type: str, tiny: Tiny) -> None:
    check_source(tiny(model_type))


def test_a_lost_layer_is_noticed(tmp_path: Path) -> None:
    folder = write_source(tmp_path / "a", layers=3)
    weights = load_file(folder / "model.safetensors")
    kept = {name: values for name, values in weights.items() if ".1." not in name}
    save_file(kept, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="has 3 layers, the weights hold nothing of layer 1:"):
        check_source(folder)


# --- two runs, full disks, odd datasets ------------------------------------------------------


def test_two_runs_into_one_output_do_not_share_their_state(
    tiny: Tiny, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    folder = state_folder(output)
    folder.mkdir()
    lock = os.open(folder / "rank-0.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)  # as a run in another process holds it
    command = ["calibrate", str(tiny()), "-o", str(output), "--dataset", str(text)]
    for option in (["--checkpoint-every", "1"], ["--resume"]):
        line = refused(capsys, *command, *option, "--max-seq-len", "32")
        assert "another calibration into" in line and str(folder) in line
    assert (folder / "rank-0.lock").exists() and not output.exists()
    os.close(lock)
    calibrate(tiny(), output, dataset=str(text), max_seq_len=32, checkpoint_every=1)
    assert output.exists() and not folder.exists()


def test_a_run_that_saved_nothing_leaves_no_state(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [5, 9, 100000]}\n')
    with pytest.raises(UserError):
        calibrate(tiny(), tmp_path / "out", dataset=str(tmp_path / "ids.jsonl"), checkpoint_every=1)
    assert not state_folder(tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["dataset_dict.json", "state.json"])
@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"splits": ["a"]}', '{"splits": 7}'])
def test_a_saved_dataset_that_is_none(
    name: str, content: str, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text(content)
    line = refused(
        capsys, "calibrate", str(tiny()), "--dataset", str(tmp_path / "data"), "--dry-run"
    )
    assert "cannot be read as a saved dataset" in line or "no split" in line


@pytest.mark.parametrize("command", [["models", "--json"], ["--version"], ["--help"]])
def test_output_that_does_not_fit_is_no_bug(command: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fp8calib", *command], stdout=full, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
    assert "No space left on device" in done.stderr


def test_a_long_value_is_not_echoed() -> None:
    with pytest.raises(RecipeError) as problem:
        parse_recipe("calibration: {observer: " + "x" * 100_000 + "}", "mine.yaml")
    assert len(str(problem.value)) < 300


def test_names_with_line_ends_stay_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, "inspect", str(tmp_path / "a\nb\x1b[2J"))
    assert line.isprintable() and "no such folder" in line
