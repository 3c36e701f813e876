"""What the server refuses, and how: OpenAI's error object, and an engine that goes on."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import Running, serving

from fp8calib.errors import UserError
from fp8calib.runtime.async_llm import AsyncLLM
from fp8calib.serve.app import create_app
from fp8calib.serve.protocol import CompletionRequest
from fp8calib.serve.settings import Limits, ServerSettings

Tiny = Callable[..., Path]
HELLO = [{"role": "user", "content": "hello"}]
HELLO_BODY = {"messages": HELLO}
KEY = "a secret: \u00e4"
LIMITS = Limits(body_bytes=20_000, prompt_tokens=100, max_tokens=120, prompts=4, n=3, stop=2)


@pytest.fixture(scope="module")
def running(tiny: Tiny) -> Iterator[Running]:
    with serving(AsyncLLM(str(tiny())), ServerSettings(["tiny"], limits=LIMITS)) as server:
        yield server


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"
    assert "\n" not in body["error"]["message"]
    return body["error"]


COMPLETIONS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"prompt": "x" * 101}, "101 tokens, more than this server's limit of 100", "prompt"),
    ({"prompt": ""}, "a prompt is empty", None),
    ({"prompt": []}, "there is none", "prompt"),
    ({"prompt": ["a"] * 5}, "5 are more than this server's limit of 4", "prompt"),
    ({"prompt": [320]}, "token id 320; this model knows 0 to 319", None),
    ({"prompt": [-1]}, "greater than or equal to 0", "prompt"),
    ({"prompt": {"text": "a"}}, "should be a valid string", "prompt"),
    ({"prompt": None}, "should be a valid string", "prompt"),
    ({}, "prompt: Field required", "prompt"),
    ({"prompt": "a", "n": 4}, "4 is more than this server's limit of 3", "n"),
    ({"prompt": "a", "n": 0}, "n must be at least 1", "n"),
    ({"prompt": "a", "n": True}, "valid integer", "n"),
    ({"prompt": "a", "max_tokens": 121}, "limit of 120", "max_tokens"),
    ({"prompt": "a", "max_tokens": 0}, "at least 1", "max_tokens"),
    ({"prompt": "a", "max_tokens": "many"}, "valid integer", "max_tokens"),
    ({"prompt": "a", "temperature": -0.1}, "from 0 to 1000", "temperature"),
    ({"prompt": "a", "temperature": "hot"}, "valid number", "temperature"),
    ({"prompt": "a", "top_p": 0}, "above 0", "top_p"),
    ({"prompt": "a", "top_k": -2}, "top_k must be", "top_k"),
    ({"prompt": "a", "min_p": 2}, "from 0 to 1", "min_p"),
    ({"prompt": "a", "presence_penalty": 3}, "from -2 to 2", "presence_penalty"),
    ({"prompt": "a", "repetition_penalty": 0}, "from 0.001", "repetition_penalty"),
    ({"prompt": "a", "min_tokens": 20}, "from 0 to max_tokens", "min_tokens"),
    ({"prompt": "a", "logprobs": 21}, "limit of 20", "logprobs"),
    ({"prompt": "a", "logprobs": -1}, "0 or more", "logprobs"),
    ({"prompt": "a", "stop": ["a", "b", "c"]}, "limit of 2 strings", "stop"),
    ({"prompt": "a", "stop": "x" * 1025}, "limit of 1024 bytes", "stop"),
    ({"prompt": "a", "stop": ["a", ""]}, "not empty", "stop"),
    ({"prompt": "a", "stop": ""}, "not empty", "stop"),
    ({"prompt": "a", "stop_token_ids": [320]}, "token id 320", None),
    ({"prompt": "a", "echo": "yes"}, "valid boolean", "echo"),
    ({"prompt": "a", "suffix": "b"}, "suffix is not supported", "suffix"),
    ({"prompt": "a", "best_of": 2}, "best_of is not supported", "best_of"),
    ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias is not supported", "logit_bias"),
    ({"prompt": "a", "prompt_logprobs": 1}, "is not supported", "prompt_logprobs"),
    ({"prompt": "a", "guided_json": {}}, "is not supported", "guided_json"),
    ({"prompt": "a", "length_penalty": 2.0}, "is not supported", "length_penalty"),
    ({"prompt": "a", "top_logprobs": 2}, "field of the other endpoint", "top_logprobs"),
    ({"prompt": "a", "messages": HELLO}, "field of the other endpoint", "messages"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "needs stream", "stream_options"),
    ({"prompt": "a", "stream": True, "temperature": -1}, "from 0 to 1000", "temperature"),
    ({"prompt": [320], "stream": True}, "token id 320", None),
]


@pytest.mark.parametrize(("body", "message", "param"), COMPLETIONS)
def test_refused_completions(
    running: Running, body: dict[str, Any], message: str, param: str | None
) -> None:
    response = httpx.post(f"{running.url}/v1/completions", json=body)
    error = error_of(response)
    assert response.status_code == 400
    assert message in error["message"] and error["param"] == param


CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages: List should have at least 1 item"),
    ({"messages": "hello"}, "messages: Input should be a valid list"),
    ({"messages": [*HELLO, {"content": "hello"}]}, "messages.1.role: Field required"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: Input should be"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type 'image_url'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "without its text"),
    ({"messages": [{"role": "user", "content": "x" * 101}]}, "this server's limit of 100"),
    ({"top_logprobs": 2}, "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: 21 is more than this server's limit"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs must be 0 or more"),
    ({"max_completion_tokens": 121}, "max_completion_tokens: 121 is more than this server's limit"),
    ({"max_completion_tokens": 0}, "max_completion_tokens must be at least 1"),
    ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ({"web_search_options": {}}, "web_search_options is not supported"),
    ({"echo": True}, "echo is a field of the other endpoint"),
    ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
    ({"tools": [{}], "tool_choice": "required"}, "only auto and none"),
    ({"tool_choice": {"type": "function"}}, "only auto and none"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
    ({"chat_template": "{{ 1 }}"}, "chat_template is not supported"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "not a variable"),
    ({"chat_template_kwargs": {"tokenize": True}}, "not a variable"),
]


@pytest.mark.parametrize(("body", "message"), CHATS)
def test_refused_chats(running: Running, body: dict[str, Any], message: str) -> None:
    response = httpx.post(f"{running.url}/v1/chat/completions", json={"messages": HELLO} | body)
    assert response.status_code == 400
    assert message in error_of(response)["message"]


RAW: list[tuple[bytes, str]] = [
    (b"{", "the body is not JSON"),
    (b"", "must be a JSON object"),
    (b"[1]", "must be a JSON object"),
    (b"[" * 10_000, "error parsing the body"),
    (b'{"prompt": "a", "temperature": NaN}', "finite number"),
    (b'{"prompt": "a", "temperature": 1e999}', "finite number"),
    (b'{"prompt": "\\ud800"}', "half of a surrogate pair"),
    (b'{"prompt": "a", "stop": "\\udfff"}', "half of a surrogate pair"),
    (b'{"prompt": "\xff"}', "error parsing the body"),
]


def test_a_body_nested_too_deeply_is_refused() -> None:
    """What the parser still takes may be too deep for those after it."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply"):
        CompletionRequest.model_validate({"prompt": "a", "other": deep})


