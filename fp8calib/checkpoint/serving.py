"""What vLLM (0.32, 0.33) makes of a calibrated checkpoint: in sentences, and as a command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from fp8calib.scales import Strategy

SKIP_FLAG = "--kv-cache-dtype-skip-layers"


def serve_command(
    checkpoint: str, skip_layers: Sequence[str] = (), kv_cache_dtype: str = "auto"
) -> str:
    """The command that serves `checkpoint` as it was calibrated."""
    return shlex.join(["vllm", "serve", checkpoint, *serve_flags(skip_layers, kv_cache_dtype)])


def serve_flags(skip_layers: Sequence[str] = (), kv_cache_dtype: str = "auto") -> list[str]:
    """vLLM's flags for the cache. `auto`, its default, turns into fp8 where a kv_cache_scheme is
    declared; skip layers have no place in a checkpoint but the flag."""
    words = [] if kv_cache_dtype == "auto" else ["--kv-cache-dtype", kv_cache_dtype]
    return [*words, SKIP_FLAG, *map(str, skip_layers)] if skip_layers else words


def serving_notes(strategy: Strategy, has_query: bool, skip_layers: Iterable[str]) -> list[str]:
    """What the person who serves the checkpoint should know, one sentence each."""
    notes = ["--kv-cache-dtype auto, the default, resolves to fp8 (e4m3); an explicit dtype wins."]
    if strategy == "attn_head":
        notes.append(
            "Per-head scales need FlashAttention 3 or 4; other GPU backends refuse them, the CPU "
            "backend uses the largest of each layer. SGLang and TensorRT-LLM read per-tensor only."
        )
    else:
        notes.append("Per-tensor scales run on every attention backend with an FP8 cache.")
    if has_query:
        notes.append("q_scale is used where queries are quantized too (FlashAttention 3).")
    else:
        notes.append("There is no q_scale: where queries are quantized too, they use scale 1.0.")
    notes.append("--kv-cache-dtype fp8_e5m2 is refused by vLLM for a calibrated checkpoint.")
    if list(skip_layers):
        notes.append(f"Skip layers are not part of a checkpoint: pass {SKIP_FLAG} each time.")
    return notes
