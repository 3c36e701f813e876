"""`fp8calib calibrate`: scales from a model and some text, written as a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8calib.cli import app, options
from fp8calib.devices import check_device_map

if TYPE_CHECKING:
    from fp8calib.calibration import CalibrationResult
    from fp8calib.calibration.report import KindReport


@app.command(
    epilog="Examples: fp8calib calibrate demo:smollm2-135m-instruct; "
    "fp8calib calibrate meta-llama/Llama-3.1-8B-Instruct --dataset mine.jsonl --samples 256; "
    "fp8calib calibrate ./model --strategy attn_head --skip-layers 0,-1 -o ./model-fp8-kv",
)
def calibrate(
    model: options.Model,
    strategy: options.Strategy = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Folder to make; default NAME-kvattn-fp8-STRATEGY."),
    ] = None,
    dataset: options.Dataset = None,
    split: options.Split = None,
    text_column: options.TextColumn = None,
    messages_column: options.MessagesColumn = None,
    samples: options.Samples = None,
    max_seq_len: options.MaxSeqLen = None,
    seed: options.Seed = None,
    query: options.Query = None,
    skip_layers: options.SkipLayers = None,
    observer: options.Observer = None,
    margin: options.Margin = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Texts in one forward pass; default: 4, on a GPU 8.")
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    device_map: Annotated[
        str | None,
        typer.Option(
            metavar="auto|stream",
            callback=options.checked(check_device_map),
            help="For models larger than one device. auto: spread over all GPUs, then memory. "
            "stream: one layer at a time, read from disk for every batch.",
        ),
    ] = None,
    auto: Annotated[
        bool,
        typer.Option(
            "--auto",
            help="Choose strategy and skip layers by measuring: tensor unless attn_head is better "
            "beyond chance, and the fewest layers in 16 bit that keep to --budget-kl.",
        ),
    ] = False,
    budget_kl: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="With --auto: mean KL per token, in nats, that FP8 may cost. Default: the "
            "recipe's max_kl, 0.05.",
        ),
    ] = None,
    recipe: options.RecipeName = None,
    link: options.Link = False,
    overwrite: options.Overwrite = False,
    overwrite_scales: Annotated[
        bool,
        typer.Option("--overwrite-scales", help="Replace KV-cache scales that MODEL already has."),
    ] = False,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Save what was observed every N batches."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from what an interrupted run has saved.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check model, data and options; load no weights.")
    ] = False,
    trust_remote_code: options.TrustRemoteCode = False,
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle", help="Read .bin weights where MODEL has no others (tensors only)."
        ),
    ] = False,
    push_to_hub: options.PushToHub = None,
    private: options.Private = False,
    json: options.Json = False,
) -> None:
    """Calibrate FP8 KV-cache scales and write them as a checkpoint.

    vLLM picks the scales up by itself. Defaults are those of the recipe fp8_kv_tensor: strategy
    tensor, observer absmax, margin 1, q_scale too; 512 texts of up to 2048 tokens. The texts are of
    HuggingFaceH4/ultrachat_200k, as in vLLM's guide; for demo:smollm2-135m-instruct, which needs no
    network, of builtin:pydoc.
    """
    from fp8calib.recipe import Recipe, load_recipe

    chosen = (Recipe() if recipe is None else load_recipe(recipe)).with_options(
        strategy=strategy,
        dataset=dataset,
        split=split,
        text_column=text_column,
        messages_column=messages_column,
        samples=samples,
        max_seq_len=max_seq_len,
        seed=seed,
        query=query,
        kv_cache_dtype_skip_layers=skip_layers,
        observer=observer,
        margin=margin,
        batch_size=batch_size,
    )
    from fp8calib.errors import UserError
    from fp8calib.models import resolve_model

    if budget_kl is not None and not auto:
        raise UserError("--budget-kl is for --auto")
    if budget_kl is not None and not 0 < budget_kl < float("inf"):
        raise UserError(f"--budget-kl must be above 0, got {budget_kl:g}")
    if auto and strategy is not None:
        raise UserError("--auto chooses the strategy: leave --strategy out")
    chosen = chosen.with_gates(max_kl=budget_kl)
    resolve_model(model, allow_pickle)  # a wrong name is told before torch is loaded
    from fp8calib.checkpoint.hub import check_push, push

    check_push(push_to_hub, private)
    from fp8calib import console
    from fp8calib.calibration import calibrate as run
    from fp8calib.calibration.ranks import first_rank

    result = run(
        model,
        output,
        recipe=chosen,
        device=device,
        dtype=dtype,
        device_map=device_map,
        link=link,
        overwrite=overwrite,
        overwrite_scales=overwrite_scales,
        dry_run=dry_run,
        checkpoint_every=checkpoint_every,
        resume=resume,
        trust_remote_code=trust_remote_code,
        name=push_to_hub,
        auto=auto,
        allow_pickle=allow_pickle,
    )
    if not first_rank():
        return
    if not json:
        _show(result)
    url = push(result.output, push_to_hub, private) if push_to_hub and result.output else None
    if json:
        console.print_json(result.to_dict() | ({"url": url} if url else {}))
    elif url:
        console.info(f"pushed to {url}")


def _show(result: CalibrationResult) -> None:
    from fp8calib import console

    data = result.data
    console.info(f"data: {data.source}, {len(data.rows)} texts, {data.num_tokens:,} tokens")
    if result.output is None:
        console.info("dry run: everything that can be checked without the weights is in order")
        return
    show_scales(result.reports, result.recipe.calibration.strategy)
    show_warnings(result.warnings)
    for reason in result.reasons:
        console.info(f"auto: {reason}")
    if result.skip_layers:
        console.info(
            f"skip layers (recorded, not part of the scales): {' '.join(result.skip_layers)}"
        )
    console.info(
        f"wrote {result.output} in {result.seconds:.1f} s\nserve it with:\n  {result.serve}"
    )


def show_scales(reports: list[KindReport], strategy: str) -> None:
    """A line for each of q, k and v, and the layers that use most of e4m3's range."""
    from fp8calib import console

    console.print_table(
        f"{len({report.layer for report in reports})} layers, {strategy} scales "
        "(shares of all values at scale 1.0 > at the calibrated scale)",
        ["", "amax", "scale", "clipped %", "flushed to zero %"],
        [_row(kind, reports) for kind in ("q", "k", "v") if _of(kind, reports)],
    )
    widest = sorted(reports, key=lambda report: -report.binades)[:3]
    console.info(
        "widest range (largest over median |x|): "
        + "; ".join(
            f"layer {r.layer} {r.kind}, 2^{r.binades:.1f} up to {r.amax:.4g}" for r in widest
        )
    )


def show_warnings(warnings: list[str]) -> None:
    from fp8calib import console

    for warning in warnings:
        console.info(f"warning: {warning}")


def _of(kind: str, reports: list[KindReport]) -> list[KindReport]:
    return [report for report in reports if report.kind == kind]


def _row(kind: str, reports: list[KindReport]) -> list[str]:
    mine = _of(kind, reports)
    count = len(mine)

    def share(at_one: str, calibrated: str) -> str:
        before, after = (
            100 * sum(getattr(report, name) for report in mine) / count
            for name in (at_one, calibrated)
        )
        return f"{before:.3g} > {after:.3g}"

    return [
        kind,
        f"{min(r.amax for r in mine):.4g} - {max(r.amax for r in mine):.4g}",
        f"{min(r.scale_min for r in mine):.3g} - {max(r.scale_max for r in mine):.3g}",
        share("clipped_at_one", "clipped"),
        share("flushed_at_one", "flushed"),
    ]
