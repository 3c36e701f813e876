"""Odd but possible input, found by trying to break the commands: one clear line and exit code 2."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_scales import calibrated
from safetensors.numpy import load_file, save_file

from fp8calib.calibration import calibrate
from fp8calib.checkpoint import check_source, inspect
from fp8calib.checkpoint.folder import check_output
from fp8calib.cli import main
from fp8calib.errors import CheckpointError, DataError, ModelError, RecipeError
from fp8calib.recipe import parse_recipe

Tiny = Callable[..., Path]


def call(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    """A command's exit code and its last line on stderr."""
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    assert isinstance(stop.value.code, int)
    return stop.value.code, capsys.readouterr().err.strip().splitlines()[-1]


def copied(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.fixture
def texts(tmp_path: Path) -> str:
    path = tmp_path / "texts.txt"
    path.write_text("some text\n" * 4)
    return str(path)


def test_weights_that_are_missing_are_not_made_up(tiny: Tiny, texts: str, tmp_path: Path) -> None:
    source = copied(tiny(), tmp_path / "in")
    weights = load_file(source / "model.safetensors")
    del weights["model.layers.0.self_attn.k_proj.weight"]
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 tensors .*layers\.0\.self_attn\.k_proj\.weight"):
        calibrate(source, tmp_path / "out", dataset=texts)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 0),
        ("num_key_value_heads", "two"),
        ("hidden_size", "x"),
        ("architectures", 5),
        ("rope_scaling", 7),
        ("text_config", {}),
    ],
)
def test_a_config_that_transformers_cannot_read(
    tiny: Tiny,
    texts: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    key: str,
    value: Any,
) -> None:
    source = copied(tiny(), tmp_path / "in")
    config = json.loads((source / "config.json").read_text()) | {key: value}
    (source / "config.json").write_text(json.dumps(config))
    out = str(tmp_path / "out")
    code, line = call(capsys, "calibrate", str(source), "--dataset", texts, "-o", out)
    assert code == 2 and line.startswith("error: "), line


@pytest.mark.parametrize("spoil", ["trailing", "metadata"])
def test_a_file_that_safetensors_refuses_is_not_called_sound(
    tiny: Tiny, tmp_path: Path, spoil: str
) -> None:
    calibrated(tiny(), tmp_path / "out")
    shard = sorted((tmp_path / "out").glob("*.safetensors"))[-1]
    content = shard.read_bytes()
    if spoil == "trailing":
        shard.write_bytes(content + b"xx")
    else:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length]) | {"__metadata__": [1]}
        text = json.dumps(header).encode()
        shard.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        inspect(tmp_path / "out")


def test_a_link_out_of_the_source_is_found_before_any_work(tiny: Tiny, tmp_path: Path) -> None:
    source = copied(tiny(), tmp_path / "in")
    (tmp_path / "outside").write_text("x")
    (source / "LICENSE").symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="LICENSE is a link that leads out"):
        check_source(source)


def test_output_names_that_cannot_be_written(tmp_path: Path) -> None:
    for name in ("n" * 235, "n" * 400, os.fsdecode(b"o\xff")):
        with pytest.raises(CheckpointError, match="output"):
            check_output(tmp_path / name, overwrite=False)


@pytest.mark.parametrize(
    "record",
    [
        '{"text": "\\ud800 abc"}',
        '{"messages": [{"role": "user", "content": "\\udfff"}]}',
        '{"input_ids": [' + "9" * 5000 + "]}",
        "[" * 100_000,
    ],
)
def test_records_that_are_no_text(tiny: Tiny, tmp_path: Path, record: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(record + "\n")
    with pytest.raises(DataError):
        calibrate(tiny(), tmp_path / "out", dataset=str(path))


@pytest.mark.parametrize(
    "text",
    [
        "llmcompressor: {a_stage: foo}",
        "llmcompressor: {a_stage: {b_modifiers: [1]}}",
        "llmcompressor: {a_stage: {5: 1}}",
        "llmcompressor: {a_stage: {b_modifiers: {QuantizationModifier: 5}}}",
        "[" * 3000,
        "calibration: {samples: " + "9" * 5000 + "}",
    ],
)
def test_recipes_of_the_wrong_shape(text: str) -> None:
    with pytest.raises(RecipeError) as problem:
        parse_recipe(text, "mine.yaml")
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("name", ["n" * 300, "~nosuchuser/x", "a\0b"])
def test_names_that_no_file_can_have(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "calibrate", name)[0] == 2


def test_prompts_are_lines_and_text(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"a\u2028b"\n"c\x85d"\n', encoding="utf-8")
    args = ["--max-tokens", "1", "--json"]
    with pytest.raises(SystemExit) as stop:
        main(["run", str(tiny()), "--prompts", str(prompts), *args])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and len(json.loads(out)["outputs"]) == 2, out
    code, line = call(capsys, "run", str(tiny()), "-p", os.fsdecode(b"a\xff"), *args)
    assert code == 2 and "prompt 1 is not UTF-8" in line


def test_emoji_codes_in_names_stay_as_they_are(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrated(tiny(), tmp_path / ":smile:")
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path / ":smile:")])
    assert "/:smile:" in capsys.readouterr().err


