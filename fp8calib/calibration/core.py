"""The calibration pass: batches, one forward each, statistics of post-RoPE Q, K and V per layer.

It imports no llm-compressor; oneshot.py drives it from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from fp8calib.attention import decoder_of, handle_attention, plain_attention
from fp8calib.calibration.statistics import Ranges, RangeStatistics
from fp8calib.errors import DataError
from fp8calib.scales import KINDS, Kind

LayerRanges = dict[Kind, Ranges]


@dataclass(frozen=True)
class Batch:
    """Token ids int64 [B, T]; `real` bool [B, T] marks the tokens that are no padding, None when
    all are; `texts` holds the number of each row's text."""

    input_ids: torch.Tensor
    real: torch.Tensor | None
    texts: list[int]

    @property
    def num_tokens(self) -> int:
        return self.input_ids.numel() if self.real is None else int(self.real.sum())


def plan_batches(rows: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """Numbers of the texts of each batch: similar lengths together, longest first (so that memory
    runs out at once or never). Depends on the rows alone."""
    order = sorted(range(len(rows)), key=lambda text: (-len(rows[text]), text))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def make_batch(rows: Sequence[Sequence[int]], texts: list[int]) -> Batch:
    """Rows padded on the right, where causal attention keeps padding away from real tokens."""
    longest = max(len(rows[text]) for text in texts)
    input_ids = torch.zeros(len(texts), longest, dtype=torch.long)
    real = torch.zeros(len(texts), longest, dtype=torch.bool)
    for row, text in enumerate(texts):
        input_ids[row, : len(rows[text])] = torch.tensor(rows[text])
        real[row, : len(rows[text])] = True
    return Batch(input_ids, None if bool(real.all()) else real, texts)


class Collector:
    """The attention handler of calibration: keeps statistics by layer, passes attention through."""

    def __init__(self, query: bool) -> None:
        self.kinds: tuple[Kind, ...] = KINDS if query else ("k", "v")
        self.statistics: dict[tuple[int, Kind], RangeStatistics] = {}
        self._batch: Batch | None = None
        self._placed: dict[torch.device, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def start(self, batch: Batch) -> None:
        self._batch = batch
        self._placed.clear()

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The batch's texts and mask on `device`: copied there once, not by every layer."""
        assert self._batch is not None
        if device not in self._placed:
            real = self._batch.real
            texts = torch.tensor(self._batch.texts, device=device)
            self._placed[device] = texts, None if real is None else real.to(device)
        return self._placed[device]

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        assert self._batch is not None
        texts, real = self._on(key.device)
        for kind, x in zip(KINDS, (query, key, value), strict=True):
            if kind in self.kinds:
                slot = (module.layer_idx, kind)
                if slot not in self.statistics:
                    self.statistics[slot] = RangeStatistics.empty(x.shape[1], x.device)
                self.statistics[slot].reserve(max(self._batch.texts) + 1)
                self.statistics[slot].observe(x, texts, real)
        return plain_attention(module, query, key, value, attention_mask, **kwargs)

    def check_finite(self) -> None:
        """Raise DataError naming layer and text if a NaN or an infinity went by."""
        seen: dict[torch.device, list[torch.Tensor]] = {}
        for statistics in self.statistics.values():
            seen.setdefault(statistics.amax.device, []).append(statistics.amax)
        if all(bool(torch.isfinite(torch.cat(amax)).all()) for amax in seen.values()):
            return
        for (layer, kind), statistics in sorted(self.statistics.items()):
            bad = ~torch.isfinite(statistics.amax)
            if bool(bad.any()):
                text = int(statistics.text[bad].min())
                raise DataError(
                    f"layer {layer}: {kind} holds NaN or infinity in calibration text {text}; "
                    "look at that text, or try --dtype float32"
                )

    def ranges(self) -> dict[int, LayerRanges]:
        """What was seen, by layer and kind, in the order of layers, then q, k, v."""
        found: dict[int, LayerRanges] = {}
        for layer, kind in sorted(
            self.statistics, key=lambda slot: (slot[0], KINDS.index(slot[1]))
        ):
            found.setdefault(layer, {})[kind] = self.statistics[layer, kind].numpy()
        return found


@torch.no_grad()
def calibration_pass(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    collector: Collector,
    on_batch: Callable[[Batch], None] | None = None,
) -> None:
    """Run every batch through `model` up to its head and let `collector` observe.

    Raises:
        DataError: K, V or Q was not finite; names layer and text.
    """
    decoder = decoder_of(model)
    with handle_attention(model, collector):
        for batch in batches:
            collector.start(batch)
            decoder(**_inputs(batch, model.device), use_cache=False)
            collector.check_finite()
            if on_batch is not None:
                on_batch(batch)


def _inputs(batch: Batch, device: torch.device) -> dict[str, torch.Tensor]:
    inputs = {"input_ids": batch.input_ids.to(device)}
    if batch.real is None or bool(batch.real[:, 0].all()):
        return inputs  # nothing to the left of a real token: the causal mask is enough
    real = batch.real.to(device)
    inputs["attention_mask"] = real.long()
    inputs["position_ids"] = (real.long().cumsum(-1) - 1).clamp(min=0)
    return inputs
