"""`fp8calib verify`: what an FP8 KV cache costs in accuracy, and whether that is within limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fp8calib.cli import app, options

if TYPE_CHECKING:
    from fp8calib.evaluation import Verification
    from fp8calib.evaluation.attention_errors import LayerError
    from fp8calib.evaluation.bootstrap import Estimate
    from fp8calib.evaluation.gates import GateResult
    from fp8calib.evaluation.verification import VariantResult


@app.command(
    epilog="Exit code 1 when a gate fails. Examples: "
    "fp8calib verify SmolLM2-135M-Instruct-kvattn-fp8-tensor; "
    "fp8calib verify Qwen/Qwen2.5-7B-Instruct --dataset mine.jsonl --max-kl 0.02; "
    "fp8calib verify ./w4a16-and-kv --against ./original --recipe w4a16_and_kv",
)
def verify(
    model: options.Model,
    dataset: options.Dataset = None,
    split: options.Split = None,
    text_column: options.TextColumn = None,
    messages_column: options.MessagesColumn = None,
    samples: options.Samples = None,
    max_seq_len: options.MaxSeqLen = None,
    seed: options.Seed = None,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE",
            help="What to judge: auto (fp8), fp8, fp8_e4m3, fp8_e5m2, bfloat16, float16, float32.",
        ),
    ] = "auto",
    skip_layers: options.SkipLayers = None,
    attention: Annotated[
        str | None,
        typer.Option(
            metavar="accurate|fp8",
            help="Arithmetic that will serve; default: fp8 (FlashAttention 3's, queries quantized "
            "too) where there is a q_scale.",
        ),
    ] = None,
    missing_scales: options.MissingScales = "refuse",
    assume_skip_flag: Annotated[
        bool,
        typer.Option(
            "--assume-skip-flag",
            help="Do not judge what happens if recorded skip layers are not passed to vLLM.",
        ),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Compare with this model's native cache, not with MODEL's own."
        ),
    ] = None,
    max_ppl_increase: Annotated[
        float | None,
        typer.Option(help="Gate: perplexity, relative to native. Default 0.02."),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(help="Gate: mean KL(native || fp8) per token, in nats. Default 0.05."),
    ] = None,
    min_top1: Annotated[
        float | None,
        typer.Option(help="Gate: share of tokens with native's top prediction. Default 0.90."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="Take the gates of this recipe file, or built-in one. Options override."),
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Compare native and FP8 caches on held-out text; fail when FP8 costs more than allowed.

    By default on 32 texts of up to 512 tokens that the default calibration data does not hold.
    """
    from fp8calib.errors import CheckFailed
    from fp8calib.recipe import Recipe, load_recipe

    gates = (
        (load_recipe(recipe) if recipe else Recipe())
        .with_gates(max_ppl_increase=max_ppl_increase, max_kl=max_kl, min_top1=min_top1)
        .gates
    )
    from fp8calib.models import resolve_model

    resolve_model(model)  # a wrong name is told before torch is loaded
    from fp8calib.console import print_json
    from fp8calib.evaluation import verify as run

    text = {"samples": samples, "max_seq_len": max_seq_len, "seed": seed}
    result = run(
        model,
        gates=gates,
        dataset=dataset,
        split=split,
        text_column=text_column,
        messages_column=messages_column,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_dtype_skip_layers=skip_layers,
        attention=attention,
        missing_scales=missing_scales,
        assume_skip_flag=assume_skip_flag,
        against=against,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        **{name: value for name, value in text.items() if value is not None},
    )
    if json:
        print_json(result.to_dict())
    else:
        _show(result)
    if not result.ok:
        raise CheckFailed(f"{model} fails {'; '.join(_failures(result))}")


def _show(result: Verification) -> None:
    from fp8calib.console import info, print_table, warn

    for warning in result.warnings:
        warn(warning)
    data = result.dataset
    split = f" ({data['split']})" if data["split"] else ""
    title = (
        f"{result.model} on {data['name']}{split}: {data['documents']} texts, "
        f"{data['tokens']:,} tokens; below each number its 95 % interval"
    )
    print_table(title, ["", *(variant.title for variant in result.variants)], _rows(result))
    if result.effect is not None:
        info(result.effect.sentence())
    for gate in result.gates:
        info(_gate_line(gate, result.variant(gate.variant)))
    for key, layers in result.layer_errors.items():
        info(_layers_line(result.variant(key), layers))
    if result.skip_layers:
        from fp8calib.checkpoint.serving import SKIP_FLAG

        flag = " ".join(result.skip_layers)
        whose = "as the checkpoint records" if result.skip_layers_recorded else "as asked for"
        info(f"layers {flag} are native, {whose}; vLLM needs for the same: {SKIP_FLAG} {flag}")


def _rows(result: Verification) -> list[list[str]]:
    others = result.variants[1:]
    return [
        ["perplexity", *(f"{variant.perplexity:.4f}" for variant in result.variants)],
        ["  change", "", *(_with_interval(v.ppl_increase, "+.2%") for v in others)],
        ["mean KL, nats", "", *(_with_interval(v.kl, ".5f") for v in others)],
        ["top-1 agreement", "", *(_with_interval(v.top1, ".2%") for v in others)],
        ["worst token's KL", "", *(f"{variant.worst.kl:.3f}" for variant in others)],
    ]


def _with_interval(estimate: Estimate, form: str) -> str:
    if estimate.low is None or estimate.high is None:
        return format(estimate.value, form)
    return f"{estimate.value:{form}}\n{estimate.low:{form}} to {estimate.high:{form}}"


_GATES = {
    "max_ppl_increase": ("perplexity increase", "at most", ".2%"),
    "max_kl": ("mean KL", "at most", ".4g"),
    "min_top1": ("top-1 agreement", "at least", ".2%"),
}


def _gate_line(gate: GateResult, variant: VariantResult) -> str:
    verdict = "passes" if gate.passed else "FAILS"
    if not gate.conclusive:
        verdict += ", inconclusive: the interval lies on both sides of the limit"
    return f"gate: {_measured(gate)} ({variant.title}): {verdict}"


def _measured(gate: GateResult) -> str:
    what, bound, form = _GATES[gate.gate]
    return f"{what} {gate.measured.value:{form}}, {bound} {gate.limit:{form}}"


def _failures(result: Verification) -> list[str]:
    """The failed gates and the layers at fault, in one line."""
    from fp8calib.evaluation.attention_errors import culprits

    gates = [f"{_measured(gate)} ({result.variant(gate.variant).title})" for gate in result.failed]
    layers = dict.fromkeys(
        str(layer.index) for errors in result.layer_errors.values() for layer in culprits(errors)
    )
    listed = ", ".join(list(layers)[:8]) + (", ..." if len(layers) > 8 else "")
    return [*gates, f"see layer{'s' * (len(layers) > 1)} {listed}"] if layers else gates


def _layers_line(variant: VariantResult, errors: list[LayerError]) -> str:
    from fp8calib.evaluation.attention_errors import UNUSUAL_ERROR, culprits

    listed = "; ".join(layer.describe() for layer in culprits(errors)[:8])
    unusual = errors and max(layer.error for layer in errors) > UNUSUAL_ERROR
    what = "beyond FP8's usual rounding in" if unusual else "no layer stands out; largest in"
    return f"error of attention outputs ({variant.title}), {what}: {listed}"
