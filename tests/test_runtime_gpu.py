"""The engine on a GPU: captured steps, a step ahead of the host, live scales in captured graphs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_scales import calibrated, rewritten

from fp8calib.checkpoint import read_scales
from fp8calib.runtime.config import EngineConfig
from fp8calib.runtime.engine import Engine
from fp8calib.runtime.kv_format import KVFormat
from fp8calib.runtime.loader import LoadedModel, load
from fp8calib.runtime.merged_projections import MergedLinear
from fp8calib.runtime.request import Request
from fp8calib.runtime.sampling_params import SamplingParams
from fp8calib.runtime.scoring import score

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Tiny = Callable[..., Path]
SHAPE = {"dtype": "bfloat16", "hidden_size": 256, "head_dim": 64}
OPTIONS = {"max_num_seqs": 12, "max_num_batched_tokens": 64, "max_model_len": 200}
MEMORY = 64 << 20


def opened(tiny: Tiny, kind: str) -> LoadedModel:
    more = {"tie_word_embeddings": False} if kind == "gemma3_text" else {}
    return load(str(tiny(kind, **SHAPE, **more)), device="cuda")


def run(loaded: LoadedModel, **options: Any) -> tuple[Engine, list[Request]]:
    settings = {"kv_cache_dtype": "fp8", "kv_cache_memory_bytes": MEMORY} | OPTIONS | options
    engine = Engine(loaded, EngineConfig(**settings))
    rng = random.Random(3)
    requests = []
    for i in range(20):
        prompt = [rng.randrange(3, 300) for _ in range(rng.randint(1, 90))]
        params = SamplingParams(
            max_tokens=4 + i % 30,
            temperature=i % 3 * 0.6,
            top_k=i % 4 * 10,
            seed=i,
            presence_penalty=i % 2 * 0.5,
            logprobs=1 if i % 5 == 0 else None,
            ignore_eos=True,
        )
        requests.append(engine.add_request(params, prompt_token_ids=prompt))
    while engine.has_unfinished_requests:
        engine.step()
    assert engine.stats.pages_used == 0
    return engine, requests


def tokens(requests: list[Request]) -> list[list[int]]:
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("word", ["fp8", "auto"])
def test_captured_steps_equal_eager_ones_bit_for_bit(kind: str, word: str, tiny: Tiny) -> None:
    """At the same padded batch sizes: captures are replaced by functions that run once more."""
    loaded = opened(tiny, kind)
    engine = run(loaded, kv_cache_dtype=word)[0]
    graphs = engine.executor.runner.graphs
    assert graphs is not None and graphs.failure is None and graphs.captured

    settings = {"kv_cache_dtype": word, "kv_cache_memory_bytes": MEMORY} | OPTIONS
    eager = Engine(loaded, EngineConfig(**settings))
    eager_graphs = eager.executor.runner.graphs
    assert eager_graphs is not None
    eager_graphs._capture = lambda run: run
    both = []
    for one in (engine, eager):
        torch.manual_seed(0)
        for cache in one.store.layers.values():
            for pages in (cache.k_pages, cache.v_pages):
                pages.view(torch.uint8).zero_()
        logits = []
        runner = one.executor.runner
        step = runner.step

        def keep(*args: Any, step: Any = step, logits: Any = logits) -> Any:
            result = step(*args)
            logits.append(result[0].clone())
            return result

        runner.step = keep  # type: ignore[method-assign]
        for i in range(5):
            params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
            one.add_request(params, prompt_token_ids=[5 + i] * (10 + 20 * i))
        one.block_manager.forget_cached()
        while one.has_unfinished_requests:
            one.step()
        both.append(logits)
    assert len(both[0]) == len(both[1])
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def test_sequences_that_outgrow_being_short(tiny: Tiny) -> None:
    """320 (sequence, KV head) pairs pass 1,024 tokens: from one graph to the other, and the same
    tokens as by functions that run once more in their place."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    loaded = load(str(tiny("llama", **SHAPE | heads, max_position_embeddings=2048)), device="cuda")
    config = EngineConfig(
        kv_cache_dtype="fp8",
        kv_cache_memory_bytes=40 * 1152 * sum(2 * 8 * 128 for _ in loaded.layers),
        max_model_len=1152,
        max_num_seqs=40,
        max_num_batched_tokens=41_000,  # all prompts in one step
    )
    outputs = []
    for capture in (None, lambda run: run):
        engine = Engine(loaded, config)
        graphs = engine.executor.runner.graphs
        assert graphs is not None
        graphs._capture = capture or graphs._capture
        rng = random.Random(3)
        requests = []
        for i in range(40):
            params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
            prompt = [rng.randrange(3, 300) for _ in range(1000 + i % 7)]
            requests.append(engine.add_request(params, prompt_token_ids=prompt))
        while engine.has_unfinished_requests:
            engine.step()
        assert graphs.failure is None and {(40, 1024), (40, None)} <= graphs._replays.keys()
        outputs.append(tokens(requests))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_steps_ahead_of_the_host_give_the_same_tokens(kind: str, tiny: Tiny) -> None:
    """Batches are composed differently, so bfloat16 sums differ: float32 tokens are compared on
    the CPU, here those of requests that run alone."""
    loaded = opened(tiny, kind)
    one = {"max_num_seqs": 1}
    ahead = tokens(run(loaded, **one)[1])
    assert ahead == tokens(run(loaded, async_scheduling=False, **one)[1])
    eager = tokens(run(loaded, enforce_eager=True, **one)[1])
    same = sum(a == b for a, b in zip(ahead, eager, strict=True))
    assert same >= 18  # graphs pad nothing at batch 1; library kernels may still differ


