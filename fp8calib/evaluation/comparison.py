"""The same prompts on a native and on an FP8 cache: where the answers part, and by how much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fp8calib.console import progress
from fp8calib.errors import UserError
from fp8calib.runtime.config import EngineConfig
from fp8calib.runtime.engine import Engine
from fp8calib.runtime.kv_cache_dtype import NATIVE_WORDS, choose_kv_format
from fp8calib.runtime.kv_format import KVFormat
from fp8calib.runtime.loader import LoadedModel
from fp8calib.runtime.sampling_params import SamplingParams
from fp8calib.runtime.scoring import score


@dataclass(frozen=True)
class Side:
    """One of the two caches: its format in words, the bytes of K and V that a token takes, the
    most that were held at a time, and the speed of generation."""

    kv_cache: str
    kv_bytes_per_token: float
    kv_bytes: int
    tokens_per_second: float


@dataclass(frozen=True)
class Answer:
    """An answer's tokens and its text, in three: what the other cache says too, the first token
    that differs, and the rest."""

    token_ids: list[int]
    shared: str
    differing: str
    rest: str


@dataclass(frozen=True)
class Pair:
    """The two answers to one prompt.

    first_difference: the first token, counted from 0, in which they differ; None: they are equal.
    logprob_gaps: for each token of the native answer, its log probability on the FP8 cache less
    that on the native one, both after the same tokens.
    """

    prompt: str
    native: Answer
    fp8: Answer
    first_difference: int | None
    logprob_gaps: list[float]


@dataclass(frozen=True)
class Comparison:
    native: Side
    fp8: Side
    warnings: list[str]
    pairs: list[Pair]

    @property
    def mean_abs_gap(self) -> float:
        """Of all tokens of native answers, in nats."""
        gaps = [abs(gap) for pair in self.pairs for gap in pair.logprob_gaps]
        return sum(gaps) / len(gaps)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"mean_abs_logprob_gap": self.mean_abs_gap}


def compare(
    loaded: LoadedModel,
    config: EngineConfig,
    prompts: Sequence[tuple[str, Sequence[int]]],
    params: SamplingParams,
) -> Comparison:
    """Answer `prompts`, each a text and its token ids, on the FP8 cache of `config` and on a native
    one; the two engines run one after the other, and share the model.

    Raises:
        UserError: the cache of `config` is native, or several answers a prompt are asked for.
    """
    if params.n != 1:
        raise UserError("a comparison has one answer to each prompt: n is 1")
    _check_fp8(loaded, config)
    native_word = next(w for w, dtype in NATIVE_WORDS.items() if dtype == loaded.model.dtype)
    native_config = replace(
        config,
        kv_cache_dtype=native_word,
        kv_cache_dtype_skip_layers=None,
        attention="accurate",
    )
    native = _run(loaded, native_config, prompts, params, "native cache")
    fp8 = _run(loaded, config, prompts, params, "FP8 cache")
    gaps = _gaps(loaded, native, fp8, [ids for _, ids in prompts])
    decode = loaded.tokenizer.decode
    pairs = [
        _pair(decode, text, plain, quantized, gap)
        for (text, _), plain, quantized, gap in zip(
            prompts, native.answers, fp8.answers, gaps, strict=True
        )
    ]
    return Comparison(native.side, fp8.side, fp8.warnings, pairs)


@dataclass(frozen=True)
class _Run:
    """What one engine made of the prompts."""

    kv_format: KVFormat
    side: Side
    warnings: list[str]
    answers: list[list[int]]


def _check_fp8(loaded: LoadedModel, config: EngineConfig) -> None:
    chosen = choose_kv_format(
        loaded,
        config.kv_cache_dtype,
        config.kv_cache_dtype_skip_layers,
        config.attention,
        config.missing_scales,
    )
    if not chosen.kv_format.fp8_layers:
        raise UserError(
            "there is nothing to compare: both caches would be native; add --kv-cache-dtype fp8, "
            "or give a calibrated checkpoint"
        )


def _run(
    loaded: LoadedModel,
    config: EngineConfig,
    prompts: Sequence[tuple[str, Sequence[int]]],
    params: SamplingParams,
    name: str,
) -> _Run:
    engine = Engine(loaded, config)
    requests = [engine.add_request(params, text, ids) for text, ids in prompts]
    with progress(name, len(requests)) as bar:
        while any(request.finish_reason is None for request in requests):
            done = sum(request.finish_reason is not None for request in engine.step())
            bar.advance(done, f"{engine.stats.tokens_per_second:.1f} tokens/s")
    if error := next((request.error for request in requests if request.error), None):
        raise error
    side = Side(
        kv_cache=engine.kv.kv_format.describe(loaded.layers),
        kv_bytes_per_token=sum(engine.store.block_bytes()) / engine.store.block_size,
        kv_bytes=engine.stats.kv_bytes,
        tokens_per_second=engine.stats.tokens_per_second,
    )
    run = _Run(
        engine.kv.kv_format,
        side,
        engine.warnings,
        [request.output_token_ids for request in requests],
    )
    del engine
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the next engine counts what is free
    return run


def _gaps(
    loaded: LoadedModel, native: _Run, fp8: _Run, prompts: Sequence[Sequence[int]]
) -> list[list[float]]:
    """For each token of the native answers: its log probability on FP8 pages less that on native
    ones. Both read the same tokens, so that the gap says nothing of answers that have parted."""
    rows = [[*ids, *answer[:-1]] for ids, answer in zip(prompts, native.answers, strict=True)]
    gaps: list[list[float]] = [[] for _ in rows]
    both = [score(loaded.model, loaded.layers, run.kv_format, rows) for run in (native, fp8)]
    for plain, quantized in zip(*both, strict=True):
        first = len(prompts[plain.row]) - 1  # what follows this token is the answer
        skipped = max(0, first - plain.start)
        if skipped >= len(plain.logits):
            continue
        answer = native.answers[plain.row][plain.start + skipped - first :]
        values = [_logprobs(one.logits[skipped:], answer) for one in (plain, quantized)]
        gaps[plain.row] += (values[1] - values[0]).tolist()
    return gaps


def _logprobs(logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """float32 [n], of the n first of `tokens`, under `logits` [n, vocabulary]."""
    index = torch.tensor(tokens[: len(logits)], device=logits.device)
    return logits.float().log_softmax(-1).gather(1, index[:, None])[:, 0].cpu()


def _pair(
    decode: Callable[..., str],
    prompt: str,
    native: list[int],
    fp8: list[int],
    gaps: list[float],
) -> Pair:
    shared = next(
        (n for n, (a, b) in enumerate(zip(native, fp8, strict=False)) if a != b),
        min(len(native), len(fp8)),
    )
    return Pair(
        prompt=prompt,
        native=_answer(decode, native, shared),
        fp8=_answer(decode, fp8, shared),
        first_difference=None if native == fp8 else shared,
        logprob_gaps=gaps,
    )


def _answer(decode: Callable[..., str], token_ids: list[int], shared: int) -> Answer:
    """Cut at the first difference, and behind the token there."""
    parts = (token_ids[:shared], token_ids[shared : shared + 1], token_ids[shared + 1 :])
    return Answer(token_ids, *(decode(part, skip_special_tokens=False) for part in parts))
