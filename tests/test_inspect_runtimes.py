"""`inspect --runtime`: what engines would do with a checkpoint, by rules from their sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_checkpoints import HEADS, KV_HEADS, attention, declared, write_scaled

from fp8calib.checkpoint import inspect
from fp8calib.checkpoint.names import CURRENT, KV_SCALE, OUTPUT_SCALE, PROJECTION, RUNTIME
from fp8calib.checkpoint.runtimes import rules
from fp8calib.cli import main

ENGINES = ("vllm", "sglang", "trtllm", "fp8calib")


def scales(strategy: str, form: str = "{m}.{k}_scale", kinds: str = "qkv") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    counts = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    return {
        form.format(m=attention(layer), k=kind): rng.uniform(
            0.01, 1, 1 if strategy == "tensor" else counts[kind]
        ).astype(np.float32)
        for layer in range(2)
        for kind in kinds
    }


def made(folder: Path, strategy: str = "tensor", **config: Any) -> Path:
    return write_scaled(folder, scales(strategy), **(declared(strategy) | config))


def test_every_engine_has_rules_for_everything() -> None:
    assert tuple(rules()) == ENGINES
    for engine in rules().values():
        assert set(engine.forms) == {CURRENT, KV_SCALE, OUTPUT_SCALE, PROJECTION, RUNTIME}
        assert set(engine.strategies) == {"tensor", "attn_head"}
        assert engine.read_from and "{checkpoint}" in engine.serve


@pytest.mark.parametrize(
    ("runtime", "strategy", "problem", "serve"),
    [
        ("vllm", "tensor", None, "vllm serve CKPT"),
        ("vllm", "attn_head", None, "vllm serve CKPT"),
        ("sglang", "tensor", None, "python -m sglang.launch_server --model-path CKPT"),
        ("sglang", "attn_head", "ignores a per-head scheme", None),
        ("trtllm", "tensor", "at scale 1.0 whatever a checkpoint holds", None),
        ("trtllm", "attn_head", "reads per-tensor scales only", None),
        ("fp8calib", "tensor", None, "fp8calib run CKPT"),
        ("fp8calib", "attn_head", None, "fp8calib run CKPT"),
    ],
)
def test_what_an_engine_does_with_a_strategy(
    runtime: str, strategy: str, problem: str | None, serve: str | None, tmp_path: Path
) -> None:
    found = inspect(made(tmp_path / "a", strategy), runtime)
    assert found.ok == (problem is None)
    if problem:
        assert problem in " ".join(found.problems)
    else:
        assert found.serve == serve.replace("CKPT", str(tmp_path / "a"))  # type: ignore[union-attr]
    assert found.runtime == runtime and found.rules


@pytest.mark.parametrize(
    ("architecture", "problem"),
    [
        ("LlamaForCausalLM", ""),
        ("Qwen3ForCausalLM", ""),
        ("Qwen2ForCausalLM", "--to sglang` makes the JSON for --quantization-param-path"),
        ("MixtralForCausalLM", "no way to give it scales is known"),
    ],
)
def test_sglangs_model_classes_differ(architecture: str, problem: str, tmp_path: Path) -> None:
    """Some classes' load_weights pass over scales without a word."""
    folder = made(tmp_path / "a", architectures=[architecture])
    assert inspect(folder).ok
    assert problem in " ".join(inspect(folder, "sglang").problems)
    assert inspect(folder, "sglang").ok == (not problem)


@pytest.mark.parametrize(
    ("form", "kinds", "refusing"),
    [
        ("{m}.{k}_proj.{k}_scale", "kv", set()),
        ("{m}.{k}_proj.output_scale", "kv", {"vllm", "trtllm"}),
        ("{m}.kv_scale", "k", {"vllm", "trtllm"}),
        ("{m}.attn.{k}_scale", "kv", {"vllm", "sglang", "trtllm"}),
    ],
)
def test_c08_old_names_by_engine(form: str, kinds: str, refusing: set[str], tmp_path: Path) -> None:
    folder = write_scaled(tmp_path / "a", scales("tensor", form, kinds), **declared("tensor"))
    for engine in ENGINES:
        problems = [p for p in inspect(folder, engine).problems if "is an older name" in p]
        assert bool(problems) == (engine in refusing), (engine, problems)


