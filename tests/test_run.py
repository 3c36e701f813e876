"""`fp8calib run` and the Python API behind it."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import call
from made_scales import calibrated, rewritten

from fp8calib import LLM, SamplingParams
from fp8calib.cli import main
from fp8calib.errors import UserError
from fp8calib.evaluation.comparison import compare
from fp8calib.runtime.config import EngineConfig
from fp8calib.runtime.loader import load

Tiny = Callable[..., Path]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
FIXED = ("--max-tokens", "12", "--ignore-eos")


def run_json(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    code, out, err = call(capsys, "run", *args, *FIXED, "--json")
    assert code == 0, err
    return json.loads(out)


def tokens_of(capsys: pytest.CaptureFixture[str], *args: object) -> list[list[int]]:
    report = run_json(capsys, *args, "-p", "The quick brown fox", "-p", "1 2 3 " * 8)
    return [output["token_ids"] for output in report["outputs"]]


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> LLM:
    return LLM(str(tiny()))


@pytest.fixture(scope="module")
def checkpoint(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "calibrated"
    calibrated(tiny(dtype="bfloat16"), folder, "attn_head")
    return folder


# --- the command line ----------------------------------------------------------------------------


def test_answers_on_stdout_and_the_rest_on_stderr(
    tiny: Tiny, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, "run", tiny(), "-p", "hello there", *FIXED)
    assert code == 0
    assert out == llm.generate("hello there", GREEDY)[0].outputs[0].text + "\n"
    assert "KV cache: float32" in err
    assert "11 prompt tokens, 12 generated in" in err
    assert re.search(r"tokens/s; KV cache \d+\.\d kB \(bf16: \d+\.\d kB\)", err)


class Pieces(io.StringIO):
    """Remembers what was written at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


