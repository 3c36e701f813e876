"""Observers, their statistics, the warnings, and `rescale`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import write_texts
from made_scales import in_file
from safetensors import safe_open

from fp8calib.calibration import calibrate, record
from fp8calib.calibration.findings import data_findings, growth_curve, range_findings
from fp8calib.calibration.observers import observed_scale, round_e4m3
from fp8calib.calibration.rescale import rescale
from fp8calib.calibration.statistics import Ranges, RangeStatistics
from fp8calib.checkpoint import inspect, read_scales
from fp8calib.errors import CheckpointError, UserError
from fp8calib.layers import LayerSpec
from fp8calib.recipe import Recipe, RecipeError
from fp8calib.scales import E4M3_MAX, LayerScales, ScaleSet, amax_problems

HEADS, DIM = 3, 16


def values(seed: int, texts: int = 6, tokens: int = 40, tail: float = 3.0) -> torch.Tensor:
    """[texts, HEADS, tokens, DIM]: heads of different ranges, heavy tails."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(texts, HEADS, tokens, DIM, generator=generator)
    x = x.sign() * x.abs() ** tail
    return x * torch.tensor([1.0, 0.01, 70.0]).view(1, HEADS, 1, 1)


def seen(x: torch.Tensor) -> Ranges:
    statistics = RangeStatistics.empty(x.shape[1])
    statistics.reserve(len(x))
    statistics.observe(x, torch.arange(len(x)), None)
    return statistics.numpy()


