from dataclasses import replace

import pytest

from evenkeel.restarts import restart_number
from services.balancer.effects import Answer, Close
from services.balancer.limits import Limits
from services.balancer.refusals import Code, Refusal
from services.balancer.registry import Registry
from services.balancer.session import Session
from services.balancer.submissions import Joining, SessionKey
from tests.services.balancer.samples import KEY, joining, submission, terms


def admit(registry: Registry, now: float, who: Joining, asker: str) -> Session:
    session, _ = registry.join(now, who, asker)
    assert isinstance(session, Session)
    return session


def refuse(registry: Registry, now: float, who: Joining) -> Refusal:
    refused, effects = registry.join(now, who, "refused")
    assert isinstance(refused, Refusal)
    assert refused.fatal
    assert effects == []
    return refused


def test_ranks_of_one_incarnation_share_a_session() -> None:
    registry = Registry(Limits())
    assert admit(registry, 0.0, joining(0), "a") is admit(registry, 0.0, joining(1), "b")
    assert registry.num_members(registry.sessions[KEY].id) == 2


def test_other_groups_and_loaders_are_other_sessions() -> None:
    registry = Registry(Limits())
    sessions = {
        id(admit(registry, 0.0, joining(0, key=SessionKey("job", group, loader)), "a"))
        for group in ("g", "h")
        for loader in ("train", "eval")
    }
    assert len(sessions) == 4


def test_a_restart_supersedes_and_the_old_ranks_are_told() -> None:
    registry = Registry(Limits())
    old = admit(registry, 0.0, joining(0), "a")
    admit(registry, 0.0, joining(1), "b")
    old.submit(0.0, 5, submission(1), "a")
    new, effects = registry.join(1.0, joining(0, world_size=2, restart_count=restart_number(1)), "c")
    assert isinstance(new, Session)
    assert new is not old
    assert new.terms.world_size == 2
    (answer,) = [effect for effect in effects if isinstance(effect, Answer)]
    assert isinstance(answer.result, Refusal)
    assert answer.result.code is Code.SUPERSEDED
    assert answer.result.value.startswith("0, and restart 1 of ")
    assert {effect.asker for effect in effects if isinstance(effect, Close)} == {"a", "b"}
    assert registry.find(old.id) is None
    again = refuse(registry, 2.0, joining(1))
    assert again.code is Code.SUPERSEDED
    assert again.value.startswith("0 after restart 1 of ")


def test_another_run_of_the_name_is_refused_and_the_first_unharmed_until_it_has_been_silent() -> None:
    registry = Registry(Limits(session_expiry=100.0))
    first = admit(registry, 0.0, joining(0), "a")
    refused = refuse(registry, 50.0, joining(0, run_id="other", restart_count=7))
    assert refused.code is Code.JOB_NAME_TAKEN
    assert "'run'" in refused.value
    assert registry.sessions[KEY] is first
    first.submit(60.0, 0, submission(1, timeout=1000), "a")
    assert refuse(registry, 159.0, joining(0, run_id="other")).code is Code.JOB_NAME_TAKEN
    second, effects = registry.join(160.0, joining(0, run_id="other"), "b")
    assert isinstance(second, Session)
    assert second.id.run_id == "other"
    assert Close in {type(effect) for effect in effects}


def test_a_name_without_a_stream_is_free_soon_and_what_was_decided_is_kept_until_it_is_taken() -> None:
    registry = Registry(Limits(session_expiry=100.0, abandoned_expiry=10.0))
    session = admit(registry, 0.0, joining(0), "a")
    admit(registry, 0.0, joining(1), "b")
    registry.leave(20.0, session.id, "a")
    refused = refuse(registry, 40.0, joining(0, run_id="other"))
    assert refused.code is Code.JOB_NAME_TAKEN
    assert "one of 1 streams" in refused.value
    registry.leave(40.0, session.id, "b")
    refused = refuse(registry, 42.5, joining(0, run_id="other"))
    assert "no stream" in refused.value
    assert "free in 7.5 s" in refused.remedy
    registry.expire(99.0)
    assert admit(registry, 99.0, joining(1), "b") is session  # nobody wanted the name
    assert refuse(registry, 120.0, joining(0, run_id="other")).code is Code.JOB_NAME_TAKEN
    registry.leave(120.0, session.id, "b")
    assert admit(registry, 130.0, joining(0, run_id="other"), "c").id.run_id == "other"


def test_processes_that_are_left_of_a_job_open_their_stream_once_more_at_once() -> None:
    registry = Registry(Limits(session_expiry=100.0, abandoned_expiry=10.0))
    session = admit(registry, 0.0, joining(0), "a")
    admit(registry, 0.0, joining(2), "killed")
    registry.leave(20.0, session.id, "a", finished=(0,))
    assert refuse(registry, 20.0, joining(0, run_id="run/2")).code is Code.JOB_NAME_TAKEN  # somebody is there
    registry.leave(20.5, session.id, "killed")
    for other in ("other/2", "run/x", "run/", "running/2", "other"):
        assert refuse(registry, 20.5, joining(0, run_id=other)).code is Code.JOB_NAME_TAKEN
    second = admit(registry, 20.5, joining(0, world_size=2, run_id="run/2"), "a")
    assert second.terms.world_size == 2
    registry.leave(21.0, second.id, "a")
    assert refuse(registry, 21.0, joining(0, run_id="run")).code is Code.JOB_NAME_TAKEN  # not back
    assert admit(registry, 21.0, joining(0, run_id="run/3"), "a") is not second


