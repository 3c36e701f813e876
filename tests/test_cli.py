"""The command line: exit codes, one-line errors, --json, and a --help that loads no torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import call, write_texts

from fp8calib import LLM, AsyncLLM, calibrate, verify
from fp8calib.cli import main
from fp8calib.errors import UserError


def run(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fp8calib", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_texts(tmp_path, (f"text {n} " * (4 + n) for n in range(6)))


def test_help_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, contextlib, io\n"
        "from fp8calib.cli import main\n"
        "for args in ([], ['calibrate'], ['run'], ['chat'], ['serve'], ['--version']):\n"
        "    args += ['--help'] * (args != ['--version'])\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "        main(args)\n"
        "heavy = {'torch', 'transformers', 'llmcompressor', 'numpy', 'fastapi'}\n"
        "print(sorted(heavy & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_help_tells_each_command_in_one_whole_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = call(capsys, "--help")
    commands = out.partition("Commands:")[2]
    assert code == 0 and "verify" in commands and "..." not in commands


def test_calibrate_and_inspect_as_a_user_runs_them(
    tiny: Callable[..., Path], texts: Path, tmp_path: Path
) -> None:
    done = run("calibrate", str(tiny()), "--dataset", str(texts), "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""  # the summary is for a person: stderr
    assert "vllm serve out" in done.stderr and "clipped" in done.stderr
    assert "strategy: tensor" in done.stderr  # the resolved recipe
    done = run("inspect", "out", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["layers"]) == 2


def test_json_is_all_there_is_on_stdout(
    tiny: Callable[..., Path], texts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, out = str(tiny()), str(tmp_path / "out")
    with pytest.raises(SystemExit) as stop:
        main(["calibrate", source, "--dataset", str(texts), "-o", out, "--json", "--margin", "1.5"])
    result = json.loads(capfd.readouterr().out)
    assert stop.value.code == 0
    assert result["output"] == out and result["recipe"]["calibration"]["margin"] == 1.5
    assert {entry["kind"] for entry in result["layers"]} == {"q", "k", "v"}
    assert result["serve"] == f"vllm serve {out}"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["calibrate", "/no/such/model"], "no such folder"),
        (["calibrate", "MODEL", "--strategy", "channel"], "'tensor' or 'attn_head'"),
        (["calibrate", "MODEL", "--dataset", "/no/such.jsonl"], "/no/such.jsonl"),
        (
            ["calibrate", "MODEL", "--dataset", "TEXTS", "--skip-layers", "9", "--dry-run"],
            "no attention layer 9",
        ),
        (["calibrate", "MODEL", "--margin", "0"], "margin"),
        (["calibrate", "MODEL", "--samples", "many"], "--samples"),
        (["calibrate", "MODEL", "--recipe", "nope"], "there is no recipe 'nope'"),
        (["calibrate", "MODEL", "--recipe", ""], "there is no recipe ''"),
        (["verify", "MODEL", "--recipe", ""], "there is no recipe ''"),
        (["sensitivity", "MODEL", "--budget-kl", "inf"], "--budget-kl must be above 0, got inf"),
        (["calibrate"], "Missing argument"),
        (["calibrat"], "calibrat"),
        (["calibrate", "MODEL", "--strateg", "tensor"], "--strateg"),
        (["inspect", "/no/such"], "/no/such"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(
    tiny: Callable[..., Path],
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    real = {"MODEL": str(tiny()), "TEXTS": str(texts)}
    code, out, err = call(capsys, *(real.get(arg, arg) for arg in args))
    assert code == 2
    assert out == "" and "Traceback" not in err
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("command", ["calibrate", "verify", "sensitivity", "run", "chat", "serve"])
def test_a_device_that_is_none_is_told_before_anything_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("fp8calib.models.resolve_model", None)  # which may fetch for hours
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    cases = [
        (["--device", "tpu"], "unknown device 'tpu': use auto, cpu, cuda or cuda:N"),
        (["--device", "cuda:01"], "unknown device 'cuda:01': use auto, cpu, cuda or cuda:N"),
        (["--device", "cuda:1"], "device 'cuda:1': torch sees 1 CUDA devices"),
        (["--dtype", "int4"], "unknown dtype 'int4': use auto, bfloat16, float16, float32"),
    ]
    if command == "calibrate":
        cases += [(["--device-map", "all"], "unknown device map 'all': use auto or stream")]
    for option, message in cases:
        code, out, err = call(capsys, command, "somebody/model", *option)
        assert (code, out, err) == (2, "", f"error: {message}\n")


@pytest.mark.parametrize("command", [["run", "-p", "a"], ["chat"], ["serve", "--port", "0"]])
@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--attention", "exact"], "unknown attention 'exact'"),
        (["--kv-cache-dtype", "int8"], "unknown KV-cache dtype 'int8'"),
        (["--missing-scales", "zero"], "unknown --missing-scales 'zero'"),
        (["--max-model-len", "0"], "max_model_len must be at least 1, got 0"),
    ],
)
def test_options_of_the_cache_are_checked_before_the_model_is_fetched(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    option: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("fp8calib.models.resolve_model", None)
    code, out, err = call(capsys, command[0], "somebody/model", *command[1:], *option)
    assert (code, out) == (2, "") and err.count("\n") == 1 and message in err


@pytest.mark.parametrize("engine", [LLM, AsyncLLM])
@pytest.mark.parametrize(
    "option", [{"device": "tpu"}, {"device": torch.device("cpu")}, {"dtype": torch.bfloat16}]
)
def test_an_engine_refuses_a_device_before_the_model_is_fetched(
    monkeypatch: pytest.MonkeyPatch, engine: type, option: dict[str, Any]
) -> None:
    monkeypatch.setattr("fp8calib.runtime.loader.resolve_model", None)
    with pytest.raises(UserError, match=r"^unknown d.*: use auto, "):
        engine("somebody/model", **option)


def test_a_device_that_is_none_is_told_before_anything_else_in_python() -> None:
    for option in ({"device": "tpu"}, {"dtype": "int4"}, {"device_map": "all"}):
        with pytest.raises(UserError, match="unknown d"):
            calibrate("somebody/model", **option)
        if "device_map" not in option:
            with pytest.raises(UserError, match="unknown d"):
                verify("somebody/model", **option)


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--kv-cache-dtype-skip-layers", "0", "-1"], "0 1"),
        (["--kv-cache-dtype-skip-layers", "0 -1"], "0 1"),
        (["--skip-layers", "0,1"], "0 1"),
        (["--skip-layers", "0", "--skip-layers", "1"], "0 1"),
        (["--skip-layers", "-1"], "1"),
    ],
)
def test_skip_layers_in_every_form(
    tiny: Callable[..., Path],
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    flag: str,
) -> None:
    out = str(tmp_path / "out")
    args = ["calibrate", *words, str(tiny()), "--dataset", str(texts), "-o", out, "--json"]
    code, stdout, err = call(capsys, *args)
    assert code == 0, err
    result = json.loads(stdout)
    assert " ".join(result["skip_layers"]) == flag
    assert result["serve"] == f"vllm serve {out} --kv-cache-dtype-skip-layers {flag}"


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys)
    assert code == 2 and "calibrate" in out + err


def test_a_bug_of_ours_is_called_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise ZeroDivisionError("nobody expected this")

    monkeypatch.setattr("fp8calib.checkpoint.inspect", fail)
    code, _, err = call(capsys, "inspect", "anything")
    assert code == 3 and "ZeroDivisionError" in err and "Traceback" not in err
    code, _, err = call(capsys, "--debug", "inspect", "anything")
    assert code == 3 and "Traceback" in err


def test_an_interrupted_calibration_exits_130_and_leaves_nothing(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    source = tiny(num_hidden_layers=6)
    data = tmp_path / "texts.jsonl"
    line = json.dumps({"text": "word " * 50})
    data.write_text("\n".join([line] * 20_000))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "fp8calib", "calibrate", str(source), "-o", str(out)]
    command += ["--dataset", str(data), "--samples", "20000", "--batch-size", "1"]
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr)
        try:
            deadline = time.monotonic() + 120
            while "gates" not in log.read_text():  # the recipe is printed once the data is ready
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.1)
            time.sleep(3)
            os.kill(process.pid, signal.SIGINT)
            assert process.wait(timeout=60) == 130
        finally:
            process.kill()
    err = log.read_text()
    assert "Traceback" not in err and err.strip().endswith("error: interrupted")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "texts.jsonl"]
