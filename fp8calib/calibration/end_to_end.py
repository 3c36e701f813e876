"""`calibrate`: the whole way from a model's name to a checkpoint on disk."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8calib import console
from fp8calib.architectures import check_architecture
from fp8calib.calibration import record
from fp8calib.calibration.findings import data_findings, range_findings
from fp8calib.calibration.observers import make_scales, share_ranges
from fp8calib.calibration.progress_file import claimed, discard, fingerprint
from fp8calib.calibration.ranks import Ranks, check_agreement, first_alone, ranks
from fp8calib.calibration.report import kind_reports
from fp8calib.calibration.result import CalibrationResult
from fp8calib.calibration.text import load_calibration_text
from fp8calib.checkpoint import (
    check_output,
    check_source,
    needed_kv_cache_dtype,
    write_checkpoint,
)
from fp8calib.checkpoint.folder import check_room, scratch
from fp8calib.devices import check_device, check_device_map, check_dtype
from fp8calib.errors import UserError
from fp8calib.layers import resolve_skip_layers
from fp8calib.models import resolve_model
from fp8calib.recipe import Recipe


def default_output(model: str, strategy: str) -> Path:
    """`NAME-kvattn-fp8-STRATEGY` in the current folder, NAME being the last part of the model's."""
    name = Path(model).expanduser().resolve().name if Path(model).exists() else model
    return Path(f"{name.rsplit('/', 1)[-1].removeprefix('demo:')}-kvattn-fp8-{strategy}")


def calibrate(
    model: str | Path,
    output: str | Path | None = None,
    *,
    recipe: Recipe | None = None,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    link: bool = False,
    overwrite: bool = False,
    overwrite_scales: bool = False,
    dry_run: bool = False,
    checkpoint_every: int | None = None,
    resume: bool = False,
    trust_remote_code: bool = False,
    name: str | None = None,
    auto: bool = False,
    allow_pickle: bool = False,
    **options: Any,
) -> CalibrationResult:
    """Calibrate FP8 KV-cache scales for `model` and write them as a checkpoint.

    Args:
        model: a folder, a Hub id, or ``demo:smollm2-135m-instruct``.
        output: the folder to make; default `default_output`.
        recipe: what to calibrate with; default values where None.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: ``auto`` (the checkpoint's), ``bfloat16``, ``float16`` or ``float32``.
        device_map: ``auto`` or ``stream``, for models larger than one device; see
            `fp8calib.model_loading.load_model`.
        link: hard-link the weight files instead of copying them.
        overwrite: replace an earlier checkpoint at `output`.
        overwrite_scales: leave out KV-cache scales that `model` has, instead of refusing it.
        dry_run: check everything that can be checked without loading weights, write nothing.
        checkpoint_every: save what was observed every so many batches.
        resume: go on from what was saved so.
        trust_remote_code: run model code that comes with the checkpoint.
        allow_pickle: read weights from .bin files where there are no others.
        name: what the model card calls the checkpoint; the output's name where None.
        auto: choose the strategy and skip layers by measuring, see `calibration.auto`; the budget
            is the recipe's gate ``max_kl``.
        options: keys of the recipe's calibration section (see `fp8calib.recipe.Calibration`) that
            override it, e.g. ``strategy="attn_head"``, ``dataset="data.jsonl"``, ``samples=64``.

    Under torchrun every process calls this and observes its share of the data; the first writes.

    Raises:
        UserError: anything in the model, the data or the options that stands in the way; nothing
            has been written then.
    """
    check_device(device)
    check_device_map(device_map)
    check_dtype(dtype)
    if auto and (given := {"strategy", "kv_cache_dtype_skip_layers"} & options.keys()):
        raise UserError(f"auto chooses the {min(given)}: leave it out")
    recipe = (recipe or Recipe()).with_options(**options)
    how = _How(
        device=device,
        dtype=dtype,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
        link=link,
        overwrite=overwrite,
        overwrite_scales=overwrite_scales,
        checkpoint_every=checkpoint_every,
        resume=resume,
        name=name,
        auto=auto,
        allow_pickle=allow_pickle,
    )
    with ranks() as mine:
        how = replace(how, device=mine.device(device))
        if auto:
            _check_auto(recipe, how, mine)
        plan, source = _prepare(str(model), output, recipe, how, mine)
        if auto and "strategy" in recipe.calibration.model_fields_set:
            unused = recipe.calibration.strategy
            console.info(f"--auto chooses the strategy: {unused}, the recipe's, is not used")
        if dry_run:
            return replace(plan, output=None)
        if recipe.llmcompressor is None:
            return _calibrate_kv(plan, source, how, mine)
        return _quantize_first(plan, source, how, mine)


