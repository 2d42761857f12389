import re
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.trainer_client.balancing.jobs import run_in_turn
from trainer_client import BalancedLoader, Balancer
from trainer_client.balancing.options import BalanceOptions


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("counts", "even", "use one of equal, free"),
        ("strategy", "", "choose one of karmarkar_karp, lpt, minimal_move, plain"),
        ("strategy", "best", ""),
        ("strategy", ["lpt"], ""),
        ("tolerance", -0.1, "use a share of the lower bound, 0 to 1"),
        ("tolerance", float("nan"), ""),
        ("tolerance", "0.1", ""),
        ("tolerance", 1.5, ""),
        ("depth", 0, "use a whole number of at least 1 batch in flight"),
        ("depth", True, ""),
        ("window", 2.5, "use 1 to 64 batches"),
        ("window", "4", ""),
        ("window", 0, ""),
        ("window", 65, ""),
        ("min_samples", -1, "use a number of samples, or 0"),
        ("split", True, r"use SplitOptions\(\), or None"),
        ("learn_speeds", 1, "use True or False"),
        ("timeout", 2.0, "use a positive timedelta"),
        ("timeout", timedelta(0), ""),
        ("group_timeout", timedelta(seconds=-1), ""),
        ("memory_caps", 5, "give a list of one number for each rank"),
        ("speeds", [1.0, "x"], ""),
        ("speeds", [1.0, float("inf")], r"speeds\[1\] is inf; use numbers from 1e-06 to 1e\+06"),
        ("speeds", [0.0, 1.0], r"speeds\[0\] is 0"),
        ("speeds", [1.0, 1e7], r"speeds\[1\] is 1"),
        ("memory_caps", [1.0, -1.0], r"memory_caps\[1\] is -1.0; use numbers from 0 to inf"),
        ("memory_caps", [float("nan"), 1.0], r"memory_caps\[0\] is nan"),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_the_remedy(field: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=rf"{field}(\[\d\])? is ") as error:
        BalanceOptions(**{field: value})
    assert re.search(words, str(error.value))


def test_per_rank_options_fit_the_world() -> None:
    BalanceOptions(speeds=[1.0, 0.5]).check_world(2)
    with pytest.raises(ValueError, match="speeds has 2 entries for 3 ranks"):
        BalanceOptions(speeds=[1.0, 0.5]).check_world(3)


def test_a_rank_may_have_no_cap() -> None:
    BalanceOptions(memory_caps=[0.0, float("inf")]).check_world(2)


def _ranks_that_say_other_things(rank: int) -> list[list[int]]:
    epochs = []
    for options in (
        BalanceOptions(window=rank + 1, depth=3 - rank),
        BalanceOptions(window=3 - rank, depth=1 + rank, strategy="minimal_move" if rank else "lpt"),
    ):
        with Balancer.embedded(options=options) as balancer:
            data = [torch.arange(4) + 100 * rank + 10 * step for step in range(5 - rank)]
            loader = BalancedLoader(data, balancer, cost=lambda batch: batch + 1)
            epochs.append([sample for batch in loader for sample in batch.tolist()])
    return epochs


def _wrong_for_so_many_ranks(_: int) -> str:
    with Balancer.embedded(options=BalanceOptions(speeds=[1.0, 2.0])) as balancer:
        try:
            list(BalancedLoader([torch.arange(4)], balancer, cost=lambda batch: batch))
        except ValueError as error:
            return str(error)
    return ""


def test_ranks_whose_options_differ_take_those_of_rank_0_which_may_be_wrong_for_so_many() -> None:
    epochs, wrong = run_in_turn(3, (_ranks_that_say_other_things,), (_wrong_for_so_many_ranks,))
    assert wrong == ["speeds has 2 entries for 3 ranks; give one for each rank"] * 3
    for epoch in zip(*epochs, strict=True):
        expected = [
            sample + 100 * rank + 10 * step for rank in range(3) for step in range(5 - rank) for sample in range(4)
        ]
        assert sorted(sample for rank in epoch for sample in rank) == sorted(expected)
