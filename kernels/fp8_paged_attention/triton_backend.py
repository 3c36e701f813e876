"""Triton behind the public functions: what depends on the arguments is decided here, kernels
compute."""

from typing import Any

import torch
import triton
import triton.language as tl

from .decode import _decode_kernel, _join_kernel
from .device import Hardware, hardware
from .plan import DecodePlan
from .prefill import _prefill_kernel
from .scale import E4M3, get_format
from .store_pages import scale_stride, store

__all__ = ["Plan", "attend", "store"]

Plan = DecodePlan

LOG2E = 1.4426950408889634
MAX_DECODE_TOKENS = 8
"""With at most so many new tokens a sequence, a batch is decoded; else it is prefilled."""

GLUON_TESTED = ((3, 6), (3, 9))
"""First and last release of Triton that the kernels in Gluon were tested with."""

USE_GLUON = True
"""Whether Hopper has kernels of its own (False: plain Triton's, to compare them)."""

ACCURATE, FP8, WIDE = 0, 1, 2
JOINED_PIECES = 64


def attend(
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    max_seqlen_q: int,
    num_decodes: int,
    plan: DecodePlan | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    q_scale: torch.Tensor | None,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    arithmetic: str,
    fp8_format: str,
) -> None:
    """Fill ``out``; see :func:`fp8_paged_attention.attend`."""
    if query.shape[0] == 0 or seq_lens.shape[0] == 0:
        return
    if 0 < num_decodes < seq_lens.shape[0]:
        options: dict[str, Any] = {
            "k_scale": k_scale,
            "v_scale": v_scale,
            "q_scale": q_scale,
            "scale": scale,
            "sliding_window": sliding_window,
            "softcap": softcap,
            "sinks": sinks,
            "arithmetic": arithmetic,
            "fp8_format": fp8_format,
            "num_decodes": 0,
        }
        for part, longest, its_plan in (
            (slice(0, num_decodes), 1, plan),
            (slice(num_decodes, None), max_seqlen_q, None),
        ):
            attend(
                query,
                k_pages,
                v_pages,
                block_table[part],
                cu_seqlens_q[part.start :],
                seq_lens[part],
                out,
                max_seqlen_q=longest,
                plan=its_plan,
                **options,
            )
        return
    machine = hardware(k_pages.device)
    num_kv_heads, page_size, head_dim_k = k_pages.shape[1:]
    head_dim_v = v_pages.shape[3]
    fp8_pages = k_pages.dtype == torch.uint8
    if fp8_pages and machine.has_fp8:
        fmt = get_format(fp8_format)
        k_pages, v_pages = k_pages.view(fmt.dtype), v_pages.view(fmt.dtype)
    fp8_query = query.dtype == E4M3.dtype
    if fp8_query and not machine.has_fp8:
        query = query.view(torch.uint8)
    tensors = (query, k_pages, v_pages, out)
    layer = (
        block_table,
        seq_lens,
        cu_seqlens_q,
        k_pages if k_scale is None else k_scale,
        v_pages if v_scale is None else v_scale,
        query if q_scale is None else q_scale,
        query if sinks is None else sinks,
        scale * LOG2E if softcap is None else scale / softcap,
        0.0 if softcap is None else softcap * LOG2E,
        sliding_window or 0,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        block_table.stride(0),
        scale_stride(k_scale),
        scale_stride(v_scale),
        scale_stride(q_scale),
    )
    constants: dict[str, Any] = {
        "HEADS": num_kv_heads,
        "GROUP": query.shape[1] // num_kv_heads,
        "DK": head_dim_k,
        "DV": head_dim_v,
        "PAGE": page_size,
        "DK_PAD": triton.next_power_of_2(head_dim_k),
        "DV_PAD": triton.next_power_of_2(head_dim_v),
        "FORMAT": (1 if fp8_format == "e4m3" else 2) if fp8_pages else 0,
        "Q_FP8": fp8_query,
        "K_SCALE": k_scale is not None,
        "V_SCALE": v_scale is not None,
        "Q_SCALE": q_scale is not None,
        "SOFTCAP": softcap is not None,
        "SINKS": sinks is not None,
        "WINDOW": sliding_window is not None,
        "CAST": machine.has_fp8,
    }
    if max_seqlen_q > MAX_DECODE_TOKENS:
        tile = hopper_prefill_tile(k_pages, v_pages) if has_gluon(machine) and scale > 0 else None
        if tile is None:
            _prefill(tensors, layer, constants, max_seqlen_q, arithmetic, machine)
        else:
            _prefill_hopper(tensors, layer, constants, max_seqlen_q, arithmetic, machine, tile)
        return
    if plan is None:
        plan = DecodePlan(
            k_pages,
            v_pages,
            num_q_heads=query.shape[1],
            max_num_seqs=len(seq_lens),
            max_seqlen_q=max_seqlen_q,
            sliding_window=sliding_window,
        )
        plan.update(seq_lens)
    _decode(tensors, layer, constants, plan, arithmetic, machine)


