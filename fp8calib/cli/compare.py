"""`fp8calib compare`: two reports of `verify` side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8calib.cli import app, options

if TYPE_CHECKING:
    from fp8calib.evaluation.report_compare import Comparison, Difference


@app.command(
    epilog="Example: fp8calib verify old --report old.json; fp8calib verify new --report new.json; "
    "fp8calib compare old.json new.json",
)
def compare(
    a: Annotated[
        Path, typer.Argument(metavar="A.json", help="What `verify --report A.json` wrote.")
    ],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="Another one.")],
    json: options.Json = False,
) -> None:
    """Show two reports of verify side by side.

    And what differs, and whether they can be compared at all.
    """
    from fp8calib.console import print_json
    from fp8calib.evaluation.report_compare import compare_reports

    result = compare_reports(a, b)
    if json:
        print_json(result.to_dict())
    else:
        _show(result)


def _show(result: Comparison) -> None:
    from fp8calib.console import info, print_table, warn

    for mismatch in result.mismatches:
        warn(mismatch)
    print_table(
        "95 % intervals that do not overlap are marked *",
        ["cache", "", Path(result.a).name, Path(result.b).name, "difference"],
        _rows(result.differences),
    )
    for path, verdict in zip((result.a, result.b), result.verdicts, strict=True):
        info(f"{path}: {verdict}")


def _rows(differences: list[Difference]) -> list[list[str]]:
    rows, before = [], None
    for each in differences:
        name = each.variant if each.variant != before else ""
        mark = " *" if each.apart else ""
        numbers = [_number(each.metric, x) for x in (each.a, each.b)]
        change = "" if each.difference is None else f"{each.difference:+.4g}{mark}"
        rows.append([name, each.metric.replace("_", " "), *numbers, change])
        before = each.variant
    return rows


def _number(metric: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if metric == "kv_bytes_per_token" else f"{value:.5g}"
