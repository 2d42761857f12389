"""Lists of objects in loops: values that are None or batches without samples change nothing of how they are read."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import balancer_of, run_in_turn
from trainer_client import BalancedLoader, BatchSpec


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def optional(rank: int, step: int) -> dict[str, Any]:
    """A batch of which all coupons are None on one rank in the first step, and on both in the third."""
    own = ids(*range(100 * step + 10 * rank, 100 * step + 10 * rank + (5 if rank == 0 else 2)))
    none = step == 2 or (step == 0 and rank == 1)
    batch = {"id": own, "coupon": [None if none else f"c{i}" for i in own.tolist()], "tags": [{} for _ in own]}
    if step >= 2:
        batch["more"] = own
    return batch


def train(rank: int, window: int) -> list[list[tuple[int, Any]]]:
    with balancer_of(None, window=window) as balancer:
        steps = [optional(rank, step) for step in range(4 if window == 1 else 2)]
        loader = BalancedLoader(steps, balancer, cost=lambda batch: torch.ones(len(batch["id"])))
        return [list(zip(batch["id"].tolist(), batch["coupon"], batch["tags"], strict=True)) for batch in loader]


def test_lists_of_optional_values_travel_with_their_samples() -> None:
    for window, results in zip((1, 2), run_in_turn(2, (train, 1), (train, 2)), strict=True):
        trained = sorted((one for batches in results for batch in batches for one in batch), key=lambda one: one[0])
        expected = []
        for step in range(4 if window == 1 else 2):
            for rank in range(2):
                batch = optional(rank, step)
                expected += zip(batch["id"].tolist(), batch["coupon"], batch["tags"], strict=True)
        assert trained == sorted(expected, key=lambda one: one[0])


def named(*numbers: int) -> dict[str, Any]:
    return {"id": ids(*numbers), "name": [f"u{number}" for number in numbers]}


def train_empty(rank: int) -> list[list[tuple[int, str]]]:
    with balancer_of(None, window=2) as balancer:
        data = [named(), named(4, 5)] if rank == 0 else [named(1, 2), named(3)]
        loader = BalancedLoader(data, balancer, cost=lambda batch: batch["id"] + 1)
        return [list(zip(batch["id"].tolist(), batch["name"], strict=True)) for batch in loader]


def by_hand(rank: int) -> list[list[tuple[int, str]]]:
    """Also with an empty batch whose field is of another kind than the others' are."""
    empty = named() | ({"name": ()} if rank else {"name": torch.zeros(0)})
    source = [named(1, 2), empty, named(9)] if rank == 0 else [named(4, 5, 6, 7), named(7, 8), empty]
    got = []
    with balancer_of(None) as balancer:
        submitted = [(batch, balancer.submit(batch, cost=lambda batch: batch["id"] + 1)) for batch in source[:1]]
        for following in (*source[1:], *[None] * 8):
            submitted.append((following, balancer.submit(following, cost=lambda batch: batch["id"] + 1)))
            moved = balancer.redistribute(*submitted.pop(0))
            if moved is None:
                break
            got.append(list(zip(moved["id"].tolist(), moved["name"], strict=True)))
    return got


def test_batches_without_samples_may_hold_lists() -> None:
    for results, count in zip(run_in_turn(2, (train_empty,), (by_hand,)), (5, 9), strict=True):
        trained = [one for batches in results for batch in batches for one in batch]
        assert len(trained) == count
        assert all(name == f"u{number}" for number, name in trained)


def another_batch(rank: int) -> Any:
    """A rank redistributes what it has not submitted."""
    with balancer_of(None) as balancer:
        batch = {"id": ids(1, 2), "n": ids(2, 1), "v": torch.zeros(3)}
        spec = BatchSpec(rows_per_sample={"v": "n"})
        ticket = balancer.submit(batch, cost=lambda batch: batch["id"], spec=spec)
        other = batch if rank else batch | {"id": ids(1, 2, 3)}
        try:
            got = [balancer.redistribute(other, ticket, spec=spec)["id"].tolist()]
            got.append(balancer.redistribute(None, balancer.submit(None, cost=len), spec=spec))
        except ValueError as error:
            return str(error)
        return got


def test_a_batch_that_was_not_submitted_ends_the_loops_of_all_ranks() -> None:
    error, other = run_ranks(2, another_batch)
    assert "batch sizes disagree" in error
    assert other[1] is None


def changing(_rank: int) -> str:
    def cost(batch: Any) -> Any:
        batch["id"] += 1
        return batch["id"]

    with balancer_of(None) as balancer:
        try:
            list(BalancedLoader([{"id": ids(1, 2)}], balancer, cost=cost))
        except ValueError as error:
            return str(error)
    return ""


def test_a_cost_that_writes_to_the_batch_is_named() -> None:
    assert "the cost function writes to 'id'" in run_ranks(1, changing)[0]
