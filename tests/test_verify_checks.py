"""verify's columns, noise floor, generation, needles, reports, and what an interrupt leaves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from commands import call_flat, powers, write_texts
from made_scales import calibrated, make_scales
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp8calib
from fp8calib import SamplingParams, console
from fp8calib.checkpoint import open_checkpoint, write_checkpoint
from fp8calib.cli.verify_output import failures
from fp8calib.data import load_data
from fp8calib.errors import CheckFailed, UserError
from fp8calib.evaluation import verify
from fp8calib.evaluation.bootstrap import Estimate
from fp8calib.evaluation.columns import parse_columns
from fp8calib.evaluation.engines import make_engine
from fp8calib.evaluation.gates import judge_all
from fp8calib.evaluation.generation import check_generation, repeat_rate
from fp8calib.evaluation.metrics import TokenMetrics, TokenTable
from fp8calib.evaluation.needle import DEPTHS, make_questions, needle_lengths
from fp8calib.evaluation.report_file import write_junit
from fp8calib.evaluation.summary import Summary
from fp8calib.evaluation.variants import Run, plan_variants
from fp8calib.recipe import Gates
from fp8calib.runtime.loader import load
from fp8calib.runtime.scoring import score

NO_GATES = Gates(**dict.fromkeys(Gates.model_fields))
LOOSE = ["--max-ppl-increase", "9", "--max-kl", "9", "--min-top1", "0.01"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_texts(tmp_path_factory.mktemp("data"), powers(8)))


# --- numbers


def made_table(kl: np.ndarray, documents: int) -> TokenTable:
    """A table whose tokens are dealt out to documents of equal length."""
    table = TokenTable()
    for number, part in enumerate(np.split(kl, documents)):
        x = torch.tensor(part)
        table.add(number, 0, TokenMetrics(x, x, 2 * x, torch.ones_like(x), torch.ones_like(x)))
    return table


def test_the_worst_tenth_is_the_mean_of_the_largest_and_its_interval_holds_the_truth() -> None:
    rng = np.random.default_rng(0)
    held, truth = 0, 1 + math.log(10)  # of an exponential distribution
    for _ in range(40):
        kl = rng.exponential(size=3200)
        tables = {"native": made_table(0 * kl, 32), "fp8": made_table(kl, 32)}
        found = Summary(tables, "native").divergence("fp8")["worst_decile_kl"]
        assert found.value == pytest.approx(np.sort(kl)[-320:].mean(), rel=2e-3)
        held += found.low <= truth <= found.high
    assert 33 <= held <= 40


def test_kl_by_position() -> None:
    kl = np.concatenate([np.full(1024, 0.1), np.full(3072, 0.2), np.full(904, 0.4)])
    tables = {"native": made_table(0 * kl, 1), "fp8": made_table(np.tile(kl, 2), 2)}
    tables["native"] = made_table(np.zeros(10_000), 2)
    found = Summary(tables, "native").divergence("fp8")["kl_by_position"]
    assert [(b.start, b.end, b.tokens) for b in found] == [
        (0, 1024, 2048),
        (1024, 4096, 6144),
        (4096, 16384, 1808),
    ]
    assert [b.kl.value for b in found] == pytest.approx([0.1, 0.2, 0.4])
    assert found[0].kl.low == pytest.approx(0.1)
    one_is_long = {"native": TokenTable(), "fp8": TokenTable()}
    for table in one_is_long.values():
        for number, length in enumerate((2000, 100, 100)):
            x = torch.rand(length, dtype=torch.float64)
            table.add(number, 0, TokenMetrics(x, x, x, x, x))
    late = Summary(one_is_long, "native").divergence("fp8")["kl_by_position"][1]
    assert late.tokens == 976 and late.kl.low is None  # one document shows no spread


def test_the_noise_floor_is_native_in_passes_of_another_size(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    model = str(tiny("llama", max_position_embeddings=1024))
    data = tmp_path / "texts.jsonl"
    rows = [f"{n} and {n * n}, " * (5 + 12 * n) for n in range(6)]  # up to 700 tokens
    data.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    options: dict[str, Any] = {"dataset": str(data), "max_seq_len": 700, "gates": NO_GATES}
    exact = verify(model, **options)
    assert exact.noise_floor is not None
    assert exact.noise_floor.kl.value < 1e-6 and exact.noise_floor.top1.value == 1
    assert exact.variants[1].within_noise is False
    rounded = verify(model, dtype="bfloat16", **options)
    assert rounded.noise_floor is not None and 1e-5 < rounded.noise_floor.kl.value < 0.01
    assert "passes of 81 tokens" in rounded.noise_floor.how
    same = verify(model, dtype="bfloat16", kv_cache_dtype="bfloat16", **options)
    assert same.variants[1].within_noise is True
    assert verify(model, noise_floor=False, **options).noise_floor is None


# --- columns


def test_columns_in_the_order_of_the_words(
    tiny: Callable[..., Path], texts: str, tmp_path: Path
) -> None:
    layers = open_checkpoint(tiny()).layers
    write_checkpoint(
        tiny(), tmp_path / "out", make_scales(layers, "tensor"), {"skip_layers": ["1"]},
        layers=layers,
    )  # fmt: skip
    calibrated(tiny(), tmp_path / "other", "attn_head")
    out, other = str(tmp_path / "out"), str(tmp_path / "other")
    words = ["fp8@1.0", "bf16", "fp8", "fp8_e5m2", "fp8@skip", "fp8@accurate", other]
    result = verify(out, dataset=texts, gates=NO_GATES, variants=words)
    assert [v.key for v in result.variants] == words
    assert result.reference == "bf16" and result.skip_layers == ["1"]
    assert [v.key for v in result.variants if v.gated] == ["fp8", "fp8@skip"]
    found = {v.key: v for v in result.variants}
    assert found["bf16"].kl == Estimate(0, 0, 0)
    assert len({v.kl.value for v in result.variants}) == len(words)
    assert found["fp8@skip"].fp8_layers == [0] and found["fp8"].fp8_layers == [0, 1]
    assert found["fp8"].attention == "fp8" and found["fp8@accurate"].attention == "accurate"
    assert found["fp8"].kv_bytes_per_token == 2 * 2 * 2 * 16  # layers, K and V, heads, values
    assert found["bf16"].kv_bytes_per_token == 2 * found["fp8"].kv_bytes_per_token
    assert found[other].title.startswith(other) and result.effect is not None
    alone = verify(other, dataset=texts, gates=NO_GATES, variants="bf16,fp8")
    assert alone.variant("fp8").kl == found[other].kl
    trusting = verify(out, dataset=texts, gates=NO_GATES, variants=words, assume_skip_flag=True)
    assert [v.key for v in trusting.variants if v.gated] == ["fp8@skip"]
    front = verify(out, dataset=texts, gates=NO_GATES, variants="fp8_e5m2")
    assert [v.key for v in front.variants] == ["native", "fp8_e5m2"] and front.variants[1].gated


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bf16,int8", "unknown column 'int8'"),
        ("fp8@2.0", "unknown @2.0"),
        ("bf16@skip", "takes no @skip"),
        ("fp8,fp8", "names fp8 twice"),
        ("fp8@skip", "records no skip layers"),
        ("bf16,/no/such", "no such folder"),
    ],
)
def test_columns_that_are_none(
    tiny: Callable[..., Path], texts: str, words: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        verify(str(tiny()), dataset=texts, variants=words)
    assert parse_columns(" bf16 , fp8 ")[0].cache == "bfloat16"


def test_an_engine_has_the_format_of_its_variant(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """And generates what that format's logits say."""
    layers = open_checkpoint(tiny()).layers
    write_checkpoint(
        tiny(), tmp_path / "out", make_scales(layers, "tensor"), {"skip_layers": ["1"]},
        layers=layers,
    )  # fmt: skip
    loaded = load(str(tmp_path / "out"))
    plan = plan_variants(loaded)
    assert len(plan.runs) == 5
    for run in [*plan.runs, *plan_variants(loaded, "fp8_e5m2").runs]:
        kv_format = run.variant.kv_format
        engine = make_engine(run, 2, 40)
        assert engine.kv.kv_format == kv_format
        greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        request = engine.add_request(greedy, prompt_token_ids=list(range(5, 25)))
        while engine.has_unfinished_requests:
            engine.step()
        (piece,) = score(loaded.model, loaded.layers, kv_format, [request.token_ids])
        assert piece.logits[19:-1].argmax(-1).tolist() == request.output_token_ids


