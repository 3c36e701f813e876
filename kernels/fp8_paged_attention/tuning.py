"""Shapes of the decode kernels' tiles, found by measurement (see benchmarks/kernels.py)."""

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class DecodeConfig:
    """How the decode kernel is cut."""

    tile: int
    """Tokens at a time."""
    num_warps: int
    num_stages: int
    programs_per_sm: int


GENERIC = DecodeConfig(tile=64, num_warps=4, num_stages=3, programs_per_sm=2)
INTERPRETED = DecodeConfig(tile=32, num_warps=4, num_stages=1, programs_per_sm=2)

# (arch, larger head size rounded up to a power of two, bytes an entry) -> config
TABLE = {
    (90, 64, 1): DecodeConfig(tile=128, num_warps=4, num_stages=3, programs_per_sm=2),
    (90, 128, 1): DecodeConfig(tile=128, num_warps=4, num_stages=3, programs_per_sm=2),
}


def decode_config(k_pages: torch.Tensor, v_pages: torch.Tensor, num_q_heads: int,
                  max_seqlen_q: int) -> DecodeConfig:
    """The measured config for these shapes, or the generic one."""
    from .device import hardware

    arch = hardware(k_pages.device).arch
    if arch == 0:
        return INTERPRETED
    head_dim = triton.next_power_of_2(max(k_pages.shape[3], v_pages.shape[3]))
    return TABLE.get((arch, head_dim, k_pages.element_size()), GENERIC)
