"""`fp8calib doctor`: true of this machine, fit to be pasted, silent about secrets."""

from __future__ import annotations

import json
import platform
import shutil
from pathlib import Path
from typing import Any

import pytest
from fake_checkpoints import write_source

from fp8calib import doctor
from fp8calib.cli import main
from fp8calib.doctor import diagnose

GPU = doctor._GPU
look_for_vllm = doctor._vllm_version


@pytest.fixture(autouse=True)
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for vLLM starts interpreters; few tests need that."""
    monkeypatch.setattr(doctor, "_vllm_version", lambda python: None)


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["doctor", *arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def values(diagnosis: doctor.Diagnosis) -> dict[str, str]:
    return {finding.name: finding.value for finding in diagnosis.findings}


def test_it_tells_what_is_here() -> None:
    import torch
    import transformers

    found = values(diagnose())
    assert found["python"] == platform.python_version()
    assert found["torch"] == torch.__version__
    assert found["transformers"] == transformers.__version__


def test_json_holds_what_the_table_shows(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["--json"], capsys)
    shown = json.loads(out)
    assert code == 0 and shown["ok"] is True
    _, out, err = run([], capsys)
    assert out == ""
    for finding in shown["findings"]:
        assert finding["name"].split()[0] in err


def test_nothing_secret_and_no_name_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "alice"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_HOME", str(home / "cache"))
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "DATABASE_URL"):
        monkeypatch.setenv(name, f"secret-of-{name}")
    monkeypatch.chdir(home)
    write_source(home / "model")
    for arguments in (["--json", "--model", str(home / "model")], ["--model", "model"]):
        code, out, err = run(arguments, capsys)
        assert code == 0
        assert "secret-of" not in out + err and "alice" not in out + err.replace("\n", "")
        assert "HF_TOKEN is set" in out + err.replace("\n", " ")


@pytest.mark.parametrize(
    ("capability", "computes", "per_head"),
    [
        ((7, 5), "our Triton kernels need 8.0", "no backend here takes them"),
        ((8, 0), "stores e4m3", "no backend here takes them"),
        ((8, 9), "stores and computes in e4m3", "no backend here takes them"),
        ((9, 0), "stores and computes in e4m3", "FlashAttention 3 takes them"),
        ((10, 0), "stores and computes in e4m3", "FlashAttention 4 takes them"),
    ],
)
def test_what_a_gpu_can_do(
    capability: tuple[int, int], computes: str, per_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_gpus", lambda: [GPU("A GPU", capability, 80 << 30, 70 << 30)])
    found = diagnose()
    told = " ".join(f"{entry.value} {entry.advice}" for entry in found.findings)
    assert computes in told and per_head in told
    assert bool(found.problems) == (capability < (8, 0))


def test_what_is_missing_or_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("triton", "llmcompressor"):
            raise doctor.PackageNotFoundError
        return "99.1"

    monkeypatch.setattr(doctor, "version", version)
    found = {finding.name: finding for finding in diagnose().findings}
    assert (found["torch"].verdict, found["torch"].advice) == ("note", "tested are 2.11 and 2.13")
    assert found["triton"].verdict == "note"
    assert found["llmcompressor"].verdict == "problem"


def test_whether_a_model_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_source(tmp_path / "model")
    assert values(diagnose(str(source)))["memory"] == "the weights fit main memory"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    monkeypatch.setattr(doctor, "_memory", lambda _: 10)
    code, _, err = run(["--model", str(source), "-o", str(tmp_path / "new" / "out")], capsys)
    assert code == 1 and "disk: 10 bytes free" in err
    assert "--device-map stream" in err.replace("\n", "")
    (source / "model.safetensors").write_bytes(b"")
    code, _, err = run(["--model", str(source)], capsys)
    assert code == 1 and "error: model:" in err


@pytest.mark.parametrize("model", ["owner/not-cached", "a b c", "x" * 300])
def test_models_that_are_not_here(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(["--model", model], capsys)
    assert code == 2 and len(err.strip().splitlines()) == 1


def test_an_interpreter_that_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_vllm_version", look_for_vllm)
    code, _, err = run(["--python", "/no/such/python"], capsys)
    assert code == 2 and "there is no such interpreter" in err


def test_vllm_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_vllm_version", look_for_vllm)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.32.0\n")
    python.chmod(0o755)
    assert values(diagnose(python=str(python)))["vLLM"].startswith("0.32.0 (")


def test_a_driver_that_does_not_fit_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def broken() -> Any:
        raise RuntimeError("CUDA driver version is insufficient\nand more")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    assert values(diagnose())["GPU"] == "CUDA driver version is insufficient"
