"""The HTML report: complete, self-contained, and nothing in it runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import fp8calib
from fp8calib.checkpoint.card_accuracy import accuracy_section
from fp8calib.cli import main
from fp8calib.console import json_text
from fp8calib.evaluation import verify
from fp8calib.evaluation.bootstrap import Estimate
from fp8calib.evaluation.gates import GateResult
from fp8calib.evaluation.report_html import report_html, write_html
from fp8calib.evaluation.report_svg import Mark, heat_map, line_plot
from fp8calib.recipe import Gates

HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(2)>'&amp;"
VOID = {"meta"}


class Page(HTMLParser):
    """Checks nesting while it collects what the tests ask for."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def report(tiny: Callable[..., Path], folder: Path) -> dict[str, Any]:
    """A real report of a checkpoint with scales per head, with needles and generation."""
    data = folder / "texts.jsonl"
    lines = [{"text": f"{n} squared is {n * n}, and {n} cubed is {n**3}; " * 3} for n in range(8)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = tiny(max_position_embeddings=512)
    fp8calib.calibrate(model, folder / "out", strategy="attn_head", dataset=str(data))
    found = verify(str(folder / "out"), dataset=str(data), generation=8, needle=True)
    found = replace(found, command="fp8calib verify out --dataset texts.jsonl")
    return json.loads(json_text(found.to_dict()))


def test_the_page_says_everything(report: dict[str, Any]) -> None:
    page = Page(report_html(report))
    headings = [
        "What the cache costs", "Gates", "Where it hurts",
        "Ranges that calibration saw", "Needles in long text", "Greedy generation",
        "How it was measured",
    ]  # fmt: skip
    text = " ".join(page.text)
    for heading in headings:
        assert heading in text, heading
    verdict = "Passes all" if report["ok"] else "Fails"
    assert verdict in text and report["command"] in text
    for variant in report["variants"]:
        assert variant["title"] in text
        assert f"{variant['perplexity']:.4f}" in text
    kl = report["variants"][-1]["kl"]
    assert f"{kl['low']:.5f} to {kl['high']:.5f}" in text
    assert report["versions"]["torch"] in text and report["dataset"]["fingerprint"] in text
    layers, heads = len(report["layers"]), report["layers"][0]["num_kv_heads"]
    titles = [t for t in page.text if re.fullmatch(r"layer \d+, KV head \d+: [\d.e+-]+", t)]
    assert len(titles) == 2 * layers * heads  # maxima of K and V
    amax = report["layers"][1]["amax"]["k"][0]
    assert f"layer 1, KV head 0: {amax:.3g}" in titles


def test_the_page_needs_nothing_and_runs_nothing(report: dict[str, Any]) -> None:
    page = report_html(report)
    for tag, attributes in Page(page).tags:
        assert tag not in ("script", "link", "iframe", "img", "object", "base", "form")
        for name, value in attributes.items():
            assert not name.startswith("on") and name not in ("src", "href", "action")
            assert "url(" not in (value or "")
    assert "http://" not in page and "https://" not in page and "@import" not in page
    assert "prefers-color-scheme: dark" in page and "width=device-width" in page


def test_text_of_a_checkpoint_is_only_text(report: dict[str, Any]) -> None:
    def hostile(value: Any) -> Any:
        if isinstance(value, str):
            return value if value in ("native",) else value + HOSTILE
        if isinstance(value, list):
            return [hostile(item) for item in value]
        if isinstance(value, dict):
            return {key: hostile(item) for key, item in value.items()}
        return value

    bad = hostile(report)
    bad["versions"] = {HOSTILE: HOSTILE}
    bad["dataset"][HOSTILE] = HOSTILE
    bad["layers"][0]["errors"][HOSTILE] = report["layers"][0]["errors"]["scale_1"]
    bad["sensitivity"] = {"skip_layers": [HOSTILE], "budget": {"kl": None}, "curve": []}
    page = Page(report_html(bad))
    assert not {tag for tag, _ in page.tags} & {"script", "img"}
    assert not [name for _, attributes in page.tags for name in attributes if name[:2] == "on"]
    assert "alert(1)" in " ".join(page.text)


def test_a_report_that_lacks_parts_is_shown_without_them() -> None:
    page = Page(report_html({"model": "m"}))
    assert "Measured; no gates were set" in " ".join(page.text)
    broken = {"model": "m", "partial": True, "variants": [{"key": "a", "title": "A", "kl": "nan"}]}
    text = " ".join(Page(report_html(broken)).text)
    assert "Interrupted" in text and "nan" in text


def test_failed_gates_come_first(report: dict[str, Any]) -> None:
    gates = [dict(gate) for gate in report["gates"]]
    gates[0] |= {"passed": False, "conclusive": False}
    text = " ".join(Page(report_html({**report, "gates": gates})).text)
    failed = sum(not gate["passed"] for gate in gates)
    assert f"Fails {failed} of {len(gates)} gates" in text and "inconclusive" in text


@pytest.mark.parametrize("gate", Gates.model_fields)
def test_page_and_terminal_call_a_gate_the_same(gate: str) -> None:
    result = GateResult(gate, "fp8", 0.5, Estimate(0.75, 0.7, 0.8))
    page = Page(report_html({"model": "m", "gates": [asdict(result) | {"passed": True}]}))
    parts = re.fullmatch(r"(.+) (\S+), (.+)", result.sentence())
    assert parts is not None and set(parts.groups()) <= set(page.text)


def test_scales_tell_the_ranges_where_no_maxima_are_recorded(report: dict[str, Any]) -> None:
    layers = [layer | {"amax": {}} for layer in report["layers"]]
    page = Page(report_html({**report, "layers": layers}))
    assert "Ranges that the scales stand for" in page.text
    scale = report["layers"][1]["scales"]["v"][0]
    assert f"layer 1, KV head 0: {448 * scale:.3g}" in page.text


def test_kl_by_position_is_drawn_where_there_are_positions(report: dict[str, Any]) -> None:
    assert "Mean KL by position" not in report_html(report)  # all in the first thousand tokens
    variants = [dict(variant) for variant in report["variants"]]
    (first,) = variants[1]["kl_by_position"]
    variants[1]["kl_by_position"] = [first, first | {"start": 1024, "end": 4096}]
    page = Page(report_html({**report, "variants": variants}))
    assert "Mean KL by position" in page.text and "1k-4k" in page.text


def test_write_html(report: dict[str, Any], tmp_path: Path) -> None:
    write_html({**report, "model": "lone \ud800 surrogate"}, tmp_path / "out.html")
    assert "lone ? surrogate" in (tmp_path / "out.html").read_text(encoding="utf-8")


def test_plots_of_odd_numbers() -> None:
    def form(x: float) -> str:
        return f"{x:g}"

    names: dict[str, Any] = {"x_name": "x", "y_name": "y", "form": form}
    assert heat_map([[None]], columns=["0"], **names) == ""
    for values in ([[0.0, 0.0]], [[float("nan"), 2.0]], [[float("inf"), 1.0]], [[0.0, 1e-30]]):
        for logarithmic in (False, True):
            svg = heat_map(values, columns=["0", "1"], logarithmic=logarithmic, **names)
            Page(svg)
            assert "nan%" not in svg and "inf%" not in svg
    assert line_plot([], x_labels=[], **names) == ""
    Page(line_plot([("a", [Mark(0, 0.0)])], x_labels=[(0, "0")], **names))


# --- the same numbers elsewhere


def test_plots_and_model_card_from_the_command(
    report: dict[str, Any], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(folder / "out")
    args = [out, "--dataset", str(folder / "texts.jsonl"), "--max-kl", "9", "--min-top1", "0.01"]
    args += ["--max-ppl-increase", "9", "--report", str(tmp_path / "r.html"), "--png", "--card"]
    with pytest.raises(SystemExit) as stop:
        main(["verify", *args, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert stop.value.code == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"r.html", "r-kl.png", "r-amax-k.png", "r-amax-v.png", "r-error-scale_1.png"}
    for path in tmp_path.glob("*.png"):
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    card = (folder / "out" / "README.md").read_text()
    assert "## Accuracy" in card
    for variant in found["variants"][1:]:
        row = next(line for line in card.splitlines() if line.startswith(f"| {variant['title']} |"))
        assert f"{variant['kl']['value']:.5f}" in row and f"{variant['kl']['low']:.5f}" in row
    record = json.loads((folder / "out" / "fp8calib.json").read_text())["accuracy"]
    assert record["text"]["tokens"] == found["dataset"]["tokens"] and record["ok"]


def test_extras_that_cannot_be_had_are_refused_first(
    tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: str) -> str:
        with pytest.raises(SystemExit) as stop:
            main(["verify", str(tiny()), *args])
        assert stop.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    assert "--png needs --report" in refused("--png")
    assert "no checkpoint that fp8calib calibrated" in refused("--card")
    monkeypatch.setattr("fp8calib.evaluation.report_png.find_spec", lambda name: None)
    assert "pip install 'fp8calib[report]'" in refused("--png", "--report", "x.html")


@pytest.mark.parametrize("record", [None, 3, {}, {"text": 1}, {"text": {}, "variants": "x"}])
def test_a_record_that_is_none_gives_no_section(record: Any) -> None:
    assert accuracy_section(record) == ""


def test_titles_do_not_break_the_table() -> None:
    variant = {"perplexity": 1.0, "ppl_increase": 0.0, "kl": 0.0, "top1": 1.0}
    record = {
        "text": {"name": "a\n## b", "split": None, "documents": 1, "tokens": 2},
        "variants": [{"title": "native", **variant}, {"title": "x|y\n# z", **variant}],
    }
    lines = accuracy_section(record).splitlines()
    assert not [line for line in lines if line.startswith("# ")]
    assert [line for line in lines if line.startswith("## ")] == ["## Accuracy"]
    assert lines[-1].startswith("| x\\|y # z |")
