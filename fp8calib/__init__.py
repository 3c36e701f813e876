"""FP8 KV-cache calibration: scales from your text, a checkpoint that vLLM reads, honest numbers.

Importing this package imports no torch; the public names load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "AsyncLLM": "fp8calib.runtime.async_llm",
    "LLM": "fp8calib.runtime.llm",
    "SamplingParams": "fp8calib.runtime.sampling_params",
    "ScaleSet": "fp8calib.scales",
    "calibrate": "fp8calib.calibration",
    "inspect": "fp8calib.checkpoint",
    "verify": "fp8calib.evaluation",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "SamplingParams",
    "ScaleSet",
    "__version__",
    "calibrate",
    "inspect",
    "verify",
]

if TYPE_CHECKING:
    from fp8calib.calibration import calibrate
    from fp8calib.checkpoint import inspect
    from fp8calib.evaluation import verify
    from fp8calib.runtime.async_llm import AsyncLLM
    from fp8calib.runtime.llm import LLM
    from fp8calib.runtime.sampling_params import SamplingParams
    from fp8calib.scales import ScaleSet


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
