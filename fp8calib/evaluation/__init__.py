"""What an FP8 KV cache costs in accuracy, and whether that is within the limits set.

The public names load on first use: reports are compared and drawn without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_LAZY = {
    "Verification": "fp8calib.evaluation.verification",
    "VerifyConfig": "fp8calib.evaluation.end_to_end",
    "verify": "fp8calib.evaluation.end_to_end",
}
__all__ = ["Verification", "VerifyConfig", "verify"]

if TYPE_CHECKING:
    from fp8calib.evaluation.end_to_end import VerifyConfig, verify
    from fp8calib.evaluation.verification import Verification


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
