"""The FP8 codec: hand numbers, saturation, rounding, NaN."""

import math

import pytest
import torch
from fp8_paged_attention import E4M3, E5M2, FORMATS, dequantize, quantize
from fp8_paged_attention.scale import get_format

FMT = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def values(numbers, scale=None, fmt=E4M3):
    codes = quantize(torch.tensor(numbers).view(1, 1, -1), scale, fmt)
    assert codes.dtype == torch.uint8
    return codes.view(fmt.dtype).float().flatten().tolist()


def test_scale_divides_to_quantise_and_multiplies_to_dequantise():
    scale = torch.tensor([0.5])
    codes = quantize(torch.tensor([[[3.0, -448.0, 0.25]]]), scale)
    assert codes.view(E4M3.dtype).flatten().tolist() == [6.0, -448.0, 0.5]  # -896 saturates
    assert dequantize(codes, scale).flatten().tolist() == [3.0, -224.0, 0.25]


def test_ties_round_to_even():
    # Between 16 and 32 e4m3 counts in twos: 17 lies between 16 (even mantissa) and 18.
    assert values([17.0, 19.0, 17.01, -17.0]) == [16.0, 20.0, 18.0, -16.0]
    # The smallest subnormal is 2^-9; half of it ties to zero.
    assert values([2**-9, 2**-10, 1.5 * 2**-9]) == [2**-9, 0.0, 2**-8]


@FMT
def test_overflow_and_infinity_saturate(fmt):
    big = [fmt.max * 1.01, 1e30, math.inf, -math.inf, -fmt.max]
    assert values(big, fmt=fmt) == [fmt.max, fmt.max, fmt.max, -fmt.max, -fmt.max]


@FMT
def test_nan_stays_nan(fmt):
    codes = quantize(torch.full((1, 1, 4), math.nan), torch.tensor([0.1]), fmt)
    assert (codes & 0x7F == 0x7F).all()
    assert dequantize(codes, torch.tensor([2.0]), fmt).isnan().all()


@FMT
def test_every_code_survives_a_round_trip(fmt):
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes.view(fmt.dtype).float().isfinite()].view(1, 1, -1)
    scale = torch.tensor([0.25])
    assert torch.equal(quantize(dequantize(codes, scale, fmt), scale, fmt), codes)


def test_division_is_in_float32():
    x = torch.linspace(-30, 30, 4096).bfloat16().view(1, 1, -1)
    scale = torch.tensor([0.0371])
    expected = (x.float() / scale).clamp(-448, 448).to(E4M3.dtype).view(torch.uint8)
    assert torch.equal(quantize(x, scale), expected)
    in_bf16 = (x / scale.bfloat16()).float().clamp(-448, 448).to(E4M3.dtype).view(torch.uint8)
    assert (in_bf16 != expected).any()


def test_c11_heads_have_their_own_scale():
    x = torch.ones(2, 3, 4)
    codes = quantize(x, torch.tensor([1.0, 0.1, 0.01]))
    assert codes.view(E4M3.dtype).float()[0, :, 0].tolist() == [1.0, 10.0, 96.0]


def test_unknown_format_is_refused():
    assert sorted(FORMATS) == ["e4m3", "e5m2"]
    with pytest.raises(ValueError, match=r"one of \['e4m3', 'e5m2'\], got 'e3m4'"):
        get_format("e3m4")
