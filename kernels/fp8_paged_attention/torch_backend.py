"""Vectorised ``store`` and ``attend`` in torch: the CPU backend, and the arithmetic spelled out.

Sequences with few new tokens (decode) are padded into one batch for each number of new tokens;
a longer chunk of new tokens is attended on its own, so a prompt costs what one call of
scaled_dot_product_attention costs. Softcap, sinks and FP8 arithmetic, which that function cannot
express, take the written-out softmax.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from .layout import GROUP, POSITION, v_to_tokens
from .scale import E4M3, Fp8Format, dequantize, get_format, quantize

MAX_DECODE_TOKENS = 8
"""Sequences with at most this many new tokens share one padded batch."""

P_SCALE = 256.0
"""Probabilities lie in 0..1; times 256 they use e4m3's range as FlashAttention-3 does."""

MAX_SCORES = 1 << 25
"""Scores that the written-out softmax holds at a time (128 MiB of float32)."""


@dataclass(frozen=True)
class Attention:
    """What a layer's attention is, besides its tensors."""

    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    quantize_p: bool


def store(key: torch.Tensor, value: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor,
          slot_mapping: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None,
          *, fp8_format: str) -> None:
    """Write each token's K and V to its slot; see :func:`fp8_paged_attention.store`."""
    if k_pages.dtype == torch.uint8:
        fmt = get_format(fp8_format)
        key, value = quantize(key, k_scale, fmt), quantize(value, v_scale, fmt)
    slots = slot_mapping.long()
    if bool((slots < 0).any()):
        kept = slots >= 0
        slots, key, value = slots[kept], key[kept], value[kept]
    page_size = k_pages.shape[2]
    page, offset = slots // page_size, slots % page_size
    position = torch.tensor(POSITION, device=slots.device)[offset % GROUP]
    k_pages[page, :, offset] = key.to(k_pages.dtype)
    v_pages[page, :, offset // GROUP, :, position] = value.to(v_pages.dtype)


def attend(query: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor,
           block_table: torch.Tensor, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor,
           out: torch.Tensor, *, max_seqlen_q: int, plan: object, k_scale: torch.Tensor | None,
           v_scale: torch.Tensor | None, q_scale: torch.Tensor | None, scale: float,
           sliding_window: int | None, softcap: float | None, sinks: torch.Tensor | None,
           arithmetic: str, fp8_format: str) -> None:
    """Fill ``out``; see :func:`fp8_paged_attention.attend` (needs no plan or bound)."""
    attention = Attention(scale, sliding_window, softcap, sinks, arithmetic == "fp8")
    pages = Pages(k_pages, v_pages, block_table, k_scale, v_scale, get_format(fp8_format))
    query = _query_values(query, q_scale, pages, arithmetic)
    out.zero_()
    starts, lens = cu_seqlens_q.tolist(), seq_lens.tolist()
    by_length: dict[int, list[int]] = {}
    for seq, seq_len in enumerate(lens):
        # A query before the sequence's first token (more queries than tokens) sees nothing.
        new = min(starts[seq + 1] - starts[seq], seq_len)
        if new > MAX_DECODE_TOKENS:
            chunk = slice(starts[seq + 1] - new, starts[seq + 1])
            out[chunk] = _attend_batch(query[None, chunk], pages, [seq], [seq_len], attention)[0]
        elif new > 0:
            by_length.setdefault(new, []).append(seq)
    for new, seqs in by_length.items():
        ends = torch.tensor([starts[seq + 1] for seq in seqs], device=query.device)
        rows = ends[:, None] - new + torch.arange(new, device=query.device)
        result = _attend_batch(query[rows], pages, seqs, [lens[seq] for seq in seqs], attention)
        out[rows] = result.to(out.dtype)


def _query_values(query: torch.Tensor, q_scale: torch.Tensor | None, pages: "Pages",
                  arithmetic: str) -> torch.Tensor:
    """The values that queries `[num_tokens, num_q_heads, head_dim]` stand for, in the dtype to
    compute in: the pages' for native pages, float32 for FP8."""
    if query.dtype != E4M3.dtype and arithmetic == "accurate":
        return query if pages.k.dtype == query.dtype else query.float()
    scale = None if q_scale is None else q_scale[:, None]
    grouped = query.unflatten(1, (pages.k.shape[1], -1))
    codes = grouped.view(torch.uint8) if query.dtype == E4M3.dtype else quantize(grouped, scale)
    return _decode(codes, scale, E4M3).flatten(1, 2)


@dataclass(frozen=True)
class Pages:
    """One layer's cache: pages, block table, scales."""

    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    fmt: Fp8Format

    def gather(self, seqs: list[int], first: list[int], lens: list[int], dtype: torch.dtype,
               ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """K and V of tokens first..len of some sequences, dequantised, from whole pages.

        Returns:
            K `[batch, num_kv_heads, num_keys, head_dim_k]`, V likewise, both with zeros for the
            tokens outside first..len, and the tokens' positions `[batch, num_keys]`.
        """
        _, num_kv_heads, page_size, _ = self.k.shape
        first_page = [start // page_size for start in first]
        width = max(end - page * page_size for end, page in zip(lens, first_page, strict=True))
        device = self.k.device
        seq, end, page0 = torch.tensor([seqs, lens, first_page], device=device)[:, :, None]
        columns = page0 + torch.arange(-(-width // page_size), device=device)
        # Beyond a sequence's last page the table holds anything: read the last page again.
        pages = self.block_table[seq, columns.clamp(max=(end - 1) // page_size)].long()
        heads = torch.arange(num_kv_heads, device=device)[:, None]
        rows = (pages[:, None] * num_kv_heads + heads).flatten()  # batch, head, page
        k = self.k.flatten(0, 1).index_select(0, rows)
        v = v_to_tokens(self.v.flatten(0, 1).index_select(0, rows))
        k, v = (x.view(len(seqs), num_kv_heads, -1, x.shape[-1])[:, :, :width] for x in (k, v))
        for b, page in enumerate(first_page):
            start, stop = first[b] - page * page_size, lens[b] - page * page_size
            for x in (k, v):
                x[b, :, :start] = 0
                x[b, :, stop:] = 0
        positions = page0 * page_size + torch.arange(width, device=device)
        return self._values(k, self.k_scale, dtype), self._values(v, self.v_scale, dtype), positions

    def _values(self, x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype,
                ) -> torch.Tensor:
        """Page entries `[batch, heads, tokens, dim]` as values."""
        if x.dtype != torch.uint8:
            return x.to(dtype)
        return _decode(x, None if scale is None else scale[:, None], self.fmt).to(dtype)


def _attend_batch(query: torch.Tensor, pages: Pages, seqs: list[int], lens: list[int],
                  attention: Attention) -> torch.Tensor:
    """Attend sequences that have equally many new tokens, at most as many as tokens.

    Args:
        query: `[batch, num_new, num_q_heads, head_dim_k]`.

    Returns:
        `[batch, num_new, num_q_heads, head_dim_v]`.
    """
    num_new = query.shape[1]
    window = attention.sliding_window
    first = [0 if window is None else max(0, end - num_new - window + 1) for end in lens]
    k, v, positions = pages.gather(seqs, first, lens, query.dtype)
    num_kv_heads, num_keys = k.shape[1], k.shape[2]
    # [batch, num_kv_heads, group, num_new, head_dim]: heads of a group read the same K and V.
    q = query.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
    written_out = (attention.softcap is not None or attention.sinks is not None
                   or attention.quantize_p)
    # Every query sees every key, or causality is all there is to mask.
    whole = set(lens) == {num_keys} and (window is None or window >= num_keys)
    if whole and num_new in (1, num_keys) and not written_out:
        o = _sdpa(q, k, v, None, attention.scale)
    else:
        last = torch.tensor(lens, device=q.device)[:, None] - num_new
        last = (last + torch.arange(num_new, device=q.device))[:, :, None]
        mask = positions[:, None, :] <= last  # [batch, num_new, num_keys]
        if window is not None:
            mask &= positions[:, None, :] > last - window
        if written_out:
            o = _softmax_attention(q, k, v, mask, attention)
        else:
            o = _sdpa(q, k, v, mask, attention.scale)
    return o.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
          scale: float) -> torch.Tensor:
    """torch's attention; K and V are expanded over the heads of a group without a copy.

    Without a mask there is one query, or one for each key and attention is causal.
    """
    batch, num_kv_heads, group, num_new, _ = q.shape
    k, v = (x.flatten(0, 1)[:, None].expand(-1, group, -1, -1) for x in (k, v))
    if mask is not None:
        mask = mask[:, None].expand(-1, num_kv_heads, -1, -1).flatten(0, 1)[:, None]
    o = F.scaled_dot_product_attention(q.flatten(0, 1), k, v, attn_mask=mask, scale=scale,
                                       is_causal=mask is None and num_new > 1)
    return o.unflatten(0, (batch, num_kv_heads))


def _softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor,
                       attention: Attention) -> torch.Tensor:
    """Attention with softcap, sinks and FP8 probabilities, float32, some query rows at a time."""
    batch, num_kv_heads, group, num_new, _ = q.shape
    dtype = q.dtype
    q, k, v = q.float(), k.float()[:, :, None], v.float()[:, :, None]
    rows = max(1, MAX_SCORES // (batch * num_kv_heads * group * k.shape[3]))
    parts = []
    for start in range(0, num_new, rows):
        s = q[..., start:start + rows, :] @ k.transpose(-1, -2) * attention.scale
        if attention.softcap:
            s = attention.softcap * torch.tanh(s / attention.softcap)
        s = s.masked_fill(~mask[:, None, None, start:start + rows], float("-inf"))
        largest = s.amax(-1, keepdim=True)
        p = torch.exp(s - largest)
        total = p.sum(-1, keepdim=True)
        if attention.sinks is not None:
            sinks = attention.sinks.float().view(num_kv_heads, group, 1, 1)
            total = total + torch.exp(sinks - largest)
        if attention.quantize_p:
            p = _decode(quantize(p * P_SCALE, None), None, E4M3) / P_SCALE
        parts.append(p @ v / total)
    return torch.cat(parts, 3).to(dtype)


def _decode(codes: torch.Tensor, scale: torch.Tensor | None, fmt: Fp8Format) -> torch.Tensor:
    """:func:`scale.dequantize` in float32; on a CPU by table, which is ten times faster."""
    if codes.is_cuda:
        return dequantize(codes, scale, fmt)
    x = _table(fmt).index_select(0, codes.reshape(-1).int()).view(codes.shape)
    return x if scale is None else x.mul_(scale[:, None])


@cache
def _table(fmt: Fp8Format) -> torch.Tensor:
    """The value of each of the 256 codes."""
    return torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
