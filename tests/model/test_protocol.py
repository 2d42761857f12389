"""Every state of small worlds, and that a broken protocol is found out."""

from __future__ import annotations

from typing import Any

import pytest

from services.balancer.session import Session
from tests.model.explore import ViolationError, explore
from tests.model.world import Size
from trainer_client.balancing import agreement
from trainer_client.balancing.agreement import Mode, Verdict
from trainer_client.balancing.votes import Vote

SMALL = Size(ranks=2, rounds=2, depth=1, failures=0)


@pytest.mark.parametrize(
    "size",
    [
        Size(ranks=3, rounds=1, depth=1),
        Size(ranks=3, rounds=3, depth=1, failures=0),
        Size(ranks=2, rounds=2, depth=2, failures=0),
        Size(ranks=3, rounds=2, depth=2, failures=0, restarts=0),
        Size(ranks=3, rounds=2, depth=1),
        Size(ranks=2, rounds=3, depth=1, failures=0, restarts=0, remembered=1),
    ],
    ids=str,
)
def test_all_ranks_do_the_same_in_every_state(size: Size) -> None:
    found = explore(size)
    assert found.states > 100
    assert found.ends > 1
    outcomes = {(mode, reason) for _, mode, reason in found.verdicts}
    assert {("service", "none"), ("embedded", "no_decision"), ("embedded", "undecided")} <= outcomes
    if size.restarts:
        assert ("embedded", "decisions_differ") in outcomes
    if size.rounds > size.depth:
        assert ("embedded", "breaker_open") in outcomes


def test_naming_the_ranks_otherwise_makes_no_difference() -> None:
    size = Size(ranks=3, rounds=1, depth=1)
    one, every = explore(size), explore(size, symmetric=False)
    assert one.verdicts == every.verdicts
    assert every.states / 6 <= one.states < every.states / 3


def test_ranks_that_do_not_compare_instances_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_decision", lambda vote: vote.held)
    with pytest.raises(ViolationError, match="killed and restarted"):
        explore(SMALL)


def test_a_rank_that_goes_by_its_own_answer_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = agreement.decide

    def own(votes: tuple[Vote, ...], **options: Any) -> Verdict:
        own.calls += 1  # type: ignore[attr-defined]
        mine = votes[own.calls % len(votes)]  # type: ignore[attr-defined]
        return real([mine] * len(votes), **options)

    own.calls = 0  # type: ignore[attr-defined]
    monkeypatch.setattr("tests.model.votes.decide", own)
    with pytest.raises(ViolationError, match="ranks differ"):
        explore(SMALL)


def test_a_balancer_that_decides_again_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Session.submit

    def forgetful(self: Session, now: float, round_number: int, *rest: Any) -> Any:
        self.decided.pop(round_number, None)
        return real(self, now, round_number, *rest)

    monkeypatch.setattr(Session, "submit", forgetful)
    with pytest.raises(ViolationError, match="two decisions of one round"):
        explore(SMALL)


def test_a_breaker_that_stays_closed_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = agreement.decide

    def lenient(votes: tuple[Vote, ...], **options: Any) -> Verdict:
        verdict = real(votes, **options)
        return Verdict(mode=verdict.mode, reason=verdict.reason, served=verdict.mode is not Mode.END)

    monkeypatch.setattr("tests.model.votes.decide", lenient)
    with pytest.raises(ViolationError, match="a miss must open the breaker"):
        explore(SMALL)
