"""One pass of a model over the calibration data: batches planned, observed, shown in progress."""

from __future__ import annotations

import time
from typing import Any

from fp8calib import console
from fp8calib.calibration.core import Batch, LayerRanges, make_batch, plan_batches
from fp8calib.calibration.oneshot import run_oneshot
from fp8calib.data import TokenData
from fp8calib.errors import DataError
from fp8calib.model_loading import vocabulary_size
from fp8calib.recipe import Calibration


def observe(
    model: Any, tokenizer: Any, data: TokenData, asked: Calibration
) -> dict[int, LayerRanges]:
    """What a forward pass over `data` shows of q, k and v, by layer index.

    Raises:
        DataError: tokens that the model does not have, or values that are not finite.
    """
    vocabulary = vocabulary_size(model)
    largest = max(max(row) for row in data.rows)
    if largest >= vocabulary:
        raise DataError(f"token id {largest} is beyond the model's vocabulary of {vocabulary}")
    size = asked.batch_size or (8 if model.device.type == "cuda" else 4)
    batches = [make_batch(data.rows, texts) for texts in plan_batches(data.rows, size)]
    with console.progress("calibrating (tokens)", data.num_tokens) as bar:
        start, done = time.perf_counter(), 0

        def on_batch(batch: Batch) -> None:
            nonlocal done
            done += batch.num_tokens
            bar.advance(batch.num_tokens, f"{done / (time.perf_counter() - start):,.0f} tokens/s")

        return run_oneshot(model, tokenizer, batches, query=asked.query, on_batch=on_batch).ranges()
