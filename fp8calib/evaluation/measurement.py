"""All variants side by side over the same text, each token's metrics kept."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from fp8calib import console
from fp8calib.errors import CheckFailed, ModelError
from fp8calib.evaluation.attention_errors import first_nonfinite_layer
from fp8calib.evaluation.metrics import NOISE, TokenMetrics, TokenTable, compare
from fp8calib.evaluation.variants import Run
from fp8calib.runtime.scoring import Scored

_CPU_TOKENS = 128  # in a pass
_GPU_TOKENS = 4096
_LOGITS_SHARE = 0.25  # of the free memory of a GPU, for the logits of a pass of all variants


def measure(
    runs: Sequence[Run],
    rows: Sequence[Sequence[int]],
    tables: Mapping[str, TokenTable],
    limit: int,
) -> None:
    """Compare the predictions of every token of `rows` with those of the first run.

    A pass has `limit` tokens, and that many of every variant are in memory at a time. `tables` has
    a table for each variant, by key, and grows as the measurement goes, so that something is left
    of one that is interrupted. With an entry NOISE, the first run is also compared with itself,
    computed in passes of another size.

    Raises:
        ModelError: logits of a native cache are not finite.
        CheckFailed: logits under an FP8 cache are not finite.
    """
    columns = [*runs]
    streams = [run.score(rows, limit) for run in runs]
    if NOISE in tables:
        columns.append(replace(runs[0], variant=replace(runs[0].variant, key=NOISE)))
        streams.append(_recut(runs[0].score(rows, noise_pass(limit)), rows, limit))
    total = len(columns) * sum(map(len, rows))
    started, done = time.perf_counter(), 0
    unchecked: deque[_Unchecked] = deque()
    with console.progress(f"verifying {len(runs)} variants (tokens)", total) as bar:
        for pieces in zip(*streams, strict=True):
            row, first = pieces[0].row, pieces[0].start
            targets = rows[row][first + 1 : first + 1 + len(pieces[0].logits)]
            if targets:
                count, device = len(targets), pieces[0].logits.device
                found = compare(
                    [piece.logits[:count] for piece in pieces],
                    torch.tensor(targets, device=device),
                )
                for run, metrics in zip(columns, found, strict=True):
                    tables[run.variant.key].add(row, first, metrics)
                unchecked.append(_Unchecked(columns, found, rows[row], row, first))
                if len(unchecked) > 1:  # those before: a GPU goes on with these meanwhile
                    unchecked.popleft().check()
            step = len(columns) * len(pieces[0].logits)
            done += step
            bar.advance(step, f"{done / (time.perf_counter() - started):,.0f} tokens/s")
        for piece in unchecked:
            piece.check()


def tokens_per_pass(runs: Sequence[Run]) -> int:
    """Fewer where the logits of all variants would crowd the memory of a GPU."""
    model = runs[0].loaded.model
    if model.device.type != "cuda":
        return _CPU_TOKENS
    free, _ = torch.cuda.mem_get_info(model.device)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    fit = int(free * _LOGITS_SHARE) // ((len(runs) + 1) * vocabulary * model.dtype.itemsize)
    return max(256, min(_GPU_TOKENS, fit))


def noise_pass(limit: int) -> int:
    """Tokens in a pass that is to round differently: an odd number, well below `limit`."""
    return limit * 5 // 8 + 1


def _recut(pieces: Iterator[Scored], rows: Sequence[Sequence[int]], limit: int) -> Iterator[Scored]:
    """The same logits in the pieces that passes of `limit` tokens make of `rows`."""
    waiting: list[torch.Tensor] = []
    for row, tokens in enumerate(rows):
        for start in range(0, len(tokens), limit):
            wanted = min(limit, len(tokens) - start)
            while sum(map(len, waiting)) < wanted:
                waiting.append(next(pieces).logits)
            joined = torch.cat(waiting) if len(waiting) > 1 else waiting[0]
            waiting = [joined[wanted:]] if len(joined) > wanted else []
            yield Scored(row, start, joined[:wanted])


class _Unchecked:
    """Metrics of one piece that may hold NaN or infinity."""

    def __init__(
        self,
        runs: Sequence[Run],
        metrics: Sequence[TokenMetrics],
        tokens: Sequence[int],
        row: int,
        first: int,
    ) -> None:
        self._runs, self._tokens, self._row, self._first = runs, tokens, row, first
        self._finite = torch.stack([torch.isfinite(m.nll + m.kl) for m in metrics])

    def check(self) -> None:
        if bool(self._finite.all()):
            return
        number, at = (~self._finite).nonzero()[0].tolist()
        run, end = self._runs[number], self._first + at + 1
        loaded, kv_format = run.loaded, run.variant.kv_format
        layer = first_nonfinite_layer(loaded.model, loaded.layers, kv_format, self._tokens[:end])
        where = f"first in {layer}" if layer else "no attention layer is at fault"
        message = (
            f"{run.variant.title}: the logits of document {self._row} at position {end - 1} hold "
            f"NaN or infinity, {where}"
        )
        if not kv_format.fp8_layers:
            raise ModelError(f"{message}; try --dtype float32, or look at that text")
        raise CheckFailed(message)
