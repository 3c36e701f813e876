"""`fp8calib models`: which architectures are calibrated, what is embedded, any model's folder."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from fp8calib.cli import app


@app.command(
    epilog="Examples: fp8calib models --path demo:smollm2-135m-instruct; "
    "fp8calib models --path Qwen/Qwen3-0.6B"
)
def models(
    path: Annotated[
        str | None,
        typer.Option(
            "--path",
            metavar="NAME",
            help="Print the folder of this model (embedded, Hub id, folder); fetched if needed.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """List architectures and the embedded model.

    Which architectures can be calibrated, and which are refused and why. With --path, print the
    folder of one model instead.
    """
    from fp8calib import console, demo_model
    from fp8calib.architectures import ARCHITECTURES
    from fp8calib.models import resolve_model

    if path is not None:
        folder = resolve_model(path)
        if as_json:
            console.print_json({"path": str(folder)})
        else:
            print(folder)
        return
    folder = demo_model.demo_folder()
    cached = folder.is_dir()
    if as_json:
        entry = {
            "name": demo_model.NAME,
            "model": demo_model.TITLE,
            "license": demo_model.LICENSE,
            "cached": cached,
            "path": str(folder),
        }
        architectures = [asdict(entry) for entry in ARCHITECTURES]
        console.print_json({"embedded": [entry], "architectures": architectures})
        return
    console.print_table(
        "Architectures (others are tried: what cannot be observed is refused)",
        ["model_type", "models", "calibrated", "remarks"],
        [
            [
                entry.model_type,
                entry.title,
                "no" if entry.refused else "tensor, attn_head",
                entry.refused or entry.note,
            ]
            for entry in ARCHITECTURES
        ],
    )
    console.print_table(
        "Embedded models",
        ["name", "model", "license", "cached"],
        [[demo_model.NAME, demo_model.TITLE, demo_model.LICENSE, "yes" if cached else "no"]],
    )
    console.info(
        f"`fp8calib models --path NAME` prints its folder{'' if cached else ', fetching it first'}"
    )
