"""Sampling: random numbers from seed and position alone, and the filters of vLLM."""

from __future__ import annotations

import pytest
import torch

from fp8calib.errors import UserError
from fp8calib.runtime.sampler import NAN, Sampler, SamplingRow, uniforms
from fp8calib.runtime.sampling_params import SamplingParams

LOGITS = torch.tensor([2.0, 0.0, 1.0, -1.0, 3.0, 0.5]).log_softmax(-1)


def sample(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    return Sampler(1, logits.shape[1]).sample(logits, rows).wait()[0]


def draw(params: SamplingParams, count: int = 4000) -> torch.Tensor:
    """How often each token of LOGITS comes up over `count` positions."""
    rows = [SamplingRow(params, 7, position) for position in range(count)]
    tokens = sample(LOGITS.expand(count, -1), rows)
    return torch.bincount(torch.tensor(tokens), minlength=len(LOGITS)) / count


def splitmix64(state: int) -> int:
    """The finaliser as its authors wrote it, in Python's integers."""
    mask = (1 << 64) - 1
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
    return state ^ (state >> 31)


def test_random_numbers_are_splitmix64_of_seed_and_position() -> None:
    gamma, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    seeds, positions = [0, 1, 123456789, 2**63 - 1], [0, 5, 4096, 131072]
    expected = [
        (splitmix64((splitmix64((seed + gamma) & mask) + (pos + 1) * gamma) & mask) >> 11)
        * 2.0**-53
        for seed, pos in zip(seeds, positions, strict=True)
    ]
    assert uniforms(torch.tensor(seeds), torch.tensor(positions)).tolist() == expected


def test_random_numbers_are_uniform() -> None:
    many = uniforms(torch.full((20000,), 3), torch.arange(20000))
    assert torch.histc(many.float(), 10, 0, 1).sub(2000).abs().max() < 200  # 4.5 sigma
    neighbours = uniforms(torch.arange(20000), torch.full((20000,), 9))
    assert abs(float(torch.corrcoef(torch.stack([many, neighbours]))[0, 1])) < 0.03


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_shapes_the_distribution(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1)
    assert (draw(SamplingParams(temperature=temperature)) - expected).abs().max() < 0.03


def test_top_k_and_top_p_keep_the_likeliest() -> None:
    kept = draw(SamplingParams(top_k=2)).nonzero().flatten().tolist()
    assert kept == [0, 4]
    # Probabilities in order: 0.60, 0.22, 0.08...: it takes two to reach 0.7, one to reach 0.5.
    assert draw(SamplingParams(top_p=0.7)).nonzero().flatten().tolist() == [0, 4]
    assert draw(SamplingParams(top_p=0.5)).nonzero().flatten().tolist() == [4]
    # top_p counts what top_k left: of two tokens with 0.73 and 0.27, 0.7 keeps the first.
    assert draw(SamplingParams(top_k=2, top_p=0.7)).nonzero().flatten().tolist() == [4]
    shares = draw(SamplingParams(top_k=2))
    assert abs(float(shares[4]) - float((LOGITS[[4, 0]]).softmax(-1)[0])) < 0.03


def test_a_token_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 1000)
    params = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.9, temperature=0.7),
        SamplingParams(top_k=100, top_p=0.5),
    ]
    rows = [SamplingRow(one, seed=i, position=9 - i) for i, one in enumerate(params)]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert together == alone
    assert together[0] == int(logits[0].argmax())


def test_nan_logits_are_noticed() -> None:
    logits = torch.tensor([[0.0, torch.nan], [0.0, 1.0], [torch.nan, torch.nan]])
    rows = [
        SamplingRow(SamplingParams(temperature=t, top_k=k), 0, 0)
        for t, k in [(1, 0), (0, 0), (1, 1)]
    ]
    assert sample(logits, rows) == [NAN, 1, NAN]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"temperature": -0.1}, "temperature must be 0 or more"),
        ({"temperature": float("nan")}, "temperature must be 0 or more"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.5}, "top_p must be above 0"),
        ({"top_k": -2}, "top_k must be 0"),
        ({"seed": -1}, "seed must be from 0"),
        ({"stop": ["end", ""]}, "stop must be texts that are not empty"),
    ],
)
def test_parameters_out_of_range_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        SamplingParams(**wrong)
