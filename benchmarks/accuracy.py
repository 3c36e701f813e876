"""What scales are worth: FP8 KV caches against native, as the heads of a model drift apart.

    python benchmarks/accuracy.py [--spreads 1,4,16,64,256] [--texts 24] [--plot docs/accuracy.svg]

SmolLM2-135M-Instruct, and the same function with heads further apart: in every layer K and V of the
first KV head are multiplied by `spread` and those of the third divided by it, and what reads them
(queries, columns of the output projection) the other way round. Powers of two, so native bfloat16
computes the same.

Five caches on held-out text, all with accurate attention (queries and probabilities in 16 bit):
scale 1.0; what llm-compressor writes by default (one K and V scale a layer); our tensor scales; our
attn_head scales; e5m2, which takes no scales. Calibrated on other texts, the same for all.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp8calib.calibration import core
from fp8calib.calibration.observers import make_scales, share_ranges
from fp8calib.data import load_data
from fp8calib.evaluation.bootstrap import Estimate
from fp8calib.evaluation.measurement import measure, tokens_per_pass
from fp8calib.evaluation.metrics import TokenTable
from fp8calib.evaluation.summary import Summary, kl_difference
from fp8calib.evaluation.variants import Run, Variant, native_variant
from fp8calib.model_loading import load_model, load_tokenizer
from fp8calib.models import resolve_model
from fp8calib.recipe import Calibration
from fp8calib.runtime.kv_format import KVFormat
from fp8calib.runtime.loader import LoadedModel, load
from fp8calib.scales import LayerScales, ScaleSet

MODEL = "demo:smollm2-135m-instruct"
TITLES = {
    "scale_1": "scale 1.0",
    "llmcompressor": "llm-compressor's default",
    "tensor": "ours, tensor",
    "attn_head": "ours, attn_head",
    "e5m2": "e5m2",
}
PAIRS = (("tensor", "scale_1"), ("attn_head", "tensor"), ("tensor", "llmcompressor"))


@torch.no_grad()
def spread_heads(model: Any, spread: float) -> None:
    """Move heads apart by a power of two without changing the function."""
    for layer in model.model.layers:
        attention = layer.self_attn
        dim, group = attention.head_dim, attention.num_key_value_groups
        for head, factor in ((0, spread), (2, 1 / spread)):
            own = slice(head * dim, (head + 1) * dim)
            readers = slice(head * group * dim, (head + 1) * group * dim)
            attention.k_proj.weight[own] *= factor
            attention.q_proj.weight[readers] /= factor
            attention.v_proj.weight[own] *= factor
            attention.o_proj.weight[:, readers] /= factor


def our_scales(loaded: LoadedModel, rows: list[list[int]]) -> dict[str, ScaleSet]:
    collector = core.Collector(query=False)
    batches = [core.make_batch(rows, plan) for plan in core.plan_batches(rows, 4)]
    core.calibration_pass(loaded.model, batches, collector)
    ranges = share_ranges(loaded.layers, collector.ranges())
    return {
        strategy: make_scales(loaded.layers, ranges, Calibration(strategy=strategy, query=False))
        for strategy in ("tensor", "attn_head")
    }


def their_scales(spread: float, rows: list[list[int]], loaded: LoadedModel) -> ScaleSet:
    """llm-compressor's own kv_cache_scheme on the same rows."""
    from datasets import Dataset
    from llmcompressor import oneshot

    model = load_model(resolve_model(MODEL), "cpu", "auto")
    spread_heads(model, spread)
    recipe = """
    quant_stage:
        quant_modifiers:
            QuantizationModifier:
                kv_cache_scheme:
                    {num_bits: 8, type: float, strategy: tensor, dynamic: false, symmetric: true}
    """
    data = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
    oneshot(
        model=model,
        processor=load_tokenizer(resolve_model(MODEL)),
        dataset=Dataset.from_dict(data),
        recipe=recipe,
        max_seq_length=max(map(len, rows)),
        num_calibration_samples=len(rows),
    )
    modules = dict(model.named_modules())

    def scale(name: str, kind: str) -> np.ndarray:
        return getattr(modules[name], f"{kind}_scale").detach().float().reshape(1).numpy()

    return ScaleSet(
        "tensor",
        {
            layer.index: LayerScales(layer.name, scale(layer.name, "k"), scale(layer.name, "v"))
            for layer in loaded.layers
        },
    )


