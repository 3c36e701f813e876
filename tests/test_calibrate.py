"""Calibration: the scales are the maxima's, whatever the order, the batching and the padding."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import write_texts
from qkv_reference import maxima
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from fp8calib.attention import probe
from fp8calib.calibration import calibrate
from fp8calib.calibration.core import Batch, Collector, calibration_pass, make_batch, plan_batches
from fp8calib.calibration.oneshot import run_oneshot
from fp8calib.checkpoint import read_scales
from fp8calib.data import load_data
from fp8calib.errors import CheckpointError, DataError, ModelError, UserError
from fp8calib.layers import resolve_skip_layers
from fp8calib.scales import E4M3_MAX, KINDS, ScaleSet, scale_from_amax

TEXTS = [f"text {number}: " + "abc xyz " * (3 + 4 * number) for number in range(8)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("data"), TEXTS)


def observe(model: Any, rows: Sequence[Sequence[int]], batch_size: int) -> Collector:
    collector = Collector(query=True)
    batches = [make_batch(rows, chosen) for chosen in plan_batches(rows, batch_size)]
    calibration_pass(model, batches, collector)
    return collector


def batched(rows: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """Every row a batch of its own."""
    return [[list(row)] for row in rows]


def amax(collector: Collector) -> dict[tuple[int, str], np.ndarray]:
    return {slot: statistics.amax.numpy() for slot, statistics in collector.statistics.items()}


def assert_same(found: dict, expected: dict, rtol: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for slot, value in expected.items():
        np.testing.assert_allclose(found[slot], np.asarray(value), rtol=rtol, err_msg=str(slot))


def by_hand(found: dict, strategy: str) -> dict[tuple[int, str], np.ndarray]:
    """amax/448, moved up until nothing is clipped: CHECKPOINT's rule, one value at a time."""
    scales = {}
    for slot, value in found.items():
        heads = [float(head) for head in np.asarray(value)]
        heads = [max(heads)] if strategy == "tensor" else heads
        out = []
        for head in heads:
            scale = np.float32(np.float32(head) / np.float32(448))
            while np.float32(head) / scale > np.float32(448):
                scale = np.nextafter(scale, np.float32(np.inf))
            out.append(scale)
        scales[slot] = np.array(out, dtype=np.float32)
    return scales


def in_file(scales: ScaleSet) -> dict[tuple[int, str], np.ndarray]:
    return {
        (index, kind): value
        for index, layer in scales.layers.items()
        for kind, value in layer.items()
    }