@pytest.mark.parametrize(("body", "message"), RAW)
def test_bodies_that_are_none(running: Running, body: bytes, message: str) -> None:
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{running.url}/v1/completions", content=body, headers=headers)
    assert response.status_code == 400
    assert message in error_of(response)["message"]


def test_other_routes_methods_and_content_types(running: Running) -> None:
    for method, path, status in (
        ("GET", "/no", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/completions", 405),
    ):
        response = httpx.request(method, running.url + path)
        assert response.status_code == status
        error_of(response)
    response = httpx.post(f"{running.url}/v1/completions", data={"prompt": "a"})
    assert "Content-Type: application/json" in error_of(response)["message"]


def test_an_unknown_model_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="a")
    assert caught.value.code == "model_not_found" and "'tiny'" in str(caught.value)


def test_longer_than_the_model(running: Running, tiny: Tiny) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 60}], "max_tokens": 120}
    assert httpx.post(f"{running.url}/v1/chat/completions", json=body).status_code == 200
    with serving(AsyncLLM(str(tiny()), max_model_len=100), ServerSettings(["tiny"])) as short:
        for asked, param in ((5, "max_tokens"), (None, "prompt")):
            body = {"prompt": "x" * (100 if asked is None else 96), "max_tokens": asked}
            error = error_of(httpx.post(f"{short.url}/v1/completions", json=body))
            assert error["code"] == "context_length_exceeded" and error["param"] == param
        chat = {"messages": HELLO, "max_completion_tokens": 99}
        error = error_of(httpx.post(f"{short.url}/v1/chat/completions", json=chat))
        assert error["param"] == "max_completion_tokens"
        body = {"prompt": "x" * 96, "max_tokens": 4}
        assert httpx.post(f"{short.url}/v1/completions", json=body).status_code == 200


