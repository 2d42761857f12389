from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer_client.balancing.agreement import Mode, ProgramOrderError, Reason, check_order, decide, schemas_differ
from trainer_client.balancing.votes import Held, Vote

BALANCED = Vote(round=3, held=Held.BALANCED, instance=7, digest=11, moved=5, samples=4, asked=True, ready=True)
UNDECIDED = replace(BALANCED, held=Held.UNDECIDED, digest=0, moved=0)
NOTHING = Vote(round=3, samples=4, asked=True)


def outcome(*votes: Vote, waited: bool = True, service: bool = True, fallback: str = "embedded") -> tuple[Mode, Reason]:
    verdict = decide(votes, waited=waited, has_service=service, balance=True, fallback=fallback)  # type: ignore[arg-type]
    return verdict.mode, verdict.reason


def test_a_common_decision_is_used() -> None:
    verdict = decide([BALANCED] * 3, waited=True, has_service=True, balance=True, fallback="embedded")
    assert (verdict.mode, verdict.served, verdict.moved) == (Mode.SERVICE, True, True)


def test_a_plan_that_moves_nothing_needs_no_collective() -> None:
    verdict = decide([replace(BALANCED, moved=0)] * 2, waited=True, has_service=True, balance=True, fallback="embedded")
    assert not verdict.moved


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (NOTHING, Reason.NO_DECISION),
        (replace(BALANCED, instance=8), Reason.DECISIONS_DIFFER),
        (replace(BALANCED, digest=12), Reason.DECISIONS_DIFFER),
        (replace(BALANCED, moved=6), Reason.DECISIONS_DIFFER),
        (UNDECIDED, Reason.DECISIONS_DIFFER),
        (replace(BALANCED, checksum=1), Reason.TRANSFERS_DIFFER),
    ],
)
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("fallback", ["embedded", "identity"])
def test_one_odd_rank_sends_all_to_the_fallback(odd: Vote, reason: Reason, position: int, fallback: str) -> None:
    votes = [BALANCED] * 3
    votes[position] = odd
    assert outcome(*votes, fallback=fallback) == (Mode(fallback), reason)


def test_a_service_that_could_not_decide_has_still_answered() -> None:
    verdict = decide([UNDECIDED] * 2, waited=True, has_service=True, balance=True, fallback="embedded")
    assert (verdict.mode, verdict.reason, verdict.served) == (Mode.EMBEDDED, Reason.UNDECIDED, True)
    final = [replace(UNDECIDED, held=Held.IDENTITY)] * 2
    assert outcome(*final) == (Mode.IDENTITY, Reason.SERVICE_IDENTITY)


def test_an_open_breaker_ignores_late_decisions() -> None:
    assert outcome(BALANCED, BALANCED, waited=False) == (Mode.EMBEDDED, Reason.BREAKER_OPEN)


@pytest.mark.parametrize("fallback", ["embedded", "identity"])
def test_without_service_there_is_nothing_to_fall_back_from(fallback: str) -> None:
    found = outcome(NOTHING, NOTHING, waited=False, service=False, fallback=fallback)
    assert found == (Mode.EMBEDDED, Reason.NO_SERVICE)


def test_bad_costs_on_one_rank_leave_all_unbalanced_and_do_not_blame_the_service() -> None:
    verdict = decide(
        [BALANCED, replace(BALANCED, costs_valid=False)],
        waited=True,
        has_service=True,
        balance=True,
        fallback="embedded",
    )
    assert (verdict.mode, verdict.reason, verdict.ranks, verdict.served) == (
        Mode.IDENTITY, Reason.INVALID_COSTS, (1,), True
    )  # fmt: skip


def test_kernels_that_one_rank_compiles_leave_all_unbalanced_and_do_not_blame_the_service() -> None:
    compiling = replace(BALANCED, compiling=True)
    assert Vote.unpack(compiling.pack()) == compiling
    verdict = decide([BALANCED, compiling], waited=True, has_service=True, balance=True, fallback="embedded")
    assert (verdict.mode, verdict.reason, verdict.ranks, verdict.served) == (
        Mode.IDENTITY,
        Reason.COMPILING,
        (1,),
        True,
    )
    missed = replace(NOTHING, compiling=True)
    assert not decide([BALANCED, missed], waited=True, has_service=True, balance=True, fallback="embedded").served
    assert outcome(NOTHING, missed, waited=False, service=False) == (Mode.IDENTITY, Reason.COMPILING)


def test_ends_when_no_rank_has_anything_left() -> None:
    done = replace(NOTHING, exhausted=True, samples=0)
    assert outcome(done, done) == (Mode.END, Reason.NONE)
    assert outcome(done, replace(NOTHING, exhausted=True))[0] is not Mode.END
    assert outcome(done, replace(NOTHING, samples=0))[0] is not Mode.END


def test_ranks_in_different_rounds_are_an_error() -> None:
    with pytest.raises(ProgramOrderError, match="rank 1 is in round 4, rank 0 in round 3"):
        check_order([BALANCED, replace(BALANCED, round=4)])


def test_schemas_differ_names_two_ranks() -> None:
    assert schemas_differ([BALANCED, BALANCED]) is None
    assert schemas_differ([BALANCED, BALANCED, replace(BALANCED, schema=9)]) == (0, 2)


VOTES = st.builds(
    Vote,
    round=st.just(0),
    held=st.sampled_from(Held),
    instance=st.integers(0, 1),
    digest=st.integers(0, 1),
    moved=st.integers(0, 1),
    checksum=st.integers(0, 1),
    samples=st.integers(0, 2),
    exhausted=st.booleans(),
    costs_valid=st.booleans(),
)


@given(st.lists(VOTES, min_size=1, max_size=4))
def test_samples_move_by_the_service_only_when_every_rank_holds_the_same_fitting_decision(votes: list[Vote]) -> None:
    for waited, service, fallback in product((True, False), (True, False), ("embedded", "identity")):
        verdict = decide(votes, waited=waited, has_service=service, balance=True, fallback=fallback)  # type: ignore[arg-type]
        if verdict.mode is Mode.SERVICE:
            assert waited
            assert service
            assert {(v.held, v.instance, v.digest, v.moved) for v in votes} == {
                (Held.BALANCED, votes[0].instance, votes[0].digest, votes[0].moved)
            }
            assert sum(v.checksum for v in votes) % 2**64 == 0
        if verdict.moved:
            assert verdict.mode in (Mode.SERVICE, Mode.EMBEDDED)


def test_bad_costs_do_not_hide_that_the_service_is_gone() -> None:
    votes = [replace(NOTHING, costs_valid=False), NOTHING]
    verdict = decide(votes, waited=True, has_service=True, balance=True, fallback="embedded")
    assert (verdict.reason, verdict.served) == (Reason.INVALID_COSTS, False)
