"""Whether a fact told somewhere in a long text is still found at its end.

A needle is a made-up sentence with a number, put into real text; the text ends with the sentence's
beginning, and the number is the answer. One teacher-forced pass scores it: the answer is found when
each of its tokens is the most likely one, which is when greedy generation would give it, and its
log-probability tells more than yes or no where a model is small.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fp8calib import console
from fp8calib.errors import UserError
from fp8calib.evaluation.bootstrap import Estimate, paired_means
from fp8calib.evaluation.variants import Run

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LENGTHS = (512, 2048, 8192, 32768, 131072, 524288)
TOGETHER = 5  # needles in one text
_SMALLEST = 256  # tokens
_CPU_TOKENS, _GPU_TOKENS = 512, 4096  # in a pass

_WHAT = ("vault code", "locker number", "radio channel", "harbour berth", "archive shelf")
_FIRST = ("Marrow", "Cinder", "Tallow", "Juniper", "Osprey", "Quarry", "Saffron", "Willow")
_SECOND = ("Bay", "Mill", "Point", "Ridge", "Lodge", "Ferry", "Hollow", "Tower")

Tokenize = Callable[[str], list[int]]


@dataclass(frozen=True)
class Question:
    """One text that asks for needles: `answers` are (start, end) of each answer in `tokens`, whose
    needles lie at `depths`, shares of the text before them; `filler` counts the tokens of real
    text."""

    length: int
    depths: tuple[float, ...]
    tokens: list[int]
    answers: tuple[tuple[int, int], ...]
    filler: int


# By variant, for each question done, for each answer: whether it is found, its log-probability.
Scores = dict[str, list[list[tuple[bool, float]]]]


@dataclass(frozen=True)
class Cell:
    """Of one length and depth, means over trials: share found, log-probability of the answer."""

    length: int
    depth: float
    found: float
    logprob: float


@dataclass(frozen=True)
class TogetherCell:
    """Of one length, means over the needles that lie in one text."""

    length: int
    found: float
    logprob: float


@dataclass(frozen=True)
class NeedleVariant:
    """found: share of answers found; kept: of those that native finds, the share found here, None
    where it finds none; logprob: mean log-probability of a whole answer, nats, and its change from
    native. Intervals are over texts."""

    key: str
    found: Estimate
    kept: Estimate | None
    logprob: Estimate
    logprob_change: Estimate
    grid: list[Cell]
    together: list[TogetherCell]


@dataclass(frozen=True)
class NeedleTest:
    lengths: list[int]
    depths: list[float]
    trials: int
    needles_together: int
    variants: list[NeedleVariant]


def needle_lengths(asked: Sequence[int] | None, max_model_len: int) -> list[int]:
    """The lengths asked for, or 512, 2048, ... and the model's maximum.

    Raises:
        UserError: a length that the model cannot have, or with no room for needles.
    """
    if asked is None:
        usual = [length for length in LENGTHS if _SMALLEST <= length < max_model_len]
        asked = [*usual, max_model_len] if max_model_len <= LENGTHS[-1] else usual
    for length in asked:
        if not _SMALLEST <= length <= max_model_len:
            raise UserError(
                f"needle length {length}: this model takes {_SMALLEST} to {max_model_len} tokens"
            )
    return sorted(set(asked))


def make_questions(
    tokenize: Tokenize, haystack: Sequence[int], lengths: Sequence[int], trials: int, seed: int
) -> list[Question]:
    """For every length and trial, a text with a needle at each depth, one at a time, and one with
    all of them.

    Args:
        tokenize: text to ids, without special tokens.
        haystack: ids of real text, begun again from the front where it is too short.
    """
    rng = random.Random(seed)
    return [
        _question(tokenize, haystack, length, depths, rng)
        for length in sorted(lengths)
        for _ in range(trials)
        for depths in [*((depth,) for depth in DEPTHS), _spread(TOGETHER)]
    ]


def repeated_text(questions: Sequence[Question], haystack: Sequence[int]) -> list[str]:
    """A warning where questions are longer than the text they are made of."""
    lengths = sorted({each.length for each in questions if each.filler > len(haystack)})
    if not lengths:
        return []
    return [
        f"needles: the text has {len(haystack):,} tokens, so it repeats in questions of "
        f"{', '.join(map(str, lengths))} tokens; a larger --dataset or shorter --needle-lengths "
        "show what real text does"
    ]


def _spread(count: int) -> tuple[float, ...]:
    return tuple((number + 0.5) / count for number in range(count))


def _question(
    tokenize: Tokenize,
    haystack: Sequence[int],
    length: int,
    depths: tuple[float, ...],
    rng: random.Random,
) -> Question:
    places = rng.sample([f"{one} {two}" for one in _FIRST for two in _SECOND], len(depths))
    facts = [
        (tokenize(f"The {rng.choice(_WHAT)} of {place} is"), tokenize(f" {_number(rng)}"))
        for place in places
    ]
    gap, stop = tokenize("\n\n"), tokenize(".\n\n")
    needles = [[*gap, *asked, *answer, *stop] for asked, answer in facts]
    ending, answers = list(gap), dict[int, tuple[int, int]]()
    for number in rng.sample(range(len(facts)), len(facts)):  # not in the order of the text
        asked, answer = facts[number]
        ending += [*(stop if answers else []), *asked, *answer]
        answers[number] = (len(ending) - len(answer), len(ending))
    room = length - len(ending) - sum(map(len, needles))
    if room < 1:
        raise UserError(f"needle length {length}: the needles and questions alone are longer")
    text = _stretch(haystack, room, rng)
    tokens, before = list[int](), 0
    for depth, needle in zip(depths, needles, strict=True):
        place = round(depth * room)
        tokens += [*text[before:place], *needle]
        before = place
    tokens += text[before:]
    spans = [(len(tokens) + a, len(tokens) + b) for _, (a, b) in sorted(answers.items())]
    return Question(length, depths, [*tokens, *ending], tuple(spans), room)


def _number(rng: random.Random) -> int:
    return rng.randrange(10_000, 100_000)


def _stretch(haystack: Sequence[int], count: int, rng: random.Random) -> list[int]:
    """`count` consecutive tokens from a random place on."""
    start = rng.randrange(len(haystack))
    turns = -(-(start + count) // len(haystack))
    return (list(haystack) * turns)[start : start + count]


def answer_questions(runs: Sequence[Run], questions: Sequence[Question], scores: Scores) -> None:
    """Score every question under every variant; `scores` grows question by question."""
    rows = [question.tokens for question in questions]
    total = len(runs) * sum(map(len, rows))
    limit = _GPU_TOKENS if runs[0].loaded.model.device.type == "cuda" else _CPU_TOKENS
    scores.update({run.variant.key: [] for run in runs})
    with console.progress("looking for needles (tokens)", total) as bar:
        streams = [_answered(run, questions, limit) for run in runs]
        for number, answered in enumerate(zip(*streams, strict=True)):
            for run, found in zip(runs, answered, strict=True):
                scores[run.variant.key].append(found)
            bar.advance(len(runs) * len(rows[number]))


def _answered(
    run: Run, questions: Sequence[Question], limit: int
) -> Iterator[list[tuple[bool, float]]]:
    """For each question, its answers."""
    pieces = run.score([question.tokens for question in questions], limit)
    for question in questions:
        most_likely: dict[int, bool] = {}
        logprobs: dict[int, float] = {}
        seen = 0
        while seen < len(question.tokens):
            piece = next(pieces)
            seen = piece.start + len(piece.logits)
            wanted = [
                at for a, b in question.answers for at in range(a, b) if piece.start < at <= seen
            ]
            if wanted:
                places = torch.tensor(wanted) - 1 - piece.start
                logits = piece.logits[places.to(piece.logits.device)].float()
                targets = torch.tensor([question.tokens[at] for at in wanted]).to(logits.device)
                chosen = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].tolist()
                hits = (logits.argmax(-1) == targets).tolist()
                logprobs |= zip(wanted, chosen, strict=True)
                most_likely |= zip(wanted, hits, strict=True)
        yield [
            (all(most_likely[at] for at in range(a, b)), sum(logprobs[at] for at in range(a, b)))
            for a, b in question.answers
        ]


def summarise_needles(
    runs: Sequence[Run], questions: Sequence[Question], trials: int, scores: Scores
) -> NeedleTest | None:
    """None where no question has been answered under every variant."""
    done = min((len(scores.get(run.variant.key, [])) for run in runs), default=0)
    if not done:
        return None
    questions = questions[:done]
    native = scores[runs[0].variant.key][:done]
    return NeedleTest(
        lengths=sorted({question.length for question in questions}),
        depths=list(DEPTHS),
        trials=trials,
        needles_together=TOGETHER,
        variants=[
            _variant(run.variant.key, questions, scores[run.variant.key][:done], native)
            for run in runs
        ],
    )


Answers = list[list[tuple[bool, float]]]


def _variant(
    key: str, questions: Sequence[Question], own: Answers, native: Answers
) -> NeedleVariant:
    def sums(values: Callable[[int, int], float]) -> np.ndarray:
        return np.array(
            [sum(values(q, a) for a in range(len(own[q]))) for q in range(len(own))], dtype=float
        )

    estimate = paired_means(
        answers=sums(lambda q, a: 1),
        found=sums(lambda q, a: own[q][a][0]),
        logprob=sums(lambda q, a: own[q][a][1]),
        native_found=sums(lambda q, a: native[q][a][0]),
        native_logprob=sums(lambda q, a: native[q][a][1]),
        both=sums(lambda q, a: own[q][a][0] and native[q][a][0]),
    )
    any_found = any(hit for answers in native for hit, _ in answers)
    single: dict[tuple[int, float], list[tuple[bool, float]]] = {}
    together: dict[int, list[tuple[bool, float]]] = {}
    for question, answers in zip(questions, own, strict=True):
        if len(question.depths) == 1:
            single.setdefault((question.length, question.depths[0]), []).extend(answers)
        else:
            together.setdefault(question.length, []).extend(answers)
    return NeedleVariant(
        key=key,
        found=estimate(lambda mean: mean["found"] / mean["answers"]),
        kept=estimate(lambda mean: mean["both"] / mean["native_found"]) if any_found else None,
        logprob=estimate(lambda mean: mean["logprob"] / mean["answers"]),
        logprob_change=estimate(
            lambda mean: (mean["logprob"] - mean["native_logprob"]) / mean["answers"]
        ),
        grid=[Cell(length, depth, *_means(cell)) for (length, depth), cell in single.items()],
        together=[TogetherCell(length, *_means(cell)) for length, cell in together.items()],
    )


def _means(cell: Sequence[tuple[bool, float]]) -> tuple[float, float]:
    found, logprob = zip(*cell, strict=True)
    return sum(found) / len(found), sum(logprob) / len(logprob)