# --- generation


def test_repeats_are_counted() -> None:
    assert repeat_rate([1, 2, 3]) == 0
    assert repeat_rate(list(range(50))) == 0
    assert repeat_rate([1, 2] * 50) == pytest.approx(1 - 2 / 97)
    assert repeat_rate([1, 2, 3, 4, 5, 1, 2, 3, 4]) == pytest.approx(1 / 6)


def runs_of(model: Path) -> list[Run]:
    return plan_variants(load(str(model))).runs


def test_c22_endless_repetition_that_native_does_not_show_fails_the_gate(
    tiny: Callable[..., Path],
) -> None:
    runs = runs_of(tiny())
    rng = np.random.default_rng(0)
    native = rng.integers(10, 250, (4, 400)).tolist()
    stuck = [[*row[:100], *[65, 66, 67] * 100] for row in native]
    check = check_generation(
        runs, [[5, 6, 7]] * 4, 400, {runs[0].variant.key: native, runs[1].variant.key: stuck}
    )
    assert check is not None
    same, other = check.variants
    assert same.identical == 4 and same.agreement.value == 1 and same.runaways == 0
    assert other.identical == 0 and other.runaways == 4
    assert other.first_difference.value == pytest.approx(100, abs=1)
    assert other.agreement.value == pytest.approx(0.25, abs=0.02)
    assert other.repeat_increase.value > 0.7 and other.compression_increase.value > 1
    assert min(o.repeat_rate for o in other.outputs) > 0.7
    judged = judge_all(Gates(), [gated_result(runs[1].variant.key)], check, None, [])
    failed = [gate.gate for gate in judged if not gate.passed]
    assert failed == ["max_repeat_increase"]
    # where native repeats itself as much, FP8 is not to blame
    both = check_generation(
        runs, [[5, 6, 7]] * 4, 400, {runs[0].variant.key: stuck, runs[1].variant.key: stuck}
    )
    assert both is not None and both.variants[1].runaways == 0
    judged = judge_all(Gates(), [gated_result(runs[1].variant.key)], both, None, [])
    assert all(gate.passed for gate in judged)


