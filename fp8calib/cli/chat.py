"""`fp8calib chat`: a conversation in the terminal, its earlier turns kept in the cache."""

from __future__ import annotations

from typing import Annotated

import typer

from fp8calib.cli import app, options


@app.command(
    epilog="While it answers, Ctrl-C stops the answer; Ctrl-D or /exit ends the conversation. "
    "Example: fp8calib chat demo:smollm2-135m-instruct --system 'Answer in one sentence.'",
)
def chat(
    model: options.Model,
    system: Annotated[
        str | None, typer.Option(help="The system message; /system TEXT sets another.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens of an answer; default: what the model's length leaves."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy. Default: the model's own, else 0.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from the likeliest tokens that have this probability together."),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest; 0 is all.")] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Draw from tokens at least this share as likely as the likeliest."),
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: tokens that were there come again less often.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the random numbers; default: drawn.")] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="After each answer: tokens/s and cached tokens.")
    ] = False,
    kv_cache_dtype: options.KVCacheDtype = "auto",
    skip_layers: options.SkipLayers = None,
    attention: options.Attention = "accurate",
    missing_scales: options.MissingScales = "refuse",
    max_model_len: options.MaxModelLen = None,
    gpu_memory_utilization: options.GPUMemoryUtilization = None,
    kv_cache_memory: options.KVCacheMemory = None,
    enforce_eager: options.EnforceEager = False,
    compile_layers: options.CompileLayers = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print each answer as one line of JSON.")
    ] = False,
) -> None:
    """Talk with a model; earlier turns stay in the cache.

    Commands: /system TEXT, /reset, /help, /exit.
    """
    from fp8calib.models import resolve_model
    from fp8calib.runtime.config import EngineConfig
    from fp8calib.runtime.sampling_params import SamplingParams

    engine_options = options.given(
        max_num_seqs=1,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_dtype_skip_layers=skip_layers,
        attention=attention,
        missing_scales=missing_scales,
        max_model_len=max_model_len,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_memory_bytes=options.memory_bytes("--kv-cache-memory", kv_cache_memory),
        device=device,
        dtype=dtype,
        enforce_eager=enforce_eager,
        compile_layers=compile_layers,
        trust_remote_code=trust_remote_code,
    )
    sampling = options.given(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    EngineConfig(**engine_options)
    SamplingParams(**sampling, **options.given(max_tokens=max_tokens))
    resolve_model(model)  # a wrong name or option is told before torch is loaded
    from fp8calib.cli.conversation import Conversation, Terminal
    from fp8calib.cli.engine_summary import show_engine
    from fp8calib.runtime.llm import LLM

    llm = LLM(model, **engine_options)
    show_engine(llm)
    Terminal(Conversation(llm, system, max_tokens, sampling), stats=stats, json=json).run()
