"""The files that `verify` leaves: report.json, report.html, and JUnit XML for CI systems."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from fp8calib.console import json_text
from fp8calib.errors import UserError

if TYPE_CHECKING:
    from fp8calib.evaluation.verification import Verification

# Control characters and lone surrogates, which XML 1.0 cannot hold.
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def check_file(option: str, name: str, suffixes: tuple[str, ...], overwrite: bool) -> Path:
    """The path of a file to write later; refused now where that could not be.

    Raises:
        UserError: it has another ending than `suffixes`, exists, or has no folder to be in.
    """
    path = Path(name).expanduser()
    if name == "-":
        raise UserError(f"{option} -: name a file; the report goes to stdout with --json")
    if path.suffix not in suffixes:
        raise UserError(f"{option} {name}: the name must end in {' or '.join(suffixes)}")
    if path.is_dir() or (path.exists() and not overwrite):
        raise UserError(f"{option} {name}: exists; choose another name, or pass --overwrite")
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK | os.X_OK)):
        raise UserError(f"{option} {name}: {path.parent} is not a folder you can write to")
    return path


def write_report(result: Verification, path: Path) -> None:
    """Write it as JSON, or as a page when `path` ends in .html."""
    content = result.to_dict()
    if path.suffix == ".json":
        _write_whole(path, lambda place: place.write_text(json_text(content) + "\n"))
    else:
        from fp8calib.evaluation.report_html import write_html

        _write_whole(path, lambda place: write_html(content, place))


def write_text(path: Path, content: str) -> None:
    """Write a text file, whole or not at all."""
    _write_whole(path, lambda place: place.write_text(content, encoding="utf-8", errors="replace"))


def write_junit(result: Verification, path: Path) -> None:
    """A test case for each gate, and one that says whether the run was complete."""
    cases = []
    for gate in result.gates:
        name = gate.gate if gate.task is None else f"{gate.gate} {gate.task}"
        said = gate.sentence()
        if not gate.conclusive:
            said += " (inconclusive: the interval lies on both sides, or there is none)"
        cases.append((result.variant(gate.variant).title, name, None if gate.passed else said))
    interrupted = "interrupted: the numbers are partial" if result.partial else None
    cases.append(("run", "complete", interrupted))
    _write_junit(path, result.model, cases, result.seconds, result.date)


def write_junit_failure(model: str, message: str, path: Path) -> None:
    """For a run that ended before its gates were judged."""
    _write_junit(path, model, [("run", "complete", message)], 0.0, "")


def _write_junit(
    path: Path,
    model: str,
    cases: list[tuple[str, str, str | None]],
    seconds: float,
    date: str,
) -> None:
    """Cases are (class, name, what failed or None)."""
    counts = {
        "tests": str(len(cases)),
        "failures": str(sum(said is not None for _, _, said in cases)),
        "errors": "0",
        "skipped": "0",
        "time": f"{seconds:.2f}",
    }
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(
        root, "testsuite", {"name": _xml(f"fp8calib verify {model}"), **counts}
    )
    if date:
        suite.set("timestamp", date.removesuffix("+00:00"))
    for group, name, failed in cases:
        where = {"classname": _xml(f"{model}: {group}"), "name": _xml(name), "time": "0"}
        case = ElementTree.SubElement(suite, "testcase", where)
        if failed is not None:
            failure = ElementTree.SubElement(case, "failure", {"message": _xml(failed)})
            failure.text = _xml(failed)
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    _write_whole(path, lambda place: place.write_bytes(text))


def _xml(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path` that then takes its place; a link stays a link."""
    path = path.resolve()
    place = path.with_name(f".{path.stem}-{secrets.token_hex(4)}{path.suffix}")
    try:
        write(place)
        place.replace(path)
    except OSError as problem:
        raise UserError(f"cannot write {path}: {problem.strerror}") from problem
    finally:
        place.unlink(missing_ok=True)