def _decode(
    tensors: tuple,
    layer: tuple,
    constants: dict[str, Any],
    plan: DecodePlan,
    arithmetic: str,
    machine: Hardware,
) -> None:
    """Launch the decode kernel, and the one that joins what the plan has cut."""
    query, k_pages, v_pages, out = tensors
    starts, sinks = layer[2], layer[6]
    mode = decode_mode(constants["FORMAT"], arithmetic, machine)
    kernel, smallest = decode_kernel(
        mode, (constants["DK_PAD"], constants["DV_PAD"]), plan.config.tile, machine
    )
    columns = constants["GROUP"] * plan.max_seqlen_q
    width = column_block(columns, constants["DV_PAD"], smallest)
    pdl = {"launch_pdl": True} if machine.has_pdl else {}
    kernel[(plan.grid, triton.cdiv(columns, width))](
        query,
        k_pages,
        v_pages,
        out,
        plan.partial,
        plan.partial_lse,
        plan.entries,
        layer[0],
        *layer[2:],
        **constants,
        MAX_NEW=plan.max_seqlen_q,
        COLUMNS=width,
        TILE=plan.config.tile,
        STAGES=plan.config.num_stages,
        MODE=mode,
        DOT=dot_dtype(k_pages.dtype, machine),
        QUANTIZE=mode == WIDE and arithmetic == "fp8",
        PDL=machine.has_pdl,
        num_warps=plan.config.num_warps,
        **pdl,
    )
    _join_kernel[(plan.join_grid, columns)](
        out,
        plan.partial,
        plan.partial_lse,
        plan.pairs,
        starts,
        sinks,
        out.stride(0),
        out.stride(1),
        GROUP=constants["GROUP"],
        MAX_NEW=plan.max_seqlen_q,
        DV=constants["DV"],
        DV_PAD=constants["DV_PAD"],
        PIECES=JOINED_PIECES,
        SINKS=constants["SINKS"],
        PDL=machine.has_pdl,
        num_warps=4,
        **pdl,
    )


def decode_kernel(
    mode: int,
    head_dims: tuple[int, int],
    tile: int,
    machine: Hardware,
) -> tuple[Any, int]:
    """The kernel to decode with here, and the fewest columns it takes."""
    if has_gluon(machine) and min(head_dims) >= 64 and tile >= 64:
        from .decode_hopper import _decode_hopper_kernel

        return _decode_hopper_kernel, 8
    return _decode_kernel, 8 if mode == ACCURATE else 16


def has_gluon(machine: Hardware) -> bool:
    """Whether the kernels for Hopper run here."""
    release = tuple(int(x) for x in triton.__version__.split(".")[:2])
    return USE_GLUON and machine.arch == 90 and GLUON_TESTED[0] <= release <= GLUON_TESTED[1]


def hopper_prefill_tile(k_pages: torch.Tensor, v_pages: torch.Tensor) -> int | None:
    """Tokens of a tile of prefill_hopper.py's kernel; None if it has no kernel for such pages."""
    page_size, head_dims = k_pages.shape[2], {k_pages.shape[3], v_pages.shape[3]}
    if not head_dims <= {64, 128, 256} or k_pages.numel() // min(head_dims) >= 2**31:
        return None
    if k_pages.element_size() == 1 and max(head_dims) <= 128:
        return 128
    # A row of K over 128 bytes lies in several parts of a tile, which a smaller page cannot fill.
    if page_size < 64 or (k_pages.element_size() == 2 and max(head_dims) == 256):
        return None
    return 64 if max(head_dims) == 256 else min(page_size, 128)


