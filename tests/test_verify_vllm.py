"""verify --engine vllm: vLLM's logprobs, and that they agree with our own runtime.

Needs vLLM as test_vllm.py does. Its CPU build computes what `accurate` attention over `tensor`
scales does, except that it rounds toward zero when it stores K and V (seen in its 0.32.0, in every
code): so does ours here, to be compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fp8_paged_attention import torch_backend
from fp8_paged_attention.scale import E4M3, Fp8Format, quantize
from made_scales import calibrated
from test_vllm import PYTHON

from fp8calib.errors import UserError
from fp8calib.evaluation import verify
from fp8calib.evaluation.metrics import METRICS, compare
from fp8calib.evaluation.top_logprobs import TopLogprobs, compare_top
from fp8calib.evaluation.vllm_engine import verify_with_vllm
from fp8calib.recipe import Gates

NO_GATES = Gates(**dict.fromkeys(Gates.model_fields))


def told(logits: torch.Tensor, targets: torch.Tensor, top: int) -> TopLogprobs:
    """What vLLM tells of logits."""
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(top)
    ids = torch.cat([targets[:, None], best.indices], 1)
    values = torch.cat([logprobs.gather(1, targets[:, None]), best.values], 1)
    return TopLogprobs(ids.numpy(), values.double().numpy())


def test_metrics_of_the_most_likely_tokens_are_those_of_all_where_the_tail_is_thin() -> None:
    torch.manual_seed(0)
    native = torch.randn(50, 1000) * 4
    other = native + torch.randn(50, 1000)
    targets = torch.randint(0, 1000, (50,))
    _, whole = compare([native, other], targets)
    first = told(native, targets, 1000)
    for top, tolerance in ((1000, 1e-5), (300, 2e-2)):
        part = compare_top(
            TopLogprobs(first.ids[:, : top + 1], first.logprobs[:, : top + 1]),
            told(other, targets, top),
        )
        for name in METRICS:
            expected = getattr(whole, name)
            torch.testing.assert_close(getattr(part, name), expected, rtol=tolerance, atol=1e-5)
        assert bool((part.kl <= whole.kl + 1e-5).all())  # merging outcomes loses information


def toward_zero(x: torch.Tensor, scale: torch.Tensor | None, fmt: Fp8Format = E4M3) -> torch.Tensor:
    codes = quantize(x, scale, fmt)
    scaled = x.float() if scale is None else x.float() / scale[:, None]
    return codes - (codes.view(fmt.dtype).float().abs() > scaled.abs()).to(torch.uint8)


@pytest.mark.vllm
def test_vllm_and_our_runtime_agree(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_backend, "quantize", toward_zero)
    shape = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny("llama", **shape, dtype="bfloat16")
    calibrated(model, tmp_path / "out", "tensor", query=False, skip_layers=["0"])
    data = tmp_path / "texts.jsonl"
    lines = [{"text": f"{n} squared is {n * n}, and {n} cubed is {n**3}; " * 4} for n in range(12)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options: dict[str, Any] = {"dataset": str(data), "gates": NO_GATES}
    options["variants"] = "bf16,fp8,fp8@skip"
    ours = verify(str(tmp_path / "out"), **options)
    theirs = verify_with_vllm(str(tmp_path / "out"), python=str(PYTHON), **options)
    assert theirs.engine == "vllm" and theirs.skip_layers == ["0"] and not theirs.partial
    assert theirs.dataset == ours.dataset and theirs.noise_floor is not None
    for mine, other in zip(ours.variants, theirs.variants, strict=True):
        assert (mine.key, mine.fp8_layers) == (other.key, other.fp8_layers)
        assert other.perplexity == pytest.approx(mine.perplexity, rel=0.02)
        assert mine.kl.low <= other.kl.high and other.kl.low <= mine.kl.high
    fp8, skip = theirs.variants[1:]
    assert fp8.kl.value > skip.kl.value > 0 and np.isfinite(fp8.kl.value)
    assert theirs.device == "cpu" and "toward zero" in theirs.warnings[-1]
    json.dumps(theirs.to_dict())


@pytest.mark.vllm
def test_what_vllm_cannot_do_is_told(tiny: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="vLLM has no option for that"):
        verify_with_vllm(
            str(tiny()), python=str(PYTHON), dataset="builtin:pydoc", variants="fp8@1.0"
        )
    with pytest.raises(UserError, match="no such executable"):
        verify_with_vllm(str(tiny()), python="/no/such/python", dataset="builtin:pydoc")