def test_output_that_nobody_reads_is_no_failed_check(tiny: Tiny, tmp_path: Path) -> None:
    calibrated(tiny(), tmp_path / "out")
    command = f"{sys.executable} -m fp8calib inspect out --json | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 141, done.stderr


def test_a_huge_top_k_is_all(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["-p", "hi", "--temperature", "1", "--top-k", "99999999999999999999"]
    with pytest.raises(SystemExit) as stop:
        main(["run", str(tiny()), *args, "--max-tokens", "2"])
    assert stop.value.code == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("calibrate", "", "--dataset", "TEXTS", "-o", "OUT"), "model is empty"),
        (("calibrate", "MODEL", "--dataset", "", "-o", "OUT"), "dataset is empty"),
        (("inspect", ""), "model is empty"),
        (("convert", "", "--to", "json", "-o", "OUT.json"), "model is empty"),
        (("verify", "MODEL", "--dataset", "TEXTS", "--tasks", ""), "names no task"),
        (("verify", "MODEL", "--dataset", "TEXTS", "--tasks", ","), "names no task"),
    ],
)
def test_what_an_unset_variable_of_a_shell_leaves_is_refused(
    args: tuple[str, ...],
    said: str,
    tiny: Tiny,
    texts: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tiny())  # where an empty name would be taken for a model's folder
    places = {"MODEL": str(tiny()), "TEXTS": texts, "OUT": str(tmp_path / "out")}
    places["OUT.json"] = str(tmp_path / "out.json")
    code, line = call(capsys, *[places.get(word, word) for word in args])
    assert (code, said in line) == (2, True), line


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_an_output_where_no_file_can_be_made(
    tiny: Tiny, texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, line = call(capsys, "calibrate", str(tiny()), "--dataset", texts, "-o", "/proc/out")
    assert code == 2 and line.startswith("error: cannot write /proc/out: ")


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (("verify", "--no-noise-floor"), '"gates"'),
        (("sensitivity", "--budget-kl", "1"), '"budget'),
    ],
)
def test_numbers_are_shown_where_their_report_cannot_be_written(
    args: tuple[str, ...],
    shown: str,
    tiny: Tiny,
    texts: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    command, *more = args
    report = str(tmp_path / "report.json")
    with pytest.raises(SystemExit) as stop:
        main([command, str(tiny()), "--dataset", texts, "--report", report, "--json", *more])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and shown in out and json.loads(out)
    assert err.strip().splitlines()[-1] == (
        f"error: cannot write {report}: No space left on device"
    )
    assert not list(tmp_path.glob("*report*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["calibrate", "--auto", "--budget-kl", "-1"], "--budget-kl must be above 0, got -1"),
        (["calibrate", "-o", "out", "--private"], "--private is for --push-to-hub"),
        (["convert", "--to", "json", "-o", "out", "--private"], "--private is for --push-to-hub"),
        (["verify", "--variants", "fp8,"], "--variants has an empty name between its commas"),
        (["inspect", "--live", "--python", "/bin/true"], "there is no vLLM in /bin/true"),
        (["inspect", "--live", "--tp", "2"], "--live runs vLLM on one device, and this is --tp 2"),
        (["inspect", "--python", "/bin/true"], "--python is for --live"),
    ],
    ids=lambda words: words[-1] if isinstance(words, list) else "",
)
def test_options_that_mean_nothing(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    code, line = call(capsys, words[0], str(tiny()), *words[1:])
    assert code == 2 and message in line
