"""Compilation ahead of use: plans that call every kernel, with all types of arguments."""

from __future__ import annotations

import numpy as np

from evenkeel.partitioning.api import partition
from evenkeel.partitioning.refinements import plan_round, slice_round
from evenkeel.partitioning.registry import BUILT_IN
from evenkeel.partitioning.rounds import RoundOptions, RoundSamples
from evenkeel.partitioning.splits import SpanCosts, SplitOptions, table_of


def warm_up() -> None:
    """Compile every kernel, or load it from where it is kept, so that no later call has to."""
    homes = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 0, 1, 0], np.int32)
    costs = np.array([1, 1, 1, 2, 60, 3, 5, 70, 8, 9, 1, 1, 33])
    for strategy in BUILT_IN:
        for counts in ("equal", "free"):
            partition(costs, homes, 3, strategy=strategy, counts=counts, speeds=[1, 2, 1], tolerance=0.0)
            partition(costs * 1.0, homes, 3, strategy=strategy, counts=counts, nodes=[0, 1, 1], tolerance=0.0)
    partition([10] * 5 + [0] * 3, [0] * 4 + [1] * 4, 2, tolerance=0.0, move_price=0.0)  # one rank must take three tens
    samples = RoundSamples(
        batch_sizes=np.full((2, 1), 2), costs=np.arange(4), lengths=np.ones((4, 1), np.uint32),
        users=np.array([0, 1, 0, 1], np.uint32),
    )  # fmt: skip
    slice_round(plan_round(samples, RoundOptions()), samples)
    spans = SpanCosts.of([900, 9, 9], per_position=1)
    samples = RoundSamples(
        batch_sizes=np.array([[2], [1]]), costs=spans.whole, lengths=spans.positions[:, None].astype(np.int64),
        divisible=table_of(spans.take([0]), np.zeros(1, np.int64), np.zeros(1)), roles=np.ones(1, np.int64),
    )  # fmt: skip
    slice_round(plan_round(samples, RoundOptions(split=SplitOptions())), samples)
