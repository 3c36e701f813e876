"""Calibration on a CPU beside a bare forward pass and llm-compressor's published KV-cache example.

    python benchmarks/calibrate.py [--samples 64] [--max-seq-len 512] [--repeats 3] [--ranks 2]

All three see the same token rows of SmolLM2-135M-Instruct in the same batches (the example in its
own way, one text a batch). Each measurement runs in a process of its own, so that peak memory is
its own; times are the best of the repeats, and only their ratios mean anything.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

MODEL = "demo:smollm2-135m-instruct"


def rows(samples: int, length: int) -> list[list[int]]:
    """`samples` rows of exactly `length` tokens of the built-in texts, end to end."""
    from fp8calib.data import load_data
    from fp8calib.model_loading import load_tokenizer
    from fp8calib.models import resolve_model

    tokenizer = load_tokenizer(resolve_model(MODEL))
    stream: list[int] = []
    for dataset in ("builtin:pydoc", "builtin:stdlib-code"):
        for row in load_data(tokenizer, dataset, samples=samples, max_seq_len=2048).rows:
            stream += row
    stream *= 1 + samples * length // len(stream)
    return [stream[start * length : (start + 1) * length] for start in range(samples)]


def prepare(args: argparse.Namespace) -> tuple[Any, list[list[int]]]:
    from fp8calib.model_loading import load_model
    from fp8calib.models import resolve_model

    return load_model(resolve_model(MODEL), "cpu", args.dtype), rows(args.samples, args.max_seq_len)


def bare(args: argparse.Namespace) -> float:
    """The model's layers on the same batches, up to the head, with nothing observed."""
    import torch

    from fp8calib.calibration.core import make_batch, plan_batches

    model, texts = prepare(args)
    batches = [make_batch(texts, plan) for plan in plan_batches(texts, args.batch_size)]
    start = time.perf_counter()
    with torch.no_grad():
        for batch in batches:
            model.model(input_ids=batch.input_ids, use_cache=False)
    return time.perf_counter() - start


def fp8calib(args: argparse.Namespace) -> float:
    """fp8calib's pass through oneshot: q, k and v, maxima and histograms of every head."""
    from fp8calib.calibration.core import Collector, make_batch, plan_batches
    from fp8calib.calibration.oneshot import run_oneshot
    from fp8calib.model_loading import load_tokenizer
    from fp8calib.models import resolve_model

    model, texts = prepare(args)
    tokenizer = load_tokenizer(resolve_model(MODEL))
    batches = [make_batch(texts, plan) for plan in plan_batches(texts, args.batch_size)]
    start = time.perf_counter()
    run_oneshot(model, tokenizer, batches, collector=Collector(query=True))
    return time.perf_counter() - start


def ranks(args: argparse.Namespace) -> float:
    """The same pass without oneshot, shared among the processes of torchrun, and merged."""
    import torch.distributed as dist

    from fp8calib.calibration.core import Collector, calibration_pass, make_batch, plan_batches
    from fp8calib.calibration.ranks import merge
    from fp8calib.calibration.ranks import ranks as processes

    with processes() as mine:
        model, texts = prepare(args)
        plan = plan_batches(texts, args.batch_size)[mine.rank :: mine.world_size]
        collector = Collector(query=True)
        if mine.world_size > 1:
            dist.barrier()
        start = time.perf_counter()
        calibration_pass(model, [make_batch(texts, batch) for batch in plan], collector)
        merge(collector.statistics, mine, model.device)
        seconds = time.perf_counter() - start
    if not mine.writes:
        sys.exit()
    return seconds


def example(args: argparse.Namespace) -> float:
    """llm-compressor's examples/quantization_kv_cache: its recipe for the KV cache alone, its
    pipeline and collator, on the same rows."""
    os.environ["LLM_COMPRESSOR_LOG_LEVEL"] = "CRITICAL"
    from datasets import Dataset
    from llmcompressor import oneshot

    from fp8calib.model_loading import load_tokenizer
    from fp8calib.models import resolve_model

    model, texts = prepare(args)
    recipe = """
    quant_stage:
        quant_modifiers:
            QuantizationModifier:
                kv_cache_scheme:
                    {num_bits: 8, type: float, strategy: tensor, dynamic: false, symmetric: true}
    """
    data = Dataset.from_dict({"input_ids": texts, "attention_mask": [[1] * len(t) for t in texts]})
    start = time.perf_counter()
    oneshot(
        model=model,
        processor=load_tokenizer(resolve_model(MODEL)),
        dataset=data,
        recipe=recipe,
        max_seq_length=args.max_seq_len,
        num_calibration_samples=args.samples,
    )
    return time.perf_counter() - start


def measure(name: str, args: argparse.Namespace, processes: int = 1) -> dict[str, float]:
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(processes)]
    command += [__file__, "--one", name]
    for option in ("samples", "max_seq_len", "batch_size", "dtype"):
        command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare_ranks(args: argparse.Namespace) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # of each process, so that only their number differs
    tokens = args.samples * args.max_seq_len
    print(f"{tokens:,} tokens, {args.dtype}, one thread a process, {os.cpu_count()} cores")
    for processes in range(1, args.ranks + 1):
        runs = [measure("ranks", args, processes)["seconds"] for _ in range(args.repeats)]
        print(f"{processes} processes: {tokens / min(runs):8,.0f} tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--max-seq-len", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, help="Processes 1, 2, ... N under torchrun instead.")
    names = ("bare", "fp8calib", "example")
    parser.add_argument("--one", choices=[*names, "ranks"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        seconds = globals()[args.one](args)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "peak_bytes": peak}))
        return
    if args.ranks:
        compare_ranks(args)
        return
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(args.repeats):
        for name in names:  # in turn, so that a busy moment hits all alike
            runs[name].append(measure(name, args))
    tokens = args.samples * args.max_seq_len
    best = {name: min(run["seconds"] for run in runs[name]) for name in names}
    peak = {name: max(run["peak_bytes"] for run in runs[name]) for name in names}
    print(
        f"\n{tokens:,} tokens, {args.dtype}, batches of {args.batch_size}, {os.cpu_count()} cores"
    )
    print(f"{'':10} {'seconds':>9} {'x bare':>8} {'peak MB':>9} {'x bare':>8}")
    for name in names:
        print(
            f"{name:10} {best[name]:9.1f} {best[name] / best['bare']:8.2f} "
            f"{peak[name] / 1e6:9.0f} {peak[name] / peak['bare']:8.2f}"
        )


if __name__ == "__main__":
    main()
