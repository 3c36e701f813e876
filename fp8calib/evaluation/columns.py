"""The words of `--variants`: which columns a report has, in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fp8calib.errors import UserError
from fp8calib.evaluation.variants import (
    Plan,
    Run,
    Variant,
    as_served,
    native_variant,
    title_of,
)
from fp8calib.models import DEMO_PREFIX
from fp8calib.runtime.cache_words import ARITHMETICS, FP8_WORDS, Arithmetic
from fp8calib.runtime.kv_cache_dtype import NATIVE_WORDS, choose_kv_format
from fp8calib.runtime.kv_format import KVFormat

if TYPE_CHECKING:
    from fp8calib.runtime.loader import LoadedModel

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_HELP = (
    "a column is native, bf16, fp16, fp32, fp8 or fp8_e5m2, the last two with @1.0, @skip, "
    "@accurate or @fp8 (attention), or a checkpoint's folder"
)


@dataclass(frozen=True)
class Column:
    """One word: a `cache` format, or the `checkpoint` to run as it would be served.

    scale_1, skip: scale 1.0 in place of the checkpoint's; the skip layers left native. attention:
    None is what will be served.
    """

    word: str
    cache: str | None = None
    checkpoint: str | None = None
    scale_1: bool = False
    skip: bool = False
    attention: Arithmetic | None = None

    @property
    def native(self) -> bool:
        return self.cache == "native" or self.cache in NATIVE_WORDS


def parse_columns(words: str | Sequence[str]) -> tuple[Column, ...]:
    """Raises UserError for a word that is no column, or comes twice."""
    listed = words.split(",") if isinstance(words, str) else list(words)
    if not all(word.strip() for word in listed):
        raise UserError("--variants has an empty name between its commas")
    columns = tuple(_parse(word.strip()) for word in listed)
    for column in columns:
        if [other.word for other in columns].count(column.word) > 1:
            raise UserError(f"--variants names {column.word} twice")
    return columns


def _parse(word: str) -> Column:
    if "/" in word or word.startswith(DEMO_PREFIX) or Path(word).expanduser().is_dir():
        return Column(word, checkpoint=word)
    cache, *more = word.split("@")
    cache = _SHORT.get(cache, cache)
    if cache == "native" or cache in NATIVE_WORDS:
        if more:
            raise UserError(f"--variants {word}: a native cache takes no @{more[0]}")
        return Column(word, cache)
    if cache not in FP8_WORDS:
        raise UserError(f"--variants: unknown column {word!r}; {_HELP}")
    column = Column(word, cache)
    for change in more:
        if change in ARITHMETICS:
            column = replace(column, attention=change)
        elif change == "1.0":
            column = replace(column, scale_1=True)
        elif change == "skip":
            column = replace(column, skip=True)
        else:
            raise UserError(f"--variants {word}: unknown @{change}; {_HELP}")
    return column


@dataclass(frozen=True)
class ColumnOptions:
    """As in `plan_variants`; `open_model` loads another checkpoint, on the same weights in memory
    where they are equal."""

    skip_layers: Sequence[str | int] | None
    attention: Arithmetic | None
    missing_scales: str
    assume_skip_flag: bool
    open_model: Callable[[str], LoadedModel]


def plan_columns(loaded: LoadedModel, columns: Sequence[Column], options: ColumnOptions) -> Plan:
    """The variants that the columns name. The first native one is the reference, put in front where
    there is none.

    Gates apply to fp8 and fp8@skip: to what is served with and without the skip flag; where neither
    is a column, to the last that is FP8.

    Raises:
        UserError: @skip without a list of layers, a list without @skip, or as choose_kv_format.
    """
    recorded = options.skip_layers is None and bool(loaded.checkpoint.recorded_skip_layers)
    if any(c.skip for c in columns) and not (options.skip_layers or recorded):
        raise UserError("@skip: the checkpoint records no skip layers; name them by --skip-layers")
    if options.skip_layers and not any(c.skip for c in columns):
        raise UserError("--skip-layers needs a column with @skip, such as fp8@skip")
    flag: list[str] = []
    runs, warnings = [], dict[str, None]()
    for column in columns:
        run, skipped, more = _run(loaded, column, options)
        runs.append(run)
        flag = flag or skipped
        warnings.update(dict.fromkeys(more))
    reference = next((r for r, c in zip(runs, columns, strict=True) if c.native), None)
    if reference is None:
        reference = Run(native_variant(loaded), loaded)
        runs = [reference, *runs]
    gated = _gated(columns, options.assume_skip_flag)
    runs = [
        replace(run, variant=replace(run.variant, gated=run.variant.key in gated))
        if run.variant.key in gated
        else run
        for run in runs
    ]
    return Plan(runs, reference, flag, recorded and bool(flag), list(warnings))


def _gated(columns: Sequence[Column], assume_skip_flag: bool) -> set[str]:
    served = [
        c for c in columns if c.cache in ("fp8", "fp8_e4m3") and not c.scale_1 and not c.attention
    ]
    if assume_skip_flag and any(c.skip for c in served):
        served = [c for c in served if c.skip]
    if not served:
        served = [c for c in columns if not c.native][-1:]
    return {c.word for c in served}


def _run(
    loaded: LoadedModel, column: Column, options: ColumnOptions
) -> tuple[Run, list[str], list[str]]:
    """The column's run, its skip list and warnings."""
    if column.native:
        variant = native_variant(loaded, column.word)
        if column.cache in NATIVE_WORDS:
            kv_format = KVFormat(NATIVE_WORDS[column.cache])
            if kv_format != variant.kv_format:
                variant = Variant(column.word, f"{column.cache} cache", kv_format)
        return Run(variant, loaded), [], []
    if column.checkpoint is not None:
        other = options.open_model(column.checkpoint)
        skip, cache = None, "fp8"
    else:
        assert column.cache is not None
        other, cache = loaded, column.cache
        skip = options.skip_layers if column.skip else []
    attention = column.attention or options.attention
    choice = choose_kv_format(other, cache, skip, attention or "accurate", options.missing_scales)
    kv_format = as_served(choice.kv_format, attention)
    if column.scale_1:
        kv_format = replace(kv_format, scales=None)
    title = title_of(kv_format, "fp8" if cache == "fp8_e4m3" else cache)
    if kv_format.arithmetic == "fp8":
        title += ", fp8 attention"
    if column.skip:
        title += f", layers {' '.join(choice.skip_layers)} native"
    if column.checkpoint is not None:
        title = f"{column.checkpoint}: {title}"
    flag = choice.skip_layers if column.skip else []
    warnings = [] if column.scale_1 else choice.warnings
    variant = Variant(column.word, title, kv_format, model=column.checkpoint)
    return Run(variant, other), flag, warnings
