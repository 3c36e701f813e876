"""From a model and some text to FP8 KV-cache scales; the only place that imports llm-compressor."""

import os

# Read by llm-compressor at its import. Its log lines speak of choices that we make knowingly, and
# they go to stdout, where --json is; what goes wrong comes as an exception.
os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "CRITICAL")

from fp8calib.calibration.end_to_end import calibrate
from fp8calib.calibration.result import CalibrationResult

__all__ = ["CalibrationResult", "calibrate"]
