"""`fp8calib run`: generate text with a model on a paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
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
    "fp8calib run ./model-kvattn-fp8-tensor --compare --prompts prompts.txt; "
    "fp8calib run ./model --kv-cache-dtype fp8 --prompts prompts.txt --json < /dev/null; "
    "fp8calib run ./model-kvattn-fp8-tensor --engine vllm -p Hello -- --max-model-len 4096",
)
def run(
    model: options.Model,
    vllm_arguments: options.VLLMArguments = None,
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
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Answer on a native and on an FP8 cache, and show where they part."
        ),
    ] = False,
    kv_cache_dtype: options.KVCacheDtype = "auto",
    skip_layers: options.SkipLayers = None,
    attention: options.Attention = "accurate",
    missing_scales: options.MissingScales = "refuse",
    max_tokens: Annotated[int, typer.Option(help="The most tokens to generate.")] = 256,
    min_tokens: Annotated[int, typer.Option(help="An answer has at least so many tokens.")] = 0,
    n: Annotated[int, typer.Option("-n", "--n", help="Answers to each prompt.")] = 1,
    temperature: Annotated[float, typer.Option(help="0, the default, is greedy.")] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(help="Draw from the likeliest tokens that have this probability together."),
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0 is all.")] = 0,
    min_p: Annotated[
        float, typer.Option(help="Draw from tokens at least this share as likely as the likeliest.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: tokens of prompt and answer come again less often.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Taken off the logit of each token that the answer has.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="The same, for each time that the answer has it.")
    ] = 0.0,
    logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: log probabilities of tokens and so many alternatives."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the random numbers; default: drawn.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends an answer; may be repeated.")
    ] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(help="Token that ends an answer; may be repeated.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end-of-text token.")
    ] = False,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    gpu_memory_utilization: options.GPUMemoryUtilization = None,
    kv_cache_memory: options.KVCacheMemory = None,
    enforce_eager: options.EnforceEager = False,
    compile_layers: options.CompileLayers = False,
    engine: options.Engine = "fp8calib",
    vllm: options.VLLM = None,
    tensor_parallel_size: options.TensorParallelSize = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Generate text on an FP8 or native KV cache.

    Answers go to stdout, all else to stderr.
    """
    from fp8calib.cli.prompts import read_prompts
    from fp8calib.models import resolve_model
    from fp8calib.runtime.config import EngineConfig
    from fp8calib.runtime.sampling_params import SamplingParams

    common = options.given(
        kv_cache_memory_bytes=options.memory_bytes("--kv-cache-memory", kv_cache_memory),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
        dtype=dtype,
        enforce_eager=enforce_eager,
        trust_remote_code=trust_remote_code,
    )
    sampling = options.given(
        n=n,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logprobs=logprobs,
        seed=_seed() if seed is None and temperature > 0 else seed,
        stop=stop,
        stop_token_ids=stop_token_id,
        ignore_eos=ignore_eos,
    )
    ours = {
        "--attention": attention != "accurate",
        "--compile-layers": compile_layers,
        "--device": device != "auto",
        "--compare": compare,
        "--logprobs": logprobs is not None,
    }
    theirs = {
        "an argument behind MODEL": bool(vllm_arguments),
        "--vllm": vllm is not None,
        "--tensor-parallel-size": tensor_parallel_size is not None,
    }
    use_vllm = options.is_vllm(engine, ours, theirs)
    if logprobs is not None and (compare or not json):
        from fp8calib.errors import UserError

        raise UserError("--logprobs is shown by --json alone, and not with --compare")
    cache = options.given(
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_dtype_skip_layers=skip_layers,
        attention=attention,
        missing_scales=missing_scales,
        compile_layers=compile_layers,
        device=device,
    )
    if not use_vllm:
        EngineConfig(**common, **cache)
        params = SamplingParams(**sampling)
    texts = read_prompts(prompt, prompts)
    resolve_model(model)  # a wrong name or option is told before torch is loaded
    if use_vllm:
        from fp8calib import vllm_launch
        from fp8calib.cli.run_vllm import run_vllm

        prepared = vllm_launch.prepare(
            model,
            executable=vllm,
            kv_cache_dtype=kv_cache_dtype,
            skip_layers=skip_layers,
            missing_scales=missing_scales,
            flags=common | {"tensor_parallel_size": tensor_parallel_size},
        )
        run_vllm(prepared, vllm_arguments or (), texts, chat, sampling, json)
        return
    if compare:
        from fp8calib.cli.run_compare import run_compare

        run_compare(model, common | cache, texts, chat, params, json)
    else:
        _run(model, common | cache, texts, chat, params, json)


