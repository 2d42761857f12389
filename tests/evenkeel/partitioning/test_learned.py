"""What is learned of ranks on made times: their speeds, and who is late with its batches."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenkeel.partitioning.delays import Cause, Delay, DelayEstimator
from evenkeel.partitioning.speeds import ALL_EQUAL, LearnedSpeeds, SpeedEstimator, Straggler

LAG = 6  # rounds from a measured batch to the plan that knows of it


def _run(
    num_ranks: int,
    rounds: int,
    *,
    slow: float = 1.0,
    between: tuple[int, int] = (0, 0),
    noise: float = 0.02,
    fixed: float = 0.0,
    seed: int = 0,
) -> tuple[NDArray[np.float64], SpeedEstimator]:
    """(rounds, 3): the time of a step, the least possible, and that with equal loads, while rank 0 is slow."""
    rng, estimator = np.random.default_rng(seed), SpeedEstimator(num_ranks)
    plans: list[LearnedSpeeds] = []
    times = []
    for number in range(rounds):
        mean = float(1000 * np.exp(rng.normal(0, 0.2)))
        learned = plans[-LAG] if len(plans) >= LAG else ALL_EQUAL
        planned = learned.to_plan((), [mean] * num_ranks)
        loads = planned / planned.sum() * mean * num_ranks
        speeds = np.ones(num_ranks)
        if between[0] <= number < between[1]:
            speeds[0] = slow
        exact = (fixed * 1000 + loads) / speeds
        seconds = exact * np.exp(rng.normal(0, noise, num_ranks))
        seconds = np.where(rng.random(num_ranks) < 0.02, seconds * rng.uniform(1.5, 5, num_ranks), seconds)
        least = num_ranks * (mean + fixed * 1000) / speeds.sum()
        times.append((exact.max(), least, ((fixed * 1000 + mean) / speeds).max()))
        estimator.note(loads, seconds)
        plans.append(estimator.learned)
    return np.array(times), estimator


@pytest.mark.parametrize("num_ranks", [2, 16])
@pytest.mark.parametrize("slow", [0.83, 0.5])
@pytest.mark.parametrize("fixed", [0.0, 0.3])
def test_a_slow_rank_gets_less_within_twenty_steps_and_all_of_it_back(
    num_ranks: int, slow: float, fixed: float
) -> None:
    times, estimator = _run(num_ranks, 500, slow=slow, between=(200, 400), fixed=fixed, seed=num_ranks)
    taken, least, equal = times.T
    gained = (equal - taken)[220:400] / (equal - least)[220:400]
    assert np.median(gained) >= 0.9
    assert np.median(gained[:10]) >= 0.85  # from twenty steps after the change on
    assert (taken / least)[420:].max() < 1 + 1e-9
    assert not estimator.learned


def test_slow_steps_of_all_and_single_ones_of_a_rank_change_nothing() -> None:
    estimator, rng = SpeedEstimator(4), np.random.default_rng(3)
    for number in range(300):
        seconds = np.full(4, 7.0 if number % 50 < 9 else 1.0)  # compilation, evaluation
        seconds[rng.integers(4)] *= 3.0 if number % 5 == 0 else 1.0
        assert not estimator.note(np.full(4, 10.0), seconds)
    assert estimator.speeds.tolist() == [1.0] * 4


def test_who_is_not_heard_of_is_forgotten_after_a_while() -> None:
    estimator = SpeedEstimator(3)
    for _ in range(20):
        estimator.note([1, 1, 1], [1, 2, 1])
    assert estimator.speeds[1] == 0.5
    for _ in range(20):
        estimator.note([1, 1, 1], [1, np.nan, 1])
    assert estimator.speeds[1] == 0.5
    for _ in range(60):
        estimator.note([1, 1, 1], [1, np.nan, 1])
    assert estimator.speeds[1] == 1.0


@settings(max_examples=30)
@given(
    st.integers(1, 6).flatmap(
        lambda n: st.lists(
            st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=2 * n, max_size=2 * n),
            max_size=60,
        )
    )
)
def test_whatever_comes_speeds_stay_within_bounds(rounds: list[list[float]]) -> None:
    num_ranks = len(rounds[0]) // 2 if rounds else 1
    estimator = SpeedEstimator(num_ranks)
    for values in rounds:
        estimator.note(values[:num_ranks], values[num_ranks:])
        assert ((estimator.speeds >= 0.3) & (estimator.speeds <= 1.0)).all()
        for mean in (0.0, 1.0, 1e9):
            planned = estimator.learned.to_plan((), [mean] * num_ranks)
            assert ((planned >= 0.3) & (planned <= 1.0)).all()


def test_what_is_learned_multiplies_what_users_give() -> None:
    learned = LearnedSpeeds(stragglers=(Straggler(rank=1, speed=0.5, since=3),), fixed=0.0)
    assert ALL_EQUAL.to_plan((2.0, 1.0), [1, 2]).tolist() == [2.0, 1.0]
    assert learned.to_plan((), [1, 2]).tolist() == [1.0, 0.5]
    assert learned.to_plan((2.0, 1.0), [1, 2]).tolist() == [2.0, 0.5]
    assert learned.to_plan((1.0, 1e-6), [1, 2]).tolist() == [1.0, 1e-6]


def test_what_a_step_takes_besides_is_learned_anew_in_another_unit_of_cost() -> None:
    rng, estimator = np.random.default_rng(0), SpeedEstimator(2)
    for number in range(300):
        load = 1000 * np.exp(rng.normal(0, 0.2))
        unit = 1e9 if number < 150 else 1e-3  # as when a fitted cost takes the place of one in FLOPs
        estimator.note(np.full(2, load * unit), np.full(2, (load + 300) * 1e-6))
        if number in (149, 299):
            assert estimator.fixed == pytest.approx(300 * unit, rel=1e-3)
        elif number in range(150, 210):
            assert estimator.fixed == 0
    assert not estimator.learned


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