def _prefill_hopper(
    tensors: tuple,
    layer: tuple,
    constants: dict[str, Any],
    max_seqlen_q: int,
    arithmetic: str,
    machine: Hardware,
    tile: int,
) -> None:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .prefill_hopper import BLOCK, PrefillConfig, _prefill_hopper_kernel

    query, k_pages, v_pages, out = tensors
    block_table, seq_lens, starts, *others = layer
    wide = constants["FORMAT"] == 0 or arithmetic == "accurate"
    config = PrefillConfig(
        head_dim_k=constants["DK"],
        head_dim_v=constants["DV"],
        page_size=constants["PAGE"],
        tile=tile,
        box=min(tile, constants["PAGE"]),
        stages=2 if wide else 3,
        fp8_pages=constants["FORMAT"] != 0,
        wide=wide,
        fp8_query=constants["Q_FP8"],
        k_scale=constants["K_SCALE"],
        v_scale=constants["V_SCALE"],
        q_scale=constants["Q_SCALE"],
        softcap=constants["SOFTCAP"],
        sinks=constants["SINKS"],
        window=constants["WINDOW"],
    )
    bits, row = 8 * config.bytes, config.head_dim_k * config.bytes
    k_desc = TensorDescriptor.from_tensor(
        k_pages.view(-1, config.head_dim_k),
        [config.box, config.head_dim_k],
        gl.NVMMASharedLayout(min(row, 128), bits, 2),
    )
    v_row = 128 // config.bytes  # what lies together may be cut anyhow
    v_desc = TensorDescriptor.from_tensor(
        v_pages.view(-1, v_row),
        [config.box * config.head_dim_v // v_row, v_row],
        gl.NVMMASharedLayout(0, bits, 2),
    )
    num_blocks = triton.cdiv(max_seqlen_q, BLOCK.value)
    num_sequences, q_heads = seq_lens.shape[0], query.shape[1]
    _prefill_hopper_kernel[(min(machine.num_sms, num_blocks * num_sequences * q_heads),)](
        k_desc,
        v_desc,
        query,
        out,
        block_table,
        seq_lens,
        starts,
        *others,
        num_blocks,
        num_sequences,
        q_heads,
        constants["GROUP"],
        config,
        num_warps=4,
    )


def _prefill(
    tensors: tuple,
    layer: tuple,
    constants: dict[str, Any],
    max_seqlen_q: int,
    arithmetic: str,
    machine: Hardware,
) -> None:
    query, k_pages, _, _ = tensors
    tile_q = 16 if machine.interpreted else 64 if constants["DV_PAD"] <= 128 else 32
    grid = (triton.cdiv(max_seqlen_q, tile_q), query.shape[1], layer[1].shape[0])
    _prefill_kernel[grid](
        *tensors,
        *layer,
        **constants,
        TILE_Q=tile_q,
        TILE=32 if constants["DV_PAD"] > 128 or machine.interpreted else 64,
        DOT=dot_dtype(k_pages.dtype, machine),
        QUANTIZE=arithmetic == "fp8",
        num_warps=4,
        num_stages=2,
    )


def decode_mode(page_format: int, arithmetic: str, machine: Hardware) -> int:
    """The decode kernel's MODE: FP8 matrix instructions where there are any."""
    if page_format == 0 or not (machine.has_fp8 or machine.interpreted):
        return WIDE
    return FP8 if arithmetic == "fp8" else ACCURATE


def column_block(columns: int, head_dim: int, smallest: int) -> int:
    """Columns of a program: a power of two; the accurate mode doubles it."""
    largest = 32 if head_dim <= 128 else 16
    return min(max(triton.next_power_of_2(columns), smallest), largest)


def dot_dtype(pages: torch.dtype, machine: Hardware) -> tl.dtype:
    """The 16-bit dtype of matrix operands; the interpreter multiplies no bfloat16."""
    if pages == torch.bfloat16:
        return tl.float32 if machine.interpreted else tl.bfloat16
    return tl.float16