def test_a_rank_that_is_refused_does_not_keep_the_name() -> None:
    registry = Registry(Limits(abandoned_expiry=10.0))
    session = admit(registry, 0.0, joining(0), "a")
    registry.leave(1.0, session.id, "a")
    refuse(registry, 10.0, joining(1, terms=terms(3, schema_hash=b"other")))
    assert admit(registry, 11.0, joining(0, run_id="other"), "c") is not session


def test_calls_between_which_there_is_no_stream_keep_the_name() -> None:
    registry = Registry(Limits(session_expiry=100.0, abandoned_expiry=10.0))
    session = admit(registry, 0.0, joining(0), "call")
    registry.leave(0.1, session.id, "call", call=True)
    assert refuse(registry, 60.0, joining(0, run_id="other")).code is Code.JOB_NAME_TAKEN
    assert admit(registry, 99.0, joining(0), "call") is session


def test_what_a_run_starts_again_under_the_same_count_waits_for_the_old_streams_and_starts_afresh() -> None:
    registry = Registry(Limits(abandoned_expiry=10.0))
    old = admit(registry, 0.0, joining(0, opening=7), "a")
    old.submit(0.0, 5, submission(1), "a")
    assert admit(registry, 0.0, joining(1, opening=7), "b") is old
    assert refuse(registry, 1.0, joining(0, world_size=2, opening=8)).code is Code.JOB_NAME_TAKEN
    for asker in ("a", "b"):
        registry.leave(2.0, old.id, asker)
    new = admit(registry, 12.0, joining(0, world_size=2, opening=8), "c")
    assert new is not old
    assert (new.highest, new.open_rounds, new.terms.world_size) == (-1, {}, 2)
    assert refuse(registry, 13.0, joining(1, opening=7)).code is Code.JOB_NAME_TAKEN  # a straggler of the old one
    # A restart that the launcher counts does not wait.
    third, effects = registry.join(13.0, joining(0, restart_count=1, opening=9), "d")
    assert isinstance(third, Session)
    assert Close in {type(effect) for effect in effects}


def test_silent_sessions_are_forgotten() -> None:
    registry = Registry(Limits(session_expiry=10.0))
    session = admit(registry, 0.0, joining(0), "a")
    registry.expire(9.9)
    assert registry.find(session.id) is session
    registry.expire(10.0)
    assert registry.find(session.id) is None
    assert admit(registry, 11.0, joining(0), "a") is not session


def test_sessions_are_limited_and_silent_ones_make_room() -> None:
    registry = Registry(Limits(max_sessions=3, session_expiry=10.0))
    for name in ("x", "y"):
        admit(registry, 0.0, joining(0, key=SessionKey(name, "", "")), name)
    refused = refuse(registry, 5.0, joining(0, key=SessionKey("z", "", "")))
    assert refused.code is Code.LIMIT_EXCEEDED
    assert refused.field == "max_sessions"
    admit(registry, 10.0, joining(0, key=SessionKey("z", "", "")), "z")
    assert len(registry.sessions) == 1


def test_the_name_is_free_when_all_ranks_have_left_in_order() -> None:
    registry = Registry(Limits())
    session = admit(registry, 0.0, joining(0, world_size=2), "a")
    admit(registry, 0.0, joining(1, world_size=2), "b")
    registry.leave(0.5, session.id, "a", finished=(0,))
    assert refuse(registry, 1.0, joining(0, run_id="other")).code is Code.JOB_NAME_TAKEN
    registry.leave(0.6, session.id, "b", finished=(1,))
    assert admit(registry, 1.0, joining(0, run_id="other"), "c").id.run_id == "other"


@pytest.mark.parametrize("returns", [True, False])
def test_a_name_is_kept_while_a_rank_may_come_back(returns: bool) -> None:
    registry = Registry(Limits())
    session = admit(registry, 0.0, joining(0, world_size=1), "a")
    registry.leave(0.0, session.id, "a", finished=(0,) if returns else ())
    if returns:
        session = admit(registry, 0.0, joining(0, world_size=1), "b")
        registry.leave(0.0, session.id, "b")
    assert registry.find(session.id) is session
    assert registry.num_members(session.id) == 0


def test_a_draining_registry_admits_nobody() -> None:
    registry = Registry(Limits())
    admit(registry, 0.0, joining(0), "a")
    registry.drain(1.0)
    assert refuse(registry, 1.0, joining(1)).code is Code.DRAINING


def test_a_rank_that_differs_is_refused_and_the_session_stays() -> None:
    registry = Registry(Limits())
    session = admit(registry, 0.0, joining(0), "a")
    other = replace(joining(1), terms=terms(3, schema_hash=b"x"))
    assert refuse(registry, 0.0, other).code is Code.RANKS_DIFFER
    assert registry.find(session.id) is session
