"""Shared values that differ between ranks are refused on all of them by name; those that change with steps are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import balancer_of
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
