"""Decode plans: every tile of every pair is attended once, however the plan is made."""

import random

import fp8_paged_attention as fpa
import pytest
import torch
from kernel_cases import DEVICE

pytest.importorskip("triton", reason="CPU builds of torch come without triton")

TILE = 16


def read_plan(plan):
    """The tiles of each (sequence, head), and the programs' loads."""
    entries, pieces, loads = plan.entries.tolist(), {}, []
    for program in range(plan.grid):
        entry, load = program, 0
        while entry >= 0 and entries[entry][0] >= 0:
            sequence, head, first, end, slot, following, length, _ = entries[entry]
            pieces.setdefault((sequence, head), []).append((first, end, slot, length))
            load += end - first
            entry = following
        loads.append(load)
    return pieces, loads


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
def test_every_tile_is_attended_once(seed, many, monkeypatch):
    from fp8_paged_attention import plan as plan_module
    from fp8_paged_attention.device import Hardware
    from fp8_paged_attention.tuning import DecodeConfig

    rng = random.Random(seed)
    monkeypatch.setattr(plan_module, "MANY_PAIRS", 0 if many else 10**6)
    num_sms, heads = rng.choice([3, 20, 132]), rng.choice([1, 2, 4])
    monkeypatch.setattr(plan_module, "hardware", lambda device: Hardware(0, num_sms))
    lens = [rng.choice([0, 1, 15, 16, 17, rng.randrange(3000)]) for _ in range(rng.choice([1, 20]))]
    window, new = rng.choice([(None, 1), (50, 3)])
    pages = fpa.allocate(1, heads, 16, 16, 16, torch.uint8, DEVICE)
    plan = fpa.DecodePlan(
        *pages,
        num_q_heads=heads,
        max_num_seqs=len(lens),
        max_seqlen_q=new,
        sliding_window=window,
        config=DecodeConfig(TILE, 2, 2),
    )
    for stale in (plan.entries, plan.pairs):
        stale.fill_(77)
    plan.update(torch.tensor(lens, dtype=torch.int32, device=DEVICE))
    pieces, _ = read_plan(plan)
    pairs = {(b, h): (slot, count) for b, h, slot, count in plan.pairs.tolist()}
    joined = {(b, h) for b, h, _, _ in plan.pairs[: plan.join_grid].tolist()}
    assert set(pieces) == set(pairs) == {(b, h) for b in range(len(lens)) for h in range(heads)}
    slots = []
    for (sequence, head), parts in pieces.items():
        length = lens[sequence]
        position = 0 if window is None else max(0, length - new - window + 1) // TILE
        first_slot, count = pairs[sequence, head]
        assert count == len(parts)
        for i, (first, end, slot, recorded) in enumerate(sorted(parts)):
            assert recorded == length
            assert first == position or length == 0
            position = end
            assert slot == (first_slot + i if count > 1 else -1)
            slots.append(slot)
        assert position == -(-length // TILE)
        assert count == 1 or (sequence, head) in joined
    used = [slot for slot in slots if slot >= 0]
    assert len(used) == len(set(used)) and max(used, default=0) < plan.max_entries


def test_few_pairs_share_the_work_equally(monkeypatch):
    from fp8_paged_attention import plan as plan_module
    from fp8_paged_attention.device import Hardware
    from fp8_paged_attention.tuning import DecodeConfig

    monkeypatch.setattr(plan_module, "hardware", lambda device: Hardware(0, 8))
    pages = fpa.allocate(1, 1, 16, 16, 16, torch.uint8, DEVICE)
    plan = fpa.DecodePlan(*pages, num_q_heads=1, max_num_seqs=3, config=DecodeConfig(TILE, 2, 2))
    for lens in ([16 * 100, 16 * 7, 16 * 53], [16 * 32] * 2):
        plan.update(torch.tensor(lens, dtype=torch.int32, device=DEVICE))
        _, loads = read_plan(plan)
        assert max(loads) <= sum(lens) / TILE / 16 + 1


def test_many_short_sequences_are_cut_in_their_own_way(monkeypatch):
    from fp8_paged_attention import plan as plan_module
    from fp8_paged_attention.device import Hardware
    from fp8_paged_attention.tuning import DecodeConfig

    configs = {"few": DecodeConfig(32, 2, 2), "many": DecodeConfig(32, 2, 2)}
    configs["short"] = DecodeConfig(TILE, 2, 3)
    monkeypatch.setattr(plan_module, "MANY_PAIRS", 4)
    monkeypatch.setattr(plan_module, "hardware", lambda device: Hardware(0, 2))
    monkeypatch.setattr(plan_module, "decode_config", lambda k, v, kind: configs[kind])
    pages = fpa.allocate(1, 2, 16, 16, 16, torch.uint8, DEVICE)
    options = {"num_q_heads": 2, "max_num_seqs": 4}
    plan = fpa.DecodePlan(*pages, **options)
    lens = torch.tensor([100, 1024, 0, 33], dtype=torch.int32, device=DEVICE)
    most = plan.SHORT_TOKENS
    for count, bound, kind in (
        (1, most, "few"),
        (2, most, "many"),  # four pairs run at once
        (3, most, "short"),
        (3, most + 1, "many"),
        (3, None, "many"),
        (4, 1, "short"),
    ):
        plan.update(lens[:count], bound)
        assert (plan.kind, plan.config) == (kind, configs[kind])
        tile, pieces = plan.config.tile, read_plan(plan)[0]
        for (sequence, _), parts in pieces.items():
            tiles = sorted(tile for first, end, _, _ in parts for tile in range(first, end))
            assert tiles == list(range(-(-int(lens[sequence]) // tile)))
    assert [plan.depends_on_length(count) for count in (1, 2, 3)] == [False, False, True]
    windowed = fpa.DecodePlan(*pages, **options, sliding_window=64)
    assert windowed.update(lens).kind == "short" and not windowed.depends_on_length(4)
    same = fpa.DecodePlan(*pages, **options, config=configs["few"])
    assert not same.depends_on_length(4)