@pytest.fixture(scope="module")
def smollm2_rows(smollm2_tokenizer: Any) -> list[list[int]]:
    from pydoc_data.topics import topics

    texts = [text for text in topics.values() if len(text) > 1500][:6]
    return [
        smollm2_tokenizer(text)["input_ids"][: 40 + 9 * number] for number, text in enumerate(texts)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2_scales_equal_those_of_independent_hooks(
    smollm2: Path, smollm2_tokenizer: Any, smollm2_rows: list[list[int]], dtype: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=getattr(torch, dtype))
    rows, alone = smollm2_rows, None
    for size in (1, 4):
        plan = plan_batches(rows, size)
        expected = maxima(model, ([rows[text] for text in texts] for texts in plan))
        batches = [make_batch(rows, texts) for texts in plan]
        collector = Collector(query=True)
        run_oneshot(model, smollm2_tokenizer, batches, collector=collector)
        found = amax(collector)
        assert_same(found, expected, rtol=0)  # the same forward passes: equal to the last bit
        # In other shapes the model itself rounds otherwise, layer after layer.
        alone = alone or found
        assert_same(found, alone, rtol=1e-5 if dtype == "float32" else 2**-5)


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_smollm2_checkpoint_holds_the_scales_of_its_maxima(
    smollm2: Path, tmp_path: Path, strategy: str
) -> None:
    options = {"samples": 4, "max_seq_len": 48, "dtype": "float32", "batch_size": 1}
    result = calibrate("demo:smollm2-135m-instruct", tmp_path / "out", strategy=strategy, **options)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    expected = by_hand(maxima(model, batched(result.data.rows)), strategy)
    assert_same(in_file(read_scales(tmp_path / "out")), expected, rtol=1e-6)
    sidecar = json.loads((tmp_path / "out" / "fp8calib.json").read_text())
    assert sidecar["dataset"]["tokens"] == result.data.num_tokens
    assert sidecar["recipe"]["calibration"]["dataset"] == "builtin:pydoc"


def test_c01_the_order_of_texts_changes_nothing(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Token 7 has unusually large activations; a moving average would depend on when it came."""

    def loud(model: Any) -> None:
        model.model.embed_tokens.weight[7] *= 300

    model = AutoModelForCausalLM.from_pretrained(tiny("llama", edit=loud, tokenizer=None))
    rows = [[1] + [20 + 3 * text + token for token in range(12)] for text in range(8)]
    rows[2][5] = 7
    first = amax(observe(model, rows, 1))
    assert_same(amax(observe(model, rows[::-1], 1)), first)
    expected = {
        slot: np.max([amax(observe(model, [row], 1))[slot] for row in rows], axis=0)
        for slot in first
    }
    assert_same(first, expected)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_batching_changes_nothing(tiny: Callable[..., Path], batch_size: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny())
    rows = [[1, *range(20, 24 + 5 * text)] for text in range(7)]
    collector = observe(model, rows, batch_size)
    assert_same(amax(collector), maxima(model, batched(rows)))
    counts = {statistics.numpy().count for statistics in collector.statistics.values()}
    assert counts == {sum(map(len, rows)) * 16}


@pytest.mark.parametrize("side", ["left", "right"])
def test_c04_padding_is_not_observed(tiny: Callable[..., Path], side: str) -> None:
    def loud_padding(model: Any) -> None:
        model.model.embed_tokens.weight[0] = 1000 * model.model.embed_tokens.weight[5]

    model = AutoModelForCausalLM.from_pretrained(tiny("mistral", edit=loud_padding))
    rows = [[1, *range(30, 30 + length)] for length in (4, 9, 17)]
    longest = max(map(len, rows))
    ids, real = torch.zeros(3, longest, dtype=torch.long), torch.zeros(3, longest, dtype=torch.bool)
    for number, row in enumerate(rows):
        place = slice(longest - len(row), None) if side == "left" else slice(0, len(row))
        ids[number, place], real[number, place] = torch.tensor(row), True
    collector = Collector(query=True)
    calibration_pass(model, [Batch(ids, real, [0, 1, 2])], collector)
    alone = observe(model, rows, 1)
    assert_same(amax(collector), amax(alone), rtol=2e-6)
    for slot, statistics in collector.statistics.items():
        assert statistics.numpy().count == alone.statistics[slot].numpy().count
        np.testing.assert_array_equal(statistics.text, alone.statistics[slot].text)


def test_c05_no_scale_clips_its_maximum() -> None:
    rng = np.random.default_rng(0)
    seen = np.exp(rng.uniform(-60, 12, 100_000)).astype(np.float32)
    plain = seen / E4M3_MAX
    assert (seen / plain > E4M3_MAX).mean() > 0.05  # the rule has something to do
    scale = scale_from_amax(seen)
    assert scale.dtype == np.float32
    assert (seen / scale <= E4M3_MAX).all()
    assert (scale <= np.nextafter(plain, np.float32(np.inf))).all()
    np.testing.assert_array_equal(scale_from_amax(np.zeros(2)), [1, 1])
    np.testing.assert_allclose(scale_from_amax(seen, 1.5), 1.5 * plain, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_c05_scales_in_the_file_are_float32(
    tiny: Callable[..., Path], texts: Path, tmp_path: Path, dtype: str
) -> None:
    source = tiny(dtype=dtype)
    calibrate(source, tmp_path / "out", dataset=str(texts))
    shard = sorted((tmp_path / "out").glob("*.safetensors"))[-1]
    length = int.from_bytes(shard.read_bytes()[:8], "little")
    header = json.loads(shard.read_bytes()[8 : 8 + length])
    header.pop("__metadata__", None)
    assert {entry["dtype"] for entry in header.values()} == {"F32"}
    sidecar = json.loads((tmp_path / "out" / "fp8calib.json").read_text())
    for index, layer in read_scales(tmp_path / "out").layers.items():
        for kind, scale in layer.items():
            seen = np.float32(max(sidecar["layers"][str(index)][kind]["amax"]))
            assert seen / scale[0] <= E4M3_MAX


@pytest.mark.parametrize(
    ("words", "flag", "skipped"),
    [
        (["0,-1"], ["0", "3"], {0, 3}),
        (["-1 0", "0"], ["0", "3"], {0, 3}),
        (["sliding_window"], ["sliding_window"], {0, 2}),
        (["3", "sliding_window"], ["3", "sliding_window"], {0, 2, 3}),
    ],
)
def test_c02_skipped_layers_get_valid_scales_and_are_recorded(
    tiny: Callable[..., Path],
    texts: Path,
    tmp_path: Path,
    words: list[str],
    flag: list[str],
    skipped: set[int],
) -> None:
    source = tiny("gemma2", num_hidden_layers=4)
    result = calibrate(
        source, tmp_path / "out", dataset=str(texts), kv_cache_dtype_skip_layers=words
    )
    assert result.skip_layers == flag
    assert result.serve is not None
    assert result.serve.endswith(f"--kv-cache-dtype-skip-layers {' '.join(flag)}")
    assert json.loads((tmp_path / "out" / "fp8calib.json").read_text())["skip_layers"] == flag
    assert (
        f"--kv-cache-dtype-skip-layers {' '.join(flag)}"
        in (tmp_path / "out" / "README.md").read_text()
    )
    model = AutoModelForCausalLM.from_pretrained(source)
    assert resolve_skip_layers(words, probe(model))[1] == skipped
    everywhere = calibrate(source, tmp_path / "all", dataset=str(texts))
    assert everywhere.scales is not None and result.scales is not None
    assert_same(in_file(read_scales(tmp_path / "out")), in_file(everywhere.scales), rtol=0)


@pytest.mark.parametrize("word", ["7", "-5", "first", "sliding_window"])
def test_c02_skip_layers_that_do_not_exist(
    tiny: Callable[..., Path], texts: Path, tmp_path: Path, word: str
) -> None:
    with pytest.raises(UserError, match="skip layers"):
        calibrate(tiny(), tmp_path / "out", dataset=str(texts), kv_cache_dtype_skip_layers=[word])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox"])
def test_c03_fused_projections_are_calibrated(
    tiny: Callable[..., Path], texts: Path, tmp_path: Path, model_type: str, strategy: str
) -> None:
    """What the cache holds after a forward pass is the K and V to scale: an oracle of its own."""
    source = tiny(model_type)
    result = calibrate(source, tmp_path / "out", dataset=str(texts), strategy=strategy)
    model = AutoModelForCausalLM.from_pretrained(source)
    expected: dict[tuple[int, str], np.ndarray] = {}
    for row in result.data.rows:
        with torch.no_grad():
            cache = model(torch.tensor([row]), use_cache=True).past_key_values
        for index, layer in enumerate(cache.layers):
            for kind, x in (("k", layer.keys), ("v", layer.values)):
                seen = x.abs().amax((0, 2, 3)).numpy()
                expected[index, kind] = np.maximum(seen, expected.get((index, kind), 0))
    found = in_file(read_scales(tmp_path / "out"))
    assert {index for index, _ in found} == {0, 1}
    expected = by_hand(expected, strategy)
    assert_same({slot: found[slot] for slot in expected}, expected, rtol=3e-6)


def test_c06_a_layer_that_is_not_observed_stops_everything(
    tiny: Callable[..., Path], texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.LlamaAttention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.layer_idx != 1:
            return plain(self, *args, **kwargs)
        name, self.config._attn_implementation_internal = self.config._attn_implementation, "eager"
        try:
            return plain(self, *args, **kwargs)
        finally:
            self.config._attn_implementation_internal = name

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    with pytest.raises(ModelError) as problem:
        calibrate(tiny(num_hidden_layers=3), tmp_path / "out", dataset=str(texts))
    assert "model.layers.1.self_attn" in str(problem.value)
    assert "layers.0" not in str(problem.value) and "layers.2" not in str(problem.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
@pytest.mark.parametrize("query", [True, False])
def test_c12_q_scale_is_that_of_post_rope_queries(
    tiny: Callable[..., Path], texts: Path, tmp_path: Path, strategy: str, query: bool
) -> None:
    source = tiny()
    result = calibrate(
        source, tmp_path / "out", dataset=str(texts), strategy=strategy, query=query, batch_size=1
    )
    scales = read_scales(tmp_path / "out")
    assert scales.has_query == query
    expected = by_hand(
        maxima(AutoModelForCausalLM.from_pretrained(source), batched(result.data.rows)), strategy
    )
    expected = {slot: value for slot, value in expected.items() if query or slot[1] != "q"}
    assert_same(in_file(scales), expected, rtol=1e-6)
    if query:
        shape = (1,) if strategy == "tensor" else (4,)
        assert all(
            layer.q is not None and layer.q.shape == shape for layer in scales.layers.values()
        )


@pytest.mark.parametrize(("kind", "value"), [("k", "nan"), ("v", "inf"), ("q", "inf")])
def test_c18_not_finite_names_layer_and_text(
    tiny: Callable[..., Path], tmp_path: Path, kind: str, value: str
) -> None:
    """Only the token `~` has channels 62 and 63; only one projection of layer 1 reads them."""
    bad = 3 + sorted(ByteLevel.alphabet()).index("~")

    def spoil(model: Any) -> None:
        weight = model.model.embed_tokens.weight
        weight[:, 62:] = 0
        weight[bad, 62:] = 1e4
        for layer in model.model.layers:  # nothing else ever reaches these channels
            layer.self_attn.o_proj.weight[62:] = 0
            layer.mlp.down_proj.weight[62:] = 0
            for other in "qkv":
                getattr(layer.self_attn, f"{other}_proj").weight[:, 62:] = 0
        projection = getattr(model.model.layers[1].self_attn, f"{kind}_proj")
        projection.weight[0, 62] = 3e38
        projection.weight[0, 63] = -3e38 if value == "nan" else 3e38

    rows = ["plain text"] * 3 + ["the ~ one"] + ["more text"] * 2
    data = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": f"{row} {number}"}) for number, row in enumerate(rows)]
    data.write_text("\n".join(lines))
    source = tiny(edit=spoil)
    drawn = load_data(AutoTokenizer.from_pretrained(source), str(data)).rows
    text = next(number for number, row in enumerate(drawn) if bad in row)
    with pytest.raises(DataError, match=rf"layer 1: {kind} .* text {text};"):
        calibrate(source, tmp_path / "out", dataset=str(data))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3_moe"])
def test_the_model_comes_back_as_it_was(tiny: Callable[..., Path], model_type: str) -> None:
    """llm-compressor would round Gemma's norms, and put modules of its own in place of experts."""

    def odd_norms(model: Any) -> None:
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.1, 0.3)

    source = tiny(model_type, dtype="bfloat16", edit=odd_norms)
    model = AutoModelForCausalLM.from_pretrained(source)
    tokenizer = AutoTokenizer.from_pretrained(source)

    def state() -> Any:
        return (
            model.config.to_dict(),
            model.config._attn_implementation,
            model.training,
            sorted(vars(model)),
            [sorted(vars(module)) for module in model.modules()],
            {name: value.clone() for name, value in model.state_dict().items()},
        )

    before = state()
    row = [1, 5, 9, 77, 200]
    collector = Collector(query=True)
    run_oneshot(model, tokenizer, [make_batch([row], [0])], collector=collector)
    assert_same(amax(collector), amax(observe(model, [row], 1)), rtol=0)
    after = state()
    assert before[:-1] == after[:-1]
    assert all(torch.equal(before[-1][name], after[-1][name]) for name in before[-1])


def test_an_existing_output_is_refused_before_any_work(
    tiny: Callable[..., Path], texts: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="overwrite"):
        calibrate(tiny(), tmp_path / "out", dataset="no such file")  # the data is not looked at
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_dry_run_writes_nothing(tiny: Callable[..., Path], texts: Path, tmp_path: Path) -> None:
    result = calibrate(tiny(), tmp_path / "out", dataset=str(texts), dry_run=True)
    assert result.output is None and len(result.data.rows) == len(TEXTS)
    assert list(tmp_path.iterdir()) == []


def test_kinds_are_in_reading_order() -> None:
    assert KINDS == ("q", "k", "v")


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_c13_a_k_bias_of_several_hundred_is_within_its_scale(
    tiny: Callable[..., Path], texts: Path, tmp_path: Path, strategy: str
) -> None:
    """RoPE turns the pair of channels with the token's position: only after it is K what is cached,
    and its maximum more than that of either channel before."""

    def loud_bias(model: Any) -> None:
        bias = model.model.layers[1].self_attn.k_proj.bias
        bias[3], bias[3 + 8] = 400.0, 350.0  # channels 3 and 11 of head 0 turn together

    source = tiny("qwen2", edit=loud_bias)
    result = calibrate(
        source, tmp_path / "out", dataset=str(texts), strategy=strategy, batch_size=1
    )
    model = AutoModelForCausalLM.from_pretrained(source)
    seen = maxima(model, batched(result.data.rows))
    assert 450 < seen[1, "k"][0] < 600 and seen[1, "k"][1] < 100
    assert_same(in_file(read_scales(tmp_path / "out")), by_hand(seen, strategy))
    beyond = next(line for line in result.warnings if line.startswith("beyond 448"))
    assert "layer 1 k" in beyond and "layer 0" not in beyond
    report = next(r for r in result.reports if (r.layer, r.kind) == (1, "k"))
    assert report.clipped_at_one > 0 and report.clipped == 0


def test_c21_layers_of_very_different_v_are_told_apart(
    tiny: Callable[..., Path], texts: Path, tmp_path: Path
) -> None:
    """V up to more than a thousand in one layer, below 0.02 in another: what scale 1.0 would do to
    each, and what the calibrated one does."""

    def spread(model: Any) -> None:
        for layer, largest in ((0, 1272.0), (1, 0.001)):
            weight = model.model.layers[layer].self_attn.v_proj.weight
            weight *= 3 * largest / float(weight.abs().sum(1).max())
        # V is what the norm before it leaves, about one a channel, times these weights
        model.model.layers[0].self_attn.o_proj.weight *= 1e-3

    source = tiny(edit=spread, initializer_range=0.02)
    result = calibrate(source, tmp_path / "out", dataset=str(texts))
    loud, quiet = (next(r for r in result.reports if (r.layer, r.kind) == (n, "v")) for n in (0, 1))
    assert loud.amax > 448 and quiet.amax < 0.02
    assert loud.clipped_at_one > 0 and loud.clipped == 0
    assert quiet.flushed_at_one > 0.5 and quiet.flushed < 0.02
    assert any(line.startswith("beyond 448") and "layer 0 v" in line for line in result.warnings)
    assert result.to_dict()["layers"][2]["clipped_at_one"] == loud.clipped_at_one
