"""`sensitivity`: which layers FP8 hurts, and the fewest to leave in 16 bit within a budget."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from fp8calib import __version__
from fp8calib.checkpoint import Checkpoint, open_checkpoint
from fp8calib.checkpoint.amend import amend, check_amendable
from fp8calib.checkpoint.folder import SIDECAR
from fp8calib.checkpoint.serving import SKIP_FLAG
from fp8calib.data import TokenData
from fp8calib.errors import UserError
from fp8calib.evaluation.attention_errors import LayerError, layer_errors
from fp8calib.evaluation.end_to_end import VerifyConfig, describe
from fp8calib.evaluation.sensitivity_measure import Exemption, Loss, Measurements, Memory
from fp8calib.evaluation.sensitivity_search import Budget, Point, Search
from fp8calib.evaluation.text import load_text
from fp8calib.evaluation.variants import as_served
from fp8calib.layers import LayerSpec
from fp8calib.models import cache_dir, resolve_model
from fp8calib.runtime.cache_words import Arithmetic, check_words
from fp8calib.runtime.kv_cache_dtype import NATIVE_WORDS, choose_kv_format
from fp8calib.runtime.kv_format import KVFormat, owner_of
from fp8calib.runtime.loader import LoadedModel, load

_ERROR_DOCUMENTS = 4


@dataclass(frozen=True)
class SensitivityConfig:
    """What to search for, and on what.

    budget_kl: mean KL per token, in nats, that the cache may cost; keep_bytes: percent of the
        native cache's bytes that it may take. One of them.
    kv_cache_dtype, attention, missing_scales, dataset, split, text_column, messages_column, seed,
        device, dtype, trust_remote_code: as in `VerifyConfig`.
    samples, max_seq_len: texts, and tokens that each is cut to; layers one by one are measured on
        a quarter of the texts.
    resume: go on from what an interrupted run with the same options has measured.
    """

    budget_kl: float | None = None
    keep_bytes: float | None = None
    kv_cache_dtype: str = "auto"
    attention: Arithmetic | None = None
    missing_scales: str = "refuse"
    dataset: str | None = None
    split: str | None = None
    text_column: str | None = None
    messages_column: str | None = None
    samples: int = 16
    max_seq_len: int = 256
    seed: int = 42
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    resume: bool = False

    def budget(self) -> Budget:
        return Budget(self.budget_kl, None if self.keep_bytes is None else self.keep_bytes / 100)

    def text(self) -> VerifyConfig:
        """The same choice of text for `load_text`."""
        shared = {f.name for f in fields(VerifyConfig)} & {f.name for f in fields(self)}
        return VerifyConfig(**{name: getattr(self, name) for name in shared})


@dataclass(frozen=True)
class LayerSensitivity:
    """One layer: the loss when it alone is in FP8, and when its K or V alone is (None where not
    measured); the error of its attention output with the scales in use and at scale 1.0."""

    index: int
    name: str
    alone: Loss | None
    k_alone: Loss | None
    v_alone: Loss | None
    errors: LayerError
    errors_at_1: LayerError
    exempt: bool


@dataclass(frozen=True)
class Sensitivity:
    """What a search found. `share`s are bytes relative to the native cache.

    whole: everything in FP8; curve: whole layers exempt, by bytes; proposal: what vLLM can serve
    with `skip_layers`, the value of its flag; split: K or V of layers exempt, where that does as
    well with fewer bytes (None where it does not), which vLLM cannot serve. All None, or short,
    when `partial`: the run was interrupted.
    """

    model: str
    kv_cache: str
    attention: str
    budget: Budget
    dataset: dict[str, Any]
    layers: list[LayerSensitivity]
    whole: Point | None
    curve: list[Point]
    proposal: Point | None
    split: Point | None
    skip_layers: list[str] | None
    warnings: list[str]
    versions: dict[str, str]
    device: str
    dtype: str
    partial: bool
    command: str | None = field(default=None, compare=False)
    date: str = field(default="", compare=False)
    seconds: float = field(default=0.0, compare=False)

    @property
    def skip_flag(self) -> str | None:
        """vLLM's flag for the proposal; None where no layer need be exempt."""
        return f"{SKIP_FLAG} {' '.join(self.skip_layers)}" if self.skip_layers else None

    def to_dict(self) -> dict[str, Any]:
        content = asdict(self) | {"skip_flag": self.skip_flag}
        for point in [content["whole"], content["proposal"], content["split"], *content["curve"]]:
            if point is not None:
                point["exempt"] = {kind: sorted(found) for kind, found in point["exempt"].items()}
        return content


