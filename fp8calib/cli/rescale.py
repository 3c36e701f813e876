"""`fp8calib rescale`: other scales from a calibration's statistics, without the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8calib.cli import app, options


@app.command(
    epilog="Examples: fp8calib rescale ./model-fp8-kv --observer percentile:99.99 -o ./clipped; "
    "fp8calib rescale ./model-fp8-kv --strategy attn_head -o ./per-head"
)
def rescale(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A folder that `fp8calib calibrate` made.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to make.")],
    observer: options.Observer = None,
    strategy: options.Strategy = None,
    margin: options.Margin = None,
    query: options.Query = None,
    skip_layers: options.SkipLayers = None,
    link: options.Link = False,
    overwrite: options.Overwrite = False,
    json: options.Json = False,
) -> None:
    """Make new scales from what a calibration saw.

    The model does not run again. What no option changes stays as it was calibrated.
    """
    from fp8calib import console
    from fp8calib.calibration.rescale import rescale as run
    from fp8calib.cli.calibrate import show_scales, show_warnings

    result = run(
        checkpoint,
        output,
        link=link,
        overwrite=overwrite,
        observer=observer,
        strategy=strategy,
        margin=margin,
        query=query,
        kv_cache_dtype_skip_layers=skip_layers,
    )
    if json:
        console.print_json(result.to_dict())
        return
    show_scales(result.reports, result.recipe.calibration.strategy)
    show_warnings(result.warnings)
    console.info(f"wrote {result.output}\nserve it with:\n  {result.serve}")
