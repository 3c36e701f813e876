"""llm-compressor's `oneshot` drives the calibration pass: our modifier and pipeline, registered.

The modifier names itself in a recipe like any of theirs, the pipeline runs its pass. An Observer of
theirs would see values flattened, without the padding mask and without their layer, so observing
stays in the attention hook (core.py) and no observer is registered.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from llmcompressor import oneshot
from llmcompressor.core import LifecycleCallbacks, active_session, create_session
from llmcompressor.modifiers import Modifier, ModifierFactory
from llmcompressor.pipelines import CalibrationPipeline
from pydantic import PrivateAttr
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from fp8calib.calibration.core import Batch, Collector, calibration_pass

PIPELINE = "fp8calib"


class KVCalibrationModifier(Modifier):
    """Observes post-RoPE K and V (and Q) of every attention layer; changes nothing in the model."""

    query: bool = True
    requires_calibration_data: bool = True
    _collector: Collector | None = PrivateAttr(default=None)
    _on_batch: Callable[[Batch], None] | None = PrivateAttr(default=None)

    def on_initialize(self, state: Any, **kwargs: Any) -> bool:
        return True

    @property
    def collector(self) -> Collector:
        self._collector = self._collector or Collector(self.query)
        return self._collector

    def observe(self, model: PreTrainedModel, batches: DataLoader) -> None:
        every = (batch for group in batches for batch in group)
        calibration_pass(model, every, self.collector, self._on_batch)


ModifierFactory.register(KVCalibrationModifier.__name__, KVCalibrationModifier)


@CalibrationPipeline.register(PIPELINE)
class KVCalibrationPipeline(CalibrationPipeline):
    """One forward pass over the batches for all KVCalibrationModifiers of the session's recipe."""

    @staticmethod
    def __call__(model: Any, dataloader: DataLoader, dataset_args: Any) -> None:
        modifiers = active_session().lifecycle.recipe.modifiers
        LifecycleCallbacks.calibration_start()
        for modifier in modifiers:
            if isinstance(modifier, KVCalibrationModifier):
                modifier.observe(model, dataloader)
        # Other modifiers of the same recipe compute weight scales at this event; left out, they
        # would keep uninitialised ones.
        LifecycleCallbacks.sequential_epoch_end(list(model.modules()))
        LifecycleCallbacks.calibration_end()


def run_oneshot(
    model: PreTrainedModel,
    tokenizer: Any,
    batches: Sequence[Batch],
    *,
    collector: Collector,
    on_batch: Callable[[Batch], None] | None = None,
) -> None:
    """Let `collector` observe `batches` through llm-compressor; the model comes back as it was."""
    modifier = KVCalibrationModifier(query="q" in collector.kinds)
    modifier._collector, modifier._on_batch = collector, on_batch
    rows: Any = list(batches)
    loader: DataLoader = DataLoader(rows, batch_size=1, collate_fn=list, shuffle=False)
    with as_it_was(model), _untouched(), create_session():
        oneshot(
            model=model,
            processor=tokenizer,
            dataset=loader,
            recipe=modifier,
            pipeline=PIPELINE,
            moe_calibrate_all_experts=False,
        )


@contextmanager
def _untouched() -> Iterator[None]:
    """Keep oneshot from preparing the model for the quantization of weights: it would copy fused
    experts apart, and round ``1 + w`` of Gemma's and Qwen3-Next's norms to bfloat16, which changes
    K and V."""
    where = "llmcompressor.entrypoints.oneshot"
    with (
        patch(f"{where}.get_non_linearized_moes", lambda model: []),
        patch(f"{where}.norm_calibration_context", lambda model: nullcontext()),
    ):
        yield


@contextmanager
def as_it_was(model: PreTrainedModel) -> Iterator[None]:
    """Undo what oneshot leaves behind: its wrapper of save_pretrained, an environment variable."""
    parallelism = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        yield
    finally:
        vars(model).pop("save_pretrained", None)
        if parallelism is None:
            os.environ.pop("TOKENIZERS_PARALLELISM", None)