def evaluate(spread: float, calibration: list[list[int]], held_out: list[list[int]]) -> dict:
    loaded = load(MODEL, device="cpu")
    spread_heads(loaded.model, spread)
    scales = our_scales(loaded, calibration)
    scales["llmcompressor"] = their_scales(spread, calibration, loaded)
    dtype = loaded.model.dtype
    formats = {
        key: KVFormat.fp8(
            loaded.layers,
            dtype,
            scales=scales.get(key),
            fp8_format="e5m2" if key == "e5m2" else "e4m3",
        )
        for key in TITLES
    }
    variants = [native_variant(loaded)]
    variants += [Variant(key, TITLES[key], fmt) for key, fmt in formats.items()]
    runs = [Run(variant, loaded) for variant in variants]
    tables = {variant.key: TokenTable() for variant in variants}
    measure(runs, held_out, tables, tokens_per_pass(runs))
    summary = Summary(tables, "native")
    found = {key: summary.divergence(key) for key in ("native", *TITLES)}
    return {
        "spread": spread,
        "native_perplexity": found["native"]["perplexity"],
        "kl": {key: found[key]["kl"] for key in TITLES},
        "ppl_increase": {key: found[key]["ppl_increase"] for key in TITLES},
        "top1": {key: found[key]["top1"] for key in TITLES},
        "differences": {
            f"{one} - {other}": summary.estimate(kl_difference(other, one)) for one, other in PAIRS
        },
    }


def shown(estimate: Estimate, form: str) -> str:
    return f"{estimate.value:{form}} ({estimate.low:{form}} to {estimate.high:{form}})"


def markdown(results: Sequence[dict]) -> str:
    """Tables for RESULTS.md."""
    lines = ["| spread | " + " | ".join(TITLES.values()) + " |", "|---" * (len(TITLES) + 1) + "|"]
    for name, form in (("kl", ".4f"), ("top1", ".1%"), ("ppl_increase", "+.1%")):
        lines.append(f"| **{name}** |" + " |" * len(TITLES))
        for result in results:
            cells = [shown(result[name][key], form) for key in TITLES]
            lines.append(f"| {result['spread']:g} | {' | '.join(cells)} |")
    heads = list(results[0]["differences"])
    lines += ["", "| spread | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for result in results:
        cells = [shown(result["differences"][head], "+.4f") for head in heads]
        lines.append(f"| {result['spread']:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(results: Sequence[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))
    axes = figure.add_subplot()
    places = range(len(results))
    for number, (key, title) in enumerate(TITLES.items()):
        found = [result["kl"][key] for result in results]
        reach = [[e.value - e.low for e in found], [e.high - e.value for e in found]]
        shifted = [place + 0.06 * (number - 2) for place in places]
        axes.errorbar(
            shifted, [e.value for e in found], yerr=reach, fmt="o-", capsize=3, label=title
        )
    axes.set_yscale("log")
    axes.set_xticks(places, [f"{result['spread']:g}" for result in results])
    axes.set_xlabel("spread of the heads of a layer")
    axes.set_ylabel("mean KL from native, nats a token")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spreads", default="1,4,16,64,256")
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--max-seq-len", type=int, default=256)
    parser.add_argument("--calibration-texts", type=int, default=16)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    tokenizer = load_tokenizer(resolve_model(MODEL))

    def rows(samples: int, split: str) -> list[list[int]]:
        data = load_data(
            tokenizer,
            "builtin:pydoc",
            split=split,
            samples=samples,
            max_seq_len=args.max_seq_len,
        )
        return [row for row in data.rows if len(row) > 1]

    calibration, held_out = rows(args.calibration_texts, "calibration"), rows(args.texts, "heldout")
    print(f"calibrated on {sum(map(len, calibration)):,} tokens, judged on", end=" ")
    print(f"{len(held_out)} texts, {sum(map(len, held_out)):,} tokens", flush=True)
    results = []
    for word in args.spreads.split(","):
        start = time.perf_counter()
        results.append(evaluate(float(word), calibration, held_out))
        kl = {key: round(e.value, 5) for key, e in results[-1]["kl"].items()}
        seconds = round(time.perf_counter() - start, 1)
        print(json.dumps({"spread": float(word), "seconds": seconds, "kl": kl}), flush=True)
    print(markdown(results))
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
