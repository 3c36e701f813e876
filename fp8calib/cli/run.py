"""`fp8calib run`: generate text with a model on a paged KV cache."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp8calib.cli import app, options

if TYPE_CHECKING:
    from fp8calib.runtime.llm import LLM, Prompt
    from fp8calib.runtime.outputs import RequestOutput
    from fp8calib.runtime.sampling_params import SamplingParams

_SEED_LIMIT = 2**31


@app.command(
    epilog="Examples: fp8calib run demo:smollm2-135m-instruct -p 'The capital of France is'; "
    "fp8calib run ./model-kvattn-fp8-tensor --chat -p 'Who are you?'; "
    "fp8calib run ./model --kv-cache-dtype fp8 --prompts prompts.txt --json < /dev/null",
)
def run(
    model: options.Model,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "-p", "--prompt", help="Text to complete, as it is; may be repeated. Default: stdin."
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A file of prompts: one a line, or .jsonl with strings or objects that have a "
            "`prompt`."
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")
    ] = False,
    kv_cache_dtype: options.KVCacheDtype = "auto",
    skip_layers: options.SkipLayers = None,
    attention: options.Attention = "accurate",
    missing_scales: options.MissingScales = "refuse",
    max_tokens: Annotated[int, typer.Option(help="The most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0, the default, is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens of this sum.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0 is all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Of the random numbers; default: drawn.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends an answer; may be repeated.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end-of-text token.")
    ] = False,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of prompt and answer; default: the model's.")
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Generate text on an FP8 or native KV cache; answers to stdout, all else to stderr."""
    from fp8calib.models import resolve_model

    texts = list(_prompts(prompt, prompts))
    _check_unicode(texts)
    resolve_model(model)  # a wrong name is told before torch is loaded
    from fp8calib.runtime.llm import LLM
    from fp8calib.runtime.sampling_params import SamplingParams

    if seed is None and temperature > 0:
        import secrets

        seed = secrets.randbelow(_SEED_LIMIT)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop or (),
        ignore_eos=ignore_eos,
    )
    llm = LLM(
        model,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_dtype_skip_layers=skip_layers,
        attention=attention,
        missing_scales=missing_scales,
        max_model_len=max_model_len,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    _show_cache(llm)
    rendered: list[Prompt] = [
        llm.render_chat([{"role": "user", "content": text}]) if chat else text for text in texts
    ]
    if json:
        from fp8calib.console import print_json

        print_json(_report(llm, texts, llm.generate(rendered, params), params))
    else:
        _stream(llm, rendered, texts, params)
        _show_stats(llm, params)


def _prompts(given: Sequence[str] | None, file: Path | None) -> Iterator[str]:
    """The prompts of the options, else all of stdin as one."""
    from fp8calib.errors import UserError

    yield from given or ()
    if file is not None:
        yield from _read_prompts(file)
    if given or file is not None:
        return
    if sys.stdin.isatty():
        raise UserError("no prompt: use -p TEXT, --prompts FILE, or pipe text into the command")
    try:
        yield sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError:
        raise UserError("the prompt on stdin is not UTF-8 text") from None


def _check_unicode(texts: Sequence[str]) -> None:
    from fp8calib.errors import UserError

    for number, text in enumerate(texts, 1):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"prompt {number} is not UTF-8 text") from None


def _read_prompts(file: Path) -> Iterator[str]:
    from fp8calib.errors import UserError

    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not UTF-8 text"
        raise UserError(f"{file}: {reason}") from None
    found = False
    # not splitlines: that also splits at form feeds and other characters inside a line
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removesuffix("\r")
        if line.strip():
            found = True
            yield _json_prompt(line, f"{file}, line {number}") if file.suffix == ".jsonl" else line
    if not found:
        raise UserError(f"{file} holds no prompt")


def _json_prompt(line: str, where: str) -> str:
    from fp8calib.errors import UserError

    try:
        value: Any = jsonlib.loads(line)
    except (ValueError, RecursionError) as problem:
        raise UserError(f"{where} is not JSON: {problem}") from None
    if isinstance(value, dict):
        value = value.get("prompt")
    if not isinstance(value, str):
        raise UserError(f"{where} is neither a string nor an object with a `prompt` that is one")
    return value


def _show_cache(llm: LLM) -> None:
    from fp8calib.checkpoint.serving import SKIP_FLAG
    from fp8calib.console import info

    kv = llm.engine.kv
    info(f"KV cache: {kv.kv_format.describe(llm.engine.loaded.layers)}")
    if kv.recorded:
        flag = " ".join(kv.skip_layers)
        info(
            f"layers {flag} are left native, as the checkpoint records; "
            f"vLLM needs for the same: {SKIP_FLAG} {flag}"
        )


def _stream(llm: LLM, rendered: list[Prompt], texts: list[str], params: SamplingParams) -> None:
    """Print the answers in the order of the prompts, the first unfinished one as it grows."""
    latest: dict[int, RequestOutput] = {}
    current = shown = 0
    _print_heading(texts, current)
    for output in llm.stream(rendered, params):
        number = int(output.request_id)
        latest[number] = output
        while current < len(texts) and (now := latest.get(current)) is not None:
            text = now.outputs[0].text
            print(text[shown:], end="", flush=True)
            shown = len(text)
            if not now.finished:
                break
            print(flush=True)
            current, shown = current + 1, 0
            _print_heading(texts, current)


def _print_heading(texts: list[str], number: int) -> None:
    """As `head` and `tail` do it for several files."""
    if 1 < len(texts) > number:
        title = " ".join(texts[number].split())
        title = title if len(title) <= 60 else title[:57] + "..."
        print(f"{chr(10) * bool(number)}==> {title} <==", flush=True)


def _show_stats(llm: LLM, params: SamplingParams) -> None:
    from fp8calib.console import info

    stats = llm.engine.stats
    line = (
        f"{stats.prompt_tokens} prompt tokens, {stats.generated_tokens} generated in "
        f"{stats.seconds:.1f} s: {stats.tokens_per_second:.1f} tokens/s; "
        f"KV cache {stats.kv_bytes / 1e6:.2f} MB (bf16: {stats.bf16_kv_bytes / 1e6:.2f} MB)"
    )
    info(line if params.greedy else f"{line}; seed {params.seed}")


def _report(
    llm: LLM, texts: list[str], outputs: list[RequestOutput], params: SamplingParams
) -> dict[str, Any]:
    from dataclasses import asdict

    engine = llm.engine
    return {
        "model": engine.loaded.name,
        "kv_cache": engine.kv.kv_format.describe(engine.loaded.layers),
        "attention": engine.kv.kv_format.arithmetic,
        "skip_layers": engine.kv.skip_layers,
        "warnings": engine.warnings,
        "sampling_params": asdict(params),
        "outputs": [
            {"prompt": text, "prompt_tokens": len(output.prompt_token_ids)}
            | {k: v for k, v in asdict(output.outputs[0]).items() if k != "index"}
            for text, output in zip(texts, outputs, strict=True)
        ],
        "stats": asdict(engine.stats) | {"tokens_per_second": engine.stats.tokens_per_second},
    }