def test_no_step_waits_for_the_device(tiny: Tiny) -> None:
    """torch reports every synchronisation but that of events."""
    engine, _ = run(opened(tiny, "llama"))
    params = SamplingParams(max_tokens=30, temperature=0.8, top_p=0.9, seed=1, ignore_eos=True)
    for _ in range(3):
        engine.add_request(params, prompt_token_ids=[7] * 20)
    for _ in range(4):  # the last of them captures
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_c20_captured_graphs_see_new_scales(tiny: Tiny, tmp_path: Path) -> None:
    """Second scales loaded into a live engine give what an engine made with them gives."""
    source = tiny("llama", **SHAPE)
    calibrated(source, tmp_path / "one", query=False)
    calibrated(source, tmp_path / "two", query=False)
    rewritten(tmp_path / "two", lambda name, values: {name: values * np.float32(6)})
    auto = {"kv_cache_dtype": "auto"}
    engine, before = run(load(str(tmp_path / "one"), device="cuda"), **auto)
    expected = tokens(run(load(str(tmp_path / "two"), device="cuda"), **auto)[1])
    engine.reload_scales(read_scales(tmp_path / "two"))
    after = [
        engine.add_request(request.params, prompt_token_ids=request.prompt_token_ids)
        for request in before
    ]
    while engine.has_unfinished_requests:
        engine.step()
    assert tokens(after) == expected != tokens(before)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_compiled_layers_are_as_near_to_float32_as_plain_ones(kind: str, tiny: Tiny) -> None:
    """Their projections merged; many tokens at a time, and one, which is code of its own."""
    folder = str(tiny(kind, **SHAPE))
    plain, compiled, exact = (
        load(folder, device="cuda", dtype=dtype) for dtype in ("auto", "auto", "float32")
    )
    engine, _ = run(compiled, compile_layers=True)
    graphs = engine.executor.runner.graphs
    assert graphs is not None and graphs.failure is None and graphs.captured
    assert sum(isinstance(module, MergedLinear) for module in compiled.model.modules()) == 10
    rows = [list(range(10, 10 + length)) for length in (5, 17, 40, 1, 90)]

    def logits(loaded: LoadedModel, tokens: int) -> torch.Tensor:
        fmt = KVFormat(loaded.model.dtype)
        scored = score(loaded.model, loaded.layers, fmt, rows, max_batched_tokens=tokens)
        return torch.cat([one.logits.float() for one in scored])

    for tokens in (64, 1):
        expected = logits(exact, tokens)
        errors = [
            float((logits(loaded, tokens) - expected).norm() / expected.norm())
            for loaded in (plain, compiled)
        ]
        assert 0 < errors[1] < 1.3 * errors[0], (tokens, errors)