def same(one: Ranges, other: Ranges) -> bool:
    return all(
        np.array_equal(a, b) for a, b in zip(vars(one).values(), vars(other).values(), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [50, 99, 99.9, 99.99, 99.999, 100])
def test_percentiles_are_torchs_quantiles_within_a_bucket(p: float, dtype: torch.dtype) -> None:
    """At most 1/64 above; never below: nothing is clipped that should not be."""
    x = values(0).to(dtype)
    found = seen(x)
    for head in range(HEADS):
        exact = torch.quantile(
            x[:, head].float().abs().flatten().double(), p / 100, interpolation="higher"
        )
        ratio = found.percentile(p)[head] / float(exact)
        assert 1 - 1e-6 <= ratio <= 1 + 1 / 64 + 1e-6
    everything = x.float().abs()
    exact = torch.quantile(everything.flatten().double(), p / 100, interpolation="higher")
    ratio = found.pooled().percentile(p)[0] / float(exact)
    assert 1 - 1e-6 <= ratio <= 1 + 1 / 64 + 1e-6


def test_rms_amax_and_positions_are_exact_enough() -> None:
    x = values(1)
    found = seen(x)
    np.testing.assert_array_equal(found.amax, x.abs().amax((0, 2, 3)))
    np.testing.assert_array_equal(found.late_amax, x[:, :, 4:].abs().amax((0, 2, 3)))
    np.testing.assert_array_equal(found.text_amax, x.abs().amax((1, 2, 3)))
    np.testing.assert_allclose(found.rms(), x.square().mean((0, 2, 3)).sqrt(), rtol=0.01)
    assert found.count == 6 * 40 * DIM


def test_order_batching_padding_and_merging_change_no_statistic() -> None:
    x = values(2)
    lengths = [40, 3, 17, 25, 40, 1]
    alone = RangeStatistics.empty(HEADS)
    for text in (3, 0, 5, 1, 4, 2):
        alone.reserve(6)
        alone.observe(x[text : text + 1, :, : lengths[text]], torch.tensor([text]), None)
    expected = alone.numpy()

    def padded(texts: list[int], side: str) -> RangeStatistics:
        statistics = RangeStatistics.empty(HEADS)
        batch = torch.full((len(texts), HEADS, 45, DIM), 1e6)
        real = torch.zeros(len(texts), 45, dtype=torch.bool)
        for row, text in enumerate(texts):
            start = 0 if side == "right" else 45 - lengths[text]
            batch[row, :, start : start + lengths[text]] = x[text, :, : lengths[text]]
            real[row, start : start + lengths[text]] = True
        statistics.reserve(max(texts) + 1)
        statistics.observe(batch, torch.tensor(texts), real)
        return statistics

    for side in ("left", "right"):
        first, second = padded([4, 1, 5], side), padded([0, 2, 3], side)
        first.merge(second)
        assert same(first.numpy(), expected)
        assert same(padded([5, 4, 3, 2, 1, 0], side).numpy(), expected)


def test_round_e4m3_is_torchs_cast() -> None:
    x = torch.cat([torch.rand(20_000) * 2.0**e for e in range(-12, 10)] + [torch.arange(449.0)])
    expected = x.clamp(max=448).to(torch.float8_e4m3fn).double()
    np.testing.assert_array_equal(round_e4m3(x.double().numpy()), expected)


def squared_error(x: torch.Tensor, scale: float) -> float:
    stored = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return float((stored * scale - x).double().square().mean())


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
@pytest.mark.parametrize("tail", [1.0, 6.0])
def test_mse_finds_the_scale_of_least_error(strategy: Any, tail: float) -> None:
    """Against a search over the values themselves, twice as fine."""
    x = values(3, texts=20, tokens=100, tail=tail)
    scales = observed_scale("mse", seen(x), strategy)
    heads = [x] if strategy == "tensor" else [x[:, head] for head in range(HEADS)]
    assert scales.shape == (len(heads),)
    for scale, head in zip(scales, heads, strict=True):
        full = float(head.abs().max() / 448)
        best = min(squared_error(head, full * 2.0 ** (step / 64)) for step in range(-8 * 64, 65))
        assert squared_error(head, float(scale)) <= 1.03 * best


def test_mse_clips_where_that_pays() -> None:
    """Values of e4m3's coarse upper half of a binade gain more than one outlier loses."""
    x = torch.full((1, 1, 4000, 16), 1.0)
    x[0, 0, 7, 3] = 500.0
    scales = [float(observed_scale(name, seen(x), "tensor")[0]) for name in ("mse", "absmax")]
    assert scales[0] != scales[1]
    assert squared_error(x, scales[0]) < squared_error(x, scales[1])


@pytest.mark.parametrize("observer", ["absmax", "percentile:99.9", "mse"])
@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_zeros_and_margins(observer: str, strategy: Any) -> None:
    silent = values(5)
    silent[:, 1] = 0
    scale = observed_scale(observer, seen(silent), "attn_head")
    assert scale[1] == 1
    nearly = torch.zeros(2, HEADS, 4000, DIM)
    nearly[0, :, 0, 0] = 3.0  # the 99.9th percentile is zero, the maximum is not
    np.testing.assert_allclose(
        observed_scale("percentile:99.9", seen(nearly), strategy), 3 / 448, rtol=1e-6
    )
    plain = observed_scale(observer, seen(values(5)), strategy)
    wider = observed_scale(observer, seen(values(5)), strategy, margin=1.25)
    np.testing.assert_allclose(wider, 1.25 * plain, rtol=1e-6)


def test_percentile_is_of_the_tensor_or_of_the_head() -> None:
    x = values(6)
    per_head = observed_scale("percentile:99", seen(x), "attn_head")
    for head in range(HEADS):
        exact = torch.quantile(x[:, head].abs().flatten().double(), 0.99)
        np.testing.assert_allclose(per_head[head], exact / 448, rtol=0.02)
    exact = torch.quantile(x.abs().flatten().double(), 0.99)
    np.testing.assert_allclose(
        observed_scale("percentile:99", seen(x), "tensor"), exact / 448, rtol=0.02
    )


@pytest.mark.parametrize(
    "observer", ["minmax", "percentile", "percentile:", "percentile:101", "percentile:9", "MSE", ""]
)
def test_unknown_observers_are_refused(observer: str) -> None:
    with pytest.raises(RecipeError, match="observer"):
        Recipe().with_options(observer=observer)


def test_only_absmax_may_not_clip() -> None:
    scales = ScaleSet("tensor", {0: LayerScales("a", np.ones(1, "f4"), np.ones(1, "f4"))})
    amax: Any = {0: {"k": np.float32([500]), "v": np.float32([400])}}
    assert any("clips" in line for line in amax_problems(scales, amax, 1.0))
    assert amax_problems(scales, amax, 1.0, may_clip=True) == []
    amax[0]["k"] = np.float32([1])
    assert any("far above" in line for line in amax_problems(scales, amax, 1.0, may_clip=True))


def one_layer(found: Ranges, scale: float) -> tuple[ScaleSet, dict[int, Any]]:
    value = np.float32([scale])
    return ScaleSet("tensor", {0: LayerScales("a", value, value)}), {0: {"k": found, "v": found}}


def warnings_of(x: torch.Tensor, scale: float | None = None) -> list[str]:
    found = seen(x)
    scale = float(observed_scale("absmax", found, "tensor")[0]) if scale is None else scale
    return list(range_findings(*one_layer(found, scale)))


def test_ordinary_ranges_give_no_warning() -> None:
    x = torch.rand(20, 2, 64, 16, generator=torch.Generator().manual_seed(0)) * 3
    assert warnings_of(x) == []
    assert list(data_findings([list(range(300)), list(range(500))], 32_000)) == []


def test_few_distinct_tokens() -> None:
    assert "1 among 64, token 1 is 100 %" in next(data_findings([[1] * 64], 32_000))
    assert "3 among 6" in next(data_findings([[1, 2, 3, 1, 2, 3]], 32_000))
    padded = [[7] * 900 + list(range(300))]
    assert "token 7 is 75 %" in next(data_findings(padded, 32_000))


def test_maxima_that_still_grow() -> None:
    x = torch.rand(20, 2, 64, 16, generator=torch.Generator().manual_seed(0))
    x *= torch.linspace(1, 2, 20).view(20, 1, 1, 1)
    found = seen(x)
    curve = growth_curve(found)
    assert len(curve) == 10 and curve[-1] == 1 and curve == sorted(curve)
    assert curve[4] == pytest.approx(float(x[:10].max() / x.max()))
    (warning,) = warnings_of(x)
    assert "2 of 2 maxima grew" in warning
    assert f"after each tenth it was {100 * curve[0]:.0f} " in warning
    assert growth_curve(seen(x[:9])) == []


def test_attention_sinks() -> None:
    x = torch.rand(20, 2, 64, 16, generator=torch.Generator().manual_seed(0))
    x[:, :, 2] *= 40
    (warning,) = warnings_of(x)
    late = float(x[:, :, 4:].max())
    assert f"layer 0 k {float(x.max()):.4g}, {late:.4g} without them" in warning


def test_beyond_448_at_scale_one() -> None:
    x = torch.rand(20, 2, 64, 16, generator=torch.Generator().manual_seed(0)) * 1272
    (warning,) = warnings_of(x)
    share = 100 * float((x > 448).float().mean())
    assert f"up to {float(x.max()):.4g}" in warning
    assert abs(float(warning.split("(")[1].split(" %")[0]) - share) < 2


def test_a_median_among_the_subnormals() -> None:
    x = torch.rand(20, 2, 64, 16, generator=torch.Generator().manual_seed(0)) * 0.02
    (warning,) = warnings_of(x, scale=2.0)
    assert "subnormal" in warning and "100 %" in warning
    assert warnings_of(x, scale=float(x.max() / 448)) == []


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(
        tmp_path_factory.mktemp("data"),
        (f"text {n}: " + "abc XYZ 123. " * (2 + n) for n in range(8)),
    )


def weights(folder: Path) -> dict[str, bytes]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for name, file in index.items():
        if not name.endswith("_scale"):
            with safe_open(folder / file, "pt") as opened:
                found[name] = opened.get_tensor(name).view(torch.uint8).numpy().tobytes()
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {"observer": "percentile:99"},
        {"observer": "mse", "strategy": "attn_head"},
        {"margin": 1.5, "query": False},
        {"strategy": "attn_head", "kv_cache_dtype_skip_layers": ["-1"]},
    ],
    ids=str,
)
def test_rescaling_equals_calibrating_anew(
    tiny: Callable[..., Path], texts: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    source = tiny("gemma3n_text")
    calibrate(source, tmp_path / "one", dataset=str(texts))
    result = rescale(tmp_path / "one", tmp_path / "two", **changes)
    calibrate(source, tmp_path / "anew", dataset=str(texts), **changes)
    found, expected = in_file(tmp_path / "two"), in_file(tmp_path / "anew")
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[slot], expected[slot]) for slot in expected)
    assert weights(tmp_path / "two") == weights(tmp_path / "anew")
    before, after = (
        json.loads((tmp_path / name / "fp8calib.json").read_text()) for name in ("anew", "two")
    )
    assert after.pop("rescaled") is True
    before["warnings"] = [line for line in before["warnings"] if "distinct tokens" not in line]
    assert after == before
    assert (tmp_path / "two" / "config.json").read_bytes() == (
        tmp_path / "anew" / "config.json"
    ).read_bytes()
    kept = [(tmp_path / name / record.HISTOGRAMS).read_bytes() for name in ("one", "two")]
    assert kept[0] == kept[1]
    assert result.scales.strategy == read_scales(tmp_path / "two").strategy
    assert inspect(tmp_path / "two").problems == []
    again = rescale(tmp_path / "two", tmp_path / "three", observer="absmax")
    assert again.reports


