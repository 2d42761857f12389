import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.partitioning import partition
from evenkeel.partitioning.problem import ascending_order, crowding_bound
from tests.evenkeel.partitioning.reference import allowed_counts, assignments


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=2, max_size=8), st.integers(2, 3), st.booleans())
def test_the_crowding_bound_holds_for_every_assignment(costs: list[int], num_ranks: int, equal: bool) -> None:
    homes = [i * num_ranks // len(costs) for i in range(len(costs))]
    counts = "equal" if equal else "free"
    values = np.array(costs, np.int64)
    fewest = min(allowed[0] for allowed in allowed_counts(homes, num_ranks, counts))
    bound = crowding_bound(values, ascending_order(values), fewest, num_ranks)
    best = min(
        np.bincount(ranks, weights=values, minlength=num_ranks).max() for ranks in assignments(homes, num_ranks, counts)
    )
    assert bound <= best


def test_the_bound_fills_the_rank_of_the_heaviest() -> None:
    result = partition([100, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 1], 2, tolerance=0.0)
    assert result.lower_bound == 103.0
    assert sorted(result.loads.tolist()) == [12, 103]
    assert partition([100, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 1], 2, counts="free").lower_bound == 100.0
    assert partition([4, 1, 2, 3], [0, 0, 1, 1], 2, speeds=[1.0, 3.0], counts="free").lower_bound == 2.5


def test_crowding_proves_what_the_mean_cannot() -> None:
    """Five samples of ten on two ranks: one gets three."""
    values = np.array([10, 10, 10, 10, 10, 0, 0, 0])
    assert crowding_bound(values, ascending_order(values), 4, 2) == 30.0
