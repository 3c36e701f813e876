"""Several processes under torchrun: each observes its share of the batches, rank 0 writes.

Batches are planned once, for all, and a rank takes whole ones. Merging is by maximum, minimum and
sum of integers, so that the result is that of one process to the last bit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fp8calib.calibration.statistics import RangeStatistics
from fp8calib.console import stderr
from fp8calib.errors import UserError
from fp8calib.scales import Kind


@dataclass(frozen=True)
class Ranks:
    """This process's place among `world_size`; `local` is its number on this machine."""

    rank: int = 0
    world_size: int = 1
    local: int = 0

    @property
    def writes(self) -> bool:
        return self.rank == 0

    def device(self, name: str) -> str:
        """`auto` and `cuda` are one GPU a process."""
        if self.world_size == 1 or name not in ("auto", "cuda") or not torch.cuda.is_available():
            return name
        if self.local >= torch.cuda.device_count():
            raise UserError(
                f"rank {self.rank} finds {torch.cuda.device_count()} GPUs here: start as many "
                "processes as there are GPUs, or use --device cpu"
            )
        return f"cuda:{self.local}"


def first_rank() -> bool:
    """Whether this process is the one that writes and prints."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def ranks() -> Iterator[Ranks]:
    """Join the processes that torchrun started, for the length of the block; all but the first are
    silent. A process alone needs no such thing."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Ranks()
        return
    mine = Ranks(int(os.environ["RANK"]), size, int(os.environ.get("LOCAL_RANK", "0")))
    quiet, stderr.quiet = stderr.quiet, not mine.writes
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend)
    try:
        yield mine
    finally:
        stderr.quiet = quiet
        dist.destroy_process_group()


@contextmanager
def first_alone(mine: Ranks) -> Iterator[None]:
    """Rank 0 goes through the block before the others: for what fills a cache on disk."""
    if mine.world_size > 1 and not mine.writes:
        dist.barrier()
    yield
    if mine.world_size > 1 and mine.writes:
        dist.barrier()


def check_agreement(mine: Ranks, what: str, value: str) -> None:
    """Raise UserError unless `value` is the same in all processes."""
    if mine.world_size == 1:
        return
    values: list[str] = [""] * mine.world_size
    dist.all_gather_object(values, value)
    if len(set(values)) > 1:
        raise UserError(f"the processes do not see the same {what}: {', '.join(values)}")


def merge(
    statistics: dict[tuple[int, Kind], RangeStatistics], mine: Ranks, device: torch.device
) -> dict[tuple[int, Kind], RangeStatistics]:
    """What all processes have seen together, in every one of them."""
    if mine.world_size == 1:
        return statistics
    found: list[Mapping[tuple[int, Kind], tuple[int, int]]] = [{}] * mine.world_size
    dist.all_gather_object(
        found, {slot: (len(s.amax), len(s.text_amax)) for slot, s in statistics.items()}
    )
    texts = max(count for sizes in found for _, count in sizes.values())
    heads = {slot: count for sizes in found for slot, (count, _) in sizes.items()}
    merged = {}
    for slot in sorted(heads):  # in the same order everywhere
        own = statistics.get(slot, RangeStatistics.empty(heads[slot], device))
        own.reserve(texts)
        merged[slot] = own
        _reduce(own)
    return merged


def _reduce(own: RangeStatistics) -> None:
    seen = own.amax.clone()
    for values in (own.amax, own.late_amax, own.text_amax):
        dist.all_reduce(values, dist.ReduceOp.MAX)
    own.text.masked_fill_(seen != own.amax, torch.iinfo(torch.int64).max)
    dist.all_reduce(own.text, dist.ReduceOp.MIN)
    dist.all_reduce(own.histogram, dist.ReduceOp.SUM)
