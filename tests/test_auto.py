"""calibrate --auto: the strategy and the skip layers that measuring suggests, and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import call_flat, powers, write_texts

import fp8calib
from fp8calib.checkpoint import open_checkpoint
from fp8calib.cli import main
from fp8calib.errors import UserError
from fp8calib.recipe import Recipe

Tiny = Callable[..., Path]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_texts(tmp_path_factory.mktemp("data"), powers(30)))


def test_tensor_where_heads_are_alike(
    tiny: Tiny, texts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    args = ["--dataset", texts, "--samples", "16", "-o", str(out)]
    code, _, err = call_flat(capsys, "calibrate", "--auto", str(tiny(initializer_range=0.1)), *args)
    assert code == 0
    record = json.loads((out / "fp8calib.json").read_text())
    reasons = record["auto"]["reasons"]
    assert len(reasons) == 5 and all(" ".join(reason.split()) in err for reason in reasons)
    assert "judged on 14 texts" in reasons[0]  # those that calibration did not draw
    assert record["strategy"] == record["recipe"]["calibration"]["strategy"] == "tensor"
    assert "tensor loads on every vLLM backend" in reasons[3] and "none" in reasons[4]
    assert open_checkpoint(out).strategy == "tensor" and record["skip_layers"] == []
    card = (out / "README.md").read_text()
    assert "## Accuracy" in card and "| fp8 calibrated (tensor) |" in card


def test_attn_head_where_one_scale_cannot_serve_all_heads(
    tiny: Tiny, texts: str, tmp_path: Path
) -> None:
    def edit(model: Any) -> None:
        for layer in model.model.layers:  # the same function, with V of two heads far apart
            attention = layer.self_attn
            dim, group = attention.head_dim, attention.num_key_value_groups
            attention.v_proj.weight[:dim] *= 2.0**16
            attention.o_proj.weight[:, : group * dim] /= 2.0**16

    model = tiny(initializer_range=0.15, edit=edit)
    found = fp8calib.calibrate(model, tmp_path / "out", auto=True, dataset=texts, samples=16)
    assert found.recipe.calibration.strategy == "attn_head" and found.skip_layers == []
    assert "better beyond chance" in found.reasons[3]
    assert open_checkpoint(tmp_path / "out").strategy == "attn_head"
    record = json.loads((tmp_path / "out" / "fp8calib.json").read_text())["auto"]
    assert record["difference"]["high"] < 0
    assert record["attn_head"]["value"] < record["tensor"]["value"] / 2


def test_skip_layers_where_the_budget_needs_them(tiny: Tiny, texts: str, tmp_path: Path) -> None:
    """An outlier within a head, which no scale can help: beside K's bias all else becomes zero."""

    def biased(model: Any) -> None:
        attention = model.model.layers[2].self_attn
        attention.k_proj.bias[[3, 11]] = 2.0**18
        attention.q_proj.weight[[3, 11, 19, 27]] = 0
        attention.q_proj.bias[[3, 11, 19, 27]] = 0

    model = tiny("qwen2", num_hidden_layers=4, initializer_range=0.3, edit=biased)
    out, recipe = tmp_path / "out", Recipe().with_gates(max_kl=0.03)
    found = fp8calib.calibrate(model, out, auto=True, dataset=texts, samples=16, recipe=recipe)
    # the first layer of random weights is the most sensitive one; of the others it is the biased
    assert found.skip_layers == ["0", "2"] and "skip layers 0 2:" in found.reasons[4]
    assert open_checkpoint(out).recorded_skip_layers == ["0", "2"]
    assert (found.serve or "").endswith("--kv-cache-dtype-skip-layers 0 2")
    record = json.loads((out / "fp8calib.json").read_text())
    assert record["sensitivity"]["skip_layers"] == ["0", "2"] and record["accuracy"]["ok"]


def test_its_own_choices_cannot_be_given(
    tiny: Tiny, texts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [str(tiny()), "--dataset", texts, "-o", str(tmp_path / "out")]
    for more, message in (
        (["--strategy", "tensor"], "leave --strategy out"),
        (["--skip-layers", "0"], "leave 0 out"),
        (["--device-map", "stream"], "one device in one process"),
    ):
        code, _, err = call_flat(capsys, "calibrate", "--auto", *args, *more)
        assert code == 2 and message in err
    with pytest.raises(UserError, match="auto chooses the strategy"):
        fp8calib.calibrate(tiny(), tmp_path / "out", auto=True, strategy="tensor")
    with pytest.raises(SystemExit) as stop:
        main(["calibrate", *args, "--budget-kl", "0.1"])
    assert stop.value.code == 2 and "--budget-kl is for --auto" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_strategy_of_the_recipe_is_not_used_silently(
    tiny: Tiny, texts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "mine.yaml"
    args = [str(tiny()), "--dataset", texts, "--dry-run", "--samples", "4", "--recipe", str(recipe)]
    said = "--auto chooses the strategy: attn_head, the recipe's, is not used"
    for content, expected in (("strategy: attn_head", True), ("samples: 8", False)):
        recipe.write_text(f"calibration:\n  {content}\n")
        code, _, err = call_flat(capsys, "calibrate", "--auto", *args)
        assert code == 0 and (said in err) == expected and ("is not used" in err) == expected


def test_text_that_predicts_nothing_is_refused(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.jsonl").write_text('{"text": "a"}\n')
    args = ["--dataset", str(tmp_path / "one.jsonl"), "-o", str(tmp_path / "out")]
    code, _, err = call_flat(capsys, "calibrate", "--auto", str(tiny()), *args)
    assert code == 2 and "no text has two tokens" in err and not (tmp_path / "out").exists()