@dataclass(frozen=True)
class _How:
    """`calibrate`'s options that are no part of a recipe; see there."""

    device: str
    dtype: str
    device_map: str | None
    trust_remote_code: bool
    link: bool
    overwrite: bool
    overwrite_scales: bool
    checkpoint_every: int | None
    resume: bool
    name: str | None
    auto: bool
    allow_pickle: bool

    @property
    def load(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "dtype": self.dtype,
            "trust_remote_code": self.trust_remote_code,
        }


def _check_auto(recipe: Recipe, how: _How, mine: Ranks) -> None:
    """Raise UserError for what does not go together with --auto."""
    skip = recipe.calibration.kv_cache_dtype_skip_layers
    if skip:
        raise UserError(f"--auto chooses skip layers itself: leave {' '.join(skip)} out")
    if mine.world_size > 1 or how.device_map is not None:
        raise UserError(
            "--auto runs the model on one device in one process: leave torchrun and --device-map "
            "out, or calibrate first and use `fp8calib verify` and `fp8calib sensitivity`"
        )


def _prepare(
    model: str, output: str | Path | None, recipe: Recipe, how: _How, mine: Ranks
) -> tuple[CalibrationResult, Path]:
    """Everything that can be checked without loading weights, and the data."""
    asked = recipe.calibration
    kind = "auto" if how.auto else asked.strategy
    target = Path(output) if output is not None else default_output(model, kind)
    with first_alone(mine):
        source = resolve_model(model, how.allow_pickle)
        if how.allow_pickle:
            from fp8calib.pickled import with_safetensors

            source = with_safetensors(source)
        check_output(target, how.overwrite, source)
        checkpoint = check_source(source, how.overwrite_scales, asked.strategy)
        check_architecture(checkpoint.config)
        if checkpoint.layers:  # where they are recognised without a forward pass
            resolve_skip_layers(asked.kv_cache_dtype_skip_layers, checkpoint.layers)
        if not how.link:
            check_room(target, checkpoint.weight_files)
        data = load_calibration_text(model, source, asked, how.trust_remote_code)
    check_agreement(mine, "data", data.fingerprint)
    recipe = recipe.with_options(dataset=data.source, split=data.split)
    console.info(f"recipe:\n{recipe.to_yaml().rstrip()}")
    dtype = needed_kv_cache_dtype(checkpoint.config)
    return CalibrationResult(model, target, recipe, data, kv_cache_dtype=dtype), source


def _quantize_first(
    plan: CalibrationResult, source: Path, how: _How, mine: Ranks
) -> CalibrationResult:
    from fp8calib.calibration.weights import quantize_weights

    assert plan.output is not None and plan.recipe.llmcompressor is not None
    if mine.world_size > 1:
        raise UserError(
            "a recipe that quantizes weights runs in one process: leave torchrun out, or quantize "
            "first and calibrate the result"
        )
    with scratch(plan.output) as quantized:
        console.info("quantizing weights with llm-compressor")
        quantize_weights(source, quantized, plan.recipe.llmcompressor, plan.data.rows, **how.load)
        # linked: the scratch copy goes away
        return _calibrate_kv(plan, quantized, replace(how, link=True), mine)


def _calibrate_kv(
    plan: CalibrationResult, source: Path, how: _How, mine: Ranks
) -> CalibrationResult:
    assert plan.output is not None
    state = how.checkpoint_every or how.resume
    with claimed(plan.output, mine.rank) if state else nullcontext():
        return _observe_and_write(plan, source, how, mine)


