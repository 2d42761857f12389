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
        ("depth", 0),
        ("depth", True),
        ("window", 2.5),
        ("window", "4"),
        ("memory_caps", 5),
        ("speeds", [1.0, "x"]),
        ("speeds", [1.0, float("inf")]),
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
    with pytest.raises(ValueError, match=r"memory_caps\[1\] is 0"):
        BalanceOptions(memory_caps=[1.0, 0]).check_world(2)
