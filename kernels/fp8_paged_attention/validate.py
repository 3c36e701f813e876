"""Checks of the public functions' arguments: everything that can be seen without reading values,
so that none of them waits for a device."""

from types import ModuleType
from typing import TYPE_CHECKING

import torch

from .layout import DTYPES, GROUP
from .scale import E4M3, get_format

if TYPE_CHECKING:
    from .plan import DecodePlan

ARITHMETICS = ("accurate", "fp8")
BACKENDS = ("triton", "torch")
ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)
INDICES = (torch.int32, torch.int64)


def load_backend(name: str | None, pages: torch.Tensor, v_pages: torch.Tensor) -> ModuleType:
    """The module of the backend called ``name``, or of the one for the K pages' device.

    Raises:
        ValueError: there is no such backend, or it cannot take these pages here.
    """
    if name is None:
        name = "triton" if pages.is_cuda else "torch"
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {name!r}")
    if name == "torch":
        from . import torch_backend

        return torch_backend
    from .device import interpreter_is_on

    if not pages.is_cuda and not interpreter_is_on():
        raise ValueError(f"backend 'triton' needs CUDA tensors, got pages on {pages.device}")
    if pages.dtype != v_pages.dtype:
        raise ValueError(
            "K and V pages of different dtypes are for the torch backend, got "
            f"{pages.dtype} and {v_pages.dtype}"
        )
    if pages.dtype == torch.float32:
        raise ValueError(
            "float32 pages are for the torch backend; triton takes uint8, bfloat16 and float16"
        )
    if pages.shape[2] & (pages.shape[2] - 1):
        raise ValueError(
            f"the triton backend needs a page size that is a power of two, got {pages.shape[2]}"
        )
    try:
        from . import triton_backend
    except ImportError as error:
        raise ValueError(f"backend 'triton' needs the triton package: {error}") from error
    return triton_backend


def check_decodes(num_decodes: int, seq_lens: torch.Tensor) -> None:
    """Raise ValueError unless there are so many sequences."""
    if not 0 <= num_decodes <= seq_lens.shape[0]:
        raise ValueError(
            f"num_decodes must be 0 to {seq_lens.shape[0]}, the number of sequences, "
            f"got {num_decodes}"
        )


def check_plan(
    plan: "DecodePlan",
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seqlen_q: int,
    sliding_window: int | None,
) -> None:
    """Raise ValueError unless the plan was made and updated for such a batch and layer."""
    wanted = (
        plan.num_kv_heads,
        plan.num_q_heads,
        plan.head_dim_v,
        plan.page_dtype,
        plan.num_seqs,
        plan.max_seqlen_q,
        plan.sliding_window,
    )
    got = (
        k_pages.shape[1],
        query.shape[1],
        v_pages.shape[3],
        k_pages.dtype,
        seq_lens.shape[0],
        max_seqlen_q,
        sliding_window,
    )
    names = (
        "num_kv_heads",
        "num_q_heads",
        "head_dim_v",
        "pages",
        "sequences",
        "max_seqlen_q",
        "sliding_window",
    )
    for name, plan_value, value in zip(names, wanted, got, strict=True):
        if plan_value != value:
            raise ValueError(f"the plan is for {name} {plan_value}, got {value}")


def check_store(
    key: torch.Tensor,
    value: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    fp8_format: str,
) -> None:
    """Raise ValueError unless these are arguments of ``store``."""
    _check_pages(k_pages, v_pages)
    num_kv_heads = k_pages.shape[1]
    num_tokens = key.shape[0] if key.dim() else 0
    device = k_pages.device
    _check("key", key, (num_tokens, num_kv_heads, k_pages.shape[3]), ACTIVATIONS, device)
    _check("value", value, (num_tokens, num_kv_heads, v_pages.shape[3]), ACTIVATIONS, device)
    _check("slot_mapping", slot_mapping, (num_tokens,), INDICES, device)
    _check_scales(k_pages, v_pages, fp8_format, k_scale=k_scale, v_scale=v_scale)


