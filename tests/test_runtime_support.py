"""What the runtime refuses, by name and reason, and how it loads what others would mis-load."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy import by_engine
from made_scales import calibrated
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, LlamaConfig

from fp8calib.errors import CheckpointError, ModelError
from fp8calib.runtime.loader import load, without_attention_quantization
from fp8calib.runtime.support import context_limit, length_dependent_rope

Tiny = Callable[..., Path]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("llama4_text", "Llama4ForCausalLM .*layer 0 is chunked attention"),
        ("qwen3_next", "Qwen3NextForCausalLM .*layer 0 is linear attention.*no recurrent state"),
        ("falcon", "FalconForCausalLM.*do not call transformers' attention function"),
        ("bloom", "BloomForCausalLM.*do not call transformers' attention function"),
        ("gptj", "GPTJForCausalLM.*do not call transformers' attention function"),
    ],
)
def test_architectures_that_would_run_wrongly_are_refused(
    kind: str, message: str, tiny: Tiny
) -> None:
    with pytest.raises(ModelError, match=message):
        load(str(tiny(kind)))


def test_hybrids_are_refused_before_their_weights_are_read(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny("qwen3_next")
    monkeypatch.setattr("fp8calib.runtime.loader.load_model", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(ModelError, match="linear attention"):
        load(str(folder))


def test_bidirectional_attention_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn.* is not causal"):
        load(str(tiny("gemma3_text", use_bidirectional_attention=True)))


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "default"}, 4096),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}, 4096),
        ({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 2048}, 2048),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 1024,
            },
            1024,
        ),
    ],
)
def test_rope_that_changes_with_length_limits_it(rope: dict[str, Any], limit: int) -> None:
    config = LlamaConfig(
        max_position_embeddings=4096,
        hidden_size=64,
        num_attention_heads=4,
        rope_parameters={"rope_theta": 1e4, **rope},
    )
    assert context_limit(config) == limit
    # Its passes depend on the largest position: they cannot be captured as CUDA graphs.
    assert length_dependent_rope(config) == (rope["rope_type"] if limit < 4096 else None)


def test_a_calibrated_checkpoint_is_loaded_without_fake_quantisation(
    tiny: Tiny, tmp_path: Path
) -> None:
    """transformers would install hooks that round K and V once more, and q_scale parameters."""
    calibrated(tiny("llama"), tmp_path / "out")
    loaded = load(str(tmp_path / "out"))
    assert not hasattr(loaded.model.config, "quantization_config")
    assert not [name for name, _ in loaded.model.named_parameters() if "scale" in name]
    assert not [m for m in loaded.model.modules() if hasattr(m, "quantization_scheme")]
    plain = load(str(tiny("llama")))
    for name, weight in plain.model.state_dict().items():
        assert torch.equal(weight, loaded.model.state_dict()[name])


def reports(folder: Path) -> str:
    """What transformers logs when it loads `folder`."""

    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger("transformers").addHandler(handler)
    try:
        load(str(folder))
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    return stream.getvalue()


def test_scales_are_no_surprise_but_missing_weights_are(tiny: Tiny, tmp_path: Path) -> None:
    calibrated(tiny("llama"), tmp_path / "out")
    assert reports(tmp_path / "out") == ""
    source = tiny("llama", edit=lambda model: None)
    weights = load_file(source / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        load(str(source), device="cpu")


def test_only_what_concerns_attention_is_taken_out_of_the_config() -> None:
    weights = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}
    attention = {"targets": ["LlamaAttention"], "weights": None, "input_activations": {}}
    section = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": weights, "group_1": attention},
        "kv_cache_scheme": {"num_bits": 8},
    }
    config = LlamaConfig(quantization_config=section)
    stripped = without_attention_quantization(config)
    assert stripped.quantization_config == {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": weights},
    }
    assert config.quantization_config["kv_cache_scheme"], "the original is left as it was"
    config.quantization_config = {**section, "config_groups": {"group_1": attention}}
    assert not hasattr(without_attention_quantization(config), "quantization_config")
    config.quantization_config = {"quant_method": "fp8", "kv_cache_scheme": {}}
    assert without_attention_quantization(config).quantization_config == config.quantization_config


@pytest.fixture(scope="module", params=["FP8_DYNAMIC", "W4A16"])
def quantized_source(
    request: pytest.FixtureRequest, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A tiny Llama whose weights llm-compressor has quantized, as it saves them."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import fp8calib.calibration  # noqa: F401  (quietens llm-compressor)

    shape = {"hidden_size": 128, "intermediate_size": 256, "dtype": "bfloat16"}
    source = tiny("llama", **shape)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="bfloat16")
    recipe = QuantizationModifier(targets="Linear", scheme=request.param, ignore=["lm_head"])
    folder = tmp_path_factory.mktemp("quantized") / "model"
    oneshot(model=model, recipe=recipe)
    model.save_pretrained(folder, save_compressed=True)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def test_quantized_weights_run(quantized_source: Path, tmp_path: Path) -> None:
    """Natively with the tokens that transformers gives, and with calibrated FP8 pages."""
    from transformers import AutoModelForCausalLM

    section = AutoConfig.from_pretrained(quantized_source).quantization_config
    assert section["quant_method"] == "compressed-tensors" and section["config_groups"]
    prompt = list(range(40, 60))
    plain = AutoModelForCausalLM.from_pretrained(quantized_source, dtype="float32")
    tokens = plain.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    expected = tokens[0, len(prompt) :].tolist()
    source = load(str(quantized_source), dtype="float32")
    assert by_engine(source, [prompt], 12) == [expected]
    calibrated(quantized_source, tmp_path / "out", query=False)
    loaded = load(str(tmp_path / "out"), dtype="float32")
    assert by_engine(loaded, [prompt], 12, kv_cache_dtype="float32") == [expected]
    fp8 = by_engine(loaded, [prompt], 12)
    assert len(fp8[0]) == 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bits": 4}, "num_bits 4"),
        ({"type": "int"}, "type int"),
        ({"strategy": "channel"}, "strategy channel"),
        ({"strategy": "no_such"}, "strategy no_such"),
        ({"symmetric": False}, "symmetric false"),
        ({"dynamic": True}, "dynamic true"),
    ],
)
def test_c15_refused_schemes_are_refused_before_weights_are_read(
    change: dict[str, Any],
    message: str,
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calibrated(tiny("llama"), tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["kv_cache_scheme"] |= change
    file.write_text(json.dumps(config))
    monkeypatch.setattr("fp8calib.runtime.loader.load_model", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(CheckpointError, match=message):
        load(str(tmp_path / "out"))
