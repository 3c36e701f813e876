"""FP8 numbers and the one meaning of "scale".

What
    A KV cache in FP8 keeps one byte a value. Two formats exist (OCP "8-bit Floating Point
    Specification", revision 1.0):

    ====== ==== ======== ======== ========== ===================================== ============
    name   sign exponent mantissa largest    smallest normal, subnormal            inf
    ====== ==== ======== ======== ========== ===================================== ============
    e4m3   1    4        3        448        2^-6, 2^-9                            none
    e5m2   1    5        2        57344      2^-14, 2^-16                          yes, not used
    ====== ==== ======== ======== ========== ===================================== ============

    e4m3 here is always the "fn" variant (finite: the codes IEEE would give to infinity are
    numbers, 0x7F and 0xFF are NaN).

How
    1. A scale *de*quantises: ``value = code * scale``, so ``code = value / scale``. That is the
       convention of compressed-tensors and of vLLM's ``k_scale``/``v_scale``; a scale calibrated
       from a maximum is ``amax / 448``. Transformer Engine and torchao's training code use the
       reciprocal; nothing in this package does.
    2. Divide in float32, whatever the dtype of the input. A division in bfloat16 would change
       6.6 % of the codes.
    3. Clamp to the largest finite value, then round to nearest, ties to even. The clamp is
       explicit because the cast alone differs between versions of torch and between formats:
       e4m3 from infinity has given NaN as well as 448, and e5m2 overflows to inf from 61440 up.
    4. NaN stays NaN (0x7F or 0xFF, by its sign). Hiding it would hide a broken model.

Why bytes
    Codes are stored as ``uint8``: index, gather and scatter work on it on every device, a cast
    between pages and codes is a view, and hardware without FP8 arithmetic (before SM 89) can
    still decode it.

Left out
    Block and per-token scales (one scale tensor of shape `[1]` or `[num_kv_heads]` a layer is
    what checkpoints carry), e4m3fnuz and e5m2fnuz, stochastic rounding.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Fp8Format:
    """One FP8 format: its name, torch's dtype for it and its largest finite value."""

    name: str
    dtype: torch.dtype
    max: float


E4M3 = Fp8Format("e4m3", torch.float8_e4m3fn, 448.0)
E5M2 = Fp8Format("e5m2", torch.float8_e5m2, 57344.0)
FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2)}


def get_format(name: str) -> Fp8Format:
    """The format called ``name``.

    Raises:
        ValueError: there is no such format.
    """
    if name not in FORMATS:
        raise ValueError(f"fp8_format must be one of {sorted(FORMATS)}, got {name!r}")
    return FORMATS[name]


def quantize(x: torch.Tensor, scale: torch.Tensor | None, fmt: Fp8Format = E4M3) -> torch.Tensor:
    """Encode ``x / scale`` as FP8 codes.

    Args:
        x: values, `[..., num_heads, head_dim]`, any floating dtype.
        scale: float32, `[1]` or `[num_heads]`; None means 1.0.
        fmt: the target format.

    Returns:
        uint8 codes of the shape of ``x``.
    """
    x = x.float()
    if scale is not None:
        x = x / scale[:, None]
    return x.clamp(-fmt.max, fmt.max).to(fmt.dtype).view(torch.uint8)


def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor | None,
    fmt: Fp8Format = E4M3,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Decode FP8 codes: ``code * scale``, multiplied in float32 (float64 if ``dtype`` is).

    Args:
        codes: uint8, `[..., num_heads, head_dim]`.
        scale: float32, `[1]` or `[num_heads]`; None means 1.0.
        fmt: the format of the codes.
        dtype: dtype of the result.

    Returns:
        `[..., num_heads, head_dim]` in ``dtype``.
    """
    x = codes.view(fmt.dtype).to(torch.float64 if dtype == torch.float64 else torch.float32)
    if scale is not None:
        x = x * scale[:, None].to(x.dtype)
    return x.to(dtype)