@pytest.mark.parametrize(
    ("method", "strategy", "refusing"),
    [
        ("fp8", "tensor", set()),
        ("gptq", "tensor", set(ENGINES)),
        ("awq", "tensor", set(ENGINES)),
    ],
)
def test_weights_quantized_by_others(
    method: str, strategy: str, refusing: set[str], tmp_path: Path
) -> None:
    config = {"quantization_config": {"quant_method": method}}
    folder = write_scaled(tmp_path / "a", scales(strategy), **config)
    for engine in ENGINES:
        found = inspect(folder, engine)
        loads_none = [p for p in found.problems if "loads no" in p]
        assert bool(loads_none) == (engine in refusing)
        if engine != "trtllm" and not refusing:
            assert found.serve.endswith(rules()[engine].dtype)
            assert any("stays in 16 bit" in note for note in found.notes)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_two_kv_heads_on_many_ranks(tp: int, tmp_path: Path) -> None:
    folder = made(tmp_path / "a", "attn_head", num_attention_heads=HEADS)
    found = inspect(folder, "vllm", tp)
    assert found.ok == (HEADS % tp == 0)
    held = {1: None, 2: "0, 1", 4: "0, 0, 1, 1", 8: "0, 0, 0, 0, 1, 1, 1, 1"}[tp]
    told = [note for note in found.notes if "KV heads, ranks" in note]
    assert told == ([] if held is None else [f"Of 2 KV heads, ranks 0 to {tp - 1} hold {held}."])
    if tp > 1:
        assert found.serve.endswith(f"--tensor-parallel-size {tp}")
    if tp == 8:
        assert found.problems == ["4 heads cannot be divided among 8 ranks: vLLM does not start"]


def test_ranks_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path / "a", "attn_head")
    assert "2 KV heads cannot be divided among 3 ranks" in inspect(folder, "vllm", 3).problems[1]
    assert inspect(folder, "fp8calib", 2).problems == ["fp8calib runs on one device"]
    for arguments in (["--tp", "5000"], ["--runtime", "tgi"], ["--live", "--runtime", "sglang"]):
        with pytest.raises(SystemExit) as stop:
            main(["inspect", str(folder), *arguments])
        assert stop.value.code == 2
        capsys.readouterr()


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        (["LlamaAttention"], ""),
        (["LlamaAttention", "Qwen2Attention"], "targets attention by"),
        (["re:.*self_attn$"], "targets attention by"),
        (["Linear"], ""),
    ],
)
def test_attention_groups_that_vllm_stumbles_over(
    targets: list[str], problem: str, tmp_path: Path
) -> None:
    config = declared("attn_head")
    config["quantization_config"]["config_groups"] = {"group_0": {"targets": targets}}
    found = inspect(write_scaled(tmp_path / "a", scales("attn_head"), **config))
    assert problem in " ".join(found.problems) and found.ok == (not problem)


def test_per_head_scales_without_config_groups(tmp_path: Path) -> None:
    config = declared("attn_head")
    del config["quantization_config"]["config_groups"]
    found = inspect(write_scaled(tmp_path / "a", scales("attn_head"), **config))
    assert found.problems == [
        "config.json has no config_groups: vLLM stops with a bare AssertionError"
    ]


def test_another_towers_scales_are_not_the_layers(tmp_path: Path) -> None:
    tensors = scales("tensor") | {
        "model.vision_tower.encoder.layers.0.self_attn.k_scale": np.float32([0.5])
    }
    found = inspect(write_scaled(tmp_path / "a", tensors, **declared("tensor")))
    assert found.problems == [
        "model.vision_tower.encoder.layers.0.self_attn.k_scale: the model has no such attention "
        "layer"
    ]


def test_a_silent_fallback_is_exit_code_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path / "a", "attn_head")
    for engine, code in (("vllm", 0), ("sglang", 1), ("trtllm", 1), ("fp8calib", 0)):
        with pytest.raises(SystemExit) as stop:
            main(["inspect", str(folder), "--runtime", engine, "--json"])
        shown = json.loads(capsys.readouterr().out)
        assert (stop.value.code, shown["ok"], shown["runtime"]) == (code, code == 0, engine)
        assert shown["rules"] == rules()[engine].read_from
