"""The lead's way to the balancer service: one unary call a round, when not to make it, and not to wait for it."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from evenkeel import __version__
from evenkeel.addresses import check_address, grpc_target
from evenkeel.protocol.plan_round import InvalidMessage, RoundNames, RunFacts, read_response, write_request
from trainer_client.balancing.errors import ServiceRequiredError
from trainer_client.balancing.lead import Round, Stage
from trainer_client.balancing.options import StreamConfig
from trainer_client.balancing.report import Counters, Mode, Reason
from trainer_client.launchers import read_launch

# gRPC's fork handlers do nothing for a process whose calls are under way, as a lead's are while a DataLoader forks
# workers, and now and then they end the worker. It reads the variable when it is imported, and never again.
_FORK_SUPPORT = os.environ.get("GRPC_ENABLE_FORK_SUPPORT")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
try:
    import grpc
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}; a balancer service needs grpcio: pip install 'evenkeel[trainer]'") from error
finally:
    if _FORK_SUPPORT is None:
        del os.environ["GRPC_ENABLE_FORK_SUPPORT"]

logger = logging.getLogger(__name__)

SERVICE = "evenkeel.balancer.v2.BalancerService"
GRACE = 2e-3
"""Seconds for which a wanted batch waits for an answer that is on its way, unless planning here takes longer."""
MOST_MISSES = 3
"""Calls in a row that ended without an answer, after which the service is asked now and then only."""
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0
REQUIRED_SECONDS = 30.0
"""How long `BalanceOptions.require_service` waits for a service that may be starting too."""
_NO_MORE = 1 << 62  # what is wanted once no rounds come
# Of this round: they say nothing against the service.
_REFUSALS = ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED")
_LASTING = ("UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED", *_REFUSALS)
_MOST_LOGGED = 100  # troubles, each once
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

    A miss is a call that ended without an answer: one that comes after the lead has planned by itself is no outage, but
    no round asks while it is under way.
    """

    misses: int = 0  # calls in a row
    until: float = 0.0  # when it is asked again, `time.monotonic` seconds; 0: it is asked
    pause: float = 0.0  # seconds of the latest pause

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

    def missed(self, now: float) -> Breaker:
        """After a call without an answer; after one with, it is a new breaker."""
        if self.misses + 1 < MOST_MISSES:
            return Breaker(self.misses + 1)
        pause = min(max(FIRST_PAUSE, 2 * self.pause), LONGEST_PAUSE)
        return Breaker(self.misses + 1, now + pause, pause)


