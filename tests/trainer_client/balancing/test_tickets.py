import math
import warnings

import numpy as np
import pytest
import torch

from evenkeel.partitioning import partition
from trainer_client.balancing.reading import read_costs


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2, 3], np.int64),
        ([1.0, 2.0, 3.0], np.float64),
        (torch.tensor([1, 2, 3], dtype=torch.int32), np.int64),
        (torch.tensor([1.0, 2.0, 3.0], requires_grad=True), np.float64),
        (np.array([1, 2, 3], dtype=np.uint64), np.int64),
        (np.array([1, 2, 3], dtype=np.float16), np.float64),
        (torch.tensor([1, 2, 3], dtype=torch.bfloat16), np.float64),
        (torch.tensor([1, 2, 3], dtype=torch.float8_e4m3fn), np.float64),
    ],
)
def test_any_numbers_are_costs(values: object, dtype: type) -> None:
    costs, problem = read_costs(values, 3)
    assert costs.dtype == dtype
    assert costs.tolist() == [1, 2, 3]
    assert not problem


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_a_bad_cost_is_a_problem_of_the_round_not_an_error(bad: float) -> None:
    costs, problem = read_costs([1.0, bad, 2.0], 3)
    assert "cost of sample 1" in problem
    assert costs.tolist() == [0, 0, 0]


def test_infinite_costs_of_both_signs_are_a_problem_too() -> None:
    with warnings.catch_warnings(action="error"):  # as in programs that make errors of warnings
        assert "cost of sample 0" in read_costs([math.inf, -math.inf, 2.0], 3)[1]


def test_no_samples() -> None:
    assert read_costs([], 0)[0].shape == (0,)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 2], "shape \\(2,\\) for 3 samples"),
        ([[1], [2], [3]], "shape \\(3, 1\\)"),
        (["a", "b", "c"], "values; return integers"),
        (np.array([2**63, 0, 0], dtype=np.uint64), "exceeds int64"),
        (torch.empty(3, device="meta"), "on meta"),
        ([torch.tensor(1, dtype=torch.bfloat16)] * 3, "list, which is no list of numbers"),
        (torch.ones(3, dtype=torch.complex64), "complex64 values; return integers"),
    ],
)
def test_what_is_not_one_number_per_sample_is_an_error(values: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_costs(values, 3)


def test_other_quantities_are_named() -> None:
    with pytest.raises(ValueError, match="memory returned shape"):
        read_costs([1], 2, what="memory")


@pytest.mark.parametrize("values", [np.full(3, 2**61), np.full(3, 1e300)])
def test_costs_whose_sum_over_all_ranks_may_overflow_are_a_problem(values: object) -> None:
    costs, problem = read_costs(values, 3, world_size=8)
    assert not costs.any()
    assert "use larger units" in problem


def test_what_all_ranks_may_reach_together_can_be_partitioned() -> None:
    for ranks in (2, 3, 8, 1000):
        share = 2**62 // ranks
        assert "use larger units" in read_costs([share, 0, 0], 3, world_size=ranks)[1]
        most = int(share * (1 - 1e-8))
        costs, problem = read_costs([most, 0, 0], 3, world_size=ranks)
        assert not problem
        partition(np.tile(costs, ranks), np.repeat(np.arange(ranks), 3), ranks, strategy="lpt")
