"""Times the kernels on one GPU, beside the time that copying the same bytes takes.

    python benchmarks/kernels.py                     # every table
    python benchmarks/kernels.py decode ragged       # some
    python benchmarks/kernels.py tune                # decode configs, to fill tuning.py
    python benchmarks/kernels.py --json results.json

A measurement replays a CUDA graph of many calls that rotate over inputs larger than the L2 cache,
with pages scattered over the pool; the median of the replays divided by the calls is one call's
time. ``% of copy`` is the time of copying K and V once at the measured rate over the time taken;
it can pass 100, because reading is faster than copying. The error is the relative RMS against
float64 on the dequantised values. The plan of a decode step is made once for all layers, so its
time stands in a line of its own.
"""

import argparse
import contextlib
import json
import multiprocessing
import statistics
import time
from dataclasses import replace

import fp8_paged_attention as fpa
import torch
import torch.nn.functional as F
import triton
from fp8_paged_attention.tuning import DecodeConfig
from kernel_inputs import (
    K_SCALE,
    ROTATE_BYTES,
    V_SCALE,
    DecodeBench,
    Shape,
    copy_rate,
    graph_us,
    random_pages,
)

DECODE = [
    Shape(1, 32768),
    Shape(8, 8192),
    Shape(64, 4096),
    Shape(256, 2048),
    Shape(16, 32768, heads=(64, 8)),
    Shape(64, 4096, heads=(9, 3), head_dim=64),
    Shape(32, 8192, heads=(16, 16)),
    Shape(1, 131072),
]
RAGGED = [replace(shape, ragged=True) for shape in (DECODE[1], DECODE[2], DECODE[3])]


