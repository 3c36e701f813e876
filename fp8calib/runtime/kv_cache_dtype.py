"""From the words of ``--kv-cache-dtype``, the checkpoint and the skip list to a KVFormat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from fp8calib.checkpoint import Checkpoint, read_scales
from fp8calib.devices import DTYPES
from fp8calib.errors import ScaleError, UserError
from fp8calib.layers import LayerSpec, resolve_skip_layers
from fp8calib.runtime.cache_words import FP8_WORDS, Arithmetic, check_words
from fp8calib.runtime.kv_format import KVFormat
from fp8calib.scales import LayerScales, ScaleSet, expected_shape, problems, require

if TYPE_CHECKING:
    from fp8calib.runtime.loader import LoadedModel

NATIVE_WORDS: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}


@dataclass(frozen=True)
class KVChoice:
    """The format chosen, with what the user should know of it.

    skip_layers: the layers left native, in the form vLLM's flag takes; empty for a native cache.
    recorded: whether that list comes from the checkpoint's fp8calib.json.
    """

    kv_format: KVFormat
    skip_layers: list[str]
    recorded: bool
    warnings: list[str]


def choose_kv_format(
    loaded: LoadedModel,
    kv_cache_dtype: str = "auto",
    skip_layers: Sequence[str | int] | None = None,
    attention: Arithmetic = "accurate",
    missing_scales: str = "refuse",
) -> KVChoice:
    """The cache format of `loaded`: an explicit dtype beats the checkpoint, `auto` follows it.

    Args:
        kv_cache_dtype: a word of cache_words.WORDS. `auto` is FP8 where the checkpoint declares
            it, else the model's dtype.
        skip_layers: layers to leave native; None takes the list that the checkpoint records.
        attention: arithmetic over FP8 pages.
        missing_scales: "refuse", or "one" to run layers of a calibrated checkpoint that have no
            scale at 1.0, as vLLM does silently.

    Raises:
        UserError: an unknown word; a skip list the model cannot have; FP8 attention on a native
            cache.
        CheckpointError: the checkpoint declares a scheme that is refused.
        ScaleError: scales that are missing or unusable.
    """
    check_words(kv_cache_dtype, attention, missing_scales)
    checkpoint, layers = loaded.checkpoint, loaded.layers
    model_dtype: torch.dtype = loaded.model.dtype
    warnings: list[str] = []
    word = kv_cache_dtype
    if word == "auto":
        word = "fp8" if checkpoint.strategy is not None else "native"
        if word == "native" and checkpoint.scales:
            warnings.append(
                "the checkpoint has KV-cache scales but declares no kv_cache_scheme: auto stays in "
                f"{_name(model_dtype)}, as in vLLM; use --kv-cache-dtype fp8"
            )
    if word not in FP8_WORDS:
        if attention == "fp8":
            raise UserError(
                f"--attention fp8 needs an FP8 cache, and this one is "
                f"{_name(NATIVE_WORDS.get(word, model_dtype))}; add --kv-cache-dtype fp8"
            )
        native = NATIVE_WORDS.get(word, model_dtype)
        if skip_layers is not None and resolve_skip_layers(skip_layers, layers)[0]:
            warnings.append(
                f"skip layers change nothing: the whole cache is {_name(native)}; for FP8 in the "
                "others, add --kv-cache-dtype fp8"
            )
        return KVChoice(KVFormat(native), [], False, warnings)
    recorded = skip_layers is None
    if skip_layers is None:
        skip_layers = checkpoint.recorded_skip_layers
    flag, skipped = resolve_skip_layers(skip_layers, layers)
    if word == "fp8_e5m2":
        scales = None
        warnings.append(_e5m2_warning(checkpoint))
    else:
        scales = _scales(checkpoint, layers, missing_scales, warnings)
    kv_format = KVFormat.fp8(
        layers,
        model_dtype,
        skip=skipped,
        scales=scales,
        arithmetic=attention,
        fp8_format=FP8_WORDS[word],
    )
    if attention == "fp8" and scales is not None and not scales.has_query:
        warnings.append("--attention fp8: there is no q_scale, so queries are quantized at 1.0")
    return KVChoice(kv_format, flag, recorded and bool(flag), warnings)


def _scales(
    checkpoint: Checkpoint, layers: Sequence[LayerSpec], missing_scales: str, warnings: list[str]
) -> ScaleSet | None:
    """The checkpoint's scales, None (1.0 everywhere) when it has none and declares none."""
    if checkpoint.strategy is None and not checkpoint.scales:
        warnings.append(
            "no scales in this checkpoint: the FP8 cache runs at scale 1.0, which can cost "
            "accuracy; make scales with `fp8calib calibrate`"
        )
        return None
    missing = [
        f"layer {layer.index} ({layer.name}): {kind}_scale"
        for layer in layers
        for kind in ("k", "v")
        if kind not in checkpoint.scales.get(layer.index, {})
    ]
    if missing and missing_scales != "one":
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ScaleError(
            f"{checkpoint.path}: the checkpoint is calibrated but lacks {', '.join(missing[:3])}"
            f"{more}; calibrate it again, or run these at 1.0 with --missing-scales one"
        )
    if missing:
        warnings.append(f"{len(missing)} scales are missing and run at 1.0 (--missing-scales one)")
        scales = _with_ones(checkpoint, layers)
    else:
        scales = read_scales(checkpoint.path)
    require(problems(scales, layers), str(checkpoint.path))
    stray = {s.file for kinds in checkpoint.scales.values() for s in kinds.values() if not s.loaded}
    if stray:
        warnings.append(
            f"scales lie in {', '.join(sorted(stray))}, which the index does not list: vLLM would "
            "skip them and run at 1.0"
        )
    if all((values == 1).all() for layer in scales.layers.values() for _, values in layer.items()):
        warnings.append("every scale is exactly 1.0: this checkpoint is not calibrated")
    return scales


def _with_ones(checkpoint: Checkpoint, layers: Sequence[LayerSpec]) -> ScaleSet:
    found = checkpoint.scales
    sizes = {scale.values.size for kinds in found.values() for scale in kinds.values()}
    strategy = checkpoint.strategy or ("attn_head" if sizes - {1} else "tensor")
    filled = {}
    for layer in layers:
        have = {kind: scale.values for kind, scale in found.get(layer.index, {}).items()}
        k, v = (
            have.get(kind, np.ones(expected_shape(strategy, kind, layer), np.float32))
            for kind in ("k", "v")
        )
        filled[layer.index] = LayerScales(layer.name, k, v, have.get("q"))
    return ScaleSet(strategy, filled)


def _e5m2_warning(checkpoint: Checkpoint) -> str:
    warning = "fp8_e5m2 takes no calibrated scales: the cache runs at scale 1.0"
    if checkpoint.strategy is not None:
        warning += "; vLLM refuses fp8_e5m2 for this checkpoint, because it is calibrated"
    return warning


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