def _seed() -> int:
    import secrets

    return secrets.randbelow(_SEED_LIMIT)


def _run(
    model: str,
    engine_options: dict[str, Any],
    texts: list[str],
    chat: bool,
    params: SamplingParams,
    json: bool,
) -> None:
    from fp8calib.cli.engine_summary import show_engine
    from fp8calib.runtime.llm import LLM

    llm = LLM(model, **engine_options)
    show_engine(llm)
    rendered: list[Prompt] = [
        llm.render_chat([{"role": "user", "content": text}]) if chat else text for text in texts
    ]
    if json:
        from fp8calib.console import print_json

        print_json(_report(llm, texts, llm.generate(rendered, params), params))
        return
    if len(texts) == params.n == 1:
        _stream(llm, rendered[0], params)
    else:
        outputs = llm.generate(rendered, params)
        print_answers(texts, [[one.text for one in output.outputs] for output in outputs])
    _show_stats(llm, params)


def _stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> None:
    """Print an answer as it grows."""
    shown = 0
    for output in llm.stream(prompt, params):
        text = output.outputs[0].text
        print(text[shown:], end="", flush=True)
        shown = len(text)
    print(flush=True)


def print_answers(texts: Sequence[str], answers: Sequence[Sequence[str]]) -> None:
    """To stdout: the answers to each prompt, under headings where there are several."""
    blocks = []
    for text, several in zip(texts, answers, strict=True):
        title = shortened(text)
        for number, answer in enumerate(several, 1):
            which = f" ({number} of {len(several)})" if len(several) > 1 else ""
            blocks.append((f"==> {title}{which} <==\n", answer))
    if len(blocks) == 1:
        print(blocks[0][1])
    else:
        print("\n\n".join(heading + answer for heading, answer in blocks))


def shortened(text: str) -> str:
    """A prompt as a heading: one line of at most 60 characters."""
    title = " ".join(text.split())
    return title if len(title) <= 60 else title[:57] + "..."


def _show_stats(llm: LLM, params: SamplingParams) -> None:
    from fp8calib.console import info
    from fp8calib.sizes import size_text

    stats = llm.engine.stats
    line = (
        f"{stats.prompt_tokens} prompt tokens, {stats.generated_tokens} generated in "
        f"{stats.seconds:.1f} s: {stats.tokens_per_second:.1f} tokens/s; "
        f"KV cache {size_text(stats.kv_bytes)} (bf16: {size_text(stats.bf16_kv_bytes)})"
    )
    info(line if params.greedy else f"{line}; seed {params.seed}")


def _report(
    llm: LLM, texts: list[str], outputs: list[RequestOutput], params: SamplingParams
) -> dict[str, Any]:
    from dataclasses import asdict

    from fp8calib.cli.engine_summary import engine_report

    return engine_report(llm) | {
        "sampling_params": asdict(params),
        "outputs": [
            {
                "prompt": text,
                "prompt_tokens": len(output.prompt_token_ids),
                "cached_tokens": output.num_cached_tokens,
            }
            | asdict(one)
            for text, output in zip(texts, outputs, strict=True)
            for one in output.outputs
        ],
    }
