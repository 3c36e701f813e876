"""`verify`: native and FP8 caches on the same held-out text, and the gates they must pass."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
from transformers import PreTrainedModel

from fp8calib import __version__, console
from fp8calib.checkpoint import open_checkpoint
from fp8calib.data import TokenData
from fp8calib.errors import CheckFailed, DataError, ModelError, UserError
from fp8calib.evaluation.attention_errors import (
    LayerError,
    first_nonfinite_layer,
    layer_errors,
)
from fp8calib.evaluation.gates import GateResult, judge
from fp8calib.evaluation.metrics import Tally, TokenMetrics, compare
from fp8calib.evaluation.text import load_text
from fp8calib.evaluation.variants import Plan, Variant, plan_variants
from fp8calib.evaluation.verification import (
    VariantResult,
    Verification,
    summarise,
    suspicious,
)
from fp8calib.layers import LayerSpec
from fp8calib.models import resolve_model
from fp8calib.recipe import Gates
from fp8calib.runtime.kv_cache_dtype import check_words
from fp8calib.runtime.kv_format import Arithmetic, KVFormat
from fp8calib.runtime.loader import LoadedModel, load
from fp8calib.runtime.scoring import score

# Tokens in a forward pass. The logits of all variants for that many tokens are in memory at once.
_BATCHED_TOKENS = {"cpu": 128, "cuda": 1024}
_DIAGNOSED_DOCUMENTS = 4


@dataclass(frozen=True)
class VerifyConfig:
    """What to verify on, and as what.

    dataset, split, text_column, messages_column, samples, max_seq_len, seed: see `data.load_data`;
        without a dataset, text that the default calibration does not see.
    kv_cache_dtype, kv_cache_dtype_skip_layers, attention, missing_scales: see
        `variants.plan_variants`.
    assume_skip_flag: trust that whoever serves passes the recorded skip layers; otherwise the
        cache without them is judged too.
    against: another model whose native cache is the reference, such as the one that was quantized.
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
    assume_skip_flag: bool = False
    against: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_words(self.kv_cache_dtype, self.attention or "accurate", self.missing_scales)


@dataclass(frozen=True)
class _Run:
    """A variant and the model that it runs on."""

    variant: Variant
    loaded: LoadedModel

    @property
    def model(self) -> PreTrainedModel:
        return self.loaded.model

    @property
    def layers(self) -> list[LayerSpec]:
        return self.loaded.layers


