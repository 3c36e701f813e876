"""compare: two reports side by side, and whether their numbers can be compared at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8calib.cli import main
from fp8calib.errors import DataError
from fp8calib.evaluation.report_compare import compare_reports


def estimate(value: float, width: float) -> dict[str, float]:
    return {"value": value, "low": value - width, "high": value + width}


def report(path: Path, kl: float, **changes: Any) -> Path:
    content = {
        "schema": 1,
        "model": "m",
        "dtype": "bfloat16",
        "dataset": {"name": "text", "tokens": 1000, "fingerprint": "f"},
        "versions": {"torch": "2.13", "fp8calib": "0.1.0"},
        "variants": [
            {"key": "native", "title": "native", "perplexity": 20.0},
            {"key": "scale_1", "title": "1.0", "perplexity": 21.0, "kl": estimate(kl, 0.001)},
        ],
        "gates": [{"gate": "max_kl", "variant": "scale_1", "passed": kl < 0.05}],
        "tasks": [
            {"task": "t", "metric": "acc", "variants": [{"key": "scale_1", "value": 0.5 - kl}]}
        ],
    }
    path.write_text(json.dumps(content | changes))
    return path


def test_differences_are_told_and_those_beyond_the_intervals_marked(tmp_path: Path) -> None:
    found = compare_reports(report(tmp_path / "a.json", 0.06), report(tmp_path / "b.json", 0.04))
    assert found.mismatches == [] and found.verdicts[1] == "passes"
    assert found.verdicts[0] == "fails max_kl (scale_1)"
    by_name = {(d.variant, d.metric): d for d in found.differences}
    kl = by_name["scale_1", "kl"]
    assert (kl.a, kl.b, kl.difference, kl.apart) == (0.06, 0.04, pytest.approx(-0.02), True)
    assert by_name["scale_1", "perplexity"].difference == 0
    assert by_name["scale_1", "t: acc"].difference == pytest.approx(0.02)
    near = compare_reports(tmp_path / "a.json", report(tmp_path / "c.json", 0.0605))
    assert next(d for d in near.differences if d.metric == "kl").apart is False


def test_what_makes_numbers_incomparable_is_told(tmp_path: Path) -> None:
    one = report(tmp_path / "a.json", 0.06)
    other = report(
        tmp_path / "b.json",
        0.06,
        model="n",
        dataset={"name": "other", "tokens": 5, "fingerprint": "g"},
        versions={"torch": "2.14", "fp8calib": "0.1.0"},
        partial=True,
        variants=[{"key": "calibrated", "perplexity": 3}],
    )
    lines = "\n".join(compare_reports(one, other).mismatches)
    for words in (
        "models: m and n",
        "different texts",
        "torch: 2.13 and 2.14",
        "second report was",
    ):
        assert words in lines
    rows = compare_reports(one, other).differences
    assert {d.difference for d in rows if d.variant == "calibrated"} == {None}


def test_intervals_of_different_texts_are_not_held_apart(tmp_path: Path) -> None:
    text = {"name": "other", "tokens": 5, "fingerprint": "g"}
    one = report(tmp_path / "a.json", 0.06)
    found = compare_reports(one, report(tmp_path / "b.json", 0.04, dataset=text))
    assert {d.apart for d in found.differences} == {None}


@pytest.mark.parametrize(
    "odd",
    [
        {"tasks": [3], "gates": "x"},
        {"tasks": [{"task": "t", "variants": 5}], "needle": {"variants": [None]}, "gates": []},
        {"variants": [{"key": "a", "perplexity": 10**400}], "gates": [1]},
    ],
)
def test_odd_values_in_a_report_are_passed_over(odd: dict[str, Any], tmp_path: Path) -> None:
    one = report(tmp_path / "a.json", 0.06)
    assert compare_reports(one, report(tmp_path / "b.json", 0.06, **odd)).verdicts[1] == "passes"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(report(tmp_path / f"{name}.json", kl)) for name, kl in (("a", 0.06), ("b", 0.04))]
    with pytest.raises(SystemExit) as stop:
        main(["compare", *paths])
    err = capsys.readouterr().err
    assert stop.value.code == 0 and "-0.02 *" in err and "b.json: passes" in err
    with pytest.raises(SystemExit) as stop:
        main(["compare", *paths, "--json"])
    assert stop.value.code == 0
    assert json.loads(capsys.readouterr().out)["differences"][0]["metric"] == "perplexity"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ("[1]", "not a report"),
        ('{"schema": 1, "variants": [3]}', "not a report"),
        ('{"schema": 7, "variants": [{"key": "a"}]}', "schema 7"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_other_files_are_refused(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message):
        compare_reports(path, path)
