"""`fp8calib sensitivity`: which layers FP8 hurts, and the fewest to leave in 16 bit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8calib.cli import app, options
from fp8calib.evaluation.labels import METRICS, with_interval

if TYPE_CHECKING:
    from fp8calib.evaluation.sensitivity import LayerSensitivity, Sensitivity
    from fp8calib.evaluation.sensitivity_measure import Loss
    from fp8calib.evaluation.sensitivity_search import Point

_LOSS = ("kl", "ppl_increase", "top1")


@app.command(
    epilog="Examples: fp8calib sensitivity Qwen/Qwen2.5-7B-Instruct --budget-kl 0.02; "
    "fp8calib sensitivity ./model-kvattn-fp8-tensor --keep-bytes 60 --apply",
)
def sensitivity(
    model: options.Model,
    budget_kl: Annotated[
        float | None,
        typer.Option(metavar="X", help="Mean KL per token, in nats, that FP8 may cost."),
    ] = None,
    keep_bytes: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Instead: percent of the 16-bit cache's bytes that may be kept (50: all in FP8).",
        ),
    ] = None,
    apply: Annotated[
        bool,
        typer.Option("--apply", help="Write the layers found into the checkpoint's fp8calib.json."),
    ] = False,
    dataset: options.Dataset = None,
    split: options.Split = None,
    text_column: options.TextColumn = None,
    messages_column: options.MessagesColumn = None,
    samples: options.Samples = None,
    max_seq_len: options.MaxSeqLen = None,
    seed: options.Seed = None,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(metavar="DTYPE", help="auto (fp8), fp8, fp8_e4m3 or fp8_e5m2."),
    ] = "auto",
    attention: Annotated[
        str | None,
        typer.Option(
            metavar="accurate|fp8",
            help="Arithmetic that will serve; default: fp8 where there is a q_scale.",
        ),
    ] = None,
    missing_scales: options.MissingScales = "refuse",
    report: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the result as FILE.html or FILE.json."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier file of that name.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on from what an interrupted run has measured."),
    ] = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Find the fewest layers to leave in 16 bit within a budget.

    And show what FP8 does to each layer. By default the budget is --budget-kl 0.05, on 16 texts of
    up to 256 tokens, drawn as verify draws them. A plain model is judged at scale 1.0, a calibrated
    checkpoint with its scales. K and V are also judged apart: the runtime here can keep one of them
    in 16 bit and not the other (KVFormat's native_k and native_v in Python); vLLM cannot, its flag
    names whole layers.
    """
    from fp8calib.models import resolve_model
    from fp8calib.recipe import Gates

    if budget_kl is None and keep_bytes is None:
        budget_kl = Gates().max_kl
    resolve_model(model)  # a wrong name is told before torch is loaded
    from fp8calib.evaluation.report_file import check_file

    file = check_file("--report", report, (".html", ".json"), overwrite) if report else None
    from fp8calib.cli.command_line import command_line
    from fp8calib.console import print_json
    from fp8calib.evaluation.sensitivity import sensitivity as run

    text = {"samples": samples, "max_seq_len": max_seq_len, "seed": seed}
    result = run(
        model,
        apply=apply,
        command=command_line(),
        budget_kl=budget_kl,
        keep_bytes=keep_bytes,
        kv_cache_dtype=kv_cache_dtype,
        attention=attention,
        missing_scales=missing_scales,
        dataset=dataset,
        split=split,
        text_column=text_column,
        messages_column=messages_column,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        resume=resume,
        **{name: value for name, value in text.items() if value is not None},
    )
    try:
        if file is not None:
            _write(result, file)
    finally:  # numbers that took minutes are shown also where a file cannot be written
        if json:
            print_json(result.to_dict())
        else:
            _show(result, apply)
    if result.partial:
        raise KeyboardInterrupt


