"""Where a loss comes from: layers made fragile on purpose are found, and nothing else is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fp8_paged_attention as fpa
import numpy as np
import pytest
import torch
from commands import call_flat, powers, write_texts
from made_scales import make_scales
from safetensors.torch import load_file, save_file

import fp8calib
from fp8calib.attention import handle_attention, plain_attention
from fp8calib.calibration.rescale import rescale
from fp8calib.checkpoint import open_checkpoint
from fp8calib.checkpoint.amend import amend
from fp8calib.errors import UserError
from fp8calib.evaluation import verify
from fp8calib.evaluation.attention_errors import layer_errors
from fp8calib.evaluation.sensitivity import sensitivity
from fp8calib.evaluation.sensitivity_measure import Exemption, Measurements, Memory
from fp8calib.recipe import Gates
from fp8calib.runtime.kv_format import KVFormat
from fp8calib.runtime.kv_store import KVStore
from fp8calib.runtime.loader import LoadedModel, load
from fp8calib.runtime.scoring import score
from fp8calib.scales import LayerScales, ScaleSet, scale_from_amax

Tiny = Callable[..., Path]
ROWS = [list(range(5, 45)), [20, 21, 3], list(range(60, 77))]


# --- pages of K and V in different formats


@pytest.mark.parametrize("native", ["k", "v"])
@pytest.mark.parametrize("arithmetic", ["accurate", "fp8"])
def test_a_layer_may_keep_k_or_v_native(native: str, arithmetic: Any, tiny: Tiny) -> None:
    """The oracle: plain attention over K or V that went through the codec and back."""
    loaded = load(str(tiny()))
    scales = make_scales(loaded.layers, "attn_head")
    bare: dict[str, Any] = {f"native_{native}": [layer.index for layer in loaded.layers]}
    fmt = KVFormat.fp8(loaded.layers, torch.float32, scales=scales, arithmetic=arithmetic, **bare)

    def rounded(x: torch.Tensor, scale: Any) -> torch.Tensor:
        codes = fpa.quantize(x.transpose(1, 2), torch.tensor(scale))
        return fpa.dequantize(codes, torch.tensor(scale)).transpose(1, 2)

    def handler(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        own = scales.layers[module.layer_idx]
        k, v = (k, rounded(v, own.v)) if native == "k" else (rounded(k, own.k), v)
        return plain_attention(module, q, k, v, mask, **kwargs)

    with torch.inference_mode(), handle_attention(loaded.model, handler):
        expected = torch.cat([loaded.model(torch.tensor([row])).logits[0] for row in ROWS])
    for limit in (512, 1):  # whole prompts, then token by token
        ours = torch.cat(
            [
                part.logits
                for part in score(loaded.model, loaded.layers, fmt, ROWS, max_batched_tokens=limit)
            ]
        )
        assert float((ours - expected).norm() / expected.norm()) < 2e-3


def test_pages_of_two_dtypes_are_counted_and_refused_by_triton(tiny: Tiny) -> None:
    layers = load(str(tiny())).layers
    sizes = [
        KVStore(layers, KVFormat.fp8(layers, torch.bfloat16, **bare), [1], 16).block_bytes()[0]
        for bare in ({}, {"native_k": [0]}, {"native_k": [0], "native_v": [0]})
    ]
    assert sizes[1] / sizes[0] == 1.25 and sizes[2] / sizes[0] == 1.5
    fmt = KVFormat.fp8(layers, torch.bfloat16, native_v=[1])
    assert fmt.describe(layers) == "fp8_e4m3 with scale 1.0, V of layers 1 bfloat16"
    pages = fpa.allocate(1, 2, 16, 8, 8, torch.uint8, v_dtype=torch.bfloat16)
    kv = torch.zeros(1, 2, 8)
    with pytest.raises(ValueError, match="different dtypes are for the torch backend"):
        fpa.store(kv, kv, *pages, torch.zeros(1, dtype=torch.long), backend="triton")
    pages = fpa.allocate(1, 2, 16, 8, 8, torch.float16, v_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="v_pages must be"):
        fpa.store(kv, kv, *pages, torch.zeros(1, dtype=torch.long))


# --- errors of attention, layer by layer


def test_c21_layer_errors_tell_k_v_and_q_apart(tiny: Tiny) -> None:
    """One layer's K passes 448, another's V is too small for e4m3 at scale 1.0, in a third one
    everything is as usual; scales that fit take the errors away."""

    def edit(model: Any) -> None:
        layers = [layer.self_attn for layer in model.model.layers]
        _scale_kv_head(layers[0], "k", 0, 512.0)
        for head in (0, 1):
            _scale_kv_head(layers[2], "v", head, 2.0**-14)

    loaded = load(str(tiny(num_hidden_layers=3, edit=edit)))
    at_one = KVFormat.fp8(loaded.layers, torch.float32)
    ranges = _amax(loaded)
    fitted = ScaleSet(
        "attn_head",
        {
            layer.index: LayerScales(
                layer.name, *(scale_from_amax(ranges[layer.index][kind]) for kind in "kvq")
            )
            for layer in loaded.layers
        },
    )
    calibrated = KVFormat.fp8(loaded.layers, torch.float32, scales=fitted)
    before, after = layer_errors(loaded.model, loaded.layers, [at_one, calibrated], ROWS)
    first, usual, third = before
    assert first.k_error > 0.2 > 0.1 > first.v_error and first.k_clipped > 0.1
    assert first.heads[0] > 3 * first.heads[1]  # the head that was scaled
    assert third.v_error > 0.2 > 0.1 > third.k_error and third.v_flushed > 0.5
    assert max(usual.k_error, usual.v_error, usual.q_error) < 0.1
    assert usual.k_clipped == usual.v_clipped == 0 and usual.v_flushed < 0.01
    for layer in after:
        assert max(layer.error, layer.k_error, layer.v_error, layer.q_error) < 0.1
        assert layer.k_clipped == layer.v_clipped == layer.q_clipped == 0
        assert layer.k_flushed < 0.01 and layer.v_flushed < 0.01
    assert "of K clipped" in first.describe() and "flushed to zero" in third.describe()


def test_layer_errors_equal_their_definition(tiny: Tiny) -> None:
    """Against plain attention over K, V and Q that went through the codec, with FP8 attention's
    grouped query scales; a layer that is native in the format is left out."""
    loaded = load(str(tiny()))
    scales = make_scales(loaded.layers, "attn_head")
    fmt = KVFormat.fp8(loaded.layers, torch.float32, scales=scales, skip=[1])
    (found,) = layer_errors(loaded.model, loaded.layers, [fmt], ROWS[:1])
    assert [layer.index for layer in found] == [0]
    own = scales.layers[0]
    expected: dict[str, float] = {}

    def rounded(x: torch.Tensor, scale: Any) -> torch.Tensor:
        codes = fpa.quantize(x.transpose(1, 2), torch.tensor(scale))
        return fpa.dequantize(codes, torch.tensor(scale)).transpose(1, 2)

    def handler(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        out = plain_attention(module, q, k, v, mask, **kwargs)
        if module.layer_idx == 0:
            grouped = scales.grouped_query(0).repeat(2)  # type: ignore[union-attr]
            others = {
                "k_error": (q, rounded(k, own.k), v),
                "v_error": (q, k, rounded(v, own.v)),
                "q_error": (rounded(q, grouped), k, v),
                "error": (q, rounded(k, own.k), rounded(v, own.v)),
            }
            for name, parts in others.items():
                wrong = plain_attention(module, *parts, mask, **kwargs) - out
                expected[name] = float(wrong.norm() / out.norm())
        return out

    with torch.inference_mode(), handle_attention(loaded.model, handler):
        loaded.model(torch.tensor(ROWS[:1]))
    for name, value in expected.items():
        assert getattr(found[0], name) == pytest.approx(value, rel=1e-3), name


# --- known answers


def fragile(model: Any) -> None:
    """Layers 1 and 4 made fragile: K of one, V of the other passes 448 in one head."""
    layers = [layer.self_attn for layer in model.model.layers]
    _scale_kv_head(layers[1], "k", 0, 2.0**9)
    _scale_kv_head(layers[4], "v", 0, 2.0**12)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_texts(tmp_path_factory.mktemp("data"), powers(12)))


@pytest.fixture(scope="module")
def fragile_model(tiny: Tiny) -> Path:
    return tiny(num_hidden_layers=6, initializer_range=0.15, edit=fragile)


def test_exactly_the_fragile_layers_are_named(fragile_model: Path, texts: str) -> None:
    found = sensitivity(str(fragile_model), dataset=texts, budget_kl=0.01)
    assert found.skip_layers == ["1", "4"]
    assert found.skip_flag == "--kv-cache-dtype-skip-layers 1 4"
    assert found.whole is not None and found.proposal is not None and found.split is not None
    assert found.proposal.loss.kl.value <= 0.01 < found.whole.loss.kl.value
    layers = {layer.index: layer for layer in found.layers}
    ranked = sorted(layers, key=lambda i: -layers[i].alone.kl.value)  # type: ignore[union-attr]
    assert set(ranked[:2]) == {1, 4}
    assert layers[1].k_alone.kl.value > 20 * layers[1].v_alone.kl.value  # type: ignore[union-attr]
    assert layers[4].v_alone.kl.value > 20 * layers[4].k_alone.kl.value  # type: ignore[union-attr]
    # half a layer is enough, which vLLM cannot do
    assert found.split.exempt == Exemption(k=frozenset({1}), v=frozenset({4}))
    assert found.split.loss.kl.value <= 0.01 and found.split.share < found.proposal.share
    shares = [point.share for point in found.curve]
    assert shares == sorted(shares) and shares[0] == found.whole.share == 0.25  # of float32
    assert all(p.loss.kl.low <= p.loss.kl.value <= p.loss.kl.high for p in found.curve)  # type: ignore[operator]


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_right_scales_need_no_layer_in_16_bit(
    strategy: str, fragile_model: Path, texts: str, tmp_path: Path
) -> None:
    """Scales per head undo the damage; one scale a layer costs the quiet heads their precision."""
    out = tmp_path / "out"
    fp8calib.calibrate(fragile_model, out, strategy=strategy, dataset=texts)
    found = sensitivity(str(out), dataset=texts, budget_kl=0.01, attention="accurate")
    if strategy == "attn_head":
        assert found.skip_layers == [] and found.split is None
        assert found.proposal == found.whole
    assert found.whole is not None and found.whole.loss.kl.value < 0.03  # 0.05 at scale 1.0
    before, after = (
        {e.index: e.error for e in errors}
        for errors in zip(*((x.errors_at_1, x.errors) for x in found.layers), strict=True)
    )
    assert before[4] > 0.5 > 0.05 > after[4]


def test_bytes_as_the_budget(fragile_model: Path, texts: str) -> None:
    found = sensitivity(str(fragile_model), dataset=texts, keep_bytes=50.0)
    assert found.skip_layers == ["1", "4"] and found.proposal is not None
    assert found.proposal.share == 0.5
    with pytest.raises(UserError, match=r"from 25 \(everything in FP8\) to 100"):
        sensitivity(str(fragile_model), dataset=texts, keep_bytes=20.0)


def test_c13_the_proposal_passes_the_gate_that_plain_fp8_fails(tiny: Tiny, texts: str) -> None:
    def biased(model: Any) -> None:
        attention = model.model.layers[2].self_attn
        attention.k_proj.bias[[3, 11]] = 2000.0  # two channels that RoPE turns together
        # queries that look there a little, as in the models that have such keys
        attention.q_proj.weight[[3, 11, 19, 27]] /= 100
        attention.q_proj.bias[[3, 11, 19, 27]] = 0.1

    model = str(tiny("qwen2", num_hidden_layers=4, initializer_range=0.2, edit=biased))
    gates = Gates(max_kl=0.05, max_ppl_increase=None, min_top1=None)
    assert not verify(model, dataset=texts, gates=gates).ok
    found = sensitivity(model, dataset=texts, budget_kl=0.05)
    assert found.skip_layers == ["2"]
    assert found.split is not None and found.split.exempt == Exemption(k=frozenset({2}))
    passed = verify(model, dataset=texts, gates=gates, kv_cache_dtype_skip_layers=found.skip_layers)
    assert passed.ok


def test_a_budget_that_no_fp8_layer_keeps(fragile_model: Path, texts: str) -> None:
    found = sensitivity(str(fragile_model), dataset=texts, budget_kl=1e-12)
    assert found.skip_layers == [str(index) for index in range(6)]
    assert found.proposal is not None
    assert found.proposal.share == 1 and found.proposal.loss.kl.value == 0


@pytest.mark.slow
def test_exactly_the_fragile_layers_of_smollm2(smollm2: Path, tmp_path: Path) -> None:
    """The known answer on a real model of 30 layers, whose own loss is 0.016."""
    model = tmp_path / "model"
    shutil.copytree(smollm2, model)
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        # K of one head, V of all three
        for layer, own, reader, heads, factor in (
            (7, "k_proj", "q_proj", 1, 2.0**8),
            (19, "v_proj", "o_proj", 3, 2.0**12),
        ):
            name = f"model.layers.{layer}.self_attn"
            if f"{name}.{own}.weight" in tensors:
                tensors[f"{name}.{own}.weight"][: heads * 64] *= factor
                weight = tensors[f"{name}.{reader}.weight"]
                (weight if reader == "q_proj" else weight.T)[: heads * 3 * 64] /= factor
        save_file(tensors, file, metadata={"format": "pt"})
    data = {"dataset": "builtin:pydoc", "split": "heldout", "samples": 16, "max_seq_len": 192}
    found = sensitivity(str(model), budget_kl=0.025, **data)
    assert found.skip_layers == ["7", "19"]
    out = tmp_path / "attn_head"
    fp8calib.calibrate(model, out, strategy="attn_head", dataset="builtin:pydoc", samples=16)
    healed = sensitivity(str(out), budget_kl=0.025, attention="accurate", **data)
    assert healed.skip_layers == []


# --- the command


def test_apply_records_the_layers_where_everything_reads_them(
    fragile_model: Path, texts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    fp8calib.calibrate(fragile_model, out, dataset=texts)
    args = ["--dataset", texts, "--keep-bytes", "40", "--apply"]
    page = tmp_path / "found.html"
    amend(out, accuracy={"of": "a cache without this list"})
    code, _, err = call_flat(capsys, "sensitivity", str(out), *args, "--report", str(page))
    assert "Each layer alone in FP8" in page.read_text() and "vLLM needs" in page.read_text()
    assert code == 0 and "vLLM needs: --kv-cache-dtype-skip-layers" in err
    sidecar = json.loads((out / "fp8calib.json").read_text())
    (layer,) = sidecar["skip_layers"]
    assert sidecar["sensitivity"]["budget"] == {"kl": None, "share": 0.4}
    assert "accuracy" not in sidecar
    assert open_checkpoint(out).recorded_skip_layers == [layer]
    assert f"--kv-cache-dtype-skip-layers {layer}" in (out / "README.md").read_text()
    assert sorted(f.name for f in out.iterdir() if f.name.startswith(".")) == []
    rescale(out, tmp_path / "other", observer="mse")
    assert open_checkpoint(tmp_path / "other").recorded_skip_layers == [layer]


def test_an_interrupted_search_shows_what_it_has_and_goes_on(
    fragile_model: Path,
    texts: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("FP8CALIB_CACHE", str(tmp_path))
    args = [str(fragile_model), "--dataset", texts, "--budget-kl", "0.01"]
    original, groups = Measurements._run_group, []

    def interrupted(self: Any, group: Any, *rest: Any) -> None:
        groups.append(group)
        if len(groups) == 3:
            raise KeyboardInterrupt
        original(self, group, *rest)

    monkeypatch.setattr(Measurements, "_run_group", interrupted)
    code, out, _ = call_flat(capsys, "sensitivity", *args, "--json")
    partial = json.loads(out)
    assert code == 130 and partial["partial"] and partial["proposal"] is None
    assert all(layer["alone"] for layer in partial["layers"]) and partial["whole"]
    assert len(list((tmp_path / "sensitivity").iterdir())) == 1
    code, out, _ = call_flat(capsys, "sensitivity", *args, "--json", "--resume")
    resumed = json.loads(out)
    assert code == 0 and resumed["skip_layers"] == ["1", "4"] and not resumed["partial"]
    assert not list((tmp_path / "sensitivity").iterdir())
    monkeypatch.setattr(Measurements, "_run_group", original)
    _, out, _ = call_flat(capsys, "sensitivity", *args, "--json")
    fresh = json.loads(out)
    for changing in ("seconds", "date", "command"):
        del fresh[changing], resumed[changing]
    assert fresh == resumed


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text('{"identity": "a", "sums": {"x": {"kl": 3}}}')
    with pytest.raises(UserError, match="damaged"):
        Memory(path, "a", resume=True)
    path.write_text('{"identity": "a", "sums": {}}')
    with pytest.raises(UserError, match="another model, text or options"):
        Memory(path, "b", resume=True)
    assert Memory(path, "b", resume=False).sums == {}


def test_a_home_that_cannot_be_written_does_not_end_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").write_text("a file")
    memory = Memory(tmp_path / "home" / "sensitivity" / "x.json", "a", resume=True)
    memory.save()
    memory.save()
    memory.discard()
    assert capsys.readouterr().err.count("this run cannot be resumed") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--budget-kl", "0.1", "--keep-bytes", "60"], "give one budget"),
        (["--budget-kl", "-1"], "must be above 0"),
        (["--kv-cache-dtype", "bfloat16"], "is not FP8"),
        (["--apply"], "no checkpoint that fp8calib calibrated"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(
    args: list[str],
    message: str,
    fragile_model: Path,
    texts: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = call_flat(capsys, "sensitivity", str(fragile_model), "--dataset", texts, *args)
    assert code == 2 and out == "" and message in err.rpartition("error:")[2]


def _scale_kv_head(attention: Any, kind: str, head: int, factor: float) -> None:
    """Multiply K (or V) of one KV head by a power of two and undo it in the queries of its group
    (or in the output projection): the same function, bit for bit."""
    dim, group = attention.head_dim, attention.num_key_value_groups
    mine = slice(head * dim, (head + 1) * dim)
    readers = slice(head * group * dim, (head + 1) * group * dim)
    if kind == "k":
        attention.k_proj.weight[mine] *= factor
        attention.q_proj.weight[readers] /= factor
    else:
        attention.v_proj.weight[mine] *= factor
        attention.o_proj.weight[:, readers] /= factor


def _amax(loaded: LoadedModel) -> dict[int, dict[str, Any]]:
    """Maxima of |q|, |k| and |v| by head over ROWS."""
    found: dict[int, dict[str, Any]] = {}

    def handler(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        mine = found.setdefault(module.layer_idx, {})
        for kind, x in (("q", q), ("k", k), ("v", v)):
            mine[kind] = np.maximum(mine.get(kind, 0), x.abs().amax((0, 2, 3)).numpy())
        return plain_attention(module, q, k, v, mask, **kwargs)

    with torch.inference_mode(), handle_attention(loaded.model, handler):
        for row in ROWS:
            loaded.model(torch.tensor([row]))
    return found
