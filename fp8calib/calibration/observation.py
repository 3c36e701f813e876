"""One pass of a model over the calibration data: batches planned, shared among processes, observed,
saved on the way and shown in progress."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fp8calib import console
from fp8calib.calibration.core import (
    Batch,
    Collector,
    LayerRanges,
    calibration_pass,
    make_batch,
    plan_batches,
)
from fp8calib.calibration.oneshot import run_oneshot
from fp8calib.calibration.progress_file import ProgressFile, fingerprint
from fp8calib.calibration.ranks import Ranks, merge
from fp8calib.data import TokenData
from fp8calib.errors import DataError
from fp8calib.model_loading import vocabulary_size
from fp8calib.recipe import Calibration


def observe(
    model: Any,
    tokenizer: Any,
    data: TokenData,
    asked: Calibration,
    *,
    mine: Ranks,
    output: Path,
    identity: str,
    checkpoint_every: int | None = None,
    resume: bool = False,
) -> dict[int, LayerRanges]:
    """What a forward pass over `data` shows of q, k and v, by layer index, in all processes.

    `identity` tells this model and these options from others; a run with another identity cannot be
    resumed. The state is saved every `checkpoint_every` batches.

    Raises:
        DataError: tokens that the model does not have, or values that are not finite.
        UserError: nothing to resume from, or something else.
    """
    vocabulary = vocabulary_size(model)
    largest = max(max(row) for row in data.rows)
    if largest >= vocabulary:
        raise DataError(f"token id {largest} is beyond the model's vocabulary of {vocabulary}")
    size = asked.batch_size or (8 if model.device.type == "cuda" else 4)
    plan = plan_batches(data.rows, size)[mine.rank :: mine.world_size]
    collector = Collector(asked.query)
    place = (mine.rank, mine.world_size)
    whole = fingerprint(identity=identity, data=data.fingerprint, size=size, place=place)
    file = ProgressFile(output, mine.rank, whole)
    done = 0
    if resume:
        done, collector.statistics = file.load()
        console.info(f"resuming after {done} of {len(plan)} batches")
    batches = [make_batch(data.rows, texts) for texts in plan[done:]]
    total = sum(batch.num_tokens for batch in batches)
    with console.progress("calibrating (tokens)", total) as bar:
        start, tokens = time.perf_counter(), 0

        def on_batch(batch: Batch) -> None:
            nonlocal tokens, done
            tokens, done = tokens + batch.num_tokens, done + 1
            if checkpoint_every and done % checkpoint_every == 0:
                file.save(done, collector.statistics)
            bar.advance(batch.num_tokens, f"{tokens / (time.perf_counter() - start):,.0f} tokens/s")

        if _oneshot_accepts(model):
            run_oneshot(model, tokenizer, batches, collector=collector, on_batch=on_batch)
        else:
            calibration_pass(model, batches, collector, on_batch)
    collector.statistics = merge(collector.statistics, mine, model.device)
    return collector.ranges()


def _oneshot_accepts(model: Any) -> bool:
    """Whether llm-compressor takes the model: unquantized, and with a folder to look at."""
    unquantized = getattr(model.config, "quantization_config", None) is None
    return unquantized and Path(str(model.config.name_or_path)).is_dir()
