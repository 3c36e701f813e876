"""`fp8calib run --compare`: the same prompts on a native and on an FP8 cache, side by side."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fp8calib.cli.run import shortened
from fp8calib.console import info, print_json, print_side_by_side, print_table, warn
from fp8calib.evaluation.comparison import Answer, Comparison, Pair, Side, compare
from fp8calib.runtime.chat_template import render_chat
from fp8calib.runtime.config import EngineConfig
from fp8calib.runtime.loader import load
from fp8calib.runtime.sampling_params import SamplingParams
from fp8calib.runtime.tokenize import tokenize
from fp8calib.sizes import size_text


def run_compare(
    model: str,
    engine_options: dict[str, Any],
    texts: list[str],
    chat: bool,
    params: SamplingParams,
    json: bool,
) -> None:
    """Answer the prompts twice and show both, as a table on stdout or as JSON."""
    config = EngineConfig(**engine_options)
    loaded = load(
        model,
        device=config.device,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
    )
    prompts = [(text, _token_ids(loaded.tokenizer, text, chat)) for text in texts]
    found = compare(loaded, config, prompts, params)
    if json:
        report = {"model": model, "sampling_params": asdict(params)} | found.to_dict()
        print_json(report)
        return
    for warning in found.warnings:
        warn(warning)
    _show(found)


def _token_ids(tokenizer: Any, text: str, chat: bool) -> list[int]:
    if chat:
        return render_chat(tokenizer, [{"role": "user", "content": text}])[1]
    return tokenize(tokenizer, text)


def _show(found: Comparison) -> None:
    for pair in found.pairs:
        print_side_by_side(
            shortened(pair.prompt),
            ("native", _parts(pair.native)),
            ("fp8", _parts(pair.fp8)),
            _caption(pair),
        )
    sides = (("native", found.native), ("fp8", found.fp8))
    columns = ["", "KV cache", "bytes/token", "held at most", "tokens/s"]
    print_table("KV memory", columns, [_row(name, side) for name, side in sides])
    same = sum(pair.first_difference is None for pair in found.pairs)
    info(
        f"{same} of {len(found.pairs)} answers are the same; log probability of the native "
        f"answers' tokens: {found.mean_abs_gap:.4f} nats apart in the mean"
    )


def _parts(answer: Answer) -> tuple[str, str, str]:
    return answer.shared, answer.differing, answer.rest


def _caption(pair: Pair) -> str:
    largest = max(pair.logprob_gaps, key=abs)
    gap = f"largest log-probability gap {largest:+.4f} nats"
    if pair.first_difference is None:
        return f"all {len(pair.native.token_ids)} tokens are the same; {gap}"
    where = pair.first_difference
    own = ""
    if where < len(pair.logprob_gaps):
        own = f"there {pair.logprob_gaps[where]:+.4f}, "
    return (
        f"token {where + 1} is the first to differ; log-probability gap {own}largest {largest:+.4f}"
    )


def _row(name: str, side: Side) -> list[str]:
    return [
        name,
        side.kv_cache,
        f"{side.kv_bytes_per_token:,.0f}",
        size_text(side.kv_bytes),
        f"{side.tokens_per_second:.1f}",
    ]
