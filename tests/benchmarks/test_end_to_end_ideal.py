"""Batches that need no balancing do the work of those that do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.end_to_end_ideal import ideal_batches
from benchmarks.end_to_end_rank import sample_lengths
from examples.datasets import Keys, SyntheticSequences, ZipfLengths
from examples.hstu.model import ModelOptions


@pytest.mark.parametrize("interleaved", [True, False])
def test_same_lengths_on_all_ranks_and_the_same_work_in_each_step(interleaved: bool) -> None:
    ranks, steps = 3, 5
    model = ModelOptions(num_layers=2, width=64, num_heads=2, head_dim=32, interleaved=interleaved)
    data = [
        SyntheticSequences(
            num_batches=steps, batch_size=16, lengths=ZipfLengths(exponent=1.2, maximum=512), items=Keys(count=1000),
            interleaved=interleaved, seed=4, rank=rank,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    cost = model.cost()
    flops = np.array([[cost(batch) for batch in of_rank] for of_rank in data])

    ideal = [ideal_batches("ideal", flops, of_rank, model) for of_rank in data]
    for step, of_ranks in enumerate(zip(*ideal, strict=True)):
        assert all(torch.equal(of_ranks[0].num_history, batch.num_history) for batch in of_ranks)
        assert not torch.equal(of_ranks[0].history, of_ranks[1].history)
        assert of_ranks[0].num_history.unique().numel() > 3
        # Lengths are whole numbers.
        assert cost(of_ranks[0]).sum() * ranks == pytest.approx(flops[:, step].sum(), rel=0.02)
    total = sum(float(cost(batch).sum()) for of_rank in ideal for batch in of_rank)
    assert total == pytest.approx(flops.sum(), rel=5e-3)

    fixed = [batch for of_rank in data for batch in ideal_batches("fixed", flops, of_rank, model)]
    assert len(torch.cat([batch.num_history for batch in fixed]).unique()) == 1
    assert sum(float(cost(batch).sum()) for batch in fixed) == pytest.approx(flops.sum(), rel=0.02)
    if interleaved:
        assert sample_lengths(fixed[:1], model)["tokens"][0][0] % 2 == 1  # context, pairs, a candidate
