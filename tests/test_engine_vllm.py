"""`--engine vllm`: which command vLLM gets, with an executable that only writes down its arguments.

Beside the executable lies a Python whose `vllm` module is a stand-in too, since `run` uses vLLM's
offline API. The tests at the end do the same with vLLM itself.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from made_scales import calibrated, rewritten

from fp8calib import calibrate
from fp8calib.cli import main
from fp8calib.errors import CheckpointError
from fp8calib.vllm_launch import find_vllm, prepare

Tiny = Callable[..., Path]

PYTHON = Path(__file__).parent.parent / ".venv-vllm" / "bin" / "python"
PYTHON = Path(os.environ.get("FP8CALIB_VLLM_PYTHON", PYTHON))

EXECUTABLE = """#!{python}
import json, os, sys
key = os.environ.get("VLLM_API_KEY")
print(json.dumps({{"arguments": sys.argv[1:], "key": key}}))
sys.exit(7)
"""
# Enough of vLLM's offline API to see what it is asked.
MODULES = {
    "__init__.py": """
import json
from types import SimpleNamespace as Some

class SamplingParams:
    def __init__(self, **fields):
        self.fields = fields

class LLM:
    @classmethod
    def from_engine_args(cls, args):
        print("loading", flush=True)
        made = cls()
        made.args = args
        return made

    def generate(self, prompts, params):
        said = json.dumps([self.args, params.fields])
        return [self._output(prompt, said) for prompt in prompts]

    def chat(self, chats, params):
        return [self._output(chat[-1]["content"], "chat") for chat in chats]

    def _output(self, prompt, text):
        one = Some(index=0, text=text, token_ids=(1, 2), finish_reason="length", stop_reason=None)
        return Some(prompt_token_ids=list(prompt), outputs=[one])
""",
    "engine/arg_utils.py": """
class EngineArgs:
    @staticmethod
    def add_cli_args(parser):
        return parser

    @staticmethod
    def from_cli_args(args):
        if "--no-such-flag" in args:
            raise SystemExit("vllm: no such flag")
        return args
""",
    "utils/argparse_utils.py": """
class FlexibleArgumentParser:
    def __init__(self, prog):
        pass

    def parse_args(self, words):
        return words
