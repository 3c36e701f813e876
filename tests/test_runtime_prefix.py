"""Cached prefixes: found where they are the same and nowhere else, evicted in order, dropped."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from greedy import by_engine
from made_scales import calibrated, make_scales, rewritten

from fp8calib import LLM
from fp8calib.checkpoint import read_scales
from fp8calib.errors import ScaleError, UserError
from fp8calib.runtime.block_manager import NO_BLOCK, BlockManager, BlockPool
from fp8calib.runtime.config import EngineConfig
from fp8calib.runtime.engine import Engine
from fp8calib.runtime.kv_format import KVFormat
from fp8calib.runtime.kv_store import CacheGroup, cache_groups
from fp8calib.runtime.loader import LoadedModel, load
from fp8calib.runtime.prefix_hash import extend_hashes, fingerprint
from fp8calib.runtime.sampling_params import SamplingParams
from fp8calib.scales import ScaleSet

Tiny = Callable[..., Path]
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llama(tiny: Tiny) -> LoadedModel:
    return load(str(tiny("llama")))


@pytest.fixture(scope="module")
def gemma(tiny: Tiny) -> LoadedModel:
    """Sliding-window and full-attention layers: two groups of pages."""
    return load(str(tiny("gemma3_text", tie_word_embeddings=False)))


def prompts_with_shared_starts() -> list[list[int]]:
    rng = random.Random(2)
    common = [rng.randrange(3, 300) for _ in range(70)]
    # Ends inside a block, at its border, and one token behind it.
    cuts = [70, 64, 48, 33, 32, 31, 17, 70]
    return [
        common[:cut] + [rng.randrange(3, 300) for _ in range(i % 4)] for i, cut in enumerate(cuts)
    ]


def drain(engine: Engine) -> None:
    while engine.has_unfinished_requests:
        engine.step()
    assert engine.stats.pages_used == 0


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_cached_prefixes_give_the_tokens_of_a_cold_cache(
    kind: str, request: pytest.FixtureRequest
) -> None:
    loaded = request.getfixturevalue(kind)
    prompts = prompts_with_shared_starts()
    cold = by_engine(loaded, prompts, 10, enable_prefix_caching=False)
    engine = Engine(loaded, EngineConfig())
    for layer in engine.store.layers.values():
        layer.k_pages.fill_(torch.nan)
        layer.v_pages.fill_(torch.nan)
    for together in (True, False):
        requests = []
        for prompt in prompts:
            requests.append(engine.add_request(GREEDY, prompt_token_ids=prompt))
            if not together:
                drain(engine)
        drain(engine)
        assert [request.output_token_ids for request in requests] == cold
    # Found whole: but for the block of the last token, which is computed in any case.
    assert [r.num_cached_tokens for r in requests] == [
        (len(prompt) - 1) // 16 * 16 for prompt in prompts
    ]
    stats = engine.stats
    assert 0 < stats.prefix_cache_hits < stats.prefix_cache_queries == 2 * sum(map(len, prompts))


def test_answers_are_found_too(llama: LoadedModel) -> None:
    """As the next turn of a conversation has them."""
    engine = Engine(llama, EngineConfig())
    first = engine.add_request(replace(GREEDY, max_tokens=30), prompt_token_ids=[9] * 10)
    drain(engine)
    second = engine.add_request(GREEDY, prompt_token_ids=[*first.token_ids, 5, 6])
    drain(engine)
    assert second.num_cached_tokens == 32
    again = by_engine(llama, [second.prompt_token_ids], 10, enable_prefix_caching=False)
    assert [second.output_token_ids] == again


def test_n_completions_share_the_pages_of_their_prompt(llama: LoadedModel) -> None:
    llm = LLM.__new__(LLM)
    llm.engine = engine = Engine(llama, EngineConfig())
    params = SamplingParams(n=4, max_tokens=5, seed=3, ignore_eos=True)
    prompt = {"prompt_token_ids": list(range(5, 5 + 64))}
    group = engine.add_group(params, prompt_token_ids=prompt["prompt_token_ids"])
    engine.step()
    assert engine.stats.pages_used == 3 + 4  # three full blocks are one's and everyone's
    drain(engine)
    outputs = [request.output_token_ids for request in group.requests]
    alone = [
        llm.generate(prompt, replace(params, n=1, seed=3 + i))[0].outputs[0].token_ids
        for i in range(4)
    ]
    assert outputs == alone and len({tuple(tokens) for tokens in outputs}) == 4
    (output,) = llm.generate(prompt, params)
    assert [(one.index, one.token_ids) for one in output.outputs] == list(enumerate(outputs))


def test_least_recently_used_blocks_are_evicted_first() -> None:
    pool = BlockPool(4)
    blocks = pool.take(3)
    for block, name in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.cache(block, name)
    pool.release(blocks)
    assert (pool.num_used, pool.num_free) == (0, 4)
    found = pool.find(b"a")
    assert found == blocks[0]
    pool.share(found)
    pool.release([found])  # a is the newest now
    assert len(pool.take(2)) == 2  # the block that was never used, and b's
    assert [pool.find(name) is None for name in (b"a", b"b", b"c")] == [False, True, False]
    pool.forget_cached()
    assert pool.find(b"a") is None and pool.num_free == 2


def test_a_window_needs_only_what_it_still_sees() -> None:
    manager = BlockManager([CacheGroup(None, ()), CacheGroup(20, ())], [8, 8], 16)
    hashes = [bytes([n]) for n in range(5)]
    tables = manager.new_tables()
    assert manager.grow(tables, 0, 80)
    manager.cache(tables, hashes, 0)
    assert manager.grow(tables, 80, 81)  # token 80 sees tokens 61 on: blocks 0 to 2 go
    manager.free(tables)
    assert list(tables[1]) == []
    shared = manager.new_tables()
    assert manager.share_prefix(shared, hashes) == 80
    assert [block == NO_BLOCK for block in shared[1]] == [True, True, True, False, False]
    assert NO_BLOCK not in shared[0]
    manager.free(shared)
    manager.pools[1].take(7)  # one of the two that the window needs is evicted
    assert manager.share_prefix(manager.new_tables(), hashes) == 0


def test_hashes_tell_contents_and_formats_apart(llama: LoadedModel) -> None:
    scales = [make_scales(llama.layers, "tensor"), make_scales(llama.layers, "attn_head")]
    fp8 = KVFormat.fp8(llama.layers, torch.float32)
    formats = [
        KVFormat(torch.float32),
        KVFormat(torch.bfloat16),
        fp8,
        KVFormat.fp8(llama.layers, torch.float32, skip=[0]),
        KVFormat.fp8(llama.layers, torch.float32, native_k=[0]),
        KVFormat.fp8(llama.layers, torch.float32, fp8_format="e5m2"),
        replace(fp8, scales=scales[0]),
        replace(fp8, scales=scales[1]),
        replace(fp8, scales=scales[0], arithmetic="fp8"),
    ]
    roots = [fingerprint(fmt) for fmt in formats]
    assert len(set(roots)) == len(formats)
    assert fingerprint(replace(fp8, scales=make_scales(llama.layers, "tensor"))) == roots[6]
    chains: list[list[bytes]] = []
    for root in roots[:2]:
        for tokens in ([1] * 40, [1] * 16 + [2] * 24, [2] + [1] * 39):
            chains.append([])
            extend_hashes(chains[-1], tokens, 16, root)
    assert {len(chain) for chain in chains} == {2}
    assert chains[0][0] == chains[1][0]
    assert len({block for chain in chains for block in chain}) == 12 - 2


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_c20_reloaded_scales_equal_a_fresh_load(strategy: str, tiny: Tiny, tmp_path: Path) -> None:
    calibrated(tiny("llama"), tmp_path / "one", strategy, query=False)
    calibrated(tiny("llama"), tmp_path / "two", strategy, query=False)
    rewritten(tmp_path / "two", lambda name, values: {name: values * np.float32(6)})
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts_with_shared_starts()]
    live = LLM(str(tmp_path / "one"))
    fresh = LLM(str(tmp_path / "two"))

    def tokens(llm: LLM) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]

    first, expected = tokens(live), tokens(fresh)
    assert first != expected
    places = [cache.k_scale.data_ptr() for cache in live.engine.store.layers.values()]
    live.reload_scales(read_scales(tmp_path / "two"))
    assert tokens(live) == expected
    assert [c.k_scale.data_ptr() for c in live.engine.store.layers.values()] == places
    live.reload_scales(read_scales(tmp_path / "one"))
    assert tokens(live) == first


def test_c20_scales_reloaded_under_way_hold_for_the_rest(tiny: Tiny, tmp_path: Path) -> None:
    """The tokens so far are kept, and what follows is what the new scales make of them."""
    calibrated(tiny("llama"), tmp_path / "one", query=False)
    calibrated(tiny("llama"), tmp_path / "two", query=False)
    rewritten(tmp_path / "two", lambda name, values: {name: values * np.float32(6)})
    engine = Engine(load(str(tmp_path / "one")), EngineConfig(async_scheduling=True))
    prompts = prompts_with_shared_starts()[:3]
    requests = [engine.add_request(GREEDY, prompt_token_ids=prompt) for prompt in prompts]
    for _ in range(5):
        engine.step()
    engine.reload_scales(read_scales(tmp_path / "two"))
    sofar = [list(request.token_ids) for request in requests]
    assert all(len(request.output_token_ids) == 5 for request in requests)
    drain(engine)
    rest = by_engine(load(str(tmp_path / "two")), sofar, 5)
    assert [request.output_token_ids[5:] for request in requests] == rest


def test_c20_a_request_that_ends_while_scales_are_reloaded_is_told(
    tiny: Tiny, tmp_path: Path
) -> None:
    """Its last token is on the device when the scales change; who waits for steps must hear it."""
    calibrated(tiny("llama"), tmp_path, query=False)
    engine = Engine(load(str(tmp_path)), EngineConfig(async_scheduling=True))
    request = engine.add_request(SamplingParams(max_tokens=1), prompt_token_ids=[5, 6])
    assert engine.step() == []
    engine.reload_scales(read_scales(tmp_path))
    assert request.finish_reason == "length"
    assert engine.step() == [request] and engine.step() == []


def test_scales_that_cannot_be_reloaded_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    calibrated(tiny("llama"), tmp_path / "one", query=False)
    engine = Engine(load(str(tmp_path / "one")), EngineConfig())
    with pytest.raises(UserError, match="tensor scales, and the new ones are attn_head"):
        engine.reload_scales(make_scales(engine.loaded.layers, "attn_head", query=False))
    with pytest.raises(ScaleError, match="the new scales: "):
        engine.reload_scales(ScaleSet("tensor", {}))
    plain = Engine(load(str(tiny("llama"))), EngineConfig(kv_cache_dtype="fp8"))
    with pytest.raises(UserError, match="no scales to replace"):
        plain.reload_scales(make_scales(plain.loaded.layers, "tensor", query=False))


def test_a_step_that_fails_leaves_nothing_to_be_found(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(llama, EngineConfig())
    request = engine.add_request(GREEDY, prompt_token_ids=[7] * 40)
    with monkeypatch.context() as broken:
        broken.setattr(engine.executor.runner, "step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    engine.abort(request)
    assert engine.stats.pages_used == 0
    again = engine.add_request(GREEDY, prompt_token_ids=[7] * 40)
    drain(engine)
    assert again.num_cached_tokens == 0
    assert [again.output_token_ids] == by_engine(llama, [[7] * 40], 10)


def test_500_random_requests_in_a_tiny_pool_end_and_free_their_pages(tiny: Tiny) -> None:
    loaded = load(str(tiny("llama", num_hidden_layers=1, vocab_size=320, hidden_size=32)))
    memory = 12 * sum(
        g.block_bytes(KVFormat(torch.float32), 16) for g in cache_groups(loaded.layers)
    )
    engine = Engine(
        loaded,
        EngineConfig(
            kv_cache_memory_bytes=memory,
            max_num_seqs=12,
            max_num_batched_tokens=96,
            max_model_len=150,
            async_scheduling=True,
        ),
    )
    rng = random.Random(7)
    groups = []
    for i in range(500):
        shared = [5 + i % 3] * rng.choice((0, 20, 50))
        prompt = shared + [rng.randrange(3, 300) for _ in range(rng.randint(1, 40))]
        params = SamplingParams(
            n=1 + (i % 50 == 0),
            max_tokens=rng.randint(1, 20),
            temperature=rng.choice((0, 1)),
            stop_token_ids=range(0, 320, 40),
            seed=i,
        )
        groups.append(engine.add_group(params, prompt_token_ids=prompt))
    aborted = rng.sample(groups, 20)
    steps = 0
    while engine.has_unfinished_requests:
        engine.step()
        steps += 1
        if steps % 10 == 0 and aborted:
            for request in aborted.pop().requests:
                engine.abort(request)
        used = [pool.num_used for pool in engine.block_manager.pools]
        assert all(
            n <= pool.num_blocks for n, pool in zip(used, engine.block_manager.pools, strict=True)
        )
    engine.step()  # what was started for requests that had ended
    assert all(group.finished for group in groups)
    assert engine.stats.pages_used == 0 and engine.stats.running == engine.stats.waiting == 0
    assert sum(engine.stats.finished.values()) == 510
    assert engine.stats.preemptions > 0 and engine.stats.prefix_cache_hits > 0
    pool = engine.block_manager.pools[0]
    assert sorted(pool.take(pool.num_blocks)) == list(range(pool.num_blocks))
