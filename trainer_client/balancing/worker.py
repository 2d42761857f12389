"""The stream's worker thread: waits for the service, agrees with the other ranks, falls back where needed.

It alone issues the collectives of the control group, in the order of the rounds, while the training thread trains.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning import PartitionError
from trainer_client.balancing.agreement import Mode, Reason, Verdict, check_order, decide, schemas_differ
from trainer_client.balancing.breaker import Breaker
from trainer_client.balancing.embedded import RoundData, balance_embedded, sent_in, stay_home
from trainer_client.balancing.groups import Groups
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.peers import PeersDifferError
from trainer_client.balancing.report import Counters
from trainer_client.balancing.reporting import report_round
from trainer_client.balancing.schemas import raise_mismatch
from trainer_client.balancing.tickets import Outcome, Ticket
from trainer_client.balancing.votes import BatchVote, Held, Vote, transfer_checksum

if TYPE_CHECKING:  # grpcio is needed only where a service is
    from trainer_client.service import Connection, ServiceDecision

logger = logging.getLogger(__name__)


class RoundWorker:
    """Turns tickets into outcomes, in order."""

    def __init__(
        self,
        *,
        name: str,
        groups: Groups,
        options: BalanceOptions,
        connection: Connection | None,
        balance: bool,
        nodes: NDArray[np.int32] | None,
    ) -> None:
        self._name = name
        self._groups = groups.leaders
        self._peers = groups.peers
        self._options = options
        self._connection = connection
        self._balance = balance
        self._nodes = nodes
        self._breaker = Breaker()
        self._asks: dict[int, bool] = {}
        self._asks_known = threading.Condition()
        self._failure: BaseException | None = None
        self._warned_costs = False
        self._ready_ranks = 0  # at the latest agreement
        self._rounds = 0
        self._tickets: SimpleQueue[Ticket | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.counters = Counters()

    @property
    def breaker(self) -> Breaker:
        """The state after the latest agreement."""
        return self._breaker

    def asks(self, round_number: int) -> bool:
        """Whether a round asks the service: the breaker's state `depth` rounds earlier, the same on all ranks.

        Waits until that earlier round has been agreed on; bounded by the timeouts of its own wait and collectives.

        Raises:
            BaseException: What ended the worker, if it has failed.
            TimeoutError: If the other ranks do not get there.
        """
        if self._connection is None or not self._balance or self._groups.world_size == 1:
            return False
        if round_number < self._options.depth:
            return True
        with self._asks_known:
            known = self._asks_known.wait_for(
                lambda: round_number in self._asks or self._failure is not None, self._options.patience
            )
            if self._failure is not None:
                raise self._failure
            if not known:
                raise TimeoutError(f"{self._name}: no agreement on round {round_number - self._options.depth}")
            return self._asks.pop(round_number)

    def put(self, ticket: Ticket) -> None:
        """Queues the next round."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"evenkeel-{self._name}", daemon=True)
            self._thread.start()
        self._tickets.put(ticket)

    def close(self, seconds: float) -> int | None:
        """Ends the thread after the rounds queued so far, waiting at most so long.

        Returns:
            How many rounds were agreed on; None if one failed or is still being agreed on.
        """
        if self._thread is not None:
            self._tickets.put(None)
            self._thread.join(seconds)
            if self._thread.is_alive():
                return None
        return None if self._failure is not None else self._rounds

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while (ticket := self._tickets.get()) is not None:
            if self._failure is not None:
                ticket.future.set_exception(self._failure)
                continue
            try:
                outcome = self._process(ticket)
            except BaseException as error:
                with self._asks_known:
                    self._failure = error
                    self._asks_known.notify_all()
                ticket.future.set_exception(error)
                if self._connection is not None:
                    self._connection.close()  # the job has failed, and with it the session
            else:
                self._rounds += 1
                ticket.future.set_result(outcome)

    def _process(self, ticket: Ticket) -> Outcome:
        """The round's outcome: agreed on with other ranks, or by the leader of this rank's peers for all of them."""
        if self._peers is None:
            return self._agree(ticket)
        assert ticket.twin is not None
        differ = ticket.twin.compare(self._peers)
        before = self._breaker.closed
        outcome, self._breaker = self._peers.led(lambda: (self._agree(ticket, differ), self._breaker))
        if not self._peers.leads:
            self.counters.rounds[outcome.verdict.mode, outcome.verdict.reason] += 1
            self.counters.breaker_changes += before != self._breaker.closed
        return outcome

    def _agree(self, ticket: Ticket, differ: str = "") -> Outcome:
        waited = ticket.asked and self._breaker.closed
        trace = ticket.trace
        began = time.time_ns() if trace is not None else 0
        started = time.monotonic()
        decision = None
        if waited:
            assert self._connection is not None
            decision = self._connection.decision(ticket.round, ticket.deadline, ticket.data.lengths)
        wait_seconds = time.monotonic() - started
        answered = time.time_ns() if trace is not None else 0
        votes = self._groups.gather_votes(replace(self._vote(ticket, decision), peers_differ=bool(differ)))
        if any(vote.peers_differ for vote in votes):
            raise PeersDifferError(next(filter(None, self._groups.gather_objects(differ))))
        check_order(votes)
        if schemas_differ(votes) is not None:
            raise_mismatch(self._groups.gather_objects(ticket.schema.lines))
        verdict = decide(
            votes,
            waited=waited,
            has_service=self._connection is not None,
            balance=self._balance and self._groups.world_size > 1,
            fallback=self._options.fallback,
        )
        self._advance(ticket, votes, verdict, waited, missed=waited and decision is None)
        agreed = time.time_ns() if trace is not None else 0
        piece, plan = None, None
        if verdict.mode is Mode.SERVICE:
            assert decision is not None
            assert decision.piece is not None
            piece = decision.piece
        elif verdict.mode is Mode.EMBEDDED:
            result = balance_embedded(ticket.data, votes, self._groups, self._options, self._nodes)
            if isinstance(result, PartitionError):
                logger.warning("round %d of %s stays unbalanced: %s", ticket.round, self._name, result)
                verdict = Verdict(mode=Mode.IDENTITY, reason=Reason.PARTITION_FAILED, served=verdict.served)
            else:
                piece, plan = result.piece, result
                verdict = replace(verdict, moved=result.moved_samples > 0)  # the same plan on all ranks
        if piece is None:
            piece = stay_home(self._groups.rank, ticket.data, self._options.window)
        self.counters.rounds[verdict.mode, verdict.reason] += 1
        self.counters.wait_seconds += wait_seconds
        reports = report_round(
            ticket,
            votes,
            verdict,
            piece=piece,
            rank=self._groups.rank,
            options=self._options,
            plan=plan,
            balances=decision.balances if decision is not None and verdict.mode is Mode.SERVICE else (),
            wait_seconds=wait_seconds,
        )
        if trace is not None:
            if waited:
                trace.part("wait", began, answered, answered=decision is not None)
            trace.part("agree", answered, agreed)
            if verdict.mode is Mode.EMBEDDED:
                trace.part("partition", agreed)
            trace.agreed(reports[0])
            if verdict.mode is Mode.END:
                trace.end()
        return Outcome(verdict=verdict, piece=piece, reports=reports)

    def _vote(self, ticket: Ticket, decision: ServiceDecision | None) -> Vote:
        held, checksum = Held.NOTHING, 0
        received = [0] * self._options.window
        if decision is not None:
            if decision.piece is not None:
                held = Held.BALANCED
                for batch, piece in enumerate(decision.piece.slices):
                    checksum += transfer_checksum(piece, sent_in(ticket.data, decision.piece, batch), batch)
                    received[batch] = int(piece.source_counts.sum())
                checksum &= (1 << 64) - 1
            else:
                held = Held.IDENTITY if decision.final else Held.UNDECIDED
        costs = ticket.data.costs
        return Vote(
            round=ticket.round,
            held=held,
            instance=decision.instance if decision else 0,
            digest=decision.digest if decision else 0,
            moved=decision.moved_samples if decision else 0,
            checksum=checksum,
            samples=len(costs),
            exhausted=ticket.exhausted,
            asked=ticket.asked,
            ready=self._connection is not None and self._connection.ready,
            costs_valid=not ticket.problem,
            costs_float=costs.dtype == np.float64,
            schema=int.from_bytes(ticket.schema.hash[:8], "little"),
            load=float(costs.sum()),
            heaviest=float(costs.max(initial=0)),
            num_batches=len(ticket.data.batch_sizes),
            batches=batch_votes(ticket.data, received),
        )

    def _advance(self, ticket: Ticket, votes: list[Vote], verdict: Verdict, waited: bool, missed: bool) -> None:
        """Moves the breaker on and says so once per change."""
        before = self._breaker
        self._breaker = before.after(
            ticket.round, waited=waited, served=verdict.served, all_ready=all(vote.ready for vote in votes)
        )
        with self._asks_known:
            self._asks[ticket.round + self._options.depth] = self._breaker.closed
            self._asks_known.notify_all()
        if self._connection is not None:
            self._connection.settle(ticket.round)
            if missed:
                self._connection.suspect()
            ready = sum(vote.ready for vote in votes)
            if ready > self._ready_ranks:
                self._connection.encourage()
            self._ready_ranks = ready
        if before.closed != self._breaker.closed:
            self.counters.breaker_changes += 1
            self._announce(ticket.round, verdict, missed)
        if verdict.reason is Reason.INVALID_COSTS and not self._warned_costs:
            self._warned_costs = True
            if ticket.problem:
                logger.warning("round %d of %s stays unbalanced: %s", ticket.round, self._name, ticket.problem)

    def _announce(self, round_number: int, verdict: Verdict, missed: bool) -> None:
        # Rank 0 warns for all; the first rank that missed the answer also knows why.
        first_missing = missed and verdict.ranks[:1] == (self._groups.rank,)
        level = logging.WARNING if self._groups.rank == 0 or first_missing else logging.INFO
        if self._breaker.closed:
            logger.log(level, "%s: the balancer is back; asking it again from round %d on",
                       self._name, round_number + self._options.depth)  # fmt: skip
            return
        assert self._connection is not None
        about = f" (ranks {', '.join(map(str, verdict.ranks[:8]))})" if verdict.ranks else ""
        trouble = f": {self._connection.trouble}" if missed and self._connection.trouble else ""
        logger.log(
            level, "%s: no common decision of the balancer for round %d, %s%s%s; going on %s until it is back",
            self._name, round_number, verdict.reason.value, about, trouble,
            "balancing on the ranks" if self._options.fallback == "embedded" else "without balancing",
        )  # fmt: skip


def batch_votes(data: RoundData, received: list[int]) -> tuple[BatchVote, ...]:
    """The part of a vote that is about each batch of a window; empty without windows.

    Args:
        data: This rank's samples.
        received: Per batch of the window, how many samples this rank would train.
    """
    if len(received) == 1:
        return ()
    votes = []
    for batch, count in enumerate(received):
        costs = data.costs[data.in_batch(batch)]
        votes.append(
            BatchVote(samples=len(costs), received=count, load=float(costs.sum()), heaviest=float(costs.max(initial=0)))
        )
    return tuple(votes)
