"""Calibration on one GPU beside a bare forward pass, and llm-compressor's published example.

    python benchmarks/calibrate_gpu.py [--samples 512] [--max-seq-len 2048] [--example-samples 64]

The model has Llama-3.1-8B's shape and random bfloat16 weights, made on the device; the tokens are
random. The bare pass and ours run the model's layers up to the head over the same batches; ours
observes q, k and v. The example (KV cache alone, `tensor`) runs llm-compressor's own pipeline, one
text a batch, on the first of the same rows; it is left out where llm-compressor is not installed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from llama_shape import make_model

from fp8calib.calibration.core import (
    Batch,
    Collector,
    calibration_pass,
    make_batch,
    plan_batches,
)
from fp8calib.calibration.statistics import RangeStatistics


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Seconds and peak memory in GB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated() / 1e9


@torch.no_grad()
def bare(model: Any, batches: list[Batch]) -> None:
    for batch in batches:
        model.model(input_ids=batch.input_ids.to("cuda"), use_cache=False)


def observe_alone(args: argparse.Namespace) -> float:
    """Milliseconds to observe q, k and v of one layer and one batch, without a model."""
    texts = torch.arange(args.batch_size, device="cuda")
    shape = (args.batch_size, args.max_seq_len)
    values, statistics = [], []
    for heads in (32, 8, 8):
        x = torch.randn(*shape, heads, 128, device="cuda", dtype=torch.bfloat16)
        values.append(x.transpose(1, 2))
        statistics.append(RangeStatistics.empty(heads, "cuda"))
        statistics[-1].reserve(args.batch_size)

    def once() -> None:
        for x, kept in zip(values, statistics, strict=True):
            kept.observe(x, texts, None)

    once()
    seconds, _ = timed(lambda: [once() for _ in range(20)])
    return seconds / 20 * 1e3


def example(model: Any, rows: list[list[int]], length: int) -> None:
    """llm-compressor's examples/quantization_kv_cache: its recipe for the KV cache alone."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    recipe = """
    quant_stage:
        quant_modifiers:
            QuantizationModifier:
                kv_cache_scheme:
                    {num_bits: 8, type: float, strategy: tensor, dynamic: false, symmetric: true}
    """
    words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(r) for r in rows]})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
        model.config._name_or_path = model.name_or_path = folder
        oneshot(
            model=model,
            processor=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>"),
            dataset=data,
            recipe=recipe,
            max_seq_length=length,
            num_calibration_samples=len(rows),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--max-seq-len", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--example-samples", type=int, default=64)
    parser.add_argument("--layers", type=int, default=32)
    args = parser.parse_args()
    import transformers

    properties = torch.cuda.get_device_properties(0)
    print(f"{properties.name}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"observing alone: {observe_alone(args):.2f} ms a layer and batch", flush=True)
    model = make_model(args.layers)
    generator = torch.Generator().manual_seed(0)
    shape = (args.samples, args.max_seq_len)
    rows = torch.randint(10, 128_000, shape, generator=generator).tolist()
    batches = [make_batch(rows, texts) for texts in plan_batches(rows, args.batch_size)]
    tokens = args.samples * args.max_seq_len
    calibration_pass(model, batches[:2], Collector(query=True))  # warm: compiles the kernel
    bare(model, batches[:2])
    found = {}
    for name, run in (
        ("bare", lambda: bare(model, batches)),
        ("fp8calib", lambda: calibration_pass(model, batches, Collector(query=True))),
    ):
        seconds, peak = timed(run)
        found[name] = tokens / seconds
        print(f"{name:9} {seconds:7.1f} s {tokens / seconds:9,.0f} tokens/s {peak:6.1f} GB peak")
    print(f"fp8calib runs at {found['fp8calib'] / found['bare']:.3f} of the bare pass", flush=True)
    few = args.example_samples
    ours = [make_batch(rows, texts) for texts in plan_batches(rows[:few], args.batch_size)]
    seconds, _ = timed(lambda: calibration_pass(model, ours, Collector(query=True)))
    print(f"on {few} texts: fp8calib {seconds:.1f} s", flush=True)
    if find_spec("llmcompressor") is not None:
        seconds, peak = timed(lambda: example(model, rows[:few], args.max_seq_len))
        print(f"on {few} texts: llm-compressor's example {seconds:.1f} s, {peak:.1f} GB peak")


if __name__ == "__main__":
    main()
