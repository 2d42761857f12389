"""A few of the instances that `benchmarks.kernels_fuzz` runs by the hundred thousand under bounds checks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.kernels_fuzz import KINDS, instance
from benchmarks.kernels_fuzz_moves import check_bucketize, check_gathers, check_moves, check_order
from benchmarks.kernels_fuzz_partitions import check_answer, check_partition, check_slices, check_window
from benchmarks.kernels_fuzz_splits import check_split
from evenkeel.partitioning import fitting, partition

CHECKS = {
    "partition": check_partition,
    "window": check_window,
    "slices": check_slices,
    "moves": check_moves,
    "gathers": check_gathers,
    "bucketize": check_bucketize,
    "order": check_order,
    "splits": check_split,
}


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_answers_at_the_ends_of_what_kernels_may_be_given(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "PLACEMENTS", 20_000)
    kinds = {instance(7, number, CHECKS)[0] for number in range(first, first + 100)}  # raises where one is wrong
    assert kinds <= set(KINDS)
    assert "partition" in kinds


def test_a_wrong_answer_is_found() -> None:
    """The checks themselves: a sample that is counted on another rank than it is on is noticed."""
    rng = np.random.default_rng(3)
    costs, homes = rng.integers(1, 99, 12), np.arange(12) // 3
    found = partition(costs, homes, 4)
    check_answer(found, costs, homes.astype(np.int32), 4, {"counts": "equal"})
    moved = found.destinations.copy()
    moved[0] = (moved[0] + 1) % 4
    with pytest.raises(AssertionError):
        check_answer(replace(found, destinations=moved), costs, homes.astype(np.int32), 4, {"counts": "equal"})
