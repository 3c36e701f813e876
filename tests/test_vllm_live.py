"""`inspect --live` in vLLM itself: architectures, strategies, layouts of files, refusals.

All checkpoints are loaded in one process of vLLM, each with its altered copy; see test_vllm.py for
where its Python comes from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_scales import calibrated
from safetensors.numpy import load_file, save_file
from test_vllm import PYTHON
from tiny import write_model

from fp8calib import calibrate
from fp8calib.checkpoint import open_checkpoint
from fp8calib.checkpoint.live import LiveCheck, live_check, live_checks
from fp8calib.cli import main
from fp8calib.recipe import Recipe

pytestmark = pytest.mark.vllm

# vLLM's CPU kernels take heads of 32 and more.
_WIDE = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128, "dtype": "bfloat16"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "sharded": ("llama", {"max_shard_size": "100KB"}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "mistral-window": ("mistral", {"sliding_window": 16}),
    "gemma2": ("gemma2", {"sliding_window": 16, "query_pre_attn_scalar": 32}),
    "phi3": ("phi3", {"sliding_window": None}),
    "mixtral": ("mixtral", {}),
}
_W8A8 = {
    "quant_stage": {
        "quant_modifiers": {
            "QuantizationModifier": {"targets": ["Linear"], "ignore": ["lm_head"], "scheme": "W8A8"}
        }
    }
}
CASES = [*(f"{name}-{s}" for name in MODELS for s in ("tensor", "attn_head")), "int8-weights"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_text("some text to calibrate with, and a little more of it\n" * 20)
    return str(path)


@pytest.fixture(scope="module")
def checkpoints(text: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("live")
    made = {}
    for name, (model_type, more) in MODELS.items():
        (place / name).mkdir()
        source = write_model(place / name, model_type, **(_WIDE | more))
        for strategy in ("tensor", "attn_head"):
            made[f"{name}-{strategy}"] = place / f"{name}-{strategy}"
            calibrate(
                source, made[f"{name}-{strategy}"], strategy=strategy, dataset=text, max_seq_len=64
            )
    made["int8-weights"] = place / "int8-weights"
    recipe = Recipe(llmcompressor=_W8A8)
    calibrate(place / "llama", made["int8-weights"], recipe=recipe, dataset=text, max_seq_len=64)
    return made


@pytest.fixture(scope="module")
def seen(checkpoints: dict[str, Path]) -> dict[str, LiveCheck]:
    return dict(zip(CASES, live_checks([checkpoints[c] for c in CASES], str(PYTHON)), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_c10_vllm_computes_with_the_files_scales(case: str, seen: dict[str, LiveCheck]) -> None:
    found = seen[case]
    assert found.problems == []
    assert found.kv_cache_dtype == "fp8" and found.compared == 6
    assert found.change > 0 and found.noise == 0


def test_the_embedded_model_by_the_command(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrated(smollm2, tmp_path / "out", "attn_head", link=True)
    with pytest.raises(SystemExit) as stop:
        main(["inspect", str(tmp_path / "out"), "--live", "--python", str(PYTHON), "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert stop.value.code == 0 and shown["live"]["ok"] and shown["live"]["compared"] == 90
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out"]


def test_scales_that_vllm_does_not_use_are_found(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A file that the index does not list: vLLM says nothing and runs at 1.0."""
    import shutil

    broken = Path(shutil.copytree(checkpoints["llama-tensor"], tmp_path / "broken"))
    opened = open_checkpoint(broken)
    shard = broken / opened.files[-1]
    name = "model.layers.0.self_attn.v_scale"
    kept = {key: values for key, values in load_file(shard).items() if key != name}
    save_file({name: load_file(shard)[name]}, broken / "more.safetensors")
    save_file(kept, shard, metadata={"format": "pt"})
    index = json.loads((broken / "model.safetensors.index.json").read_text())
    del index["weight_map"][name]
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    found = live_check(broken, str(PYTHON))
    assert len(found.problems) == 1
    assert "layer 0 (model.layers.0.self_attn): vLLM holds v_scale 1, more" in found.problems[0]


def test_a_checkpoint_that_vllm_refuses(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    broken = Path(shutil.copytree(checkpoints["llama-tensor"], tmp_path / "broken"))
    config = json.loads((broken / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "modelopt"
    (broken / "config.json").write_text(json.dumps(config))
    found = live_check(broken, str(PYTHON))
    assert "vLLM does not run it" in found.problems[0]
