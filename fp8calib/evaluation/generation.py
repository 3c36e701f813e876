"""Greedy text under each cache: where it leaves native's, and whether it starts to repeat itself.

Two greedy runs part at the first near-tie and go their own ways afterwards, so a difference alone
means little; what FP8 must not do is degenerate where native does not.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fp8calib import console
from fp8calib.evaluation.bootstrap import Estimate, paired_means
from fp8calib.evaluation.engines import make_engine
from fp8calib.evaluation.variants import Run
from fp8calib.runtime.request import Request
from fp8calib.runtime.sampling_params import SamplingParams

PROMPTS = 8
PROMPT_TOKENS = 64
_NGRAM = 4
_RUNAWAY = 0.9

Outputs = dict[str, list[list[int]]]  # by variant, the tokens after each prompt


@dataclass(frozen=True)
class Output:
    """One continuation. first_difference: the first token (from 0) that is not native's, None if
    all are; agreement: share of tokens equal to native's at the same place; compression_ratio:
    bytes of text over bytes after zlib; repeat_rate: share of 4-grams of tokens that occurred
    earlier in the output."""

    prompt: str
    text: str
    first_difference: int | None
    agreement: float
    compression_ratio: float
    repeat_rate: float


@dataclass(frozen=True)
class GeneratedVariant:
    """Means over the prompts of a variant; `_increase`s are differences to native. runaways:
    outputs whose second half repeats itself where native's does not; identical: outputs equal to
    native's."""

    key: str
    identical: int
    first_difference: Estimate
    agreement: Estimate
    compression_ratio: Estimate
    compression_increase: Estimate
    repeat_rate: Estimate
    repeat_increase: Estimate
    runaways: int
    outputs: list[Output]


@dataclass(frozen=True)
class GenerationCheck:
    """`tokens` were generated after each of `prompts` prompts of up to `prompt_tokens` tokens."""

    tokens: int
    prompts: int
    prompt_tokens: int
    variants: list[GeneratedVariant]


def generate(
    runs: Sequence[Run], prompts: Sequence[Sequence[int]], num_tokens: int, outputs: Outputs
) -> None:
    """Continue every prompt greedily by `num_tokens` tokens, past the end-of-text token, under
    every variant; `outputs` receives a variant when it is done."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    longest = max(map(len, prompts)) + num_tokens
    total = len(runs) * len(prompts) * num_tokens
    with console.progress("generating (tokens)", total) as bar:
        for run in runs:
            engine = make_engine(run, len(prompts), longest)
            requests: list[Request] = [
                engine.add_request(params, prompt_token_ids=ids) for ids in prompts
            ]
            while engine.has_unfinished_requests:
                rate = f"{engine.stats.tokens_per_second:,.0f} tokens/s"
                bar.advance(len(engine.step()), rate)
            outputs[run.variant.key] = [request.output_token_ids for request in requests]


def check_generation(
    runs: Sequence[Run], prompts: Sequence[Sequence[int]], num_tokens: int, outputs: Outputs
) -> GenerationCheck | None:
    """What `generate` found of the variants that it finished; None where native is all, or not
    even that."""
    done = [run for run in runs if run.variant.key in outputs]
    if len(done) < 2 or done[0] is not runs[0]:
        return None
    decode = runs[0].loaded.tokenizer.decode
    native = outputs[done[0].variant.key]
    found = {
        run.variant.key: [
            _output(decode(prompt), decode(tokens), tokens, own)
            for prompt, tokens, own in zip(prompts, outputs[run.variant.key], native, strict=True)
        ]
        for run in done
    }
    variants = [
        _variant(run.variant.key, found[run.variant.key], found[done[0].variant.key], outputs)
        for run in done
    ]
    return GenerationCheck(num_tokens, len(prompts), max(map(len, prompts)), variants)


def _output(prompt: str, text: str, tokens: Sequence[int], native: Sequence[int]) -> Output:
    same = np.array(tokens) == np.array(native)
    raw = text.encode(errors="replace")
    return Output(
        prompt=prompt,
        text=text,
        first_difference=None if same.all() else int(same.argmin()),
        agreement=float(same.mean()),
        compression_ratio=len(raw) / len(zlib.compress(raw)),
        repeat_rate=repeat_rate(tokens),
    )


def _variant(
    key: str, found: Sequence[Output], native: Sequence[Output], outputs: Outputs
) -> GeneratedVariant:
    own, base = outputs[key], outputs[next(iter(outputs))]
    pairs = zip(own, base, strict=True)
    estimate = paired_means(
        first_difference=np.array(
            [len(own[0]) if o.first_difference is None else o.first_difference for o in found]
        ),
        agreement=np.array([o.agreement for o in found]),
        ratio=np.array([o.compression_ratio for o in found]),
        native_ratio=np.array([o.compression_ratio for o in native]),
        repeat=np.array([o.repeat_rate for o in found]),
        native_repeat=np.array([o.repeat_rate for o in native]),
    )
    return GeneratedVariant(
        key=key,
        identical=sum(o.first_difference is None for o in found),
        first_difference=estimate(lambda mean: mean["first_difference"]),
        agreement=estimate(lambda mean: mean["agreement"]),
        compression_ratio=estimate(lambda mean: mean["ratio"]),
        compression_increase=estimate(lambda mean: mean["ratio"] - mean["native_ratio"]),
        repeat_rate=estimate(lambda mean: mean["repeat"]),
        repeat_increase=estimate(lambda mean: mean["repeat"] - mean["native_repeat"]),
        runaways=sum(_runs_away(mine) and not _runs_away(other) for mine, other in pairs),
        outputs=list(found),
    )


def _runs_away(tokens: Sequence[int]) -> bool:
    return repeat_rate(tokens[len(tokens) // 2 :]) > _RUNAWAY


def repeat_rate(tokens: Sequence[int]) -> float:
    """Share of the 4-grams of `tokens` that occurred before; 0 for fewer tokens than that."""
    grams = [tuple(tokens[i : i + _NGRAM]) for i in range(len(tokens) - _NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
