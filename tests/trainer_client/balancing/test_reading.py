"""What is read of a batch: costs, users, and items of samples that may be split; and of a step: what it took."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from evenkeel.partitioning import partition
from trainer_client.balancing.contribution import Measure
from trainer_client.balancing.reading import Measured, read_costs, read_users


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


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], ""),
        ([1.0, math.nan, 2.0], "cost of sample 1"),
        ([math.inf, -math.inf, 2.0], "cost of sample 0"),
        ([1.0, -1.0, 2.0], "cost of sample 1"),
        (np.full(3, 2**61), "use larger units"),  # whose sum over all ranks may overflow
        (np.full(3, 1e300), "use larger units"),
    ],
)
def test_a_bad_cost_is_a_problem_of_the_round_not_an_error(values: Any, words: str) -> None:
    with warnings.catch_warnings(action="error"):  # as in programs that make errors of warnings
        costs, problem = read_costs(values, len(values), world_size=8)
    assert costs.shape == (len(values),)
    assert not costs.any()
    assert words in problem
    assert bool(problem) == bool(words)


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


def test_what_all_ranks_may_reach_together_can_be_partitioned() -> None:
    for ranks in (2, 3, 8, 1000):
        share = 2**62 // ranks
        assert "use larger units" in read_costs([share, 0, 0], 3, world_size=ranks)[1]
        most = int(share * (1 - 1e-8))
        costs, problem = read_costs([most, 0, 0], 3, world_size=ranks)
        assert not problem
        partition(np.tile(costs, ranks), np.repeat(np.arange(ranks), 3), ranks, strategy="lpt")


def test_numbers_of_users_keep_them_apart() -> None:
    small = np.arange(100_000)
    assert (read_users(small, small.size) == small).all()
    for users in (small << 32, (small << 32) + small, -small, small * 0x1234_5678_9ABC, (small % 256 << 32) + small):
        assert np.unique(read_users(users, users.size)).size > 0.999 * np.unique(users).size
    assert read_users(np.array([2**64 - 1, 5], np.uint64), 2)[1] == 5
    assert read_users([], 0).size == 0
    for wrong, text in (
        ([1.0, np.nan], "users returned float64 values; return whole numbers"),
        ([[1, 2]], "users returned shape .* for 2 samples; return one number for each sample"),
    ):
        with pytest.raises(ValueError, match=text):
            read_users(wrong, 2)


def test_a_measure_is_sent_once_and_is_the_mean_of_several_without_those_that_tell_nothing() -> None:
    measured = Measured()
    measured.add(10, 1.0, 0.5)
    measured.add(30, torch.tensor(2.0), 0.7, 0.4)
    wrong: list[Any] = ["1", None, [1.0], torch.ones(2), math.nan, math.inf, 0.0, -1.0]
    for nothing in [(2.0, one) for one in wrong] + [(0, 1.0), (math.inf, 1.0), (5, 1.0, -1.0), (5, 1.0, 0.0, math.nan)]:
        measured.add(*nothing)
    assert measured.take() == pytest.approx((20.0, 1.5, 0.6, 0.2, 0.0))
    assert measured.take() == Measure()
    measured.add(2.0, torch.tensor(0.5))
    assert measured.take() == Measure(2.0, 0.5)