def gated_result(key: str) -> Any:
    """What judge_all reads of a variant without loss."""
    zero, one = Estimate(0, 0, 0), Estimate(1, 1, 1)
    return SimpleNamespace(key=key, gated=True, ppl_increase=zero, kl=zero, top1=one)


def test_generated_text_is_compared(tiny: Callable[..., Path], texts: str) -> None:
    model = str(tiny())
    result = verify(model, dataset=texts, gates=NO_GATES, generation=24, variants="native,fp32,fp8")
    check = result.generation
    assert check is not None and (check.tokens, check.prompts) == (24, 8)
    _, again, fp8 = check.variants
    assert [v.key for v in check.variants] == ["native", "fp32", "fp8"]
    assert again.identical == 8 and again.first_difference == Estimate(24, 24, 24)
    assert fp8.identical < 8 and fp8.agreement.value < 1
    first = next(o for o in fp8.outputs if o.first_difference is not None)
    assert 0 <= first.first_difference < 24 and first.prompt.startswith(tuple("01234567"))
    with pytest.raises(UserError, match="this model can do 256"):
        verify(model, dataset=texts, generation=256)


# --- needles


def test_a_question_is_text_with_its_needles_and_ends_with_what_is_asked(
    tiny: Callable[..., Path],
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny())
    haystack = tokenizer("some words of a long text, " * 9)["input_ids"]
    questions = make_questions(
        lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        haystack, [640, 1024], trials=2, seed=3,
    )  # fmt: skip
    assert len(questions) == 2 * 2 * (len(DEPTHS) + 1)
    for question in questions:
        assert len(question.tokens) == question.length
        text, places = tokenizer.decode(question.tokens), list[int]()
        for start, end in question.answers:
            answer = tokenizer.decode(question.tokens[start:end])
            asked = tokenizer.decode(question.tokens[:start]).rpartition("The ")[2]
            assert answer[0] == " " and 10_000 <= int(answer) < 100_000
            told = text.index(f"The {asked}{answer}.")  # the needle itself, before the question
            assert told < start
            places.append(told)
        count = len(places)
        told_length = count * len(f"\n\nThe {asked}{answer}.\n\n")
        room = question.length - 2 * told_length
        assert places == sorted(places)  # in the order of their depths
        for number, (told, depth) in enumerate(zip(places, question.depths, strict=True)):
            before = told - told_length * number / count
            assert before / room == pytest.approx(depth, abs=0.1)
    assert questions == make_questions(
        lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        haystack, [1024, 640], trials=2, seed=3,
    )  # fmt: skip


def test_needle_lengths() -> None:
    assert needle_lengths(None, 4096) == [512, 2048, 4096]
    assert needle_lengths(None, 10**7)[-1] == 524288
    assert needle_lengths([600, 512, 600], 1024) == [512, 600]
    with pytest.raises(UserError, match="2048: this model takes 256 to 1024"):
        needle_lengths([2048], 1024)


