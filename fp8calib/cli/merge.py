"""`fp8calib merge`: scales from elsewhere, put into a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8calib.cli import app, options
from fp8calib.cli.convert import CollapseHeads, show


@app.command(
    epilog="Examples: fp8calib merge ./model scales.json -o ./model-fp8-kv; "
    "fp8calib merge ./model ./calibrated-by-another-tool --overwrite-scales -o ./model-fp8-kv"
)
def merge(
    checkpoint: options.Model,
    scales: Annotated[
        str,
        typer.Argument(
            metavar="SCALES",
            help="A .json or .safetensors of scales, or a checkpoint that has some.",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to make.")],
    to: Annotated[
        str,
        typer.Option("--to", metavar="FORMAT", help="compressed-tensors (default) or modelopt."),
    ] = "compressed-tensors",
    collapse_heads: CollapseHeads = None,
    link: options.Link = False,
    overwrite: options.Overwrite = False,
    overwrite_scales: Annotated[
        bool, typer.Option("--overwrite-scales", help="Replace scales that MODEL has.")
    ] = False,
    push_to_hub: options.PushToHub = None,
    private: options.Private = False,
    json: options.Json = False,
) -> None:
    """Put scales from elsewhere into a checkpoint.

    They are checked layer by layer against the model.
    """
    from fp8calib.checkpoint.conversion import merge as run
    from fp8calib.checkpoint.hub import check_push, push

    check_push(push_to_hub, private)
    result = run(
        checkpoint,
        scales,
        output,
        to=to,
        collapse_heads=collapse_heads,
        link=link,
        overwrite=overwrite,
        overwrite_scales=overwrite_scales,
        name=push_to_hub,
    )
    show(result, json, push(output, push_to_hub, private) if push_to_hub else None)
