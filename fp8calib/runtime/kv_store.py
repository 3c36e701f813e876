"""The paged KV cache: page tensors of every layer, and how many pages fit into a given memory.

Layers that need the same tokens form a *group* and share block ids: all full-attention layers are
one, layers with the same sliding window another, whose blocks are freed as the window moves on.
A block id means, in each layer of its group, the page of that number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import fp8_paged_attention as fpa
import numpy as np
import torch

from fp8calib.errors import UserError
from fp8calib.layers import LayerSpec
from fp8calib.runtime.cache_words import Arithmetic
from fp8calib.runtime.kv_format import KVFormat, owner_of
from fp8calib.scales import ScaleSet


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share block ids. `window` is their sliding window in tokens, None for all."""

    window: int | None
    layers: tuple[LayerSpec, ...]

    def block_bytes(self, kv_format: KVFormat, block_size: int) -> int:
        """Bytes of one block in all layers of the group."""
        return sum(
            fpa.page_bytes(
                layer.num_kv_heads,
                block_size,
                layer.head_dim,
                layer.v_head_dim,
                *kv_format.page_dtypes(layer),
            )
            for layer in self.layers
            if layer.kv_source is None
        )

    def blocks_for(self, num_tokens: int, max_new_tokens: int, block_size: int) -> int:
        """The most blocks that a sequence of `num_tokens` holds at a time, when at most
        `max_new_tokens` are added in a step."""
        blocks = -(-num_tokens // block_size)
        if self.window is None:
            return blocks
        return min(blocks, -(-(self.window + max_new_tokens) // block_size) + 1)


def cache_groups(layers: Sequence[LayerSpec]) -> list[CacheGroup]:
    """The groups of a model; a layer that re-uses another's K and V belongs to that one's."""
    specs = {layer.index: layer for layer in layers}
    members: dict[int | None, list[LayerSpec]] = {}
    for layer in layers:
        owner = layer if layer.kv_source is None else specs[layer.kv_source]
        members.setdefault(owner.sliding_window, []).append(layer)
    return [CacheGroup(window, tuple(group)) for window, group in members.items()]


@dataclass(frozen=True)
class LayerCache:
    """One layer's pages and what attention over them needs.

    k_pages, v_pages: see fp8_paged_attention; scales: float32 [1] or [num_kv_heads], None is 1.0
    (and for native pages); `backend` names the kernels, None leaves it to the device; `stores` is
    False for a layer that reads another layer's pages.
    """

    group: int
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    q_scale: torch.Tensor | None
    fp8_format: str
    arithmetic: Arithmetic
    backend: str | None
    stores: bool


class KVStore:
    """The page tensors of all layers, in one KVFormat.

    Args:
        layers: the model's attention layers, as `probe` found them.
        num_blocks: blocks of each group of `cache_groups(layers)`.
        block_size: tokens a block; a multiple of 16.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        kv_format: KVFormat,
        num_blocks: Sequence[int],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.groups = cache_groups(layers)
        self.kv_format = kv_format
        self.num_blocks = list(num_blocks)
        self.block_size = block_size
        self.device = torch.device(device)
        self.layers: dict[int, LayerCache] = {}
        for number, group in enumerate(self.groups):
            for layer in group.layers:
                self.layers[layer.index] = self._layer_cache(layer, number)

    def _layer_cache(self, layer: LayerSpec, group: int) -> LayerCache:
        fmt = self.kv_format
        k_dtype, v_dtype = fmt.page_dtypes(layer)
        if layer.kv_source is None:
            # Not fpa.allocate: its zeros would cost the time and memory of a cache that is full.
            shape = (self.num_blocks[group], layer.num_kv_heads, self.block_size)
            k_shape = fpa.k_page_shape(*shape, layer.head_dim)
            v_shape = fpa.v_page_shape(*shape, layer.v_head_dim)
            k_pages = torch.empty(k_shape, dtype=k_dtype, device=self.device)
            v_pages = torch.empty(v_shape, dtype=v_dtype, device=self.device)
        else:
            source = self.layers[layer.kv_source]
            k_pages, v_pages = source.k_pages, source.v_pages
        scales = {kind: self._tensor(scale) for kind, scale in self._scales(layer).items()}
        return LayerCache(
            group=group,
            k_pages=k_pages,
            v_pages=v_pages,
            k_scale=scales.get("k"),
            v_scale=scales.get("v"),
            q_scale=scales.get("q"),
            fp8_format=fmt.fp8_format,
            arithmetic=fmt.arithmetic_of(layer),
            # The GPU kernels have neither float32 pages nor FP8 beside native ones.
            backend="torch" if torch.float32 in (k_dtype, v_dtype) or k_dtype != v_dtype else None,
            stores=layer.kv_source is None,
        )

    def _scales(self, layer: LayerSpec) -> dict[str, np.ndarray | None]:
        """The scales that attention takes in a layer."""
        fmt = self.kv_format
        if fmt.scales is None or not fmt.is_fp8(layer):
            return {}
        own = fmt.scales.layers[owner_of(layer)]
        scales = {kind: getattr(own, kind) for kind, fp8 in fmt.fp8_kinds(layer).items() if fp8}
        if fmt.arithmetic_of(layer) == "fp8":
            scales["q"] = fmt.scales.grouped_query(layer.index)
        return scales

    def _tensor(self, scale: np.ndarray | None) -> torch.Tensor | None:
        return None if scale is None else torch.tensor(scale, device=self.device)

    def reload_scales(self, scales: ScaleSet) -> None:
        """Write other scales into the tensors of the present ones, which keep their places. What
        the pages hold was stored by the old ones and must not be read any more.

        Raises:
            UserError: the cache has no scales to replace, or these are for another strategy.
        """
        old = self.kv_format.scales
        if old is None or not self.kv_format.fp8_layers:
            raise UserError("there are no scales to replace: the cache runs without")
        if old.strategy != scales.strategy:
            raise UserError(
                f"the cache has {old.strategy} scales, and the new ones are {scales.strategy}"
            )
        if old.has_query != scales.has_query and self.kv_format.arithmetic == "fp8":
            raise UserError("q_scale is in the old scales or in the new ones, but not in both")
        self.kv_format = replace(self.kv_format, scales=scales)
        for group in self.groups:
            for layer in group.layers:
                cache = self.layers[layer.index]
                for kind, scale in self._scales(layer).items():
                    own = getattr(cache, f"{kind}_scale")
                    if own is not None and scale is not None:
                        own.copy_(torch.from_numpy(scale))

    def block_bytes(self, kv_format: KVFormat | None = None) -> list[int]:
        """Bytes of one block of each group, in this format or, to compare, in another one."""
        return [
            group.block_bytes(kv_format or self.kv_format, self.block_size) for group in self.groups
        ]


def plan_blocks(
    groups: Sequence[CacheGroup],
    kv_format: KVFormat,
    block_size: int,
    memory_bytes: int,
    max_num_seqs: int,
    max_new_tokens: int,
    max_tokens: int,
) -> tuple[int, list[int]]:
    """The largest number of tokens, at most `max_tokens`, whose blocks fit into `memory_bytes`.

    Returns:
        That number (0 when not even one block fits), and the blocks of each group for it. A group
        with a window needs no more than its windows of `max_num_seqs` sequences.
    """

    def blocks(num_tokens: int) -> list[int]:
        return [
            min(
                -(-num_tokens // block_size),
                max_num_seqs * group.blocks_for(num_tokens, max_new_tokens, block_size),
            )
            for group in groups
        ]

    sizes = [group.block_bytes(kv_format, block_size) for group in groups]
    low, high = 0, -(-max_tokens // block_size)  # in blocks; low always fits
    while low < high:
        middle = (low + high + 1) // 2
        used = sum(n * size for n, size in zip(blocks(middle * block_size), sizes, strict=True))
        low, high = (middle, high) if used <= memory_bytes else (low, middle - 1)
    return low * block_size, blocks(low * block_size)
