"""Decode steps as CUDA graphs: captured once for each padded batch size, then replayed. Where it
matters to attention whether all sequences are short, there is a second graph for those.

A step's numbers are copied into a buffer that stays where it is; the graph reads them there, plans
attention, runs the model and leaves its results where it always does. Rows of padding have length 0
and are not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8calib.runtime.step_inputs import StepInputs, StepShape, write_step

Result = tuple[torch.Tensor, ...]
Run = Callable[[StepInputs], Result]
Replay = Callable[[], Result]


def batch_sizes(most: int) -> list[int]:
    """The padded batch sizes: 1, 2, 4, 8 and multiples of 8; of 16 beyond 64, of 32 beyond 256."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 32, 32)]
    return [*(size for size in sizes if size < most), most]


class DecodeGraphs:
    """The graphs of one engine.

    Args:
        table_widths: columns of each group's block table, enough for the longest sequence.
        max_batch_size: larger batches are not captured.
        capture: makes, of a function, one that does the same on the same memory.
    """

    def __init__(
        self,
        device: torch.device,
        table_widths: Sequence[int],
        max_batch_size: int,
        capture: Callable[[Callable[[], Result]], Replay] | None = None,
    ) -> None:
        self.failure: str | None = None
        self._widths = tuple(table_widths)
        self._sizes = batch_sizes(max_batch_size)
        self._capture = capture or _Capture(device)
        size = self._shape(max_batch_size).size
        self._buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self._replays: dict[tuple[int, int | None], Replay] = {}

    @property
    def captured(self) -> list[int]:
        """The batch sizes that have a graph."""
        return sorted({size for size, _ in self._replays})

    def _shape(self, size: int) -> StepShape:
        return StepShape(size, size, self._widths, size)

    def padded(self, shape: StepShape) -> StepShape | None:
        """The shape that a decode step is padded to; None when it is not to be captured."""
        if self.failure is not None or shape.num_seqs > self._sizes[-1]:
            return None
        return self._shape(next(size for size in self._sizes if size >= shape.num_seqs))

    def run(
        self,
        shape: StepShape,
        max_seq_len: int | None,
        host: torch.Tensor,
        on_copy: Callable[[], None],
        run: Run,
    ) -> Result | None:
        """Replay the step in `host`, captured of `run` if it is the first of its shape and bound.

        Args:
            max_seq_len: as in StepInputs.
            on_copy: is called when the copy out of `host` has been started.

        Returns:
            what `run` does, overwritten by the next replay; None when this model cannot be
            captured, of which `failure` then says why.
        """
        key = (shape.num_seqs, max_seq_len)
        if key not in self._replays:
            try:
                self._replays[key] = self._captured(shape, max_seq_len, run)
            except RuntimeError as problem:
                self.failure = " ".join(str(problem).split())[:200]
                return None
        self._buffer[: shape.size].copy_(host, non_blocking=True)
        on_copy()
        return self._replays[key]()

    def _captured(self, shape: StepShape, max_seq_len: int | None, run: Run) -> Replay:
        """Capture `run`, with nothing but padding to work on: it has to run before that, to have
        kernels compiled and libraries set up, and must leave no trace."""
        padding = torch.empty(shape.size, dtype=torch.int32)
        write_step([], shape, 1, padding)
        self._buffer[: shape.size].copy_(padding)
        inputs = StepInputs.of(shape, self._buffer, 1, shape.num_seqs, max_seq_len)
        return self._capture(lambda: run(inputs))


class _Capture:
    """Captures functions as CUDA graphs that share their memory, since they run one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, run: Callable[[], Result]) -> Replay:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = run()
        self._pool = self._pool or graph.pool()

        def replay() -> Result:
            graph.replay()
            return result

        return replay
