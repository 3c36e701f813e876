"""FP8 codes inside Triton kernels.

Hardware casts exist from SM 89 on (``CAST``). Older GPUs and Triton's interpreter, whose casts to
FP8 are wrong, take the integer versions, which give the same bits.
"""

import triton
import triton.language as tl


@triton.jit
def _encode_integer(x, E5M2: tl.constexpr):
    # Mantissa bits to drop, the exponent biases' difference in place, and as float32 bits: the
    # smallest normal, the largest finite, and the float whose last bit counts subnormal steps.
    DROP: tl.constexpr = 21 if E5M2 else 20
    REBIAS: tl.constexpr = 112 << 2 if E5M2 else 120 << 3
    NORMAL: tl.constexpr = 0x38800000 if E5M2 else 0x3C800000
    MAX: tl.constexpr = 0x47600000 if E5M2 else 0x43E00000
    STEP: tl.constexpr = 0x43000000 if E5M2 else 0x46800000
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    nan = bits > 0x7F800000
    bits = tl.minimum(bits, MAX)
    normal = ((bits + ((1 << (DROP - 1)) - 1) + ((bits >> DROP) & 1)) >> DROP) - REBIAS
    step = tl.full(x.shape, STEP, tl.int32).to(tl.float32, bitcast=True)
    # Adding makes the float unit round to the subnormals' step.
    subnormal = (bits.to(tl.float32, bitcast=True) + step).to(tl.int32, bitcast=True) - STEP
    code = tl.where(bits < NORMAL, subnormal, normal)
    return (tl.where(nan, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def encode(x, E5M2: tl.constexpr, CAST: tl.constexpr):
    """float32 to FP8 codes in uint8: saturating, to nearest even, NaN to NaN."""
    if CAST:
        MAX_VALUE: tl.constexpr = 57344.0 if E5M2 else 448.0
        x = tl.clamp(x, -MAX_VALUE, MAX_VALUE, propagate_nan=tl.PropagateNan.ALL)
        return x.to(tl.float8e5 if E5M2 else tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return _encode_integer(x, E5M2)


@triton.jit
def to_e4m3(x, CAST: tl.constexpr):
    """float32 in e4m3's range as an e4m3 tensor."""
    if CAST:
        return x.to(tl.float8e4nv)
    else:
        return encode(x, False, False).to(tl.float8e4nv, bitcast=True)


@triton.jit
def decode(codes, E5M2: tl.constexpr, DTYPE: tl.constexpr):
    """uint8 codes as float16 or float32, exactly, without FP8 types."""
    bits = codes.to(tl.uint16)
    if E5M2:  # float16 with fewer mantissa bits
        return (bits << 8).to(tl.float16, bitcast=True).to(DTYPE)
    else:  # seven exponent and mantissa bits in float16's place are the value times 2^-8
        x = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        x = x.to(tl.float16, bitcast=True).to(DTYPE) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), x).to(DTYPE)


@triton.jit
def round_e4m3(x, CAST: tl.constexpr, DTYPE: tl.constexpr):
    """float32 rounded to the nearest e4m3 value."""
    if CAST:
        return x.to(tl.float8e4nv).to(DTYPE)
    else:
        return decode(encode(x, False, CAST), False, DTYPE)
