"""transformers loads what we write, with exactly the file's scales."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_scales import calibrated

SOURCES: dict[str, dict[str, Any]] = {
    "single": {},
    "sharded": {"max_shard_size": "60KB"},
    "tied": {"tie_word_embeddings": True},
    "bfloat16": {"dtype": "bfloat16", "max_shard_size": "60KB", "tie_word_embeddings": True},
}


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
@pytest.mark.parametrize("source", SOURCES)
def test_transformers_loads_exactly_the_files_scales(
    source: str, strategy: Any, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    original = tiny("llama", **SOURCES[source])
    scales = calibrated(original, tmp_path / "out", strategy)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    modules = dict(model.named_modules())
    for layer in scales.layers.values():
        for kind in ("k", "v"):
            held = getattr(modules[layer.name], f"{kind}_scale")
            meant = torch.from_numpy(getattr(layer, kind)).to(model.dtype)
            assert torch.equal(held.flatten().cpu(), meant)
    plain = AutoModelForCausalLM.from_pretrained(original)
    for name, weight in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == bool(SOURCES[source].get("tie_word_embeddings"))
    with torch.no_grad():
        logits = model(torch.tensor([[1, 5, 9, 17]])).logits
    assert torch.isfinite(logits).all()


def test_a_file_named_model_safetensors_would_hide_the_scales(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """The reason why the weights are renamed: transformers looks for that name first."""
    import torch
    from transformers import AutoModelForCausalLM

    scales = calibrated(tiny(), tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").write_bytes(
        (tiny() / "model.safetensors").read_bytes()
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    held = model.model.layers[1].self_attn.k_scale.detach()
    assert not torch.equal(held, torch.from_numpy(scales.layers[1].k))


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_the_embedded_model_loads(strategy: Any, smollm2: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    scales = calibrated(smollm2, tmp_path / "out", strategy, link=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for index, layer in enumerate(model.model.layers):
        held = layer.self_attn.v_scale.flatten()
        assert torch.equal(held, torch.from_numpy(scales.layers[index].v).to(held.dtype))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    tokens = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        assert torch.isfinite(model(**tokens).logits).all()
