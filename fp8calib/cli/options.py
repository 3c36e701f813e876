"""Options that several commands share, so that they are named and explained once."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Argument(help="A folder, a Hugging Face Hub id, or demo:smollm2-135m-instruct."),
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
        "or builtin:stdlib-code.",
    ),
]
Split = Annotated[str | None, typer.Option("--split", help="Split of the dataset.")]
TextColumn = Annotated[str | None, typer.Option("--text-column", help="Column that holds text.")]
MessagesColumn = Annotated[
    str | None, typer.Option("--messages-column", help="Column that holds chat turns.")
]
Samples = Annotated[int | None, typer.Option("--samples", help="Texts to draw.")]
MaxSeqLen = Annotated[int | None, typer.Option("--max-seq-len", help="Tokens a text is cut to.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of the draw.")]
Strategy = Annotated[
    str | None,
    typer.Option(
        metavar="tensor|attn_head",
        help="tensor (default): one scale per layer, loads on every vLLM backend. attn_head: "
        "one per head; better where heads of a layer differ widely in range, and needs "
        "FlashAttention 3 or 4 to serve.",
    ),
]
Observer = Annotated[
    str | None,
    typer.Option(
        metavar="absmax|percentile:P|mse",
        help="absmax (default): nothing seen is clipped. percentile:P: values beyond the P-th "
        "percentile are. mse: the least squared rounding error.",
    ),
]
Margin = Annotated[
    float | None, typer.Option(help="Headroom: scales are multiplied by this, 1 or more.")
]
Query = Annotated[
    bool | None,
    typer.Option("--query/--no-query", help="Also write q_scale (default) or not."),
]
Link = Annotated[
    bool, typer.Option("--link", help="Hard-link the weights instead of copying them.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier output folder.")]
RecipeName = Annotated[
    str | None,
    typer.Option(
        "--recipe", help="A recipe file, or the name of a built-in one. Options override it."
    ),
]
Device = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")
]
Dtype = Annotated[
    str, typer.Option("--dtype", help="Of weights: auto, bfloat16, float16 or float32.")
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python code that comes with the checkpoint."),
]