HOSTILE: list[dict[str, Any]] = [
    {"top_k": 2**70},
    {"seed": 2**70},
    {"seed": -(2**70)},
    {"stop_token_ids": [2**70], "min_tokens": 1},
    {"stop_token_ids": [-1], "min_tokens": 1},
    {"min_tokens": 2**70, "max_tokens": None},
    {"repetition_penalty": 1e300},
    {"repetition_penalty": 1e-300},
    {"temperature": 1e300},
    {"temperature": 2e-5},
    {"temperature": 5e-324, "top_p": 5e-324, "min_p": 1.0},
    {"max_tokens": 2**70},
    {"prompt": [2**70]},
    {"n": 2**70},
    {"logprobs": 2**70},
    {"stop": ["\x00", "a" * 1000]},
]


def test_fields_that_ask_for_nothing_are_taken(running: Running) -> None:
    """As clients send them that write out every default."""
    nothing = {"best_of": 1, "logit_bias": {}, "suffix": "", "length_penalty": 1.0, "n": None}
    nothing |= {"stop": [], "top_logprobs": 0, "tools": [], "user": "me", "unknown": {"a": 1}}
    body = {"prompt": "a", "max_tokens": 1} | nothing
    assert httpx.post(f"{running.url}/v1/completions", json=body).status_code == 200
    nothing = {"response_format": {"type": "text"}, "tool_choice": "none", "echo": False}
    body = {"messages": HELLO, "max_tokens": 1} | nothing
    assert httpx.post(f"{running.url}/v1/chat/completions", json=body).status_code == 200


