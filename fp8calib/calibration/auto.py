"""`calibrate --auto`: strategy and skip layers chosen by measuring, before anything is written.

`tensor` scales load everywhere, so they win unless `attn_head` is better beyond chance: the 95 %
interval of the paired difference of mean KL lies below zero, and by more than a tenth of the KL of
tensor. (Any other scale draws other roundings, and these alone move KL by that much: the interval
is over texts and does not know of it.) Then the fewest layers stay in 16 bit
with which the cache keeps to the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fp8calib import __version__, console
from fp8calib.calibration.observers import make_scales
from fp8calib.calibration.record import AllRanges
from fp8calib.data import TokenData, load_data
from fp8calib.data_sources import DEFAULT_DATASET, PYDOC
from fp8calib.errors import DataError
from fp8calib.evaluation.bootstrap import Estimate
from fp8calib.evaluation.end_to_end import VerifyConfig, describe
from fp8calib.evaluation.sensitivity import search_record, skip_words
from fp8calib.evaluation.sensitivity_measure import Exemption, Loss, Measurements
from fp8calib.evaluation.sensitivity_search import Budget, Search
from fp8calib.evaluation.text import load_text
from fp8calib.evaluation.variants import as_served
from fp8calib.layers import LayerSpec
from fp8calib.model_loading import load_tokenizer
from fp8calib.recipe import Calibration, Gates
from fp8calib.runtime.kv_format import KVFormat
from fp8calib.scales import STRATEGIES, Strategy

SAMPLES, MAX_SEQ_LEN = 16, 256
# Of mean KL. Caches that differ in their roundings alone lay between 0.0144 and 0.0175, a tenth
# to either side (benchmarks/RESULTS.md, accuracy of scales).
_LUCK = 0.1
_ENOUGH = 4  # texts left over by calibration, to judge on
_WHOLE = Exemption()


@dataclass(frozen=True)
class AutoChoice:
    """What was chosen, why (five lines), and what fp8calib.json keeps of it."""

    strategy: Strategy
    skip_layers: list[str]
    reasons: list[str]
    record: dict[str, Any]


def choose(
    model: PreTrainedModel,
    layers: Sequence[LayerSpec],
    ranges: AllRanges,
    asked: Calibration,
    gates: Gates,
    text: TokenData,
) -> AutoChoice:
    """Measure scale 1.0 and both strategies on `text`, then search for skip layers if need be.

    Args:
        model, layers, ranges: what calibration has just observed.
        asked: the recipe's calibration section; its strategy is ignored.
        gates: `max_kl` is the budget (its default where there is none).

    Raises:
        CheckFailed: logits are not finite.
    """
    budget = gates.max_kl or Gates().max_kl
    assert budget is not None
    scales = {
        strategy: make_scales(layers, ranges, asked.model_copy(update={"strategy": strategy}))
        for strategy in STRATEGIES
    }
    plain = KVFormat.fp8(layers, model.dtype)
    formats: dict[str, KVFormat] = {"scale_1": plain}
    for each, found_scales in scales.items():
        formats[each] = as_served(replace(plain, scales=found_scales), None)
    measured = {
        name: Measurements(model, layers, kv_format, text.rows)
        for name, kv_format in formats.items()
    }
    losses = {
        name: each.measure([_WHOLE], f"choosing: {name}")[0] for name, each in measured.items()
    }
    difference = measured["attn_head"].difference(_WHOLE, measured["tensor"], _WHOLE)
    luck = _LUCK * losses["tensor"].kl.value
    better = difference.high is not None and difference.high < -luck
    strategy: Strategy = "attn_head" if better else "tensor"
    found = (
        _search(measured[strategy], layers, budget)
        if (losses[strategy].kl.value > budget)
        else None
    )
    chosen = _WHOLE if found is None or found.proposal is None else found.proposal.exempt
    skip = skip_words(chosen.layers, list(layers))
    (loss,) = measured[strategy].measure([chosen], "choosing: the result")
    reasons = _reasons(text, budget, losses, difference, strategy, skip, loss)
    described = describe(text)
    record: dict[str, Any] = {
        "auto": {
            "budget_kl": budget,
            "reasons": reasons,
            **{name: asdict(each.kl) for name, each in losses.items()},
            "difference": asdict(difference),
            "text": described,
        },
        "accuracy": _accuracy(measured, strategy, chosen, described, str(model.dtype), budget),
    }
    if found is not None:
        record["sensitivity"] = search_record(found, skip, described)
    return AutoChoice(strategy, skip, reasons, record)


def _search(measurements: Measurements, layers: Sequence[LayerSpec], budget: float) -> Search:
    own = [layer for layer in layers if layer.kv_source is None]
    few = max(1, len(measurements.rows) // 4)
    search = Search(measurements, own, Budget(kl=budget), few)
    search.run()
    return search


def _reasons(
    text: TokenData,
    budget: float,
    losses: dict[str, Loss],
    difference: Estimate,
    strategy: Strategy,
    skip: Sequence[str],
    loss: Loss,
) -> list[str]:
    def kl(name: str) -> str:
        return f"{losses[name].kl.value:.4g}"

    split = f" ({text.split})" if text.split else ""
    interval = "no interval"
    if difference.low is not None and difference.high is not None:
        interval = f"{difference.low:+.2g} to {difference.high:+.2g}"
    better = (
        "attn_head is better beyond chance"
        if strategy == "attn_head"
        else ("attn_head is not better beyond chance, and tensor loads on every vLLM backend")
    )
    many = f"{len(skip)} layers stay" if len(skip) > 1 else "a layer stays"
    return [
        f"judged on {len(text.rows)} texts, {text.num_tokens:,} tokens of {text.source}{split}; "
        f"budget: mean KL {budget:g} nats a token",
        f"mean KL: {kl('scale_1')} at scale 1.0, {kl('tensor')} with tensor scales, "
        f"{kl('attn_head')} with attn_head",
        f"attn_head less tensor: {difference.value:+.2g} ({interval})",
        f"strategy {strategy}: {better}",
        f"skip layers {' '.join(skip)}: with everything in FP8 the budget does not hold; {many} "
        f"in 16 bit: mean KL {loss.kl.value:.4g}"
        if skip
        else f"skip layers: none, mean KL {loss.kl.value:.4g} is within the budget",
    ]


def _accuracy(
    measured: dict[str, Measurements],
    strategy: Strategy,
    chosen: Exemption,
    text: dict[str, Any],
    dtype: str,
    budget: float,
) -> dict[str, Any]:
    """For the model card; see checkpoint/card_accuracy.py."""
    served = measured[strategy]
    dtype = dtype.removeprefix("torch.")
    zero, one = Estimate(0.0, 0.0, 0.0), Estimate(1.0, 1.0, 1.0)
    rows = [
        (f"native ({dtype})", served.perplexity(None), Loss(zero, zero, one), False),
        (
            "fp8 at scale 1.0",
            measured["scale_1"].perplexity(_WHOLE),
            measured["scale_1"].measure([_WHOLE], "")[0],
            False,
        ),
        (
            f"fp8 calibrated ({strategy})",
            served.perplexity(chosen),
            served.measure([chosen], "")[0],
            True,
        ),
    ]
    return {
        "ok": rows[-1][2].kl.value <= budget,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "dtype": dtype,
        "text": {name: text[name] for name in ("name", "split", "documents", "tokens")},
        "fingerprint": text["fingerprint"],
        "versions": {"fp8calib": __version__}
        | {name: version(name) for name in ("torch", "transformers")},
        "variants": [
            {"title": title, "gated": gated, "perplexity": perplexity, **asdict(loss)}
            for title, perplexity, loss, gated in rows
        ],
    }


def held_out(
    model: str, source: Path, data: TokenData, asked: Calibration, trust_remote_code: bool
) -> TokenData:
    """Text to judge on that calibration does not see: the other half of the default data, or texts
    of the user's own that were not drawn; the calibration's texts where there are no others.

    Raises:
        DataError: no text has two tokens.
    """
    config = VerifyConfig(
        samples=SAMPLES,
        max_seq_len=min(MAX_SEQ_LEN, asked.max_seq_len),
        seed=asked.seed,
        trust_remote_code=trust_remote_code,
    )
    if data.source in (PYDOC, DEFAULT_DATASET):
        known = {"model": model, "dataset": {"name": data.source, "split": data.split}}
        found, warnings = load_text(model, source, known, config)
        for warning in warnings:
            console.info(f"--auto: {warning}")
        return found
    more = load_data(
        load_tokenizer(source, trust_remote_code),
        data.source,
        split=data.split,
        samples=len(data.rows) + SAMPLES,
        max_seq_len=config.max_seq_len,
        seed=asked.seed,
        text_column=asked.text_column,
        messages_column=asked.messages_column,
    )
    seen = {tuple(row[: config.max_seq_len]) for row in data.rows}
    rows = [row for row in more.rows if tuple(row) not in seen and len(row) > 1][:SAMPLES]
    if len(rows) < _ENOUGH:
        console.info("--auto: no texts are left to judge on, so it judges on those of calibration")
        rows = [row for row in more.rows if len(row) > 1][:SAMPLES]
    if not rows:
        raise DataError(f"{data.source}: no text has two tokens, so --auto has nothing to judge on")
    return replace(more, rows=rows)
