"""The lead's way to the balancer service: one unary call a round, and when not to make it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from evenkeel import __version__
from evenkeel.addresses import check_address, grpc_target
from evenkeel.partitioning.rounds import RoundOptions, RoundPlan
from evenkeel.partitioning.samples import RoundSamples
from evenkeel.partitioning.speeds import LearnedSpeeds
from evenkeel.protocol.plan_round import InvalidMessage, RoundNames, RunFacts, read_response, write_request
from trainer_client.balancing.errors import ServiceRequiredError
from trainer_client.balancing.grpc_without_forks import grpc
from trainer_client.balancing.launchers import read_launch
from trainer_client.balancing.report import Reason

if TYPE_CHECKING:
    from evenkeel.credentials import Credentials

logger = logging.getLogger(__name__)

SERVICE = "evenkeel.balancer.v2.BalancerService"
MOST_MISSES = 3
"""Rounds in a row without an answer in time, after which the service is asked now and then only."""
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0
REQUIRED_SECONDS = 30.0
"""How long `BalanceOptions.require_service` waits for a service that may be starting too."""
_LASTING = ("UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED", "INVALID_ARGUMENT", "FAILED_PRECONDITION")
_MOST_TOLD = 100  # troubles, each told once
_REFUSALS = ("INVALID_ARGUMENT", "FAILED_PRECONDITION")  # of this round: they say nothing against the service
_OPTIONS = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # One of several replicas behind a name, kept while the connection lasts.
    ("grpc.service_config", '{"loadBalancingConfig": [{"pick_first": {"shuffleAddressList": true}}]}'),
]


@dataclass(frozen=True, slots=True)
class Breaker:
    """Whether the service is asked; a function of how earlier calls ended.

    Attributes:
        misses: Rounds in a row that had no answer in time.
        until: When it is asked again, `time.monotonic` seconds; 0: it is asked.
        pause: Seconds of the latest pause.
    """

    misses: int = 0
    until: float = 0.0
    pause: float = 0.0

    @property
    def closed(self) -> bool:
        """Whether each round asks."""
        return not self.until

    def asks(self, now: float) -> bool:
        """Whether the round that begins now asks."""
        return now >= self.until

    def asked(self, now: float) -> Breaker:
        """After a round has begun to ask: while the breaker is open, no other does until that is answered."""
        return self if self.closed else Breaker(self.misses, now + self.pause, self.pause)

    def served(self) -> Breaker:
        """After an answer in time."""
        return Breaker()

    def missed(self, now: float) -> Breaker:
        """After a round without one."""
        if self.misses + 1 < MOST_MISSES:
            return Breaker(self.misses + 1)
        pause = min(max(FIRST_PAUSE, 2 * self.pause), LONGEST_PAUSE)
        return Breaker(self.misses + 1, now + pause, pause)


class Call:
    """A call under way."""

    def __init__(self, future: Any, samples: RoundSamples) -> None:
        self.future, self.samples = future, samples

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return bool(self.future.done())

    def cancel(self) -> None:
        """Gives it up; its answer comes to nothing."""
        self.future.cancel()


class Asker:
    """Asks the service; used by the lead's threads, never by the training thread."""

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        *,
        job: str,
        group: str,
        loader: str,
        timeout: float,
        woken: Callable[[], None],
    ) -> None:
        """Connects to nothing yet.

        Args:
            address: Of the balancer; a name of several replicas is asked for one of them.
            credentials: What the calls show.
            job: The training job.
            group: The ranks that balance together, by name.
            loader: The loader.
            timeout: Of a call, in seconds.
            woken: Called when a call has ended, from a thread of gRPC's.
        """
        launch = read_launch()
        self._names = RoundNames(
            job=job, group=group, loader=loader, run_id=launch.run_id, restart_count=launch.restart_count, round=0,
            client_version=__version__,
        )  # fmt: skip
        self._address, self._credentials = check_address(address), credentials
        self._name, self._timeout, self._woken = loader, timeout, woken
        self._lock = threading.Lock()
        self._channel: Any = None
        self._told: set[str] = set()
        self.breaker = Breaker()
        self.changes = 0
        self.trouble = ""

    def ask(
        self,
        number: int,
        samples: RoundSamples,
        options: RoundOptions,
        *,
        learned: LearnedSpeeds,
        rounds_by_lead: int,
        rounds_unbalanced: int,
        step_seconds: float,
    ) -> Call | None:
        """Begins a call for a round's plan; None while the service is not asked.

        Args:
            number: Of the round.
            samples: Of all ranks.
            options: How to plan it.
            learned: For people to see there, as what follows.
            rounds_by_lead: That the lead has planned since it was opened.
            rounds_unbalanced: In which samples stayed where they were, as no plan could be made.
            step_seconds: Median of a step's computation; 0: unknown.
        """
        with self._lock:
            now = time.monotonic()
            if not self.breaker.asks(now):
                return None
            self.breaker = self.breaker.asked(now)
        facts = RunFacts(
            rounds_by_lead=rounds_by_lead, rounds_unbalanced=rounds_unbalanced, last_trouble=self.trouble,
            stragglers=learned.stragglers, delays=learned.delays, step_seconds=step_seconds,
        )  # fmt: skip
        try:
            data = write_request(samples, options, replace(self._names, round=number), facts)
            metadata = (("evenkeel-job", self._names.job), *self._credentials.metadata(self._address))
            future = (
                self._connected()
                .unary_unary(f"/{SERVICE}/PlanRound")
                .future(data, timeout=self._timeout, metadata=metadata)
            )
        except ValueError as error:  # a file of the credentials, or a channel that has just been closed
            self._missed("UNAUTHENTICATED", str(error))
            return None
        future.add_done_callback(lambda _: self._woken())
        return Call(future, samples)

    def answer(self, call: Call) -> tuple[RoundPlan | None, Reason]:
        """The plan of a call, which is given up where it has not ended; or why there is none."""
        if not call.done:
            call.cancel()
            return None, self._missed("", "no answer when the batch was wanted")
        try:
            plan = read_response(call.future.result(), call.samples)
        except grpc.RpcError as error:
            status = error.code().name
            return None, self._missed(status, f"{error.details() or 'no details'} ({status})")
        except (InvalidMessage, grpc.FutureCancelledError) as error:
            return None, self._missed("INTERNAL", f"the answer is no plan of this round: {error}")
        self._move(lambda breaker: breaker.served())
        return plan, Reason.NONE

    def _missed(self, status: str, why: str) -> Reason:
        """Notes that a round has no answer that can be used; says so where it is news. Why, for reports."""
        self.trouble = why
        if status in _LASTING and why not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(why)
            logger.error("%s: the balancer at %s refuses: %s; rank 0 plans meanwhile", self._name, self._address, why)
        if status in _REFUSALS:
            return Reason.REFUSED
        self._move(lambda breaker: breaker.missed(time.monotonic()))
        return Reason.NO_DECISION

    def require(self) -> None:
        """Waits until the service has answered once.

        Raises:
            ServiceRequiredError: If it does not within 30 s, or waiting will not help.
        """
        until, why = time.monotonic() + REQUIRED_SECONDS, "no answer"
        while time.monotonic() < until:
            try:
                info = self._connected().unary_unary(f"/{SERVICE}/GetServerInfo")
                info(b"", timeout=5.0, metadata=self._credentials.metadata(self._address))
                return
            except ValueError as error:
                why = str(error)
                break
            except grpc.RpcError as error:
                why = f"{error.details() or 'no details'} ({error.code().name})"
                if error.code().name in _LASTING:
                    break
            time.sleep(0.2)
        raise ServiceRequiredError(
            f"require_service is set, and the balancer at {self._address} does not serve: {why}; start it, or leave "
            "require_service out to go on without it"
        )

    def close(self) -> None:
        """Ends all calls."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()

    def _connected(self) -> Any:
        """The channel; gRPC connects when the first call is made."""
        with self._lock:
            if self._channel is None:
                self._channel = self._credentials.channel(grpc_target(self._address), _OPTIONS)
            return self._channel

    def _move(self, step: Callable[[Breaker], Breaker]) -> None:
        with self._lock:
            before, self.breaker = self.breaker, step(self.breaker)
            breaker = self.breaker
        if before.closed == breaker.closed:
            return
        self.changes += 1
        if breaker.closed:
            logger.warning("%s: the balancer is back", self._name)
        else:
            logger.warning(
                "%s: %d rounds in a row without an answer of the balancer at %s in time (%s); rank 0 plans by itself, "
                "and asks again from time to time", self._name, breaker.misses, self._address, self.trouble,
            )  # fmt: skip
