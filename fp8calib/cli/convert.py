"""`fp8calib convert`: the same scales in the form that another tool reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8calib.cli import app, options

if TYPE_CHECKING:
    from fp8calib.checkpoint.conversion import Conversion

CollapseHeads = Annotated[
    str | None,
    typer.Option(
        "--collapse-heads",
        metavar="max",
        help="Make one scale a layer of per-head ones, for engines that read no others.",
    ),
]


@app.command(
    epilog="Examples: fp8calib convert ./model-fp8-kv --to json -o scales.json; "
    "fp8calib convert ./model-fp8-kv --to json -o - | jq .strategy; "
    "fp8calib convert ./model-fp8-kv --to sglang --tp 2 --collapse-heads max -o kv.json; "
    "fp8calib convert ./per-head --to compressed-tensors --collapse-heads max -o ./per-tensor"
)
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A checkpoint (folder, Hub id), or a .json or .safetensors of scales.",
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="json (extracts them), compressed-tensors, modelopt, sglang or trtllm.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", help="File to make, - for stdout; of checkpoints, the folder."
        ),
    ],
    collapse_heads: CollapseHeads = None,
    tp: Annotated[
        int, typer.Option("--tp", min=1, metavar="N", help="Ranks that an sglang file is for.")
    ] = 1,
    link: options.Link = False,
    overwrite: options.Overwrite = False,
    push_to_hub: options.PushToHub = None,
    private: options.Private = False,
    json: options.Json = False,
) -> None:
    """Write a checkpoint's scales in another form.

    They are read and checked, and what the form cannot hold is said.
    """
    from fp8calib.checkpoint.conversion import convert as run
    from fp8calib.checkpoint.folder import STDOUT
    from fp8calib.checkpoint.formats import format_named
    from fp8calib.checkpoint.hub import check_push, push
    from fp8calib.errors import UserError

    if json and output == STDOUT:
        raise UserError("-o - and --json both write to stdout: leave one of them out")
    if push_to_hub and not format_named(to).with_weights:
        raise UserError(f"--push-to-hub is for checkpoints, and {to} is a file of scales")
    check_push(push_to_hub, private)
    result = run(
        source,
        to,
        output,
        collapse_heads=collapse_heads,
        tp=tp,
        link=link,
        overwrite=overwrite,
        name=push_to_hub,
    )
    show(result, json, push(output, push_to_hub, private) if push_to_hub else None)


def show(result: Conversion, json: bool, url: str | None = None) -> None:
    from fp8calib import console
    from fp8calib.checkpoint.folder import STDOUT

    if json:
        console.print_json(result.to_dict() | ({"url": url} if url else {}))
        return
    for line in result.lost:
        console.warn(f"lost: {line}")
    for note in result.notes:
        console.info(note)
    where = "to stdout" if result.output == STDOUT else result.output
    console.info(f"wrote {where}: {result.layers} layers, {result.strategy} scales")
    if url:
        console.info(f"pushed to {url}")
    if result.serve:
        console.info(f"serve it with:\n  {result.serve}")
