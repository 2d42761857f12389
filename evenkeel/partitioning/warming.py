"""Compilation ahead of use: all kernels are called once."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.api import partition
from evenkeel.partitioning.errors import PartitionError
from evenkeel.partitioning.exchange import Arrays, give_light_company
from evenkeel.partitioning.matching import EXACT
from evenkeel.partitioning.memory import least_overflow
from evenkeel.partitioning.minimal_move import largest_load, moved_share
from evenkeel.partitioning.problem import ascending_order, crowding_bound
from evenkeel.partitioning.registry import BUILT_IN
from evenkeel.partitioning.slices import slice_plan
from evenkeel.partitioning.splits import SpanCosts
from evenkeel.partitioning.splits.cutting import divide, measure, pieces_at, place_pieces, recut, table_of


def warm_up() -> None:
    """Compile every kernel, or load it from where it is kept, so that no later call has to."""
    homes = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 0, 1, 0], np.int32)
    costs = np.array([1, 1, 1, 2, 60, 3, 5, 70, 8, 9, 1, 1, 33])
    for strategy in BUILT_IN:
        for counts in ("equal", "free"):
            partition(costs, homes, 3, strategy=strategy, counts=counts, speeds=[1, 2, 1], tolerance=0.0)
            partition(costs * 1.0, homes, 3, strategy=strategy, counts=counts, nodes=[0, 1, 1], tolerance=0.0)
    _cut()
    largest_load(costs, homes, np.ones(3))
    arrays, order, ranks = _example()
    give_light_company(arrays, order, ranks)
    moved_share(costs * 1.0, homes, np.zeros(3, np.int32), homes)
    crowding_bound(costs, ascending_order(costs), 1, 3)
    many = np.arange(EXACT + 1)
    partition(many, many // 3, many.size, strategy="lpt", nodes=many // 2)
    tight = np.array([6, 5, 5, 4, 4, 4, 1])
    at = [0, 0, 0, 1, 1, 1, 1]
    for caps in ([14.0, 15.0], [14.0, 14.0]):
        with suppress(PartitionError):
            partition(costs[:7], at, 2, memory=tight, memory_caps=caps)
    _least_overflow(tight)
    slice_plan(homes, np.bincount(homes), np.ones((homes.size, 2), np.int64))


def _cut() -> None:
    table, firsts, ranks = table_of(SpanCosts.of([9], per_position=1)), np.array([0, 2]), np.arange(2)
    begins, ends, nodes = np.array([0, 4]), np.array([4, 9]), np.zeros(2, np.int64)
    recut(np.zeros(2), np.ones(2), table, firsts, ranks, begins, ends, nodes, 0.0, 0.0, np.ones(ranks.size), 1)
    measure(np.zeros(2), table, firsts, ranks, begins, ends, nodes, 0.0, 0.0)
    times, costs = np.zeros(2), np.zeros(2)
    pieces_at(table, 0, 1.0, 0.0, 2, times, costs)
    divide(table, 0, 1.0, 0.0, times, costs)
    place_pieces(nodes[:1], nodes[:1], firsts, times, np.ones(2), np.ones(2), nodes, np.array([2]), 0.0)


def _example() -> tuple[Arrays, NDArray[np.int32], NDArray[np.int32]]:
    costs, homes = np.array([9, 4, 1, 2]), np.array([0, 0, 1, 1], np.int32)
    nothing, two = np.zeros(0, np.int64), np.full(2, 2)
    arrays = Arrays(
        costs=costs, sizes=costs * 1.0, homes=homes, memory=nothing, caps=nothing, fewest=two, most=two,
        speeds=np.ones(2), nodes=np.zeros(2, np.int32), limits=np.full(2, 9),
    )  # fmt: skip
    return arrays, np.array([2, 3, 1, 0], np.int32), homes.copy()


def _least_overflow(memory: NDArray[np.int64]) -> None:
    nothing, all_of_them, ranks = np.zeros(2, np.int64), np.full(2, memory.size), np.zeros(memory.size, np.int32)
    least_overflow(memory, np.full(2, 14), nothing, all_of_them, 1000, 99, ranks)
