"""`fp8calib serve`: an OpenAI-compatible server on a paged FP8 cache."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp8calib.cli import app, options

if TYPE_CHECKING:
    from fp8calib.runtime.async_llm import AsyncLLM
    from fp8calib.serve.settings import ServerSettings

_NEEDED = ("fastapi", "uvicorn", "prometheus_client")
_MAX_BODY_SIZE, _MAX_N, _MAX_PROMPTS, _DRAIN_SECONDS = "16MiB", 16, 256, 30
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")


@app.command(
    epilog="Examples: fp8calib serve demo:smollm2-135m-instruct; "
    "fp8calib serve ./model-kvattn-fp8-tensor --host 0.0.0.0 --port 8001; "
    "fp8calib serve ./model-kvattn-fp8-tensor --engine vllm -- --max-num-batched-tokens 4096",
)
def serve(
    model: options.Model,
    vllm_arguments: options.VLLMArguments = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0 is every one.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 is any that is free.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="FP8CALIB_API_KEY",
            help="The key that requests must carry; the variable keeps it out of process lists.",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="What requests call the model; may be repeated. Default: MODEL."),
    ] = None,
    kv_cache_dtype: options.KVCacheDtype = "auto",
    skip_layers: options.SkipLayers = None,
    attention: options.Attention = "accurate",
    missing_scales: options.MissingScales = "refuse",
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    gpu_memory_utilization: options.GPUMemoryUtilization = None,
    kv_cache_memory: options.KVCacheMemory = None,
    enforce_eager: options.EnforceEager = False,
    compile_layers: options.CompileLayers = False,
    max_body_size: Annotated[
        str, typer.Option(metavar="SIZE", help="The largest request.")
    ] = _MAX_BODY_SIZE,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens of a prompt; default: what the model's length leaves."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens of a completion; default: what the model's length leaves."),
    ] = None,
    max_n: Annotated[int, typer.Option(help="Completions of a prompt in one request.")] = _MAX_N,
    max_prompts: Annotated[int, typer.Option(help="Prompts in one request.")] = _MAX_PROMPTS,
    drain_timeout: Annotated[
        int, typer.Option(help="Seconds that running requests have when the server is stopped.")
    ] = _DRAIN_SECONDS,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="Write a line for each request to stderr.")
    ] = False,
    engine: options.Engine = "fp8calib",
    vllm: options.VLLM = None,
    tensor_parallel_size: options.TensorParallelSize = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print the address as JSON on stdout once it listens.")
    ] = False,
) -> None:
    """Serve a model to OpenAI clients.

    Completions, chat and streaming at /v1, and /health and /metrics.
    """
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
    names = served_model_name or [model]
    ours = {
        "--attention": attention != "accurate",
        "--compile-layers": compile_layers,
        "--device": device != "auto",
        "--max-body-size": max_body_size != _MAX_BODY_SIZE,
        "--max-prompt-tokens": max_prompt_tokens is not None,
        "--max-tokens": max_tokens is not None,
        "--max-n": max_n != _MAX_N,
        "--max-prompts": max_prompts != _MAX_PROMPTS,
        "--drain-timeout": drain_timeout != _DRAIN_SECONDS,
        "--access-log": access_log,
        "--json": json,
    }
    theirs = {
        "an argument behind MODEL": bool(vllm_arguments),
        "--vllm": vllm is not None,
        "--tensor-parallel-size": tensor_parallel_size is not None,
    }
    if options.is_vllm(engine, ours, theirs):
        from fp8calib import vllm_launch

        address = {"host": host, "port": port, "served_model_name": names}
        parallel = {"tensor_parallel_size": tensor_parallel_size}
        prepared = vllm_launch.prepare(
            model,
            executable=vllm,
            kv_cache_dtype=kv_cache_dtype,
            skip_layers=skip_layers,
            missing_scales=missing_scales,
            flags=common | address | parallel,
        )
        prepared.serve(vllm_arguments or (), api_key)
    _need_extra()
    from fp8calib.serve.settings import Limits, ServerSettings

    limits = Limits(
        body_bytes=options.memory_bytes("--max-body-size", max_body_size) or 0,
        prompt_tokens=max_prompt_tokens,
        max_tokens=max_tokens,
        prompts=max_prompts,
        n=max_n,
    )
    hosts = _LOOPBACK if host in _LOOPBACK and api_key is None else None
    settings = ServerSettings(names, api_key, drain_timeout, access_log, limits, hosts)
    cache = options.given(
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_dtype_skip_layers=skip_layers,
        attention=attention,
        missing_scales=missing_scales,
        compile_layers=compile_layers,
        device=device,
    )
    _serve(model, common | cache, settings, host, port, json)


def _need_extra() -> None:
    from fp8calib.errors import UserError

    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise UserError(f"serve needs {', '.join(missing)}: pip install 'fp8calib[serve]'")


def _serve(
    model: str,
    engine_options: dict[str, Any],
    settings: ServerSettings,
    host: str,
    port: int,
    json: bool,
) -> None:
    from fp8calib.console import warn
    from fp8calib.models import resolve_model
    from fp8calib.runtime.config import EngineConfig
    from fp8calib.serve.server import bind, make_server, serve, url_of

    EngineConfig(**engine_options)
    resolve_model(model)  # a wrong name or option is told before torch is loaded
    with bind(host, port) as bound:  # a taken port is told before the model is loaded
        if settings.api_key is None and host not in _LOOPBACK:
            warn(f"anyone who reaches {host} can use this server: there is no --api-key")
        from fp8calib.runtime.async_llm import AsyncLLM

        llm = AsyncLLM(model, **engine_options)
        url = url_of(bound)
        serve(make_server(llm, settings, lambda: _announce(llm, settings, url, json)), bound)


def _announce(llm: AsyncLLM, settings: ServerSettings, url: str, json: bool) -> None:
    from fp8calib.cli.engine_summary import show_engine
    from fp8calib.console import info, print_json

    show_engine(llm.llm)
    info(f"serving {settings.model_names[0]} at {url}/v1; Ctrl-C stops it")
    if json:
        print_json({"url": url, "models": list(settings.model_names)})
