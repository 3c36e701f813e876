"""`verify`: native and FP8 caches on the same held-out text, and the gates they must pass."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp8calib import __version__
from fp8calib.checkpoint import open_checkpoint
from fp8calib.data import TokenData
from fp8calib.devices import check_device, check_dtype
from fp8calib.errors import DataError, UserError
from fp8calib.evaluation.attention_errors import LayerError, layer_errors
from fp8calib.evaluation.checks import Checks
from fp8calib.evaluation.columns import ColumnOptions, parse_columns, plan_columns
from fp8calib.evaluation.gates import judge_all
from fp8calib.evaluation.layer_table import layer_table, recorded_search
from fp8calib.evaluation.measurement import measure, noise_pass, tokens_per_pass
from fp8calib.evaluation.metrics import NOISE, TokenTable
from fp8calib.evaluation.needle import needle_lengths
from fp8calib.evaluation.summary import Summary, suspicious
from fp8calib.evaluation.tasks import TaskSet
from fp8calib.evaluation.text import load_text, long_text
from fp8calib.evaluation.variants import Plan, Run, Variant, native_variant, plan_variants
from fp8calib.evaluation.verification import Verification
from fp8calib.model_loading import vocabulary_size
from fp8calib.models import resolve_model
from fp8calib.recipe import Gates
from fp8calib.runtime.cache_words import Arithmetic, check_words
from fp8calib.runtime.loader import LoadedModel, load

_DIAGNOSED_DOCUMENTS = 4


@dataclass(frozen=True)
class VerifyConfig:
    """What to verify on, and as what.

    dataset, split, text_column, messages_column, samples, max_seq_len, seed: see `data.load_data`;
        without a dataset, text that the default calibration does not see.
    kv_cache_dtype, kv_cache_dtype_skip_layers, attention, missing_scales: see
        `variants.plan_variants`.
    variants: the columns in place of the usual ones; see `columns.parse_columns`.
    assume_skip_flag: trust that whoever serves passes the recorded skip layers; otherwise the
        cache without them is judged too.
    against: another model whose native cache is the reference, such as the one that was quantized.
    noise_floor: measure native against itself too.
    generation: tokens to generate after each prompt; 0 leaves that check out.
    needle, needle_lengths, needle_trials: whether to look for needles; in texts of how many tokens
        (None: up to the model's maximum); how often for each length and depth.
    tasks, task_folder, task_limit: see `tasks.TaskSet`.
    """

    dataset: str | None = None
    split: str | None = None
    text_column: str | None = None
    messages_column: str | None = None
    samples: int = 32
    max_seq_len: int = 512
    seed: int = 42
    kv_cache_dtype: str = "auto"
    kv_cache_dtype_skip_layers: Sequence[str | int] | None = None
    attention: Arithmetic | None = None
    missing_scales: str = "refuse"
    variants: str | Sequence[str] | None = None
    assume_skip_flag: bool = False
    against: str | None = None
    noise_floor: bool = True
    generation: int = 0
    needle: bool = False
    needle_lengths: Sequence[int] | None = None
    needle_trials: int = 1
    tasks: Sequence[str] = ()
    task_folder: str | None = None
    task_limit: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_device(self.device)
        check_dtype(self.dtype)
        check_words(self.kv_cache_dtype, self.attention or "accurate", self.missing_scales)
        if self.variants is not None:
            parse_columns(self.variants)
            if self.kv_cache_dtype != "auto":
                raise UserError("--variants and --kv-cache-dtype exclude each other")
        for name, least in (("generation", 0), ("needle_trials", 1), ("task_limit", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name} must be at least {least}, got {value}")
        if self.task_set is not None:
            self.task_set.check()

    @property
    def task_set(self) -> TaskSet | None:
        if not self.tasks:
            return None
        folder = None if self.task_folder is None else Path(self.task_folder).expanduser()
        return TaskSet(tuple(self.tasks), folder, self.task_limit)


def verify(model: str, *, gates: Gates | None = None, **options: Any) -> Verification:
    """Measure what an FP8 KV cache costs `model`, a calibrated checkpoint or a plain model.

    Every variant runs teacher-forced over the same text, K and V going through the pages of the
    runtime. The result says whether the variants that will be served pass the gates. When it is
    interrupted after the first tokens, it returns what it has, marked as `partial`.

    Args:
        model: a folder, a Hub id, or ``demo:smollm2-135m-instruct``.
        gates: limits; their defaults where None.
        options: fields of VerifyConfig.

    Raises:
        UserError: a model, text or option that is refused; a model whose own logits are not finite.
        CheckFailed: logits under an FP8 cache are not finite.
    """
    start = time.perf_counter()
    config = VerifyConfig(**options)
    folder = resolve_model(model)
    sidecar = open_checkpoint(folder).sidecar or {}
    data, warnings = load_text(model, folder, sidecar, config)
    loaded = _load(model, config)
    plan = _with_reference(_plan(loaded, config), loaded, config)
    runs = [plan.reference, *(run for run in plan.runs if run is not plan.reference)]
    _check_tokens(runs, data)
    checks = _prepare_checks(runs, data, config)
    tables = {run.variant.key: TokenTable() for run in runs}
    if config.noise_floor:
        tables[NOISE] = TokenTable()
    limit = tokens_per_pass(runs)
    partial = False
    try:
        measure(runs, data.rows, tables, limit)
        checks.run()
    except KeyboardInterrupt:
        if not min(map(len, tables.values())):
            raise
        partial = True
    found = _report(model, config, data, plan, tables, checks, gates or Gates(), limit, partial)
    return replace(
        found,
        warnings=warnings + found.warnings,
        seconds=round(time.perf_counter() - start, 2),
    )


def _load(model: str, config: VerifyConfig) -> LoadedModel:
    return load(
        model,
        device=config.device,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
    )


def _plan(loaded: LoadedModel, config: VerifyConfig) -> Plan:
    if config.variants is None:
        return plan_variants(
            loaded,
            config.kv_cache_dtype,
            config.kv_cache_dtype_skip_layers,
            config.attention,
            config.missing_scales,
            config.assume_skip_flag,
        )
    options = ColumnOptions(
        config.kv_cache_dtype_skip_layers,
        config.attention,
        config.missing_scales,
        config.assume_skip_flag,
        lambda name: _other(name, "--variants", loaded, config),
    )
    return plan_columns(loaded, parse_columns(config.variants), options)


def _other(name: str, option: str, loaded: LoadedModel, config: VerifyConfig) -> LoadedModel:
    """Another model with the same tokens; on the weights of `loaded` where they are the same."""
    other = _load(name, config)
    if other.tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
        raise UserError(
            f"{option} {name}: its tokenizer is not that of {loaded.name}, so their predictions "
            "cannot be compared"
        )
    ours, theirs = loaded.model.state_dict(), other.model.state_dict()
    same = ours.keys() == theirs.keys() and all(
        ours[key].shape == value.shape and torch.equal(ours[key], value)
        for key, value in theirs.items()
    )
    return replace(other, model=loaded.model) if same else other


def _with_reference(plan: Plan, loaded: LoadedModel, config: VerifyConfig) -> Plan:
    """With --against, the other model's native cache in front, as what all are compared with."""
    if config.against is None:
        return plan
    other = _other(config.against, "--against", loaded, config)
    native = native_variant(other)
    reference = Run(
        replace(native, title=f"{config.against}, {native.title}", model=config.against), other
    )
    runs = [
        replace(run, variant=_own_native(run.variant)) if run.variant.key == "native" else run
        for run in plan.runs
    ]
    return replace(plan, runs=[reference, *runs], reference=reference)


def _own_native(variant: Variant) -> Variant:
    return replace(variant, key="own_native", title="this model, native cache")


def _check_tokens(runs: Sequence[Run], data: TokenData) -> None:
    largest = max(max(row) for row in data.rows)
    vocabulary = min(vocabulary_size(run.loaded.model) for run in runs)
    if largest >= vocabulary:
        raise DataError(f"token id {largest} is beyond the model's vocabulary of {vocabulary}")


def _prepare_checks(runs: Sequence[Run], data: TokenData, config: VerifyConfig) -> Checks:
    lengths = None
    if config.needle:
        most = min(run.loaded.max_model_len for run in runs)
        lengths = needle_lengths(config.needle_lengths, most)
    return Checks(
        runs,
        data.rows,
        lambda tokens: long_text(runs[0].loaded.tokenizer, data, config, tokens),
        config.generation,
        lengths,
        config.needle_trials,
        config.seed,
        config.task_set,
    )


def _report(
    model: str,
    config: VerifyConfig,
    data: TokenData,
    plan: Plan,
    tables: dict[str, TokenTable],
    checks: Checks,
    gates: Gates,
    limit: int,
    partial: bool,
) -> Verification:
    """From what was measured to what is said of it; after an interrupt without further passes."""
    summary = Summary(tables, plan.reference.variant.key)
    loaded = next(run.loaded for run in plan.runs if run.variant.model is None)
    decode = loaded.tokenizer.decode
    results = [
        summary.variant(
            run.variant,
            run.loaded.layers,
            summary.worst(run.variant.key, data.rows, decode),
        )
        for run in plan.runs
    ]
    how = f"native in passes of {noise_pass(limit)} tokens, against passes of {limit}"
    generation, needle, tasks = checks.generation, checks.needle, checks.tasks
    judged = judge_all(gates, results, generation, needle, tasks)
    failed = {gate.variant for gate in judged if not gate.passed}
    errors = {} if partial else _layer_errors(plan.runs, summary, data.rows)
    record = loaded.checkpoint.sidecar or {}
    return Verification(
        model=model,
        engine="fp8calib",
        against=config.against,
        dataset=describe(data),
        skip_layers=plan.skip_layers,
        skip_layers_recorded=plan.recorded,
        reference=plan.reference.variant.key,
        variants=results,
        noise_floor=summary.noise_floor(how),
        effect=summary.effect([run.variant for run in plan.runs]),
        gates=judged,
        generation=generation,
        needle=needle,
        tasks=tasks,
        layers=layer_table(loaded.layers, record, errors, plan.runs[-1].variant.kv_format.scales),
        layer_errors={key: each for key, each in errors.items() if key in failed},
        sensitivity=recorded_search(record),
        warnings=plan.warnings + checks.warnings + suspicious(results, len(data.rows)),
        versions={"fp8calib": __version__}
        | {name: version(name) for name in ("torch", "transformers")},
        device=str(loaded.model.device),
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        partial=partial,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _layer_errors(
    runs: Sequence[Run], summary: Summary, rows: Sequence[Sequence[int]]
) -> dict[str, list[LayerError]]:
    """What each FP8 variant does to every layer, on the documents on which the last one loses
    most."""
    fp8 = [run for run in runs if run.variant.kv_format.fp8_layers]
    if not fp8:
        return {}
    columns = summary.columns[fp8[-1].variant.key]
    tokens = np.bincount(columns["document"])
    loss = np.bincount(columns["document"], columns["kl"]) / np.maximum(tokens, 1)
    worst = [rows[i] for i in (-loss).argsort()[:_DIAGNOSED_DOCUMENTS]]
    found: dict[str, list[LayerError]] = {}
    for model in {id(run.loaded.model): run.loaded for run in fp8}.values():
        mine = [run for run in fp8 if run.loaded.model is model.model]
        formats = [run.variant.kv_format for run in mine]
        errors = layer_errors(model.model, model.layers, formats, worst)
        found |= {run.variant.key: each for run, each in zip(mine, errors, strict=True)}
    return found


def describe(data: TokenData) -> dict[str, Any]:
    return {
        "name": data.source,
        "split": data.split,
        "columns": list(data.columns),
        "documents": len(data.rows),
        "tokens": data.num_tokens,
        "fingerprint": data.fingerprint,
    }
