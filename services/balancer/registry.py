"""All sessions of a balancer: who may hold which name, and when a name is free again. A pure state machine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from evenkeel.restarts import restart_text
from services.balancer.effects import Asker, Close, Effect, Leave, SessionId
from services.balancer.history import HISTORY_BYTES
from services.balancer.limits import Limits
from services.balancer.refusals import Code, Refusal, out_of_memory
from services.balancer.session import Session
from services.balancer.shares import Account, Shares
from services.balancer.submissions import Joining, SessionKey


class Registry:
    """The sessions by name.

    Attributes:
        limits: What the balancer allows.
        sessions: The one incarnation that holds each name.
        draining: Whether the balancer is shutting down: nobody is admitted.
        slots: How many sessions there may be.
        memory: What sessions and streams may take together.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.sessions: dict[SessionKey, Session] = {}
        self.draining = False
        self.slots = Shares(limits.max_sessions)
        self.memory = Shares(limits.max_memory)
        self._members: dict[SessionId, dict[Asker, tuple[int, ...]]] = {}
        self._elsewhere: dict[SessionId, set[Asker]] = {}  # who has joined another balancer
        self._expired_at = -math.inf

    def join(self, now: float, joining: Joining, asker: Asker) -> tuple[Session | Refusal, list[Effect]]:
        """Admits the ranks of a stream to their session, which may be new, or take the place of another incarnation.

        An incarnation takes over from one of the same run id and a lower restart count, from one without a stream that
        the same processes have opened before, and from any that has been silent, or without a stream, past its expiry.
        Any other is refused by name.
        """
        if self.draining:
            return DRAINING, []
        wanted = SessionId(joining.key, joining.run_id, joining.restart_count, joining.opening)
        effects: list[Effect] = []
        session = self.sessions.get(joining.key)
        if session is not None and session.id != wanted:
            refusal = self._may_supersede(now, session, joining)
            if refusal is not None:
                return refusal, []
            effects += self._end(session, _superseded(session.id, wanted))
            session = None
        is_new = session is None
        if session is None:
            opened = self._open(now, wanted, joining)
            if isinstance(opened, Refusal):
                return opened, effects
            session = opened
        ranks = joining.all_ranks
        others = tuple(rank for rank in ranks if rank != joining.rank)
        refused = session.join(now, joining.rank, joining.node, joining.terms, others)
        if refused is not None:
            if is_new:
                self._forget(session)
            return refused, effects
        self._members.setdefault(session.id, {})[asker] = ranks
        return session, effects

    def leave(
        self, now: float, session_id: SessionId, asker: Asker, finished: tuple[int, ...] = (), *, call: bool = False
    ) -> None:
        """Forgets a stream or call that has ended.

        Args:
            now: The time.
            session_id: The incarnation that it had joined.
            asker: The stream or call.
            finished: Its ranks, if it has ended its requests in order. When all ranks have, the name is free.
            call: It was a call, of which a rank makes one a round: nothing follows from its end.
        """
        members = self._members.get(session_id)
        if members is not None:
            members.pop(asker, None)
            if not members:
                del self._members[session_id]
        session = self.find(session_id)
        if session is not None:
            session.leave(asker)
            session.finished.update(finished)
            if session_id not in self._members:
                if session.is_finished:
                    self._forget(session)
                elif not call:
                    session.abandoned_at = now

    def num_members(self, session_id: SessionId) -> int:
        """Ranks whose streams and calls have joined this incarnation and have not ended."""
        return sum(map(len, list(self._members.get(session_id, {}).values())))

    def missing(self, session_id: SessionId, world_size: int) -> tuple[int, ...]:
        """The ranks that are not among them, ascending."""
        there = {rank for ranks in list(self._members.get(session_id, {}).values()) for rank in ranks}
        return tuple(rank for rank in range(world_size) if rank not in there)

    def find(self, session_id: SessionId) -> Session | None:
        """The session, if this incarnation of it still holds its name."""
        session = self.sessions.get(session_id.key)
        return session if session is not None and session.id == session_id else None

    def expire(self, now: float) -> None:
        """Forgets the sessions that have fallen silent; a stream that is still open brings its own back by speaking."""
        self._expired_at = now
        for session in [one for one in self.sessions.values() if one.is_silent(now) and not one.open_rounds]:
            self._forget(session)

    def leave_for_others(self) -> list[Effect]:
        """Asks all ranks to join another balancer, and refuses who joins from now on."""
        self.draining = True
        return [Leave(asker, None) for members in self._members.values() for asker in members]

    def elsewhere(self, now: float, session_id: SessionId, asker: Asker) -> list[Effect]:
        """Notes that a stream's ranks have joined another balancer: once all have, later rounds are that one's."""
        session, members = self.find(session_id), self._members.get(session_id, {})
        if session is None or not self.draining or asker not in members:
            return []
        moved = self._elsewhere.setdefault(session_id, set())
        moved.add(asker)
        if session.ends_at < math.inf or sum(len(members.get(one, ())) for one in moved) < session.terms.world_size:
            return []
        from_round = session.newest + 1
        return [*(Leave(one, from_round) for one in members), *session.drain(now, from_round)]

    def is_awaited(self, *, patient: bool) -> bool:
        """Whether rounds of sessions that go elsewhere are undecided; if `patient`, also whether others may yet go."""
        with_streams = [session for session in map(self.find, self._members) if session is not None]
        return any(session.open_rounds if session.ends_at < math.inf else patient for session in with_streams)

    def drain(self, now: float) -> list[Effect]:
        """Answers everybody who waits, and refuses who joins from now on."""
        self.draining = True
        return [effect for session in self.sessions.values() for effect in session.drain(now)]

    def __iter__(self) -> Iterator[Session]:
        return iter(self.sessions.values())

    # ------------------------------------------------------------------ inside

    def _open(self, now: float, wanted: SessionId, joining: Joining) -> Session | Refusal:
        holder = (joining.caller, joining.key.job)
        if not self.slots.take(holder):
            if now - self._expired_at >= _EXPIRE_SECONDS:
                self.expire(now)
            if not self.slots.take(holder):
                return _too_many_sessions(self.limits.max_sessions, self.slots.held(joining.caller))
        memory = Account(self.memory, holder)
        if not memory.take(SESSION_BYTES + joining.terms.nbytes):
            self.slots.give(holder)
            return replace(out_of_memory("another session"), fatal=True)
        session = Session(now, wanted, joining.terms, self.limits, memory=memory, caller=joining.caller)
        self.sessions[joining.key] = session
        return session

    def _forget(self, session: Session) -> None:
        del self.sessions[session.id.key]
        self.slots.give((session.caller, session.id.key.job))
        session.close()

    def _may_supersede(self, now: float, session: Session, joining: Joining) -> Refusal | None:
        if now >= session.free_at():
            return None
        if not self._members.get(session.id) and _opened_again(session.id, joining):
            return None
        if session.id.run_id != joining.run_id or session.id.restart_count == joining.restart_count:
            return self._name_taken(now, session, joining)
        if session.id.restart_count > joining.restart_count:
            restart = restart_text(joining.restart_count)
            return Refusal(
                code=Code.SUPERSEDED,
                field="restart_count",
                value=f"{restart} after restart {session.id.restart} of {joining.key} had joined",
                remedy="end this process: a newer incarnation of the job runs",
                fatal=True,
            )
        return None

    def _name_taken(self, now: float, session: Session, joining: Joining) -> Refusal:
        streams = len(self._members.get(session.id, ()))
        if streams:
            heard = f"last heard {now - session.last_message_at:.3g} s ago on one of {streams} streams"
            remedy = (
                "give each data-parallel group of a job a group name of its own, choose another job name, or end that "
                "run: its name is free at once when all its ranks end in order, "
                f"{self.limits.abandoned_expiry:.3g} s after they were killed"
            )
        else:
            heard = "which has no stream any more"
            remedy = f"choose another job or group name, or wait: its name is free in {session.free_at() - now:.3g} s"
        return Refusal(
            code=Code.JOB_NAME_TAKEN,
            field="job",
            value=f"{joining.key}, which run {session.id.run_id!r} uses, {heard}",
            remedy=remedy,
            fatal=True,
        )

    def _end(self, session: Session, refusal: Refusal) -> list[Effect]:
        effects = session.end(refusal)
        self._forget(session)
        effects += [Close(asker, refusal) for asker in self._members.pop(session.id, ())]
        return effects


