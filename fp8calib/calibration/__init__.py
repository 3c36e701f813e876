"""From a model and some text to FP8 KV-cache scales; the only place that imports llm-compressor."""

import os

# llm-compressor's own switch, read at its import: its log lines speak of choices we make knowingly.
os.environ.setdefault("LLM_COMPRESSOR_LOG_DISABLED", "true")

from fp8calib.calibration.end_to_end import CalibrationResult, calibrate

__all__ = ["CalibrationResult", "calibrate"]
