"""What the GPU at hand can do, and how many programs fill it."""

import os
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Hardware:
    """Facts of one device that the kernels' launchers need."""

    arch: int
    """Compute capability, 90 for Hopper; 0 in Triton's interpreter."""
    num_sms: int

    @property
    def interpreted(self) -> bool:
        return self.arch == 0

    @property
    def has_fp8(self) -> bool:
        """FP8 types and casts (SM 89 on)."""
        return self.arch >= 89

    @property
    def has_pdl(self) -> bool:
        """Programmatic dependent launch: a kernel starts before its predecessor has ended."""
        return self.arch >= 90


def hardware(device: torch.device) -> Hardware:
    """The hardware of a device: a CUDA device, or the interpreter on the CPU."""
    if device.type != "cuda":
        return Hardware(arch=0, num_sms=4)
    return _cuda(device.index if device.index is not None else torch.cuda.current_device())


@cache
def _cuda(index: int) -> Hardware:
    properties = torch.cuda.get_device_properties(index)
    return Hardware(properties.major * 10 + properties.minor, properties.multi_processor_count)


def interpreter_is_on() -> bool:
    """Whether Triton kernels run on the CPU, in Python."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0", "false", "off")
