"""Inputs and timing of the kernel benchmarks."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import fp8_paged_attention as fpa
import torch
from fp8_paged_attention.tuning import DecodeConfig

L2_BYTES = 60 << 20
ROTATE_BYTES = 8 * L2_BYTES
K_SCALE, V_SCALE = 0.0125, 0.017


@dataclass(frozen=True)
class Shape:
    """A decode batch."""

    batch: int
    context: int
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    page_size: int = 128
    ragged: bool = False
    dtype: torch.dtype = torch.uint8
    window: int | None = None

    def __str__(self) -> str:
        hq, hkv = self.heads
        return f"{self.batch} x {self.context}, {hq}/{hkv}/{self.head_dim}"

    @property
    def lengths(self) -> list[int]:
        if not self.ragged:
            return [self.context] * self.batch
        low = self.context // 8  # evenly spread over ctx/8..ctx, shuffled
        generator = torch.Generator().manual_seed(1)
        spread = torch.linspace(low, self.context, self.batch).int()
        return spread[torch.randperm(self.batch, generator=generator)].tolist()

    @property
    def kv_bytes(self) -> int:
        tokens = sum(min(n, self.window or n) for n in self.lengths)
        return tokens * self.heads[1] * self.head_dim * 2 * self.dtype.itemsize


def graph_us(calls: list[Callable[[], object]], replays: int = 15) -> float:
    """Median microseconds of one call, the calls captured in a CUDA graph in turn."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    rounds = max(1, 20 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    times = []
    for i in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes a second of a large copy, counting bytes read plus bytes written."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(20):  # not in a graph, where a copy would go to the slower copy engine
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return 2 * source.numel() / statistics.median(times)


def random_pages(num_pages: int, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of random values; which token lies where does not matter to random values."""
    pages = fpa.allocate(
        num_pages,
        shape.heads[1],
        shape.page_size,
        shape.head_dim,
        shape.head_dim,
        shape.dtype,
        "cuda",
    )
    for x, scale in zip(pages, (K_SCALE, V_SCALE), strict=True):
        for part in x.split(max(1, (64 << 20) // x[0].numel())):
            values = torch.randn(part.shape, device="cuda", dtype=torch.bfloat16)
            if shape.dtype == torch.uint8:
                values = (values.float() / scale).clamp(-448, 448).to(fpa.E4M3.dtype)
                part.copy_(values.view(torch.uint8))
            else:
                part.copy_(values)
    return pages


class DecodeBench:
    """Inputs of one shape, several sets of them where one would fit the cache."""

    def __init__(
        self, shape: Shape, arithmetic: str = "accurate", config: DecodeConfig | None = None
    ) -> None:
        self.shape = shape
        tables = [-(-n // shape.page_size) for n in shape.lengths]
        self.sets = max(1, min(32, -(-ROTATE_BYTES // shape.kv_bytes)))
        width = max(tables)
        used = shape.batch * width
        pages = random_pages(used * self.sets, shape)
        order = torch.randperm(used * self.sets, device="cuda").int()
        hq, hkv = shape.heads
        scales = {}
        if shape.dtype == torch.uint8:
            scales = {
                "k_scale": torch.full((hkv,), K_SCALE, device="cuda"),
                "v_scale": torch.full((hkv,), V_SCALE, device="cuda"),
            }
        self.lens = torch.tensor(shape.lengths, dtype=torch.int32, device="cuda")
        self.plan = fpa.DecodePlan(
            *pages,
            num_q_heads=hq,
            max_num_seqs=shape.batch,
            sliding_window=shape.window,
            config=config,
        )
        self.plan.update(self.lens)
        starts = torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda")
        self.args = []
        for table in order.view(self.sets, shape.batch, width):
            query = 2 * torch.randn(shape.batch, hq, shape.head_dim, device="cuda")
            if arithmetic == "fp8":
                scales["q_scale"] = torch.full((hkv,), 1 / 32, device="cuda")
                query = (query * 32).clamp(-448, 448).to(fpa.E4M3.dtype)
            else:
                query = query.bfloat16()
            out = torch.empty(query.shape, dtype=torch.bfloat16, device="cuda")
            self.args.append(
                {
                    "query": query,
                    "k_pages": pages[0],
                    "v_pages": pages[1],
                    "block_table": table,
                    "cu_seqlens_q": starts,
                    "seq_lens": self.lens,
                    "max_seqlen_q": 1,
                    "out": out,
                    "plan": self.plan,
                    "arithmetic": arithmetic,
                    "sliding_window": shape.window,
                    **scales,
                }
            )

    def us(self) -> float:
        return graph_us([lambda a=args: fpa.attend(**a) for args in self.args])

    def plan_us(self) -> float:
        return graph_us([lambda: self.plan.update(self.lens)])

    def error(self) -> float:
        """Relative RMS error of the first and the last sequence."""
        args = self.args[0]
        args["out"].fill_(float("nan"))
        out = fpa.attend(**args)
        num = den = 0.0
        for seq in {0, self.shape.batch - 1}:
            expected = exact(args, seq, self.shape)
            num += (out[seq].double() - expected).pow(2).sum().item()
            den += expected.pow(2).sum().item()
        return (num / den) ** 0.5


def exact(args: dict, seq: int, shape: Shape) -> torch.Tensor:
    """One sequence's output in float64, a KV head at a time."""
    n = shape.lengths[seq]
    pages = args["block_table"][seq, : -(-n // shape.page_size)].long()
    query = args["query"][seq].double().unflatten(0, (shape.heads[1], -1))
    if args["query"].dtype == fpa.E4M3.dtype:
        query = query / 32
    outs = []
    for head in range(shape.heads[1]):
        k, v = fpa.to_nhd(
            args["k_pages"][pages, head : head + 1].contiguous(),
            args["v_pages"][pages, head : head + 1].contiguous(),
        )
        if shape.dtype == torch.uint8:
            k, v = (x.view(fpa.E4M3.dtype) for x in (k, v))
        k, v = (x.flatten(0, 2)[:n].double() for x in (k, v))
        if shape.dtype == torch.uint8:
            k, v = k * args["k_scale"][head].double(), v * args["v_scale"][head].double()
        if shape.window:
            k, v = k[-shape.window :], v[-shape.window :]
        scores = query[head] @ k.T * shape.head_dim**-0.5
        outs.append(scores.softmax(-1) @ v)
    return torch.cat(outs)
