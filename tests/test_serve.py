"""The server as OpenAI's own client sees it: answers, streams, and what it costs to go away."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel
from serving import Running, serving, wait_for

from fp8calib import LLM, SamplingParams
from fp8calib.runtime.async_llm import AsyncLLM
from fp8calib.runtime.outputs import CompletionOutput, Logprob, RequestOutput
from fp8calib.serve import sse
from fp8calib.serve.echo import with_prompts
from fp8calib.serve.generation import Delta
from fp8calib.serve.logprobs import completion_logprobs
from fp8calib.serve.settings import ServerSettings

Tiny = Callable[..., Path]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
FIXED: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 12,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}
HELLO: Any = [{"role": "user", "content": "hello"}]
TEMPLATE = (
    "{% if tools %}[{% for t in tools %}{{ t.function.name }} {% endfor %}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
    "{% if mood %}({{ mood }}){% endif %}"
    "{% if reasoning_effort %}({{ reasoning_effort }}){% endif %}"
    "{% for d in documents or [] %}({{ d.t }}){% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> LLM:
    """The same model, to compare with."""
    return LLM(str(tiny(tokenizer={"chat_template": TEMPLATE})))


@pytest.fixture(scope="module")
def running(tiny: Tiny) -> Iterator[Running]:
    model = AsyncLLM(str(tiny(tokenizer={"chat_template": TEMPLATE})))
    with serving(model, ServerSettings(["tiny", "alias"])) as server:
        yield server


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made:
        yield made
    running.wait_until_idle()  # no test leaves a page behind


# --- completions ---------------------------------------------------------------------------------


def test_completion_is_what_the_llm_says(client: openai.OpenAI, llm: LLM) -> None:
    expected = llm.generate("hello", GREEDY)[0].outputs[0]
    answer = client.completions.create(prompt="hello", **FIXED)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (expected.text, "length", 0)
    assert answer.model == "tiny" and answer.object == "text_completion"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 12)
    assert answer.usage.total_tokens == 17


def test_every_form_of_prompts(client: openai.OpenAI, llm: LLM) -> None:
    texts = ["one", "another one"]
    ids = [llm.tokenizer(text)["input_ids"] for text in texts]
    expected = [output.outputs[0].text for output in llm.generate(texts, GREEDY)]
    for prompt in (texts, ids):
        answer = client.completions.create(prompt=prompt, **FIXED)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1]
    assert client.completions.create(prompt=ids[0], **FIXED).choices[0].text == expected[0]


def test_stream_of_several_prompts_and_completions(client: openai.OpenAI) -> None:
    asked: Any = FIXED | {"prompt": ["one", "another"], "n": 2, "seed": 5, "temperature": 1.0}
    whole = client.completions.create(**asked)
    texts = [""] * 4
    reasons: list[Any] = [None] * 4
    stream = client.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
    chunks = list(stream)
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert len(set(texts)) == 4, "seeds do nothing"
    assert reasons == ["length"] * 4
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 48
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_completion_logprobs(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=2)
    expected = llm.generate("hello", params)[0].outputs[0]
    assert expected.logprobs is not None
    asked: Any = FIXED | {"prompt": "hello", "logprobs": 2, "max_tokens": 6}
    found = client.completions.create(**asked).choices[0].logprobs
    assert found is not None and found.tokens is not None and found.text_offset is not None
    own = [place[token] for token, place in zip(expected.token_ids, expected.logprobs, strict=True)]
    assert found.token_logprobs == pytest.approx([entry.logprob for entry in own], abs=1e-5)
    assert found.tokens == [entry.decoded_token for entry in own]
    ends = [len("".join(found.tokens[:n])) for n in range(6)]
    assert found.text_offset == ends
    streamed = [
        chunk.choices[0].logprobs for chunk in client.completions.create(stream=True, **asked)
    ]
    assert [x for piece in streamed if piece for x in piece.text_offset or ()] == ends


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_echo_scores_a_prompt(client: openai.OpenAI, llm: LLM, max_tokens: int) -> None:
    """As evaluation harnesses do it."""
    ids = llm.tokenizer("a prompt to score")["input_ids"]
    params = SamplingParams(
        max_tokens=max_tokens or 1, temperature=0, ignore_eos=True, logprobs=1, prompt_logprobs=1
    )
    (whole,) = llm.generate([{"prompt_token_ids": ids}], params)
    assert whole.prompt_logprobs is not None and whole.outputs[0].logprobs is not None
    generated = whole.outputs[0].token_ids[:max_tokens]
    places = [*whole.prompt_logprobs, *whole.outputs[0].logprobs[:max_tokens]]
    expected = [p and p[t].logprob for t, p in zip([*ids, *generated], places, strict=True)]
    asked: Any = FIXED | {"prompt": [ids, ids], "max_tokens": max_tokens, "logprobs": 1}
    answer = client.completions.create(echo=True, **asked)
    for choice in answer.choices:
        found = choice.logprobs
        assert found is not None and found.token_logprobs is not None and found.tokens is not None
        text = whole.outputs[0].text if max_tokens else ""
        assert choice.text == "a prompt to score" + text
        assert found.token_logprobs[0] is None and found.top_logprobs is not None
        assert found.token_logprobs[1:] == pytest.approx(expected[1:], abs=1e-4)
        assert found.tokens[:17] == list("a prompt to score")
        assert found.text_offset == [len("".join(found.tokens[:n])) for n in range(len(places))]
        assert choice.finish_reason == "length"
    assert answer.usage is not None and answer.usage.prompt_tokens == 2 * len(ids)
    stream = client.completions.create(echo=True, stream=True, **asked)
    pieces = [choice for chunk in stream for choice in chunk.choices if choice.index == 1]
    assert "".join(piece.text for piece in pieces) == answer.choices[1].text
    offsets = [x for piece in pieces if piece.logprobs for x in piece.logprobs.text_offset or ()]
    assert answer.choices[1].logprobs and offsets == answer.choices[1].logprobs.text_offset


def test_an_echo_that_is_given_up_has_the_log_probabilities_that_are_known() -> None:
    news = CompletionOutput(0, "", [], "abort", None, logprobs=[])
    known = [None, {6: Logprob(-1.5, 1, "b")}]
    output = RequestOutput("1", None, [5, 6, 7], [news], True, prompt_logprobs=known)

    async def deltas() -> AsyncGenerator[Delta, None]:
        yield 0, output

    async def echoed() -> CompletionOutput:
        ((_, found),) = [delta async for delta in with_prompts(deltas(), ["abc"], False)]
        return found.outputs[0]

    piece = asyncio.run(echoed())
    assert piece.text == "abc" and piece.logprobs is not None
    found = completion_logprobs(piece.token_ids, piece.logprobs, 0, lambda token: f"<{token}>")
    assert found.tokens == ["<5>", "b", "<7>"] and found.token_logprobs == [None, -1.5, None]


def test_stops(client: openai.OpenAI, llm: LLM) -> None:
    whole = llm.generate("hello", GREEDY)[0].outputs[0]
    word = whole.text[4:6]
    choice = client.completions.create(prompt="hello", stop=["no such", word], **FIXED).choices[0]
    assert choice.text == whole.text[: whole.text.find(word)] and choice.finish_reason == "stop"
    assert choice.model_extra is not None and choice.model_extra["stop_reason"] == word
    token = whole.token_ids[3]
    asked: Any = FIXED | {"extra_body": {"ignore_eos": True, "stop_token_ids": [token]}}
    answer = client.completions.create(prompt="hello", **asked)
    first = whole.token_ids.index(token)
    assert answer.usage is not None and answer.usage.completion_tokens == first + 1
    assert answer.choices[0].finish_reason == "stop"


def test_vllms_own_fields(client: openai.OpenAI) -> None:
    extra = {"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 12, "unknown": 3}
    asked: Any = FIXED | {"temperature": 1.0, "extra_body": extra}
    first, again = (client.completions.create(prompt="hello", **asked) for _ in range(2))
    assert first.choices[0].text == again.choices[0].text  # of one token there is no choice
    assert first.usage is not None and first.usage.completion_tokens == 12
    plain = client.completions.create(prompt="hello", **FIXED).choices[0].text
    assert plain != first.choices[0].text, "the penalty does nothing"


def test_a_prefix_is_found_again(client: openai.OpenAI) -> None:
    prompt = "a prefix of more than one page: " * 3
    client.completions.create(prompt=prompt, **FIXED)
    usage = client.completions.create(prompt=prompt, **FIXED).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 80


# --- chat ----------------------------------------------------------------------------------------


def test_chat_is_what_the_llm_says(client: openai.OpenAI, llm: LLM) -> None:
    expected = llm.chat(HELLO, GREEDY)[0].outputs[0].text
    answer = client.chat.completions.create(messages=HELLO, **FIXED)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].message.role == "assistant"
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    asked: Any = {**FIXED, "max_completion_tokens": 12}
    del asked["max_tokens"]
    again = client.chat.completions.create(messages=parts, **asked)
    assert again.choices[0].message.content == expected


def test_chat_stream(client: openai.OpenAI, llm: LLM) -> None:
    expected = llm.chat(HELLO, GREEDY)[0].outputs[0].text
    stream = client.chat.completions.create(
        messages=HELLO, stream=True, stream_options={"include_usage": True}, **FIXED
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == expected
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "length"
    assert len(chunks) > 3, "nothing was streamed"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12


def test_chat_logprobs(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logprobs=3)
    expected = llm.chat(HELLO, params)[0].outputs[0]
    assert expected.logprobs is not None
    asked: Any = FIXED | {"messages": HELLO, "logprobs": True, "top_logprobs": 3, "max_tokens": 5}
    found = client.chat.completions.create(**asked).choices[0].logprobs
    assert found is not None and found.content is not None and len(found.content) == 5
    for entry, token, place in zip(
        found.content, expected.token_ids, expected.logprobs, strict=True
    ):
        assert entry.logprob == pytest.approx(place[token].logprob, abs=1e-5)
        assert entry.bytes == list(entry.token.encode())
        best = sorted((one.logprob for one in place.values()), reverse=True)
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(best, abs=1e-5)


def test_tools_and_variables_reach_the_template(client: openai.OpenAI, llm: LLM) -> None:
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    call = {"id": "1", "type": "function", "function": {"name": "w", "arguments": '{"city": "X"}'}}
    messages: Any = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    extra = {"ignore_eos": True, "chat_template_kwargs": {"mood": "gay"}, "documents": [{"t": "D"}]}
    asked: Any = FIXED | {"extra_body": extra, "reasoning_effort": "low"}
    answer = client.chat.completions.create(messages=messages, tools=tools, **asked)
    text = "[weather ]<user>hello<assistant>!X(gay)(low)(D)<assistant>"
    assert answer.choices[0].message.content == llm.generate(text, GREEDY)[0].outputs[0].text
    without = client.chat.completions.create(
        messages=HELLO, tools=tools, tool_choice="none", **FIXED
    )
    assert without.choices[0].message.content == llm.chat(HELLO, GREEDY)[0].outputs[0].text


def test_a_last_message_can_be_continued(client: openai.OpenAI, llm: LLM) -> None:
    messages: Any = [*HELLO, {"role": "assistant", "content": "I am"}]
    extra = {"ignore_eos": True, "continue_final_message": True, "add_generation_prompt": False}
    asked: Any = FIXED | {"extra_body": extra}
    answer = client.chat.completions.create(messages=messages, **asked)
    expected = llm.generate("<user>hello<assistant>I am", GREEDY)[0].outputs[0].text
    assert answer.choices[0].message.content == expected


# --- the other routes ----------------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    asked: Any = FIXED | {"model": "alias"}
    assert client.completions.create(prompt="a", **asked).model == "alias"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def samples(running: Running) -> dict[str, float]:
    text = httpx.get(f"{running.url}/metrics").text
    return {
        sample.name + sample.labels.get("finish_reason", sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_count_what_happens(client: openai.OpenAI, running: Running) -> None:
    before = samples(running)
    client.completions.create(prompt=["count", "me"], **FIXED)
    running.wait_until_idle()
    after = samples(running)

    def gained(name: str) -> float:
        return after[f"fp8calib_{name}"] - before.get(f"fp8calib_{name}", 0.0)

    assert gained("prompt_tokens_total") == 7 and gained("generation_tokens_total") == 24
    assert gained("requests_finished_totallength") == 2
    assert gained("time_to_first_token_seconds_count") == 2
    assert gained("inter_token_latency_seconds_count") == 22
    assert gained("inter_token_latency_seconds_bucket+Inf") == 22
    assert gained("prefix_cache_queries_total") == 7
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_pages_used"):
        assert after[f"fp8calib_{name}"] == 0
    assert after["fp8calib_kv_cache_pages"] > 0


# --- going away ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_client_that_goes_away_frees_its_pages(running: Running, stream: bool, path: str) -> None:
    prompt: Any = {"prompt": ["a", "b"]} if path == "completions" else {"messages": HELLO}
    count = 2 if path == "completions" else 1
    body = prompt | {"max_tokens": 200, "ignore_eos": True, "stream": stream, "temperature": 0}
    aborted = running.llm.stats.finished.get("abort", 0)
    with open_request(running.url, body, path):
        wait_for(lambda: running.llm.stats.running == count)
    running.wait_until_idle()
    assert running.llm.stats.finished.get("abort", 0) == aborted + count
    assert not running.llm._streams


@pytest.mark.parametrize("length", [1, 250])
def test_a_client_that_goes_away_before_its_first_token_frees_what_it_has(
    tiny: Tiny, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it waits behind another request, or while its prompt is computed piece by piece."""
    model = AsyncLLM(str(tiny()), max_num_seqs=1, max_num_batched_tokens=2)
    step, may_go_on = model.llm.engine.step, threading.Event()

    def slow() -> Any:
        may_go_on.wait(0.01)
        return step()

    monkeypatch.setattr(model.llm.engine, "step", slow)
    first = {"prompt": "a" * length, "max_tokens": 200 if length == 1 else 1, "ignore_eos": True}
    with serving(model, ServerSettings(["tiny"])) as server:
        running = open_request(server.url, first)
        wait_for(lambda: model.stats.running == 1)
        waiting = open_request(server.url, first | {"prompt": "b"})
        wait_for(lambda: model.stats.waiting == 1)
        waiting.close()
        wait_for(lambda: model.stats.waiting == 0)
        assert model.stats.running == 1 and model.stats.finished == {"abort": 1}
        running.close()
        wait_for(lambda: not model.stats.running)
        assert model.stats.finished == {"abort": 2} and not model.stats.pages_used
        assert length == 1 or not model.stats.generated_tokens
        may_go_on.set()


