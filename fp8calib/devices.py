"""The words of `--device`, `--device-map` and `--dtype`, checked before anything is fetched or
loaded; torch is imported only where a GPU is named."""

from __future__ import annotations

import re

from fp8calib.errors import UserError

DTYPES = ("bfloat16", "float16", "float32")
DEVICE_MAPS = ("auto", "stream")
_DEVICE = re.compile(r"auto|cpu|cuda(?::(0|[1-9]\d{0,3}))?")


def check_device(name: str) -> None:
    """Raise UserError for a device that there is not."""
    known = _DEVICE.fullmatch(name) if isinstance(name, str) else None
    if known is None:
        raise UserError(f"unknown device {name!r:.99}: use auto, cpu, cuda or cuda:N")
    if name.startswith("cuda"):
        import torch

        count = torch.cuda.device_count()
        if int(known[1] or 0) >= count:
            raise UserError(f"device {name!r}: torch sees {count} CUDA devices")


def check_device_map(name: str | None) -> None:
    """Raise UserError for an unknown word; None is no device map."""
    if name is not None and name not in DEVICE_MAPS:
        raise UserError(f"unknown device map {name!r:.99}: use {' or '.join(DEVICE_MAPS)}")


def check_dtype(name: str) -> None:
    """Raise UserError for an unknown dtype of weights."""
    if name not in ("auto", *DTYPES):
        raise UserError(f"unknown dtype {name!r:.99}: use auto, {', '.join(DTYPES)}")
