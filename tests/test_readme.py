"""Every command of the README runs, in order, on less text; and so does its Python example."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from fp8calib.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
LESS_TEXT = ["--samples", "8", "--max-seq-len", "64"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines() if line]
    return [shlex.split(line, comments=True) for line in lines]


def test_make_targets_exist() -> None:
    targets = [words[1] for words in commands() if words[0] == "make"]
    assert targets == ["demo", "test"]
    for target in targets:
        subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)


def test_commands_and_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there."}]
    lines = [json.dumps({"messages": turns * count}) for count in range(1, 9)]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    ours = [words[1:] for words in commands() if words[0] == "fp8calib"]
    assert {words[0] for words in ours} >= {"calibrate", "inspect", "verify", "run"}
    for words in ours:
        measures = words[0] in ("calibrate", "verify")
        with pytest.raises(SystemExit) as stop:
            main([*words, *LESS_TEXT] if measures else words)
        out, err = capfd.readouterr()
        # So little text may miss a gate.
        assert stop.value.code in ((0, 1) if words[0] == "verify" else (0,)), (words, err)
        if words[0] == "run":
            assert "Paris" in out
    (example,) = blocks("python")
    exec(compile(example, "README.md", "exec"), {})
    assert "Paris" in capfd.readouterr().out
