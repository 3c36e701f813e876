"""Paged attention inputs that the kernel tests share, and where Triton kernels run in tests: on a
CUDA device if there is one, else in Triton's interpreter."""

import os
from dataclasses import dataclass, field
from importlib.metadata import version

import fp8_paged_attention as fpa
import torch
from fp8_paged_attention import reference


def mend_scalars():
    """Let Triton 3.6's interpreter count with scalars of the device: it converts arrays of one
    element by int(), which numpy 2.4 refuses. Triton 3.7 does the same as this."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # read when the kernels are imported, which the package does at first use
    os.environ["TRITON_INTERPRET"] = "1"
    if version("triton").startswith("3.6."):
        mend_scalars()

# Triton's decode on a GPU: plain, explicit for Hopper, and as on a GPU without FP8.
DECODE_KERNELS = ["plain"] if DEVICE == "cpu" else ["plain", "gluon", "without_fp8"]


def select_decode_kernel(name, monkeypatch):
    from fp8_paged_attention import store_pages, triton_backend
    from fp8_paged_attention.device import Hardware

    monkeypatch.setattr(triton_backend, "USE_GLUON", name == "gluon")
    if name == "without_fp8":
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        for module in (store_pages, triton_backend):
            monkeypatch.setattr(module, "hardware", lambda device: Hardware(80, num_sms))


ERROR = {
    # Relative RMS against float64 on the same pages, and the reason for the bound.
    "float32": 1e-5,  # sums of up to a few thousand float32 products
    "accurate": 5e-3,  # bf16 in and out: 2^-9 each, plus the 16-bit-class P
    "fp8": 2.7e-2,  # P in e4m3: its rounding error is 2.6e-2 (RMS) where no few keys dominate
}


def relative_error(out, reference):
    """Relative RMS error; NaN and infinity on either side are an error of infinity."""
    out, reference = out.double().cpu(), reference.double().cpu()
    if not (out.isfinite().all() and reference.isfinite().all()):
        return float("inf")
    return ((out - reference).norm() / reference.norm().clamp(min=1e-30)).item()


@dataclass
class Case:
    """Sequences of given lengths on shuffled pages; everything outside the live tokens is NaN."""

    seq_lens: list
    new_tokens: list
    heads: tuple = (4, 2)  # Hq, Hkv
    dims: tuple = (64, 64)  # Dk, Dv
    page_size: int = 16
    pages_dtype: torch.dtype = torch.uint8
    query_dtype: torch.dtype = torch.float32
    fp8_format: str = "e4m3"
    scales: tuple = ("head", 0.02, 0.5)  # strategy, k_scale, v_scale
    device: str = "cpu"
    seed: int = 0
    tensors: dict = field(init=False)
    scale_args: dict = field(init=False)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)

        def randn(*shape):
            return torch.randn(*shape, generator=generator)

        (num_q_heads, num_kv_heads), (dk, dv) = self.heads, self.dims
        batch, table = len(self.seq_lens), max(-(-n // self.page_size) for n in self.seq_lens) + 1
        num_pages = batch * table + 1
        pages = fpa.allocate(num_pages, num_kv_heads, self.page_size, dk, dv, self.pages_dtype)
        poison = 0x7F if self.pages_dtype == torch.uint8 else float("nan")
        for x in pages:
            x.fill_(poison)
        order = torch.randperm(num_pages, generator=generator)[: batch * table]
        block_table = order.int().view(batch, table)
        self.scale_args = {}
        if self.pages_dtype == torch.uint8:
            strategy, k_scale, v_scale = self.scales
            spread = torch.logspace(0, -2, num_kv_heads) if strategy == "head" else torch.ones(1)
            self.scale_args = {"k_scale": k_scale * spread, "v_scale": v_scale * spread.flip(0)}
        k_std = self.scale_args.get("k_scale", torch.ones(1)) * 16
        v_std = self.scale_args.get("v_scale", torch.ones(1)) * 16
        slots = [
            block_table[b, torch.arange(n) // self.page_size].long() * self.page_size
            + torch.arange(n) % self.page_size
            for b, n in enumerate(self.seq_lens)
        ]
        slots = torch.cat(slots)
        keys = randn(len(slots), num_kv_heads, dk) * k_std[:, None]
        values = randn(len(slots), num_kv_heads, dv) * v_std[:, None]
        # K spans 100x between heads; queries undo that, so that every head's scores deviate by 2.
        query = 2 * randn(sum(self.new_tokens), num_q_heads, dk)
        per_head = k_std.expand(num_kv_heads).repeat_interleave(num_q_heads // num_kv_heads)
        query = (query / per_head[:, None]).to(self.query_dtype)
        fpa.store(keys, values, *pages, slots, **self.scale_args, fp8_format=self.fp8_format)
        starts = torch.tensor([0, *self.new_tokens]).cumsum(0).int()
        self.tensors = {
            "query": query,
            "k_pages": pages[0],
            "v_pages": pages[1],
            "block_table": block_table,
            "cu_seqlens_q": starts,
            "seq_lens": torch.tensor(self.seq_lens).int(),
        }
        self.keys, self.values, self.slots = keys, values, slots
        for group in (self.tensors, self.scale_args):
            for name, tensor in group.items():
                group[name] = tensor.to(self.device)

    def attend(self, **options):
        args = {
            **self.tensors,
            **self.scale_args,
            "fp8_format": self.fp8_format,
            "max_seqlen_q": max(self.new_tokens),
            **options,
        }
        return fpa.attend(**args)

    def reference(self, **options):
        args = {**self.tensors, **self.scale_args, "fp8_format": self.fp8_format, **options}
        args = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in args.items()}
        return reference.attend(**args)
