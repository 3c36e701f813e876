"""Scheduling changes no token: batches, small pools, windows, preemption, poisoned pages."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from greedy import by_engine

from fp8calib.attention import use_attention
from fp8calib.errors import UserError
from fp8calib.runtime.block_manager import NO_BLOCK, BlockManager, BlockPool
from fp8calib.runtime.config import EngineConfig
from fp8calib.runtime.engine import Engine
from fp8calib.runtime.kv_format import KVFormat
from fp8calib.runtime.kv_store import CacheGroup, cache_groups, plan_blocks
from fp8calib.runtime.loader import LoadedModel, load
from fp8calib.runtime.outputs import RequestOutput
from fp8calib.runtime.request import Request
from fp8calib.runtime.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llama(tiny: Callable[..., Path]) -> LoadedModel:
    return load(str(tiny("llama")))


@pytest.fixture(scope="module")
def gemma(tiny: Callable[..., Path]) -> LoadedModel:
    """Sliding-window and full-attention layers: two groups of pages."""
    return load(str(tiny("gemma3_text", tie_word_embeddings=False)))


def pool_bytes(loaded: LoadedModel, num_tokens: int) -> int:
    """Memory of the pages that hold `num_tokens` tokens in all layers."""
    fmt = KVFormat(torch.float32)
    return sum(g.block_bytes(fmt, 16) for g in cache_groups(loaded.layers)) * -(-num_tokens // 16)


def drain(engine: Engine) -> None:
    while engine.has_unfinished_requests:
        engine.step()


def random_prompts(count: int, longest: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 300) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_many_requests_in_a_small_pool_equal_each_alone(
    kind: str, request: pytest.FixtureRequest
) -> None:
    loaded = request.getfixturevalue(kind)
    prompts = random_prompts(40, 50)
    engine = Engine(
        loaded,
        EngineConfig(
            kv_cache_memory_bytes=pool_bytes(loaded, 160),
            max_num_seqs=8,
            max_num_batched_tokens=24,
            max_model_len=80,
        ),
    )
    requests = [engine.add_request(GREEDY, prompt_token_ids=prompt) for prompt in prompts]
    preempted: set[str] = set()
    while engine.has_unfinished_requests:
        engine.step()
        preempted |= {r.request_id for r in engine.scheduler.waiting if r.output_token_ids}
        running = [int(r.request_id) for r in engine.scheduler.running]
        assert running == sorted(running), "requests run in order of arrival"
    assert [pool.num_used for pool in engine.block_manager.pools] == [0] * len(engine.store.groups)
    alone = [by_engine(loaded, [prompt], 12)[0] for prompt in prompts]
    assert [r.output_token_ids for r in requests] == alone
    if kind == "llama":
        assert preempted, "the pool was large enough for all: this tests no preemption"


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_what_free_pages_hold_is_never_read(kind: str, request: pytest.FixtureRequest) -> None:
    loaded = request.getfixturevalue(kind)
    prompts = random_prompts(6, 40)
    engine = Engine(loaded, EngineConfig(max_num_seqs=4, max_num_batched_tokens=16))
    for layer in engine.store.layers.values():
        layer.k_pages.fill_(torch.nan)
        layer.v_pages.fill_(torch.nan)
    requests = [engine.add_request(GREEDY, prompt_token_ids=prompt) for prompt in prompts]
    drain(engine)
    assert [r.output_token_ids for r in requests] == by_engine(loaded, prompts, 12)


def test_blocks_outside_the_window_are_given_back(gemma: LoadedModel) -> None:
    engine = Engine(gemma, EngineConfig(max_num_batched_tokens=64))
    request = engine.add_request(
        SamplingParams(max_tokens=100, temperature=0, ignore_eos=True),
        prompt_token_ids=list(range(3, 103)),
    )
    windows = [group.window for group in engine.store.groups]
    assert windows == [6, None]
    seen = 0
    while engine.has_unfinished_requests:
        engine.step()
        if request.finish_reason is None:
            window, full = (pool.num_used for pool in engine.block_manager.pools)
            assert full == -(-request.num_computed // 16)
            # One block holds the window; another while a step crosses a border; and the chunk's.
            assert window <= (2 if request.output_token_ids[1:] else -(-(6 + 64) // 16) + 1)
            seen = max(seen, full)
    assert seen == 13


def test_block_manager_takes_all_or_nothing() -> None:
    groups = [CacheGroup(None, ()), CacheGroup(20, ())]
    manager = BlockManager(groups, [3, 2], 16)
    tables = manager.new_tables()
    assert not manager.grow(tables, 0, 33)  # three blocks in each: the second pool has two
    assert list(map(len, tables)) == [0, 0] and [p.num_free for p in manager.pools] == [3, 2]
    assert manager.grow(tables, 0, 32)
    assert [len(table) for table in tables] == [2, 2]
    # Token 35 sees tokens 16 to 35; block 0 can go, and serves as the new block.
    assert manager.grow(tables, 35, 48)
    assert tables[1][0] == NO_BLOCK and len(tables[1]) == 3
    manager.free(tables)
    assert list(map(len, tables)) == [0, 0] and [p.num_used for p in manager.pools] == [0, 0]


def test_a_block_released_twice_is_noticed() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.release([block])
    with pytest.raises(RuntimeError, match="more often than it was taken"):
        pool.release([block])


def test_plan_blocks_fills_the_memory(gemma: LoadedModel) -> None:
    groups, fmt = cache_groups(gemma.layers), KVFormat(torch.float32)
    sizes = [group.block_bytes(fmt, 16) for group in groups]
    for memory in (0, sum(sizes) - 1, sum(sizes), 40 * sum(sizes) + 5):
        tokens, blocks = plan_blocks(groups, fmt, 16, memory, 2, 32, 100_000)
        used = sum(n * size for n, size in zip(blocks, sizes, strict=True))
        assert used <= memory < used + sum(sizes)
        assert blocks[1] == tokens // 16  # full attention: a block for each 16 tokens
        # Window 6 and 32 new tokens: at most four blocks for each of two sequences.
        assert blocks[0] == min(tokens // 16, 2 * 4)
    assert plan_blocks(groups, fmt, 16, 10**9, 2, 32, 100) == (112, [7, 7])


def test_fp8_pages_hold_twice_as_many_tokens(llama: LoadedModel) -> None:
    groups = cache_groups(llama.layers)
    tokens = [
        plan_blocks(groups, fmt, 16, 1_000_000, 8, 64, 10**9)[0]
        for fmt in (KVFormat(torch.bfloat16), KVFormat.fp8(llama.layers, torch.bfloat16))
    ]
    assert tokens[1] >= 1.95 * tokens[0]


@pytest.mark.parametrize("max_tokens", [None, 1_000_000])
def test_a_request_ends_at_the_models_length(llama: LoadedModel, max_tokens: int | None) -> None:
    engine = Engine(llama, EngineConfig(max_model_len=20))
    request = engine.add_request(
        SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True),
        prompt_token_ids=[5] * 15,
    )
    drain(engine)
    assert len(request.token_ids) == 20 and request.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "a prompt is empty"),
        ([5] * 20, "a prompt has 20 tokens; with an answer, 20 fit"),
        ([5, 320], "token id 320; this model knows 0 to 319"),
        ([-1], "token id -1"),
    ],
)
def test_prompts_that_cannot_run_are_refused(
    llama: LoadedModel, prompt: list[int], message: str
) -> None:
    engine = Engine(llama, EngineConfig(max_model_len=20))
    with pytest.raises(UserError, match=message):
        engine.add_request(GREEDY, prompt_token_ids=prompt)
    assert not engine.has_unfinished_requests


def test_a_cache_too_small_is_refused_or_limits_the_length(llama: LoadedModel) -> None:
    with pytest.raises(UserError, match="hold 0 tokens, fewer than max_model_len 256"):
        Engine(llama, EngineConfig(kv_cache_memory_bytes=100))
    memory = pool_bytes(llama, 64)
    with pytest.raises(UserError, match="hold 64 tokens, fewer than max_model_len 100"):
        Engine(llama, EngineConfig(kv_cache_memory_bytes=memory, max_model_len=100))
    engine = Engine(llama, EngineConfig(kv_cache_memory_bytes=memory))
    assert engine.max_model_len == 64
    assert engine.warnings == ["sequences are limited to 64 tokens by the cache's memory"]
    vast = EngineConfig(
        kv_cache_memory_bytes=2**60, max_num_seqs=2**40, max_num_batched_tokens=2**41
    )
    with pytest.raises(UserError, match="TB of KV cache cannot be had on cpu"):
        Engine(llama, vast)
    with pytest.raises(UserError, match="max_model_len 300: this model can do 256 tokens at most"):
        Engine(llama, EngineConfig(max_model_len=300))


def run_one(loaded: LoadedModel, prompt: str, **params: object) -> Request:
    engine = Engine(loaded, EngineConfig())
    settings = {"max_tokens": 40, "temperature": 0, "ignore_eos": True} | params
    request = engine.add_request(SamplingParams(**settings), prompt)  # type: ignore[arg-type]
    drain(engine)
    return request


def test_stop_strings_tokens_and_end_of_text(llama: LoadedModel) -> None:
    whole = run_one(llama, "hello")
    assert whole.finish_reason == "length" and len(whole.output_token_ids) == 40
    stop = whole.text[7:10]
    request = run_one(llama, "hello", stop=["never", stop])
    assert request.text == whole.text[: whole.text.find(stop)]
    assert (request.finish_reason, request.stop_reason) == ("stop", stop)
    token = whole.output_token_ids[5]
    request = run_one(llama, "hello", stop_token_ids=[token])
    assert (request.finish_reason, request.stop_reason) == ("stop", token)
    assert (
        request.output_token_ids
        == whole.output_token_ids[: request.output_token_ids.index(token) + 1]
    )
    ending = LoadedModel(**{**vars(llama), "eos_token_ids": frozenset({token})})
    request = run_one(ending, "hello", ignore_eos=False)
    assert (request.finish_reason, request.stop_reason) == ("stop", None)
    assert request.output_token_ids[-1] == token
    assert run_one(ending, "hello").output_token_ids == whole.output_token_ids


def test_min_tokens_puts_off_the_end(llama: LoadedModel) -> None:
    whole = run_one(llama, "hello")
    ending = LoadedModel(**{**vars(llama), "eos_token_ids": frozenset(whole.output_token_ids[:1])})
    assert len(run_one(ending, "hello", ignore_eos=False).output_token_ids) == 1
    later = run_one(ending, "hello", ignore_eos=False, min_tokens=6)
    assert len(later.output_token_ids) > 6 or later.finish_reason == "length"
    assert whole.output_token_ids[0] not in later.output_token_ids[:6]
    token = whole.output_token_ids[3]
    stopped = run_one(llama, "hello", stop_token_ids=[token], min_tokens=9)
    assert token not in stopped.output_token_ids[:9]


def test_min_tokens_puts_off_stop_strings(llama: LoadedModel) -> None:
    whole = run_one(llama, "hello")
    letter = next(c for c in whole.text[:4] if c.isprintable())
    early = run_one(llama, "hello", stop=letter)
    later = run_one(llama, "hello", stop=letter, min_tokens=12)
    assert len(early.output_token_ids) < 12 < len(later.output_token_ids)
    assert whole.text.startswith(later.text) and letter in later.text


@pytest.mark.parametrize("budget", [7, 2048])
def test_prompt_log_probabilities(llama: LoadedModel, budget: int) -> None:
    """In pieces or at once, those of a plain forward pass."""
    prompt = list(range(30, 50))
    engine = Engine(llama, EngineConfig(max_num_seqs=4, max_num_batched_tokens=budget))
    params = SamplingParams(n=2, max_tokens=2, prompt_logprobs=2, logprobs=1, temperature=0)
    for _ in range(2):  # the second time with the prefix in the cache, which must not be used
        group = engine.add_group(params, prompt_token_ids=prompt)
        drain(engine)
    assert engine.stats.prefix_cache_queries == 2 * len(prompt)  # by the other completion alone
    output = RequestOutput.of(group, str)
    with torch.inference_mode(), use_attention(llama.model, "sdpa"):
        expected = llama.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    for i, (token, entry) in enumerate(zip(prompt[1:], output.prompt_logprobs[1:], strict=True)):
        assert entry is not None and next(iter(entry)) == token
        for other, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(expected[i, other]), abs=1e-3)
        assert set(entry) >= set(expected[i].topk(2).indices.tolist())
    (first, *_) = output.outputs[0].logprobs or []
    best = int(expected[-1].argmax())
    assert next(iter(first)) == best and first[best].rank == 1
    assert first[best].decoded_token == str(best)


def test_a_request_whose_logits_are_nan_fails_alone(llama: LoadedModel) -> None:
    engine = Engine(llama, EngineConfig(max_num_batched_tokens=64))
    good = engine.add_request(GREEDY, prompt_token_ids=[5, 6, 7])
    engine.step()
    embeddings = llama.model.get_input_embeddings().weight
    before = embeddings[300].clone()
    try:
        with torch.no_grad():
            embeddings[300] = torch.nan
        bad = engine.add_request(GREEDY, prompt_token_ids=[300, 6, 7])
        drain(engine)
    finally:
        with torch.no_grad():
            embeddings[300] = before
    assert bad.finish_reason == "abort" and "logits are NaN" in str(bad.error)
    assert good.finish_reason == "length" and good.error is None
    assert [good.output_token_ids] == by_engine(llama, [[5, 6, 7]], 12)
    assert engine.stats.pages_used == 0


def test_the_start_up_line_counts_pages_and_tokens(llama: LoadedModel) -> None:
    memory = pool_bytes(llama, 160)
    engine = Engine(llama, EngineConfig(kv_cache_dtype="fp8", kv_cache_memory_bytes=memory))
    line = engine.describe_cache()
    assert line.startswith("40 pages of 16 tokens in 81.9 kB; 640 tokens fit, 2.00 times as many")


def test_random_tokens_depend_on_seed_and_position_alone(llama: LoadedModel) -> None:
    def tokens(batch: list[int], **options: object) -> list[list[int]]:
        engine = Engine(llama, EngineConfig(**options))  # type: ignore[arg-type]
        requests = [
            engine.add_request(
                SamplingParams(max_tokens=20, temperature=1.5, seed=seed, ignore_eos=True), "once"
            )
            for seed in batch
        ]
        drain(engine)
        return [request.output_token_ids for request in requests]

    together = tokens([1, 2, 1])
    assert together[0] == together[2] != together[1]
    assert together[:2] == [
        tokens([1])[0],
        tokens([2], max_num_seqs=1, max_num_batched_tokens=2)[0],
    ]


def test_without_a_seed_answers_differ(llama: LoadedModel) -> None:
    answers = {tuple(run_one(llama, "a", temperature=2.0).output_token_ids) for _ in range(2)}
    assert len(answers) == 2


def test_abort_frees_the_blocks(llama: LoadedModel) -> None:
    engine = Engine(llama, EngineConfig())
    first, second = (engine.add_request(GREEDY, "abc") for _ in range(2))
    engine.step()
    engine.abort(first)
    assert first.finish_reason == "abort"
    drain(engine)
    assert second.finish_reason == "length" and len(first.output_token_ids) == 1
    assert engine.block_manager.pools[0].num_used == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 48}, "block_size must be a power of two and at least 16, got 48"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens .8. must be at least max_num_seqs"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be in"),
    ],
)
def test_options_out_of_range_are_refused(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        EngineConfig(**options)
