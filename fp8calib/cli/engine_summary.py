"""What a person is told of an engine at its start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8calib.runtime.llm import LLM


def show_engine(llm: LLM) -> None:
    """The cache's format, the arithmetic, and how much fits, on stderr."""
    from fp8calib.checkpoint.serving import SKIP_FLAG
    from fp8calib.console import info

    kv = llm.engine.kv
    info(f"KV cache: {kv.kv_format.describe(llm.engine.loaded.layers)}")
    if kv.recorded:
        flag = " ".join(kv.skip_layers)
        info(
            f"layers {flag} are left native, as the checkpoint records; "
            f"vLLM needs for the same: {SKIP_FLAG} {flag}"
        )
    info(f"attention: {arithmetic(llm)}")
    info(llm.engine.describe_cache())


def arithmetic(llm: LLM) -> str:
    """In which arithmetic the products of attention, QK and PV, are computed."""
    kv_format = llm.engine.kv.kv_format
    native = str(kv_format.native).removeprefix("torch.")
    if not kv_format.fp8_layers:
        return f"QK and PV in {native}"
    if kv_format.arithmetic == "fp8":
        scale = "q_scale" if kv_format.scales and kv_format.scales.has_query else "scale 1.0"
        words = f"QK in e4m3, queries quantized by {scale}; PV in e4m3, probabilities too"
    else:
        words = f"QK and PV on FP8 pages, queries and probabilities in {native}"
    if len(kv_format.fp8_layers) < len(llm.engine.loaded.layers):
        words += f"; in native layers, {native}"
    return words


def engine_report(llm: LLM) -> dict[str, Any]:
    """The same for --json, with what was counted."""
    engine = llm.engine
    stats = engine.stats
    names = ("prompt_tokens", "generated_tokens", "seconds", "tokens_per_second")
    more = ("kv_bytes", "bf16_kv_bytes", "pages_total", "prefix_cache_hits", "preemptions")
    return {
        "model": engine.loaded.name,
        "kv_cache": engine.kv.kv_format.describe(engine.loaded.layers),
        "attention": engine.kv.kv_format.arithmetic,
        "arithmetic": arithmetic(llm),
        "memory": engine.describe_cache(),
        "skip_layers": engine.kv.skip_layers,
        "warnings": engine.warnings,
        "stats": {name: getattr(stats, name) for name in (*names, *more)},
    }
