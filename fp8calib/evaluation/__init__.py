"""What an FP8 KV cache costs in accuracy, and whether that is within the limits set."""

from fp8calib.evaluation.end_to_end import VerifyConfig, verify
from fp8calib.evaluation.verification import Verification

__all__ = ["Verification", "VerifyConfig", "verify"]