DRAINING = Refusal(
    code=Code.DRAINING,
    field="server",
    value="shutting down",
    remedy="connect again, to another balancer or a little later",
    fatal=True,
)


def _opened_again(old: SessionId, joining: Joining) -> bool:
    """Whether processes that have opened the old one open their stream once more, as those do that are left of a job.

    They count their openings in the run id: of run `x` the second is `x/2`.
    """
    run, _, number = joining.run_id.rpartition("/")
    if old.restart_count != joining.restart_count or not (run and number.isdecimal()):
        return False
    before, _, earlier = old.run_id.rpartition("/")
    return old.run_id == run or (before == run and earlier.isdecimal() and int(earlier) < int(number))


def _superseded(old: SessionId, new: SessionId) -> Refusal:
    if old.run_id == new.run_id and old.restart_count != new.restart_count:
        value = f"{old.restart}, and restart {new.restart} of {old.key} has joined"
        field = "restart_count"
    else:
        value = f"{old.run_id!r}, gone past its expiry, and run {new.run_id!r} of {old.key} has joined"
        field = "run_id"
    return Refusal(
        code=Code.SUPERSEDED,
        field=field,
        value=value,
        remedy="end this process: another incarnation of the job runs",
        fatal=True,
    )


_EXPIRE_SECONDS = 0.5
SESSION_BYTES = 20_000 + HISTORY_BYTES


def _too_many_sessions(limit: int, held: int) -> Refusal:
    return Refusal(
        code=Code.LIMIT_EXCEEDED,
        field="max_sessions",
        value=f"{limit}, of which this caller has {held}, as many as are left to it",
        remedy="end sessions, use another balancer, or raise the server's max_sessions",
        fatal=True,
    )
