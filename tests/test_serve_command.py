"""`fp8calib serve` from its start to its end: address, options, signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import wait_for

from fp8calib.cli import main
from fp8calib.cli import serve as serve_command
from fp8calib.serve import server as server_module

Tiny = Callable[..., Path]
LONG = {"prompt": "hello", "max_tokens": 150, "ignore_eos": True, "stream": True}


class Served:
    """`fp8calib serve` in this process; `work`, called with its URL once it listens, runs beside
    it, and a signal ends it."""

    def __init__(self, work: Callable[[str], Any], *args: object) -> None:
        self.result: Any = None
        self.problem: BaseException | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        url = f"http://127.0.0.1:{port}"

        def beside() -> None:
            try:
                wait_for(lambda: _is_up(url))
                self.result = work(url)
            except BaseException as problem:
                self.problem = problem
                os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=beside)
        thread.start()
        with pytest.raises(SystemExit) as stop:
            main(["serve", "--port", str(port), *map(str, args)])
        thread.join(30)
        self.code = stop.value.code
        if self.problem is not None:
            raise self.problem


def _is_up(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/health").status_code == 200
    return False


def streamed(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def wait_until_closed(url: str) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            httpx.get(f"{url}/health")
        except httpx.TransportError:
            return
        time.sleep(0.02)
    raise AssertionError("the server still takes connections")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_lets_running_requests_finish(
    number: signal.Signals, code: int, tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(url: str) -> list[dict[str, Any]]:
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG) as response:
            send(number)
            wait_until_closed(url)  # nobody else comes in
            return streamed(response)

    served = Served(work, tiny(), "--json", "--served-model-name", "mine")
    assert served.code == code
    assert served.result[-1]["choices"][0]["finish_reason"] == "length"
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["models"] == ["mine"] and told["url"].startswith("http://127.0.0.1:")
    assert f"serving mine at {told['url']}/v1" in err
    assert "KV cache: float32" in err and "Traceback" not in err


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """150 steps take 15 seconds."""
    from fp8calib.runtime.engine import Engine

    step = Engine.step

    def slow(engine: Engine) -> Any:
        time.sleep(0.1)
        return step(engine)

    monkeypatch.setattr(Engine, "step", slow)


def no_tracebacks(caplog: pytest.LogCaptureFixture) -> bool:
    return not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("stream", [True, False])
def test_what_does_not_finish_in_time_ends_with_what_it_has(
    stream: bool, tiny: Tiny, slow_steps: None, caplog: pytest.LogCaptureFixture
) -> None:
    def work(url: str) -> tuple[float, list[dict[str, Any]]]:
        body = LONG | {"stream": stream}
        threading.Timer(0.5, send, [signal.SIGTERM]).start()
        started = time.monotonic()
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
            answers = streamed(response) if stream else [json.loads(response.read())]
        return time.monotonic() - started, answers

    served = Served(work, tiny(), "--drain-timeout", 1)
    seconds, answers = served.result
    assert served.code == 0 and seconds < 8
    assert answers[-1]["choices"][0]["finish_reason"] == "abort"
    assert no_tracebacks(caplog)


def test_a_second_ctrl_c_does_not_wait(
    tiny: Tiny, slow_steps: None, caplog: pytest.LogCaptureFixture
) -> None:
    def work(url: str) -> float:
        started = time.monotonic()
        with (
            suppress(httpx.TransportError),
            httpx.stream("POST", f"{url}/v1/completions", json=LONG) as response,
        ):
            send(signal.SIGINT)
            time.sleep(0.3)
            send(signal.SIGINT)
            for _ in response.iter_lines():
                pass
        return time.monotonic() - started

    served = Served(work, tiny())
    assert served.code == 130 and served.result < 8
    assert no_tracebacks(caplog)


def test_other_names_of_the_machine_are_refused_without_a_key(tiny: Tiny) -> None:
    """As a web page would send them that its own DNS server points at 127.0.0.1."""

    def work(url: str) -> list[int]:
        port = url.rpartition(":")[2]
        names = (f"localhost:{port}", "127.0.0.1", f"evil.example:{port}", "127.0.0.1.evil.example")
        codes = [
            httpx.get(f"{url}/v1/models", headers={"Host": name}).status_code for name in names
        ]
        send(signal.SIGTERM)
        return codes

    assert Served(work, tiny()).result == [200, 200, 400, 400]


def test_the_key_comes_from_the_environment(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FP8CALIB_API_KEY", "secret")

    def work(url: str) -> tuple[int, int]:
        headers = {"Authorization": "Bearer secret"}
        codes = (
            httpx.get(f"{url}/v1/models").status_code,
            httpx.get(f"{url}/v1/models", headers=headers).status_code,
        )
        send(signal.SIGTERM)
        return codes

    served = Served(work, tiny(), "--access-log")
    assert served.result == (401, 200) and served.code == 0
    assert "secret" not in "".join(capsys.readouterr())


def call(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The one line of a command that is refused."""
    capsys.readouterr()  # what making the model printed
    with pytest.raises(SystemExit) as stop:
        main(["serve", *map(str, args)])
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "") and err.count("\n") == 1 and err.startswith("error: ")
    return err


def test_a_busy_port_is_one_line(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = call(capsys, tiny(), "--port", port)
    assert f"--port {port}: address already in use; choose another --port" in message


def test_an_address_taken_while_the_model_is_loaded_is_one_line(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers that start at the same time can both bind a port: only one of them listens."""
    make_server = server_module.make_server

    def meanwhile(*args: Any) -> Any:
        other.listen()
        return make_server(*args)

    monkeypatch.setattr(server_module, "make_server", meanwhile)
    with server_module.bind("127.0.0.1", 0) as other:
        port = other.getsockname()[1]
        with pytest.raises(SystemExit) as stop:
            main(["serve", str(tiny()), "--port", str(port)])
    assert stop.value.code == 2
    assert f"--port {port}: address already in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--host", "no.such.host.invalid"], "--host no.such.host.invalid"),
        (["--port", "70000"], "'--port'"),
        (["--max-body-size", "big"], "--max-body-size big: give a size"),
        (["--max-body-size", "9" * 400], "give a size"),
        (["--max-n", "0"], "the limit of n must be at least 1"),
        (["--api-key", ""], "the API key is empty"),
        (["--served-model-name", ""], "name is empty"),
        (["--drain-timeout", "-1"], "0 or more"),
        (["--tensor-parallel-size", "2"], "is for --engine vllm"),
        (["--engine", "vllm", "--max-tokens", "5"], "--max-tokens is for --engine fp8calib"),
        (["--engine", "vllm", "--max-n", "5"], "--max-n is for --engine fp8calib"),
        (["--kv-cache-dtype", "int3"], "unknown KV-cache dtype 'int3'"),
    ],
)
def test_mistakes(
    args: list[str], message: str, tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    port = [] if "--port" in args else ["--port", "0"]
    assert message in call(capsys, tiny(), *port, *args)


def test_a_wrong_model_is_told_before_anything_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such folder" in call(capsys, "/no/such/model")


def test_without_the_extra_it_is_told_how_to_get_it(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = serve_command.find_spec
    monkeypatch.setattr(
        serve_command, "find_spec", lambda name: None if name == "uvicorn" else found(name)
    )
    assert "serve needs uvicorn: pip install 'fp8calib[serve]'" in call(capsys, tiny())
