"""Which format the cache gets, and that FP8 pages compute what fake-quantised K and V would.

The oracle: the model's plain attention over K and V that went through the FP8 codec and back. The
engine must give the same logits, up to the order of float32 sums.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fp8_paged_attention as fpa
import numpy as np
import pytest
import torch
from made_scales import calibrated, make_scales, rewritten

from fp8calib.attention import handle_attention, plain_attention
from fp8calib.errors import ScaleError, UserError
from fp8calib.runtime.kv_cache_dtype import KVChoice, choose_kv_format
from fp8calib.runtime.kv_format import KVFormat
from fp8calib.runtime.kv_store import KVStore
from fp8calib.runtime.loader import LoadedModel, load
from fp8calib.runtime.model_runner import ModelRunner
from fp8calib.runtime.scoring import score
from fp8calib.runtime.step_inputs import Chunk
from fp8calib.scales import LayerScales, ScaleSet

Tiny = Callable[..., Path]
ROWS = [list(range(5, 45)), [20, 21, 3], list(range(60, 77))]
# Relative RMS of logits. Sums in another order move K and V by an ulp, and a value that lies on the
# border of two codes then falls on its other side; what FP8 itself changes is over 1e-2.
TOLERANCE = 2e-3


def logits_of(loaded: LoadedModel, fmt: KVFormat, **options: Any) -> list[torch.Tensor]:
    parts: dict[int, list[torch.Tensor]] = {}
    for scored in score(loaded.model, loaded.layers, fmt, ROWS, **options):
        parts.setdefault(scored.row, []).append(scored.logits)
    return [torch.cat(parts[row]) for row in range(len(ROWS))]


def fake_quantised(loaded: LoadedModel, fmt: KVFormat) -> list[torch.Tensor]:
    """Logits of ROWS with K and V of the FP8 layers rounded by the codec, attended plainly."""
    specs = {layer.index: layer for layer in loaded.layers}
    code = fpa.FORMATS[fmt.fp8_format]

    def rounded(x: torch.Tensor, scale: np.ndarray | None) -> torch.Tensor:
        factor = None if scale is None else torch.tensor(scale)
        tokens = x.transpose(1, 2)  # [1, T, H, D]
        return fpa.dequantize(fpa.quantize(tokens, factor, code), factor, code).transpose(1, 2)

    def handler(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        layer = specs[module.layer_idx]
        if fmt.is_fp8(layer):
            own = fmt.scales.layers[layer.index] if fmt.scales else None
            key = rounded(key, own.k if own else None)
            value = rounded(value, own.v if own else None)
        return plain_attention(module, query, key, value, mask, **kwargs)

    with torch.inference_mode(), handle_attention(loaded.model, handler):
        return [loaded.model(torch.tensor([row])).logits[0] for row in ROWS]


def relative_rms(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    one, other = torch.cat(ours), torch.cat(expected)
    return float((one - other).norm() / other.norm())


def differ(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return any(not torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def llama(tiny: Tiny) -> LoadedModel:
    return load(str(tiny("llama")))


# --- what FP8 pages compute --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss", "gemma3n_text", "deepseek_v3"])
@pytest.mark.parametrize("strategy", ["tensor", "attn_head", None])
def test_fp8_pages_equal_fake_quantised_attention(kind: str, strategy: Any, tiny: Tiny) -> None:
    loaded = load(str(tiny(kind)))
    scales = make_scales(loaded.layers, strategy) if strategy else None
    if scales and (shared := [layer for layer in loaded.layers if layer.kv_source is not None]):
        own = {layer.index: scales.layers[layer.kv_source or 0] for layer in shared}
        scales = ScaleSet(scales.strategy, {**scales.layers, **own})
    fmt = KVFormat.fp8(loaded.layers, torch.float32, scales=scales)
    expected = fake_quantised(loaded, fmt)
    assert relative_rms(logits_of(loaded, fmt), expected) < TOLERANCE
    assert relative_rms(logits_of(loaded, fmt, max_batched_tokens=7), expected) < TOLERANCE
    assert relative_rms(logits_of(loaded, KVFormat(torch.float32)), expected) > 5 * TOLERANCE


def test_skipped_layers_and_e5m2(llama: LoadedModel) -> None:
    scales = make_scales(llama.layers, "attn_head")
    for fmt in (
        KVFormat.fp8(llama.layers, torch.float32, scales=scales, skip=[0]),
        KVFormat.fp8(llama.layers, torch.float32, fp8_format="e5m2"),
    ):
        assert relative_rms(logits_of(llama, fmt), fake_quantised(llama, fmt)) < TOLERANCE
    native = KVFormat(torch.float32)
    all_skipped = KVFormat.fp8(llama.layers, torch.float32, scales=scales, skip=[0, 1])
    assert not differ(logits_of(llama, all_skipped), logits_of(llama, native))


def test_fp8_arithmetic_quantises_queries_by_the_grouped_maximum(llama: LoadedModel) -> None:
    """The scales of the two query heads of a group differ: the larger counts."""
    scales = make_scales(llama.layers, "attn_head")
    fmt = KVFormat.fp8(llama.layers, torch.float32, scales=scales, arithmetic="fp8")
    logits = logits_of(llama, fmt)
    assert differ(logits, logits_of(llama, replace(fmt, arithmetic="accurate")))

    def with_q(change: Callable[[np.ndarray], np.ndarray]) -> ScaleSet:
        layers = {
            index: LayerScales(layer.name, layer.k, layer.v, change(layer.q))  # type: ignore[arg-type]
            for index, layer in scales.layers.items()
        }
        return ScaleSet("attn_head", layers)

    def largest(q: np.ndarray) -> np.ndarray:
        return q.reshape(2, 2).max(1).repeat(2)

    def smallest(q: np.ndarray) -> np.ndarray:
        return q.reshape(2, 2).min(1).repeat(2)

    assert not differ(logits, logits_of(llama, replace(fmt, scales=with_q(largest))))
    assert differ(logits, logits_of(llama, replace(fmt, scales=with_q(smallest))))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_c19_head_sizes(head_dim: int, tiny: Tiny) -> None:
    loaded = load(str(tiny("llama", head_dim=head_dim)))
    assert {layer.head_dim for layer in loaded.layers} == {head_dim}
    for fmt in (KVFormat(torch.float32), KVFormat.fp8(loaded.layers, torch.float32)):
        assert relative_rms(logits_of(loaded, fmt), fake_quantised(loaded, fmt)) < TOLERANCE


def test_c19_keys_and_values_of_different_sizes(tiny: Tiny) -> None:
    sizes = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    loaded = load(str(tiny("deepseek_v3", **sizes)))
    assert {(layer.head_dim, layer.v_head_dim) for layer in loaded.layers} == {(192, 128)}
    for fmt in (KVFormat(torch.float32), KVFormat.fp8(loaded.layers, torch.float32)):
        assert relative_rms(logits_of(loaded, fmt), fake_quantised(loaded, fmt)) < TOLERANCE


def test_scored_pieces_are_the_same_for_every_format(llama: LoadedModel) -> None:
    def pieces(fmt: KVFormat) -> list[tuple[int, int, int]]:
        found = score(llama.model, llama.layers, fmt, ROWS, max_batched_tokens=20)
        return [(scored.row, scored.start, len(scored.logits)) for scored in found]

    # The first row takes two passes of its own; the other two share one.
    expected = [(0, 0, 20), (0, 20, 20), (1, 0, 3), (2, 0, 17)]
    assert pieces(KVFormat(torch.float32)) == expected
    assert pieces(KVFormat.fp8(llama.layers, torch.float32)) == expected


def multiply_scales(folder: Path, ending: str, factor: float) -> None:
    rewritten(
        folder,
        lambda name, values: {
            name: values * np.float32(factor) if name.endswith(ending) else values
        },
    )


def drop_scales(folder: Path, ending: str) -> None:
    rewritten(folder, lambda name, values: {} if name.endswith(ending) else {name: values})


# --- the scales are used -----------------------------------------------------------------------


def test_c10_another_v_scale_in_the_file_changes_the_output(
    llama: LoadedModel, tiny: Tiny, tmp_path: Path
) -> None:
    """Values move by two powers of two in e4m3: the small ones lose bits."""
    calibrated(tiny("llama"), tmp_path / "one")
    calibrated(tiny("llama"), tmp_path / "other")
    multiply_scales(tmp_path / "other", "layers.1.self_attn.v_scale", 4)
    outputs = [
        logits_of(loaded, choose_kv_format(loaded).kv_format)
        for loaded in (load(str(tmp_path / "one")), load(str(tmp_path / "other")))
    ]
    assert differ(*outputs)


@pytest.mark.parametrize("kind", ["k", "v"])
def test_c10_pages_times_s_with_scale_over_s_give_the_same_output(
    kind: str, llama: LoadedModel
) -> None:
    """K or V in the pages doubled, their scale halved: bit for bit the same next logits."""
    layers = {
        layer.index: LayerScales(
            layer.name, np.full(1, 0.5, np.float32), np.full(1, 0.5, np.float32)
        )
        for layer in llama.layers
    }
    fmt = KVFormat.fp8(llama.layers, torch.float32, scales=ScaleSet("tensor", layers))
    store = KVStore(llama.layers, fmt, [4], 16)
    for cache in store.layers.values():
        getattr(cache, f"{kind}_pages").zero_()
    runner, table = ModelRunner(llama.model, store), [[0, 1, 2, 3]]
    runner.forward([Chunk(ROWS[0], 0, table, 0)])

    def next_logits() -> torch.Tensor:
        return runner.forward([Chunk([7], len(ROWS[0]), table, 1)])

    before = next_logits()
    for index, cache in store.layers.items():
        codes = getattr(cache, f"{kind}_pages").view(fpa.E4M3.dtype)
        assert codes.float().abs().max() <= 224, "doubling would clip"
        codes.copy_((codes.float() * 2).to(fpa.E4M3.dtype))
        halved = replace(cache, **{f"{kind}_scale": getattr(cache, f"{kind}_scale") / 2})
        store.layers[index] = halved
    # The new token's K and V are stored by the new scale, which for a power of two is the same.
    assert torch.equal(next_logits(), before)


def test_c10_weights_and_scale_multiplied_together_change_nothing(
    tiny: Tiny, tmp_path: Path
) -> None:
    """K times 4 with Q over 4, V times 4 with the output projection over 4: the same function; with
    k_scale and v_scale times 4, the same bits."""

    def multiply(model: Any) -> None:
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight *= 4
            layer.self_attn.q_proj.weight /= 4
            layer.self_attn.v_proj.weight *= 4
            layer.self_attn.o_proj.weight /= 4

    calibrated(tiny("llama"), tmp_path / "one", "attn_head", query=False)
    other = tiny("llama", edit=multiply)
    calibrated(other, tmp_path / "other", "attn_head", query=False)
    multiply_scales(tmp_path / "other", "_scale", 4)
    outputs = [
        logits_of(loaded, choose_kv_format(loaded).kv_format)
        for loaded in (load(str(tmp_path / "one")), load(str(tmp_path / "other")))
    ]
    assert not differ(*outputs)


# --- the words of --kv-cache-dtype -------------------------------------------------------------


@pytest.fixture(scope="module")
def calibrated_llama(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("calibrated") / "out"
    calibrated(tiny("llama", dtype="bfloat16"), folder, "attn_head")
    return load(str(folder))


def warned(choice: KVChoice, text: str) -> bool:
    return any(text in warning for warning in choice.warnings)


def test_auto_follows_the_checkpoint(llama: LoadedModel, calibrated_llama: LoadedModel) -> None:
    plain = choose_kv_format(llama)
    assert plain.kv_format == KVFormat(torch.float32) and not plain.warnings
    choice = choose_kv_format(calibrated_llama)
    assert choice.kv_format.fp8_layers == {0, 1} and not choice.warnings
    assert choice.kv_format.scales is not None and choice.kv_format.scales.has_query
    assert choice.kv_format.describe(calibrated_llama.layers) == "fp8_e4m3 with attn_head scales"


@pytest.mark.parametrize("word", ["bfloat16", "float16", "float32"])
def test_an_explicit_native_dtype_beats_the_checkpoint(
    word: str, calibrated_llama: LoadedModel
) -> None:
    choice = choose_kv_format(calibrated_llama, word)
    assert choice.kv_format == KVFormat(getattr(torch, word)) and not choice.warnings


@pytest.mark.parametrize("word", ["fp8", "fp8_e4m3"])
def test_fp8_takes_the_scales_or_warns(
    word: str, llama: LoadedModel, calibrated_llama: LoadedModel
) -> None:
    choice = choose_kv_format(calibrated_llama, word)
    assert choice.kv_format.describe(calibrated_llama.layers) == "fp8_e4m3 with attn_head scales"
    assert not choice.warnings
    choice = choose_kv_format(llama, word)
    assert choice.kv_format == KVFormat.fp8(llama.layers, torch.float32)
    assert warned(choice, "no scales in this checkpoint: the FP8 cache runs at scale 1.0")


def test_e5m2_runs_at_one_and_says_what_vllm_does(
    llama: LoadedModel, calibrated_llama: LoadedModel
) -> None:
    choice = choose_kv_format(calibrated_llama, "fp8_e5m2")
    assert choice.kv_format.scales is None and choice.kv_format.fp8_format == "e5m2"
    assert warned(choice, "vLLM refuses fp8_e5m2 for this checkpoint")
    assert not warned(choose_kv_format(llama, "fp8_e5m2"), "vLLM refuses")


@pytest.mark.parametrize(
    ("word", "where"),
    [
        ("fp8_inc", "only in vLLM, for Intel Gaudi"),
        ("fp8_ds_mla", "only in vLLM, for DeepSeek's sparse attention"),
        ("int8_per_token_head", "only in vLLM, which makes its scales while it runs"),
        ("fp8_per_token_head", "only in vLLM, which makes its scales while it runs"),
        ("nvfp4", "only in vLLM, for NVIDIA Blackwell"),
        ("nvfp4_4over6", "only in vLLM, for NVIDIA Blackwell"),
        ("turboquant_k8v4", "only in vLLM"),
        ("int3", "unknown KV-cache dtype 'int3'"),
    ],
)
def test_other_words_are_refused_with_where_they_exist(
    word: str, where: str, llama: LoadedModel
) -> None:
    with pytest.raises(UserError, match=where) as refusal:
        choose_kv_format(llama, word)
    assert "here there are auto, bfloat16" in str(refusal.value)


def test_fp8_attention_needs_an_fp8_cache(
    llama: LoadedModel, calibrated_llama: LoadedModel
) -> None:
    for loaded, word in ((llama, "auto"), (calibrated_llama, "bfloat16")):
        with pytest.raises(UserError, match="--attention fp8 needs an FP8 cache"):
            choose_kv_format(loaded, word, attention="fp8")
    choice = choose_kv_format(calibrated_llama, attention="fp8")
    assert choice.kv_format.arithmetic == "fp8" and not choice.warnings


def test_fp8_attention_without_q_scale_warns(tiny: Tiny, tmp_path: Path) -> None:
    calibrated(tiny("llama"), tmp_path / "out", query=False)
    choice = choose_kv_format(load(str(tmp_path / "out")), attention="fp8")
    assert warned(choice, "there is no q_scale, so queries are quantized at 1.0")


def test_a_missing_scale_is_refused_unless_it_may_be_one(tiny: Tiny, tmp_path: Path) -> None:
    scales = calibrated(tiny("llama"), tmp_path / "out")
    drop_scales(tmp_path / "out", "layers.1.self_attn.v_scale")
    loaded = load(str(tmp_path / "out"))
    for word in ("auto", "fp8"):
        with pytest.raises(ScaleError, match=r"lacks layer 1 .*v_scale; .*--missing-scales one"):
            choose_kv_format(loaded, word)
    choice = choose_kv_format(loaded, missing_scales="one")
    found = choice.kv_format.scales
    assert found is not None and warned(choice, "1 scales are missing and run at 1.0")
    assert found.layers[1].v.tolist() == [1.0]
    assert found.layers[1].k.tolist() == scales.layers[1].k.tolist()
    assert choose_kv_format(loaded, "bfloat16").warnings == []


def test_a_declared_scheme_without_any_scale_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    calibrated(tiny("llama"), tmp_path / "out")
    drop_scales(tmp_path / "out", "_scale")
    with pytest.raises(ScaleError, match="is calibrated but lacks layer 0"):
        choose_kv_format(load(str(tmp_path / "out")))


def test_scales_of_one_are_called_not_calibrated(tiny: Tiny, tmp_path: Path) -> None:
    calibrated(tiny("llama"), tmp_path / "out")
    rewritten(tmp_path / "out", lambda name, values: {name: np.ones_like(values)})
    choice = choose_kv_format(load(str(tmp_path / "out")))
    assert warned(choice, "every scale is exactly 1.0: this checkpoint is not calibrated")


def test_scales_without_a_scheme_stay_unused_under_auto(tiny: Tiny, tmp_path: Path) -> None:
    scales = calibrated(tiny("llama"), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    loaded = load(str(tmp_path / "out"))
    choice = choose_kv_format(loaded)
    assert choice.kv_format == KVFormat(torch.float32)
    assert warned(choice, "declares no kv_cache_scheme: auto stays in float32")
    found = choose_kv_format(loaded, "fp8").kv_format.scales
    assert found is not None and found.layers[0].k.tolist() == scales.layers[0].k.tolist()


def test_skip_layers_of_the_user_beat_the_recorded_ones(tiny: Tiny, tmp_path: Path) -> None:
    calibrated(tiny("gemma2"), tmp_path / "out", skip_layers=["sliding_window"])
    loaded = load(str(tmp_path / "out"))
    choice = choose_kv_format(loaded)
    assert choice.kv_format.fp8_layers == {1}
    assert (choice.skip_layers, choice.recorded) == (["sliding_window"], True)
    choice = choose_kv_format(loaded, skip_layers=["-1"])
    assert choice.kv_format.fp8_layers == {0}
    assert (choice.skip_layers, choice.recorded) == (["1"], False)
    assert choose_kv_format(loaded, skip_layers=[]).kv_format.fp8_layers == {0, 1}
    native = choose_kv_format(loaded, "bfloat16")
    assert (native.skip_layers, native.recorded, native.warnings) == ([], False, [])
    useless = choose_kv_format(loaded, "bfloat16", skip_layers=["0"])
    assert useless.skip_layers == [] and "skip layers change nothing" in useless.warnings[0]
    for word in ("auto", "bfloat16"):
        with pytest.raises(UserError, match="there is no attention layer 7"):
            choose_kv_format(loaded, word, skip_layers=["7"])
