"""`fp8calib verify`: what an FP8 KV cache costs in accuracy, and whether that is within limits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp8calib.cli import app, options

if TYPE_CHECKING:
    from fp8calib.evaluation import Verification
    from fp8calib.recipe import Gates

# Options of checks and their gates, by the option that asks for the check.
_NEED = {
    "needle": ("needle_lengths", "needle_trials", "min_needle"),
    "tasks": ("task_folder", "task_limit", "max_task_drop"),
    "generation": ("max_repeat_increase",),
}


@app.command(
    epilog="Exit code 1 when a gate fails; after Ctrl-C what was measured is shown as partial, and "
    "the code is 130. Cost: one pass over the text for each column and one for the rounding; "
    "SmolLM2-135M on two CPU cores takes about two minutes by default. Examples: "
    "fp8calib verify SmolLM2-135M-Instruct-kvattn-fp8-tensor; "
    "fp8calib verify Qwen/Qwen2.5-7B-Instruct --dataset mine.jsonl --max-kl 0.02 --junit kv.xml; "
    "fp8calib verify ./out --variants bf16,fp8@1.0,fp8,fp8_e5m2 --report out.html; "
    "fp8calib verify ./out --generation 2000 --needle --needle-lengths 2048,8192; "
    "fp8calib verify ./w4a16-and-kv --against ./original --recipe w4a16_and_kv",
)
def verify(
    model: options.Model,
    dataset: options.Dataset = None,
    split: options.Split = None,
    text_column: options.TextColumn = None,
    messages_column: options.MessagesColumn = None,
    samples: options.Samples = None,
    max_seq_len: options.MaxSeqLen = None,
    seed: options.Seed = None,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE",
            help="What to judge: auto (fp8), fp8, fp8_e4m3, fp8_e5m2, bfloat16, float16, float32.",
        ),
    ] = "auto",
    skip_layers: options.SkipLayers = None,
    attention: Annotated[
        str | None,
        typer.Option(
            metavar="accurate|fp8",
            help="Arithmetic that will serve; default: fp8 (FlashAttention 3's, queries quantized "
            "too) where there is a q_scale.",
        ),
    ] = None,
    missing_scales: options.MissingScales = "refuse",
    variants: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMNS",
            help="What to compare, in this order: native, bf16, fp16, fp32, fp8, fp8_e5m2 (the "
            "last two with @1.0, @skip, @accurate or @fp8), or folders of other checkpoints; "
            "separated by commas. Gates apply to fp8 and fp8@skip, else to the last.",
        ),
    ] = None,
    assume_skip_flag: Annotated[
        bool,
        typer.Option(
            "--assume-skip-flag",
            help="Do not judge what happens if recorded skip layers are not passed to vLLM.",
        ),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Compare with this model's native cache, not with MODEL's own."
        ),
    ] = None,
    noise_floor: Annotated[
        bool,
        typer.Option(
            "--noise-floor/--no-noise-floor",
            help="Measure what the dtype's own rounding does (one more pass over the text).",
        ),
    ] = True,
    generation: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Also generate N tokens after each of 8 prompts under every column. Cost: N steps "
            "of 8 sequences a column; SmolLM2 on one CPU core: 250 tokens take about a minute a "
            "column, 2000 about 15.",
        ),
    ] = None,
    needle: Annotated[
        bool,
        typer.Option(
            "--needle",
            help="Also ask for facts put at depths 0 to 100 % of long texts. Cost: 6 texts of each "
            "length a column.",
        ),
    ] = False,
    needle_lengths: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS,...", help="Default: 512, 2048, 8192, ... and the model's maximum."
        ),
    ] = None,
    needle_trials: Annotated[
        int | None, typer.Option(help="Texts for each length and depth. Default 1.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="TASK,...",
            help="Also tasks of lm-evaluation-harness (pip install 'fp8calib[eval]'). Cost: every "
            "sample of a task once a column.",
        ),
    ] = None,
    task_folder: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Where YAML files of your own tasks are.")
    ] = None,
    task_limit: Annotated[
        int | None, typer.Option(metavar="N", help="Only the first N samples of a task.")
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            metavar="fp8calib|vllm",
            help="vllm: the logprobs of an installed vLLM, the stack that will serve.",
        ),
    ] = "fp8calib",
    python: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="The Python of --engine vllm; default: as for serve."),
    ] = None,
    max_ppl_increase: Annotated[
        float | None,
        typer.Option(help="Gate: perplexity, relative to native. Default 0.02."),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(help="Gate: mean KL(native || fp8) per token, in nats. Default 0.05."),
    ] = None,
    min_top1: Annotated[
        float | None,
        typer.Option(help="Gate: share of tokens with native's top prediction. Default 0.90."),
    ] = None,
    min_needle: Annotated[
        float | None,
        typer.Option(help="Gate: share of the needles found that native finds. Default 0.90."),
    ] = None,
    max_task_drop: Annotated[
        float | None,
        typer.Option(help="Gate: loss on a task's metric, in its own unit. Default 0.02."),
    ] = None,
    max_repeat_increase: Annotated[
        float | None,
        typer.Option(help="Gate: more of generated text that repeats itself. Default 0.20."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="A recipe file, or built-in one, whose gates to take. Options override."),
    ] = None,
    report: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the report as FILE.html or FILE.json."),
    ] = None,
    junit: Annotated[
        str | None,
        typer.Option(metavar="FILE.xml", help="Write the gates as JUnit test cases."),
    ] = None,
    png: Annotated[
        bool,
        typer.Option("--png", help="With --report: its plots beside it as PNG (extra [report])."),
    ] = False,
    card: Annotated[
        bool,
        typer.Option("--card", help="Put the numbers into the checkpoint's model card."),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace earlier files of these names.")
    ] = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Measure what an FP8 cache costs; fail when it is too much.

    By default on 32 texts of up to 512 tokens that the default calibration does not see: split
    test_sft of HuggingFaceH4/ultrachat_200k, or for the demo split heldout of builtin:pydoc.
    """
    given = {k: v for k, v in locals().items() if v is not None}
    gates = _gates(given, recipe)
    from fp8calib.models import resolve_model

    resolve_model(model)  # a wrong name is told before torch is loaded
    files = _files(given)
    _check_extras(model, png, card, files)
    names = "dataset split text_column messages_column samples max_seq_len seed kv_cache_dtype "
    names += "attention missing_scales variants assume_skip_flag against noise_floor generation "
    names += "needle needle_trials task_folder task_limit device dtype trust_remote_code"
    chosen = {name: given[name] for name in names.split() if name in given}
    chosen["kv_cache_dtype_skip_layers"] = skip_layers
    chosen |= {"needle_lengths": _lengths(needle_lengths), "tasks": _tasks(tasks)}
    result = _run(model, gates, chosen, engine, python, files.get("junit"))
    _finish(result, files, png, card, json)


