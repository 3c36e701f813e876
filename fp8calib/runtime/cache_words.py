"""The words of `--kv-cache-dtype`, `--attention` and `--missing-scales`, without torch: a wrong one
is told before anything is fetched or loaded."""

from __future__ import annotations

from typing import Literal, get_args

from fp8calib.devices import DTYPES
from fp8calib.errors import UserError

FP8_WORDS = {"fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
WORDS = ("auto", *DTYPES, *FP8_WORDS)
Arithmetic = Literal["accurate", "fp8"]
ARITHMETICS: tuple[Arithmetic, ...] = get_args(Arithmetic)
MISSING_SCALES = ("refuse", "one")

# Words that vLLM knows and we do not: how the word begins, and where its format exists.
_ELSEWHERE = {
    "fp8_inc": "exists only in vLLM, for Intel Gaudi",
    "fp8_ds_mla": "exists only in vLLM, for DeepSeek's sparse attention on NVIDIA GPUs",
    "nvfp4": "exists only in vLLM, for NVIDIA Blackwell GPUs",
    "turboquant": "exists only in vLLM",
    "ultraquant": "exists only in vLLM",
}


def check_words(kv_cache_dtype: str, attention: str, missing_scales: str) -> None:
    """Raise UserError for a word that this runtime does not know, naming where it exists."""
    if kv_cache_dtype not in WORDS:
        raise _unknown_dtype(kv_cache_dtype)
    if attention not in ARITHMETICS:
        raise UserError(f"unknown attention {attention!r}: use {' or '.join(ARITHMETICS)}")
    if missing_scales not in MISSING_SCALES:
        raise UserError(f"unknown --missing-scales {missing_scales!r}: use refuse or one")


def _unknown_dtype(word: str) -> UserError:
    known = f"here there are {', '.join(WORDS)}"
    if word.endswith("_per_token_head"):
        return UserError(
            f"KV-cache dtype {word} exists only in vLLM, which makes its scales while it runs and "
            f"needs no calibration; {known}"
        )
    for start, where in _ELSEWHERE.items():
        if word.startswith(start):
            return UserError(f"KV-cache dtype {word} {where}; {known}")
    return UserError(f"unknown KV-cache dtype {word!r}; {known}")
