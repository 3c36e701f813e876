"""What `fp8calib verify` says to a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fp8calib.checkpoint.serving import SKIP_FLAG
from fp8calib.console import info, print_table, warn
from fp8calib.evaluation.attention_errors import UNUSUAL_ERROR, LayerError, culprits
from fp8calib.evaluation.gates import GateResult
from fp8calib.evaluation.generation import GenerationCheck
from fp8calib.evaluation.labels import (
    GENERATION,
    METRICS,
    NEEDLE,
    Label,
    thousands,
    with_interval,
)
from fp8calib.evaluation.needle import NeedleTest
from fp8calib.evaluation.summary import NoiseFloor
from fp8calib.evaluation.tasks import TaskResult
from fp8calib.evaluation.verification import Verification


def show(result: Verification) -> None:
    """Print a result: tables first, verdicts last."""
    if result.partial:
        warn("interrupted: all numbers below are partial, and no verdict is final")
    for warning in result.warnings:
        warn(warning)
    data = result.dataset
    split = f" ({data['split']})" if data["split"] else ""
    engine = "" if result.engine == "fp8calib" else f" by {result.engine}"
    title = (
        f"{result.model} on {data['name']}{split}{engine}: {data['documents']} texts, "
        f"{data['tokens']:,} tokens; below each number its 95 % interval"
    )
    print_table(title, ["", *(variant.title for variant in result.variants)], _rows(result))
    titles = {variant.key: variant.title for variant in result.variants}
    if result.generation is not None:
        _show_generation(result.generation, titles)
    if result.needle is not None:
        _show_needle(result.needle, titles)
    if result.tasks:
        _show_tasks(result.tasks, titles)
    if result.noise_floor is not None:
        for line in _noise_lines(result.noise_floor, result):
            info(line)
    if result.effect is not None:
        info(result.effect.sentence())
    for gate in result.gates:
        info(_gate_line(gate, titles[gate.variant]))
    for key, layers in result.layer_errors.items():
        info(_layers_line(titles[key], layers))
    if result.skip_layers:
        flag = " ".join(result.skip_layers)
        whose = "as the checkpoint records" if result.skip_layers_recorded else "as asked for"
        info(f"layers {flag} are native, {whose}; vLLM needs for the same: {SKIP_FLAG} {flag}")


def _rows(result: Verification) -> list[list[str]]:
    all_of = result.variants

    def metrics(*fields: str) -> list[list[str]]:
        return [_row(METRICS, field, all_of, result.reference) for field in fields]

    rows = metrics("perplexity", "ppl_increase", "kl")
    if len(all_of[0].kl_by_position) > 1:
        for number, bucket in enumerate(all_of[0].kl_by_position):
            cells = [
                ""
                if v.key == result.reference
                else with_interval(v.kl_by_position[number].kl, METRICS["kl"].form)
                for v in all_of
            ]
            rows.append([f"  at {thousands(bucket.start)} to {thousands(bucket.end)}", *cells])
    worst = ["" if v.key == result.reference else f"{v.worst.kl:.3f}" for v in all_of]
    return [
        *rows,
        *metrics("reverse_kl", "worst_decile_kl"),
        ["KL of worst token", *worst],
        *metrics("top1", "top5"),
    ]


def _row(
    labels: Mapping[str, Label], field: str, variants: Sequence[Any], reference: str
) -> list[str]:
    """A metric's name, and its numbers of all variants."""
    label = labels[field]
    return [
        label.name,
        *(
            ""
            if label.against_native and v.key == reference
            else with_interval(getattr(v, field), label.form)
            for v in variants
        ),
    ]


def _show_generation(check: GenerationCheck, titles: dict[str, str]) -> None:
    native = check.variants[0].key
    rows = [_row(GENERATION, field, check.variants, native) for field in GENERATION]
    title = f"greedy text: {check.tokens} tokens after each of {check.prompts} prompts"
    print_table(title, ["", *(titles[v.key] for v in check.variants)], rows)


def _show_needle(test: NeedleTest, titles: dict[str, str]) -> None:
    native = test.variants[0].key
    rows = [_row(NEEDLE, field, test.variants, native) for field in NEEDLE]
    for number, cell in enumerate(test.variants[0].grid):
        name = f"{cell.length} tokens, depth {cell.depth:.0%}"
        cells = [v.grid[number] for v in test.variants]
        rows.append([name, *(f"{c.found:.0%} ({c.logprob:.2f})" for c in cells)])
    for number, row in enumerate(test.variants[0].together):
        several = [v.together[number] for v in test.variants]
        name = f"{row.length} tokens, {test.needles_together} needles"
        rows.append([name, *(f"{c.found:.0%} ({c.logprob:.2f})" for c in several)])
    title = "needles: share found, and the log-probability of the answer in nats"
    print_table(title, ["", *(titles[v.key] for v in test.variants)], rows)


def _show_tasks(tasks: Sequence[TaskResult], titles: dict[str, str]) -> None:
    rows = []
    for task in tasks:
        name = f"{task.task} {task.metric} ({task.samples})"
        rows.append([name, *(_pm(score.value, score.stderr) for score in task.variants)])
        drops = [
            _pm(-score.drop.value, score.drop_stderr, "+.4f") if score.drop else ""
            for score in task.variants
        ]
        rows.append(["  change for the better", *drops])
    title = "lm-evaluation-harness: value ± standard error; changes from paired differences"
    print_table(title, ["", *(titles[s.key] for s in tasks[0].variants)], rows)


def _pm(value: float, stderr: float | None, form: str = ".4f") -> str:
    return f"{value:{form}}" + ("" if stderr is None else f" ± {stderr:.4f}")


def _noise_lines(noise: NoiseFloor, result: Verification) -> list[str]:
    kl = noise.kl
    interval = "" if kl.low is None else f" ({kl.low:.2g} to {kl.high:.2g})"
    lines = [f"{result.dtype}'s own rounding ({noise.how}): mean KL {kl.value:.2g}{interval}"]
    within = [v.title for v in result.variants if v.within_noise]
    if within:
        lines.append(f"indistinguishable from that: {'; '.join(within)}")
    return lines


def _gate_line(gate: GateResult, title: str) -> str:
    verdict = "passes" if gate.passed else "FAILS"
    if not gate.conclusive:
        verdict += ", inconclusive: "
        has = gate.measured.low is not None
        verdict += "the interval lies on both sides of the limit" if has else "there is no interval"
    return f"gate: {gate.sentence()} ({title}): {verdict}"


def failures(result: Verification) -> str:
    """The failed gates and the layers at fault, in one line."""
    gates = [f"{gate.sentence()} ({result.variant(gate.variant).title})" for gate in result.failed]
    layers = dict.fromkeys(
        str(layer.index) for errors in result.layer_errors.values() for layer in culprits(errors)
    )
    if layers:
        listed = ", ".join(list(layers)[:8]) + (", ..." if len(layers) > 8 else "")
        found = any(_unusual(errors) for errors in result.layer_errors.values())
        what = "see" if found else "no layer stands out, largest errors in"
        gates.append(f"{what} layer{'s' * (len(layers) > 1)} {listed}")
    return "; ".join(gates)


def _unusual(errors: Sequence[LayerError]) -> bool:
    return any(layer.error > UNUSUAL_ERROR for layer in errors)


def _layers_line(title: str, errors: list[LayerError]) -> str:
    listed = "; ".join(layer.describe() for layer in culprits(errors)[:8])
    what = "beyond FP8's usual rounding in"
    if not _unusual(errors):
        what = "no layer stands out; largest in"
    return f"error of attention outputs ({title}), {what}: {listed}"
