"""Times prefill on one GPU: chunks of new tokens on cached context.

    python benchmarks/prefill.py               # every table
    python benchmarks/prefill.py main mixed    # some
    python benchmarks/prefill.py --json results.json

Times are medians of CUDA graph replays over two sets of pages. TFLOP/s counts 4 * head_dim for each
query head and visible (query, key) pair. The error is the relative RMS against float64 on the
dequantised values, over rows spread through the chunk; queries of ``fp8 Q`` rows are given in e4m3.
"""

import argparse
import json
from dataclasses import dataclass

import fp8_paged_attention as fpa
import torch
import triton
from kernel_inputs import K_SCALE, V_SCALE, Shape, exact, graph_us, random_pages

PAGE = 128
KINDS = ("fp8, fp8 Q", "fp8", "accurate", "bf16 pages")


@dataclass(frozen=True)
class Chunk:
    """A batch of equal chunks."""

    batch: int
    new: int
    context: int
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128

    def __str__(self) -> str:
        cached = self.context - self.new
        on = f" on {cached}" if cached else ""
        return f"{self.batch} x {self.new}{on}, {self.heads[0]}/{self.heads[1]}/{self.head_dim}"

    @property
    def flops(self) -> float:
        pairs = self.new * (self.context - self.new) + self.new * (self.new + 1) / 2
        return 4.0 * self.head_dim * self.heads[0] * self.batch * pairs


MAIN = [Chunk(1, 4096, 4096), Chunk(1, 16384, 16384), Chunk(4, 8192, 8192), Chunk(1, 2048, 32768)]
HEADS = [
    Chunk(1, 8192, 8192, (hkv * group, hkv), head_dim)
    for head_dim in (64, 128, 256)
    for group, hkv in ((1, 16), (4, 8), (8, 4), (16, 2))
]


def arguments(chunk: Chunk, kind: str, sets: int = 2) -> list[dict]:
    """Arguments of ``attend`` for sets of disjoint pages."""
    hq, hkv = chunk.heads
    dtype = torch.bfloat16 if kind == "bf16 pages" else torch.uint8
    width = -(-chunk.context // PAGE)
    count = chunk.batch * width
    shape = Shape(chunk.batch, chunk.context, chunk.heads, chunk.head_dim, PAGE, dtype=dtype)
    pages = random_pages(count * sets, shape)
    order = torch.randperm(count * sets, device="cuda").int().view(sets, chunk.batch, width)
    query = 2 * torch.randn(chunk.batch * chunk.new, hq, chunk.head_dim, device="cuda")
    options = {}
    if dtype == torch.uint8:
        spread = torch.linspace(0.8, 1.2, hkv, device="cuda")
        options = {"k_scale": K_SCALE * spread, "v_scale": V_SCALE * spread.flip(0)}
        options["arithmetic"] = "accurate" if kind == "accurate" else "fp8"
    if kind.startswith("fp8"):
        options["q_scale"] = torch.full((hkv,), 1 / 32, device="cuda")
    codes = (query * 32).clamp(-448, 448).to(fpa.E4M3.dtype)
    return [
        {
            "query": codes if kind == "fp8, fp8 Q" else query.bfloat16(),
            "k_pages": pages[0],
            "v_pages": pages[1],
            "block_table": table.contiguous(),
            "cu_seqlens_q": torch.arange(chunk.batch + 1, dtype=torch.int32, device="cuda")
            * chunk.new,
            "seq_lens": torch.full((chunk.batch,), chunk.context, dtype=torch.int32, device="cuda"),
            "max_seqlen_q": chunk.new,
            **options,
        }
        for table in order
    ]


def error_of(chunk: Chunk, args: dict) -> float:
    """Relative RMS error of rows of the first sequence."""
    out = fpa.attend(**args)
    num = den = 0.0
    for row in torch.linspace(0, chunk.new - 1, 8).int().tolist():
        seen = chunk.context - chunk.new + row + 1
        shape = Shape(1, seen, chunk.heads, chunk.head_dim, PAGE, dtype=args["k_pages"].dtype)
        expected = exact({**args, "query": args["query"][row : row + 1]}, 0, shape)
        num += (out[row].double() - expected).pow(2).sum().item()
        den += expected.pow(2).sum().item()
    return (num / den) ** 0.5


def measure(chunk: Chunk, kind: str) -> dict:
    sets = arguments(chunk, kind)
    us = graph_us([lambda a=args: fpa.attend(**a) for args in sets], 9)
    row = {"chunk": str(chunk), "kind": kind, "us": us, "TFLOP/s": chunk.flops / us / 1e6}
    row["error"] = error_of(chunk, sets[0])
    del sets
    torch.cuda.empty_cache()
    return row


def table_main() -> list[dict]:
    return [measure(chunk, kind) for chunk in MAIN for kind in KINDS]


def table_heads() -> list[dict]:
    kinds = [kind for kind in KINDS if kind != "fp8"]
    return [measure(chunk, kind) for chunk in HEADS for kind in kinds]


def table_mixed() -> list[dict]:
    """62 sequences that decode on 8,192 tokens and one chunk of 2,048 tokens."""
    decodes = arguments(Chunk(62, 1, 8192), "accurate")
    chunks = arguments(Chunk(1, 2048, 2048), "accurate")
    pages = decodes[0]["k_pages"], decodes[0]["v_pages"]
    plan = fpa.DecodePlan(*pages, num_q_heads=32, max_num_seqs=62)
    plan.update(decodes[0]["seq_lens"])
    both = []
    for decode, chunk in zip(decodes, chunks, strict=True):
        decode["plan"] = plan
        table = torch.zeros(63, 64, dtype=torch.int32, device="cuda")
        table[:62], table[62, :16] = decode["block_table"], decode["block_table"][0, :16]
        starts = torch.tensor([*range(63), 62 + 2048], dtype=torch.int32, device="cuda")
        both.append(
            {
                **decode,
                "query": torch.cat([decode["query"], chunk["query"]]),
                "block_table": table,
                "cu_seqlens_q": starts,
                "seq_lens": torch.cat([decode["seq_lens"], chunk["seq_lens"]]),
                "max_seqlen_q": 2048,
                "num_decodes": 62,
            }
        )
    times = [
        graph_us([lambda a=args: fpa.attend(**a) for args in sets], 15)
        for sets in (decodes, chunks, both)
    ]
    names = ("decode us", "prefill us", "together us")
    return [dict(zip(names, times, strict=True)) | {"x sum": times[2] / (times[0] + times[1])}]


TABLES = {"main": table_main, "heads": table_heads, "mixed": table_mixed}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], default=[])
    parser.add_argument("--json", help="write all rows to this file")
    args = parser.parse_args()
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    print(machine, flush=True)
    results: dict[str, object] = {"machine": machine}
    for name in args.tables or TABLES:
        print(f"-- {name}", flush=True)
        rows = TABLES[name]()
        for row in rows:
            cells = [f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()]
            print("  ".join(f"{k} {v}" for k, v in zip(row, cells, strict=True)), flush=True)
        results[name] = rows
        if args.json:
            with open(args.json, "w") as file:
                json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
