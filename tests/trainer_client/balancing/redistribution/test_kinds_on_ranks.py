"""What a loader says of padding, of values that follow from samples, and of memory that is used again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer_client.balancing.redistribution.pool import GlooRanks, group_of
from trainer_client import BalancedLoader, Balancer, BatchSpec
from trainer_client.balancing import SchemaMismatchError
from trainer_client.balancing.batches import BatchError

WORLD = 2


def _train_without_data(rank: int) -> list[tuple[int, list[int]]]:
    spec = BatchSpec(derived={"total": lambda batch: int(batch["x"].sum())})  # cannot be pickled
    batches = [] if rank else [{"x": torch.tensor([1, 2, 3, 4]), "total": 10}]
    with Balancer.embedded(process_group=group_of(WORLD)) as balancer:
        loader = BalancedLoader(batches, balancer, cost=lambda batch: batch["x"], spec=spec)
        return [(batch["total"], batch["x"].tolist()) for batch in loader]


def test_a_rank_that_never_had_a_batch_computes_what_follows_from_its_samples(ranks: GlooRanks) -> None:
    found = ranks.call(_train_without_data, [(rank,) for rank in range(WORLD)])
    assert sorted(sample for rank in found for _, own in rank for sample in own) == [1, 2, 3, 4]
    assert found[1][0][1], "samples have moved"
    assert all(total == sum(own) for rank in found for total, own in rank)


def _train_undeclared(rank: int) -> str:
    batch = {"id": torch.arange(3), "tokens": torch.zeros(3, (9, 2)[rank], dtype=torch.int64)}
    with (
        Balancer.embedded(process_group=group_of(WORLD)) as balancer,
        pytest.raises(
            SchemaMismatchError, match=r"rank 0 has tokens: int64\[9\].*rank 1 has tokens: int64\[2\]"
        ) as told,
    ):
        list(BalancedLoader([batch], balancer, cost=lambda batch: batch["id"] + 1))
    return str(told.value)


def test_undeclared_padding_is_refused_with_its_remedy(ranks: GlooRanks) -> None:
    for error in ranks.call(_train_undeclared, [(rank,) for rank in range(WORLD)]):
        assert "if 'tokens' is padded to the longest sample of its batch, declare it in BatchSpec.padded" in error


def _reused(kind: str) -> Iterator[dict[str, Any]]:
    """One buffer for all batches, written through torch or through NumPy."""
    array = np.zeros(4, dtype=np.int64)
    tensor = torch.from_numpy(array) if kind == "numpy" else torch.zeros(4, dtype=torch.int64)
    for step in range(6):
        if kind == "numpy":
            array[:] = np.arange(4) + 10 * step
        else:
            tensor.copy_(torch.arange(4) + 10 * step)
        yield {"x": tensor if kind == "torch" else array}


def _train_here(batches: Any, copy: bool) -> list[list[int]]:
    with Balancer.off() as balancer:
        spec = BatchSpec(copy=copy)
        loader = BalancedLoader(batches, balancer, cost=lambda batch: np.ones(len(batch["x"])), spec=spec)
        return [batch["x"].tolist() for batch in loader]


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_memory_that_a_loader_uses_again_is_copied_or_refused(kind: str) -> None:
    assert _train_here(_reused(kind), True) == [[10 * step + index for index in range(4)] for step in range(6)]
    with pytest.raises(BatchError, match=r"'x' of a batch was written to before its samples moved.*copy=True"):
        _train_here(_reused(kind), False)


def test_batches_that_a_loader_gives_again_are_no_reuse() -> None:
    batch = {"x": torch.arange(3), "same": torch.ones(3), "view": torch.arange(6.0).view(3, 2)[:, 1]}
    assert _train_here([batch] * 5, False) == [[0, 1, 2]] * 5
