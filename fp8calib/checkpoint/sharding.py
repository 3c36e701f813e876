"""How vLLM (0.32, 0.33) and SGLang divide per-head scales among tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping

from fp8calib.errors import ScaleError
from fp8calib.scales import LayerScales, ScaleSet


def kv_heads(total: int, tp: int, rank: int) -> slice:
    """The KV heads that `rank` of `tp` holds: an equal part, or one that it shares with others
    where there are fewer heads than ranks.

    Raises:
        ScaleError: neither number divides the other, which the engines refuse.
    """
    if total % tp == 0:
        return slice(rank * (total // tp), (rank + 1) * (total // tp))
    if tp % total == 0:
        head = rank // (tp // total)
        return slice(head, head + 1)
    raise ScaleError(f"{total} KV heads cannot be divided among {tp} ranks")


def shard(scales: ScaleSet, tp: int, rank: int) -> ScaleSet:
    """What `rank` of `tp` holds of `scales`: its own heads' of k and v, and of q the grouped
    maximum of those heads; all of a per-tensor set."""
    if scales.strategy == "tensor" or tp == 1:
        return scales
    layers: Mapping[int, LayerScales] = {
        index: LayerScales(
            layer.name,
            layer.k[mine := kv_heads(layer.k.size, tp, rank)],
            layer.v[mine],
            None if (q := scales.grouped_query(index)) is None else q[mine],
        )
        for index, layer in scales.layers.items()
    }
    return ScaleSet("attn_head", layers)
