"""Split samples end to end: planned, cut, moved and trained on ranks, as one process trains them whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trainer_client.attention.split_training import Case, train_split, train_whole
from tests.trainer_client.balancing.redistribution.pool import GlooRanks

CASES = [
    Case(world_size=2, seed=1),
    Case(world_size=3, seed=6, causal_kernel=True, again=True, parallel=True),
    Case(world_size=2, seed=7, window=2, steps=4),
    Case(world_size=3, seed=8, cap=70.0, samples=1, giants=0.4),
    Case(world_size=3, seed=13, attention="silu", candidates=2, sharded=True, again=True, steps=2),
    Case(world_size=2, seed=14, loop="torchrec", parallel=True, again=True),
]


def check(case: Case, ranks: GlooRanks) -> list[dict[str, Any]]:
    parts = ranks.call(train_split, [(case,)] * case.world_size)
    losses, gradients = train_whole(case)
    assert all((part["splits"], part["scales"]) == (parts[0]["splits"], parts[0]["scales"]) for part in parts)
    assert any(parts[0]["splits"]), "no sample was split"
    found: dict[int, float] = {}
    for part in parts:
        assert not found.keys() & part["losses"].keys(), "a sample was trained twice"
        found |= part["losses"]
    assert found == pytest.approx(losses, rel=1e-10, abs=1e-10)
    for number, expected in enumerate(gradients):
        total = torch.stack([part["gradients"][number] for part in parts]).sum(0)
        if case.parallel or case.sharded:  # each rank has the sum
            total = parts[0]["gradients"][number]
        torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-10)
    return parts


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_and_gradients_are_those_of_whole_samples(ranks: GlooRanks, case: Case) -> None:
    parts = check(case, ranks)
    for step, splits in enumerate(parts[0]["splits"]):
        for sample in splits:
            for piece in sample.pieces:
                assert piece.sequence < parts[piece.rank]["sequences"][step]


def test_on_nodes_of_two_ranks(ranks: GlooRanks) -> None:
    case = Case(
        world_size=4, seed=1, samples=1, steps=2, giants=0.2, node=2, candidates=2, attention="silu", again=True,
        prices=(1.0, 5.0),
    )  # fmt: skip
    splits = [sample for step in check(case, ranks)[0]["splits"] for sample in step]
    assert max(len(sample.pieces) for sample in splits) > 2
    on = [{piece.rank for piece in sample.pieces} for sample in splits]
    assert any(len({rank // case.node for rank in each}) > 1 for each in on), "no sample is on two nodes"
    assert any({0, 1} <= each for each in on)
