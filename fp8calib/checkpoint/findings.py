"""What stands between a checkpoint's scales and an engine that runs with them, one line each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fp8calib.checkpoint.config import layer_count, text_config
from fp8calib.checkpoint.reader import SINGLE, Checkpoint, scale_set
from fp8calib.checkpoint.runtimes import Rules
from fp8calib.checkpoint.scheme import METHOD, quantization_config
from fp8calib.checkpoint.sharding import kv_heads
from fp8calib.errors import ScaleError
from fp8calib.scales import KINDS, Kind, ScaleSet, Strategy, label, problems


def checkpoint_problems(
    checkpoint: Checkpoint, strategy: Strategy | None, rules: Rules, tp: int
) -> Iterator[str]:
    """Every way in which `checkpoint` would not run in the engine of `rules` as calibrated."""
    scales = checkpoint.scales
    yield from _layers_missing(checkpoint)
    if not scales:
        yield _without_scales(strategy, rules)
        return
    if strategy is None:
        yield f"config.json declares no kv_cache_scheme: {rules.ignored}"
    yield from checkpoint.misplaced
    yield from _file_problems(checkpoint, rules)
    yield from _missing(checkpoint, rules)
    sizes = {scale.values.size for kinds in scales.values() for scale in kinds.values()}
    assumed: Strategy = strategy or ("tensor" if sizes == {1} else "attn_head")
    complete = scale_set(checkpoint, assumed)
    own = [layer for layer in checkpoint.layers if layer.index in complete.layers]
    if complete.layers:
        yield from problems(complete, own or checkpoint.layers or None)
    yield from uncalibrated(complete, *_recorded(checkpoint))
    yield from _engine_problems(checkpoint, assumed, rules, tp)


def _without_scales(strategy: Strategy | None, rules: Rules) -> str:
    if strategy:
        return (
            "not calibrated: config.json declares an FP8 cache but there are no scales; "
            f"{rules.title} would run every layer at 1.0"
        )
    return (
        f"not calibrated: there are no KV-cache scales; {rules.title} keeps its cache in 16 bit, "
        f"and would run every layer at scale 1.0 with {rules.dtype}"
    )


def _layers_missing(checkpoint: Checkpoint) -> Iterator[str]:
    if absent := checkpoint.missing_layers:
        yield (
            f"config.json has {layer_count(text_config(checkpoint.config))} layers, the weights "
            f"hold nothing of {len(absent)} of them ({', '.join(map(str, absent[:8]))})"
        )


def _file_problems(checkpoint: Checkpoint, rules: Rules) -> Iterator[str]:
    if checkpoint.has_index and SINGLE in checkpoint.unlisted:
        yield (
            f"{SINGLE} lies beside an index that does not list it: transformers takes it and "
            "ignores the scales"
        )
    if not checkpoint.layers:
        yield "no attention layer is recognised in the weights: a missing scale would not be seen"
    unloaded = Counter(
        scale.file for kinds in checkpoint.scales.values() for scale in kinds.values()
        if not scale.loaded
    )  # fmt: skip
    for file, count in unloaded.items():
        yield f"{count} scales lie in {file}, which the index does not list: {rules.unlisted}"
    for form, example in forms(checkpoint).items():
        if trouble := rules.forms[form]:
            yield f"{example} is an older name: {trouble}"


def forms(checkpoint: Checkpoint) -> dict[str, str]:
    """The forms of names in use, each with one tensor that has it."""
    every = [scale for kinds in checkpoint.scales.values() for scale in kinds.values()]
    return {scale.form: scale.tensor for scale in reversed(every)}


def _missing(checkpoint: Checkpoint, rules: Rules) -> Iterator[str]:
    query = any("q" in kinds for kinds in checkpoint.scales.values())
    for layer in checkpoint.layers:
        found = checkpoint.scales.get(layer.index, {})
        lacking = [f"{kind}_scale" for kind in "kvq"[: 3 if query else 2] if kind not in found]
        if lacking:
            verb = "is" if len(lacking) == 1 else "are"
            where = label(layer.index, layer.name)
            yield f"{where}: {', '.join(lacking)} {verb} missing; {rules.missing}"


def _engine_problems(
    checkpoint: Checkpoint, strategy: Strategy, rules: Rules, tp: int
) -> Iterator[str]:
    section = quantization_config(checkpoint.config) or {}
    yield from rules.objections(checkpoint.config, strategy)
    yield from _section_problems(section, section.get("quant_method", METHOD), strategy, rules)
    yield from _sharding_problems(checkpoint, strategy, rules, tp)


def _section_problems(
    section: dict[str, Any], method: Any, strategy: Strategy, rules: Rules
) -> Iterator[str]:
    """What vLLM's parser of compressed-tensors' section stumbles over."""
    if rules.title != "vLLM" or method != METHOD or not section:
        return
    groups = section.get("config_groups")
    if strategy == "attn_head" and groups is None:
        yield "config.json has no config_groups: vLLM stops with a bare AssertionError"
    for name, group in groups.items() if isinstance(groups, dict) else ():
        targets = group.get("targets") if isinstance(group, dict) else None
        targets = targets if isinstance(targets, list) else []
        attention = [t for t in targets if isinstance(t, str) and "attention" in t.lower()]
        attention += [t for t in targets if isinstance(t, str) and "attn" in t and ":" in t]
        plain = len(targets) == 1 and targets[0].endswith("Attention") and ":" not in targets[0]
        if attention and not plain:
            yield (
                f"config.json: {name!s:.40} targets attention by {attention[0]!r:.60}: vLLM takes "
                "exactly one target there, a class name that ends in Attention"
            )


def _sharding_problems(
    checkpoint: Checkpoint, strategy: Strategy, rules: Rules, tp: int
) -> Iterator[str]:
    if tp > 1 and not rules.tp:
        yield f"{rules.title} runs on one device"
        return
    heads = {(layer.num_heads, layer.num_kv_heads) for layer in checkpoint.layers}
    for query, kv in sorted(heads) if tp > 1 else ():
        if query % tp:
            yield f"{query} heads cannot be divided among {tp} ranks: {rules.title} does not start"
        try:
            kv_heads(kv, tp, 0)
        except ScaleError as problem:
            yield f"{problem}: {rules.title} does not start"
    if strategy == "attn_head" and rules.title == "vLLM" and len(heads) > 1:
        yield "layers have different numbers of heads: vLLM divides per-head scales by one number"


Recorded = Callable[[int, Kind], bool]


def uncalibrated(
    scales: ScaleSet, owners: set[int] | None = None, as_one: Recorded | None = None
) -> Iterator[str]:
    """Scales that no observer would have come by: the same in every layer, as exporters that only
    cast write them, or 1.0.

    Args:
        owners: the layers that have K and V of their own; None for all.
        as_one: whether the recorded maxima do give a layer's scale of 1.0.
    """
    for kind in KINDS:
        values: Mapping[int, np.ndarray] = {
            index: scale
            for index, layer in scales.layers.items()
            if (scale := getattr(layer, kind)) is not None and (not owners or index in owners)
        }
        same = np.unique(np.concatenate(list(values.values()))) if values else np.empty(0)
        if same.size == 1 and same[0] != 1 and len(values) > 1:
            yield (
                f"not calibrated: {kind}_scale is {same[0]:g} in every layer, as exporters that "
                "only cast write it"
            )
        ones = [index for index, value in values.items() if (value == 1).all()]
        ones = [index for index in ones if not (as_one and as_one(index, kind))]
        if ones and len(ones) == len(values):
            yield f"not calibrated: {kind}_scale is exactly 1.0 in every layer"
        elif ones:
            listed = ", ".join(map(str, ones))
            yield f"not calibrated: {kind}_scale is exactly 1.0 in layers {listed}"


def _recorded(checkpoint: Checkpoint) -> tuple[set[int], Recorded]:
    from fp8calib.scales import scale_from_amax

    record = checkpoint.sidecar or {}

    def as_one(index: int, kind: Kind) -> bool:
        """A layer without content has the scale 1.0, and its maxima say so."""
        try:
            amax = np.asarray(record["layers"][str(index)][kind]["amax"], dtype=np.float32)
            return bool(scale_from_amax(amax.max(), record.get("margin", 1.0)) == 1)
        except (KeyError, TypeError, ValueError, OverflowError, ScaleError):
            return False

    return {layer.index for layer in checkpoint.layers if layer.kv_source is None}, as_one
