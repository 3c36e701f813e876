"""AsyncLLM: many tasks on one engine, in deltas; ended, cancelled, failed and drained."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_scales import calibrated, rewritten

from fp8calib import LLM, AsyncLLM, SamplingParams
from fp8calib.checkpoint import read_scales
from fp8calib.errors import ModelError, UserError
from fp8calib.runtime.outputs import RequestOutput

Tiny = Callable[..., Path]


@pytest.fixture
def engine(tiny: Tiny) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(str(tiny("llama")), async_scheduling=True, max_num_seqs=8)
    yield llm
    llm.shutdown()


def greedy(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, **more)


async def collect(news: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in news]


def joined(news: list[RequestOutput], index: int = 0) -> tuple[str, list[int], int]:
    """Text and tokens of one completion, and of how many tokens there are log probabilities."""
    parts = [output.outputs[index] for output in news]
    return (
        "".join(part.text for part in parts),
        [token for part in parts for token in part.token_ids],
        sum(len(part.logprobs or []) for part in parts),
    )


def test_deltas_of_many_tasks_add_up_to_what_llm_gives(engine: AsyncLLM, tiny: Tiny) -> None:
    prompts = [f"prompt number {i}" for i in range(20)]
    params = SamplingParams(
        n=2, max_tokens=15, seed=5, temperature=0.8, logprobs=1, stop=["q", "\u00e9"]
    )

    async def all_at_once() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(collect(engine.generate(p, params)) for p in prompts))

    found = asyncio.run(all_at_once())
    expected = LLM(str(tiny("llama"))).generate(prompts, params, use_tqdm=False)
    for news, whole in zip(found, expected, strict=True):
        assert [output.finished for output in news] == [False] * (len(news) - 1) + [True]
        for index, completion in enumerate(whole.outputs):
            tokens = completion.token_ids
            assert joined(news, index) == (completion.text, tokens, len(tokens))
            last = news[-1].outputs[index]
            assert last.finish_reason == completion.finish_reason
            assert last.stop_reason == completion.stop_reason
            assert last.cumulative_logprob == pytest.approx(completion.cumulative_logprob)
    assert engine.stats.pages_used == 0 and engine.stats.running == 0
    assert engine.stats.time_to_first_token.count == 40


def test_a_prompts_log_probabilities_come_once(engine: AsyncLLM, tiny: Tiny) -> None:
    params = greedy(5, n=2, prompt_logprobs=1)
    news = asyncio.run(collect(engine.generate("a prompt", params)))
    whole = LLM(str(tiny("llama"))).generate("a prompt", params)[0].prompt_logprobs
    assert whole is not None and news[0].prompt_logprobs is not None
    assert [p and p.keys() for p in news[0].prompt_logprobs] == [p and p.keys() for p in whole]
    assert len(news) > 1 and all(output.prompt_logprobs is None for output in news[1:])


def test_what_cannot_run_is_refused_at_the_first_step(engine: AsyncLLM) -> None:
    async def first(**arguments: Any) -> None:
        await anext(engine.generate(**arguments))

    for arguments, message in (
        ({"prompt": "x" * 300}, "a prompt has 300 tokens; with an answer, 256 fit"),
        ({"prompt": ""}, "a prompt is empty"),
        ({"prompt_token_ids": [5, 400]}, "token id 400"),
        ({"prompt": "a", "params": SamplingParams(logprobs=50)}, "logprobs is 50, and at most 20"),
    ):
        with pytest.raises(UserError, match=message):
            asyncio.run(first(**arguments))
    with pytest.raises(TypeError):
        asyncio.run(first(prompt_token_ids=["a"]))
    assert engine.is_running


def test_closing_cancelling_and_aborting_free_the_pages(engine: AsyncLLM) -> None:
    async def scenario() -> None:
        closed = engine.generate("abc", greedy(200))
        await anext(closed)
        await closed.aclose()
        task = asyncio.create_task(collect(engine.generate("def", greedy(200))))
        kept = asyncio.create_task(collect(engine.generate("ghi", greedy(20))))
        aborted = engine.generate("jkl", greedy(200), request_id="mine")
        await anext(aborted)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(UserError, match="request id 'mine' is in use"):
            await anext(engine.generate("again", request_id="mine"))
        await engine.abort("mine")
        await engine.abort("never heard of")
        rest = await collect(aborted)
        assert rest[-1].finished and rest[-1].outputs[0].finish_reason == "abort"
        assert len(joined(await kept)[1]) == 20
        await engine.drain()

    asyncio.run(scenario())
    assert engine.stats.pages_used == 0
    assert engine.stats.finished == {"abort": 3, "length": 1}


def test_draining_finishes_what_runs_and_takes_no_more(engine: AsyncLLM) -> None:
    async def scenario() -> None:
        running = asyncio.create_task(collect(engine.generate("abc", greedy(60))))
        await asyncio.sleep(0.05)
        await engine.drain()
        assert len(joined(await running)[1]) == 60
        with pytest.raises(UserError, match="takes no more requests"):
            await anext(engine.generate("abc"))

    asyncio.run(scenario())


def test_shutting_down_ends_every_request(engine: AsyncLLM) -> None:
    async def scenario() -> None:
        running = asyncio.create_task(collect(engine.generate("abc", greedy(200))))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(engine.shutdown)
        assert (await running)[-1].outputs[0].finish_reason == "abort"

    asyncio.run(scenario())


def test_a_failing_engine_tells_everyone(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ModelError("the device has gone")

    monkeypatch.setattr(engine.llm.engine.executor.runner, "step", fail)

    async def scenario() -> list[Any]:
        tasks = [collect(engine.generate("abc", greedy(9))) for _ in range(3)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    for result in asyncio.run(scenario()):
        assert isinstance(result, ModelError) and "the device has gone" in str(result)
    assert not engine.is_running


def test_c20_scales_are_reloaded_between_steps(tiny: Tiny, tmp_path: Path) -> None:
    calibrated(tiny("llama"), tmp_path / "one", query=False)
    calibrated(tiny("llama"), tmp_path / "two", query=False)
    rewritten(tmp_path / "two", lambda name, values: {name: values * 6})
    llm = AsyncLLM(str(tmp_path / "one"))

    async def scenario() -> tuple[list[int], list[int]]:
        before = joined(await collect(llm.generate("hello you", greedy(20))))[1]
        await llm.reload_scales(read_scales(tmp_path / "two"))
        return before, joined(await collect(llm.generate("hello you", greedy(20))))[1]

    before, after = asyncio.run(scenario())
    llm.shutdown()
    fresh = LLM(str(tmp_path / "two")).generate("hello you", greedy(20))
    assert after == fresh[0].outputs[0].token_ids != before


def test_c20_reloading_that_fails_or_is_given_up_leaves_nobody_waiting(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated(tiny("llama"), tmp_path, query=False)
    scales = read_scales(tmp_path)
    llm = AsyncLLM(str(tmp_path))

    async def scenario() -> None:
        busy = threading.Event()
        llm._submit(lambda: busy.wait(30))
        given_up = asyncio.create_task(llm.reload_scales(scales))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        busy.set()
        assert len(joined(await collect(llm.generate("abc", greedy(3))))[1]) == 3

        def fail(*_: object) -> None:
            raise RuntimeError("the device has gone")

        monkeypatch.setattr(llm.llm, "reload_scales", fail)
        with pytest.raises(RuntimeError, match="the device has gone"):
            await asyncio.wait_for(llm.reload_scales(scales), 30)
        with pytest.raises(ModelError, match="has failed: the device has gone") as told:
            await anext(llm.generate("abc"))
        assert isinstance(told.value.__cause__, RuntimeError)

    asyncio.run(scenario())
    llm.shutdown()
