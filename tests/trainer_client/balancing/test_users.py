"""Users on real ranks: their samples come together, and every sample is trained once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.trainer_client.balancing.jobs import balancer_of, run_in_turn
from trainer_client import BalancedLoader
from trainer_client.balancing.reading import read_users

RANKS, STEPS, SAMPLES = 4, 3, 32
FAR = 5 << 40  # what numbers of users begin at: more than 32 bits


def batches(rank: int, steps: int = STEPS) -> list[dict[str, torch.Tensor]]:
    """User-major data dealt out by stride: each user's samples are on all ranks, and are as long as they are old."""
    found = []
    for step in range(steps):
        ids = torch.arange(SAMPLES) * RANKS + rank + 1000 * step
        user = torch.arange(SAMPLES) * RANKS // 8
        lengths = torch.randint(50, 2000, (SAMPLES,), generator=torch.Generator().manual_seed(step))[user]
        found.append({"id": ids, "user": FAR + user, "length": lengths + torch.arange(SAMPLES) % 8 + rank})
    return found


def cost_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return batch["length"] * (1000 + batch["length"])


Trained = list[tuple[list[int], list[int], float]]
"""Of each step of a rank: ids, users, how uneven the loads of all ranks are."""


def _train(rank: int, named: bool) -> Trained:
    with balancer_of(None, f"users-{named}", window=2) as balancer:
        users = (lambda batch: batch["user"]) if named else None
        loader = BalancedLoader(batches(rank), balancer, cost=cost_of, users=users)
        trained = []
        for batch in loader:
            report = loader.report
            trained.append((batch["id"].tolist(), batch["user"].tolist(), report.imbalance))
        return trained


def users_on_ranks(results: list[Trained]) -> int:
    """Users that each rank has samples of, summed over ranks and steps."""
    return sum(len(set(users)) for trained in results for _, users, _ in trained)


def test_samples_of_a_user_come_to_one_rank() -> None:
    """As they do where a service plans, says `tests/services/balancer/test_calls`."""
    found, without = run_in_turn(RANKS, (_train, True), (_train, False))
    everything = sorted(one for rank in range(RANKS) for batch in batches(rank) for one in batch["id"].tolist())
    assert sorted(one for trained in found for ids, _, _ in trained for one in ids) == everything
    for (_, _, imbalance), (_, _, before) in zip(found[0], without[0], strict=True):
        assert imbalance <= before
    assert users_on_ranks(found) < 0.6 * users_on_ranks(without)


def test_numbers_of_users_keep_them_apart() -> None:
    small = np.arange(100_000)
    assert (read_users(small, small.size) == small).all()
    for users in (small << 32, (small << 32) + small, -small, small * 0x1234_5678_9ABC, (small % 256 << 32) + small):
        assert np.unique(read_users(users, users.size)).size > 0.999 * np.unique(users).size
    assert read_users(np.array([2**64 - 1, 5], np.uint64), 2)[1] == 5
    assert read_users([], 0).size == 0
    for wrong, text in (
        ([1.0, np.nan], "users returned float64 values; return whole numbers"),
        ([[1, 2]], "users returned shape .* for 2 samples; return one number for each sample"),
    ):
        with pytest.raises(ValueError, match=text):
            read_users(wrong, 2)