def test_text_is_printed_as_it_comes(tiny: Tiny, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = Pieces()
    monkeypatch.setattr(sys, "stdout", stdout)
    with pytest.raises(SystemExit):
        main(["run", str(tiny()), "-p", "hello there", *FIXED])
    text = llm.generate("hello there", GREEDY)[0].outputs[0].text
    assert "".join(stdout.pieces) == text + "\n"
    assert max(len(piece) for piece in stdout.pieces) < len(text) / 2


def test_several_prompts_are_answered_in_order_under_headings(
    tiny: Tiny, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["a longer first prompt, " * 4, "b"]
    args = [word for prompt in prompts for word in ("-p", prompt)]
    code, out, _ = call(capsys, "run", tiny(), *args, *FIXED)
    texts = [output.outputs[0].text for output in llm.generate(prompts, GREEDY)]
    title = "a longer first prompt, a longer first prompt, a longer fi..."
    assert code == 0 and len(title) == 60
    assert out == f"==> {title} <==\n{texts[0]}\n\n==> b <==\n{texts[1]}\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("prompts.txt", "first\n\n  \nsecond one\n"),
        ("prompts.jsonl", '"first"\n{"prompt": "second one", "id": 7}\n\n'),
    ],
)
def test_prompts_from_a_file(
    name: str, content: str, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(content)
    report = run_json(capsys, tiny(), "-p", "given", "--prompts", tmp_path / name)
    assert [o["prompt"] for o in report["outputs"]] == ["given", "first", "second one"]


def test_prompt_from_stdin(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert run_json(capsys, tiny())["outputs"][0]["prompt"] == "two\nlines"


def test_chat_uses_the_template(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    plain = run_json(capsys, tiny(), "-p", "<user>hi</s>\n<assistant>")
    chat = run_json(capsys, tiny(), "-p", "hi", "--chat")
    assert chat["outputs"][0]["prompt"] == "hi"
    assert chat["outputs"][0]["token_ids"] == plain["outputs"][0]["token_ids"]


def test_c17_chat_has_exactly_one_bos(tiny: Tiny, tmp_path: Path) -> None:
    """The tokenizer adds BOS by itself, and so does the template."""
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    llm = LLM(str(tiny(tokenizer={"add_bos": True, "chat_template": template})))
    (output,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert output.prompt_token_ids.count(1) == 1
    assert llm.generate("hi", GREEDY)[0].prompt_token_ids == output.prompt_token_ids


def test_json_report(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(capsys, checkpoint, "-p", "hello!", "--temperature", "0.9")
    assert report["kv_cache"] == "fp8_e4m3 with attn_head scales"
    assert report["attention"] == "accurate" and report["skip_layers"] == []
    (output,) = report["outputs"]
    assert output["prompt_tokens"] == 6 and len(output["token_ids"]) == 12
    assert output["finish_reason"] == "length" and output["stop_reason"] is None
    stats = report["stats"]
    # 17 tokens (the last one is not stored) are two pages of 16, in two layers of two KV heads of
    # 16 elements, K and V.
    assert stats["kv_bytes"] == 2 * 16 * 2 * 2 * (16 + 16)
    assert stats["bf16_kv_bytes"] == 2 * stats["kv_bytes"]
    assert stats["generated_tokens"] == 12 and stats["tokens_per_second"] > 0
    # The seed was drawn, and it is told: with it the answer can be had again.
    seed = report["sampling_params"]["seed"]
    again = run_json(capsys, checkpoint, "-p", "hello!", "--temperature", "0.9", "--seed", seed)
    assert again["outputs"] == report["outputs"]


def test_stop_and_length(tiny: Tiny, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    text = llm.generate("hello", GREEDY)[0].outputs[0].text
    report = run_json(capsys, tiny(), "-p", "hello", "--stop", "no such", "--stop", text[3:5])
    (output,) = report["outputs"]
    assert output["text"] == text[: text.find(text[3:5])]
    assert (output["finish_reason"], output["stop_reason"]) == ("stop", text[3:5])


def test_several_answers_and_log_probabilities(
    tiny: Tiny, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["-p", "one", "-p", "two", "-n", "2", "--temperature", "1", "--seed", "4"]
    params = SamplingParams(n=2, max_tokens=12, ignore_eos=True, seed=4, logprobs=1)
    expected = [o for output in llm.generate(["one", "two"], params) for o in output.outputs]
    report = run_json(capsys, tiny(), *args, "--logprobs", "1")
    assert [o["text"] for o in report["outputs"]] == [o.text for o in expected]
    assert [(o["prompt"], o["index"]) for o in report["outputs"]] == [
        *(("one", 0), ("one", 1), ("two", 0), ("two", 1))
    ]
    entry = report["outputs"][0]["logprobs"][0][str(expected[0].token_ids[0])]
    assert expected[0].logprobs is not None
    assert entry["logprob"] == pytest.approx(
        expected[0].logprobs[0][expected[0].token_ids[0]].logprob, abs=1e-5
    )
    code, out, _ = call(capsys, "run", tiny(), *args, *FIXED)
    assert code == 0 and out.startswith(f"==> one (1 of 2) <==\n{expected[0].text}\n\n==> one (2")


def test_every_sampling_option_arrives(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    given = {
        "--top-p": ("top_p", 0.9),
        "--top-k": ("top_k", 7),
        "--min-p": ("min_p", 0.05),
        "--repetition-penalty": ("repetition_penalty", 1.1),
        "--presence-penalty": ("presence_penalty", 0.5),
        "--frequency-penalty": ("frequency_penalty", -0.5),
        "--min-tokens": ("min_tokens", 3),
        "--temperature": ("temperature", 0.7),
        "--seed": ("seed", 9),
    }
    words = [str(word) for option, (_, value) in given.items() for word in (option, value)]
    report = run_json(capsys, tiny(), "-p", "a", *words, "--stop-token-id", "5")
    wanted = dict(given.values()) | {"stop_token_ids": [5], "ignore_eos": True, "max_tokens": 12}
    assert {name: report["sampling_params"][name] for name in wanted} == wanted


def test_memory_options(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    """Two float32 layers of two KV heads of 16: a page of 16 tokens has 8,192 bytes."""
    size = ["--kv-cache-memory", "32KiB", "--max-model-len", "64", "--max-num-seqs", "2"]
    report = run_json(capsys, tiny(), "-p", "a", "-p", "b", "-p", "c", *size)
    assert report["stats"]["pages_total"] == 4
    assert report["stats"]["kv_bytes"] <= 4 * 8_192
    assert "4 pages of 16 tokens" in report["memory"] and "64 tokens fit" in report["memory"]
    more = ["--max-num-batched-tokens", "32", "--enforce-eager"]
    code, out, err = call(capsys, "run", tiny(), "-p", "x" * 50, *size, *more, *FIXED)
    assert code == 0 and "4 pages of 16 tokens" in err, err
    assert out == call(capsys, "run", tiny(), "-p", "x" * 50, *FIXED)[1]
    code, _, err = call(capsys, "run", tiny(), "-p", "a", "--kv-cache-memory", "1kB")
    assert code == 2 and "KV cache hold 0 tokens" in err


@pytest.mark.parametrize(
    ("kv_cache", "words"),
    [
        ([], "QK and PV in float32"),
        (["--kv-cache-dtype", "fp8"], "QK and PV on FP8 pages, queries and probabilities in float"),
        (
            ["--kv-cache-dtype", "fp8", "--attention", "fp8", "--skip-layers", "0"],
            "queries quantized by scale 1.0; PV in e4m3, probabilities too; in native layers, ",
        ),
    ],
)
def test_the_arithmetic_is_printed(
    kv_cache: list[str], words: str, tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, "run", tiny(), "-p", "a", *FIXED, *kv_cache)
    assert code == 0 and words in err
    assert words in run_json(capsys, tiny(), "-p", "a", *kv_cache)["arithmetic"]


# --- native and FP8 side by side -----------------------------------------------------------------


def compared(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    return run_json(capsys, *args, "--compare", "-p", "The quick brown fox", "-p", "1 2 3 " * 8)


def test_compare_is_both_runs_and_their_gap(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    native = tokens_of(capsys, checkpoint, "--kv-cache-dtype", "bfloat16")
    fp8 = tokens_of(capsys, checkpoint)
    report = compared(capsys, checkpoint)
    assert [pair["native"]["token_ids"] for pair in report["pairs"]] == native
    assert [pair["fp8"]["token_ids"] for pair in report["pairs"]] == fp8
    assert native != fp8
    for pair, one, other in zip(report["pairs"], native, fp8, strict=True):
        same = [a == b for a, b in zip(one, other, strict=True)]
        assert pair["first_difference"] == (None if all(same) else same.index(False))
        assert len(pair["logprob_gaps"]) == 12 and any(pair["logprob_gaps"])
    plain, quantized = report["native"], report["fp8"]
    assert plain["kv_cache"] == "bfloat16" and "attn_head" in quantized["kv_cache"]
    assert quantized["kv_bytes_per_token"] == 2 * 2 * (16 + 16)
    assert plain["kv_bytes_per_token"] == 2 * quantized["kv_bytes_per_token"]
    assert plain["kv_bytes"] == 2 * quantized["kv_bytes"]


def test_the_gap_is_of_the_same_tokens(checkpoint: Path, tiny: Tiny) -> None:
    """Against two engines that are given prompt and native answer as a prompt."""
    loaded = load(str(checkpoint))
    ids = loaded.tokenizer("The quick brown fox")["input_ids"]
    (pair,) = compare(loaded, EngineConfig(), [("a", ids)], GREEDY).pairs
    answer = pair.native.token_ids
    scoring = SamplingParams(max_tokens=1, prompt_logprobs=0)
    prompt = {"prompt_token_ids": [*ids, *answer]}
    values = []
    for word in ("fp8", "bfloat16"):
        output = LLM(str(checkpoint), kv_cache_dtype=word).generate(prompt, scoring)[0]
        assert output.prompt_logprobs is not None
        places = zip(answer, output.prompt_logprobs[len(ids) :], strict=True)
        values.append([place[token].logprob for token, place in places if place])
    gaps = [a - b for a, b in zip(*values, strict=True)]
    assert pair.logprob_gaps == pytest.approx(gaps, abs=0.02)
    assert max(map(abs, gaps)) > 0.1, "there is no gap: this proves nothing"


def test_compare_shows_the_first_differing_token(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    report = compared(capsys, checkpoint)
    prompts = ("-p", "The quick brown fox", "-p", "1 2 3 " * 8)
    code, out, err = call(capsys, "run", checkpoint, "--compare", *prompts, *FIXED)
    assert code == 0
    assert "native" in out and "fp8" in out and "The quick brown fox" in out
    (first, *_) = [p for p in report["pairs"] if p["first_difference"] is not None]
    assert f"token {first['first_difference'] + 1} is the first to differ" in out
    assert "log-probability gap" in out
    assert "bytes/token" in err and "nats apart in the mean" in err
    assert re.search(r"\d\.\d kB", err), "what each cache held"


def test_compare_of_an_fp8_cache_that_changes_nothing(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    args = (tiny(), "--kv-cache-dtype", "fp8", "--skip-layers", "0")
    code, out, _ = call(capsys, "run", *args, "--compare", "-p", "a", "--max-tokens", "1")
    assert code == 0 and "all 1 tokens are the same" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "there is nothing to compare: both caches would be native"),
        (["--kv-cache-dtype", "fp8", "-n", "2"], "one answer to each prompt"),
        (["--kv-cache-dtype", "fp8", "--max-model-len", "4"], "a prompt has"),
        (["--kv-cache-dtype", "fp8", "--logprobs", "1"], "--logprobs is shown by --json alone"),
    ],
)
def test_compare_refuses(
    args: list[str], message: str, tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, "run", tiny(), "--compare", "-p", "abcdef", *args)
    assert (code, out) == (2, "") and message in err


# --- formats through the command line ------------------------------------------------------------


def test_bfloat16_cache_of_a_calibrated_checkpoint_gives_the_original_tokens(
    checkpoint: Path, tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    original = tokens_of(capsys, tiny(dtype="bfloat16"))
    assert tokens_of(capsys, checkpoint, "--kv-cache-dtype", "bfloat16") == original
    assert tokens_of(capsys, checkpoint) != original, "FP8 changes nothing: this proves nothing"


def test_recorded_skip_layers_are_applied_and_printed_with_vllms_flag(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrated(tiny(), tmp_path / "recorded", skip_layers=["0"])
    calibrated(tiny(), tmp_path / "plain")
    code, _, err = call(capsys, "run", tmp_path / "recorded", "-p", "a", *FIXED)
    assert code == 0
    assert "fp8_e4m3 with tensor scales (1 of 2 layers; the others float32)" in err
    assert "vLLM needs for the same: --kv-cache-dtype-skip-layers 0" in err
    recorded = tokens_of(capsys, tmp_path / "recorded")
    assert recorded == tokens_of(capsys, tmp_path / "plain", "--kv-cache-dtype-skip-layers", "0")
    assert recorded != tokens_of(capsys, tmp_path / "plain")
    report = run_json(capsys, tmp_path / "plain", "-p", "a", "--skip-layers", "-1 0")
    assert report["skip_layers"] == ["0", "1"]
    assert report["kv_cache"] == "float32"


OLD_FORMS = ["{module}.{kind}_proj.{kind}_scale", "{module}.{kind}_proj.output_scale"]


@pytest.mark.parametrize("form", OLD_FORMS)
def test_c08_older_scale_names_run_the_same(
    form: str, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrated(tiny(), tmp_path / "new", query=False)
    calibrated(tiny(), tmp_path / "old", query=False)

    def rename(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
        module, _, leaf = name.rpartition(".")
        return {form.format(module=module, kind=leaf[0]): values}

    rewritten(tmp_path / "old", rename)
    tokens = tokens_of(capsys, tmp_path / "new")
    assert tokens_of(capsys, tmp_path / "old") == tokens
    assert tokens_of(capsys, tiny(), "--kv-cache-dtype", "fp8") != tokens


def test_c08_kv_scale_is_both_k_and_v(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def same(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
        module = name.rpartition(".")[0]
        both = {f"{module}.k_scale": values, f"{module}.v_scale": values}
        return both if name.endswith("k_scale") else {}

    def old(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
        return {name.replace("k_scale", "kv_scale"): values} if name.endswith("k_scale") else {}

    for place, change in (("new", same), ("old", old)):
        calibrated(tiny(), tmp_path / place, query=False)
        rewritten(tmp_path / place, change)
    assert tokens_of(capsys, tmp_path / "old") == tokens_of(capsys, tmp_path / "new")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bits": 4}, "num_bits 4"),
        ({"type": "int"}, "type int"),
        ({"strategy": "channel"}, "strategy channel"),
        ({"strategy": "token"}, "strategy token"),
        ({"strategy": "block"}, "strategy block"),
        ({"strategy": "no_such"}, "strategy no_such"),
        ({"symmetric": False}, "symmetric false"),
        ({"dynamic": True}, "dynamic true"),
    ],
)
def test_c15_run_refuses_schemes_as_inspect_does(
    change: dict[str, Any],
    message: str,
    tiny: Tiny,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calibrated(tiny(), tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["kv_cache_scheme"] |= change
    file.write_text(json.dumps(config))
    code, out, err = call(capsys, "run", tmp_path / "out", "-p", "a")
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    assert call(capsys, "inspect", tmp_path / "out") == (2, "", err)


REFUSED: list[tuple[Sequence[str], str]] = [
    (["-p", "a", "--kv-cache-dtype", "nvfp4"], "KV-cache dtype nvfp4 exists only in vLLM"),
    (["-p", "a", "--attention", "fp8"], "--attention fp8 needs an FP8 cache"),
    (["-p", "a", "--attention", "exact"], "unknown attention 'exact'"),
    (["-p", "a", "--missing-scales", "zero"], "unknown --missing-scales 'zero'"),
    (["-p", "a", "--kv-cache-dtype", "fp8", "--skip-layers", "9"], "no attention layer 9"),
    (["-p", "a", "--temperature", "-1"], "temperature must be from 0 to 1000"),
    (["-p", "a", "--max-model-len", "1000"], "this model can do 256 tokens at most"),
    (["-p", "a", "--device", "tpu"], "unknown device 'tpu'"),
    (["-p", "a" * 300], "a prompt has 300 tokens; with an answer, 256 fit"),
    (["-p", "a", "-p", "a" * 300, "-p", "b"], "prompt 2 of 3: a prompt has 300 tokens"),
    (["-p", "a", "--logprobs", "1"], "--logprobs is shown by --json alone"),
    (["-p", "a", "--skip-layers", "7"], "there is no attention layer 7"),
    (["-p", "a", "--kv-cache-memory", "9" * 400], "give a size such as 8GiB"),
    (["-p", ""], "a prompt is empty"),
    (["--prompts", "/nowhere/prompts.txt"], "/nowhere/prompts.txt: No such file"),
]


@pytest.mark.parametrize(("args", "message"), REFUSED)
def test_mistakes_are_one_line_and_exit_2(
    args: Sequence[str], message: str, tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, "run", tiny(), *args)
    assert (code, out) == (2, "")
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and message in errors[0]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", "\n \n", "holds no prompt"),
        ("bad.jsonl", '"one"\n{"prompt"\n', "bad.jsonl, line 2 is not JSON"),
        ("list.json", '["one", "two"]', "list.json: prompts are read from text, one a line, or"),
        ("other.jsonl", '{"text": "a"}\n', "line 1 is neither a string nor an object"),
    ],
)
def test_prompt_files_that_hold_none(
    name: str,
    content: str,
    message: str,
    tmp_path: Path,
    tiny: Tiny,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_text(content)
    code, _, err = call(capsys, "run", tiny(), "--prompts", tmp_path / name)
    assert code == 2 and message in err


def test_no_prompt_at_a_terminal_is_a_mistake(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    code, _, err = call(capsys, "run", tiny())
    assert code == 2 and "no prompt: use -p TEXT" in err


def test_chat_without_a_template_is_a_mistake(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny(tokenizer={"chat_template": None})
    code, _, err = call(capsys, "run", folder, "--chat", "-p", "hi")
    assert code == 2 and "has no chat template" in err


def test_missing_scales_are_refused_or_one(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrated(tiny(), tmp_path / "out")
    rewritten(
        tmp_path / "out", lambda name, v: {} if name.endswith("1.self_attn.k_scale") else {name: v}
    )
    code, _, err = call(capsys, "run", tmp_path / "out", "-p", "a")
    assert code == 2 and "lacks layer 1 (model.layers.1.self_attn): k_scale" in err
    code, _, err = call(
        capsys, "run", tmp_path / "out", "-p", "a", *FIXED, "--missing-scales", "one"
    )
    assert code == 0 and "1 scales are missing and run at 1.0" in err


# --- from Python ---------------------------------------------------------------------------------


def test_llm_reads_like_vllms(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM(str(tiny()), kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=["0"])
    assert "no scales in this checkpoint" in capsys.readouterr().err
    prompts = ["Hello, my name is", "The future of AI is"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8))
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        assert output.finished and 0 < len(output.outputs[0].token_ids) <= 8
        assert isinstance(output.outputs[0].text, str)
    assert llm.engine.kv.kv_format.fp8_layers == {1}


def test_prompts_as_ids_and_parameters_for_each(llm: LLM) -> None:
    ids = llm.get_tokenizer()("hello")["input_ids"]
    one, other = llm.generate(
        [{"prompt_token_ids": ids}, "hello"],
        [GREEDY, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)],
    )
    assert one.prompt is None and one.prompt_token_ids == other.prompt_token_ids == ids
    assert one.outputs[0].token_ids[:3] == other.outputs[0].token_ids
    assert len(one.outputs[0].token_ids) == 12
    assert other.outputs[0].finish_reason == "length"


def test_stream_yields_growing_outputs_and_can_be_left(llm: LLM) -> None:
    whole = llm.generate("hello", GREEDY)[0].outputs[0]
    grown = [output.outputs[0] for output in llm.stream("hello", GREEDY)]
    assert [len(output.token_ids) for output in grown] == list(range(1, 13))
    assert all(whole.text.startswith(output.text) for output in grown)
    assert grown[-1] == whole
    stream = llm.stream(["hello", "other"], GREEDY)
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished_requests
    assert llm.engine.block_manager.pools[0].num_used == 0


def test_a_stream_tells_its_end_whoever_made_the_steps(llm: LLM) -> None:
    stream = llm.stream("hello", GREEDY)
    next(stream)
    llm.generate("other", GREEDY)
    (last,) = stream
    assert last.finished and last.outputs == llm.generate("hello", GREEDY)[0].outputs


def test_a_wrong_prompt_leaves_nothing_behind(llm: LLM) -> None:
    for prompts in (["fine", ""], ["fine", {"text": "x"}], ["fine", [5, 6]]):
        with pytest.raises(UserError):
            llm.generate(prompts, GREEDY)
        assert not llm.engine.has_unfinished_requests
    with pytest.raises(UserError, match="2 prompts, but 1 sampling params"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(TypeError):
        LLM("demo:smollm2-135m-instruct", no_such_option=1)


def test_several_conversations(llm: LLM) -> None:
    chats = [[{"role": "user", "content": word}] for word in ("one", "two")]
    together = llm.chat(chats, GREEDY)
    assert [output.outputs[0] for output in together] == [
        llm.chat(chat, GREEDY)[0].outputs[0] for chat in chats
    ]
    assert together[0].prompt == "<user>one</s>\n<assistant>"