def open_request(url: str, body: dict[str, Any], path: str = "completions") -> socket.socket:
    """A connection on which an answer has been asked for and nothing read."""
    payload = json.dumps(body).encode()
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
    return connection


def test_two_hundred_streams_at_once(running: Running, llm: LLM) -> None:
    """Each is what the model says to its own prompt, and no page is lost."""
    prompts = [f"{n} prompt {'x' * (n % 37)}" for n in range(200)]
    lengths = [4 + n % 9 for n in range(200)]
    params = [
        SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, logprobs=0) for n in lengths
    ]
    expected = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    most = 0

    async def one(client: openai.AsyncOpenAI, prompt: str, length: int) -> tuple[str, str, int]:
        nonlocal most
        asked: Any = FIXED | {"max_tokens": length, "logprobs": 0, "prompt": prompt}
        text, reason, tokens = "", "", 0
        async for chunk in await client.completions.create(stream=True, **asked):
            (choice,) = chunk.choices
            text += choice.text
            reason = choice.finish_reason
            assert choice.logprobs is not None
            tokens += len(choice.logprobs.tokens or ())
            most = max(most, running.llm.stats.running)
        return text, reason, tokens

    async def everyone() -> list[tuple[str, str, int]]:
        url = f"{running.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            pairs = zip(prompts, lengths, strict=True)
            return await asyncio.gather(*(one(client, *pair) for pair in pairs))

    answers = asyncio.run(everyone())
    assert answers == [(o.text, "length", n) for o, n in zip(expected, lengths, strict=True)]
    assert most > 20, "the streams did not run together"
    running.wait_until_idle()


def test_an_event_is_one_line_also_for_clients_that_split_at_unicode_line_ends() -> None:
    class Event(BaseModel):
        text: str

    async def events() -> AsyncIterator[Event]:
        yield Event(text="a\x85b\u2028c\u2029d\ne")

    async def lines() -> list[str]:
        return [text async for text in sse._as_text(events())]

    event, done = asyncio.run(lines())
    (line,) = event.strip().splitlines()
    assert json.loads(line.removeprefix("data: ")) == {"text": "a\x85b\u2028c\u2029d\ne"}
    assert done == "data: [DONE]\n\n"
