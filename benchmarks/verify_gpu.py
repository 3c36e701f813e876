"""What teacher-forced verification costs on one GPU, beside as many bare forward passes.

    python benchmarks/verify_gpu.py [--tokens 262144] [--length 2048] [--layers 32] [--profile]

The model has Llama-3.1-8B's shape and random bfloat16 weights, made on the device; the tokens are
random. Native pages, FP8 with tensor scales and the same with FP8 attention go through `measure`,
as in `fp8calib verify`: every token's logits of all three compared over the whole vocabulary. The
bare pass computes the model's logits on the same tokens and pass size with transformers' sdpa
attention, and throws them away. The ratio is three times its seconds over those of verification.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from llama_shape import make_model

from fp8calib.attention import probe, use_attention
from fp8calib.checkpoint import Checkpoint
from fp8calib.evaluation.measurement import measure, tokens_per_pass
from fp8calib.evaluation.metrics import TokenTable
from fp8calib.evaluation.summary import Summary
from fp8calib.evaluation.variants import Run, Variant, native_variant
from fp8calib.layers import LayerSpec
from fp8calib.runtime.kv_format import KVFormat
from fp8calib.runtime.loader import LoadedModel
from fp8calib.scales import LayerScales, ScaleSet

SCALE = np.full(1, 0.02, np.float32)  # holds values up to 9: those of a random model lie below


def load_random(layers: int) -> LoadedModel:
    model = make_model(layers)
    nothing = cast(Checkpoint, None)
    return LoadedModel("random", nothing, model, None, probe(model), frozenset(), 131_072)


def make_runs(loaded: LoadedModel) -> list[Run]:
    def scales(layer: LayerSpec) -> LayerScales:
        return LayerScales(layer.name, SCALE, SCALE, SCALE)

    made = ScaleSet("tensor", {layer.index: scales(layer) for layer in loaded.layers})
    fp8 = KVFormat.fp8(loaded.layers, torch.bfloat16, scales=made)
    both = KVFormat.fp8(loaded.layers, torch.bfloat16, scales=made, arithmetic="fp8")
    variants = [
        native_variant(loaded),
        Variant("fp8", "fp8 calibrated", fp8),
        Variant("fp8_attention", "fp8 calibrated, fp8 attention", both),
    ]
    return [Run(variant, loaded) for variant in variants]


def seconds_of(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


@torch.inference_mode()
def bare(model: Any, rows: list[list[int]], limit: int) -> None:
    together = max(1, limit // len(rows[0]))
    with use_attention(model, "sdpa"):
        for start in range(0, len(rows), together):
            batch = torch.tensor(rows[start : start + together], device="cuda")
            model(batch, use_cache=False).logits  # noqa: B018


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=262_144)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--profile", action="store_true", help="also list the costliest kernels")
    args = parser.parse_args()
    import transformers

    name = torch.cuda.get_device_properties(0).name
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}", flush=True)
    loaded = load_random(args.layers)
    runs = make_runs(loaded)
    generator = torch.Generator().manual_seed(0)
    shape = (args.tokens // args.length, args.length)
    rows = torch.randint(10, 128_000, shape, generator=generator).tolist()
    limit = tokens_per_pass(runs)
    some = rows[: max(2, 2 * limit // args.length)]

    def verified(part: list[list[int]]) -> dict[str, TokenTable]:
        tables = {run.variant.key: TokenTable() for run in runs}
        measure(runs, part, tables, limit)
        return tables

    print(
        f"warming up: {seconds_of(lambda: (verified(some), bare(loaded.model, some, limit))):.1f} s"
    )
    if args.profile:
        with torch.profiler.profile() as profile:
            verified(some)
        print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=25))
    found: dict[str, TokenTable] = {}
    ours = seconds_of(lambda: found.update(verified(rows)))
    summarised = seconds_of(lambda: Summary(found, "native").divergence("fp8"))
    theirs = seconds_of(lambda: bare(loaded.model, rows, limit))
    total = sum(map(len, rows))
    result = {
        "device": name,
        "tokens": total,
        "pass_tokens": limit,
        "verify_seconds": round(ours, 2),
        "summary_seconds": round(summarised, 2),
        "bare_seconds": round(theirs, 2),
        "verify_tokens_per_second": round(len(runs) * total / ours),
        "bare_tokens_per_second": round(total / theirs),
        "share_of_bare": round(len(runs) * theirs / ours, 3),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
        "kl": Summary(found, "native").divergence("fp8")["kl"].value,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
