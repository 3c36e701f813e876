"""The Triton kernel that looks at q, k and v on a GPU sees what the torch code sees on a CPU."""

from __future__ import annotations

import kernel_cases  # noqa: F401  (turns Triton's interpreter on where there is no GPU)
import pytest
import torch

from fp8calib.calibration import scan_kernel
from fp8calib.calibration.statistics import (
    _FIRST,
    _SHIFT,
    BUCKETS,
    SINK_POSITIONS,
    scan,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REAL = torch.tensor([[1] * 9, [0] * 3 + [1] * 6, [1] * 2 + [0] * 7], dtype=torch.bool)


def kernel(x: torch.Tensor, real: torch.Tensor | None) -> list[torch.Tensor]:
    found = scan_kernel.scan(
        x.to(DEVICE),
        None if real is None else real.to(DEVICE),
        sinks=SINK_POSITIONS,
        shift=_SHIFT,
        first=_FIRST,
        buckets=BUCKETS,
    )
    return [part.cpu() for part in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dim", [16, 24, 80])
def test_kernel_equals_torch(dtype: torch.dtype, padded: bool, dim: int) -> None:
    x = (torch.randn(3, 9, 5, dim) * 10.0 ** torch.randint(-9, 5, (3, 9, 5, 1))).to(dtype)
    x = x.transpose(1, 2)  # as models hand it over
    real = REAL if padded else None
    for found, expected in zip(kernel(x, real), scan(x, real), strict=True):
        assert torch.equal(found, expected)


def test_many_tokens_fall_into_several_programs_and_copies() -> None:
    x = torch.randn(2, 1, 700, 64)
    for found, expected in zip(kernel(x, None), scan(x, None), strict=True):
        assert torch.equal(found, expected)


def test_not_finite_values_are_seen() -> None:
    x = torch.randn(1, 2, 9, 8)
    x[0, 1, 7, 3], x[0, 0, 0, 0] = float("nan"), float("-inf")
    early, late, _ = kernel(x, None)
    assert early[0, 0] == torch.inf and torch.isnan(late[0, 1])
    assert torch.isfinite(early[0, 1]) and torch.isfinite(late[0, 0])
