"""`fp8calib inspect`: what scales a checkpoint holds, and what a serving engine does with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fp8calib.checkpoint import names
from fp8calib.checkpoint.findings import checkpoint_problems, forms
from fp8calib.checkpoint.reader import SINGLE, Checkpoint, open_checkpoint
from fp8calib.checkpoint.runtimes import DEFAULT, Rules, rules_for
from fp8calib.checkpoint.scheme import METHOD, check_scheme, quantization_config
from fp8calib.checkpoint.serving import serving_notes
from fp8calib.checkpoint.sharding import kv_heads
from fp8calib.errors import ScaleError, UserError
from fp8calib.layers import resolve_skip_layers
from fp8calib.scales import KINDS, Kind, Strategy


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
    calibrated scales everywhere; `notes` are worth knowing. `kv_cache_dtype` is what the engine's
    `auto` resolves to: fp8, or auto for the model's own dtype. `rules` says which versions of the
    engine this was read from."""

    checkpoint: str
    runtime: str
    rules: str
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


def inspect(checkpoint: Path | str, runtime: str = DEFAULT, tp: int = 1) -> Inspection:
    """Read a checkpoint's scales and say whether a serving engine would run with them.

    Reads headers and scale tensors only, and imports no torch.

    Args:
        checkpoint: a folder, a Hugging Face Hub id, or the name of an embedded model.
        runtime: vllm, sglang, trtllm or fp8calib.
        tp: the number of tensor-parallel ranks it is to run on.
    Raises:
        CheckpointError: the checkpoint cannot be read, or declares a scheme that vLLM refuses.
        UserError: an unknown engine, or a number of ranks that cannot be.
    """
    rules = rules_for(runtime)
    if not 1 <= tp <= 1024:
        raise UserError(f"--tp {tp}: a number of ranks is 1 to 1024")
    path = Path(checkpoint)
    if checkpoint == "" or not path.is_dir():
        from fp8calib.models import resolve_model

        path = resolve_model(str(checkpoint))
    opened = open_checkpoint(path)
    declared = opened.strategy
    in_config = check_scheme(opened.config)
    section = quantization_config(opened.config) or {}
    # Other methods' checkpoints may carry scales without a scheme; engines read them when told fp8.
    by_flag = bool(opened.scales) and section.get("quant_method", METHOD) != METHOD
    strategy = declared or ("tensor" if by_flag else None)
    skip, skipped = _recorded_skip_layers(opened)
    automatic = rules.auto_is_fp8(opened.config, in_config)
    return Inspection(
        checkpoint=str(checkpoint),
        runtime=runtime,
        rules=rules.read_from,
        strategy=strategy,
        kv_cache_dtype="fp8" if automatic else "auto",
        skip_layers=skip,
        layers=_layer_reports(opened, skipped),
        problems=list(checkpoint_problems(opened, strategy, rules, tp)),
        notes=[*_engine_notes(opened, strategy, rules, skip, automatic, tp), *_notes(opened)],
        serve=rules.command(
            str(checkpoint),
            fp8_flag=strategy is not None and not automatic,
            skip_layers=skip,
            tp=tp,
        ),
    )


def _engine_notes(
    checkpoint: Checkpoint,
    strategy: Strategy | None,
    rules: Rules,
    skip: list[str],
    automatic: bool,
    tp: int,
) -> Iterator[str]:
    if not (strategy and checkpoint.scales):
        return
    query = any("q" in kinds for kinds in checkpoint.scales.values())
    if not automatic and not rules.strategies[strategy]:
        yield f"The cache stays in 16 bit by default: pass {rules.dtype}."
    if rules.title == "vLLM":
        yield from serving_notes(strategy, query, skip)[0 if automatic else 1 :]
        yield from rules.notes if automatic else ()
    else:
        yield from rules.notes
        yield from rules.with_query if query else ()
        if skip and not rules.skip:
            yield f"{rules.title} has no flag for skip layers: they run in FP8, with their scales."
    if tp > 1 and strategy == "attn_head":
        yield from _placement(checkpoint, tp)


def _placement(checkpoint: Checkpoint, tp: int) -> Iterator[str]:
    """Which KV heads' scales each rank takes."""
    for total in sorted({layer.num_kv_heads for layer in checkpoint.layers}):
        try:
            held = [kv_heads(total, tp, rank) for rank in range(min(tp, 16))]
        except ScaleError:
            continue
        ranges = [
            str(s.start) if s.stop == s.start + 1 else f"{s.start}-{s.stop - 1}" for s in held
        ]
        more = " ..." if tp > 16 else ""
        yield f"Of {total} KV heads, ranks 0 to {tp - 1} hold {', '.join(ranges)}{more}."


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


def _notes(checkpoint: Checkpoint) -> Iterator[str]:
    if names.PROJECTION in (used := forms(checkpoint)):
        yield f"{used[names.PROJECTION]} is an older name, which vLLM maps for most models."
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
