"""Copies between host and device that wait for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of numbers, in order with what the device does; on a GPU by way of page-locked
    memory, since a copy from other memory waits for the device."""
    tensor = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(x: torch.Tensor) -> torch.Tensor:
    """`x` in page-locked memory, complete once the device has come this far; `x` itself on a
    CPU."""
    if not x.is_cuda:
        return x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)


class Landing:
    """A place in host memory for integers of the device, one copy after another: page-locked memory
    and an event are dear to make for each of them."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._buffer = torch.empty(0, dtype=torch.int64)
        self._arrived = torch.cuda.Event() if self._on_gpu else None
        self._here = self._buffer

    def take(self, x: torch.Tensor) -> None:
        """Start copying `x`, int64 [N]; on a CPU it is kept as it is."""
        if self._arrived is None:
            self._here = x
            return
        if len(self._buffer) < len(x):
            self._buffer = torch.empty(2 * len(x), dtype=torch.int64, pin_memory=True)
        self._here = self._buffer[: len(x)]
        self._here.copy_(x, non_blocking=True)
        self._arrived.record()

    def wait(self) -> list[int]:
        """What was taken last, once it is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._here.tolist()
