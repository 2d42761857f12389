"""Every order of events of small worlds: ranks stay in the same rounds whatever overtakes what; broken rules do not."""

import pytest

from tests.model.world import Program, ViolationError, explore, really
from trainer_client.balancing.contribution import State
from trainer_client.balancing.decide import Decision
from trainer_client.balancing.report import Mode
from trainer_client.balancing.rounds import Clock

ENDS = (Program(1), Program(3, leaves=1), Program(2, leaves=0))
LEFT, AT_ONCE = Program(2, leaves=1), Program(1, leaves=0)


@pytest.mark.parametrize("first", ENDS, ids=str)
def test_two_ranks_with_any_two_passes_stay_together(first: Program) -> None:
    for second in ENDS:
        explore(((first, Program(1)), (second, Program(1, leaves=0))), depth=1)


@pytest.mark.parametrize(("first", "second"), [(LEFT, Program(1)), (Program(1), AT_ONCE), (AT_ONCE, LEFT)])
def test_with_more_rounds_under_way(first: Program, second: Program) -> None:
    explore(((first, Program(1)), (second, Program(1, leaves=0))), depth=2)
    explore(((first,), (second,)), depth=3)


def test_three_ranks_that_end_and_leave_in_any_order() -> None:
    explore(((Program(1), Program(1)), (AT_ONCE, Program(1)), (Program(1), Program(1))), depth=1)
    visited, _ = explore(((Program(1),), (AT_ONCE,), (Program(2),)), depth=2)
    assert visited > 5_000


def test_a_round_that_cannot_be_planned_ends_the_pass_on_all_ranks() -> None:
    explore(((Program(2), Program(1)), (Program(1), Program(1, leaves=0))), depth=2, failures=2)


class _NothingVoid(Clock):
    """The next pass begins with the next round: rounds that were under way are taken for its own."""

    def directed(self, number: int, *, ends: bool) -> None:
        self.done = number + 1
        if ends:
            self.void_until = self.first_round = number + 1
            self.pass_number += 1


class _NoDepth(Clock):
    """Contributions do not wait until earlier directives are known."""

    @property
    def is_free(self) -> bool:
        return True


class _Forgetful(Clock):
    """Rounds under way at the end of a pass are not filled up."""

    def directed(self, number: int, *, ends: bool) -> None:
        super().directed(number, ends=ends)
        self.next_up = max(self.next_up, self.void_until)


def _deaf(states: tuple[State, ...]) -> Decision:
    """Does not hear that a rank has left."""
    return really(tuple(State.EXHAUSTED if state is State.LEFT else state for state in states))


def _hasty(states: tuple[State, ...]) -> Decision:
    """Ends as soon as one rank has no data."""
    return Decision(mode=Mode.END) if State.EXHAUSTED in states else really(states)


@pytest.mark.parametrize("clock", [_NothingVoid, _NoDepth, _Forgetful])
def test_broken_rules_of_rounds_are_found_out(clock: type[Clock]) -> None:
    programs = ((Program(2), Program(1)), (Program(3, leaves=1), Program(2, leaves=0)))
    with pytest.raises(ViolationError):
        explore(programs, depth=2, clock=clock)


def test_a_lead_that_does_not_hear_of_a_rank_that_left_is_found_out() -> None:
    with pytest.raises(ViolationError):
        explore(((Program(2),), (Program(3, leaves=1),)), depth=2, decides=_deaf)


def test_all_batches_are_trained_unless_a_rank_leaves() -> None:
    """Ends of data and ends of loops are told apart: only an end of all data ends a pass by itself."""
    assert really((State.DATA, State.EXHAUSTED)).mode is Mode.EMBEDDED
    assert really((State.EXHAUSTED, State.EXHAUSTED)).mode is Mode.END
    assert really((State.DATA, State.LEFT)).mode is Mode.END
    assert _hasty((State.DATA, State.EXHAUSTED)).mode is Mode.END  # what the first line rules out