def check_attend(
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seqlen_q: int,
    out: torch.Tensor,
    *,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    q_scale: torch.Tensor | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    arithmetic: str,
    fp8_format: str,
) -> None:
    """Raise ValueError unless these are arguments of ``attend``."""
    _check_pages(k_pages, v_pages)
    device = k_pages.device
    _, num_kv_heads, _, head_dim = k_pages.shape
    if query.dim() != 3 or query.shape[1] % num_kv_heads:
        raise ValueError(
            "query must be [num_tokens, num_q_heads, head_dim] with num_q_heads a "
            f"multiple of the {num_kv_heads} KV heads, got {list(query.shape)}"
        )
    num_tokens, num_q_heads, _ = query.shape
    _check("query", query, (num_tokens, num_q_heads, head_dim), (*ACTIVATIONS, E4M3.dtype), device)
    batch = seq_lens.shape[0] if seq_lens.dim() else 0
    if block_table.dim() != 2:
        raise ValueError(f"block_table must be [{batch}, max_pages], got {list(block_table.shape)}")
    _check("block_table", block_table, (batch, block_table.shape[1]), INDICES[:1], device)
    _check("cu_seqlens_q", cu_seqlens_q, (batch + 1,), INDICES[:1], device)
    _check("seq_lens", seq_lens, (batch,), INDICES[:1], device)
    _check("out", out, (num_tokens, num_q_heads, v_pages.shape[3]), ACTIVATIONS, device)
    if sinks is not None:
        _check("sinks", sinks, (num_q_heads,), ACTIVATIONS, device)
    _check_scales(k_pages, v_pages, fp8_format, k_scale=k_scale, v_scale=v_scale, q_scale=q_scale)
    if arithmetic not in ARITHMETICS:
        raise ValueError(f"arithmetic must be one of {ARITHMETICS}, got {arithmetic!r}")
    for pages in (k_pages, v_pages):
        if arithmetic == "fp8" and pages.dtype != torch.uint8:
            raise ValueError(f"arithmetic 'fp8' needs FP8 (uint8) pages, got {pages.dtype}")
    if q_scale is not None and arithmetic != "fp8" and query.dtype != E4M3.dtype:
        raise ValueError(
            "q_scale is for float8 queries or arithmetic 'fp8', got a query of "
            f"{query.dtype} and arithmetic {arithmetic!r}"
        )
    for name, number in (
        ("max_seqlen_q", max_seqlen_q),
        ("sliding_window", sliding_window),
        ("softcap", softcap),
    ):
        if number is not None and not number > 0:
            raise ValueError(f"{name} must be positive, got {number}")


def _check_pages(k_pages: torch.Tensor, v_pages: torch.Tensor) -> None:
    if k_pages.dim() != 4 or v_pages.dim() != 5:
        raise ValueError(
            "k_pages must be [num_pages, num_kv_heads, page_size, head_dim] and "
            f"v_pages [num_pages, num_kv_heads, page_size/{GROUP}, head_dim, {GROUP}]"
            f", got {list(k_pages.shape)} and {list(v_pages.shape)}"
        )
    num_pages, num_kv_heads, page_size, _ = k_pages.shape
    if page_size < GROUP or page_size % GROUP:
        raise ValueError(f"page_size must be a multiple of {GROUP}, got {page_size}")
    _check("k_pages", k_pages, tuple(k_pages.shape), DTYPES, k_pages.device)
    _check(
        "v_pages",
        v_pages,
        (num_pages, num_kv_heads, page_size // GROUP, v_pages.shape[3], GROUP),
        # FP8 beside native is fine, two native dtypes are a mistake.
        DTYPES if k_pages.dtype == torch.uint8 else (k_pages.dtype, torch.uint8),
        k_pages.device,
    )
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if not pages.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {pages.stride()}")
        if pages.data_ptr() % 16:
            raise ValueError(f"{name} must start at a multiple of 16 bytes")


def _check_scales(
    k_pages: torch.Tensor, v_pages: torch.Tensor, fp8_format: str, **scales: torch.Tensor | None
) -> None:
    get_format(fp8_format)
    for name, scale in scales.items():
        if scale is None:
            continue
        pages = v_pages if name == "v_scale" else k_pages
        if pages.dtype != torch.uint8 and name != "q_scale":
            raise ValueError(f"{name} is for FP8 (uint8) pages, got pages of {pages.dtype}")
        shape = (1,) if scale.shape == (1,) else (k_pages.shape[1],)
        _check(name, scale, shape, (torch.float32,), k_pages.device)


def _check(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} like the pages, got {tensor.device}")
    if tensor.numel() and tensor.dim() and tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise ValueError(
            f"{name} must be contiguous in its last axis, got strides {tensor.stride()}"
        )
