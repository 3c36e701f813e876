"""What metrics and gates are called and how their numbers are written: one list for the terminal,
the HTML report and JUnit. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from fp8calib.evaluation.bootstrap import Estimate


class Label(NamedTuple):
    """form: of the numbers, for `str.format`; against_native: native itself has no such number."""

    name: str
    form: str
    against_native: bool = True


class GateLabel(NamedTuple):
    """A gate by the metric that it limits; bound: on which side of the limit that has to be."""

    name: str
    bound: str
    form: str


METRICS = {
    "perplexity": Label("perplexity", "{:.4f}", False),
    "ppl_increase": Label("perplexity change", "{:+.2%}"),
    "kl": Label("mean KL, nats", "{:.5f}"),
    "kl_above_noise": Label("mean KL above noise", "{:+.5f}"),
    "reverse_kl": Label("reverse KL, nats", "{:.5f}"),
    "worst_decile_kl": Label("KL of worst tenth", "{:.4f}"),
    "top1": Label("top-1 agreement", "{:.2%}"),
    "top5": Label("top-5 agreement", "{:.2%}"),
    "kv_bytes_per_token": Label("cache, bytes a token", "{:,.0f}", False),
}
GENERATION = {
    "identical": Label("same as native to the end", "{:.0f}"),
    "first_difference": Label("tokens before they part", "{:.1f}"),
    "agreement": Label("tokens in agreement", "{:.1%}"),
    "repeat_rate": Label("repeated 4-grams", "{:.1%}", False),
    "repeat_increase": Label("increase of repeated 4-grams", "{:+.1%}"),
    "compression_ratio": Label("compression ratio", "{:.2f}", False),
    "compression_increase": Label("increase of compression ratio", "{:+.2f}"),
    "runaways": Label("endless repetition", "{:.0f}"),
}
NEEDLE = {
    "found": Label("found", "{:.1%}", False),
    "kept": Label("of those that native finds", "{:.1%}", False),
    "logprob": Label("log-probability", "{:.3f}", False),
    "logprob_change": Label("log-probability change", "{:+.3f}"),
}
GATES = {
    "max_ppl_increase": GateLabel("perplexity increase", "at most", "{:.2%}"),
    "max_kl": GateLabel("mean KL", "at most", "{:.4g}"),
    "min_top1": GateLabel("top-1 agreement", "at least", "{:.2%}"),
    "min_needle": GateLabel("needles kept", "at least", "{:.1%}"),
    "max_task_drop": GateLabel("task drop", "at most", "{:.4g}"),
    "max_repeat_increase": GateLabel("increase of repeated 4-grams", "at most", "{:.2%}"),
}


def with_interval(number: Estimate | float | None, form: str) -> str:
    """A number and, on a second line, its interval where it has one; "" for None."""
    if number is None or isinstance(number, float | int):
        return "" if number is None else form.format(number)
    shown = form.format(number.value)
    if number.low is None or number.high is None:
        return shown
    return f"{shown}\n{form.format(number.low)} to {form.format(number.high)}"


def thousands(position: int) -> str:
    """A place in a text: 512, 1k, 32k."""
    return str(position) if position < 1024 else f"{position // 1024}k"
