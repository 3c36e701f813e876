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
        ({"temperature": -0.1}, "temperature must be from 0 to 1000"),
        ({"temperature": 1001.0}, "temperature must be from 0 to 1000"),
        ({"temperature": float("nan")}, "temperature must be from 0 to 1000"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.5}, "top_p must be above 0"),
        ({"top_k": -2}, "top_k must be 0"),
        ({"seed": -1}, "seed must be from 0"),
        ({"stop": ["end", ""]}, "stop must be texts that are not empty"),
        ({"n": 0}, "n must be at least 1"),
        ({"min_p": 1.5}, "min_p must be from 0 to 1"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens must be from 0 to max_tokens"),
        ({"top_p": float("nan")}, "top_p must be above 0"),
        ({"min_p": float("nan")}, "min_p must be from 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be from 0.001 to 1000"),
        ({"repetition_penalty": 1e300}, "repetition_penalty must be from 0.001 to 1000"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be from -2 to 2"),
        ({"presence_penalty": 3.0}, "presence_penalty must be from -2 to 2"),
        ({"logprobs": -1}, "logprobs must be 0 or more"),
    ],
)
def test_parameters_out_of_range_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        SamplingParams(**wrong)


def test_the_largest_numbers_leave_logits_finite() -> None:
    """A temperature or penalty that a request may choose never looks like a model that fails."""
    logits = torch.tensor([[0.0, 5.0, -3.0, 65504.0, -65504.0]])
    for temperature in (0.0, 1000.0):
        for penalty in (0.001, 1000.0):
            sampler = Sampler(1, 5)
            params = SamplingParams(temperature=temperature, repetition_penalty=penalty)
            sampler.penalties.begin(0, [0, 1, 2, 3, 4], [])
            for position in range(20):
                row = SamplingRow(params, 3, position, banned=(3,))
                assert sampler.sample(logits, [row]).wait()[0][0] in (0, 1, 2, 4)


# --- min-p, penalties, early ends, log probabilities ---------------------------------------------


def test_min_p_is_a_share_of_the_likeliest() -> None:
    # Shares of the largest, in order: 1, 0.37, 0.13, 0.08, 0.05, 0.02.
    assert draw(SamplingParams(min_p=0.1)).nonzero().flatten().tolist() == [0, 2, 4]
    assert draw(SamplingParams(min_p=1.0)).nonzero().flatten().tolist() == [4]
    # top_k and top_p count what min_p left.
    assert draw(SamplingParams(min_p=0.3, top_p=0.8)).nonzero().flatten().tolist() == [0, 4]
    assert draw(SamplingParams(min_p=0.3, top_p=0.7)).nonzero().flatten().tolist() == [4]


def test_every_filter_that_leaves_all_changes_nothing() -> None:
    plain = draw(SamplingParams())
    for params in (SamplingParams(top_k=6), SamplingParams(top_p=0.9999), SamplingParams(top_k=-1)):
        assert (draw(params) - plain).abs().max() < 0.03


@pytest.mark.parametrize("logits", [[0.0, 1.0], [-torch.inf, 0.0, -torch.inf], [5.0, -torch.inf]])
def test_the_ends_of_the_random_range_hit_possible_tokens(logits: list[float]) -> None:
    from fp8calib.runtime.sampler import _invert

    row = torch.tensor([logits]).double().softmax(-1)
    for uniform in (0.0, 0.5, 1 - 2.0**-53):
        token = int(_invert(row, torch.tensor([uniform], dtype=torch.float64)))
        assert row[0, token] > 0


def penalised(
    logits: torch.Tensor, prompt: list[int], output: list[int], p: SamplingParams
) -> torch.Tensor:
    """As OpenAI and the CTRL paper define them, one token at a time."""
    result = logits.clone()
    for token in range(len(logits)):
        if token in prompt or token in output:
            positive = result[token] > 0
            result[token] *= 1 / p.repetition_penalty if positive else p.repetition_penalty
        result[token] -= p.frequency_penalty * output.count(token)
        result[token] -= p.presence_penalty * (token in output)
    return result