def _tasks(words: str | None) -> list[str]:
    from fp8calib.errors import UserError

    names = [name.strip() for name in (words or "").split(",") if name.strip()]
    if words is not None and not names:  # such as an unset variable: no check may go missing
        raise UserError(f"--tasks {words!r}: names no task")
    return names


def _gates(given: dict[str, Any], recipe: str | None) -> Gates:
    from fp8calib.errors import UserError
    from fp8calib.recipe import Gates, Recipe, load_recipe

    for check, needing in _NEED.items():
        wanted = next((name for name in needing if name in given), None)
        if wanted is not None and not given.get(check):
            raise UserError(f"{_flag(wanted)} needs {_flag(check)}")
    limits = {name: given[name] for name in Gates.model_fields if name in given}
    return (Recipe() if recipe is None else load_recipe(recipe)).with_gates(**limits).gates


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _files(given: dict[str, Any]) -> dict[str, Path]:
    """The paths of the files to write, refused before any work."""
    from fp8calib.evaluation.report_file import check_file

    kinds = {"report": (".html", ".json"), "junit": (".xml",)}
    return {
        option: check_file(_flag(option), given[option], endings, given["overwrite"])
        for option, endings in kinds.items()
        if option in given
    }


def _lengths(text: str | None) -> list[int] | None:
    from fp8calib.errors import UserError

    if text is None:
        return None
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"--needle-lengths {text}: give numbers of tokens, as 512,2048") from None


def _run(
    model: str,
    gates: Gates,
    chosen: dict[str, Any],
    engine: str,
    python: str | None,
    junit: Path | None,
) -> Verification:
    from fp8calib.errors import CheckFailed, UserError

    if engine not in ("fp8calib", "vllm"):
        raise UserError(f"unknown --engine {engine!r}: use fp8calib or vllm")
    if python is not None and engine != "vllm":
        raise UserError("--python is for --engine vllm")
    try:
        if engine == "vllm":
            from fp8calib.evaluation.vllm_engine import verify_with_vllm

            return verify_with_vllm(model, gates=gates, python=python, **chosen)
        from fp8calib.evaluation import verify as run

        return run(model, gates=gates, **chosen)
    except CheckFailed as problem:
        if junit is not None:
            from fp8calib.evaluation.report_file import write_junit_failure

            write_junit_failure(model, str(problem), junit)
        raise


def _check_extras(model: str, png: bool, card: bool, files: dict[str, Path]) -> None:
    """Refuse --png and --card where they cannot be done, before any work."""
    from fp8calib.errors import UserError

    if png:
        from fp8calib.evaluation.report_png import check_matplotlib

        if "report" not in files:
            raise UserError("--png needs --report: the plots lie beside that file")
        check_matplotlib()
    if card:
        from fp8calib.checkpoint.amend import check_amendable

        check_amendable(model)


def _finish(
    result: Verification, files: dict[str, Path], png: bool, card: bool, json: bool
) -> None:
    from dataclasses import replace

    from fp8calib.cli.command_line import command_line
    from fp8calib.cli.verify_output import failures, show
    from fp8calib.console import print_json
    from fp8calib.errors import CheckFailed

    result = replace(result, command=command_line())
    try:
        _write(result, files, png, card)
    finally:  # numbers that took minutes are shown also where a file cannot be written
        if json:
            print_json(result.to_dict())
        else:
            show(result)
    if result.partial:
        raise KeyboardInterrupt
    if not result.ok:
        raise CheckFailed(f"{result.model} fails {failures(result)}")


def _write(result: Verification, files: dict[str, Path], png: bool, card: bool) -> None:
    from fp8calib.evaluation.report_file import write_junit, write_report
    from fp8calib.models import resolve_model

    if "report" in files:
        write_report(result, files["report"])
    if png:
        from fp8calib.evaluation.report_png import write_pngs

        write_pngs(result.to_dict(), files["report"])
    if card and not result.partial:
        from fp8calib.checkpoint.amend import amend
        from fp8calib.checkpoint.card_accuracy import accuracy_record

        amend(resolve_model(result.model), accuracy=accuracy_record(result.to_dict()))
    if "junit" in files:
        write_junit(result, files["junit"])
