"""Models that do not fit on one device: the same statistics, however their layers are held."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import write_texts

from fp8calib.calibration import calibrate, record
from fp8calib.errors import UserError
from fp8calib.model_loading import load_model


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("data"), ("abc xyz " * n for n in range(1, 5)))


@pytest.mark.parametrize("device_map", ["auto", "stream"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3_moe", "gemma3n_text"])
def test_device_maps_change_nothing(
    tiny: Callable[..., Path], texts: Path, tmp_path: Path, model_type: str, device_map: str
) -> None:
    source = tiny(model_type, dtype="bfloat16")
    plain = calibrate(source, tmp_path / "plain", dataset=str(texts))
    calibrate(source, tmp_path / "mapped", dataset=str(texts), device_map=device_map)
    found = [(tmp_path / name / record.HISTOGRAMS).read_bytes() for name in ("plain", "mapped")]
    assert found[0] == found[1]
    assert plain.reports


@pytest.mark.parametrize("tied", [True, False])
def test_a_streamed_model_holds_its_embeddings_only(tiny: Callable[..., Path], tied: bool) -> None:
    source = tiny("llama", tie_word_embeddings=tied)
    model = load_model(source, "cpu", device_map="stream")
    held = {name for name, weight in model.named_parameters() if weight.device.type != "meta"}
    assert held == {"model.embed_tokens.weight", "model.norm.weight"}
    with torch.no_grad():
        streamed = model(torch.tensor([[1, 5, 9]])).logits
        expected = load_model(source, "cpu")(torch.tensor([[1, 5, 9]])).logits
    assert torch.equal(streamed, expected)


def test_unknown_device_map(tiny: Callable[..., Path], texts: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="auto or stream"):
        calibrate(tiny(), tmp_path / "out", dataset=str(texts), device_map="balanced")