""",
}


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A vLLM on PATH, in an environment of its own."""
    python = os.path.realpath(sys.executable)
    env = tmp_path / "env"
    for name, text in MODULES.items():
        module = env / "lib" / "vllm" / name
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(text)
    (env / "bin").mkdir()
    wrapper = f'#!/bin/sh\nPYTHONPATH="{env}/lib" exec "{python}" "$@"\n'
    for name, text in (("vllm", EXECUTABLE.format(python=python)), ("python", wrapper)):
        (env / "bin" / name).write_text(text)
        (env / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{env}/bin:{os.environ['PATH']}")
    return env / "bin" / "vllm"


@pytest.fixture(scope="module")
def checkpoint(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm") / "out"
    calibrated(tiny(), folder, skip_layers=["0"])
    return folder


def call(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """Run a command in this process: exit code, stdout, stderr."""
    capsys.readouterr()  # what making the model printed
    with pytest.raises(SystemExit) as stop:
        main(list(map(str, args)))
    out, err = capsys.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, out, err


def serve(*args: object, **environment: str) -> tuple[int, dict[str, Any], str]:
    """`fp8calib serve`, which becomes vLLM: exit code, what it was called with, stderr."""
    command = [sys.executable, "-m", "fp8calib", "serve", *map(str, args)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | environment
    )
    return done.returncode, json.loads(done.stdout), done.stderr


def test_serve_becomes_vllm_with_the_flags_that_inspect_prints(
    vllm: Path, checkpoint: Path
) -> None:
    own = ["--port", 9000, "--served-model-name", "mine", "--tensor-parallel-size", 2]
    rest = ["--max-model-len", "4096", "--kv-cache-dtype-skip-layers", "0", "1"]
    code, called, err = serve(
        checkpoint, "--engine", "vllm", *own, "--", *rest, FP8CALIB_API_KEY="secret"
    )
    assert code == 7, "vLLM's exit code is the command's"
    words = called["arguments"]
    assert words[:4] == ["serve", str(checkpoint), "--kv-cache-dtype-skip-layers", "0"]
    assert words[-5:] == rest
    pairs = list(pairwise(words))
    for pair in (
        ("--host", "127.0.0.1"),
        ("--port", "9000"),
        ("--served-model-name", "mine"),
        ("--tensor-parallel-size", "2"),
    ):
        assert pair in pairs
    assert called["key"] == "secret" and "secret" not in " ".join(words)
    assert "serve " + str(checkpoint) in err


def flags(checkpoint: Path, **choice: Any) -> list[str]:
    return prepare(str(checkpoint), **choice).flags


def test_flags_follow_what_is_chosen(vllm: Path, checkpoint: Path, tiny: Tiny) -> None:
    skip = "--kv-cache-dtype-skip-layers"
    assert flags(checkpoint) == [skip, "0"]
    assert flags(checkpoint, skip_layers=["-1"]) == [skip, "1"]
    assert flags(checkpoint, skip_layers=[]) == []
    assert flags(checkpoint, kv_cache_dtype="bfloat16") == ["--kv-cache-dtype", "bfloat16"]
    assert flags(checkpoint, kv_cache_dtype="fp8") == ["--kv-cache-dtype", "fp8", skip, "0"]
    assert flags(tiny()) == []
    assert flags(tiny(), kv_cache_dtype="fp8", skip_layers=["0"]) == [
        *("--kv-cache-dtype", "fp8", skip, "0")
    ]
    chosen = {"max_model_len": 64, "max_num_seqs": None, "trust_remote_code": True}
    assert flags(tiny(), flags=chosen) == ["--max-model-len", "64", "--trust-remote-code"]


def test_run_uses_vllms_offline_api(
    vllm: Path, checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    args = [checkpoint, "--engine", "vllm", "-p", "one", "-p", "three", "--max-tokens", "5"]
    code, out, err = call(capfd, "run", *args, "--json", "--", "--enforce-eager")
    assert code == 0, err
    assert "loading" in err, "what vLLM prints is not for stdout"
    report = json.loads(out)
    assert [o["prompt"] for o in report["outputs"]] == ["one", "three"]
    assert [o["prompt_tokens"] for o in report["outputs"]] == [3, 5]
    words, sampling = json.loads(report["outputs"][0]["text"])
    assert words[:2] == ["--model", str(checkpoint)]
    assert "--kv-cache-dtype-skip-layers" in words and words[-1] == "--enforce-eager"
    assert sampling["max_tokens"] == 5 and sampling["temperature"] == 0
    code, out, err = call(capfd, "run", checkpoint, "--engine", "vllm", "--chat", "-p", "one")
    assert (code, out) == (0, "chat\n"), err


def test_a_vllm_that_fails_is_told(
    vllm: Path, checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    args = ["run", checkpoint, "--engine", "vllm", "-p", "one", "--", "--no-such-flag"]
    code, out, err = call(capfd, *args)
    assert (code, out) == (2, "") and "vllm: no such flag" in err
    assert err.strip().splitlines()[-1].startswith("error: vLLM ended with status 1")


def test_incomplete_scales_would_run_at_one(vllm: Path, tiny: Tiny, tmp_path: Path) -> None:
    calibrated(tiny(), tmp_path / "out")
    rewritten(
        tmp_path / "out", lambda name, v: {} if name.endswith("1.self_attn.k_scale") else {name: v}
    )
    with pytest.raises(CheckpointError, match="k_scale is missing; vLLM would"):
        prepare(str(tmp_path / "out"))
    assert flags(tmp_path / "out", missing_scales="one") == []


@pytest.mark.parametrize("command", ["run", "serve"])
def test_without_vllm_it_is_told_how_to_get_it(
    command: str,
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    prompt = ["-p", "a"] if command == "run" else []
    code, out, err = call(capsys, command, tiny(), *prompt, "--engine", "vllm")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "vLLM is not installed: `pip install vllm`" in err
    code, _, err = call(capsys, command, tiny(), *prompt, "--engine", "vllm", "--vllm", "/no/vllm")
    assert code == 2 and "/no/vllm: no such executable" in err


def test_the_executable_can_be_named(
    vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_vllm() == vllm
    other = tmp_path / "link"
    other.symlink_to(vllm)
    assert find_vllm(str(other)) == other
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FP8CALIB_VLLM", str(other))
    assert find_vllm() == other


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--engine", "sglang"], "unknown --engine 'sglang'"),
        (["--engine", "vllm", "--attention", "fp8"], "--attention is for --engine fp8calib"),
        (["--engine", "vllm", "--compare"], "--compare is for --engine fp8calib"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size is for --engine vllm"),
        (["extra"], "an argument behind MODEL is for --engine vllm"),
        (["--kv-cache-memory", "lots"], "--kv-cache-memory lots: give a size such as 8GiB"),
    ],
)
def test_options_of_the_other_engine_are_refused(
    args: Sequence[str], message: str, tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, "run", tiny(), "-p", "a", *args)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


@pytest.fixture(scope="module")
def demo_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm") / "out"
    calibrate(
        "demo:smollm2-135m-instruct",
        folder,
        dataset="builtin:pydoc",
        samples=8,
        max_seq_len=128,
        kv_cache_dtype_skip_layers=["0"],
    )
    return folder


@pytest.mark.vllm
def test_run_on_vllm_itself(
    demo_checkpoint: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parser takes our flags, its offline API our request; skip layers reach its cache."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    args = ["-p", "The capital of France is", "--max-tokens", 8, "--max-model-len", 128]
    engine = ["--engine", "vllm", "--vllm", PYTHON.with_name("vllm"), "--json"]
    code, out, err = call(capfd, "run", demo_checkpoint, *args, *engine, "--", "--enforce-eager")
    assert code == 0, err[-3000:]
    (output,) = json.loads(out)["outputs"]
    assert "Paris" in output["text"] and len(output["token_ids"]) == 8
    assert re.search(r"kv_cache_dtype_skip_layers\W+0", err)


@pytest.fixture
def named_vllm(tmp_path: Path) -> dict[str, str]:
    """The environment in which vLLM's own command starts. It asks for the version of a package
    called vllm, and its build for CPUs is called vllm-cpu."""
    ask = "from importlib.metadata import version; print(version('vllm-cpu'))"
    done = subprocess.run([PYTHON, "-c", ask], capture_output=True, text=True, check=False)
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB
    if done.returncode == 0:
        version = f"{done.stdout.strip()}+cpu"
        metadata = tmp_path / f"vllm-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        variables["PYTHONPATH"] = str(tmp_path)
    return variables


@pytest.mark.vllm
def test_serve_on_vllm_itself(
    demo_checkpoint: Path, named_vllm: dict[str, str], tmp_path: Path
) -> None:
    """OpenAI's client talks with what this command has become; the key is asked for."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "fp8calib", "serve", str(demo_checkpoint), "--engine", "vllm"]
    command += ["--vllm", str(PYTHON.with_name("vllm")), "--port", str(port)]
    command += ["--served-model-name", "demo", "--max-model-len", "128", "--", "--enforce-eager"]
    variables = os.environ | named_vllm | {"FP8CALIB_API_KEY": "secret"}
    log = tmp_path / "log"
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file, env=variables)
    try:
        url = f"http://127.0.0.1:{port}"
        while not is_up(url):
            assert server.poll() is None, log.read_text()[-3000:]
            time.sleep(0.5)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="secret") as client:
            assert [model.id for model in client.models.list()] == ["demo"]
            asked: Any = {"model": "demo", "prompt": "The capital of France is", "max_tokens": 8}
            whole = client.completions.create(temperature=0, **asked)
            assert "Paris" in whole.choices[0].text
            stream = client.completions.create(temperature=0, stream=True, **asked)
            assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="other").models.list()
    finally:
        server.terminate()
        server.wait(60)
    assert re.search(r"kv_cache_dtype_skip_layers\W+0", log.read_text())


def is_up(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/health").status_code == 200
    return False
