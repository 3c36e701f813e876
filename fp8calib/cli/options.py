"""Options that several commands share, so that they are named and explained once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from fp8calib.devices import check_device, check_dtype


def checked(check: Callable[[Any], None]) -> Callable[[Any], Any]:
    """A callback for an option whose value is checked before its command starts."""

    def callback(value: Any) -> Any:
        check(value)
        return value

    return callback


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A folder, a Hugging Face Hub id, or demo:smollm2-135m-instruct."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
SkipLayers = Annotated[
    list[str] | None,
    typer.Option(
        "--kv-cache-dtype-skip-layers",
        "--skip-layers",
        metavar="LAYERS",
        help="Layers that keep a 16-bit cache: indices (negative ones from the end) and "
        "`sliding_window`, separated by spaces or commas; may be repeated.",
    ),
]
KVCacheDtype = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype",
        metavar="DTYPE",
        help="auto (fp8 for a calibrated checkpoint, else the model's dtype), bfloat16, float16, "
        "float32, fp8, fp8_e4m3 or fp8_e5m2.",
    ),
]
Attention = Annotated[
    str,
    typer.Option(
        "--attention",
        metavar="accurate|fp8",
        help="Arithmetic over an FP8 cache. fp8 quantizes queries too, as FlashAttention 3 does.",
    ),
]
MissingScales = Annotated[
    str,
    typer.Option(
        "--missing-scales",
        metavar="refuse|one",
        help="one: run layers of a calibrated checkpoint that lack a scale at 1.0, as vLLM does.",
    ),
]
Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        help="A JSONL, JSON, Parquet, CSV or text file, a folder of these, a Hub id, builtin:pydoc "
        "(Python's reference, as chats) or builtin:stdlib-code (its library's source).",
    ),
]
Split = Annotated[str | None, typer.Option("--split", help="Split of the dataset.")]
TextColumn = Annotated[str | None, typer.Option("--text-column", help="Column that holds text.")]
MessagesColumn = Annotated[
    str | None, typer.Option("--messages-column", help="Column that holds chat turns.")
]
Samples = Annotated[int | None, typer.Option("--samples", help="Texts to draw.")]
MaxSeqLen = Annotated[int | None, typer.Option("--max-seq-len", help="Tokens a text is cut to.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of the draw. Default 42.")]
Strategy = Annotated[
    str | None,
    typer.Option(
        metavar="tensor|attn_head",
        help="tensor: one scale per layer, loads on every vLLM backend. attn_head: "
        "one per head; better where heads of a layer differ widely in range, and needs "
        "FlashAttention 3 or 4 to serve.",
    ),
]
Observer = Annotated[
    str | None,
    typer.Option(
        metavar="absmax|percentile:P|mse",
        help="absmax: nothing seen is clipped. percentile:P: values beyond the P-th "
        "percentile are. mse: the least squared rounding error.",
    ),
]
Margin = Annotated[
    float | None, typer.Option(help="Headroom: scales are multiplied by this, 1 to 16.")
]
Query = Annotated[
    bool | None,
    typer.Option("--query/--no-query", help="Also write q_scale, or not."),
]
Link = Annotated[
    bool, typer.Option("--link", help="Hard-link the weights instead of copying them.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier output folder.")]
PushToHub = Annotated[
    str | None,
    typer.Option(
        "--push-to-hub",
        metavar="OWNER/NAME",
        help="Upload the checkpoint to this repository of the Hugging Face Hub.",
    ),
]
Private = Annotated[
    bool, typer.Option("--private", help="Make that repository private, where it is new.")
]
RecipeName = Annotated[
    str | None,
    typer.Option(
        "--recipe", help="A recipe file, or the name of a built-in one. Options override it."
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="DEVICE",
        callback=checked(check_device),
        help="auto, cpu, cuda or cuda:N.",
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        callback=checked(check_dtype),
        help="Of the weights: auto (the checkpoint's), bfloat16, float16 or float32.",
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python code that comes with the checkpoint."),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len", help="Tokens of a sequence, prompt and answer; default: the model's."
    ),
]
MaxNumSeqs = Annotated[
    int | None, typer.Option("--max-num-seqs", help="Sequences that run at a time; default: 64.")
]
GPUMemoryUtilization = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory-utilization",
        help="Share of the GPU's memory for weights, pages and work; default: 0.9.",
    ),
]
KVCacheMemory = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-memory",
        metavar="SIZE",
        help="Memory of the pages, such as 8GiB or 500MB; default: what is left of the share.",
    ),
]
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(
        "--max-num-batched-tokens",
        help="New tokens in one step, longer prompts take several; default: 2048.",
    ),
]
EnforceEager = Annotated[
    bool, typer.Option("--enforce-eager", help="No CUDA graphs: starts sooner, runs slower.")
]
CompileLayers = Annotated[
    bool,
    typer.Option(
        "--compile-layers", help="torch.compile each decoder layer: starts later, runs faster."
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="fp8calib|vllm",
        help="vllm: start an installed vLLM with the flags that `inspect` prints; what follows "
        "`--` goes to it.",
    ),
]
VLLM = Annotated[
    str | None,
    typer.Option(
        "--vllm",
        metavar="PATH",
        help="vLLM's executable; default: $FP8CALIB_VLLM, else beside this Python, else on PATH.",
    ),
]
TensorParallelSize = Annotated[
    int | None,
    typer.Option("--tensor-parallel-size", help="GPUs that share the model; with --engine vllm."),
]
VLLMArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- VLLM_ARGUMENTS", help="Handed to vLLM, with --engine vllm.", show_default=False
    ),
]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def memory_bytes(option: str, size: str | None) -> int | None:
    """The bytes of a size like 8GiB, 500MB or 1000000.

    Raises:
        UserError: it is none, or smaller than a byte.
    """
    import re

    from fp8calib.errors import UserError

    if size is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", size.strip().lower())
    count = float(found[1]) * _UNITS[found[2] or ""] if found else 0.0
    if not 1 <= count < float("inf"):
        raise UserError(f"{option} {size}: give a size such as 8GiB, 500MB or a number of bytes")
    return int(count)


def is_vllm(engine: str, ours: dict[str, bool], theirs: dict[str, bool]) -> bool:
    """Whether `--engine` names vLLM.

    Args:
        ours, theirs: options that only the one or the other engine has, and whether each is given.
    Raises:
        UserError: an unknown engine, or an option of the one that was not chosen.
    """
    from fp8calib.errors import UserError

    if engine not in ("fp8calib", "vllm"):
        raise UserError(f"unknown --engine {engine!r}: use fp8calib or vllm")
    for name, given in (ours if engine == "vllm" else theirs).items():
        if given:
            other = "fp8calib" if engine == "vllm" else "vllm"
            raise UserError(f"{name} is for --engine {other}, and this is {engine}")
    return engine == "vllm"


def given(**options: Any) -> dict[str, Any]:
    """The options that were given: None stands for the default of what they are handed to."""
    return {name: value for name, value in options.items() if value is not None}
