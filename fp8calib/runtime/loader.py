"""Opens a model for the runtime: weights through transformers, scales straight from the files."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from fp8calib.attention import probe
from fp8calib.checkpoint import Checkpoint, check_scheme, open_checkpoint
from fp8calib.devices import check_device, check_dtype
from fp8calib.layers import LayerSpec
from fp8calib.model_loading import load_config, load_model, load_tokenizer
from fp8calib.models import resolve_model
from fp8calib.runtime.support import check_supported, context_limit


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory and the checkpoint that it came from.

    eos_token_ids: the tokens that end a text; max_model_len: the most tokens that a sequence of
    this model may have.
    """

    name: str
    checkpoint: Checkpoint
    model: PreTrainedModel
    tokenizer: Any
    layers: list[LayerSpec]
    eos_token_ids: frozenset[int]
    max_model_len: int


def load(
    name: str, *, device: str = "auto", dtype: str = "auto", trust_remote_code: bool = False
) -> LoadedModel:
    """Load the model `name` (a folder, a Hub id, an embedded model) without its cache's scales.

    Raises:
        ModelError: there is no such model, it cannot be loaded, or the runtime would not compute
            what it is meant to compute.
        CheckpointError: unreadable, or it declares a KV-cache scheme that is refused.
        UserError: an unknown device or dtype, told before the model is fetched.
    """
    check_device(device)
    check_dtype(dtype)
    folder = resolve_model(name)
    checkpoint = open_checkpoint(folder)
    check_scheme(checkpoint.config)
    config = without_attention_quantization(load_config(folder, trust_remote_code))
    check_supported(config)
    with _scales_may_be_left_over():
        model = load_model(folder, device, dtype, trust_remote_code, config=config)
    layers = probe(model)
    check_supported(config, layers)
    tokenizer = load_tokenizer(folder, trust_remote_code)
    return LoadedModel(
        name=name,
        checkpoint=checkpoint,
        model=model,
        tokenizer=tokenizer,
        layers=layers,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        max_model_len=context_limit(config),
    )


def without_attention_quantization(config: PretrainedConfig) -> PretrainedConfig:
    """A copy of `config` whose quantization section speaks of weights alone.

    compressed-tensors would otherwise hook every attention layer and fake-quantise K, V and Q
    there, before they reach the pages. A section with nothing left is dropped.
    """
    config = deepcopy(config)
    section = getattr(config, "quantization_config", None)
    if not isinstance(section, dict) or section.get("quant_method") != "compressed-tensors":
        return config
    section.pop("kv_cache_scheme", None)
    groups = section.get("config_groups") or {}
    kept = {name: group for name, group in groups.items() if not _is_attention_group(group)}
    if kept:
        section["config_groups"] = kept
    else:
        del config.quantization_config
    return config


@contextmanager
def _scales_may_be_left_over() -> Iterator[None]:
    """Keep transformers from reporting tensors that it has no use for: the scales are ours to read.
    Its report of weights that are missing is let through."""

    def wanted(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return "LOAD REPORT" not in message or "MISSING" in message

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


def _is_attention_group(group: Any) -> bool:
    """Whether a group of compressed-tensors quantises attention inputs and no weights."""
    return (
        isinstance(group, dict)
        and not group.get("weights")
        and all(
            "attn" in t.lower() or "attention" in t.lower() for t in group.get("targets") or [""]
        )
    )


def _eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    for owner in (model.generation_config, tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return frozenset(found)