def _observe_and_write(
    plan: CalibrationResult, source: Path, how: _How, mine: Ranks
) -> CalibrationResult:
    """Observe the model in `source`, make its scales, write them beside its weights."""
    from fp8calib.attention import probe
    from fp8calib.calibration.observation import observe
    from fp8calib.model_loading import (
        load_config,
        load_model,
        load_tokenizer,
        vocabulary_size,
    )
    from fp8calib.runtime.loader import without_attention_quantization
    from fp8calib.runtime.support import check_supported

    start = time.perf_counter()
    assert plan.output is not None
    recipe, data, asked = plan.recipe, plan.data, plan.recipe.calibration
    # The scales of an earlier calibration would be applied to K, V and Q while we observe them.
    config = without_attention_quantization(load_config(source, how.trust_remote_code))
    if how.auto:
        check_supported(config)
    loaded = load_model(source, **how.load, config=config, device_map=how.device_map)
    layers = probe(loaded)
    if how.auto:
        check_supported(config, layers)
    skip_layers, _ = resolve_skip_layers(asked.kv_cache_dtype_skip_layers, layers)
    recipe = recipe.with_options(kv_cache_dtype_skip_layers=skip_layers)
    seen = observe(
        loaded,
        load_tokenizer(source, how.trust_remote_code),
        data,
        asked,
        mine=mine,
        output=plan.output,
        identity=_identity(plan, source, str(loaded.dtype)),
        checkpoint_every=how.checkpoint_every,
        resume=how.resume,
    )
    ranges = share_ranges(layers, seen)
    choice = None
    if how.auto:
        from fp8calib.calibration.auto import choose, held_out

        text = held_out(plan.model, source, data, asked, how.trust_remote_code)
        choice = choose(loaded, layers, ranges, asked, recipe.gates, text)
        skip_layers = choice.skip_layers
        recipe = recipe.with_options(
            strategy=choice.strategy, kv_cache_dtype_skip_layers=skip_layers
        )
        asked = recipe.calibration
    scales = make_scales(layers, ranges, asked)
    result = replace(
        plan,
        recipe=recipe,
        skip_layers=skip_layers,
        layers=layers,
        scales=scales,
        reports=kind_reports(scales, ranges),
        warnings=[
            *data_findings(data.rows, vocabulary_size(loaded)),
            *range_findings(scales, ranges),
        ],
        reasons=[] if choice is None else choice.reasons,
        seconds=time.perf_counter() - start,
    )
    if mine.writes:
        dtype = str(loaded.dtype).removeprefix("torch.")
        _write(
            result, source, ranges, how, dtype=dtype, **({} if choice is None else choice.record)
        )
        discard(plan.output)
    return result


def _identity(plan: CalibrationResult, source: Path, dtype: str) -> str:
    """What tells this model and this way to observe it from others."""
    files = [
        (file.name, file.stat().st_size)
        for file in sorted(source.iterdir())
        if file.suffix in (".safetensors", ".json")
    ]
    recipe = plan.recipe.model_dump(mode="json", include={"llmcompressor"})
    query = plan.recipe.calibration.query
    return fingerprint(model=plan.model, files=files, dtype=dtype, query=query, recipe=recipe)


def _write(
    result: CalibrationResult,
    source: Path,
    ranges: record.AllRanges,
    how: _How,
    **more: Any,
) -> None:
    """`more` are further entries of fp8calib.json."""
    assert result.output is not None and result.scales is not None
    sidecar = record.sidecar(
        result.model,
        result.recipe,
        record.describe_data(result.data),
        result.layers,
        ranges,
        warnings=result.warnings,
        **more,
    )
    write_checkpoint(
        source,
        result.output,
        result.scales,
        sidecar,
        layers=result.layers,
        link=how.link,
        overwrite=how.overwrite,
        replace_scales=how.overwrite_scales,
        more_files={record.HISTOGRAMS: record.pack(ranges)},
        name=how.name,
    )
