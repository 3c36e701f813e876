"""Every listed architecture is calibrated with the right scales, or refused with the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import write_texts
from made_scales import in_file
from qkv_reference import cached_maxima
from safetensors import safe_open
from tiny import write_composite
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

from fp8calib.architectures import ARCHITECTURES
from fp8calib.attention import handle_attention, plain_attention, probe
from fp8calib.calibration import calibrate
from fp8calib.errors import ModelError

CALIBRATED = [entry.model_type for entry in ARCHITECTURES if not entry.refused]
REFUSED = [entry.model_type for entry in ARCHITECTURES if entry.refused]
COMPOSITE = {"gemma3", "llava", "qwen2_vl"}
LATENT = {"deepseek_v2", "deepseek_v3", "minicpm3"}

# What the shapes of tiny.py do not bring: more layers, so that later ones depend on the attention
# of earlier ones; windows and chunks shorter than the texts; head counts that are no powers of two.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 96, "num_attention_heads": 6, "num_hidden_layers": 3},
    "llama4_text": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "qwen2": {"hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1},
    "qwen3_next": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "gemma2": {"num_hidden_layers": 3, "attn_logit_softcapping": 5.0},
    "gemma": {"head_dim": 24},
    "olmo3": {"sliding_window": 6, "num_hidden_layers": 4},
    "cohere2": {"num_hidden_layers": 4},
    "glm4": {"head_dim": 20},
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
    },
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
    "starcoder2": {"sliding_window": 6},
    "smollm3": {"num_hidden_layers": 4},
    "codegen": {"rotary_dim": 8},
    "deepseek_v2": {
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
    },
}
# transformers' SDPA cannot express these; what it computes is then their eager attention.
EAGER = {"gemma2", "gpt_oss"}
# Layers that re-use the K and V of another: {layer: source}.
SHARED = {"gemma3n_text": {2: 0, 3: 1}, "gemma4_text": {2: 0, 3: 1}}

TEXTS = ["abc xyz 1234", "The quick brown fox jumps over", "0", "~ to be, or not: ~" * 2]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("data"), TEXTS)


@pytest.fixture(scope="module")
def source(
    tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(model_type: str) -> Path:
        if model_type not in COMPOSITE:
            return tiny(model_type, **SHAPES.get(model_type, {}))
        if model_type not in made:
            made[model_type] = write_composite(tmp_path_factory.mktemp(model_type), model_type)
        return made[model_type]

    return make


def load(folder: Path, model_type: str) -> Any:
    auto = AutoModelForMultimodalLM if model_type in COMPOSITE else AutoModelForCausalLM
    return auto.from_pretrained(folder)


@pytest.mark.parametrize("model_type", CALIBRATED)
def test_scales_are_those_of_the_models_own_cache(
    model_type: str, source: Callable[[str], Path], texts: Path, tmp_path: Path
) -> None:
    folder = source(model_type)
    model = load(folder, model_type)
    expected: dict[tuple[int, str], np.ndarray] = {}
    for strategy in ("tensor", "attn_head"):
        for query in (True, False):
            out = tmp_path / f"{strategy}-{query}"
            options = {"strategy": strategy, "query": query, "batch_size": 1}
            result = calibrate(folder, out, dataset=str(texts), **options)
            if not expected:
                how = "eager" if model_type in EAGER else "sdpa"
                seen = cached_maxima(model, result.data.rows, how)
                for layer, origin in SHARED.get(model_type, {}).items():
                    assert (layer, "k") not in seen
                    seen |= {(layer, kind): seen[origin, kind] for kind in "kv"}
                expected = {slot: value.numpy() / np.float32(448) for slot, value in seen.items()}
            found = in_file(out)
            assert found.keys() == {slot for slot in expected if query or slot[1] != "q"}
            for slot, scale in found.items():
                wanted = expected[slot]
                wanted = wanted.max(keepdims=True) if strategy == "tensor" else wanted
                np.testing.assert_allclose(scale, wanted, rtol=1e-6, err_msg=str(slot))


@pytest.mark.parametrize("model_type", CALIBRATED)
def test_the_pass_computes_the_models_own_attention(
    model_type: str, source: Callable[[str], Path]
) -> None:
    """Padding on the left, too: a mask that is lost would show here."""
    model = load(source(model_type), model_type)
    ids = torch.tensor([[0] * 5 + [1, *range(40, 52)], [1, *range(20, 37)]])
    real = (torch.arange(18) >= torch.tensor([[5], [0]])).long()
    if model_type == "qwen3_next":
        ids, real = ids[1:], real[1:]  # linear attention has a state that padding runs through
    inputs = {"input_ids": ids, "attention_mask": real}
    if not model_type.endswith("_vl"):
        inputs["position_ids"] = (real.cumsum(-1) - 1).clamp(min=0)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
        with handle_attention(model, plain_attention):
            found = model(**inputs, use_cache=False).logits
    scale = expected[real.bool()].abs().max()
    assert ((found - expected)[real.bool()].abs().max() / scale) < 2e-5


@pytest.mark.parametrize("model_type", sorted(COMPOSITE))
def test_scales_of_a_composite_model_are_named_as_its_weights(
    model_type: str, source: Callable[[str], Path], texts: Path, tmp_path: Path
) -> None:
    folder = source(model_type)
    calibrate(folder, tmp_path / "out", dataset=str(texts))
    with safe_open(folder / "model.safetensors", "pt") as file:
        projections = {name for name in file.keys() if name.endswith(".k_proj.weight")}  # noqa: SIM118
    language = {name for name in projections if "vision" not in name}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    written = {name for name in index["weight_map"] if name.endswith(".k_scale")}
    assert written == {name.replace("k_proj.weight", "k_scale") for name in language}


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_before_any_weights_are_loaded(
    model_type: str,
    source: Callable[[str], Path],
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = source(model_type)
    reason = next(entry.refused for entry in ARCHITECTURES if entry.model_type == model_type)
    monkeypatch.setattr("fp8calib.model_loading.load_model", lambda *_: pytest.fail("was loaded"))
    for strategy in ("tensor", "attn_head"):
        for dry_run in (True, False):
            with pytest.raises(ModelError) as problem:
                calibrate(
                    folder, tmp_path / "out", dataset=str(texts), strategy=strategy, dry_run=dry_run
                )
            assert reason in str(problem.value)
            assert problem.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model_type", sorted(set(REFUSED) - LATENT))
def test_the_probe_finds_what_the_list_refuses(
    model_type: str, source: Callable[[str], Path]
) -> None:
    reason = r"attention function|mask of its own|no attention layer|two tokens fails"
    with pytest.raises(ModelError, match=reason):
        probe(load(source(model_type), model_type))


def test_any_latent_attention_is_refused(
    tiny: Callable[..., Path], texts: Path, tmp_path: Path
) -> None:
    """By its configuration: model types that are not listed, too."""
    folder = write_config(tiny(), tmp_path / "model", kv_lora_rank=16)
    with pytest.raises(ModelError, match="latent"):
        calibrate(folder, tmp_path / "out", dataset=str(texts))


def test_encoder_decoders_are_refused(
    tiny: Callable[..., Path], texts: Path, tmp_path: Path
) -> None:
    folder = write_config(tiny(), tmp_path / "model", is_encoder_decoder=True)
    with pytest.raises(ModelError, match="encoder-decoder"):
        calibrate(folder, tmp_path / "out", dataset=str(texts))


def write_config(source: Path, folder: Path, **changes: Any) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_attention_that_computes_something_else_is_refused(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose own attention function does more than it tells ours."""
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.eager_attention_forward

    def capped(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        return plain(module, 5 * torch.tanh(query / 5), key, value, mask, **kwargs)

    model = AutoModelForCausalLM.from_pretrained(tiny())
    probe(model)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", capped)
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn .* computes something else"):
        probe(model)
