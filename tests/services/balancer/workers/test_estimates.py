"""Which search a round gets, and which sessions get none."""

from services.balancer.workers.estimates import Estimator, Size, cheap_seconds, full_seconds
from services.balancer.workers.fairness import Quarantine

SMALL = Size(8, 1024, 1024, 1, "minimal_move")
HUGE = Size(1024, 262_144, 262_144, 64, "minimal_move")


def test_estimates_grow_with_everything_that_takes_time() -> None:
    for estimate in (full_seconds, cheap_seconds):
        assert 0 < estimate(SMALL) < 0.01
        assert estimate(SMALL) < estimate(Size(8, 8192, 8192, 1, "minimal_move"))
        assert estimate(SMALL) < estimate(Size(8, 1024, 1024, 64, "minimal_move"))
        assert estimate(SMALL) < estimate(HUGE)
    assert full_seconds(HUGE) > 5
    assert cheap_seconds(HUGE) < 1


def test_a_round_gets_its_own_search_the_cheapest_or_none() -> None:
    estimator = Estimator()
    assert estimator.choose("job", SMALL, 1.0).is_cheap is False  # type: ignore[union-attr]
    choice = estimator.choose("job", HUGE, 1.8)
    assert choice is not None
    assert choice.is_cheap
    assert choice.seconds < 1.8 < choice.full
    assert estimator.choose("job", HUGE, 0.01) is None


def test_a_slow_machine_is_expected_to_take_longer() -> None:
    fast, slow = Estimator(1.0).choose("job", SMALL, 1.0), Estimator(0.1).choose("job", SMALL, 1.0)
    assert fast is not None
    assert slow is not None
    assert slow.seconds > 9 * fast.seconds


def test_a_search_that_overran_is_replaced_and_tried_again_later() -> None:
    estimator = Estimator()
    estimator.overrun("job", SMALL, 2.0, is_cheap=False)
    rounds = 0
    while (choice := estimator.choose("job", SMALL, 1.8)) is not None and choice.is_cheap:
        estimator.learn("job", SMALL, 0.001, is_cheap=True)
        rounds += 1
    assert choice is not None
    assert 5 < rounds < 50
    estimator.overrun("job", SMALL, 2.0, is_cheap=False)
    estimator.overrun("job", SMALL, 2.0, is_cheap=False)
    again = 0
    while (choice := estimator.choose("job", SMALL, 1.8)) is not None and choice.is_cheap:
        estimator.learn("job", SMALL, 0.001, is_cheap=True)
        again += 1
    assert again > rounds, "each time it takes longer"
    assert not estimator.choose("another job", SMALL, 1.8).is_cheap  # type: ignore[union-attr]


def test_what_is_refused_is_tried_again_later() -> None:
    estimator = Estimator()
    estimator.overrun("job", SMALL, 2.0, is_cheap=False)
    estimator.overrun("job", SMALL, 2.0, is_cheap=True)
    refused = 0
    while estimator.choose("job", SMALL, 1.8) is None:
        estimator.refused("job")
        refused += 1
    assert 5 < refused < 50


def test_sessions_are_forgotten_rather_than_kept_without_end() -> None:
    estimator, quarantine = Estimator(), Quarantine()
    for number in range(10_000):
        estimator.learn(number, SMALL, 0.001, is_cheap=False)
        quarantine.strike(0.0, number)
    assert len(estimator._known) <= 4096
    assert len(quarantine._strikes) <= 4096


def test_a_session_that_ends_workers_waits_longer_each_time_and_is_forgiven() -> None:
    quarantine = Quarantine()
    pauses = [quarantine.strike(0.0, "bad") for _ in range(8)]
    assert pauses[0] == 0.5
    assert pauses == sorted(pauses)
    assert pauses[-1] == 60.0
    assert quarantine.remaining(10.0, "bad") == 50.0
    assert quarantine.remaining(10.0, "good") == 0.0
    assert quarantine.remaining(61.0, "bad") == 0.0
    for _ in range(8):
        quarantine.forgive("bad")
    assert quarantine.strikes("bad") == 0
    assert quarantine.strike(100.0, "bad") == 0.5