def verify(model: str, *, gates: Gates | None = None, **options: Any) -> Verification:
    """Measure what an FP8 KV cache costs `model`, a calibrated checkpoint or a plain model.

    Every variant runs teacher-forced over the same text, K and V going through the pages of the
    runtime. The result says whether the variants that will be served pass the gates.

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
    plan = plan_variants(
        loaded,
        config.kv_cache_dtype,
        config.kv_cache_dtype_skip_layers,
        config.attention,
        config.missing_scales,
        config.assume_skip_flag,
    )
    runs = _runs(plan, loaded, config)
    _check_tokens(runs, data)
    tallies = _measure(runs, data.rows)
    results, effect = summarise(
        [run.variant for run in runs],
        [run.variant.kv_format.describe(run.layers) for run in runs],
        tallies,
    )
    judged = _judge(gates or Gates(), results)
    return Verification(
        model=model,
        against=config.against,
        dataset=_describe(data),
        skip_layers=plan.skip_layers,
        skip_layers_recorded=plan.recorded,
        variants=results,
        effect=effect,
        gates=judged,
        layer_errors=_layer_errors(runs, tallies, judged, data.rows),
        worst_text={r.key: _worst_text(r, loaded, data.rows) for r in results},
        warnings=warnings + plan.warnings + suspicious(results, len(data.rows)),
        versions={"fp8calib": __version__}
        | {name: version(name) for name in ("torch", "transformers")},
        device=str(loaded.model.device),
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        seconds=round(time.perf_counter() - start, 2),
    )


def _load(model: str, config: VerifyConfig) -> LoadedModel:
    return load(
        model,
        device=config.device,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
    )


def _runs(plan: Plan, loaded: LoadedModel, config: VerifyConfig) -> list[_Run]:
    """The variants with their models; with --against, the native of the other model first."""
    runs = [_Run(variant, loaded) for variant in plan.variants]
    if config.against is None:
        return runs
    other = _load(config.against, config)
    if other.tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
        raise UserError(
            f"--against {config.against}: its tokenizer is not that of {loaded.name}, so their "
            "predictions cannot be compared"
        )
    native = KVFormat(other.model.dtype)
    title = f"{config.against}, native ({native.describe(other.layers)})"
    own = replace(runs[0].variant, key="own_native", title="this model, native cache")
    return [_Run(Variant("native", title, native), other), _Run(own, loaded), *runs[1:]]


def _check_tokens(runs: Sequence[_Run], data: TokenData) -> None:
    largest = max(max(row) for row in data.rows)
    vocabulary = min(_vocabulary(run.model) for run in runs)
    if largest >= vocabulary:
        raise DataError(f"token id {largest} is beyond the model's vocabulary of {vocabulary}")


def _vocabulary(model: Any) -> int:
    return model.get_input_embeddings().weight.shape[0]


def _measure(runs: Sequence[_Run], rows: Sequence[Sequence[int]]) -> list[Tally]:
    """Run all variants side by side, a few hundred tokens at a time."""
    limit = _BATCHED_TOKENS[runs[0].model.device.type]
    streams = [
        score(run.model, run.layers, run.variant.kv_format, rows, max_batched_tokens=limit)
        for run in runs
    ]
    tallies = [Tally(len(rows)) for _ in runs]
    total = len(runs) * sum(map(len, rows))
    started, done = time.perf_counter(), 0
    with console.progress(f"verifying {len(runs)} variants (tokens)", total) as bar:
        for pieces in zip(*streams, strict=True):
            row, first = pieces[0].row, pieces[0].start
            targets = rows[row][first + 1 : first + 1 + len(pieces[0].logits)]
            if targets:
                count, device = len(targets), pieces[0].logits.device
                found = compare(
                    [piece.logits[:count] for piece in pieces],
                    torch.tensor(targets, device=device),
                )
                for run, tally, metrics in zip(runs, tallies, found, strict=True):
                    _check_finite(run, metrics, rows[row], row, first)
                    tally.add(row, first, metrics)
            step = len(runs) * len(pieces[0].logits)
            done += step
            bar.advance(step, f"{done / (time.perf_counter() - started):,.0f} tokens/s")
    return tallies


def _check_finite(
    run: _Run, metrics: TokenMetrics, tokens: Sequence[int], row: int, first: int
) -> None:
    bad = ~torch.isfinite(metrics.nll + metrics.kl)
    if not bool(bad.any()):
        return
    end = first + int(bad.int().argmax()) + 1
    layer = first_nonfinite_layer(run.model, run.layers, run.variant.kv_format, tokens[:end])
    where = f"first in {layer}" if layer else "no attention layer is at fault"
    message = (
        f"{run.variant.title}: the logits of document {row} at position {end - 1} hold NaN or "
        f"infinity, {where}"
    )
    if run.variant.key in ("native", "own_native"):
        raise ModelError(f"{message}; try --dtype float32, or look at that text")
    raise CheckFailed(message)


def _judge(gates: Gates, results: Sequence[VariantResult]) -> list[GateResult]:
    return [
        gate
        for result in results
        if result.gated
        for gate in judge(gates, result.key, result.ppl_increase, result.kl, result.top1)
    ]


def _layer_errors(
    runs: Sequence[_Run],
    tallies: Sequence[Tally],
    judged: Sequence[GateResult],
    rows: Sequence[Sequence[int]],
) -> dict[str, list[LayerError]]:
    """Where the loss of the variants that failed comes from, on the documents that show it most."""
    failed = {gate.variant for gate in judged if not gate.passed}
    found = {}
    for run, tally in zip(runs, tallies, strict=True):
        if run.variant.key in failed:
            order = (-tally.kl / tally.tokens).argsort()[:_DIAGNOSED_DOCUMENTS]
            worst = [rows[i] for i in order]
            found[run.variant.key] = layer_errors(
                run.model, run.layers, [run.variant.kv_format], worst
            )[0]
    return found


def _worst_text(
    result: VariantResult, loaded: LoadedModel, rows: Sequence[Sequence[int]]
) -> tuple[str, str]:
    row, position = rows[result.worst.document], result.worst.position
    decode = loaded.tokenizer.decode
    return decode(row[max(0, position - 15) : position + 1]), decode([row[position + 1]])


def _describe(data: TokenData) -> dict[str, Any]:
    return {
        "name": data.source,
        "split": data.split,
        "columns": list(data.columns),
        "documents": len(data.rows),
        "tokens": data.num_tokens,
        "fingerprint": data.fingerprint,
    }
