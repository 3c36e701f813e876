"""How the decode kernels are cut: measured configs, and a rule for all other shapes.

The table's numbers come from ``benchmarks/kernels.py tune``.
"""

from dataclasses import dataclass

import torch
import triton

from .device import Hardware, hardware


@dataclass(frozen=True)
class DecodeConfig:
    """How the decode kernel is cut."""

    tile: int
    """Tokens at a time."""
    num_stages: int
    """Tiles in shared memory at a time."""
    programs_per_sm: int
    num_warps: int = 4


INTERPRETED = DecodeConfig(tile=32, num_stages=1, programs_per_sm=2)

KINDS = ("few", "many", "short")
"""Kinds of batches: of few (sequence, KV head) pairs, of many, of many short ones (plan.py)."""

# (arch, larger head size rounded up to a power of two, bytes an entry, page size up to 128, kind);
# many short pairs are cut as many are where nothing else is said. Measured on an H200.
TABLE = {
    (90, 128, 1, 128, "short"): DecodeConfig(tile=64, num_stages=3, programs_per_sm=3),
    (90, 128, 1, 64, "few"): DecodeConfig(tile=64, num_stages=5, programs_per_sm=2),
    (90, 128, 1, 64, "many"): DecodeConfig(tile=64, num_stages=3, programs_per_sm=3),
    (90, 128, 1, 32, "few"): DecodeConfig(tile=128, num_stages=3, programs_per_sm=2),
    (90, 128, 1, 32, "many"): DecodeConfig(tile=64, num_stages=3, programs_per_sm=3),
    (90, 128, 1, 16, "few"): DecodeConfig(tile=128, num_stages=3, programs_per_sm=2),
    (90, 128, 1, 16, "many"): DecodeConfig(tile=64, num_stages=3, programs_per_sm=3),
    **{
        (90, 64, 1, page, kind): DecodeConfig(tile=128, num_stages=3, programs_per_sm=2)
        for page in (128, 64, 32, 16)
        for kind in ("few", "many")
    },
}

# Shared memory a program may take, so that two run on a multiprocessor: 227 KiB on SM 90 and 100,
# 163 on 80, 99 on the small chips.
_SHARED_KIB = {80: 80, 87: 80, 90: 112, 100: 112, 103: 112}
_SHARED_KIB_OTHER = 48


def decode_config(k_pages: torch.Tensor, v_pages: torch.Tensor, kind: str) -> DecodeConfig:
    """The measured config for these pages and this kind of batch, or what the rule gives."""
    machine = hardware(k_pages.device)
    if machine.interpreted:
        return INTERPRETED
    page_size = min(k_pages.shape[2], 128)
    head_dims = [triton.next_power_of_2(pages.shape[3]) for pages in (k_pages, v_pages)]
    entry = k_pages.element_size()
    pages = (machine.arch, max(head_dims), entry, page_size)
    measured = TABLE.get((*pages, kind))
    if measured is None and kind == "short":
        measured = TABLE.get((*pages, "many"))
    return measured or rule(machine, sum(head_dims) * entry, page_size)


def rule(machine: Hardware, token_bytes: int, page_size: int) -> DecodeConfig:
    """128 tokens a tile where a page has so many and they take at most 32 KiB, else 64, or 32 where
    two of those do not fit the memory; and as many stages as it holds, 2 or 3."""
    tile = 128 if page_size >= 128 and 128 * token_bytes <= 32 << 10 else 64
    shared = _SHARED_KIB.get(machine.arch, _SHARED_KIB_OTHER) << 10
    if tile * token_bytes * 2 > shared and machine.arch != 90:
        tile = 32  # Hopper's instruction has no fewer than 64 rows
    stages = max(2, min(3, shared // (tile * token_bytes)))
    programs = 1 if stages * tile * token_bytes > shared else 2
    if stages * tile * token_bytes * 2 <= shared:
        programs = 3
    return DecodeConfig(tile, stages, programs)
