"""`fp8calib inspect`: what scales a checkpoint holds, and what vLLM would do with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fp8calib.checkpoint import names
from fp8calib.checkpoint.reader import SINGLE, Checkpoint, open_checkpoint, scale_set
from fp8calib.checkpoint.scheme import METHOD, quantization_config
from fp8calib.checkpoint.serving import serve_command, serving_notes
from fp8calib.errors import ScaleError, UserError
from fp8calib.layers import resolve_skip_layers
from fp8calib.scales import KINDS, Kind, Strategy, problems, scale_from_amax


@dataclass(frozen=True)
class LayerReport:
    """One attention layer's scales as they lie in the file: float32 values, one or one per head;
    None where there is none. `skipped`: recorded as to be left in 16 bit."""

    index: int
    name: str
    q_scale: list[float] | None
    k_scale: list[float] | None
    v_scale: list[float] | None
    sliding_window: int | None
    skipped: bool

    def scale(self, kind: Kind) -> list[float] | None:
        return getattr(self, f"{kind}_scale")


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found. `problems` are the ways in which the checkpoint would not run with
    calibrated scales everywhere; `notes` are worth knowing. `kv_cache_dtype` is what vLLM's `auto`
    resolves to: fp8, or auto for the model's own dtype."""

    checkpoint: str
    strategy: Strategy | None
    kv_cache_dtype: str
    skip_layers: list[str]
    layers: list[LayerReport]
    problems: list[str]
    notes: list[str]
    serve: str

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok} | asdict(self)


def inspect(checkpoint: Path | str) -> Inspection:
    """Read a checkpoint's scales and say whether vLLM would run with them.

    Reads headers and scale tensors only, and imports no torch.

    Args:
        checkpoint: a folder, a Hugging Face Hub id, or the name of an embedded model.
    Raises:
        CheckpointError: the checkpoint cannot be read, or declares a scheme that vLLM refuses.
    """
    path = Path(checkpoint)
    if not path.is_dir():
        from fp8calib.models import resolve_model

        path = resolve_model(str(checkpoint))
    opened = open_checkpoint(path)
    declared = opened.strategy
    section = quantization_config(opened.config) or {}
    # Other methods' checkpoints may carry scales without a scheme; vLLM reads them when told fp8.
    by_flag = bool(opened.scales) and section.get("quant_method", METHOD) != METHOD
    strategy = declared or ("tensor" if by_flag else None)
    skip, skipped = _recorded_skip_layers(opened)
    notes = list(_notes(opened))
    if strategy and opened.scales:
        has_query = any("q" in kinds for kinds in opened.scales.values())
        notes = serving_notes(strategy, has_query, skip) + notes
    if by_flag and not declared:
        notes[0] = "--kv-cache-dtype auto stays in 16 bit: pass --kv-cache-dtype fp8."
    return Inspection(
        checkpoint=str(checkpoint),
        strategy=strategy,
        kv_cache_dtype="fp8" if declared else "auto",
        skip_layers=skip,
        layers=_layer_reports(opened, skipped),
        problems=list(_problems(opened, strategy)),
        notes=notes,
        serve=serve_command(str(checkpoint), skip, "fp8" if by_flag and not declared else "auto"),
    )


def _recorded_skip_layers(checkpoint: Checkpoint) -> tuple[list[str], frozenset[int]]:
    recorded = checkpoint.recorded_skip_layers
    if not recorded or not checkpoint.layers:
        return [], frozenset()
    try:
        return resolve_skip_layers(recorded, checkpoint.layers)
    except UserError as problem:
        raise UserError(f"{checkpoint.path}: fp8calib.json: {problem}") from None


def _layer_reports(checkpoint: Checkpoint, skipped: frozenset[int]) -> list[LayerReport]:
    known = {layer.index: layer for layer in checkpoint.layers}
    reports = []
    for index in sorted(known.keys() | checkpoint.scales.keys()):
        layer = known.get(index)
        found = checkpoint.scales.get(index, {})
        values = {kind: found[kind].values.tolist() if kind in found else None for kind in KINDS}
        name = layer.name if layer else next(iter(found.values())).tensor.rpartition(".")[0]
        window = layer.sliding_window if layer else None
        reports.append(
            LayerReport(
                index, name, values["q"], values["k"], values["v"], window, index in skipped
            )
        )
    return reports


def _problems(checkpoint: Checkpoint, strategy: Strategy | None) -> Iterator[str]:
    scales = checkpoint.scales
    if not scales:
        yield _without_scales(strategy)
        return
    if strategy is None:
        yield "config.json declares no kv_cache_scheme: vLLM ignores the scales"
    yield from _file_problems(checkpoint)
    yield from _missing(checkpoint)
    sizes = {scale.values.size for kinds in scales.values() for scale in kinds.values()}
    assumed: Strategy = strategy or ("tensor" if sizes == {1} else "attn_head")
    complete = scale_set(checkpoint, assumed)
    own = [layer for layer in checkpoint.layers if layer.index in complete.layers]
    yield from problems(complete, own or checkpoint.layers)
    yield from _uncalibrated(checkpoint)


