import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.partitioning.karmarkar_karp import difference
from evenkeel.partitioning.problem import ascending_order
from tests.evenkeel.partitioning.reference import karmarkar_karp_sets

INTEGERS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 2**40)), max_size=40)


def _check(costs: np.ndarray, num_sets: int) -> None:
    order = ascending_order(costs)
    assert difference(costs, order, num_sets, True).tolist() == karmarkar_karp_sets(costs, num_sets, equal=True)
    assert difference(costs, order, num_sets, False).tolist() == karmarkar_karp_sets(costs, num_sets, equal=False)


@settings(max_examples=150, deadline=None)
@given(INTEGERS, st.integers(1, 9))
def test_integer_costs_match_the_transcription(costs: list[int], num_sets: int) -> None:
    _check(np.array(costs, np.int64), num_sets)


@pytest.mark.parametrize("distinct", [1, 2, 50, 10**6])
def test_many_sets_match_the_transcription(distinct: int) -> None:
    """Enough sets for the radix sort to take over from insertion, with and without long runs of equal sums."""
    rng = np.random.default_rng(distinct)
    _check(rng.integers(0, distinct, 330), 61)
    _check(rng.integers(0, distinct, 330) * 7, 130)
