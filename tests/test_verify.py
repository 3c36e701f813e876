"""verify: numbers that equal a plain forward pass, gates that broken scales cannot pass."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import call_flat, powers, write_texts
from made_scales import calibrated, make_scales
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp8calib
from fp8calib.checkpoint import open_checkpoint, write_checkpoint
from fp8calib.errors import DataError, ModelError, UserError
from fp8calib.evaluation import Verification, verify
from fp8calib.evaluation.attention_errors import culprits
from fp8calib.evaluation.bootstrap import Estimate, Resampled
from fp8calib.evaluation.gates import GateResult
from fp8calib.evaluation.metrics import compare
from fp8calib.evaluation.summary import CalibrationEffect, suspicious
from fp8calib.recipe import Gates
from fp8calib.scales import LayerScales, ScaleSet

NO_GATES = Gates(**dict.fromkeys(Gates.model_fields))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_texts(tmp_path_factory.mktemp("data"), powers(8)))


def edit_tensors(source: Path, output: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a checkpoint whose tensors `edit` has changed, file by file."""
    output.mkdir()
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            tensors = load_file(file)
            edit(tensors)
            save_file(tensors, output / file.name, metadata={"format": "pt"})
        else:
            (output / file.name).write_bytes(file.read_bytes())
    return output


def numbers(result: Verification, key: str) -> tuple[float, ...]:
    variant = result.variant(key)
    return variant.perplexity, variant.kl.value, variant.top1.value, variant.worst.kl


# --- metrics and intervals


def test_metrics_equal_their_definitions_in_float64() -> None:
    torch.manual_seed(0)
    native, other = torch.randn(2, 37, 1000) * 4
    other = native + other / 3
    targets = torch.randint(0, 1000, (37,))
    first, second = compare([native, other[:, :900]], targets % 900)
    p, q = (x[:, :900].double().log_softmax(-1) for x in (native, other))
    kl = (p.exp() * (p - q)).sum(-1)
    at = torch.arange(37), targets % 900
    torch.testing.assert_close(first.nll, -p[at], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(second.nll, -q[at], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(second.kl, kl, atol=1e-7, rtol=1e-4)
    reverse = (q.exp() * (q - p)).sum(-1)
    torch.testing.assert_close(second.reverse_kl, reverse, atol=1e-7, rtol=1e-4)
    assert torch.equal(second.top1 > 0, p.argmax(-1) == q.argmax(-1))
    among = (q.topk(5).indices == p.argmax(-1, keepdim=True)).any(-1)
    assert torch.equal(second.top5 > 0, among)
    assert 0 < int(second.top1.sum()) < int(second.top5.sum()) < 37


def test_equal_logits_have_a_divergence_of_exactly_zero() -> None:
    native = torch.randn(20, 5000) * 5
    _, same = compare([native, native.clone()], torch.zeros(20, dtype=torch.long))
    assert bool((same.kl == 0).all()) and bool((same.reverse_kl == 0).all())
    assert bool(same.top1.all()) and bool(same.top5.all())


def test_intervals_are_paired_and_shrink_with_the_number_of_documents() -> None:
    rng = np.random.default_rng(1)
    width = {}
    for count in (32, 512):
        tokens = rng.integers(50, 200, count).astype(float)
        hard = rng.normal(2.0, 1.0, count)  # what makes a document hard, to both variants
        totals = Resampled({"n": tokens, "a": hard * tokens, "b": (hard + 0.01) * tokens})
        alone = totals.estimate(lambda t: t["a"] / t["n"])
        difference = totals.estimate(lambda t: (t["b"] - t["a"]) / t["n"])
        assert alone.value == pytest.approx((hard * tokens).sum() / tokens.sum())
        assert alone.low < alone.value < alone.high  # type: ignore[operator]
        assert (difference.low, difference.high) == (pytest.approx(0.01), pytest.approx(0.01))
        width[count] = alone.high - alone.low  # type: ignore[operator]
    assert 3 < width[32] / width[512] < 5.5  # the square root of 16


def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(2)
    held = 0
    for _ in range(60):
        sample = rng.exponential(1.0, 64)
        found = Resampled({"n": np.ones(64), "x": sample}).estimate(lambda t: t["x"] / t["n"])
        held += found.low <= 1.0 <= found.high  # type: ignore[operator]
    assert 50 <= held <= 60


def test_one_document_gives_no_interval() -> None:
    found = Resampled({"n": np.array([4.0]), "x": np.array([2.0])}).estimate(
        lambda t: t["x"] / t["n"]
    )
    assert found == Estimate(0.5, None, None)
    assert not GateResult("max_kl", "v", 1.0, found).conclusive


def test_the_point_estimate_decides_and_an_interval_across_the_limit_is_inconclusive() -> None:
    kl = Estimate(0.04, 0.03, 0.06)
    assert GateResult("max_kl", "v", 0.05, kl).passed
    assert not GateResult("max_kl", "v", 0.05, kl).conclusive
    assert not GateResult("max_kl", "v", 0.035, kl).passed
    assert GateResult("max_kl", "v", 0.07, kl).conclusive
    top1 = Estimate(0.91, 0.905, 0.93)
    assert GateResult("min_top1", "v", 0.9, top1).passed
    assert GateResult("min_top1", "v", 0.9, top1).conclusive
    assert not GateResult("min_top1", "v", 0.92, top1).passed


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (-0.003, -0.001, "closer to native"),
        (0.001, 0.003, "further from native"),
        (-0.001, 0.001, "no significant difference"),
    ],
)
def test_calibration_is_only_praised_for_a_significant_gain(
    low: float, high: float, words: str
) -> None:
    middle = Estimate((low + high) / 2, low, high)
    assert words in CalibrationEffect(0.02, 0.02, middle, middle).sentence()