def _without_scales(strategy: Strategy | None) -> str:
    if strategy:
        return (
            "not calibrated: config.json declares an FP8 cache but there are no scales; vLLM would "
            "run every layer at 1.0"
        )
    return (
        "not calibrated: there are no KV-cache scales; vLLM keeps its cache in 16 bit, and would "
        "run every layer at scale 1.0 with --kv-cache-dtype fp8"
    )


def _file_problems(checkpoint: Checkpoint) -> Iterator[str]:
    if checkpoint.has_index and SINGLE in checkpoint.unlisted:
        yield (
            f"{SINGLE} lies beside an index that does not list it: transformers takes it and "
            "ignores the scales"
        )
    if not checkpoint.layers:
        yield "no attention layer is recognised in the weights: a missing scale would not be seen"
    unloaded = Counter(
        scale.file for kinds in checkpoint.scales.values() for scale in kinds.values()
        if not scale.loaded
    )  # fmt: skip
    for file, count in unloaded.items():
        yield (
            f"{count} scales lie in {file}, which the index does not list: vLLM skips it and runs "
            "those layers at 1.0"
        )
    for form, example in _forms(checkpoint).items():
        if form in names.MISREAD:
            yield f"{example} is an older name: {names.MISREAD[form]}"


def _forms(checkpoint: Checkpoint) -> dict[str, str]:
    """The forms of names in use, each with one tensor that has it."""
    every = [scale for kinds in checkpoint.scales.values() for scale in kinds.values()]
    return {scale.form: scale.tensor for scale in reversed(every)}


def _missing(checkpoint: Checkpoint) -> Iterator[str]:
    query = any("q" in kinds for kinds in checkpoint.scales.values())
    for layer in checkpoint.layers:
        found = checkpoint.scales.get(layer.index, {})
        lacking = [f"{kind}_scale" for kind in "kvq"[: 3 if query else 2] if kind not in found]
        if lacking:
            verb = "is" if len(lacking) == 1 else "are"
            yield (
                f"layer {layer.index} ({layer.name}): {', '.join(lacking)} {verb} missing; vLLM "
                "would run at 1.0"
            )


def _uncalibrated(checkpoint: Checkpoint) -> Iterator[str]:
    """Scales that no observer would have come by. A layer's scale of exactly 1.0 is believed only
    where the recorded maxima give just that."""
    owners = {layer.index for layer in checkpoint.layers if layer.kv_source is None}
    owners = owners or set(checkpoint.scales)
    for kind in KINDS:
        values = {
            index: kinds[kind].values
            for index, kinds in checkpoint.scales.items()
            if kind in kinds and index in owners
        }
        same = np.unique(np.concatenate(list(values.values()))) if values else np.empty(0)
        if same.size == 1 and same[0] != 1 and len(values) > 1:
            yield (
                f"not calibrated: {kind}_scale is {same[0]:g} in every layer, as exporters that "
                "only cast write it"
            )
        ones = [index for index, value in values.items() if (value == 1).all()]
        ones = [index for index in ones if not _recorded_as_one(checkpoint, index, kind)]
        if ones and len(ones) == len(values):
            yield f"not calibrated: {kind}_scale is exactly 1.0 in every layer"
        elif ones:
            listed = ", ".join(map(str, ones))
            yield f"not calibrated: {kind}_scale is exactly 1.0 in layers {listed}"


def _recorded_as_one(checkpoint: Checkpoint, index: int, kind: Kind) -> bool:
    """Whether the maxima in the record do give a scale of 1.0: those of a layer without content."""
    record = checkpoint.sidecar or {}
    try:
        amax = np.asarray(record["layers"][str(index)][kind]["amax"], dtype=np.float32)
        return bool(scale_from_amax(amax.max(), record.get("margin", 1.0)) == 1)
    except (KeyError, TypeError, ValueError, ScaleError):
        return False


def _notes(checkpoint: Checkpoint) -> Iterator[str]:
    if names.PROJECTION in (forms := _forms(checkpoint)):
        yield f"{forms[names.PROJECTION]} is an older name, which vLLM maps for most models."
    dtypes: set[str] = {
        scale.dtype for kinds in checkpoint.scales.values() for scale in kinds.values()
    }
    if rounded := sorted(dtypes & {"BF16", "F16"}):
        yield (
            f"Scales are stored as {' and '.join(rounded)}: rounding may put them below amax/448, "
            "which clips the largest values."
        )
    if zero_points := sum(map(names.is_kv_zero_point, checkpoint.tensors)):
        yield f"{zero_points} zero points lie in the file; vLLM ignores each with a warning."
    if checkpoint.scales and not checkpoint.has_index and len(checkpoint.files) > 1:
        yield f"There is no index: transformers reads {SINGLE} only."
