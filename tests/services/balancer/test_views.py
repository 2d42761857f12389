"""Documents stay small, whatever a job is like."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from evenkeel.partitioning.delays import Cause, Delay
from evenkeel.partitioning.speeds import LOWEST, LearnedSpeeds, Straggler
from services.balancer.effects import SessionId
from services.balancer.history import COLUMNS, History
from services.balancer.limits import Limits
from services.balancer.session import Session
from services.balancer.views import MOST_RANKS, _ranks, _rounds, _shortened, _spread
from tests.services.balancer.samples import KEY, terms
from tests.services.balancer.test_history import planned


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


def test_of_many_ranks_as_many_are_told_those_of_whom_most_is_to_be_said_among_them() -> None:
    size = 1000
    session, history = Session(0.0, SessionId(KEY, "run", 0), terms(size), Limits()), History(size)
    assert _ranks(session, history, MOST_RANKS)[0]["rank"] == list(range(MOST_RANKS))
    loads = np.arange(1.0, size + 1)
    session.statistics.last_balance = planned().figures, 0.1, loads, loads
    session.statistics.last_learned = LearnedSpeeds(
        stragglers=tuple(Straggler(rank=rank, speed=rank / 400, since=0) for rank in range(200, 400)),
        delays=tuple(Delay(rank=rank, cause=Cause.NETWORK, share=rank / 100, since=0) for rank in range(400, 600)),
    )
    history.late = {rank: float(rank) for rank in range(600, 800)}
    columns, left_out = _ranks(session, history, MOST_RANKS)
    assert len(columns["rank"]) == MOST_RANKS
    assert left_out == size - MOST_RANKS
    assert columns["rank"] == sorted(columns["rank"])
    for most in (range(200, 220), range(580, 600), range(780, 800), range(980, 1000), range(20)):
        assert set(most) <= set(columns["rank"])


def test_a_speed_at_the_floor_is_told_so() -> None:
    session = Session(0.0, SessionId(KEY, "run", 0), terms(3), Limits())
    slow = (Straggler(rank=1, speed=LOWEST, since=5), Straggler(rank=2, speed=0.5, since=5))
    session.statistics.last_learned = LearnedSpeeds(stragglers=slow)
    columns, _ = _ranks(session, History(3), None)
    assert columns["speed"] == [1.0, LOWEST, 0.5]
    assert columns["speed_at_floor"] == [False, True, False]