def test_the_default_length_is_within_the_limit(tiny: Tiny) -> None:
    with serving(AsyncLLM(str(tiny())), ServerSettings(["a"], limits=Limits(max_tokens=5))) as few:
        for path, body in (("completions", {"prompt": "a"}), ("chat/completions", HELLO_BODY)):
            response = httpx.post(f"{few.url}/v1/{path}", json=body | {"ignore_eos": True})
            assert response.json()["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("body", HOSTILE)
def test_no_number_harms_the_engine(running: Running, body: dict[str, Any]) -> None:
    asked = {"prompt": "hello", "max_tokens": 4, "temperature": 1.0, "seed": 1}
    other = httpx.post(f"{running.url}/v1/completions", json=asked).json()["choices"]
    response = httpx.post(f"{running.url}/v1/completions", json=asked | body)
    assert response.status_code in (200, 400), response.text
    assert httpx.get(f"{running.url}/health").status_code == 200
    assert httpx.post(f"{running.url}/v1/completions", json=asked).json()["choices"] == other
    running.wait_until_idle()


def test_no_telemetry_whatever_the_environment_says(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTAPI_OTEL_AUTO_CONFIGURE", "true")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    llm = AsyncLLM(str(tiny()))
    try:
        telemetry = getattr(create_app(llm, ServerSettings(["a"])), "_telemetry", {})
    finally:
        llm.shutdown()
    parts = ("tracing", "metrics", "logs", "auto_configure")
    assert not [part for part in parts if telemetry.get(part)]  # older releases have none


def test_the_largest_body(running: Running) -> None:
    def body(size: int) -> bytes:
        empty = json.dumps({"prompt": "a", "max_tokens": 1, "user": ""}).encode()
        return empty[:-2] + b"x" * (size - len(empty)) + empty[-2:]

    def pieces(data: bytes) -> Iterator[bytes]:  # httpx then sends no length
        yield from (data[start : start + 1000] for start in range(0, len(data), 1000))

    headers = {"Content-Type": "application/json"}
    for form in (bytes, pieces):
        for size, status in ((20_000, 200), (20_001, 413), (100_000, 413)):
            content: Any = form(body(size))
            response = httpx.post(f"{running.url}/v1/completions", content=content, headers=headers)
            assert response.status_code == status, (form, size)
            if status == 413:
                assert "larger than 20,000 bytes" in error_of(response)["message"]


def test_a_body_has_a_time_to_be_there(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AsyncLLM(str(tiny()))
    step = model.llm.engine.step

    def slow_step() -> Any:
        time.sleep(0.06)
        return step()

    with serving(model, ServerSettings(["tiny"], limits=Limits(body_seconds=1))) as server:
        host, port = server.url.removeprefix("http://").split(":")
        start, answer = time.monotonic(), b""
        with socket.create_connection((host, int(port))) as connection:
            start_line, length = "POST /v1/completions HTTP/1.1", "Content-Length: 9999"
            connection.sendall(f"{start_line}\r\nHost: {host}\r\n{length}\r\n\r\n".encode())
            connection.settimeout(0.1)
            while not answer and time.monotonic() - start < 10:
                connection.sendall(b" ")
                with suppress(TimeoutError):
                    answer = connection.recv(4096)
            connection.settimeout(10)
            while more := connection.recv(4096):  # until the server closes it
                answer += more
        assert time.monotonic() - start > 0.9
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408")
        assert "took longer than 1 s" in error_of(httpx.Response(408, content=body))["message"]

        # An answer may take longer than its request.
        monkeypatch.setattr(model.llm.engine, "step", slow_step)
        start = time.monotonic()
        asked = {"prompt": "a", "max_tokens": 20, "ignore_eos": True, "stream": True}
        response = httpx.post(f"{server.url}/v1/completions", json=asked)
        assert response.status_code == 200 and time.monotonic() - start > 1
        assert '"finish_reason":"length"' in response.text.replace(" ", "")
        assert response.text.endswith("data: [DONE]\n\n")


def test_the_api_key(tiny: Tiny) -> None:
    with serving(AsyncLLM(str(tiny())), ServerSettings(["tiny"], api_key=KEY)) as locked:
        for key, status in ((KEY, 200), ("other", 401), (KEY + "x", 401), (None, 401)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
            response = httpx.get(f"{locked.url}/v1/models", headers=headers)
            assert response.status_code == status, key
            if status == 401:
                assert error_of(response)["code"] == "invalid_api_key"
        assert httpx.post(f"{locked.url}/v1/completions", json={"prompt": "a"}).status_code == 401
        assert httpx.get(f"{locked.url}/health").status_code == 200
        assert httpx.get(f"{locked.url}/metrics").status_code == 200


def test_a_model_without_a_template_completes_but_does_not_chat(tiny: Tiny) -> None:
    model = AsyncLLM(str(tiny(tokenizer={"chat_template": None})))
    with serving(model, ServerSettings(["tiny"])) as plain:
        response = httpx.post(f"{plain.url}/v1/chat/completions", json={"messages": HELLO})
        assert response.status_code == 400
        assert "has no chat template" in error_of(response)["message"]
        body = {"prompt": "a", "max_tokens": 2}
        assert httpx.post(f"{plain.url}/v1/completions", json=body).status_code == 200


def test_an_engine_that_fails_is_told(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who wait hear of it, and so does whoever asks for the server's health."""
    model = AsyncLLM(str(tiny()))

    def fail() -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(model.llm.engine, "step", fail)
    with serving(model, ServerSettings(["tiny"])) as server:
        response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "the engine has failed" in response.json()["error"]["message"]
        for response in (
            httpx.get(f"{server.url}/health"),
            httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}),
        ):
            assert response.status_code == 503


def test_an_error_within_a_stream_becomes_an_event(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AsyncLLM(str(tiny()))
    step, steps = model.llm.engine.step, iter(range(100))

    def fail_later() -> Any:
        if next(steps) == 3:
            raise RuntimeError("the device is lost")
        return step()

    monkeypatch.setattr(model.llm.engine, "step", fail_later)

    async def read(url: str) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            stream = await client.completions.create(
                model="tiny", prompt="a", stream=True, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                pass

    with serving(model, ServerSettings(["tiny"])) as server, pytest.raises(openai.APIError) as told:
        asyncio.run(read(server.url))
    assert "the engine has failed" in told.value.message


@pytest.mark.parametrize(
    "make",
    [
        lambda: Limits(n=0),
        lambda: Limits(body_bytes=-1),
        lambda: ServerSettings(["a"], api_key=""),
        lambda: ServerSettings(["a"], drain_seconds=-1),
    ],
)
def test_settings_that_make_no_sense(make: Callable[[], object]) -> None:
    with pytest.raises(UserError):
        make()
