"""An engine of the runtime for a variant, so that the checks generate text as `run` does."""

from __future__ import annotations

from dataclasses import replace

from fp8calib.evaluation.variants import Run
from fp8calib.runtime.cache_words import FP8_WORDS
from fp8calib.runtime.config import EngineConfig
from fp8calib.runtime.engine import Engine
from fp8calib.runtime.kv_cache_dtype import NATIVE_WORDS
from fp8calib.runtime.loader import LoadedModel

_BLOCK = 128  # tokens: at least a page on any device


def make_engine(run: Run, num_seqs: int, max_model_len: int) -> Engine:
    """An engine whose cache has the variant's format and holds `num_seqs` sequences of
    `max_model_len` tokens."""
    kv_format, loaded = run.variant.kv_format, run.loaded
    words = FP8_WORDS if kv_format.fp8_layers else NATIVE_WORDS
    value = kv_format.fp8_format if kv_format.fp8_layers else kv_format.native
    native = [str(layer.index) for layer in loaded.layers if not kv_format.is_fp8(layer)]
    whole = -(-max_model_len // _BLOCK) * _BLOCK  # sequences of whole blocks: none is preempted
    per_token = run.variant.facts(loaded.layers)["kv_bytes_per_token"]
    config = EngineConfig(
        kv_cache_dtype=next(word for word, meaning in words.items() if meaning == value),
        kv_cache_dtype_skip_layers=native,
        attention=kv_format.arithmetic,
        missing_scales="one",  # whether that is allowed was decided when the variant was made
        max_model_len=min(whole, loaded.max_model_len),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(2048, num_seqs),
        kv_cache_memory_bytes=num_seqs * (whole + _BLOCK) * per_token,
    )
    engine = Engine(loaded if kv_format.scales is not None else _without_scales(loaded), config)
    # scales are arrays, which do not compare; they come from the same checkpoint
    made, wanted = (replace(each, scales=None) for each in (engine.kv.kv_format, kv_format))
    assert made == wanted, (made, wanted)
    return engine


def _without_scales(loaded: LoadedModel) -> LoadedModel:
    """The same model from a checkpoint that holds no scales: FP8 then means scale 1.0."""
    checkpoint = loaded.checkpoint
    scales = checkpoint.scale_tensors
    plain = replace(
        checkpoint,
        config={k: v for k, v in checkpoint.config.items() if k != "quantization_config"},
        tensors={name: info for name, info in checkpoint.tensors.items() if name not in scales},
        stray={},
    )
    return replace(loaded, checkpoint=plain)