# --- the comparison


def test_native_perplexity_is_that_of_a_plain_forward_pass(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny("qwen3", max_position_embeddings=1024)
    data = tmp_path / "texts.jsonl"
    rows = [
        f"{n} and {n * n}, " * (10 + 15 * n) for n in range(4)
    ]  # up to 690 tokens: several passes
    data.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    result = verify(str(model), dataset=str(data), max_seq_len=700, gates=NO_GATES)
    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = AutoModelForCausalLM.from_pretrained(model)
    loss, count = 0.0, 0
    for row in rows:
        ids = torch.tensor([tokenizer(row)["input_ids"]])
        with torch.no_grad():
            loss += float(plain(ids, labels=ids).loss) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    assert result.variants[0].perplexity == pytest.approx(math.exp(loss / count), rel=1e-5)
    assert result.variant("scale_1").kl.value > 0
    assert result.dataset["tokens"] == count + len(rows)


def test_a_native_cache_differs_from_itself_by_nothing(
    tiny: Callable[..., Path], texts: str
) -> None:
    result = verify(str(tiny()), dataset=texts, kv_cache_dtype="float32")
    same = result.variant("float32")
    assert same.kl == Estimate(0.0, 0.0, 0.0) and same.worst.kl == 0
    assert same.top1 == Estimate(1.0, 1.0, 1.0)
    assert same.ppl_increase == Estimate(0.0, 0.0, 0.0)
    assert result.ok and all(gate.conclusive for gate in result.gates)


def test_a_plain_model_is_judged_at_scale_1(tiny: Callable[..., Path], texts: str) -> None:
    result = fp8calib.verify(str(tiny()), dataset=texts, gates=NO_GATES)
    assert [variant.key for variant in result.variants] == ["native", "scale_1"]
    assert result.variant("scale_1").gated and result.effect is None
    both = verify(str(tiny()), dataset=texts, gates=NO_GATES, attention="fp8")
    assert [v.key for v in both.variants][1:] == ["scale_1", "scale_1_fp8_attention"]
    assert numbers(both, "scale_1") == numbers(result, "scale_1")
    assert both.variant("scale_1_fp8_attention").kl.value > both.variant("scale_1").kl.value


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_a_calibrated_checkpoint_is_judged_as_it_will_be_served(
    tiny: Callable[..., Path], texts: str, tmp_path: Path, strategy: Any
) -> None:
    calibrated(tiny(), tmp_path / "out", strategy)
    options: dict[str, Any] = {"dataset": texts, "gates": NO_GATES}
    result = verify(str(tmp_path / "out"), **options)
    keys = ["native", "scale_1", "calibrated", "calibrated_fp8_attention"]
    assert [variant.key for variant in result.variants] == keys
    assert [variant.gated for variant in result.variants] == [False, False, False, True]
    assert len({numbers(result, key) for key in keys}) == 4
    # without a q_scale, or when asked for, the accurate arithmetic is what serves
    accurate = verify(str(tmp_path / "out"), attention="accurate", **options)
    assert [v.key for v in accurate.variants if v.gated] == ["calibrated"]
    calibrated(tiny(), tmp_path / "without-q", strategy, query=False)
    without = verify(str(tmp_path / "without-q"), **options)
    assert [v.key for v in without.variants if v.gated] == ["calibrated"]


def test_what_happens_without_the_skip_flag_is_judged_too(
    tiny: Callable[..., Path], texts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = open_checkpoint(tiny()).layers
    scales = make_scales(layers, "tensor")
    # layer 1 is ruined by its scale, and recorded as to be left out
    scales = ScaleSet("tensor", {**scales.layers, 1: LayerScales(*_tiny_scales(layers[1].name))})
    write_checkpoint(tiny(), tmp_path / "out", scales, {"skip_layers": ["1"]}, layers=layers)
    model, gates = str(tmp_path / "out"), Gates(max_ppl_increase=None, max_kl=0.2, min_top1=None)
    result = verify(model, dataset=texts, gates=gates)
    assert result.skip_layers == ["1"] and result.skip_layers_recorded
    assert [gate.variant for gate in result.failed] == ["without_skip_flag"]
    assert [layer.index for layer in culprits(result.layer_errors["without_skip_flag"])] == [1]
    assert verify(model, dataset=texts, gates=gates, assume_skip_flag=True).ok
    explicit = verify(model, dataset=texts, gates=gates, kv_cache_dtype_skip_layers=["0"])
    assert [gate.variant for gate in explicit.failed] == ["calibrated_fp8_attention"]
    code, _, err = call_flat(
        capsys, "verify", model, "--dataset", texts, "--max-kl", "0.2", "--min-top1", "0.01"
    )
    assert code == 1 and "--kv-cache-dtype-skip-layers 1" in err and "without the skip flag" in err


def _tiny_scales(name: str) -> tuple[str, np.ndarray, np.ndarray, np.ndarray]:
    tiny_scale = np.full(1, 1e-6, np.float32)
    return name, tiny_scale, tiny_scale, np.ones(1, np.float32)


def test_c07_all_ones_is_shown_as_scale_1(
    tiny: Callable[..., Path], texts: str, tmp_path: Path
) -> None:
    layers = open_checkpoint(tiny()).layers
    for value, title in ((1.0, None), (0.05, "fp8 at constant scale 0.05")):
        one = np.full(1, value, np.float32)
        same = {layer.index: LayerScales(layer.name, one, one) for layer in layers}
        out = tmp_path / f"constant-{value}"
        write_checkpoint(tiny(), out, ScaleSet("tensor", same), {}, layers=layers)
        result = verify(str(out), dataset=texts, gates=NO_GATES)
        titles = [variant.title for variant in result.variants]
        assert titles == ["native (float32)", "fp8 at scale 1.0", *([title] if title else [])]
        plain = verify(str(tiny()), dataset=texts, gates=NO_GATES)
        assert numbers(result, "scale_1") == numbers(plain, "scale_1")
        if title is None:
            assert any("not calibrated" in warning for warning in result.warnings)
            assert result.effect is None and result.variant("scale_1").gated


def test_c10_the_scales_in_the_file_are_the_ones_in_use(
    tiny: Callable[..., Path], texts: str, tmp_path: Path
) -> None:
    calibrated(tiny(), tmp_path / "out", "attn_head")

    def fourfold(tensors: dict[str, Any]) -> None:
        for name in tensors:
            if name == "model.layers.1.self_attn.v_scale":
                tensors[name] = tensors[name] * 4

    def moved(tensors: dict[str, Any]) -> None:
        """V and its scale divided by 4, the output projection multiplied: the same function."""
        for name in tensors:
            if name.endswith(("v_scale", "v_proj.weight")):
                tensors[name] = tensors[name] / 4
            elif name.endswith("o_proj.weight"):
                tensors[name] = tensors[name] * 4

    options: dict[str, Any] = {"dataset": texts, "gates": NO_GATES}
    before = verify(str(tmp_path / "out"), **options)
    after = verify(str(edit_tensors(tmp_path / "out", tmp_path / "fourfold", fourfold)), **options)
    assert numbers(after, "native") == numbers(before, "native")
    assert numbers(after, "scale_1") == numbers(before, "scale_1")
    assert numbers(after, "calibrated") != numbers(before, "calibrated")
    after = verify(str(edit_tensors(tmp_path / "out", tmp_path / "moved", moved)), **options)
    for key in ("native", "calibrated", "calibrated_fp8_attention"):
        assert numbers(after, key) == numbers(before, key)
    assert numbers(after, "scale_1") != numbers(before, "scale_1")


def test_c13_a_large_key_bias_fails_at_scale_1_and_its_layer_is_named(
    tiny: Callable[..., Path], texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def biased(model: Any) -> None:
        attention = model.model.layers[2].self_attn
        attention.k_proj.bias[[3, 11]] = 2000.0  # two channels that RoPE turns together
        # queries that look there a little, as in the models that have such keys
        attention.q_proj.weight[[3, 11, 19, 27]] /= 100
        attention.q_proj.bias[[3, 11, 19, 27]] = 0.1

    model = tiny("qwen2", num_hidden_layers=4, initializer_range=0.2, edit=biased)
    gates = ["--max-kl", "0.05", "--max-ppl-increase", "9", "--min-top1", "0.01"]
    code, out, err = call_flat(capsys, "verify", str(model), "--dataset", texts, "--json", *gates)
    report = json.loads(out)
    assert code == 1 and not report["ok"]
    errors = {layer["index"]: layer for layer in report["layer_errors"]["scale_1"]}
    assert errors[2]["k_clipped"] > 0.01 and errors[2]["error"] > 0.2
    assert max(errors[index]["error"] for index in (0, 1, 3)) < 0.1
    assert err.endswith("see layer 2")
    code, _, err = call_flat(capsys, "verify", str(model), "--dataset", texts, *gates)
    assert "FP8's usual rounding in: layer 2 (model.layers.2.self_attn)" in err
    code, _, err = call_flat(
        capsys, "verify", str(model), "--dataset", texts, *gates, "--skip-layers", "2"
    )
    assert code == 0, err


def test_another_model_as_the_reference(tiny: Callable[..., Path], texts: str) -> None:
    result = verify(str(tiny()), against=str(tiny()), dataset=texts, gates=NO_GATES)
    assert [variant.key for variant in result.variants] == ["native", "own_native", "scale_1"]
    assert result.variant("own_native").kl.value == 0
    other = verify(str(tiny()), against=str(tiny(seed=1)), dataset=texts, gates=NO_GATES)
    assert other.variant("own_native").kl.value > 0.1
    assert numbers(other, "own_native")[0] == numbers(result, "native")[0]
    foreign = tiny(tokenizer={"pad": False}, edit=lambda model: None)
    data = json.loads((foreign / "tokenizer.json").read_text())
    data["added_tokens"].append({**data["added_tokens"][0], "id": 319, "content": "<new>"})
    (foreign / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match="its tokenizer is not that of"):
        verify(str(tiny()), against=str(foreign), dataset=texts)


# --- text


def test_texts_that_predict_nothing(tiny: Callable[..., Path], tmp_path: Path) -> None:
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": t}) + "\n" for t in ("a", "bcd", "efgh", "i")))
    result = verify(str(tiny()), dataset=str(data), gates=NO_GATES)
    assert result.dataset["documents"] == 2 and result.dataset["tokens"] == 7
    assert any("2 texts of a single token are left out" in line for line in result.warnings)
    data.write_text(json.dumps({"text": "a"}))
    with pytest.raises(DataError, match="nothing to predict"):
        verify(str(tiny()), dataset=str(data))


def test_texts_are_cut_to_what_the_model_can_read(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    data = tmp_path / "texts.jsonl"
    data.write_text(json.dumps({"text": "word " * 100}))
    result = verify(str(tiny()), dataset=str(data), gates=NO_GATES)
    assert result.dataset["tokens"] == 256
    assert any("cut to 256 tokens" in line for line in result.warnings)
    assert any("1 documents are rough" in line for line in result.warnings)


def test_the_text_of_the_calibration_is_pointed_out(
    tiny: Callable[..., Path], texts: str, tmp_path: Path
) -> None:
    fp8calib.calibrate(tiny(), tmp_path / "out", dataset=texts)
    result = verify(str(tmp_path / "out"), dataset=texts, gates=NO_GATES)
    assert any("calibrated on" in line for line in result.warnings)
    assert result.effect is not None and "mean KL" in result.effect.sentence()


def test_nan_is_an_error_that_names_the_layer(tiny: Callable[..., Path], texts: str) -> None:
    def broken(model: Any) -> None:
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")

    with pytest.raises(ModelError, match=r"native .* document 0 .* layer 1 .*, in v") as problem:
        verify(str(tiny(edit=broken)), dataset=texts)
    assert "\n" not in str(problem.value)


# --- the known answer: SmolLM2 with heads far apart


@pytest.fixture(scope="module")
def spread(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 whose first KV head has K times 64 and its third V divided by 64, in every layer,
    which its queries and the output projection undo: in bfloat16 the same function, bit for bit."""

    def scale_heads(tensors: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("k_proj.weight"):  # [3 heads x 64, 576]
                tensor[:64] *= 64
            elif name.endswith("q_proj.weight"):  # [9 heads x 64, 576]
                tensor[: 3 * 64] /= 64
            elif name.endswith("v_proj.weight"):
                tensor[2 * 64 :] /= 64
            elif name.endswith("o_proj.weight"):  # [576, 9 heads x 64]
                tensor[:, 6 * 64 :] *= 64

    return edit_tensors(smollm2, tmp_path_factory.mktemp("spread") / "model", scale_heads)


@pytest.fixture(scope="module")
def spread_head(spread: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("spread") / "attn_head"
    data: dict[str, Any] = {"dataset": "builtin:pydoc", "samples": 12, "max_seq_len": 256}
    fp8calib.calibrate(spread, out, strategy="attn_head", **data)
    return out


PYDOC = ["--dataset", "builtin:pydoc", "--split", "heldout", "--samples", "8"]
PYDOC += ["--max-seq-len", "160", "--no-noise-floor"]


def test_heads_far_apart_fail_at_scale_1_and_pass_with_scales_per_head(
    smollm2: Path, spread: Path, spread_head: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call_flat(capsys, "verify", str(spread), *PYDOC, "--json")
    report = json.loads(out)
    failed = {gate["gate"] for gate in report["gates"] if not gate["passed"]}
    assert code == 1 and {"max_kl", "min_top1"} <= failed
    assert "fails mean KL" in err and "fp8 at scale 1.0" in err and "see layers" in err
    code, out, err = call_flat(capsys, "verify", str(spread_head), *PYDOC, "--json")
    assert code == 0, err
    report = json.loads(out)
    native, at_one, accurate, served = report["variants"]
    assert served["gated"] and served["key"] == "calibrated_fp8_attention"
    assert accurate["kl"]["value"] < 0.03 < 0.06 < at_one["kl"]["value"]
    assert report["effect"]["kl_difference"]["high"] < 0  # calibration helps, beyond chance
    options: dict[str, Any] = {"dataset": "builtin:pydoc", "split": "heldout", "samples": 8}
    plain = verify(str(smollm2), max_seq_len=160, kv_cache_dtype="bfloat16", **options)
    assert plain.variants[0].perplexity == native["perplexity"]


def test_scales_far_too_small_fail(
    spread_head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shrink(tensors: dict[str, Any]) -> None:
        for name in tensors:
            if name.endswith(("k_scale", "v_scale")):
                tensors[name] = tensors[name] / 100

    broken = edit_tensors(spread_head, tmp_path / "broken", shrink)
    code, _, err = call_flat(capsys, "verify", str(broken), *PYDOC)
    assert code == 1 and "mean KL" in err.rpartition("error:")[2]
    assert "further from native than scale 1.0" in err and "FAILS" in err


# --- the command


def test_json_says_everything(
    tiny: Callable[..., Path], texts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrated(tiny(), tmp_path / "out")
    loose = ["--max-ppl-increase", "9", "--max-kl", "9", "--min-top1", "0.01"]
    code, out, _ = call_flat(
        capsys, "verify", str(tmp_path / "out"), "--dataset", texts, "--json", *loose
    )
    report = json.loads(out)
    assert code == 0 and report["ok"]
    assert report["dataset"]["documents"] == 8 and report["versions"]["torch"]
    variant = report["variants"][-1]
    assert variant["kv_cache"].startswith("fp8_e4m3 with tensor scales")
    assert variant["attention"] == "fp8" and variant["kl"]["low"] <= variant["kl"]["value"]
    worst = variant["worst"]
    assert worst["token"] and worst["text_before"] and 0 <= worst["document"] < 8
    assert {gate["gate"] for gate in report["gates"]} == {"max_ppl_increase", "max_kl", "min_top1"}
    assert all(gate["passed"] for gate in report["gates"])


def test_gates_come_from_options_then_the_recipe_then_the_defaults(
    tiny: Callable[..., Path], texts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("gates: {max_kl: 1.0e-9, min_top1: null}\n")
    args = [str(tiny()), "--dataset", texts, "--recipe", str(recipe), "--max-ppl-increase", "9"]
    code, _, err = call_flat(capsys, "verify", *args)
    assert code == 1 and "mean KL" in err and "at most 1e-09" in err
    assert "gate: top-1 agreement" not in err and "at most 900.00%" in err
    assert call_flat(capsys, "verify", *args, "--max-kl", "9")[0] == 0
    _, out, _ = call_flat(capsys, "verify", str(tiny()), "--dataset", texts, "--json")
    limits = {gate["gate"]: gate["limit"] for gate in json.loads(out)["gates"]}
    assert limits and limits.items() <= Gates().model_dump().items()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--kv-cache-dtype", "nvfp4"], "exists only in vLLM"),
        (["--attention", "exact"], "unknown attention 'exact'"),
        (["--kv-cache-dtype", "bfloat16", "--attention", "fp8"], "needs an FP8 cache"),
        (["--skip-layers", "7"], "no attention layer 7"),
        (["--max-kl", "-1"], "--max-kl: Input should be greater than 0"),
        (["--samples", "0"], "samples (0)"),
        (["--dataset", "/no/such.jsonl"], "/no/such.jsonl"),
        (["--recipe", "nope"], "there is no recipe 'nope'"),
        (["--against", "/no/such"], "no such folder"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(
    tiny: Callable[..., Path],
    texts: str,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    message: str,
) -> None:
    code, out, err = call_flat(capsys, "verify", str(tiny()), "--dataset", texts, *args)
    assert code == 2 and out == "" and "Traceback" not in err
    assert message in err.rpartition("error:")[2]


def test_a_perplexity_that_improves_is_pointed_out(tiny: Callable[..., Path], texts: str) -> None:
    result = verify(str(tiny()), dataset=texts, gates=NO_GATES)
    usual = result.variants[1]
    assert suspicious([usual], 8) == []
    better = replace(usual, ppl_increase=Estimate(-0.6, -0.65, -0.5))
    assert "60.0% better" in suspicious([better], 8)[0]
    assert suspicious([better], 3) == []  # chance can do that


@pytest.mark.slow
def test_peak_memory_is_below_one_and_a_half_plain_passes(smollm2: Path) -> None:
    """Both at the same batch of 128 tokens; each in a process of its own."""
    text = "'builtin:pydoc', split='heldout', samples=8"
    plain = f"""
        from fp8calib.attention import use_attention
        from fp8calib.data import load_data
        from fp8calib.runtime.loader import load
        loaded = load({str(smollm2)!r})
        with use_attention(loaded.model, "sdpa"), torch.inference_mode():
            for row in load_data(loaded.tokenizer, {text}, max_seq_len=128).rows:
                loaded.model(torch.tensor([row]), use_cache=False).logits
    """
    verified = f"""
        from fp8calib.evaluation import verify
        verify({str(smollm2)!r}, dataset={text}, attention="fp8", max_seq_len=256)
    """
    peak = {}
    for name, body in (("plain", plain), ("verify", verified)):
        report = "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        code = "\n".join(["import resource, torch", textwrap.dedent(body), report])
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        peak[name] = int(done.stdout.split()[-1])
    assert peak["verify"] < 1.5 * peak["plain"], peak


def test_help_loads_no_torch() -> None:
    code = (
        "import sys, contextlib, io\n"
        "from fp8calib.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    main(['verify', '--help'])\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
