"""Documents stay small, whatever a job is like."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from services.balancer.history import COLUMNS
from services.balancer.views import _rounds, _shortened, _spread


@pytest.mark.parametrize(("count", "most"), [(61, 60), (240, 60), (100, 1), (7, 6)])
def test_of_many_rounds_as_many_as_wanted_are_told_the_last_among_them(count: int, most: int) -> None:
    places = _spread(count, most).tolist()
    assert len(set(places)) == most
    assert places == sorted(places)
    assert places[-1] == count - 1
    assert places[0] >= 0
    distances = np.diff(places)
    assert most == 1 or distances.max() - distances.min() <= 1


def test_figures_keep_seven_digits_and_none_stays_none() -> None:
    given = np.array([0.0, 1.0, -2.5, 1 / 3, 123456789.123, 1e-9 / 3, 1e300, math.nan, math.inf])
    short = _shortened(given)
    assert short[:3].tolist() == [0.0, 1.0, -2.5]
    np.testing.assert_allclose(short[:7], given[:7], rtol=1e-6)
    assert np.isnan(short[7:]).all()
    rows = np.full((2, len(COLUMNS)), math.nan)
    rows[:, COLUMNS.index("reason")] = [0, 1]
    found: dict[str, Any] = json.loads(json.dumps(_rounds(rows), allow_nan=False))
    assert found["reason"] == ["", "deadline"]
    assert found["after"] == [None, None]
