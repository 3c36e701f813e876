"""How steps are run changes no token: padded and replayed, a step ahead of the host, compiled,
by another backend."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy import by_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE

from fp8calib.errors import ModelError
from fp8calib.runtime import executor as executor_module
from fp8calib.runtime.compiled_layers import compile_layers
from fp8calib.runtime.config import EngineConfig
from fp8calib.runtime.cuda_graphs import DecodeGraphs, batch_sizes
from fp8calib.runtime.engine import Engine
from fp8calib.runtime.kv_format import KVFormat
from fp8calib.runtime.kv_store import KVStore, cache_groups
from fp8calib.runtime.loader import LoadedModel, load
from fp8calib.runtime.merged_projections import MergedLinear
from fp8calib.runtime.model_runner import ModelRunner
from fp8calib.runtime.packed_weights import PackedLinear, pack_weights
from fp8calib.runtime.request import Request
from fp8calib.runtime.sampler import SamplingRow
from fp8calib.runtime.sampling_params import SamplingParams
from fp8calib.runtime.step_inputs import (
    Chunk,
    HostBuffers,
    StepInputs,
    StepShape,
    _views,
    _write_chunks,
    shape_of,
    write_step,
)

Tiny = Callable[..., Path]
SMALL = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "max_model_len": 96}


@pytest.fixture(scope="module")
def llama(tiny: Tiny) -> LoadedModel:
    return load(str(tiny("llama")))


@pytest.fixture(scope="module")
def gemma(tiny: Tiny) -> LoadedModel:
    """Sliding-window and full-attention layers: two groups of pages."""
    return load(str(tiny("gemma3_text", tie_word_embeddings=False)))


def random_prompts(count: int, longest: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 300) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def params_of(index: int) -> SamplingParams:
    """Greedy and random, with and without stops, penalties and filters, of several lengths."""
    return SamplingParams(
        max_tokens=5 + index % 13,
        temperature=index % 3 * 0.7,
        top_k=index % 4 * 10,
        seed=index,
        stop_token_ids=range(0, 320, 9) if index % 2 else (),
        min_tokens=index % 5,
        repetition_penalty=1 + index % 2 * 0.3,
        presence_penalty=index % 3 * 0.5,
        logprobs=2 if index % 4 == 0 else None,
        ignore_eos=True,
    )


def run(
    loaded: LoadedModel, prepare: Callable[[Engine], None] = lambda _: None, **options: Any
) -> list[Request]:
    engine = Engine(loaded, EngineConfig(**SMALL | options))
    prepare(engine)
    prompts = random_prompts(16, 40)
    requests = [
        engine.add_request(params_of(i), prompt_token_ids=prompt)
        for i, prompt in enumerate(prompts)
    ]
    while engine.has_unfinished_requests:
        engine.step()
    assert engine.stats.pages_used == 0
    return requests


def assert_same(one: list[Request], other: list[Request]) -> None:
    for a, b in zip(one, other, strict=True):
        assert a.output_token_ids == b.output_token_ids
        assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason)
        assert [[t for t, _, _ in entry] for entry in a.logprobs] == [
            [t for t, _, _ in entry] for entry in b.logprobs
        ]


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_steps_ahead_of_the_host_give_the_same_tokens(
    kind: str, request: pytest.FixtureRequest
) -> None:
    loaded = request.getfixturevalue(kind)
    behind = run(loaded)
    assert {r.finish_reason for r in behind} == {"length", "stop"}
    assert_same(behind, run(loaded, async_scheduling=True))


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_preempted_requests_end_undisturbed(kind: str, request: pytest.FixtureRequest) -> None:
    """In a pool for the longest request and little more, a step ahead of the host."""
    loaded = request.getfixturevalue(kind)
    fmt = KVFormat(torch.float32)
    memory = 6 * sum(group.block_bytes(fmt, 16) for group in cache_groups(loaded.layers))
    engines: list[Engine] = []
    small = run(loaded, engines.append, kv_cache_memory_bytes=memory, async_scheduling=True)
    if kind == "llama":
        assert engines[0].stats.preemptions > 0
    assert_same(run(loaded), small)


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
def test_a_step_without_enough_memory_can_be_tried_again(
    ahead: bool, llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the model has run, and the device has chosen its tokens; nothing is lost."""
    expected = run(llama)
    engine = Engine(llama, EngineConfig(**SMALL, async_scheduling=ahead))
    requests = [
        engine.add_request(params_of(i), prompt_token_ids=prompt)
        for i, prompt in enumerate(random_prompts(16, 40))
    ]
    failures = 0
    row_of, rng = executor_module._sampling_row, random.Random(1)

    def failing(request: Request) -> SamplingRow:
        if rng.random() < 0.05:
            raise torch.OutOfMemoryError("none left")
        return row_of(request)

    monkeypatch.setattr(executor_module, "_sampling_row", failing)
    told: list[Request] = []
    while engine.has_unfinished_requests:
        try:
            told += engine.step()
        except ModelError as problem:
            assert "more memory" in str(problem)
            failures += 1
    told += engine._taken_early
    assert failures > 5 and engine.stats.pages_used == 0
    assert_same(expected, requests)
    for request in requests:
        assert told.count(request) == request.num_output


