"""The definition of ``store`` and ``attend`` in float64 loops: slow, obviously right, for tests."""

import math

import torch

from .layout import GROUP, POSITION
from .scale import E4M3, Fp8Format, dequantize, get_format, quantize


def store(
    key: torch.Tensor,
    value: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    *,
    fp8_format: str = "e4m3",
) -> None:
    """Write each token's K and V to its slot; see :func:`fp8_paged_attention.store`."""
    fmt = get_format(fp8_format)
    if k_pages.dtype == torch.uint8:
        key = quantize(key, k_scale, fmt)
    if v_pages.dtype == torch.uint8:
        value = quantize(value, v_scale, fmt)
    page_size = k_pages.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        page, offset = divmod(slot, page_size)
        group, in_group = divmod(offset, GROUP)
        k_pages[page, :, offset] = key[token].to(k_pages.dtype)
        v_pages[page, :, group, :, POSITION[in_group]] = value[token].to(v_pages.dtype)


def attend(
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    fp8_format: str = "e4m3",
) -> torch.Tensor:
    """Attention of every query over its sequence's pages, in float64.

    Arguments as in :func:`fp8_paged_attention.attend`. The arithmetic is exact on the dequantised
    values: what both arithmetic modes approximate. For FP8 queries pass the dequantised values.

    Returns:
        `[num_tokens, num_q_heads, head_dim_v]`, float64.
    """
    num_tokens, num_q_heads, head_dim = query.shape
    num_kv_heads, page_size = k_pages.shape[1], k_pages.shape[2]
    head_dim_v = v_pages.shape[3]
    fmt = get_format(fp8_format)
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros(num_tokens, num_q_heads, head_dim_v, dtype=torch.float64)
    starts = cu_seqlens_q.tolist()
    for seq, seq_len in enumerate(seq_lens.tolist()):
        q_start, q_end = starts[seq], starts[seq + 1]
        for token in range(q_start, q_end):
            last = seq_len - q_end + token  # the newest token it may see: itself
            first = 0 if sliding_window is None else max(0, last - sliding_window + 1)
            if last < 0:
                continue
            keys = [divmod(position, page_size) for position in range(first, last + 1)]
            for head in range(num_q_heads):
                kv_head = head * num_kv_heads // num_q_heads
                k = torch.stack(
                    [k_pages[block_table[seq, page], kv_head, offset] for page, offset in keys]
                )
                v = torch.stack(
                    [
                        v_pages[
                            block_table[seq, page],
                            kv_head,
                            offset // GROUP,
                            :,
                            POSITION[offset % GROUP],
                        ]
                        for page, offset in keys
                    ]
                )
                k = _values(k, k_scale, kv_head, fmt)
                v = _values(v, v_scale, kv_head, fmt)
                scores = k @ query[token, head].double() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                largest = scores.max()
                weights = torch.exp(scores - largest)
                total = weights.sum()
                if sinks is not None:
                    total = total + math.exp(sinks[head].item() - largest.item())
                out[token, head] = weights @ v / total
    return out


def _values(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    head: int,
    fmt: Fp8Format = E4M3,
) -> torch.Tensor:
    """One head's page entries `[num_keys, head_dim]` as float64."""
    if x.dtype != torch.uint8:
        return x.double()
    if scale is not None:
        scale = scale[min(head, len(scale) - 1) :][:1]
    return dequantize(x, scale, fmt, torch.float64)
