"""What hostile sessions may send: every accepted message takes a bounded number of steps and bounded memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from evenkeel.protocol import balancer_pb2 as pb
from services.balancer.decisions import PlanFailure, Reason
from services.balancer.effects import Answer, Effect, StartPartition
from services.balancer.limits import Limits
from services.balancer.refusals import RefusedError
from services.balancer.registry import Registry
from services.balancer.requests import OversizedError, read_join_message, read_request, read_submit_message, walk
from services.balancer.session import Session
from services.balancer.submissions import SessionKey
from services.balancer.validation import read_submission
from tests.services.balancer.samples import joining, node, submission, submit_message, terms

LIMITS = Limits(max_sessions=16, max_memory=4 << 20, max_rounds_ahead=4, remembered_rounds=4, session_expiry=50.0)
NAMES = st.integers(0, 11)
RANKS = st.integers(0, 7)


def count_lines(call: Callable[[], Any]) -> tuple[Any, int]:
    """What a call returns, and how many lines of Python it took."""
    lines = 0

    def trace(_frame: Any, event: str, _argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # a collection has lines of its own: hypothesis watches them
    sys.settrace(trace)
    try:
        result = call()
    finally:
        sys.settrace(before)
        gc.enable()
    return result, lines


class Hostile(RuleBasedStateMachine):
    """Any messages of three callers; one of them, who behaves, must always be served."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.registry = Registry(LIMITS)
        self.streams: list[tuple[str, Session, int]] = []
        self.next_asker = 0
        self.honest = 0

    def bounded(self, call: Callable[[], Any], steps: int) -> Any:
        result, lines = count_lines(call)
        assert lines <= steps, f"{lines} lines"
        return result

    @rule(caller=st.sampled_from(["x", "y"]), name=NAMES, world=st.sampled_from([1, 2, 8]), run=st.integers(0, 1),
          restart=st.integers(0, 2), everyone=st.booleans())  # fmt: skip
    def join(self, caller: str, name: int, world: int, run: int, restart: int, everyone: bool) -> None:
        asker = self.next_asker = self.next_asker + 1
        who = joining(
            0, world, key=SessionKey(f"job{name}", "", ""), run_id=f"run{run}", restart_count=restart, caller=caller,
            ranks=tuple(range(world)) if everyone else (), terms=terms(world),
        )  # fmt: skip
        outcome, _ = self.bounded(lambda: self.registry.join(self.now, who, asker), 3000)
        if isinstance(outcome, Session):
            self.streams.append((caller, outcome, asker))

    @rule(at=st.integers(0, 1000), ranks=st.lists(RANKS, min_size=1, unique=True),
          number=st.integers(0, 1 << 40) | st.integers(0, 12), samples=st.sampled_from([0, 1, 8, 2000]),
          timeout=st.sampled_from([0.5, 5.0, 60.0]))  # fmt: skip
    def submit(self, at: int, ranks: list[int], number: int, samples: int, timeout: float) -> None:
        if not self.streams:
            return
        _, session, asker = self.streams[at % len(self.streams)]
        if self.registry.find(session.id) is not session or max(ranks) >= session.terms.world_size:
            return
        said = node(*ranks, costs=[1] * samples, timeout=timeout)
        effects = self.bounded(lambda: session.submit(self.now, number, said, asker), 1500)
        assert len(effects) <= 2 * session.terms.world_size + 70

    @rule(at=st.integers(0, 1000), finished=st.booleans())
    def leave(self, at: int, finished: bool) -> None:
        if self.streams:
            _, session, asker = self.streams.pop(at % len(self.streams))
            ranks = tuple(range(session.terms.world_size)) if finished else ()
            self.bounded(lambda: self.registry.leave(self.now, session.id, asker, ranks), 400)

    @rule(at=st.integers(0, 1000), number=st.integers(0, 12))
    def plan(self, at: int, number: int) -> None:
        if self.streams:
            _, session, _ = self.streams[at % len(self.streams)]
            failure = PlanFailure(reason=Reason.PARTITION_FAILED, detail="injected")
            if self.registry.find(session.id) is session:
                self.bounded(lambda: session.partitioned(self.now, number, failure), 1500)

    @rule(seconds=st.sampled_from([0.1, 1.0, 11.0, 60.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for session in list(self.registry):
            self.bounded(lambda session=session: session.tick(self.now), 6000)
        self.registry.expire(self.now)
        self.streams = [one for one in self.streams if self.registry.find(one[1].id) is one[1]]

    @rule()
    def an_honest_round(self) -> None:
        """Whatever the others hold, one who comes later gets in, and gets an answer."""
        self.honest += 1
        who = joining(0, 1, key=SessionKey("honest", "", ""), caller="honest", run_id=f"honest{self.honest}")
        asker = self.next_asker = self.next_asker + 1
        session, _ = self.registry.join(self.now, who, asker)
        assert isinstance(session, Session), session
        effects: list[Effect] = session.submit(self.now, 0, submission(1, 2), asker)
        assert any(isinstance(effect, StartPartition) for effect in effects)
        effects = session.partitioned(self.now, 0, PlanFailure(reason=Reason.NOT_FOUND, detail=""))
        assert any(isinstance(effect, Answer) for effect in effects)
        self.registry.leave(self.now, session.id, asker, (0,))
        assert self.registry.find(session.id) is None

    @invariant()
    def nobody_holds_more_than_there_is(self) -> None:
        memory, slots = self.registry.memory, self.registry.slots
        assert memory.used <= memory.total
        assert slots.used == len(self.registry.sessions) <= slots.total
        assert memory.used == sum(session.memory.held for session in self.registry)
        for session in self.registry:
            assert len(session.open_rounds) <= LIMITS.max_open_rounds
            owed = sum(current.num_waiting for current in session.open_rounds.values())
            waiting = (ranks for current in session.open_rounds.values() for _, ranks in current.owed())
            assert owed == sum(map(len, waiting))

    def teardown(self) -> None:
        for session in list(self.registry):
            self.registry.expire(self.now + 1e6)
            session.drain(self.now)
        self.registry.expire(self.now + 1e6)
        assert self.registry.memory.used == self.registry.slots.used == 0


Hostile.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestHostileSessions = Hostile.TestCase


def test_a_submission_takes_as_many_steps_whatever_else_is_open() -> None:
    def steps(num_open: int) -> list[int]:
        registry = Registry(Limits(max_rounds_ahead=64))
        session, _ = registry.join(0.0, joining(0, 2, ranks=(0, 1), terms=terms(2)), "a")
        assert isinstance(session, Session)
        for number in range(1, num_open):
            session.submit(0.0, number, submission(1), "a")
        taken = [count_lines(lambda: session.submit(0.0, 0, submission(1), "b"))[1]]
        taken.append(count_lines(lambda: session.submit(0.0, 0, submission(1, rank=1), "b"))[1])
        taken.append(count_lines(lambda: registry.leave(0.0, session.id, "b"))[1])
        return taken

    few, many = steps(1), steps(64)
    assert many[:2] == few[:2]
    assert many[2] <= few[2] + 3 * 64, "leaving looks at the rounds of its own session, once each"


def test_a_session_has_so_many_undecided_rounds_whatever_its_ranks_submit_to() -> None:
    world = 32
    session = Session(0.0, joining(0).key, terms(world), Limits(max_rounds_ahead=4))  # type: ignore[arg-type]
    refused = 0
    for rank in range(world):
        for number in range(4):
            for effect in session.submit(0.0, 100 * rank + number, submission(1, rank=rank), "a"):
                refused += isinstance(effect, Answer)
    assert len(session.open_rounds) == 8
    assert refused == 4 * world - 8


def test_ranks_of_a_stream_join_together_and_compare_their_terms_once() -> None:
    registry = Registry(Limits())
    wide = terms(4096, schema=tuple(f"field{i} int64 jagged []" for i in range(4096)))
    who = joining(0, 4096, ranks=tuple(range(4096)), terms=wide)
    session, _ = registry.join(0.0, who, "a")
    assert isinstance(session, Session)
    again, lines = count_lines(lambda: registry.join(0.0, who, "b")[0])
    assert again is session
    assert lines < 5 * 4096
    assert registry.num_members(session.id) == 8192


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x12\x80\x80\x08" + b"\x5a\x00" * 65_536, "more than 256 fields"),
        (b"\x12\x84\x80\x08" + b"\x42\x80\x80\x08" + b"\x01" * 131_072, "field 8 of a Submit"),
        (b"\x1a\x80\x80\x08" + b"\xf8\x07\x00" * 43_690 + b"\xf8\x00", "beside its submissions"),
        (b"\x0a\x80\x80\x80\x01" + b"\x0a\x00" * (1 << 20), "a Join of 2097152 bytes"),
        (b"\x0a\x80\x80\x10" + b"\x0a\x00" * 131_072, "more than 512 fields"),
    ],
)
def test_messages_that_consist_of_tiny_parts_are_not_parsed(data: bytes, reason: str) -> None:
    def read() -> None:
        request = read_request(data, max_fields=4096)
        assert request.said is not None
        for _ in request.said:  # type: ignore[union-attr]
            pass

    with pytest.raises(OversizedError, match=reason):
        read()


def test_a_large_group_is_read_one_submission_at_a_time() -> None:
    members = [submit_message(number, [1.0] * 20, rank=number % 4) for number in range(500)]
    data = pb.BalanceRequest(submits=pb.SubmitGroup(submits=members)).SerializeToString()
    assert len(data) > 1 << 16
    request = read_request(data, max_fields=16)
    assert list(request.said) == members  # type: ignore[arg-type]
    assert not isinstance(request.said, list)


def of_slow_ranks(count: int, kind: type[pb.Submit] | type[pb.SubmitNode]) -> tuple[pb.Submit | pb.SubmitNode, bytes]:
    """A large submission after which half of the ranks are slow and late, and its request."""
    learned = pb.LearnedSpeeds(
        stragglers=[pb.Straggler(rank=rank, speed=0.6, since=10**6) for rank in range(count)],
        delays=[pb.Delay(rank=rank, cause=pb.Delay.CAUSE_NETWORK, share=1.5, since=10**6) for rank in range(count)],
    )
    message = kind(round=7, memory=bytes(1 << 16), learned=learned)
    if isinstance(message, pb.Submit):
        return message, pb.BalanceRequest(submit=message).SerializeToString()
    return message, pb.BalanceRequest(submits=pb.SubmitGroup(nodes=[message])).SerializeToString()


@pytest.mark.parametrize("kind", [pb.Submit, pb.SubmitNode])
def test_any_number_of_slow_ranks_may_be_told_but_not_tiny_parts(
    kind: type[pb.Submit] | type[pb.SubmitNode],
) -> None:
    message, data = of_slow_ranks(2048, kind)
    assert list(read_request(data, max_fields=16).said) == [message]  # type: ignore[arg-type]
    twice = message.SerializeToString() * 2  # what comes in pieces is merged
    with pytest.raises(OversizedError, match=f"of a {kind.DESCRIPTOR.name} takes"):
        read_submit_message(twice, kind)


def test_what_ranks_did_is_read_beside_a_large_submission_unless_it_is_large_itself() -> None:
    message = pb.Submit(round=7, memory=bytes(1 << 16))
    told = pb.Told(agreed=7, unfollowed=[pb.Unfollowed(round=6, reason=pb.Decision.REASON_COMPILING, ranks=[1])])
    request = read_request(pb.BalanceRequest(submit=message, told=told).SerializeToString(), max_fields=16)
    assert list(request.said) == [message]  # type: ignore[arg-type]
    assert request.told == told
    told.unfollowed.extend(pb.Unfollowed(round=number) for number in range(8192))
    with pytest.raises(OversizedError, match="a Told of"):
        read_request(pb.BalanceRequest(submit=message, told=told).SerializeToString(), max_fields=16)


def test_a_join_of_any_accepted_size_is_read() -> None:
    fields = [pb.Field(path="x" * 200, dtype="int64", kind=pb.Field.KIND_JAGGED) for _ in range(4096)]
    join = pb.Join(job="job", schema=pb.Schema(fields=fields))
    data = join.SerializeToString()
    assert read_join_message(data, max_fields=4096) == join
    with pytest.raises(OversizedError, match="more than"):
        read_join_message(data, max_fields=100)
    assert [part[0] for part in walk(data, 0, len(data), most=16)] == [2, 12]


def test_integer_costs_whose_sum_overflows_are_refused_by_name() -> None:
    for value, world in ((2**62, 1), (2**61, 2), (2**63 - 1, 1)):
        message = submit_message(0, [1.0, 1.0], costs_i64=np.array([value // 2, value // 2], "<i8").tobytes())
        with pytest.raises(RefusedError, match="costs_i64"):
            read_submission(message, terms(world), Limits())