def test_penalties() -> None:
    torch.manual_seed(1)
    vocab, slots = 12, 3
    sampler = Sampler(slots, vocab)
    histories = [([1, 2, 2, 5], [2, 3, 3]), ([0], [])]
    params = [
        SamplingParams(temperature=0, repetition_penalty=1.7, frequency_penalty=0.4),
        SamplingParams(temperature=0, presence_penalty=1.5, frequency_penalty=-0.3),
    ]
    for slot, (prompt, output) in zip((2, 0), histories, strict=True):
        sampler.penalties.begin(slot, prompt, output)
    for step in range(8):
        logits = torch.randn(3, vocab)
        rows = [
            SamplingRow(params[0], 0, step, slot=2),
            SamplingRow(SamplingParams(temperature=0), 0, step, slot=1),
            SamplingRow(params[1], 0, step, slot=0),
        ]
        tokens = sampler.sample(logits, rows).wait()[0]
        assert tokens[1] == int(logits[1].argmax())
        for row, (prompt, output), one in zip((0, 2), histories, params, strict=True):
            assert tokens[row] == int(penalised(logits[row], prompt, output, one).argmax())
            output.append(tokens[row])
    # The next sequence in the slot does not inherit them.
    sampler.penalties.begin(2, [], [])
    logits = torch.randn(1, vocab)
    assert sampler.sample(logits, [SamplingRow(params[0], 0, 0, slot=2)]).wait()[0] == [
        int(logits.argmax())
    ]


def test_banned_tokens_do_not_come() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0], [5.0, 4.0, 3.0]])
    rows = [
        SamplingRow(SamplingParams(temperature=0), 0, 0, banned=(0, 1)),
        SamplingRow(SamplingParams(temperature=0), 0, 0),
    ]
    assert sample(logits, rows) == [2, 0]


def test_log_probabilities_are_the_models_own() -> None:
    """Before temperature and penalties; the token itself first, with its rank."""
    torch.manual_seed(0)
    logits = torch.randn(3, 40)
    rows = [
        SamplingRow(SamplingParams(temperature=2.0, logprobs=3), 7, 0),
        SamplingRow(SamplingParams(temperature=0), 0, 0),
        SamplingRow(SamplingParams(temperature=0, logprobs=0), 0, 0),
    ]
    tokens, logprobs = Sampler(1, 40).sample(logits, rows).wait()
    assert logprobs.keys() == {0, 2}
    expected = logits.log_softmax(-1)
    order = logits[0].argsort(descending=True).tolist()
    (own, *best) = logprobs[0]
    assert own[0] == tokens[0] and own[2] == order.index(tokens[0]) + 1
    assert [(token, rank) for token, _, rank in best] == [(order[i], i + 1) for i in range(3)]
    for token, value, _ in logprobs[0]:
        assert value == pytest.approx(float(expected[0, token]), abs=1e-5)
    assert [(token, rank) for token, _, rank in logprobs[2]] == [(int(logits[2].argmax()), 1)]


@pytest.mark.parametrize("length", [7, 640, 50257, 128256])
def test_the_likeliest_token_is_the_first_of_equals_and_nan_is_told(length: int) -> None:
    logits = torch.randn(4, length, generator=torch.Generator().manual_seed(0))
    logits[1, [length // 2, length - 1]] = 99.0
    logits[2, 3] = torch.nan
    logits[3] = -torch.inf
    sampler = Sampler(4, length)
    tokens = sampler.choose_likeliest(logits, torch.arange(4, dtype=torch.int32))
    assert tokens.tolist() == [int(logits[0].argmax()), length // 2, NAN, 0]
    assert sampler.last_tokens[:2].tolist() == tokens[:2].tolist()


def test_tokens_of_steps_that_overlap_stay_apart() -> None:
    """Waited for late and in any order; later steps use the same host memory again."""
    sampler, row = Sampler(1, 8), [SamplingRow(SamplingParams(temperature=0), 0, 0)]
    for first, second, third in ((1, 2, 3), (4, 5, 6)):
        steps = [
            sampler.sample(torch.nn.functional.one_hot(torch.tensor([token]), 8), row)
            for token in (first, second, third)
        ]
        assert [steps[i].wait()[0] for i in (1, 0, 2)] == [[second], [first], [third]]
    assert len(sampler._landings) == 3