def sdpa_us(shape: Shape) -> float:
    """torch's attention over contiguous bfloat16 K and V of equal lengths."""
    hq, hkv = shape.heads
    sets = max(1, -(-ROTATE_BYTES // (2 * shape.kv_bytes)))
    calls = []
    for _ in range(min(sets, 8)):
        q = torch.randn(shape.batch, hq, 1, shape.head_dim, device="cuda", dtype=torch.bfloat16)
        k, v = (
            torch.randn(
                shape.batch, hkv, shape.context, shape.head_dim, device="cuda", dtype=torch.bfloat16
            )
            for _ in range(2)
        )
        calls.append(
            lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, enable_gqa=hq != hkv)
        )
    return graph_us(calls)


def bench_decode(shapes: list[Shape], rate: float, with_sdpa: bool = False) -> list[dict]:
    rows = []
    for shape in shapes:
        bench = DecodeBench(shape)
        us, error, plan_us = bench.us(), bench.error(), bench.plan_us()
        del bench
        row = {
            "shape": str(shape),
            "page": shape.page_size,
            "us": us,
            "% of copy": 100 * shape.kv_bytes / rate * 1e6 / us,
            "error": error,
            "plan us": plan_us,
        }
        if shape.dtype == torch.uint8 and not shape.window:
            bench = DecodeBench(shape, "fp8")
            row |= {"fp8 us": bench.us(), "fp8 error": bench.error()}
            del bench
        if with_sdpa:
            row["sdpa bf16 us"] = sdpa_us(shape)
        torch.cuda.empty_cache()
        rows.append(row)
        print(format_row(row), flush=True)
    return rows


def table_decode(rate: float) -> list[dict]:
    return bench_decode(DECODE, rate, with_sdpa=True)


def table_ragged(rate: float) -> list[dict]:
    return bench_decode(RAGGED, rate)


def table_pages(rate: float) -> list[dict]:
    return bench_decode(
        [replace(shape, page_size=page) for page in (64, 32, 16) for shape in DECODE], rate
    )


def table_native(rate: float) -> list[dict]:
    return bench_decode([replace(shape, dtype=torch.bfloat16) for shape in DECODE], rate)


def table_window(rate: float) -> list[dict]:
    return bench_decode(
        [
            Shape(batch, context, window=window)
            for batch in (1, 8)
            for context, window in ((131072, 1024), (1024, None))
        ],
        rate,
    )


def table_store(rate: float) -> list[dict]:
    """Prefill of 8,192 tokens, and one decode step with a cold cache, above launch cost."""
    shape = Shape(1, 1)
    pages = random_pages(65536, shape)
    scales = [torch.full((8,), scale, device="cuda") for scale in (K_SCALE, V_SCALE)]

    def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.randn(tokens, 8, 128, device="cuda", dtype=torch.bfloat16),
            torch.randn(tokens, 8, 128, device="cuda", dtype=torch.bfloat16),
        )

    rows = []
    for tokens in (512, 2048, 8192):
        calls = []
        for _ in range(8):
            order = torch.randperm(65536, device="cuda")[: tokens // 128]
            slots = (order[:, None] * 128 + torch.arange(128, device="cuda")).flatten()
            args = (*inputs(tokens), *pages, slots, *scales)
            calls.append(lambda a=args: fpa.store(*a))
        us = graph_us(calls)
        floor = tokens * 8 * 128 * 6 / rate * 1e6
        rows.append(
            {"store": f"prefill {tokens}", "us": us, "floor us": floor, "x floor": us / floor}
        )
        print(format_row(rows[-1]), flush=True)
    flush = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    nothing = torch.full((1,), -1, dtype=torch.int64, device="cuda")

    def cold_us(args: tuple) -> float:
        times = []
        for step in range(24):
            flush.add_(1)
            key, value, first = args
            slots = first + step if first is not nothing else first
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(400_000)
            start.record()
            fpa.store(key, value, *pages, slots, *scales)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return statistics.median(times[4:])

    launch = cold_us((*inputs(1), nothing))
    for batch in (1, 64, 256, 1024):
        first = torch.randperm(65536, device="cuda")[:batch] * 128
        us = cold_us((*inputs(batch), first)) - launch
        rows.append({"store": f"decode {batch}, cold", "us": us, "launch us": launch})
        print(format_row(rows[-1]), flush=True)
    return rows


def table_launch(rate: float) -> list[dict]:
    """Host time of one call without a graph, and decode together with its append."""
    bench = DecodeBench(Shape(1, 128))
    key = torch.randn(1, 8, 128, device="cuda", dtype=torch.bfloat16)
    slots = torch.zeros(1, dtype=torch.int64, device="cuda")
    args = bench.args[0]
    rows = []
    for name, call in (
        ("attend", lambda: fpa.attend(**args)),
        (
            "store",
            lambda: fpa.store(
                key, key, args["k_pages"], args["v_pages"], slots, args["k_scale"], args["v_scale"]
            ),
        ),
    ):
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            call()
        us = (time.perf_counter() - start) / 200 * 1e6
        torch.cuda.synchronize()
        rows.append({"launch": name, "us": us})
        print(format_row(rows[-1]), flush=True)
    shape = Shape(256, 2048)
    bench = DecodeBench(shape)
    key, value = (torch.randn(256, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    slots = [args["block_table"][:, -1].long() * 128 + 127 for args in bench.args]

    def both(args: dict, slots: torch.Tensor) -> None:
        fpa.store(
            key, value, args["k_pages"], args["v_pages"], slots, args["k_scale"], args["v_scale"]
        )
        fpa.attend(**args)

    us = graph_us([lambda a=a, s=s: both(a, s) for a, s in zip(bench.args, slots, strict=True)])
    rows.append({"decode and append": str(shape), "us": us})
    print(format_row(rows[-1]), flush=True)
    return rows


SHORT = [Shape(32, 300), Shape(64, 300), Shape(128, 300), Shape(64, 1100)]
TUNE_SHAPES = [DECODE[0], DECODE[2], DECODE[3], DECODE[5], RAGGED[1], *SHORT]
TUNE_CONFIGS = [
    DecodeConfig(tile, stages, programs)
    for tile, stages, programs in (
        (128, 3, 2),
        (128, 2, 2),
        (64, 3, 3),
        (64, 3, 4),
        (64, 4, 3),
        (64, 5, 2),
        (128, 3, 3),
    )
]


def table_tune(rate: float) -> list[dict]:
    rows = []
    for shape in TUNE_SHAPES:
        for config in TUNE_CONFIGS:
            row = {
                "shape": str(shape),
                "ragged": shape.ragged,
                "tile": config.tile,
                "stages": config.num_stages,
                "programs": config.programs_per_sm,
            }
            try:
                bench = DecodeBench(shape, config=config)
                row |= {"us": bench.us(), "error": bench.error()}
            except triton.runtime.errors.OutOfResources as error:
                row["us"] = str(error)[:60]
            bench = None
            torch.cuda.empty_cache()
            rows.append(row)
            print(format_row(row), flush=True)
    return rows


TABLES = {
    "decode": table_decode,
    "ragged": table_ragged,
    "pages": table_pages,
    "native": table_native,
    "window": table_window,
    "store": table_store,
    "launch": table_launch,
    "tune": table_tune,
}


def format_row(row: dict) -> str:
    return "  ".join(
        f"{name} {value:.2e}"
        if "error" in name and isinstance(value, float)
        else f"{name} {value:.1f}"
        if isinstance(value, float)
        else f"{name} {value}"
        for name, value in row.items()
    )


def compile_one(job: tuple) -> None:
    """Fill triton's cache for one variant, in a process of its own."""
    shape, arithmetic, config = job
    with contextlib.suppress(triton.runtime.errors.OutOfResources):
        DecodeBench(shape, arithmetic, config).error()


def compile_all(tables: list[str], processes: int) -> None:
    """Compile what the tables need beforehand, many at a time."""
    jobs: dict[tuple, None] = {}

    def add(shape: Shape, arithmetic: str, config: DecodeConfig | None = None) -> None:
        jobs[(replace(shape, context=300, batch=2, ragged=False), arithmetic, config)] = None

    for table in tables:
        for shape in DECODE:
            if table in ("decode", "ragged"):
                add(shape, "accurate")
                add(shape, "fp8")
            if table == "native":
                add(replace(shape, dtype=torch.bfloat16), "accurate")
            if table == "pages":
                for page in (64, 32, 16):
                    add(replace(shape, page_size=page), "accurate")
                    add(replace(shape, page_size=page), "fp8")
        if table == "window":
            add(replace(DECODE[0], window=1024), "accurate")
        if table == "tune":
            for shape in TUNE_SHAPES:
                for config in TUNE_CONFIGS:
                    add(shape, "accurate", config)
    with multiprocessing.get_context("spawn").Pool(min(processes, len(jobs) or 1)) as pool:
        pool.map(compile_one, list(jobs), chunksize=1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], default=[])
    parser.add_argument("--json", help="write all rows to this file")
    parser.add_argument("--processes", type=int, default=8, help="compile with so many processes")
    args = parser.parse_args()
    tables = args.tables or [name for name in TABLES if name != "tune"]
    compile_all(tables, args.processes)
    rate = copy_rate()
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy GB/s": rate / 1e9,
    }
    print(format_row(machine), flush=True)
    results: dict[str, object] = {"machine": machine}
    for name in tables:
        print(f"-- {name}", flush=True)
        results[name] = TABLES[name](rate)
        if args.json:
            with open(args.json, "w") as file:
                json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
