"""What batches hold beside tensors: values that ranks share, lists of objects, and what a cost may do to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import balancer_of, run_in_turn
from trainer_client import BalancedLoader, BatchSpec
from trainer_client.balancing.batches import flatten
from trainer_client.balancing.batches.schema import describe, digest

SPEC = BatchSpec(shared=["temperature", "names"])


def batch(rank: int, step: int, *, differ: bool) -> dict[str, Any]:
    samples = 0 if (rank, step) == (1, 1) else 2
    own = float(rank) if differ and step == 2 else 0.0
    scale = torch.tensor([step, own if samples else 7.0])
    return {"id": torch.arange(samples), "temperature": scale, "names": {"a": 1, "b": [2]}}


def train(rank: int) -> list[Any]:
    got: list[Any] = []
    for differ in (False, True):
        with balancer_of(None) as balancer:
            steps = [batch(rank, step, differ=differ) for step in range(4)]
            loader = BalancedLoader(steps, balancer, cost=lambda one: one["id"] + 1, spec=SPEC, name=f"{differ}")
            try:
                got.append(len(list(loader)))
            except ValueError as error:
                got.append(str(error))
    return got


def test_ranks_with_other_shared_values_are_refused_by_name() -> None:
    for steps, error in run_ranks(2, train):
        assert steps == 4
        assert "shared values differ between ranks: 'temperature' is float32[2] of digest" in error
        assert "on rank 1; samples of all ranks" in error


EQUAL = [
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}), (1, 1.0), ((1, 2), [1, 2]), (float("nan"), float("nan")),
    (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous()), (object(), object()),
]  # fmt: skip
OTHER = [
    (0.5, 0.7), (None, 0), ("a", "b"), ([1, 2], [2, 1]), ("x" * 100 + "a", "x" * 100 + "b"), (True, 1),
    (2**60, 2**60 + 1), (torch.ones(2), torch.zeros(2)), (torch.ones(2), torch.ones(3)), (np.ones(2), np.zeros(2)),
    ({"a": 1}, {"a": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_values_are_described_alike(one: Any, other: Any) -> None:
    assert digest(describe([("v", one)])) == digest(describe([("v", other)])) != 0


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_other_values_are_told_apart(one: Any, other: Any) -> None:
    assert digest(describe([("v", one)])) != digest(describe([("v", other)]))
    spec = BatchSpec(shared=["v"])
    assert (
        flatten({"x": torch.ones(2), "v": one}, spec).describe_shared()
        != flatten({"x": torch.ones(2), "v": other}, spec).describe_shared()
    )


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


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