def test_the_record_tells_what_the_issue_of_a_scale_was(
    tiny: Callable[..., Path], texts: Path, tmp_path: Path
) -> None:
    calibrate(tiny(), tmp_path / "out", dataset=str(texts), strategy="attn_head")
    content = json.loads((tmp_path / "out" / "fp8calib.json").read_text())
    layer = content["layers"]["1"]
    assert set(layer) == {"name", "spec", "q", "k", "v"}
    statistics = layer["q"]
    names = ["amax", "amax_after_4", "p99_9", "p99_99", "p99_999", "rms", "text"]
    assert set(statistics) == {*names, "count"}
    assert all(len(statistics[name]) == 4 for name in names)
    ordered = [statistics[name] for name in ("rms", "p99_9", "p99_99", "p99_999", "amax")]
    assert (np.diff(np.array(ordered), axis=0) >= 0).all()
    packed = record.unpack(tmp_path / "out" / record.HISTOGRAMS)
    assert packed[1]["q"].amax.tolist() == statistics["amax"]
    assert not (tmp_path / "out" / record.HISTOGRAMS).name.endswith(".safetensors")


def test_what_cannot_be_rescaled(tiny: Callable[..., Path], texts: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not calibrated by fp8calib"):
        rescale(tiny(), tmp_path / "out", observer="mse")
    calibrate(tiny(), tmp_path / "one", dataset=str(texts), query=False)
    with pytest.raises(UserError, match="--no-query"):
        rescale(tmp_path / "one", tmp_path / "out", query=True)
    histograms = tmp_path / "one" / record.HISTOGRAMS
    good = histograms.read_bytes()
    for bad in (b"", good[:200], good[:-30], b"PK" + bytes(100)):
        histograms.write_bytes(bad)
        with pytest.raises(CheckpointError, match="damaged"):
            rescale(tmp_path / "one", tmp_path / "out", observer="mse")
    histograms.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        rescale(tmp_path / "one", tmp_path / "out", observer="mse")
    assert not (tmp_path / "out").exists()


def test_histograms_are_never_unpickled(
    tiny: Callable[..., Path], texts: Path, tmp_path: Path
) -> None:
    calibrate(tiny(), tmp_path / "one", dataset=str(texts))
    histograms = tmp_path / "one" / record.HISTOGRAMS
    with np.load(histograms) as arrays:
        content = {name: arrays[name] for name in arrays.files}
    content["0.k.amax"] = np.array([{"an": "object"}], dtype=object)
    np.savez(histograms, **content)
    with pytest.raises(CheckpointError, match="damaged"):
        rescale(tmp_path / "one", tmp_path / "out", observer="mse")


def test_layer_specs_round_trip() -> None:
    spec = LayerSpec(3, "model.layers.3.self_attn", 8, 2, 64, 64, 128, 50.0, True, 0.125, 1)
    content: Any = json.loads(json.dumps({"layers": {"3": {"spec": vars(spec)}}}))
    assert record.layers_of(content, Path("x")) == [spec]
    with pytest.raises(CheckpointError, match="describe"):
        record.layers_of({"layers": {"3": {"spec": {"rm": 1}}}}, Path("x"))


def test_clipping_observers_clip(tiny: Callable[..., Path], texts: Path, tmp_path: Path) -> None:
    result = calibrate(tiny(), tmp_path / "out", dataset=str(texts), observer="percentile:95")
    assert all(0.01 < report.clipped < 0.06 for report in result.reports)
    assert all(E4M3_MAX * report.scale_max < report.amax for report in result.reports)