def test_answers_are_scored_as_a_plain_forward_pass_does(
    tiny: Callable[..., Path], texts: str
) -> None:
    model = tiny("qwen3", max_position_embeddings=1024)
    options: dict[str, Any] = {"dataset": texts, "needle": True, "needle_lengths": [640]}
    result = verify(str(model), gates=NO_GATES, **options)
    test = result.needle
    assert test is not None and test.lengths == [640] and len(test.variants[0].grid) == 5
    assert not any("repeats" in warning for warning in result.warnings)
    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = AutoModelForCausalLM.from_pretrained(model)
    data = load_data(tokenizer, texts, samples=32, max_seq_len=512)
    questions = make_questions(
        lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        [token for row in data.rows for token in row], [640], trials=1, seed=42,
    )  # fmt: skip
    for cell, question in zip(test.variants[0].grid, questions, strict=False):
        with torch.no_grad():
            logits = plain(torch.tensor([question.tokens])).logits[0].log_softmax(-1)
        ((start, end),) = question.answers
        logprob = sum(float(logits[at - 1, question.tokens[at]]) for at in range(start, end))
        assert cell.logprob == pytest.approx(logprob, abs=1e-3)
        assert cell.depth == question.depths[0]
    assert test.variants[1].logprob_change.value != 0
    # a model that finds nothing proves nothing
    assert test.variants[1].kept is None
    longer = verify(str(model), **options | {"needle_lengths": [640, 1000]})
    said = [warning for warning in longer.warnings if "repeats in questions of 1000" in warning]
    assert len(said) == 1 and said[0] in longer.to_dict()["warnings"]
    judged = {g.gate: g for g in longer.gates}
    assert not judged["min_needle"].passed and not judged["min_needle"].conclusive


# --- NaN, interrupts, files


def flushed(tiny: Callable[..., Path]) -> Path:
    """Values that e4m3 flushes to zero, and a norm over the attention's output that cannot bear
    zeros: finite natively, NaN at scale 1.0."""

    def edit(model: Any) -> None:
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.mul_(1e-6)

    return tiny("gemma2", rms_norm_eps=0.0, edit=edit)


