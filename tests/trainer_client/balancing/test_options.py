from datetime import timedelta
from typing import Any

import pytest

from trainer_client.balancing.options import BalanceOptions


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("counts", "even"),
        ("fallback", "none"),
        ("method", "scatter"),
        ("strategy", ""),
        ("tolerance", -0.1),
        ("tolerance", float("nan")),
        ("tolerance", "0.1"),
        ("tolerance", 1.5),
        ("depth", 0),
        ("depth", True),
        ("window", 2.5),
        ("window", "4"),
        ("memory_caps", 5),
        ("speeds", [1.0, "x"]),
        ("timeout", 2.0),
        ("timeout", timedelta(0)),
        ("group_timeout", timedelta(seconds=-1)),
    ],
)
def test_a_wrong_option_is_named_with_its_value(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} is "):
        BalanceOptions(**{field: value})


def test_per_rank_options_fit_the_world() -> None:
    BalanceOptions(speeds=[1.0, 0.5]).check_world(2)
    with pytest.raises(ValueError, match="speeds has 2 entries for 3 ranks"):
        BalanceOptions(speeds=[1.0, 0.5]).check_world(3)


@pytest.mark.parametrize(
    ("field", "values", "words"),
    [
        ("speeds", [1.0, float("inf")], r"speeds\[1\] is inf; use numbers from 1e-06 to 1e\+06"),
        ("speeds", [0.0, 1.0], r"speeds\[0\] is 0"),
        ("speeds", [1.0, 1e7], r"speeds\[1\] is 1"),
        ("memory_caps", [1.0, -1.0], r"memory_caps\[1\] is -1.0; use numbers from 0 to inf"),
        ("memory_caps", [float("nan"), 1.0], r"memory_caps\[0\] is nan"),
    ],
)
def test_a_rank_out_of_range_is_named(field: str, values: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BalanceOptions(**{field: values})


def test_a_rank_may_have_no_cap() -> None:
    BalanceOptions(memory_caps=[0.0, float("inf")]).check_world(2)
