"""Which cache formats `verify` compares, and which of them will be served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8calib.layers import LayerSpec
from fp8calib.runtime.cache_words import Arithmetic
from fp8calib.runtime.kv_cache_dtype import NATIVE_WORDS, choose_kv_format
from fp8calib.runtime.kv_format import KVFormat
from fp8calib.runtime.kv_store import cache_groups
from fp8calib.runtime.scoring import Scored, score
from fp8calib.scales import ScaleSet

if TYPE_CHECKING:
    from fp8calib.runtime.loader import LoadedModel

_BLOCK_SIZE, _GPU_BLOCK_SIZE = 16, 128


@dataclass(frozen=True)
class Variant:
    """One cache format to judge: `key` names it in JSON, `title` for a person. The gates apply to
    those that are `gated`. `model` is the checkpoint that it runs on, where that is another one."""

    key: str
    title: str
    kv_format: KVFormat
    gated: bool = False
    model: str | None = None

    def facts(self, layers: Sequence[LayerSpec]) -> dict[str, Any]:
        """What a report says of the cache itself."""
        block = sum(
            group.block_bytes(self.kv_format, _BLOCK_SIZE) for group in cache_groups(layers)
        )
        return {
            "kv_cache": self.kv_format.describe(layers),
            "fp8_layers": [layer.index for layer in layers if self.kv_format.is_fp8(layer)],
            "kv_bytes_per_token": block // _BLOCK_SIZE,
        }


@dataclass(frozen=True)
class Run:
    """A variant and the model that it runs on."""

    variant: Variant
    loaded: LoadedModel

    def score(self, rows: Sequence[Sequence[int]], tokens: int) -> Iterator[Scored]:
        """Teacher-forced logits of `rows` in passes of `tokens` tokens; see scoring.score."""
        loaded = self.loaded
        gpu = loaded.model.device.type == "cuda"
        return score(
            loaded.model,
            loaded.layers,
            self.variant.kv_format,
            rows,
            max_batched_tokens=tokens,
            block_size=_GPU_BLOCK_SIZE if gpu else _BLOCK_SIZE,
        )

    @property
    def key(self) -> str:
        return self.variant.key


@dataclass(frozen=True)
class Plan:
    """The variants in the order of the report, one of which, `reference`, is native.

    `skip_layers` stay native in FP8 variants, in the form of vLLM's flag; `recorded` says whether
    that list comes from the checkpoint."""

    runs: list[Run]
    reference: Run
    skip_layers: list[str]
    recorded: bool
    warnings: list[str]


def plan_variants(
    loaded: LoadedModel,
    kv_cache_dtype: str = "auto",
    skip_layers: Sequence[str | int] | None = None,
    attention: Arithmetic | None = None,
    missing_scales: str = "refuse",
    assume_skip_flag: bool = False,
) -> Plan:
    """What there is to compare for a model or a calibrated checkpoint.

    Options are those of `choose_kv_format`, with two defaults of their own: `auto` is FP8 for every
    model (what would FP8 cost?), and `attention` None is what vLLM will do: "fp8" with a q_scale.

    Raises:
        UserError: as choose_kv_format does.
    """
    word = "fp8" if kv_cache_dtype == "auto" else kv_cache_dtype
    choice = choose_kv_format(loaded, word, skip_layers, attention or "accurate", missing_scales)
    chosen, warnings = choice.kv_format, list(choice.warnings)
    native = native_variant(loaded)
    if word in NATIVE_WORDS:
        other = Variant(word, f"{word} cache", chosen, True)
        return _plan(loaded, [native, other], [], False, warnings)

    if chosen.scales is not None and loaded.checkpoint.strategy is None:
        warnings.append(
            "config.json declares no kv_cache_scheme: vLLM ignores these scales and runs at 1.0"
        )
    chosen = as_served(chosen, attention)
    variants = [native, *_fp8_variants(chosen, "fp8" if word == "fp8_e4m3" else word)]
    served = variants[-1] = replace(variants[-1], gated=True)
    if choice.recorded and not assume_skip_flag:
        everywhere = KVFormat.fp8(loaded.layers, chosen.native).fp8_layers
        forgotten = replace(served.kv_format, fp8_layers=everywhere)
        variants.append(
            Variant("without_skip_flag", "the same without the skip flag", forgotten, True)
        )
    return _plan(loaded, variants, choice.skip_layers, choice.recorded, warnings)


def _plan(
    loaded: LoadedModel,
    variants: Sequence[Variant],
    skip_layers: list[str],
    recorded: bool,
    warnings: list[str],
) -> Plan:
    runs = [Run(variant, loaded) for variant in variants]
    return Plan(runs, runs[0], skip_layers, recorded, warnings)


def native_variant(loaded: LoadedModel, key: str = "native") -> Variant:
    kv_format = KVFormat(loaded.model.dtype)
    return Variant(key, f"native ({kv_format.describe(loaded.layers)})", kv_format)


def as_served(chosen: KVFormat, attention: Arithmetic | None) -> KVFormat:
    """A format with the arithmetic that vLLM will use where none is asked for; scales that are all
    1.0 are left out of it."""
    if attention is None and chosen.scales is not None and chosen.scales.has_query:
        chosen = replace(chosen, arithmetic="fp8")
    if chosen.scales is not None and _all_ones(chosen.scales):
        chosen = replace(chosen, scales=None)
    return chosen


def title_of(kv_format: KVFormat, word: str) -> str:
    """How an FP8 format is called, its attention and skip layers aside."""
    if kv_format.scales is None:
        return f"{word} at scale 1.0"
    value = _constant(kv_format.scales)
    return f"{word} calibrated" if value is None else f"{word} at constant scale {value:g}"


def _fp8_variants(chosen: KVFormat, word: str) -> list[Variant]:
    """Scale 1.0, the scales in use, and these with FP8 attention; the last one is `chosen`."""
    plain = replace(chosen, arithmetic="accurate")
    at_one = replace(plain, scales=None)
    key, title = "scale_1", title_of(at_one, word)
    variants = [Variant(key, title, at_one)]
    if chosen.scales is not None:
        key, title = "calibrated", title_of(plain, word)
        variants.append(Variant(key, title, plain))
    if chosen.arithmetic == "fp8":
        variants.append(Variant(f"{key}_fp8_attention", f"{title}, fp8 attention", chosen))
    return variants


def _all_ones(scales: ScaleSet) -> bool:
    return all((value == 1).all() for layer in scales.layers.values() for _, value in layer.items())


def _constant(scales: ScaleSet) -> float | None:
    """The one value that every K and V scale has, as exporters that only cast write it."""
    values = [value for layer in scales.layers.values() for value in (layer.k, layer.v)]
    same = np.unique(np.concatenate(values))
    return float(same[0]) if same.size == 1 and len(scales.layers) > 1 else None
