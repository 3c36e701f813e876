"""Vectorised ``store`` and ``attend`` in torch: the CPU backend, and the arithmetic spelled out.

Sequences with few new tokens (decode) are padded into one batch for each number of new tokens and
attended in the order in which the pages hold V, since putting V's tokens in order takes longer than
all the rest. A longer chunk of new tokens is attended on its own, so a prompt costs what one call
of scaled_dot_product_attention costs. Softcap, sinks and FP8 arithmetic, which that function cannot
express, take the written-out softmax.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from .layout import GROUP, POSITION, TOKEN, v_to_tokens
from .scale import E4M3, Fp8Format, dequantize, get_format, quantize

MAX_DECODE_TOKENS = 8
"""Sequences with at most this many new tokens share one padded batch."""

FEW = 4
"""Up to so many tokens or sequences, a loop costs less than the tensors that index them all."""

P_SCALE = 256.0
"""Probabilities lie in 0..1; times 256 they use e4m3's range as FlashAttention-3 does."""

MAX_GATHERED = 1 << 20
"""Bytes of K in float32 that sequences of a batch may have together."""

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


def store(
    key: torch.Tensor,
    value: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    *,
    fp8_format: str,
) -> None:
    """Write each token's K and V to its slot; see :func:`fp8_paged_attention.store`."""
    fmt = get_format(fp8_format)
    if k_pages.dtype == torch.uint8:
        key = quantize(key, k_scale, fmt)
    if v_pages.dtype == torch.uint8:
        value = quantize(value, v_scale, fmt)
    page_size = k_pages.shape[2]
    if len(slot_mapping) <= FEW:
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                page, offset = divmod(slot, page_size)
                k_pages[page, :, offset] = key[token]
                v_pages[page, :, offset // GROUP, :, POSITION[offset % GROUP]] = value[token]
        return
    slots = slot_mapping.long()
    if bool((slots < 0).any()):
        kept = slots >= 0
        slots, key, value = slots[kept], key[kept], value[kept]
    page, offset = slots // page_size, slots % page_size
    position = torch.tensor(POSITION, device=slots.device)[offset % GROUP]
    k_pages[page, :, offset] = key.to(k_pages.dtype)
    v_pages[page, :, offset // GROUP, :, position] = value.to(v_pages.dtype)


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
    plan: object,
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
    """Fill ``out``; see :func:`fp8_paged_attention.attend` (needs no plan, bound or number
    of decodes)."""
    attention = Attention(scale, sliding_window, softcap, sinks, arithmetic == "fp8")
    pages = Pages(k_pages, v_pages, block_table, k_scale, v_scale, get_format(fp8_format))
    query = _query_values(query, q_scale, pages, arithmetic)
    starts, lens = cu_seqlens_q.tolist(), seq_lens.tolist()
    if max_seqlen_q == 1 and lens and len(query) == len(lens) == starts[-1] and 0 not in lens:
        for seqs in _alike(range(len(lens)), lens, pages, attention):
            if len(seqs) == len(lens):
                out.copy_(_attend_few(query[:, None], pages, seqs, lens, attention)[:, 0])
                return
            few = _attend_few(query[seqs, None], pages, seqs, [lens[i] for i in seqs], attention)
            out[seqs] = few[:, 0].to(out.dtype)
        return
    out.zero_()
    by_length: dict[int, list[int]] = {}
    for seq, seq_len in enumerate(lens):
        # A query before the sequence's first token (more queries than tokens) sees nothing.
        new = min(starts[seq + 1] - starts[seq], seq_len)
        if new > MAX_DECODE_TOKENS:
            chunk = slice(starts[seq + 1] - new, starts[seq + 1])
            out[chunk] = _attend_chunk(query[chunk], pages, seq, seq_len, attention)
        elif new > 0:
            by_length.setdefault(new, []).append(seq)
    for new, equal in by_length.items():
        for seqs in _alike(equal, lens, pages, attention):
            ends = torch.tensor([starts[seq + 1] for seq in seqs], device=query.device)
            rows = ends[:, None] - new + torch.arange(new, device=query.device)
            result = _attend_few(query[rows], pages, seqs, [lens[seq] for seq in seqs], attention)
            out[rows] = result.to(out.dtype)


def _alike(
    seqs: Sequence[int], lens: list[int], pages: "Pages", attention: Attention
) -> Iterator[list[int]]:
    """Sequences in batches: padded to the longest of its batch, none is more than doubled, and what
    is gathered for a batch stays in a CPU's cache."""
    window = attention.sliding_window or max(lens)
    _, num_kv_heads, _, head_dim = pages.k.shape
    most = MAX_GATHERED // (4 * num_kv_heads * head_dim)
    batch: list[int] = []
    for seq in sorted(seqs, key=lens.__getitem__, reverse=True):
        longest = min(lens[batch[0]], window) if batch else 0
        if batch and (2 * lens[seq] < longest or (len(batch) + 1) * longest > most):
            yield sorted(batch)
            batch = []
        batch.append(seq)
    yield sorted(batch)


def _query_values(
    query: torch.Tensor, q_scale: torch.Tensor | None, pages: "Pages", arithmetic: str
) -> torch.Tensor:
    """The values that queries `[num_tokens, num_q_heads, head_dim]` stand for, in the dtype to
    compute in: the pages' for native pages, float32 for FP8."""
    if query.dtype != E4M3.dtype and arithmetic == "accurate":
        return query if pages.k.dtype == pages.v.dtype == query.dtype else query.float()
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

    def rows(
        self,
        seqs: Sequence[int],
        first_page: list[int],
        num_tokens: list[int],
    ) -> torch.Tensor:
        """Where some sequences' pages lie, from their first page that is wanted to their last.

        Returns:
            Indices into pages and heads flattened, `[batch * num_kv_heads * num_pages]`; the pages
            of all sequences are as many as the longest has.
        """
        _, num_kv_heads, page_size, _ = self.k.shape
        last_page = [(n - 1) // page_size for n in num_tokens]
        width = max(last - first for first, last in zip(first_page, last_page, strict=True)) + 1
        device = self.k.device
        if len(seqs) == 1:
            pages = self.block_table[seqs[0], None, first_page[0] : first_page[0] + width]
        else:
            table = torch.tensor([seqs, first_page, last_page], device=device)
            seq, first, last = table[:, :, None]
            columns = first + torch.arange(width, device=device)
            # Beyond a sequence's last page the table holds anything: read the last page again.
            pages = self.block_table[seq, columns.minimum(last)]
        return (pages[:, None] * num_kv_heads + _heads(num_kv_heads, device)).flatten()

    def gather(
        self,
        seq: int,
        first: int,
        end: int,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of tokens first..end of a sequence as `[num_kv_heads, tokens, head_dim]`."""
        _, num_kv_heads, page_size, _ = self.k.shape
        page = first // page_size
        rows = self.rows([seq], [page], [end])
        k = self.k.flatten(0, 1).index_select(0, rows)
        v = v_to_tokens(self.v.flatten(0, 1).index_select(0, rows))
        k, v = (x.view(num_kv_heads, -1, x.shape[-1]) for x in (k, v))
        k, v = (x[:, first - page * page_size : end - page * page_size] for x in (k, v))
        return self._values(k, self.k_scale, dtype), self._values(v, self.v_scale, dtype)

    def _values(
        self,
        x: torch.Tensor,
        scale: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Page entries `[heads, tokens, dim]` as values."""
        if x.dtype != torch.uint8:
            return x.to(dtype)
        return _decode(x, None if scale is None else scale[:, None], self.fmt).to(dtype)


def _attend_few(
    query: torch.Tensor, pages: Pages, seqs: Sequence[int], lens: list[int], attention: Attention
) -> torch.Tensor:
    """Attend sequences that have equally many and few new tokens, in float32.

    Args:
        query: `[batch, num_new, num_q_heads, head_dim_k]`.

    Returns:
        `[batch, num_new, num_q_heads, head_dim_v]`, float32.
    """
    batch, num_new = query.shape[:2]
    num_kv_heads, page_size = pages.k.shape[1:3]
    window, device = attention.sliding_window, query.device
    first = [0 if window is None else max(0, end - num_new - window + 1) for end in lens]
    first_page = [start // page_size for start in first]
    rows = pages.rows(seqs, first_page, lens)
    k = pages.k.flatten(0, 1).index_select(0, rows).view(batch, num_kv_heads, -1, query.shape[-1])
    v = (
        pages.v.flatten(0, 1)
        .index_select(0, rows)
        .view(batch, num_kv_heads, -1, *pages.v.shape[3:])
    )
    for b, page in enumerate(first_page):
        _blank(v[b], first[b] - page * page_size, lens[b] - page * page_size)
    k, v = (_decode(x, None, pages.fmt) if x.dtype == torch.uint8 else x.float() for x in (k, v))
    # [batch, num_kv_heads, group * num_new, head_dim]: all that read the same K and V.
    q = query.float().unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    q = q * (
        attention.scale if pages.k_scale is None else attention.scale * pages.k_scale[:, None, None]
    )
    s = (q @ k.transpose(2, 3)).unflatten(2, (-1, num_new))
    if attention.softcap:
        s = torch.tanh(s / attention.softcap).mul_(attention.softcap)
    # Tokens are counted from the first page that was read.
    spans = [
        (start - page * page_size, end - page * page_size)
        for start, end, page in zip(first, lens, first_page, strict=True)
    ]
    if num_new == 1 and batch <= FEW:
        for b, (start, stop) in enumerate(spans):
            s[b, ..., :start] = s[b, ..., stop:] = float("-inf")
    else:
        stops = torch.tensor([stop for _, stop in spans], device=device)[:, None]
        last = (stops + torch.arange(-num_new, 0, device=device))[:, None, None, :, None]
        token = torch.arange(k.shape[2], device=device)
        hidden = token > last  # [batch, 1, 1, num_new, num_keys]
        if window is not None:
            hidden |= token <= last - window
        s = s.masked_fill_(hidden, float("-inf"))
    p = _softmax(s, attention).flatten(2, 3)
    # The tokens of a group of 16 in V's order, then one small product for each group.
    p = p.unflatten(3, (-1, GROUP)).index_select(4, _v_order(device))
    o = (p.transpose(2, 3) @ v.transpose(3, 4)).sum(2)
    if pages.v_scale is not None:
        o = o * pages.v_scale[:, None, None]
    return o.unflatten(2, (-1, num_new)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _blank(v: torch.Tensor, start: int, stop: int) -> None:
    """Zero tokens before `start` and from `stop` of V as pages hold it, `[num_kv_heads, groups,
    head_dim, 16]`: they may be anything, NaN too, and a probability of 0 does not cancel that."""
    if start:
        group, inside = divmod(start, GROUP)
        v[:, :group] = 0
        v[:, group].masked_fill_(_v_order(v.device) < inside, 0)
    group, inside = divmod(stop, GROUP)
    if group < v.shape[1]:
        v[:, group].masked_fill_(_v_order(v.device) >= inside, 0)
        v[:, group + 1 :] = 0


@cache
def _heads(num_kv_heads: int, device: torch.device) -> torch.Tensor:
    """Numbers of the KV heads, `[num_kv_heads, 1]`."""
    return torch.arange(num_kv_heads, device=device)[:, None]


@cache
def _v_order(device: torch.device) -> torch.Tensor:
    """The token at each position of a group."""
    return torch.tensor(TOKEN, device=device)


def _attend_chunk(
    query: torch.Tensor,
    pages: Pages,
    seq: int,
    seq_len: int,
    attention: Attention,
) -> torch.Tensor:
    """Attend a chunk of new tokens of one sequence.

    Args:
        query: `[num_new, num_q_heads, head_dim_k]`, at most as many as tokens.

    Returns:
        `[num_new, num_q_heads, head_dim_v]`.
    """
    num_new, window = query.shape[0], attention.sliding_window
    first = 0 if window is None else max(0, seq_len - num_new - window + 1)
    k, v = (x[None] for x in pages.gather(seq, first, seq_len, query.dtype))
    num_kv_heads, num_keys = k.shape[1], k.shape[2]
    # [1, num_kv_heads, group, num_new, head_dim]: heads of a group read the same K and V.
    q = query.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)[None]
    written_out = (
        attention.softcap is not None or attention.sinks is not None or attention.quantize_p
    )
    # Causality is all there is to mask.
    if num_new == num_keys and (window is None or window >= num_keys) and not written_out:
        o = _sdpa(q, k, v, None, attention)
    else:
        last = torch.arange(num_keys - num_new, num_keys, device=q.device)[:, None]
        position = torch.arange(num_keys, device=q.device)
        mask = position <= last  # [num_new, num_keys]
        if window is not None:
            mask &= position > last - window
        attend_masked = _softmax_attention if written_out else _sdpa
        o = attend_masked(q, k, v, mask[None], attention)
    return o[0].permute(2, 0, 1, 3).flatten(1, 2)


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    attention: Attention,
) -> torch.Tensor:
    """torch's attention; K and V are expanded over the heads of a group without a copy. Without a
    mask there is one query for each key and attention is causal."""
    group = q.shape[2]
    k, v = (x[0, :, None].expand(-1, group, -1, -1) for x in (k, v))
    return F.scaled_dot_product_attention(
        q[0], k, v, attn_mask=mask, scale=attention.scale, is_causal=mask is None
    )[None]


def _softmax_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, attention: Attention
) -> torch.Tensor:
    """Attention with softcap, sinks and FP8 probabilities, float32, some query rows at a time."""
    _, num_kv_heads, group, num_new, _ = q.shape
    dtype = q.dtype
    q, k, v = q.float() * attention.scale, k.float()[:, :, None], v.float()[:, :, None]
    rows = max(1, MAX_SCORES // (num_kv_heads * group * k.shape[3]))
    parts = []
    for start in range(0, num_new, rows):
        s = q[..., start : start + rows, :] @ k.transpose(-1, -2)
        if attention.softcap:
            s = torch.tanh(s / attention.softcap).mul_(attention.softcap)
        s = s.masked_fill_(~mask[:, None, None, start : start + rows], float("-inf"))
        parts.append(_softmax(s, attention) @ v)
    return torch.cat(parts, 3).to(dtype)


def _softmax(s: torch.Tensor, attention: Attention) -> torch.Tensor:
    """Probabilities of scores `[batch, num_kv_heads, group, num_new, num_keys]`."""
    if attention.sinks is None and not attention.quantize_p:
        return s.softmax(-1)
    largest = s.amax(-1, keepdim=True)
    p = torch.exp(s - largest)
    total = p.sum(-1, keepdim=True)
    if attention.sinks is not None:
        sinks = attention.sinks.float().view(s.shape[1], s.shape[2], 1, 1)
        total = total + torch.exp(sinks - largest)
    if attention.quantize_p:
        p = _decode(quantize(p * P_SCALE, None), None, E4M3) / P_SCALE
    return p / total


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
