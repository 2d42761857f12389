"""Who is late with its batches, on made times."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenkeel.partitioning.delays import Cause, Delay, DelayEstimator

SLOW, BEGIN, END, ROUNDS = 1, 100, 300, 500
Times = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]


def usual_times(rng: np.random.Generator, num_ranks: int) -> Times:
    """Compute, lateness and loading of a step, now and then with a pause."""
    compute = 0.02 * rng.lognormal(0, 0.05, num_ranks)
    late, loading = 0.001 * rng.lognormal(0, 0.5, num_ranks), 0.0003 * rng.lognormal(0, 0.5, num_ranks)
    pauses = np.where(rng.random(num_ranks) < 0.01, 0.02 * rng.uniform(0.5, 5, num_ranks), 0.0)
    return compute, late + pauses, loading + pauses * (rng.random(num_ranks) < 0.5)


def learned(num_ranks: int, way: str, rounds: int = ROUNDS, seed: int = 0) -> list[tuple[int, tuple[Delay, ...]]]:
    """What was told, and after which round, while rank SLOW is slow from BEGIN to END."""
    rng, estimator, told = np.random.default_rng(seed), DelayEstimator(num_ranks), []
    for number in range(rounds):
        compute, late, loading = usual_times(rng, num_ranks)
        loop = np.full(num_ranks, 0.002)
        if BEGIN <= number < END:
            if way == "compute":
                compute[SLOW] *= 2
            if way in ("loading", "waited for"):
                loading[SLOW] += 0.006
            if way in ("loading", "network"):
                late[SLOW] += 0.006
            if way == "waited for":  # in the exchange, where no sum of gradients has brought the ranks together before
                late += 0.006
            if way == "bursts" and number % 4 == 0:
                late[SLOW], loading[SLOW] = late[SLOW] + 0.024, loading[SLOW] + 0.024
            if way == "loop":  # and the others wait for what it sends them
                loop[SLOW] += 0.006
                late += np.where(np.arange(num_ranks) == SLOW, 0.0, 0.006)
            if way == "all":
                late, loading, loop = late + 0.05, loading + 0.05, loop + 0.05
        if estimator.note(number, compute, late, loading, loop):
            told.append((number, estimator.delays))
    return told


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize(
    ("way", "cause"),
    [("loading", Cause.LOADING), ("bursts", Cause.LOADING), ("waited for", Cause.LOADING), ("network", Cause.NETWORK),
     ("loop", Cause.LOOP)],
)  # fmt: skip
def test_who_is_late_is_named_with_the_cause_and_forgotten_when_on_time(num_ranks: int, way: str, cause: Cause) -> None:
    told = learned(num_ranks, way)
    assert {(one.rank, one.cause) for _, delays in told for one in delays} == {(SLOW, cause)}
    assert BEGIN < told[0][0] <= BEGIN + 40
    assert 0.15 <= told[0][1][0].share <= 0.5
    assert told[-1][1] == ()
    assert END < told[-1][0] <= END + 120


@pytest.mark.parametrize("begin", [0, 5, BEGIN])
@pytest.mark.parametrize("cause", [Cause.LOADING, Cause.LOOP])
def test_what_is_told_first_is_as_much_as_it_is(cause: Cause, begin: int) -> None:
    estimator = DelayEstimator(8)
    for number in range(begin + 60):
        late = np.where(np.arange(8) == SLOW, 0.03 * (number >= begin), 0.0)
        waits = (late, late, np.zeros(8)) if cause is Cause.LOADING else (np.zeros(8), np.zeros(8), late)
        if estimator.note(number, np.full(8, 0.02), *waits):
            break  # the log says it once
    assert [(one.rank, one.cause) for one in estimator.delays] == [(SLOW, cause)]
    assert estimator.delays[0].share == pytest.approx(1.5, abs=0.02)


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
@pytest.mark.parametrize("way", ["", "compute", "all"])
def test_pauses_slow_computation_and_what_all_have_alike_is_nobodys_delay(num_ranks: int, way: str) -> None:
    assert learned(num_ranks, way, 2000, seed=num_ranks) == []


def test_a_majority_must_have_measured() -> None:
    estimator = DelayEstimator(4)
    for number in range(100):
        assert not estimator.note(number, [0.02, 0.02, 0, 0], [0.5, 0, 0, 0], [0.5, 0, 0, 0])


@settings(max_examples=30)
@given(
    st.integers(1, 4).flatmap(
        lambda n: st.lists(st.lists(st.floats(width=32), min_size=3 * n, max_size=3 * n), max_size=60)
    )
)
def test_whatever_comes_shares_stay_within_bounds(rounds: list[list[float]]) -> None:
    num_ranks = len(rounds[0]) // 3 if rounds else 1
    estimator = DelayEstimator(num_ranks)
    for number, values in enumerate(rounds):
        estimator.note(number, *(values[at * num_ranks : (at + 1) * num_ranks] for at in range(3)))
        assert all(0 < one.share <= 16 for one in estimator.delays)
