"""`fp8calib doctor`: what this machine can do, for oneself or for a bug report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8calib.cli import app, options


@app.command(
    epilog="Exit code 1 when something here stands in the way. "
    "Examples: fp8calib doctor; fp8calib doctor --model ./Llama-3.1-8B --python ~/vllm/bin/python"
)
def doctor(
    model: Annotated[
        str | None,
        typer.Option("--model", help="Also say whether this model fits, weights and copy."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Where a calibrated copy would go.")
    ] = None,
    python: Annotated[
        str | None, typer.Option("--python", help="Another interpreter to look for vLLM in.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Say what this machine can do: versions, GPU, vLLM, room."""
    from fp8calib import console
    from fp8calib.doctor import diagnose
    from fp8calib.errors import CheckFailed

    found = diagnose(model, output, python)
    if json:
        console.print_json(found.to_dict())
    else:
        signs = {"ok": "", "note": "note", "problem": "problem"}
        rows = [
            [entry.name, entry.value, signs[entry.verdict], entry.advice]
            for entry in found.findings
        ]
        console.print_table("This machine", ["", "found", "", "what to do"], rows)
    if found.problems:
        raise CheckFailed(f"{found.problems[0].name}: {found.problems[0].value}")
