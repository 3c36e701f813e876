"""`fp8calib inspect`: show a checkpoint's scales and what vLLM will do with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fp8calib.cli import app

if TYPE_CHECKING:
    from fp8calib.checkpoint import Inspection
    from fp8calib.checkpoint.inspection import LayerReport
    from fp8calib.checkpoint.live import LiveCheck


@app.command(
    epilog="Exit code 1 when the engine would silently run a layer at scale 1.0, and with --live "
    "when it does. Examples: fp8calib inspect SmolLM2-135M-Instruct-kvattn-fp8-tensor; "
    "fp8calib inspect ./model-fp8-kv --runtime sglang --tp 4; "
    "fp8calib inspect ./model-fp8-kv --live --python ~/vllm/bin/python"
)
def inspect(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT", help="A folder, a Hub id or demo:smollm2-135m-instruct."
        ),
    ],
    runtime: Annotated[
        str,
        typer.Option(
            "--runtime", metavar="vllm|sglang|trtllm|fp8calib", help="Engine to serve it."
        ),
    ] = "vllm",
    tp: Annotated[
        int, typer.Option("--tp", min=1, metavar="N", help="Tensor-parallel ranks it runs on.")
    ] = 1,
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="Load it in vLLM, compare the scales that its layers hold with the file's, change "
            "one in a copy, and require another output.",
        ),
    ] = False,
    python: Annotated[
        str | None,
        typer.Option("--python", help="Interpreter that has vLLM, for --live; default: this one."),
    ] = None,
    heads: Annotated[bool, typer.Option("--heads", help="One line per head.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show a checkpoint's scales and what an engine does with them."""
    from fp8calib.checkpoint import inspect as run
    from fp8calib.console import print_json
    from fp8calib.errors import CheckFailed, UserError

    if live and runtime != "vllm":
        raise UserError(f"--live is for vLLM, and this is --runtime {runtime}")
    if live and tp > 1:
        raise UserError(f"--live runs vLLM on one device, and this is --tp {tp}: leave one out")
    if python is not None and not live:
        raise UserError("--python is for --live")
    found = run(checkpoint, runtime, tp)
    seen = None
    if live:
        from fp8calib.checkpoint.live import live_check

        seen = live_check(checkpoint, python, found.skip_layers)
    if json:
        print_json(found.to_dict() | ({"live": seen.to_dict()} if seen else {}))
    else:
        _show(found, heads)
        if seen:
            _show_live(seen)
    if seen and seen.problems:
        raise CheckFailed(f"{checkpoint}: {seen.problems[0]}")
    if not found.ok:
        count = len(found.problems)
        raise CheckFailed(
            f"{checkpoint}: {found.problems[0]}"
            if count == 1
            else f"{checkpoint} would not run as calibrated: {count} problems"
        )


def _show(found: Inspection, heads: bool) -> None:
    from fp8calib.console import info, print_table, warn

    if any(layer.k_scale or layer.v_scale or layer.q_scale for layer in found.layers):
        rows = [row for layer in found.layers for row in _rows(layer, heads)]
        title = f"{found.checkpoint}: {found.strategy or 'no scheme'}, {len(found.layers)} layers"
        print_table(title, ["layer", "k_scale", "v_scale", "q_scale", "note"], rows)
    for note in found.notes:
        info(note)
    if len(found.problems) > 1:
        for problem in found.problems:
            warn(problem)
    if found.ok:
        info(f"Every layer is calibrated. Serve it with:\n  {found.serve}")
    info(f"(read from {found.rules.partition(':')[0]})")


def _show_live(seen: LiveCheck) -> None:
    from fp8calib.console import info, warn

    for problem in seen.problems:
        warn(problem)
    for line in seen.lines():
        info(line)


def _rows(layer: LayerReport, heads: bool) -> list[list[str]]:
    note = ", ".join(
        word
        for word, true in (("window", layer.sliding_window is not None), ("skipped", layer.skipped))
        if true
    )
    scales = [layer.k_scale, layer.v_scale, layer.q_scale]
    if not heads:
        return [[str(layer.index), *map(_range, scales), note]]
    count = max((len(values) for values in scales if values), default=1)
    return [
        [
            f"{layer.index}.{head}" if count > 1 else str(layer.index),
            *(f"{values[head]:.6g}" if values and head < len(values) else "" for values in scales),
            note if head == 0 else "",
        ]
        for head in range(count)
    ]


def _range(values: list[float] | None) -> str:
    if not values:
        return "missing"
    low, high = min(values), max(values)
    return f"{low:.6g}" if low == high else f"{low:.3g} to {high:.3g}"
