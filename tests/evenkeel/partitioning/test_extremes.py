"""Amounts and options at the ends of what they may be."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.partitioning import partition
from evenkeel.partitioning.lpt import kept_at_home
from evenkeel.partitioning.nodes import between_nodes
from evenkeel.partitioning.problem import BITS, MAX_SUM, Problem, exponent_for, make_problem, whole_units, with_crowding

ONE_SLOW = [0.1] + [1.0] * 7
EIGHT_NODES = np.arange(64) // 8


def problem(costs: Any, homes: Any, num_ranks: int, **options: Any) -> Problem:
    given: dict[str, Any] = {"tolerance": 1e-3, "move_price": 0.01, "sizes": None, "speeds": None, "nodes": None}
    return make_problem(costs, homes, num_ranks, **(given | options))


EXTREMES = [
    ([7.3e8], [0], 8, {"speeds": ONE_SLOW}),
    ([7.3e8, 1e-9], [0, 7], 8, {"speeds": ONE_SLOW[::-1]}),
    ([5e-324], [3], 8, {"speeds": [1e6, 1e-6, 1, 1e-6, 1, 1, 1, 1e6]}),
    ([MAX_SUM], [1], 2, {"speeds": [1e6, 1e-6], "tolerance": 1.0}),
    ([1e9], [5], 64, {"nodes": EIGHT_NODES}),
    ([1e9, 3.0], [5, 63], 64, {"nodes": EIGHT_NODES}),
    ([2**62 - 1], [0], 4, {"speeds": [1e-6, 1, 1, 1], "tolerance": 1.0}),
    ([2**60, 2**60, 0, 0, 2**61 - 1], [0] * 5, 3, {"speeds": [1e-6, 1e6, 1], "nodes": [0, 1, 1], "tolerance": 1.0}),
    ([1.0, 1.0], [0, 1], 3, {"tolerance": 1.0, "nodes": [7, 7, 1]}),
    ([0.0], [2], 8, {"speeds": ONE_SLOW}),
]


@pytest.mark.parametrize(("costs", "homes", "num_ranks", "options"), EXTREMES)
@pytest.mark.parametrize("counts", ["equal", "free"])
def test_limits_are_loads_that_a_rank_can_have(
    costs: list[float], homes: list[int], num_ranks: int, options: dict[str, Any], counts: str
) -> None:
    """Beyond int64 a limit would wrap around to a negative one, which even a rank without samples exceeds."""
    whole = problem(costs, homes, num_ranks, counts=counts, **options)
    made = [whole, with_crowding(whole)]
    if whole.num_nodes > 1:
        made.append(between_nodes(whole, kept_at_home(whole)[0]))
    for each in made:
        assert (each.arrays.limits >= 0).all()
        assert (each.arrays.limits <= each.arrays.costs.sum()).all()


FLOATS = st.lists(st.one_of(st.sampled_from([0.0, -0.0, 5e-324, 1e308]), st.floats(0, 1e308)), min_size=1, max_size=60)


@settings(max_examples=200, deadline=None)
@given(FLOATS)
def test_units_keep_order_and_nearly_all_of_the_value(values: list[float]) -> None:
    array = np.array(values)
    exponent = exponent_for(float(array.max()), array.size)
    units = whole_units(array, exponent)
    assert sum(units.tolist()) <= 2**BITS
    assert (np.diff(units[np.argsort(array)]) >= 0).all()
    if array.max() > 0:
        assert units.max() >= 2 ** (BITS - 8)
        assert (abs(np.ldexp(units.astype(np.float64), -exponent) - array) <= array.max() * 2.0**-52).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=4, max_size=40), st.sampled_from([0.5, 2.0**-1000, 2.0**900]))
def test_a_power_of_two_changes_nothing(costs: list[int], unit: float) -> None:
    homes = np.arange(len(costs)) % 3
    for strategy in ("karmarkar_karp", "lpt"):
        whole = partition(np.array(costs), homes, 3, strategy=strategy, sizes=np.ones(len(costs)))
        scaled = partition(np.array(costs) * unit, homes, 3, strategy=strategy, sizes=np.ones(len(costs)))
        assert scaled.destinations.tolist() == whole.destinations.tolist()
        assert scaled.loads.tolist() == (whole.loads * unit).tolist()
        assert scaled.lower_bound == whole.lower_bound * unit
