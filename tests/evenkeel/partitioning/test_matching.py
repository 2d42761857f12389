import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from evenkeel.partitioning import partition
from evenkeel.partitioning.karmarkar_karp import difference
from evenkeel.partitioning.matching import EXACT, heaviest_assignment
from evenkeel.partitioning.problem import ascending_order


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(0, 10**6), st.sampled_from([3, 1000]))
def test_the_assignment_is_the_heaviest(n: int, seed: int, distinct: int) -> None:
    weights = np.random.default_rng(seed).integers(-distinct, distinct, (n, n)).astype(np.float64)
    columns = heaviest_assignment(weights)
    assert sorted(columns.tolist()) == list(range(n))
    rows, best = linear_sum_assignment(weights, maximize=True)
    assert weights[np.arange(n), columns].sum() == weights[rows, best].sum()


@pytest.mark.parametrize("num_ranks", [2, 7, 30])
def test_as_much_as_possible_stays_home(num_ranks: int) -> None:
    rng = np.random.default_rng(num_ranks)
    costs, homes = rng.integers(1, 4000, num_ranks * 16), np.repeat(np.arange(num_ranks), 16)
    sizes = rng.integers(1, 100, costs.size)
    result = partition(costs, homes, num_ranks, strategy="karmarkar_karp", sizes=sizes)
    sets = difference(costs, ascending_order(costs), num_ranks, True)
    shared = np.zeros((num_ranks, num_ranks))
    np.add.at(shared, (sets, homes), sizes)
    assert sizes.sum() - result.moved_size == shared[linear_sum_assignment(shared, maximize=True)].sum()


@pytest.mark.parametrize("num_ranks", [24, EXACT + 24])
def test_sets_stay_inside_the_node_first(num_ranks: int) -> None:
    rng = np.random.default_rng(0)
    costs, homes = rng.integers(1, 4000, num_ranks * 8), np.repeat(np.arange(num_ranks), 8)
    nodes = np.arange(num_ranks) // 8
    for strategy in ("karmarkar_karp", "lpt"):
        without = partition(costs, homes, num_ranks, strategy=strategy)
        crossing = costs[nodes[without.destinations] != nodes[homes]].sum()
        result = partition(costs, homes, num_ranks, strategy=strategy, nodes=nodes)
        assert result.moved_size_between_nodes < crossing
        assert sorted(result.loads.tolist()) == sorted(without.loads.tolist())


def test_many_ranks_of_several_kinds_get_sets_of_their_kind() -> None:
    num_ranks = EXACT + 5
    homes = np.repeat(np.arange(num_ranks), np.where(np.arange(num_ranks) % 3 == 0, 3, 2))
    costs = np.random.default_rng(1).integers(0, 50, homes.size)
    result = partition(costs, homes, num_ranks, strategy="karmarkar_karp", nodes=np.arange(num_ranks) % 4)
    assert np.bincount(result.destinations).tolist() == np.bincount(homes).tolist()