def replayed(engine: Engine) -> None:
    """Decode steps go through DecodeGraphs, whose captures are functions that run once more: as a
    real one, a capture first runs the function."""

    def capture(run: Callable[[], Any]) -> Callable[[], Any]:
        run()
        return run

    width = -(-engine.max_model_len // engine.store.block_size)
    engine.executor.runner.graphs = DecodeGraphs(
        engine.store.device, [width] * len(engine.store.groups), 6, capture=capture
    )


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_padded_decode_steps_give_the_same_tokens(
    kind: str, request: pytest.FixtureRequest
) -> None:
    loaded = request.getfixturevalue(kind)
    engines: list[Engine] = []

    def prepare(engine: Engine) -> None:
        engines.append(engine)
        replayed(engine)

    assert_same(run(loaded), run(loaded, prepare, async_scheduling=True))
    graphs = engines[0].executor.runner.graphs
    assert graphs is not None and set(graphs.captured) <= {1, 2, 4, 6} and graphs.captured


def test_short_sequences_have_graphs_of_their_own(llama: LoadedModel) -> None:
    """Where it matters to attention; as sequences grow past the bound, the other graph follows."""
    engines: list[Engine] = []
    asked = []

    def prepare(engine: Engine) -> None:
        engines.append(engine)
        replayed(engine)
        runner = engine.executor.runner

        def max_seq_len(chunks: Sequence[Chunk], num_seqs: int) -> int | None:
            asked.append(num_seqs)
            longest = max(chunk.start + 1 for chunk in chunks)
            return 47 if num_seqs >= 2 and longest <= 47 else None

        runner._plans.max_seq_len = max_seq_len  # type: ignore[method-assign]

    assert_same(run(llama), run(llama, prepare))
    graphs = engines[0].executor.runner.graphs
    assert graphs is not None and set(asked) >= set(graphs.captured)
    short, long = ({size for size, at in graphs._replays if at == bound} for bound in (47, None))
    assert short & long and 1 not in short


def test_a_model_that_cannot_be_captured_runs_on(
    llama: LoadedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    def prepare(engine: Engine) -> None:
        engine.executor.runner.graphs = DecodeGraphs(engine.store.device, [6], 6, capture=fail)

    assert_same(run(llama), run(llama, prepare))
    assert capsys.readouterr().err.count("runs without CUDA graphs") == 1


def test_padded_batch_sizes() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert batch_sizes(300)[-3:] == [256, 288, 300]
    for most in (7, 64, 200, 256, 512):
        sizes = batch_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most


def test_a_step_is_written_as_the_kernels_read_it() -> None:
    """A chunk in the middle of a prompt, one with the newest token of slot 5, and padding."""
    chunks = [
        Chunk([7, 8, 9], 15, [[4, 2], [0, 3]], num_logits=0),
        Chunk([], 20, [[6, 1], [5, 7]], num_logits=1, slot=5, pending=True),
    ]
    assert shape_of(chunks) == StepShape(4, 2, (2, 2), 1)
    shape = StepShape(5, 3, (4, 2), 2)
    buffer = HostBuffers(torch.device("cpu")).next(shape.size).fill_(99)
    write_step(chunks, shape, 16, buffer)
    step = StepInputs.of(shape, buffer, 3, 0)
    assert step.input_ids.tolist() == [7, 8, 9, -6, 0]
    assert step.positions.tolist() == [15, 16, 17, 20, 0]
    assert step.cu_seqlens_q.tolist() == [0, 3, 4, 5]
    assert step.seq_lens.tolist() == [18, 21, 0]
    assert step.rows.tolist() == [3, 4] and step.slots.tolist() == [5, -1]
    assert [slots.tolist() for slots in step.slot_mappings] == [
        [4 * 16 + 15, 2 * 16, 2 * 16 + 1, 1 * 16 + 4, -1],
        [15, 3 * 16, 3 * 16 + 1, 7 * 16 + 4, -1],
    ]
    assert step.block_tables[0][:2, :2].tolist() == [[4, 2], [6, 1]]
    assert step.block_tables[1][:2].tolist() == [[0, 3], [5, 7]]
    assert all(part.data_ptr() % 64 == buffer.data_ptr() % 64 for part in step.block_tables)


@settings(max_examples=40, deadline=None)
@given(
    starts=st.lists(st.integers(0, 100), min_size=1, max_size=6),
    pending=st.lists(st.booleans(), min_size=6, max_size=6),
    padding=st.integers(0, 3),
)
def test_single_tokens_are_written_as_chunks_are(
    starts: list[int], pending: list[bool], padding: int
) -> None:
    chunks = []
    for row, start in enumerate(starts):
        tables = [[7 * row + group + n for n in range(start // 16 + 1)] for group in range(2)]
        known = [] if pending[row] else [40 + row]
        chunks.append(Chunk(known, start, tables, 1, slot=9 - row, pending=pending[row]))
    size = len(chunks) + padding
    shape = StepShape(size, size, (8, 7), size)
    buffers = [torch.full((shape.size,), 99, dtype=torch.int32) for _ in range(2)]
    write_step(chunks, shape, 16, buffers[0])
    _write_chunks(chunks, shape, 16, _views(shape, buffers[1].numpy()))
    assert torch.equal(*buffers)


def test_a_step_of_padding_alone() -> None:
    shape = StepShape(2, 2, (3,), 2)
    buffer = torch.full((shape.size,), 99, dtype=torch.int32)
    write_step([], shape, 16, buffer)
    step = StepInputs.of(shape, buffer, 1, 2)
    assert step.input_ids.tolist() == step.positions.tolist() == step.seq_lens.tolist() == [0, 0]
    assert step.slots.tolist() == step.slot_mappings[0].tolist() == [-1, -1]
    assert step.cu_seqlens_q.tolist() == [0, 1, 2] and step.rows.tolist() == [0, 1]


def test_buffers_take_turns() -> None:
    buffers = HostBuffers(torch.device("cpu"))
    one, two = buffers.next(10), buffers.next(10)
    assert one.data_ptr() != two.data_ptr()
    assert buffers.next(5).data_ptr() == one.data_ptr()
    assert len(buffers.next(1000)) == 1000


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3_text", "qwen3_moe"])
def test_compiled_layers_give_the_same_tokens(kind: str, tiny: Tiny) -> None:
    """As torch.compile traces them, with merged projections and without its code generator."""
    folder = str(tiny(kind, tie_word_embeddings=False))
    compiled = load(folder)
    compile_layers(compiled.model, compiled.layers, backend="eager")
    prompts = random_prompts(3, 20)
    counted = torch._dynamo.utils.counters["frames"]
    counted.clear()
    assert by_engine(compiled, prompts, 6) == by_engine(load(folder), prompts, 6)
    assert any(isinstance(module, MergedLinear) for module in compiled.model.modules())
    assert counted["ok"] > 0
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_packed_weights_give_the_same_products(bias: bool) -> None:
    """Up to the order of sums; for no tokens too, and the weight is still to be had."""
    linear = torch.nn.Linear(96, 40, bias).bfloat16()
    model = torch.nn.Sequential(linear, torch.nn.Linear(40, 8))
    inputs = [torch.randn(1, tokens, 96).bfloat16() for tokens in (0, 1, 8, 70)]
    with torch.inference_mode():
        expected = [linear(x) for x in inputs]
        pack_weights(model)
        if not isinstance(model[0], PackedLinear):
            pytest.skip("this CPU does not multiply in bfloat16")
        for x, y in zip(inputs, expected, strict=True):
            torch.testing.assert_close(model[0](x), y, rtol=2**-7, atol=2**-8)
    assert torch.equal(model[0].weight, linear.weight)
    assert type(model[1]) is torch.nn.Linear  # float32


def test_an_engine_packs_weights_unless_told_not_to(tiny: Tiny) -> None:
    folder = str(tiny("llama", tie_word_embeddings=True))
    packed, plain = (load(folder, dtype="bfloat16") for _ in range(2))
    for loaded, wanted in ((packed, True), (plain, False)):
        engine = Engine(loaded, EngineConfig(pack_weights=wanted, kv_cache_memory_bytes=1 << 20))
        request = engine.add_request(SamplingParams(max_tokens=3), prompt_token_ids=[5, 6, 7])
        while engine.has_unfinished_requests:
            engine.step()
        assert request.num_output == 3
        kinds = {type(module) for module in loaded.model.modules()}
        assert (PackedLinear in kinds) == (wanted and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def test_triton_kernels_equal_the_torch_backend(tiny: Tiny) -> None:
    """A prompt, then single tokens by a shared plan, on FP8 pages where Triton kernels run."""
    loaded = load(str(tiny("llama", num_hidden_layers=1)), device=DEVICE)
    fmt = KVFormat.fp8(loaded.layers, torch.float32)

    def logits(backend: str) -> torch.Tensor:
        store = KVStore(loaded.layers, fmt, [4], 16, DEVICE)
        store.layers = {i: replace(c, backend=backend) for i, c in store.layers.items()}
        runner = ModelRunner(loaded.model, store)
        rows = [runner.forward([Chunk(list(range(5, 30)), 0, [[2, 0]], 25)]).clone()]
        for position in range(25, 28):
            chunks = [
                Chunk([position], position, [[2, 0]], 1),
                Chunk([7 + position], position - 25, [[3]], 1),
            ]
            rows.append(runner.forward(chunks).clone())
        return torch.cat(rows)

    triton, plain = logits("triton"), logits("torch")
    assert float((triton - plain).norm() / plain.norm()) < 5e-3
