"""Vectorised ``store`` and ``attend`` in torch: the CPU backend, and the arithmetic spelled out.

Sequences with one new token are attended together: what they see is gathered in groups of 16
tokens, one sequence after the other, so that nothing is padded but the scores, and in the order in
which the pages hold V, since putting V's tokens in order takes longer than all the rest. A chunk of
new tokens is attended on its own, so a prompt costs what one call of scaled_dot_product_attention
costs. Softcap, sinks and FP8 arithmetic, which that function cannot express, take the written-out
softmax. Where everything lies is the plan's work (:mod:`.torch_plan`).
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from .layout import GROUP, v_to_tokens
from .scale import E4M3, Fp8Format, dequantize, get_format, quantize
from .torch_plan import Chunk, Decodes, Part, Slots, StepPlan

Plan = StepPlan

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


def store(
    key: torch.Tensor,
    value: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    *,
    plan: StepPlan | None,
    fp8_format: str,
) -> None:
    """Write each token's K and V to its slot; see :func:`fp8_paged_attention.store`."""
    fmt = get_format(fp8_format)
    slots = None if plan is None else plan.slots
    if slots is None:
        slots = Slots.of(slot_mapping, *k_pages.shape[1:3])
    if slots.kept is not None:
        key, value = key[slots.kept], value[slots.kept]
    if k_pages.dtype == torch.uint8:
        key = quantize(key, k_scale, fmt)
    if v_pages.dtype == torch.uint8:
        value = quantize(value, v_scale, fmt)
    head_dim = k_pages.shape[3]
    k_pages.view(-1, head_dim).index_copy_(
        0, slots.k_rows, key.reshape(-1, head_dim).to(k_pages.dtype)
    )
    v_pages[slots.page, :, slots.group, :, slots.position] = value.to(v_pages.dtype)


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
    plan: StepPlan | None,
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
    """Fill ``out``; see :func:`fp8_paged_attention.attend` (needs no bound or number of
    decodes)."""
    if plan is None:
        plan = StepPlan(k_pages, v_pages, sliding_window=sliding_window)
        plan.update(block_table, cu_seqlens_q, seq_lens)
    attention = Attention(scale, sliding_window, softcap, sinks, arithmetic == "fp8")
    pages = Pages(k_pages, v_pages, k_scale, v_scale, get_format(fp8_format), plan)
    query = _query_values(query, q_scale, pages, arithmetic)
    if (decodes := plan.decodes) is not None:
        rows = decodes.rows
        out[rows] = _attend_decodes(query[rows], pages, decodes, attention).to(out.dtype)
    for chunk in plan.chunks:
        out[chunk.start : chunk.seeing] = 0
        if chunk.seeing < chunk.stop:
            new = slice(chunk.seeing, chunk.stop)
            out[new] = _attend_chunk(query[new], pages, chunk, attention)


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
    """One layer's cache: pages, scales, and the plan, which has memory to gather them into."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    fmt: Fp8Format
    plan: StepPlan

    def keys_of(self, part: Part) -> torch.Tensor:
        """`[N * num_kv_heads, 16, head_dim]`, float32, not scaled, tokens in V's order."""
        head_dim = self.k.shape[3]
        k = self._gather(self.k.view(-1, head_dim), part.k_rows)
        return self._float(k).view(-1, GROUP, head_dim)

    def values_of(self, part: Part) -> torch.Tensor:
        """`[N * num_kv_heads, head_dim, 16]`, float32, not scaled."""
        v = self._gather(self.v.view(-1, *self.v.shape[3:]), part.groups)
        # Hidden tokens may be anything, NaN too, and a probability of 0 does not cancel that.
        v.view(-1).index_fill_(0, part.hidden_values, 0)
        return self._float(v)

    def _gather(self, pages: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        memory = self.plan.memory(torch.Size((len(rows), *pages.shape[1:])), pages.dtype)
        return torch.index_select(pages, 0, rows, out=memory)

    def _float(self, x: torch.Tensor) -> torch.Tensor:
        """What was gathered, in float32."""
        if x.dtype == torch.float32:
            return x
        memory = self.plan.memory(x.shape, torch.float32)
        if x.dtype != torch.uint8 or x.is_cuda:
            return memory.copy_(x if x.dtype != torch.uint8 else x.view(self.fmt.dtype))
        codes = self.plan.memory(x.shape, torch.int32).copy_(x)
        torch.index_select(_table(self.fmt), 0, codes.flatten(), out=memory.view(-1))
        return memory

    def of_chunk(self, chunk: Chunk, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of what a chunk sees, in order: `[num_kv_heads, tokens, head_dim]`."""
        _, num_kv_heads, _, head_dim = self.k.shape
        k = self.k.view(-1, GROUP, head_dim).index_select(0, chunk.groups)
        v = self.v.view(-1, *self.v.shape[3:]).index_select(0, chunk.groups)
        k = k.view(num_kv_heads, -1, head_dim)
        v = v_to_tokens(v.view(num_kv_heads, -1, *v.shape[1:]))
        k, v = (x[:, chunk.first : chunk.end] for x in (k, v))
        return self._values(k, self.k_scale, dtype), self._values(v, self.v_scale, dtype)

    def _values(
        self, x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Page entries `[heads, tokens, dim]` as values."""
        if x.dtype != torch.uint8:
            return x.to(dtype)
        return _decode(x, None if scale is None else scale[:, None], self.fmt).to(dtype)


def _attend_decodes(
    query: torch.Tensor, pages: Pages, decodes: Decodes, attention: Attention
) -> torch.Tensor:
    """Attend sequences with one new token, in float32: `[batch, num_q_heads, head_dim_k]` to
    `[batch, num_q_heads, head_dim_v]`."""
    scale = 1.0 if pages.k_scale is None else pages.k_scale[:, None, None]
    # [batch, num_kv_heads, group, head_dim]: heads of a group read the same K and V.
    q = query.float().unflatten(1, (pages.k.shape[1], -1)) * (scale * attention.scale)
    heads = q.shape[1:3]
    parts = []
    for part in decodes.parts:
        own = q.index_select(0, part.sequence).flatten(0, 1)
        s = torch.bmm(own, pages.keys_of(part).transpose(1, 2))
        if attention.softcap:
            s = torch.tanh(s / attention.softcap).mul_(attention.softcap)
        parts.append(s.view(-1, *heads, GROUP).masked_fill_(part.hidden, float("-inf")))
    p = _softmax_of_groups(parts, decodes, attention)
    out = q.new_zeros(len(q), *heads, pages.v.shape[3])
    for part in decodes.parts:
        o = torch.bmm(p[part.place].flatten(0, 1), pages.values_of(part).transpose(1, 2))
        out.index_add_(0, part.sequence, o.view(-1, *out.shape[1:]))
    if pages.v_scale is not None:
        out *= pages.v_scale[:, None, None]
    return out.flatten(1, 2)


def _softmax_of_groups(
    parts: list[torch.Tensor], decodes: Decodes, attention: Attention
) -> torch.Tensor:
    """Probabilities of the scores of groups, `[N, num_kv_heads, group, 16]`, over all groups of a
    sequence."""
    s = parts[0] if len(parts) == 1 else torch.cat(parts)
    if (place := decodes.place) is not None:
        shape = decodes.num_seqs * decodes.width, *s.shape[1:]
        s = s.new_full(shape, float("-inf")).index_copy_(0, place, s)
    rows = s.view(-1, decodes.width, *s.shape[1:]).permute(0, 2, 3, 1, 4)
    p = _softmax(rows.flatten(3)[:, :, :, None], attention)
    p = p.view(rows.shape).permute(0, 3, 1, 2, 4).flatten(0, 1)
    return p if place is None else p.index_select(0, place)


def _attend_chunk(
    query: torch.Tensor, pages: Pages, chunk: Chunk, attention: Attention
) -> torch.Tensor:
    """Attend several new tokens of one sequence: `[num_new, num_q_heads, head_dim_k]`, at most as
    many as tokens, to `[num_new, num_q_heads, head_dim_v]`."""
    num_new, window = query.shape[0], attention.sliding_window
    k, v = (x[None] for x in pages.of_chunk(chunk, query.dtype))
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