def sensitivity(
    model: str, *, apply: bool = False, command: str | None = None, **options: Any
) -> Sensitivity:
    """Find out which layers of `model` lose most by an FP8 cache, and the fewest that must stay in
    16 bit for the budget.

    Args:
        model: a calibrated checkpoint, or a plain model, which is judged at scale 1.0.
        apply: write the list into the checkpoint's fp8calib.json and model card.
        command: the command line, to be kept in the result.
        options: fields of SensitivityConfig.

    After Ctrl-C the result is `partial`, with what had been measured; nothing is applied then.

    Raises:
        UserError: a model, text or option that is refused.
        CheckFailed: logits are not finite.
    """
    start = time.perf_counter()
    config = SensitivityConfig(**options)
    budget, text = config.budget(), config.text()
    check_words(config.kv_cache_dtype, config.attention or "accurate", config.missing_scales)
    folder = resolve_model(model)
    checkpoint = open_checkpoint(folder)
    if apply:
        check_amendable(folder)
    if config.kv_cache_dtype in NATIVE_WORDS:
        raise UserError(f"--kv-cache-dtype {config.kv_cache_dtype} is not FP8: nothing to search")
    data, warnings = load_text(model, folder, checkpoint.sidecar or {}, text)
    loaded, measurements, more = _measurements(model, data, config)
    served = measurements.served
    own = [layer for layer in loaded.layers if layer.kv_source is None]
    search = Search(measurements, own, budget, max(1, len(data.rows) // 4))
    errors, partial = _errors(measurements), False
    try:
        search.run()
    except KeyboardInterrupt:
        partial = True
    result = Sensitivity(
        model=model,
        kv_cache=served.describe(loaded.layers),
        attention=served.arithmetic,
        budget=budget,
        dataset=describe(data),
        **findings(search, errors, loaded.layers),
        warnings=[*warnings, *more],
        versions={"fp8calib": __version__}
        | {name: version(name) for name in ("torch", "transformers")},
        device=str(loaded.model.device),
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        partial=partial,
        command=command,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - start, 2),
    )
    if not partial:
        if apply:
            skip = result.skip_layers or []
            record = search_record(search, skip, result.dataset)
            amend(folder, skip_layers=skip, sensitivity=record)
        measurements.memory.discard()
    return result


def _measurements(
    model: str, data: TokenData, config: SensitivityConfig
) -> tuple[LoadedModel, Measurements, list[str]]:
    """The model, loaded, with what it measures, and what to say about its cache."""
    loaded = load(
        model,
        device=config.device,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
    )
    word = "fp8" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    choice = choose_kv_format(
        loaded, word, [], config.attention or "accurate", config.missing_scales
    )
    served = as_served(choice.kv_format, config.attention)
    identity = _identity(loaded.checkpoint, data, served, config)
    memory = Memory(cache_dir() / "sensitivity" / f"{identity[:16]}.json", identity, config.resume)
    measurements = Measurements(loaded.model, loaded.layers, served, data.rows, memory)
    return loaded, measurements, choice.warnings


def findings(
    search: Search, errors: list[list[LayerError]], layers: list[LayerSpec]
) -> dict[str, Any]:
    """The fields of a Sensitivity that a search fills."""
    exempt = search.proposal.exempt.layers if search.proposal else frozenset()
    return {
        "layers": [
            LayerSensitivity(
                index=layer.index,
                name=layer.name,
                alone=search.alone.get(layer.index),
                k_alone=search.parts.get((layer.index, "k")),
                v_alone=search.parts.get((layer.index, "v")),
                errors=next(e for e in errors[0] if e.index == layer.index),
                errors_at_1=next(e for e in errors[-1] if e.index == layer.index),
                exempt=layer.index in exempt,
            )
            for layer in search.layers
        ],
        "whole": next((p for p in search.points if p.exempt == Exemption()), None),
        "curve": search.curve(),
        "proposal": search.proposal,
        "split": search.split,
        "skip_layers": None if search.proposal is None else skip_words(exempt, layers),
    }


def search_record(
    search: Search, skip_layers: Sequence[str], text: dict[str, Any]
) -> dict[str, Any]:
    """What fp8calib.json keeps of a search that has ended."""
    assert search.proposal is not None
    return {
        "budget": asdict(search.budget),
        "skip_layers": list(skip_layers),
        "kl": asdict(search.proposal.loss.kl),
        "share": search.proposal.share,
        "curve": [
            {
                "skip_layers": [str(index) for index in sorted(point.exempt.layers)],
                "share": point.share,
                "kl": asdict(point.loss.kl),
            }
            for point in search.curve()
        ],
        "text": text,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def skip_words(exempt: frozenset[int], layers: list[LayerSpec]) -> list[str]:
    """The value of vLLM's flag: the exempt layers, and those that re-use their K and V."""
    return [str(layer.index) for layer in layers if owner_of(layer) in exempt]


def _errors(measurements: Measurements) -> list[list[LayerError]]:
    """Of the attention outputs, with the served scales and, where that is not the same, at 1.0."""
    served = measurements.served
    formats = [served]
    if served.scales is not None:
        formats.append(replace(served, scales=None, arithmetic="accurate"))
    rows = measurements.rows[:_ERROR_DOCUMENTS]
    return layer_errors(measurements.model, measurements.layers, formats, rows)


def _identity(
    checkpoint: Checkpoint, data: TokenData, served: KVFormat, config: SensitivityConfig
) -> str:
    """What measurements depend on."""
    files = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in sorted(checkpoint.path.iterdir())
        if file.suffix in (".safetensors", ".json") and file.name != SIDECAR
    ]
    scales = None
    if served.scales is not None:
        scales = {
            index: [(kind, values.tolist()) for kind, values in layer.items()]
            for index, layer in served.scales.layers.items()
        }
    facts = (
        __version__,
        str(checkpoint.path.resolve()),
        files,
        data.fingerprint,
        [len(row) for row in data.rows],
        (str(served.native), served.fp8_format, served.arithmetic, scales),
        (config.device, version("torch"), version("transformers")),
    )
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