def _write(result: Sensitivity, file: Path) -> None:
    from fp8calib.console import json_text
    from fp8calib.evaluation.report_file import write_text
    from fp8calib.evaluation.report_sensitivity import sensitivity_html

    content = result.to_dict()
    if file.suffix == ".json":
        write_text(file, json_text(content) + "\n")
    else:
        write_text(file, sensitivity_html(content, verdict(result)))


def _show(result: Sensitivity, applied: bool) -> None:
    from fp8calib.console import info, print_table, warn

    for warning in result.warnings:
        warn(warning)
    if result.partial:
        warn("interrupted: what follows is partial; the same command with --resume goes on")
    data = result.dataset
    title = (
        f"{result.model}, {result.kv_cache}, on {data['name']}: KL in nats of each layer alone in "
        "FP8, and of its K and V; relative error of its attention output, all together and by K, "
        "V or Q alone; share of K or V clipped; * stays in 16 bit"
    )
    columns = ["layer", "KL", "K", "V", "error", "K", "V", "Q", "clip"]
    ranked = sorted(result.layers, key=lambda layer: -(layer.alone.kl.value if layer.alone else 0))
    print_table(title, columns, [_row(layer) for layer in ranked])
    if result.curve:
        rows = [_point(point) for point in result.curve]
        title = "whole layers in 16 bit: bytes of the cache against its loss, 95 % intervals below"
        columns = ["16-bit layers", "bytes", *(METRICS[field].name for field in _LOSS)]
        print_table(title, columns, rows)
    for line in verdict(result):
        info(line)
    if applied and not result.partial:
        info(f"recorded in {result.model}: fp8calib.json and README.md")


def _row(layer: LayerSensitivity) -> list[str]:
    def kl(loss: Loss | None) -> str:
        return "" if loss is None else f"{loss.kl.value:.4f}"

    def percent(share: float) -> str:
        return f"{share:.0%}" if share >= 0.1 else f"{100 * share:.2g}%"

    found = layer.errors
    clipped = max(found.k_clipped, found.v_clipped)
    return [
        f"{layer.index}{' *' * layer.exempt}",
        *map(kl, (layer.alone, layer.k_alone, layer.v_alone)),
        *map(percent, (found.error, found.k_error, found.v_error, found.q_error)),
        percent(clipped) if clipped else "",
    ]


def _point(point: Point) -> list[str]:
    loss = point.loss
    listed = " ".join(map(str, sorted(point.exempt.layers))) or "none"
    return [
        listed if len(listed) < 30 else f"{len(point.exempt.layers)} layers",
        f"{point.share:.1%}",
        *(with_interval(getattr(loss, field), METRICS[field].form) for field in _LOSS),
    ]


def verdict(result: Sensitivity) -> list[str]:
    """What to do, in lines."""
    if result.proposal is None or result.whole is None:
        return []
    budget, found = result.budget, result.proposal
    limit = (
        f"mean KL {budget.kl:g}" if budget.kl is not None else f"{budget.share:.0%} of the bytes"
    )
    fp8 = f"mean KL {result.whole.loss.kl.value:.4g} at {result.whole.share:.0%} of the bytes"
    if not result.skip_layers:
        return [f"no layer need stay in 16 bit: everything in FP8 has {fp8} (budget {limit})"]
    count = len(result.skip_layers)
    lines = [
        f"within {limit}: {count} of {len(result.layers)} layers in 16 bit, mean KL "
        f"{found.loss.kl.value:.4g} at {found.share:.1%} of the bytes (everything in FP8: {fp8})",
        f"vLLM needs: {result.skip_flag}",
    ]
    if result.split is not None:
        split = result.split
        lines.append(
            f"keeping in 16 bit only {split.exempt} has mean KL {split.loss.kl.value:.4g} at "
            f"{split.share:.1%} of the bytes; KVFormat(native_k, native_v) does that here, but "
            "vLLM cannot"
        )
    high = found.loss.kl.high
    if budget.kl is not None and high is not None and high > budget.kl:
        lines.append(
            f"inconclusive: the interval of that KL reaches {high:.4g}; use more --samples"
        )
    return lines
