"""Between the state machines and the world: runs them on the event loop and carries out their effects."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import structlog

from evenkeel.partitioning.rounds import RoundPlan
from evenkeel.restarts import restart_text
from services.balancer.decisions import Decision, PlanFailure
from services.balancer.effects import Answer, Close, Decided, Effect, Leave, SessionId, StartPartition, Wake
from services.balancer.history import History
from services.balancer.limits import Limits
from services.balancer.refusals import Refusal
from services.balancer.registry import Registry
from services.balancer.rounds import NEVER_STOPPED
from services.balancer.session import Session
from services.balancer.submissions import Joining, Submission
from services.balancer.workers.tasks import Task

log = structlog.get_logger(__name__)

_HOUSEKEEPING_SECONDS = 0.5
_STOPPED_SECONDS = 1.0  # a timer that rings so much too late tells that the process did not run
_PIECE = 32  # submissions whose contents are noted at a time


class Mailbox(Protocol):
    """Where the answers for one stream or call go."""

    def __hash__(self) -> int:
        """Mailboxes are told apart by identity."""

    def deliver(self, answer: Answer) -> None:
        """Sends an answer, soon."""

    def leave(self, from_round: int | None) -> None:
        """Says that the balancer leaves, as in `effects.Leave`."""

    def close(self, refusal: Refusal) -> None:
        """Ends the stream with an error, after what was delivered before."""


class Observer(Protocol):
    """What is told about rounds."""

    def decided(self, event: Decided) -> None:
        """A round was decided, and the ranks followed the decision, as far as they tell."""

    def balanced_by_ranks(self, session: SessionId, caller: str, rounds: int) -> None:
        """Of rounds without a plan that was followed the ranks of a session have balanced so many by themselves."""


class Pool(Protocol):
    """What computes plans."""

    def submit(self, task: Task) -> PlanFailure | None:
        """Takes a task, or says why not; the outcome of one that was taken comes later, on the event loop."""

    def cancel(self, task: Task) -> None:
        """Nobody wants the plan of a task that was taken any more."""


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """The ranks that have joined on one stream or call."""

    joining: Joining
    session: SessionId
    mailbox: Mailbox
    history: History


class Hub:
    """All of a balancer's state, on one event loop; only the partitions run elsewhere.

    Attributes:
        registry: The sessions.
        histories: The last rounds of each.
    """

    def __init__(
        self,
        limits: Limits,
        pool: Pool,
        observer: Observer,
        *,
        traced: Callable[[Decided, float], None] | None = None,
    ) -> None:
        """Starts with no session.

        Args:
            limits: Of the round protocol.
            pool: Computes the plans.
            observer: Is told about rounds.
            traced: Is told about decided rounds that ranks trace, with the time at which all answers were handed out.
        """
        self.registry = Registry(limits)
        self.histories: dict[SessionId, History] = {}
        self._pool = pool
        self._observer = observer
        self._tasks: dict[tuple[SessionId, int], Task] = {}
        self._traced = traced
        self._log = log.bind()  # once: where nobody reads about single rounds, what is logged of each costs nothing
        self._loop = asyncio.get_running_loop()
        self._wakes: dict[SessionId, asyncio.TimerHandle] = {}
        self._stopped = NEVER_STOPPED
        self._schedule_housekeeping()

    @property
    def now(self) -> float:
        """Seconds of the monotonic clock that all deadlines are measured by."""
        return self._loop.time()

    def join(self, joining: Joining, mailbox: Mailbox) -> Member | Refusal:
        """Admits the ranks of a stream or call to their session."""
        known = self.registry.sessions.get(joining.key)
        outcome, effects = self.registry.join(self.now, joining, mailbox)
        self._perform(effects)
        if isinstance(outcome, Refusal):
            log.warning("join refused", **_about(joining), reason=outcome.message)
            return outcome
        if outcome is not known:
            terms = joining.terms
            log.info(
                "session opened",
                **_about(joining),
                restart=restart_text(joining.restart_count),
                world_size=terms.world_size,
            )
        history = self.histories.get(outcome.id)
        if history is None:
            history = self.histories[outcome.id] = History(outcome.terms.world_size)
        # What all ranks say alike is kept once.
        return Member(replace(joining, terms=outcome.terms), outcome.id, mailbox, history)

    def submit(self, member: Member, round_number: int, submission: Submission) -> None:
        """Takes the part of some of a member's ranks in a round; the answers go to the member's mailbox."""
        session = self.registry.find(member.session)
        if session is None:  # it expired in silence, or another incarnation has taken over
            outcome, effects = self.registry.join(self.now, member.joining, member.mailbox)
            self._perform(effects)
            if isinstance(outcome, Refusal):
                member.mailbox.close(outcome)
                return
            session = outcome
            self.histories.setdefault(session.id, member.history)
        now = self.now
        member.history.arrived(now, round_number, submission)
        self._perform(session.submit(now, round_number, submission, member.mailbox), session)

    def told(self, member: Member, agreed: int, unfollowed: Mapping[int, Decision]) -> None:
        """Takes what the ranks of a session did: as decided in rounds below `agreed`, but for those `unfollowed`."""
        session, history = self.registry.find(member.session), member.history
        if session is not None:
            self._perform(session.told(self.now, agreed, unfollowed), session)
        before = history.by_ranks
        for event in history.told(agreed, unfollowed):
            self._count(event)
        if history.by_ranks > before:
            self._observer.balanced_by_ranks(member.session, member.joining.caller, history.by_ranks - before)

    def leave(self, member: Member, *, finished: tuple[int, ...] = (), call: bool = False) -> None:
        """Forgets a stream or, with `call`, a call; `finished`: its ranks, if they will not come back."""
        self.registry.leave(self.now, member.session, member.mailbox, finished, call=call)

    def leave_for_others(self) -> None:
        """Asks all ranks to join another balancer, and refuses who joins from now on; rounds go on."""
        self._perform(self.registry.leave_for_others())

    def elsewhere(self, member: Member) -> None:
        """Notes that the ranks of a stream have joined another balancer."""
        self._perform(self.registry.elsewhere(self.now, member.session, member.mailbox))

    def drain(self) -> None:
        """Answers everybody who waits, and refuses who joins from now on."""
        self._perform(self.registry.drain(self.now))

    def close(self) -> None:
        """Stops the timers."""
        self._housekeeping.cancel()
        for timer in self._wakes.values():
            timer.cancel()
        self._wakes.clear()

    # ------------------------------------------------------------------ inside

    def _perform(self, effects: Sequence[Effect], session: Session | None = None) -> None:
        for effect in effects:
            match effect:
                case Answer(asker=mailbox):
                    mailbox.deliver(effect)  # type: ignore[attr-defined]
                case Close(asker=mailbox, refusal=refusal):
                    mailbox.close(refusal)  # type: ignore[attr-defined]
                case Leave(asker=mailbox, from_round=from_round):
                    mailbox.leave(from_round)  # type: ignore[attr-defined]
                case Wake(at=at):
                    assert session is not None
                    self._wake(at, session.id)
                case StartPartition():
                    self._start(effect)
                case Decided():
                    self._note(effect)

    def _start(self, start: StartPartition) -> None:
        where = (start.session, start.round)

        def done(result: RoundPlan | PlanFailure | None) -> None:
            self._tasks.pop(where, None)
            self._finish(start, result)

        def started() -> None:
            session = self.registry.find(start.session)
            if session is not None:
                self._perform(session.started(self.now, start.round), session)
                # Not before: the round may still be copied by another thread, which wants the interpreter too.
                self._note_contents(start.session, start.round)

        def is_wanted() -> bool:
            session = self.registry.find(start.session)
            return session is not None and session.is_wanted(start.round)

        task = Task(
            session=start.session.key,
            inputs=start.inputs,
            deadline=start.deadline,
            started=started,
            done=done,
            is_wanted=is_wanted,
        )
        self._tasks[where] = task
        failure = self._pool.submit(task)
        if failure is not None:
            done(failure)

    def _note_contents(self, session_id: SessionId, round_number: int, begin: int = 0) -> None:
        """What ranks are known by that say something again: found while the plan is made, in short pieces."""
        session = self.registry.find(session_id)
        current = None if session is None else session.open_rounds.get(round_number)
        if current is not None:
            for submission in current.said[begin : begin + _PIECE]:
                submission.fingerprints  # noqa: B018
            if begin + _PIECE < len(current.said):
                self._loop.call_soon(self._note_contents, session_id, round_number, begin + _PIECE)

    def _finish(self, start: StartPartition, result: RoundPlan | PlanFailure | None) -> None:
        session = self.registry.find(start.session)
        if session is not None:
            history = self.histories.get(start.session)
            if history is not None and history.sample_wanted and isinstance(result, RoundPlan):
                history.planned(self.now, start.round, start.inputs, result)
            self._perform(session.partitioned(self.now, start.round, result), session)

    def _note(self, event: Decided) -> None:
        history = self.histories.get(event.session)
        if history is None or history.decided(self.now, time.time(), event):
            self._count(event)
        if self._traced is not None and event.timeline is not None:
            self._traced(event, self.now)
        task = self._tasks.pop((event.session, event.round), None)
        if task is not None:
            self._pool.cancel(task)
        if self._log.is_enabled_for(logging.DEBUG):
            self._log.debug(
                "round decided",
                job=event.session.key.job,
                session=str(event.session.key),
                run=event.session.run_id,
                step=event.round,
                outcome=event.decision.outcome.name,
                reason=event.decision.reason.name,
                waited=event.waited,
                late=event.decision.missing_ranks,
            )

    def _count(self, event: Decided) -> None:
        """Counts a round, once it is known what the ranks have made of it."""
        self._observer.decided(event)
        session = self.registry.find(event.session)
        if session is not None:
            session.statistics.count(event.decision, event.waited)

    def _wake(self, at: float, session: SessionId) -> None:
        """One timer a session, for its earliest deadline: when it rings, the next is asked for."""
        timer = self._wakes.get(session)
        if timer is not None:
            if timer.when() <= at:
                return
            timer.cancel()
        self._wakes[session] = self._loop.call_at(at, self._tick, session, at)

    def _tick(self, session_id: SessionId, due: float) -> None:
        del self._wakes[session_id]
        self._notice_stop(due)
        session = self.registry.find(session_id)
        if session is not None:
            self._perform(session.tick(self.now, self._stopped), session)
            at = session.next_wake()
            if at < math.inf:
                self._wake(at, session_id)

    def _notice_stop(self, due: float) -> None:
        """Notes that the process did not run, as when it was stopped: its ranks are not late for that."""
        late = self.now - due
        if late > _STOPPED_SECONDS:
            self._stopped = self.now, late

    def _schedule_housekeeping(self) -> None:
        due = self.now + _HOUSEKEEPING_SECONDS
        self._housekeeping = self._loop.call_at(due, self._keep_house, due)

    def _keep_house(self, due: float) -> None:
        self._notice_stop(due)
        self.registry.expire(self.now)
        if len(self.histories) > len(self.registry.sessions):
            for gone in [one for one in self.histories if self.registry.find(one) is None]:
                for event in self.histories.pop(gone).told():
                    self._count(event)
        for history in self.histories.values():
            history.forget_sample(self.now)
        self._schedule_housekeeping()


def _about(joining: Joining) -> dict[str, Any]:
    return {"job": joining.key.job, "session": str(joining.key), "run": joining.run_id, "rank": joining.rank,
            "caller": joining.caller}  # fmt: skip
