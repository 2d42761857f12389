from hypothesis import given
from hypothesis import strategies as st
from trainer_client.balancing.breaker import MAX_HOLD_ROUNDS, Breaker


def miss(breaker: Breaker, number: int) -> Breaker:
    return breaker.after(number, waited=True, served=False, all_ready=False)


def test_first_miss_opens() -> None:
    breaker = miss(Breaker(), 7)
    assert not breaker.closed
    assert breaker.opened_at == 7


def test_closes_when_all_ranks_are_ready_again() -> None:
    breaker = miss(Breaker(), 7)
    assert not breaker.after(8, waited=False, served=False, all_ready=False).closed
    assert breaker.after(8, waited=False, served=False, all_ready=True).closed


def test_rounds_that_were_not_asked_change_nothing_while_closed() -> None:
    closed = miss(Breaker(), 0).after(1, waited=False, served=False, all_ready=True)
    assert closed.after(2, waited=False, served=False, all_ready=False) == closed


def test_repeated_misses_hold_longer_and_a_served_round_forgives() -> None:
    breaker, number, holds = Breaker(), 0, []
    for _ in range(12):
        breaker = miss(breaker, number)
        opened = number
        while not breaker.closed:
            number += 1
            breaker = breaker.after(number, waited=False, served=False, all_ready=True)
        holds.append(number - opened)
        number += 1
    assert holds == [1, 2, 4, 8, 16, 32, 64, 128, 256, 256, 256, 256]
    assert max(holds) == MAX_HOLD_ROUNDS
    breaker = breaker.after(number, waited=True, served=True, all_ready=True)
    assert breaker.misses == 0


@given(st.lists(st.tuples(st.booleans(), st.booleans())))
def test_while_open_only_readiness_closes(events: list[tuple[bool, bool]]) -> None:
    breaker = Breaker()
    for number, (served, ready) in enumerate(events):
        after = breaker.after(number, waited=breaker.closed, served=served, all_ready=ready)
        if not breaker.closed and after.closed:
            assert ready
        if breaker.closed and not after.closed:
            assert not served
        breaker = after