class Asker(Stage):
    """Asks the service for plans; the lead plans what is not there when its own loop comes for the batch."""

    def __init__(self, config: StreamConfig, counters: Counters) -> None:
        """Connects to nothing yet; a name of several replicas is asked for one of them."""
        launch = read_launch()
        self._names = RoundNames(
            job=config.job, group=config.group, loader=config.loader, run_id=launch.run_id,
            restart_count=launch.restart_count, round=0, client_version=__version__,
        )  # fmt: skip
        assert config.address is not None
        assert config.credentials is not None
        self._address, self._credentials = check_address(config.address), config.credentials
        self._name, self._timeout = config.loader, config.options.timeout.total_seconds()
        # The other ranks wait meanwhile, in a collective.
        self._required_seconds = min(REQUIRED_SECONDS, config.options.collective_timeout.total_seconds() / 3)
        self._counters = counters
        self._changed = threading.Condition()
        self._wanted = -1
        self._late = 0  # calls under way that the lead has not waited for
        self._latest: Round | None = None  # that was asked for; when the next one finishes, it has its plan
        self._channel: Any = None
        self._logged: set[str] = set()
        self._trouble = ""
        self.breaker = Breaker()

    def want(self, number: int) -> None:
        """The lead's own loop waits for a round."""
        with self._changed:
            self._wanted = max(self._wanted, number)
            self._changed.notify_all()

    def begin(self, round_: Round) -> None:
        """Asks for the plan of a round, unless the breaker is open or an answer is owed."""
        if round_.decision.mode is not Mode.EMBEDDED or round_.plain:
            return
        round_.reason = Reason.NOT_ASKED
        with self._changed:
            now = time.monotonic()
            if self._late or not self.breaker.asks(now):
                return
            self.breaker = self.breaker.asked(now)
        learned, rounds = round_.broadcast.learned, self._counters.rounds
        facts = RunFacts(
            rounds_by_lead=sum(count for (mode, _), count in rounds.items() if mode is Mode.EMBEDDED),
            rounds_unbalanced=sum(count for (mode, _), count in rounds.items() if mode is Mode.IDENTITY),
            last_trouble=self._trouble, stragglers=learned.stragglers, delays=learned.delays,
            step_seconds=round_.step_seconds,
        )  # fmt: skip
        assert round_.samples is not None
        try:
            data = write_request(round_.samples, round_.options, replace(self._names, round=round_.number), facts)
            metadata = (("evenkeel-job", self._names.job), *self._credentials.metadata(self._address))
            call = self._method("PlanRound").future(data, timeout=self._timeout, metadata=metadata)
        except ValueError as error:  # a file of the credentials, or a channel that has just been closed
            round_.reason = self._missed("UNAUTHENTICATED", str(error))
            return
        call.add_done_callback(self._wake)
        round_.call, round_.asked = call, time.perf_counter()

    def finish(self, round_: Round) -> None:
        """Takes the service's plan, if it is there before the lead's loop wants the batch, or just after."""
        call = round_.call
        if call is None:
            return
        planning_seconds = 0.0 if self._latest is None or self._latest.plan is None else self._latest.plan.seconds
        began, self._latest = time.perf_counter(), round_
        with self._changed:
            self._changed.wait_for(lambda: call.done() or self._wanted >= round_.number)
            self._changed.wait_for(call.done, max(GRACE, planning_seconds))
        round_.broadcast.wait_seconds = time.perf_counter() - began
        if not call.done():
            round_.reason = Reason.NO_ANSWER
            with self._changed:
                self._late += 1
            call.add_done_callback(self._came_late)
            return

        def take(data: bytes) -> None:
            assert round_.samples is not None
            plan = read_response(data, round_.samples)
            # It cannot have taken longer, whatever it says: the next round may wait for as long.
            round_.plan = replace(plan, seconds=min(plan.seconds, time.perf_counter() - round_.asked))
            round_.decision = replace(round_.decision, mode=Mode.SERVICE)

        round_.reason = self._hear(call, take)

    def _wake(self, _: Any) -> None:
        with self._changed:
            self._changed.notify_all()

    def _came_late(self, call: Any) -> None:
        with self._changed:
            self._late -= 1
            closed = self._channel is None
        if not closed:
            self._hear(call, lambda _: None)

    def _hear(self, call: Any, take: Callable[[bytes], None]) -> Reason:
        """Gives the answer of a call that has ended to `take`, and notes how it ended; why there is none."""
        try:
            take(call.result())
        except grpc.RpcError as error:
            return self._missed(error.code().name, _explained(error))
        except (InvalidMessage, grpc.FutureCancelledError) as error:
            return self._missed("INTERNAL", f"the answer is no plan of this round: {error}")
        self._step_breaker(lambda _: Breaker())
        return Reason.NONE

    def _missed(self, status: str, why: str) -> Reason:
        """Notes that a round has no answer that can be used; logs it where it is news, whatever its numbers."""
        self._trouble, kind = why, re.sub(r"\d+", "", why)
        if status in _LASTING and kind not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(kind)
            logger.error("%s: the balancer at %s refuses: %s; rank 0 plans meanwhile", self._name, self._address, why)
        if status in _REFUSALS:
            return Reason.REFUSED
        self._step_breaker(lambda breaker: breaker.missed(time.monotonic()))
        return Reason.NO_ANSWER

    def _step_breaker(self, step: Callable[[Breaker], Breaker]) -> None:
        with self._changed:
            before, breaker = self.breaker, step(self.breaker)
            self.breaker, self._counters.breaker_open = breaker, self._wanted < _NO_MORE and not breaker.closed
        if before.closed == breaker.closed:
            return
        self._counters.breaker_changes += 1
        if breaker.closed:
            logger.warning("%s: the balancer at %s is back", self._name, self._address)
        else:
            logger.warning(
                "%s: %d calls in a row without an answer of the balancer at %s (%s); rank 0 plans by itself, and asks "
                "again from time to time", self._name, breaker.misses, self._address, self._trouble,
            )  # fmt: skip

    def require(self) -> None:
        """Waits until the service has answered once; `ServiceRequiredError` where it does not, or will not."""
        until, why = time.monotonic() + self._required_seconds, "no answer"
        while (left := until - time.monotonic()) > 0:
            try:
                metadata = self._credentials.metadata(self._address)
                self._method("GetServerInfo")(b"", timeout=min(5.0, left), metadata=metadata)
                return
            except ValueError as error:
                why = str(error)
                break
            except grpc.RpcError as error:
                why = _explained(error)
                if error.code().name in _LASTING:
                    break
            time.sleep(0.2)
        raise ServiceRequiredError(
            f"require_service is set, and the balancer at {self._address} does not serve: {why}; see to that, or leave "
            "require_service out to go on without it"
        )

    def close(self) -> None:
        """Ends all calls."""
        self.want(_NO_MORE)
        with self._changed:
            channel, self._channel, self._counters.breaker_open = self._channel, None, False
        if channel is not None:
            channel.close()

    def _method(self, name: str) -> Any:
        """A method of the service; gRPC connects when it is first called."""
        with self._changed:
            if self._channel is None:
                self._channel = self._credentials.channel(grpc_target(self._address), _OPTIONS)
            return self._channel.unary_unary(f"/{SERVICE}/{name}")


def _explained(error: Any) -> str:
    """Why a call failed, with the remedy where gRPC itself has refused it."""
    details = error.details() or "no details"
    remedy = "; raise the balancer's max_message_bytes" if "larger than max" in details else ""
    return f"{details}{remedy} ({error.code().name})"
