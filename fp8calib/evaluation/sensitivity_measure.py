"""KL of many cache formats from native on the same text, remembered in a file.

Formats differ in what stays native of one served format (`Exemption`). Several run side by side, so
that native runs once for all of them; nothing is measured twice, not even after an interruption.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from fp8calib import console
from fp8calib.errors import CheckFailed, UserError
from fp8calib.evaluation.bootstrap import Estimate, Resampled
from fp8calib.evaluation.metrics import compare
from fp8calib.layers import LayerSpec
from fp8calib.runtime.kv_format import KVFormat
from fp8calib.runtime.kv_store import cache_groups
from fp8calib.runtime.scoring import score

# Tokens in a forward pass, and formats side by side: their logits are in memory at once.
_BATCHED_TOKENS = {"cpu": 256, "cuda": 1024}
_SIDE_BY_SIDE = 6
_SUMS = ("kl", "nll", "top1")


@dataclass(frozen=True)
class Exemption:
    """What stays native of an FP8 cache: whole layers, K of some, V of others (by index)."""

    layers: frozenset[int] = frozenset()
    k: frozenset[int] = frozenset()
    v: frozenset[int] = frozenset()

    def applied(self, served: KVFormat) -> KVFormat:
        fp8 = served.fp8_layers - self.layers
        return replace(served, fp8_layers=fp8, native_k=self.k & fp8, native_v=self.v & fp8)

    def __str__(self) -> str:
        parts = [
            f"{name} {' '.join(map(str, sorted(indices)))}"
            for name, indices in (("layers", self.layers), ("K of", self.k), ("V of", self.v))
            if indices
        ]
        return ", ".join(parts) or "nothing"


def kv_bytes(layers: Sequence[LayerSpec], kv_format: KVFormat) -> int:
    """Bytes that 16 tokens take in the caches of all layers."""
    return sum(group.block_bytes(kv_format, 16) for group in cache_groups(layers))


class Memory:
    """What has been measured, in a file that is replaced whole; `path` None keeps it in memory."""

    def __init__(self, path: Path | None, identity: str, resume: bool) -> None:
        self.path, self.identity = path, identity
        self.sums: dict[str, dict[str, list[float]]] = {}
        if path is not None and resume and path.exists():
            self.sums = self._read(path)

    def _read(self, path: Path) -> dict[str, dict[str, list[float]]]:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            same = content["identity"] == self.identity
            sums = {
                str(key): {name: [float(x) for x in entry[name]] for name in _SUMS}
                for key, entry in content["sums"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            raise UserError(
                f"{path} is damaged ({problem}): start again without --resume"
            ) from None
        if not same:
            raise UserError(
                f"{path} belongs to a run with another model, text or options: start again "
                "without --resume"
            )
        return sums

    def save(self) -> None:
        if self.path is None:
            return
        try:
            self._write(self.path)
        except OSError as problem:  # such as a home that cannot be written: no reason to stop
            console.warn(f"this run cannot be resumed: {self.path}: {problem.strerror}")
            self.path = None

    def _write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        with unfinished.open("w", encoding="utf-8") as file:
            json.dump({"identity": self.identity, "sums": self.sums}, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)

    def discard(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Loss:
    """What a format costs against native: mean KL per token in nats, perplexity relative to
    native's, share of tokens with native's top prediction."""

    kl: Estimate
    ppl_increase: Estimate
    top1: Estimate


class Measurements:
    """Measures exemptions of `served` on `rows`, the native cache of the same model being the
    reference. Rows have at least two tokens."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[LayerSpec],
        served: KVFormat,
        rows: Sequence[Sequence[int]],
        memory: Memory | None = None,
    ) -> None:
        self.model, self.layers, self.served, self.rows = model, layers, served, rows
        self.memory = memory or Memory(None, "", False)
        self.limit = _BATCHED_TOKENS[model.device.type]

    def share(self, exemption: Exemption) -> float:
        """Bytes of the cache, relative to the native one's."""
        native = kv_bytes(self.layers, KVFormat(self.served.native))
        return kv_bytes(self.layers, exemption.applied(self.served)) / native

    def measure(
        self, exemptions: Sequence[Exemption], what: str, documents: int | None = None
    ) -> list[Loss]:
        """The loss of each, on the first `documents` rows (all of them if None); `what` is shown
        beside the progress bar.

        Raises:
            CheckFailed: logits are not finite.
        """
        self._run(exemptions, what, documents)
        return [self._loss(exemption, documents) for exemption in exemptions]

    def known(self, exemption: Exemption, documents: int | None = None) -> bool:
        return self._key(exemption, documents) in self.memory.sums

    def perplexity(self, exemption: Exemption | None) -> float:
        """Of what has been measured on all rows; None is the native cache."""
        key = self._native(None) if exemption is None else self._key(exemption, None)
        return float(np.exp(self._sums(key)["nll"].sum() / self._tokens(None).sum()))

    def difference(self, one: Exemption, other: Measurements, theirs: Exemption) -> Estimate:
        """Mean KL of `one` less that of another measurement on the same rows, paired."""
        tokens = self._tokens(None)
        sums = {
            "tokens": tokens,
            "one": self._sums(self._key(one, None))["kl"],
            "other": other._sums(other._key(theirs, None))["kl"],
        }
        return Resampled(sums).estimate(lambda t: (t["one"] - t["other"]) / t["tokens"])

    def _run(self, exemptions: Sequence[Exemption], what: str, documents: int | None) -> None:
        missing = [e for e in dict.fromkeys(exemptions) if not self.known(e, documents)]
        groups = [missing[i : i + _SIDE_BY_SIDE] for i in range(0, len(missing), _SIDE_BY_SIDE)]
        tokens = sum(map(len, self.rows[:documents]))
        total = sum(len(group) + 1 for group in groups) * tokens
        with console.progress(f"{what} (tokens)", total) as bar:
            for group in groups:
                self._run_group(group, documents, bar)

    def _run_group(
        self, group: Sequence[Exemption], documents: int | None, bar: console.Bar
    ) -> None:
        rows = self.rows[:documents]
        formats = [KVFormat(self.served.native), *(e.applied(self.served) for e in group)]
        streams = [
            score(self.model, self.layers, each, rows, max_batched_tokens=self.limit)
            for each in formats
        ]
        sums = np.zeros((len(formats), len(_SUMS), len(rows)))
        for pieces in zip(*streams, strict=True):
            row, first = pieces[0].row, pieces[0].start
            targets = rows[row][first + 1 : first + 1 + len(pieces[0].logits)]
            if targets:
                device, count = pieces[0].logits.device, len(targets)
                found = compare(
                    [piece.logits[:count] for piece in pieces],
                    torch.tensor(targets, device=device),
                )
                for number, metrics in enumerate(found):
                    sums[number, :, row] += [float(getattr(metrics, n).sum()) for n in _SUMS]
            bar.advance(len(formats) * len(pieces[0].logits))
        if not np.isfinite(sums).all():
            raise CheckFailed(
                "logits hold NaN or infinity: `fp8calib verify` tells in which layer first"
            )
        keys = [self._native(documents), *(self._key(e, documents) for e in group)]
        for key, found_sums in zip(keys, sums, strict=True):
            entry = {name: found_sums[i].tolist() for i, name in enumerate(_SUMS)}
            self.memory.sums[key] = entry
        self.memory.save()

    def _key(self, exemption: Exemption, documents: int | None) -> str:
        return f"{len(self.rows[:documents])} texts, native: {exemption}"

    def _native(self, documents: int | None) -> str:
        return f"{len(self.rows[:documents])} texts, native"

    def _tokens(self, documents: int | None) -> np.ndarray:
        return np.array([len(row) - 1.0 for row in self.rows[:documents]])

    def _sums(self, key: str) -> dict[str, np.ndarray]:
        return {name: np.array(values) for name, values in self.memory.sums[key].items()}

    def _loss(self, exemption: Exemption, documents: int | None) -> Loss:
        native = self._sums(self._native(documents))["nll"]
        sums = self._sums(self._key(exemption, documents))
        totals = Resampled({"tokens": self._tokens(documents), "native": native, **sums})
        return Loss(
            totals.estimate(lambda t: t["kl"] / t["tokens"]),
            totals.estimate(lambda t: np.expm1((t["nll"] - t["native"]) / t["tokens"])),
            totals.estimate(lambda t: t["top1"] / t["tokens"]),
        )
