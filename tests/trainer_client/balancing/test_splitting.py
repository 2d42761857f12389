"""Where the items of samples that may be split begin, found from what a cost says of positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evenkeel.partitioning.splits import Divisible
from trainer_client import BatchSpec, HSTUCost
from trainer_client.balancing.batches.flatten import flatten
from trainer_client.balancing.splitting import divisible_samples

COUNTS = [3, 400, 5]


@pytest.mark.parametrize("context", [0, 1, 3])
@pytest.mark.parametrize("candidates", [0, 1, 3])
@pytest.mark.parametrize("includes", [False, True])
def test_items_come_behind_the_context(context: int, candidates: int, includes: bool) -> None:
    cost = HSTUCost(
        num_layers=1, width=8, num_heads=1, head_dim=4, history="count", context=context, candidates=candidates,
        history_includes_candidates=includes,
    )  # fmt: skip
    batch = {"count": torch.tensor(COUNTS), "items": torch.arange(sum(COUNTS))}
    flat = flatten(batch, BatchSpec(sequence={"items"}, rows_per_sample={"items": "count"}))
    table = divisible_samples(cost, flat, flat, np.asarray(cost(flat)))
    assert table is not None
    found = Divisible.of_table(table)
    assert found.samples.tolist() == [1]
    assert found.first_items.tolist() == [context]
    assert found.positions.tolist() == [context + 400 + (0 if includes else candidates)]
