"""One rank's connection to the balancer: what it has submitted, and the answers that it waits for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from evenkeel.credentials import Credentials
from evenkeel.partitioning.samples import RankSamples
from evenkeel.partitioning.speeds import ALL_EQUAL, LearnedSpeeds
from evenkeel.protocol import balancer_pb2 as pb
from trainer_client.balancing.agreement import Verdict
from trainer_client.balancing.service.messages import ServiceDecision, read_decision, submit_request, unfollowed
from trainer_client.balancing.service.node import NodeFollower, NodeLeader, NodeSeat
from trainer_client.balancing.service.outages import Cause
from trainer_client.balancing.service.uplink import Listener, Uplink

logger = logging.getLogger(__name__)


class Route(Protocol):
    """The way to the service: a stream of the rank's own, or one that the ranks of its node share."""

    @property
    def ready(self) -> bool:
        """Whether the stream is joined; after `suspect`, whether it has been joined anew."""

    def start(self) -> None:
        """Connects in the background, if that is not under way."""

    def submit(self, message: pb.Submit) -> None:
        """Sends a round now, and again after each reconnect until it is settled."""

    def settle(self, round_number: int, unfollowed: pb.Unfollowed | None, following: int) -> None:
        """Forgets a round that all ranks have agreed on, and those up to `following`, which none of them will train."""

    def suspect(self) -> None:
        """Gives the stream up after a missed round."""

    def encourage(self) -> None:
        """Connects at once if the next attempt is being waited for: another rank has got through."""

    def close(self) -> None:
        """Leaves the session and ends the threads, within a bounded time."""


class Connection:
    """Submits rounds and collects answers, whatever becomes of the service.

    Threads start with `start` or the first submission: a DataLoader that forks its workers before then forks no gRPC
    threads. Nothing here blocks the caller but `decision`, which is bounded by its deadline.
    """

    def __init__(
        self,
        address: str,
        join: pb.Join,
        *,
        join_timeout: float,
        credentials: Credentials | None = None,
        seat: NodeSeat | None = None,
    ) -> None:
        """Prepares a connection.

        Args:
            address: Of the balancer, as `Balancer.connect` takes it.
            join: The rank's introduction.
            join_timeout: Seconds after which a stream that has not been joined is given up.
            credentials: What the rank shows to the balancer.
            seat: The rank's place in a node that shares one stream; None: a stream of its own.
        """
        self._address = address
        self._join = join
        self._changed = threading.Condition()
        self._open: set[int] = set()  # submitted and not settled
        self._answers: dict[int, pb.Answer] = {}
        self._closed = False
        self._last_trouble = ""
        self._cause: Cause | None = None

        def uplink(listener: Listener) -> Uplink:
            if seat is not None:
                shared = pb.Join()
                shared.CopyFrom(join)
                shared.ranks.extend(seat.ranks)
                return Uplink(address, shared, listener, join_timeout=join_timeout, credentials=credentials)
            return Uplink(address, join, listener, join_timeout=join_timeout, credentials=credentials)

        self._route: Route
        if seat is None:
            self._route = uplink(self)
        elif seat.leads:
            self._route = NodeLeader(seat, self, uplink)
        else:
            self._route = NodeFollower(seat, self)

    @property
    def ready(self) -> bool:
        """Whether the stream is joined; after `suspect`, whether it has been joined anew."""
        return self._route.ready

    @property
    def trouble(self) -> str:
        """The last thing that went wrong, for people."""
        return self._last_trouble

    @property
    def cause(self) -> Cause | None:
        """Why waiting for the stream does not help; None if it is joined, or may yet be."""
        return None if self.ready else self._cause

    def submit(
        self,
        round_number: int,
        samples: RankSamples,
        *,
        exhausted: bool,
        timeout_ms: int,
        traceparent: str = "",
        learned: LearnedSpeeds = ALL_EQUAL,
    ) -> None:
        """Sends a round now, and again after each reconnect until it is settled."""
        message = submit_request(
            round_number,
            self._join.rank,
            samples,
            exhausted=exhausted,
            timeout_ms=timeout_ms,
            traceparent=traceparent,
            learned=learned,
        )
        with self._changed:
            self._open.add(round_number)
        self._route.submit(message)
        self.start()

    def start(self) -> None:
        """Connects in the background, if that is not under way."""
        if not self._closed:
            self._route.start()

    def decision(self, round_number: int, deadline: float, samples: RankSamples) -> ServiceDecision | None:
        """The service's decision of a round, or None if there is none that can be used at the deadline.

        Args:
            round_number: A submitted round.
            deadline: `time.monotonic` seconds.
            samples: As submitted, which the decision must fit.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: round_number in self._answers or self._closed, max(0.0, deadline - time.monotonic())
            )
            answer = self._answers.get(round_number)
        if answer is None:
            if self.ready or not self._last_trouble:  # otherwise the reason is known better
                self.noted(f"no answer to round {round_number} in time")
            return None
        if answer.WhichOneof("result") != "decision":
            return None  # an error, noted on arrival
        try:
            return read_decision(
                answer.decision,
                rank=self._join.rank,
                world_size=self._join.world_size,
                lengths=samples.lengths,
                window=max(1, self._join.window),
            )
        except (ValueError, ArithmeticError) as error:  # whatever a service may say, the job goes on
            self.noted(f"malformed answer to round {round_number}: {error}")
            return None

    def settle(self, round_number: int, verdict: Verdict | None = None, following: int = 0) -> None:
        """Forgets a round that all ranks have agreed on, and lets the service know what they did.

        Args:
            round_number: The round; they come in order.
            verdict: What all ranks do; None: what the service has decided.
            following: The round to be agreed on next, if it is a later one than the next: a loop is over.
        """
        with self._changed:
            self._open.discard(round_number)
            self._answers.pop(round_number, None)
        told = None if verdict is None else unfollowed(round_number, verdict)
        self._route.settle(round_number, told, max(following, round_number + 1))

    def suspect(self) -> None:
        """Gives the stream up after a missed round; it is ready again when a new one has been joined."""
        self._route.suspect()

    def encourage(self) -> None:
        """Connects at once if the next attempt is being waited for: another rank has got through."""
        self._route.encourage()

    def close(self) -> None:
        """Leaves the session and ends the threads, within a bounded time."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._route.close()

    # ------------------------------------------------------------------ told by the stream

    def answered(self, answers: Sequence[pb.Answer]) -> None:
        """Takes answers to rounds."""
        for answer in answers:
            if answer.WhichOneof("result") == "error":
                self.noted(answer.error.message)
        with self._changed:
            for answer in answers:
                if answer.round in self._open and not (answer.HasField("error") and answer.round in self._answers):
                    self._answers[answer.round] = answer
            self._changed.notify_all()

    def joined(self, epoch: int) -> None:
        """The stream has been joined; whoever wants to know asks `ready`."""

    def lost(self, trouble: str) -> None:
        """The stream has ended; `ready` tells, `noted` has told why."""

    def noted(self, trouble: str, cause: Cause | None = None) -> None:
        """Remembers the last thing that went wrong, and what does not pass by itself."""
        if trouble and trouble != self._last_trouble and not self._closed:
            logger.debug("balancer at %s: %s", self._address, trouble)
        self._last_trouble = trouble
        if cause is not None:
            self._cause = cause
