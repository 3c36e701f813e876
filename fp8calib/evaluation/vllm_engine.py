"""`verify --engine vllm`: the same comparison through the logprobs of an installed vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp8calib import __version__, console
from fp8calib.checkpoint import Checkpoint, check_scheme, open_checkpoint, read_scales
from fp8calib.data import TokenData
from fp8calib.errors import CheckFailed, ModelError, UserError
from fp8calib.evaluation.columns import Column, parse_columns
from fp8calib.evaluation.end_to_end import VerifyConfig, describe
from fp8calib.evaluation.gates import judge_all
from fp8calib.evaluation.layer_table import layer_table
from fp8calib.evaluation.metrics import NOISE, TokenTable
from fp8calib.evaluation.summary import Summary, suspicious
from fp8calib.evaluation.text import load_text
from fp8calib.evaluation.top_logprobs import TopLogprobs, table_of
from fp8calib.evaluation.variants import Variant, title_of
from fp8calib.evaluation.verification import Verification
from fp8calib.layers import resolve_skip_layers
from fp8calib.model_loading import load_config, load_tokenizer, resolve_dtype
from fp8calib.models import resolve_model
from fp8calib.recipe import Gates
from fp8calib.runtime.cache_words import FP8_WORDS
from fp8calib.runtime.kv_cache_dtype import NATIVE_WORDS
from fp8calib.runtime.kv_format import KVFormat
from fp8calib.vllm_launch import VLLM, prepare

TOP = 1000  # most likely tokens that vLLM tells of each position
_PASS, _NOISE_PASS = 2048, 1537  # tokens in a step of vLLM; in one that is to round differently
_CPU_ROUNDING = (
    "vLLM's CPU kernels round K and V toward zero when they store them as FP8, which about doubles "
    "the error; its GPU kernels round to nearest, as fp8calib does"
)
_OURS = ("generation", "needle", "tasks", "attention", "against")  # options without a meaning here


@dataclass(frozen=True)
class _Cache:
    """A column, the skip flag of its own, and vLLM as it is to run for it."""

    variant: Variant
    skip_layers: list[str]
    vllm: VLLM

    @property
    def native(self) -> bool:
        return not self.variant.kv_format.fp8_layers


@dataclass(frozen=True)
class _Answer:
    logprobs: TopLogprobs
    version: str
    device: str


def verify_with_vllm(
    model: str, *, gates: Gates | None = None, python: str | None = None, **options: Any
) -> Verification:
    """As `verify`, with vLLM computing: one process of vLLM for each column.

    Args:
        python: the interpreter that vLLM is installed for; None finds vLLM as `serve` does.
        options: fields of VerifyConfig, but for generation, needle, tasks, attention and against.

    Raises:
        UserError: vLLM is not found, or fails; an option that it does not have.
        CheckFailed: logprobs under an FP8 cache are not finite.
    """
    start = time.perf_counter()
    for name in _OURS:
        if options.get(name):
            raise UserError(f"--{name} is for --engine fp8calib, and this is vllm")
    if options.get("device", "auto") != "auto":
        raise UserError("--device is for --engine fp8calib, and vLLM chooses its own")
    config = VerifyConfig(**options)
    folder = resolve_model(model)
    checkpoint = open_checkpoint(folder)
    check_scheme(checkpoint.config)
    data, warnings = load_text(model, folder, checkpoint.sidecar or {}, config)
    caches = _caches(model, checkpoint, config, python, max(map(len, data.rows)))
    answers: dict[str, _Answer] = {}
    partial = False
    try:
        _run_all(caches, data.rows, python, config.noise_floor, answers)
    except KeyboardInterrupt:
        if len(answers) < 2:
            raise
        partial = True
    done = [cache for cache in caches if cache.variant.key in answers]
    found = _report(model, checkpoint, config, data, done, answers, gates or Gates())
    return replace(
        found,
        warnings=warnings + found.warnings,
        partial=partial,
        seconds=round(time.perf_counter() - start, 2),
    )


def _report(
    model: str,
    checkpoint: Checkpoint,
    config: VerifyConfig,
    data: TokenData,
    caches: Sequence[_Cache],
    answers: dict[str, _Answer],
    gates: Gates,
) -> Verification:
    first = next(cache for cache in caches if cache.native)
    reference, rows = first.variant.key, data.rows
    native = answers[reference]
    tables = {key: table_of(native.logprobs, a.logprobs, rows) for key, a in answers.items()}
    _check_finite(caches, tables)
    summary = Summary(tables, reference)
    decode = load_tokenizer(checkpoint.path, config.trust_remote_code).decode
    results = []
    for variant in (cache.variant for cache in caches):
        worst = summary.worst(variant.key, rows, decode)
        result = summary.variant(variant, checkpoint.layers, worst)
        results.append(replace(result, attention="vllm"))
    how = f"native in steps of {_NOISE_PASS} tokens, against steps of {_PASS}"
    return Verification(
        model=model,
        engine="vllm",
        against=None,
        dataset=describe(data),
        skip_layers=next((c.skip_layers for c in caches if c.skip_layers), []),
        skip_layers_recorded=config.kv_cache_dtype_skip_layers is None,
        reference=reference,
        variants=results,
        noise_floor=summary.noise_floor(how),
        effect=None,
        gates=judge_all(gates, results, None, None, []),
        generation=None,
        needle=None,
        tasks=[],
        layers=layer_table(checkpoint.layers, checkpoint.sidecar or {}, {}),
        layer_errors={},
        sensitivity=None,
        warnings=[
            *suspicious(results, len(rows)),
            *([_CPU_ROUNDING] if native.device == "cpu" else []),
        ],
        versions={"fp8calib": __version__, "vllm": native.version},
        device=native.device,
        dtype=str(first.variant.kv_format.native).removeprefix("torch."),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _caches(
    model: str, checkpoint: Checkpoint, config: VerifyConfig, python: str | None, longest: int
) -> list[_Cache]:
    """The columns: those asked for; else native, what is served, and that without its skip flag.
    Gates apply to all that are FP8."""
    word = "fp8" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    skips = config.kv_cache_dtype_skip_layers or checkpoint.recorded_skip_layers
    if config.variants is not None:
        columns = list(parse_columns(config.variants))
    elif not skips:
        columns = [Column(word, word)]
    else:
        columns = [Column(f"{word}@skip", word, skip=True)]
        if config.kv_cache_dtype_skip_layers is None and not config.assume_skip_flag:
            columns.append(Column(word, word))
    if not any(column.native for column in columns):
        columns = [Column("native", "native"), *columns]
    found = []
    for column in columns:
        name, place = model, checkpoint
        if column.checkpoint is not None:
            name, place = column.checkpoint, open_checkpoint(resolve_model(column.checkpoint))
        variant, flag = _variant(place, column, config)
        cache = str(variant.kv_format.native).removeprefix("torch.")
        if not column.native:
            cache = column.cache or "fp8"
        flags = {
            "dtype": str(_dtype(place, config)).removeprefix("torch."),
            "max_model_len": longest + 1,
            "max_logprobs": TOP,
            "enforce_eager": True,
            "no_enable_prefix_caching": True,
            "skip_tokenizer_init": True,
            "trust_remote_code": config.trust_remote_code,
        }
        vllm = prepare(
            name,
            executable=None if python is None else str(_beside(python)),
            kv_cache_dtype=cache,
            skip_layers=flag,
            missing_scales=config.missing_scales,
            flags=flags,
        )
        found.append(_Cache(variant, flag, vllm))
    return found


def _beside(python: str) -> Path:
    return Path(python).expanduser().absolute().with_name("vllm")


def _dtype(checkpoint: Checkpoint, config: VerifyConfig) -> torch.dtype:
    named = resolve_dtype(config.dtype)
    if isinstance(named, torch.dtype):
        return named
    whole = load_config(checkpoint.path, config.trust_remote_code)
    return whole.get_text_config(decoder=True).dtype or torch.bfloat16


def _variant(
    checkpoint: Checkpoint, column: Column, config: VerifyConfig
) -> tuple[Variant, list[str]]:
    """What a column is called and what its cache holds, and its skip flag."""
    if column.scale_1 or column.attention:
        raise UserError(f"--variants {column.word}: vLLM has no option for that")
    own = _dtype(checkpoint, config)
    if column.native:
        assert column.cache is not None
        kv_format = KVFormat(NATIVE_WORDS.get(column.cache, own))
        title = f"native ({kv_format.describe(checkpoint.layers)})"
        return Variant(column.word, title, kv_format), []
    skip: Sequence[str | int] = ()
    if column.skip:
        skip = config.kv_cache_dtype_skip_layers or checkpoint.recorded_skip_layers
        if not skip:
            raise UserError("@skip: no skip layers are recorded; name them by --skip-layers")
    elif column.checkpoint is not None:
        skip = checkpoint.recorded_skip_layers
    flag, skipped = resolve_skip_layers(skip, checkpoint.layers)
    cache = column.cache or "fp8"
    calibrated = checkpoint.scales and cache != "fp8_e5m2"
    kv_format = KVFormat.fp8(
        checkpoint.layers,
        own,
        skip=skipped,
        scales=read_scales(checkpoint.path) if calibrated else None,
        fp8_format=FP8_WORDS[cache],
    )
    title = title_of(kv_format, "fp8" if cache == "fp8_e4m3" else cache)
    if flag:
        title += f", layers {' '.join(flag)} native"
    if column.checkpoint is not None:
        title = f"{column.checkpoint}: {title}"
    return Variant(column.word, title, kv_format, True, column.checkpoint), flag


def _run_all(
    caches: Sequence[_Cache],
    rows: Sequence[Sequence[int]],
    python: str | None,
    noise: bool,
    answers: dict[str, _Answer],
) -> None:
    """Run vLLM for every column; `answers` receives one when it is done."""
    with console.progress("vLLM (columns)", len(caches) + noise) as bar:
        for cache in caches:
            answers[cache.variant.key] = _ask(cache.vllm, rows, python, _PASS)
            bar.advance()
        if noise:
            first = next(cache for cache in caches if cache.native)
            answers[NOISE] = _ask(first.vllm, rows, python, _NOISE_PASS)
            bar.advance()


def _ask(
    vllm: VLLM, rows: Sequence[Sequence[int]], python: str | None, step_tokens: int
) -> _Answer:
    script = Path(__file__).with_name("vllm_logprobs.py")
    interpreter = vllm.python if python is None else Path(python).expanduser()
    with tempfile.TemporaryDirectory(prefix="fp8calib-") as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "answer.npz")
        asked.write_text(json.dumps({"rows": rows, "top": TOP}))
        flags = ["--model", vllm.model, *vllm.flags]
        flags += ["--max-num-batched-tokens", str(step_tokens)]
        command = [str(interpreter), str(script), str(asked), str(answered), *flags]
        try:
            # Its log belongs to stderr: stdout is for the result.
            done = subprocess.run(command, stdout=sys.stderr.fileno(), check=False)
        except OSError as problem:
            raise UserError(f"--python {interpreter}: {problem.strerror}") from problem
        if done.returncode in (-2, 130):
            raise KeyboardInterrupt
        if done.returncode != 0 or not answered.exists():
            raise UserError(f"vLLM ended with status {done.returncode}; what it says is above")
        with np.load(answered) as found:
            logprobs = TopLogprobs(found["ids"], found["logprobs"])
            return _Answer(logprobs, str(found["version"]), str(found["device"]))


def _check_finite(caches: Sequence[_Cache], tables: dict[str, TokenTable]) -> None:
    for cache in caches:
        columns = tables[cache.variant.key].columns()
        bad = ~np.isfinite(columns["nll"] + columns["kl"])
        if bad.any():
            at = int(bad.argmax())
            message = (
                f"{cache.variant.title}: vLLM's logprobs of document {columns['document'][at]} at "
                f"position {columns['position'][at]} are not finite"
            )
            raise ModelError(message) if cache.native else CheckFailed(message)