def test_nan_under_fp8_alone_is_a_failed_check(
    tiny: Callable[..., Path], texts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(flushed(tiny))
    with pytest.raises(CheckFailed, match=r"fp8 at scale 1.0: .* document 0 .* layer 1 .*, in q"):
        verify(model, dataset=texts)
    junit = tmp_path / "gates.xml"
    code, _, err = call_flat(capsys, "verify", model, "--dataset", texts, "--junit", str(junit))
    assert code == 1 and "hold NaN or infinity" in err
    (failure,) = ElementTree.parse(junit).getroot().iter("failure")
    assert "NaN" in failure.get("message", "")


def interrupt_after(monkeypatch: pytest.MonkeyPatch, steps: int, what: str) -> None:
    """Ctrl-C at the given step of the progress bar whose description begins with `what`."""
    progress, advance = console.progress, console.Bar.advance
    counts = {"steps": 0, "on": False}

    def watched(description: str, total: float | None) -> Any:
        counts["on"] = description.startswith(what)
        return progress(description, total)

    def counted(self: console.Bar, amount: float = 1, note: str = "") -> None:
        advance(self, amount, note)
        counts["steps"] += counts["on"]
        if counts["on"] and counts["steps"] == steps:
            raise KeyboardInterrupt

    monkeypatch.setattr(console, "progress", watched)
    monkeypatch.setattr(console.Bar, "advance", counted)


def test_an_interrupt_leaves_a_partial_report(
    tiny: Callable[..., Path],
    texts: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = ["--report", str(tmp_path / "r.json"), "--junit", str(tmp_path / "j.xml")]
    with monkeypatch.context() as patch:
        interrupt_after(patch, 5, "verifying")
        code, _, err = call_flat(capsys, "verify", str(tiny()), "--dataset", texts, *files, *LOOSE)
    assert code == 130 and "all numbers below are partial" in err and "mean KL" in err
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["partial"] and not report["ok"]
    assert 0 < report["variants"][0]["kl_by_position"][0]["tokens"] < report["dataset"]["tokens"]
    failed = [case.get("name") for case in ElementTree.parse(tmp_path / "j.xml").iter("testcase")
              if case.find("failure") is not None]  # fmt: skip
    assert failed == ["complete"]
    with monkeypatch.context() as patch:
        interrupt_after(patch, 1, "tokenising")
        code, _, err = call_flat(capsys, "verify", str(tiny()), "--dataset", texts)
    assert code == 130 and "partial" not in err and "perplexity" not in err
    with monkeypatch.context() as patch:  # of the checks, what was finished stays
        interrupt_after(patch, 22, "generating")
        result = verify(str(tiny()), dataset=texts, generation=8, gates=NO_GATES,
                        variants="native,fp8,fp8_e5m2")  # fmt: skip
    assert result.partial and result.variant("fp8").kl.value > 0
    assert result.generation is not None and len(result.generation.variants) == 2


def test_junit_is_a_test_case_for_each_gate(
    tiny: Callable[..., Path], texts: str, tmp_path: Path
) -> None:
    result = verify(str(tiny()), dataset=texts, gates=Gates(max_kl=1e-9, min_top1=0.01))
    write_junit(replace(result, model="odd\x00 <name> &\ud800"), tmp_path / "gates.xml")
    root = ElementTree.parse(tmp_path / "gates.xml").getroot()
    (suite,) = root
    assert root.tag == "testsuites" and suite.get("tests") == "4"
    cases = {case.get("name"): case for case in suite}
    assert set(cases) == {"max_ppl_increase", "max_kl", "min_top1", "complete"}
    failed = {name for name, case in cases.items() if case.find("failure") is not None}
    assert {"max_kl"} <= failed <= {"max_kl", "max_ppl_increase"}
    assert suite.get("failures") == str(len(failed))
    said = cases["max_kl"].find("failure").get("message")  # type: ignore
    assert said.startswith("mean KL ") and "at most 1e-09" in said
    assert "no layer stands out, largest errors in layers " in failures(result)
    assert "<name> &" in suite.get("name", "") and suite.get("timestamp", "")[:2] == "20"


def test_report_files(
    tiny: Callable[..., Path], texts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "r.json"
    args = [str(tiny()), "--dataset", texts, *LOOSE, "--report", str(place)]
    code, out, _ = call_flat(capsys, "verify", *args, "--json")
    report = json.loads(place.read_text())
    assert code == 0 and report == json.loads(out)
    assert report["schema"] == 1 and report["command"].startswith("fp8calib verify ")
    assert sorted(tmp_path.iterdir()) == [place]
    code, _, err = call_flat(capsys, "verify", *args)
    assert code == 2 and "exists" in err and "--overwrite" in err
    assert call_flat(capsys, "verify", *args, "--overwrite")[0] == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--report", "r.txt"], "must end in .html or .json"),
        (["--report", "/no/such/r.json"], "not a folder you can write to"),
        (["--junit", "gates.json"], "must end in .xml"),
        (["--min-needle", "0.9"], "--min-needle needs --needle"),
        (["--task-limit", "3"], "--task-limit needs --tasks"),
        (["--max-repeat-increase", "0.1"], "needs --generation"),
        (["--needle", "--needle-lengths", "1k"], "give numbers of tokens"),
        (["--needle", "--needle-lengths", "9999"], "needle length 9999"),
        (["--generation", "0"], "Invalid value for '--generation'"),
        (["--engine", "sglang"], "unknown --engine 'sglang'"),
        (["--python", "python3"], "--python is for --engine vllm"),
        (["--engine", "vllm", "--generation", "9"], "--generation is for --engine fp8calib"),
        (["--engine", "vllm", "--device", "cpu"], "--device is for --engine fp8calib"),
        (["--variants", "fp8", "--kv-cache-dtype", "fp8"], "exclude each other"),
    ],
)
def test_mistakes_get_one_line(
    tiny: Callable[..., Path],
    texts: str,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    message: str,
) -> None:
    code, out, err = call_flat(capsys, "verify", str(tiny()), "--dataset", texts, *args)
    assert code == 2 and out == "" and "Traceback" not in err
    assert message in err.rpartition("error:")[2]


@pytest.mark.slow
def test_c22_two_thousand_tokens_show_no_runaway_with_right_scales(
    smollm2: Path, tmp_path: Path
) -> None:
    """SmolLM2 repeats itself in bfloat16 too; under FP8 it must not do so more."""
    data: dict[str, Any] = {"dataset": "builtin:pydoc", "samples": 16, "max_seq_len": 256}
    fp8calib.calibrate(smollm2, tmp_path / "out", **data)
    result = verify(
        str(tmp_path / "out"), dataset="builtin:pydoc", split="heldout", samples=3, max_seq_len=64,
        variants="bf16,fp8", noise_floor=False, generation=2000,
    )  # fmt: skip
    check = result.generation
    assert check is not None and check.tokens == 2000
    native, fp8 = check.variants
    assert all(len(output.text) > 1000 for output in fp8.outputs)
    (gate,) = [gate for gate in result.gates if gate.gate == "max_repeat_increase"]
    assert gate.passed, (native.repeat_rate, fp8.repeat_rate)
    assert fp8.compression_increase.low <= 0  # type: ignore[operator]
