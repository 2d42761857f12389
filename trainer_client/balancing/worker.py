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
from evenkeel.partitioning.rounds import RankPlan
from evenkeel.partitioning.speeds import ALL_EQUAL, LearnedSpeeds
from trainer_client.balancing.agreement import (
    Mode,
    Reason,
    Verdict,
    check_order,
    decide,
    schemas_differ,
    shared_values_differ,
    spread,
    teacher,
)
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.breaker import Breaker
from trainer_client.balancing.embedded import balance_embedded
from trainer_client.balancing.groups import Groups
from trainer_client.balancing.kernels import Kernels
from trainer_client.balancing.learning import CostKeeper
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.peers import PeersDifferError, Twin
from trainer_client.balancing.positions import HalfWindow, plain_window
from trainer_client.balancing.report import Counters, report_round
from trainer_client.balancing.resume import raise_differing, tokens_differ
from trainer_client.balancing.speeds import Measure, Measured, SpeedKeeper
from trainer_client.balancing.telling import Causes, raise_mismatch, raise_shared_differ, tell_breaker, tell_dropped
from trainer_client.balancing.tickets import Leaving, Outcome, Ticket, read_nothing, roles_of
from trainer_client.balancing.turns import Turns
from trainer_client.balancing.votes import Vote, vote_on, vote_to_leave

if TYPE_CHECKING:  # grpcio is needed only where a service is
    from trainer_client.balancing.service import Connection

logger = logging.getLogger(__name__)


class RoundWorker:
    """Turns tickets into outcomes, in order.

    Every agreement takes one item of each rank: a ticket, or that the rank has left its loop. So all ranks are always
    in the same round, and a pass ends on all of them in the same one: when none has data left, or when one has left.
    """

    def __init__(
        self,
        *,
        name: str,
        groups: Groups,
        options: BalanceOptions,
        connection: Connection | None,
        balance: bool,
        nodes: NDArray[np.int32] | None,
        template: FlatBatch,
        counters: Counters,
        kernels: Kernels | None = None,
        measured: Measured | None = None,
        speeds: SpeedKeeper | None = None,
    ) -> None:
        self._name = name
        self._template = template  # of the latest round that this rank knows of
        self._groups = groups.leaders
        self._peers = groups.peers
        self._options = options
        self._connection = connection
        self._balance = balance
        self._nodes = nodes
        has_service = connection is not None
        self.turns = Turns(name, depth=options.depth, patience=options.patience, has_service=has_service)
        self._measured = measured or Measured()
        self._speeds = speeds
        self._costs = CostKeeper(name, self._groups, self._measured)
        self._without_plan = 0  # rounds that no rank found a plan for
        self._kernels = kernels
        self._causes = Causes(name, self._groups, connection, options.fallback)
        self._ready_ranks = 0  # at the latest agreement
        self._rounds = 0
        self._items: SimpleQueue[Ticket | Leaving | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.counters = counters

    def put(self, item: Ticket | Leaving) -> None:
        """Queues the next round, or that there is none on this rank."""
        self._items.put(item)  # takes no lock that the interrupted code could hold: a collected generator may call this
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"evenkeel-{self._name}", daemon=True)
            self._thread.start()

    def close(self, seconds: float) -> int | None:
        """Ends the thread after the rounds queued so far, waiting at most so long.

        Returns:
            How many rounds were agreed on; None if one failed or is still being agreed on.
        """
        if self._thread is not None:
            self._items.put(None)
            self._thread.join(seconds)
            if self._thread.is_alive():
                return None
        return None if self.turns.failure is not None else self._rounds

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            if self.turns.failure is not None:
                if isinstance(item, Ticket):
                    item.future.set_exception(self.turns.failure)
                continue
            try:
                outcome = self._process(item)
            except BaseException as error:
                self.turns.fail(error)
                if isinstance(item, Ticket):
                    item.future.set_exception(error)
                if self._connection is not None:
                    self._connection.close()  # the job has failed, and with it the session
            else:
                if isinstance(item, Ticket):
                    item.future.set_result(outcome)

    def _process(self, item: Ticket | Leaving) -> Outcome:
        """What becomes of an item: agreed on with other ranks, or by the leader of this rank's peers for them."""
        if item.pass_number < self.turns.pass_number:
            return self._over(item)
        assert item.pass_number == self.turns.pass_number
        if self._peers is None:
            return self._agree(item, compiling=self._compiling) if isinstance(item, Ticket) else self._leave(item)
        twin, differ, compiling = self._twin(item).meet(self._peers, compiling=self._compiling)
        before, template = self.turns.breaker.closed, self._template

        def work() -> tuple[Outcome, Breaker, FlatBatch | None]:
            if twin.left:
                leaving = Leaving(pass_number=self.turns.pass_number, taken=twin.taken, out_of_turn=twin.out_of_turn)
                outcome = self._leave(leaving, submitted=isinstance(item, Ticket))
            else:
                assert isinstance(item, Ticket)
                outcome = self._agree(item, differ, compiling=compiling)
            learned = self._template if twin.samples == 0 and self._template is not template else None
            return replace(outcome, template=None), self.turns.breaker, learned

        outcome, breaker, learned = self._peers.led(work)
        if learned is not None:
            self._template = learned
        elif isinstance(item, Ticket):
            self._know(item)
        if not self._peers.leads:
            self.turns.move_on(outcome.verdict, breaker)
            if not twin.left:
                self.counters.rounds[outcome.verdict.mode, outcome.verdict.reason] += 1
            self.counters.breaker_changes += before != breaker.closed
            self._rounds += 1
        return replace(outcome, template=self._template)

    def _twin(self, item: Ticket | Leaving) -> Twin:
        if isinstance(item, Ticket):
            assert item.twin is not None
            return item.twin
        return Twin.of_leaving(self.turns.round, taken=item.taken, out_of_turn=item.out_of_turn)

    def _leave(self, leaving: Leaving, *, submitted: bool = False) -> Outcome:
        """Says that this rank has left, which ends the pass on all ranks."""
        if self._connection is not None and self.turns.asks_now() and not submitted:
            # The others need not wait for this rank at the service; they learn that it has left when they agree.
            options = self._options
            nothing = read_nothing(self._template, np.dtype(np.int64), capped=options.memory_caps is not None)
            self._connection.submit(
                self.turns.round, nothing, exhausted=True, timeout_ms=options.service_timeout_ms,
                learned=self.turns.learned_for(self.turns.round),
            )  # fmt: skip
        votes = self._gather(vote_to_leave(leaving, self.turns.round, window=self._options.window, ready=self._ready))
        verdict = self._decide(votes, waited=False)
        number = self.turns.round
        self._advance(votes, verdict, waited=False)
        if self._connection is not None:
            self._connection.settle(number, verdict, self.turns.round)
        return Outcome.of_end(verdict)

    @property
    def _ready(self) -> bool:
        return self._connection is not None and self._connection.ready

    @property
    def _compiling(self) -> bool:
        return self._kernels is not None and self._kernels.compiling

    def _gather(self, vote: Vote) -> list[Vote]:
        votes = self._groups.gather_votes(replace(vote, has_cause=self._causes.is_new))
        self._rounds += 1
        check_order(votes)
        if any(vote.has_cause for vote in votes):
            self._causes.tell()
        return votes

    def _decide(self, votes: list[Vote], *, waited: bool, half: HalfWindow | None = None) -> Verdict:
        verdict = decide(
            votes,
            waited=waited,
            has_service=self._connection is not None,
            balance=self._balance and self._groups.world_size > 1,
            fallback=self._options.fallback,
            min_samples=self._options.min_samples,
            left=None if half is None else half.left,
        )
        return replace(verdict, last=half.last) if half is not None and verdict.reason is Reason.RESUMED else verdict

    def _over(self, item: Ticket | Leaving) -> Outcome:
        """The outcome of a round that was submitted before this rank knew that its pass had ended."""
        if isinstance(item, Ticket):
            # One that has not asked was submitted after the end, and the next pass may have its number.
            if item.asked and self._connection is not None:
                self._connection.settle(item.round, self.turns.last_end)
            if item.trace is not None:
                item.trace.end()
            if self.turns.last_end.reason is Reason.TOO_FEW_SAMPLES:
                self.counters.dropped_samples += len(item.samples)
        return Outcome.of_end(self.turns.last_end)

    def _count_dropped(self, number: int, verdict: Verdict, plan: RankPlan) -> None:
        if verdict.batches is None or verdict.reason is Reason.RESUMED:
            return
        dropped = [plan.own_in(batch) for batch in range(len(plan.slices)) if batch not in verdict.batches]
        self.counters.dropped_samples += sum(dropped)
        tell_dropped(self._name, number, verdict, rank=self._groups.rank, world_size=self._groups.world_size)

    def _know(self, ticket: Ticket) -> None:
        """Notes what batches look like that this rank has samples of."""
        if len(ticket.samples) and ticket.schema is not self._template.schema:
            self._template = next(flat for flat in ticket.flats if flat.num_samples).empty()

    def _learn(self, ticket: Ticket, votes: list[Vote]) -> None:
        """Rows may have other shapes in each round, which a rank without samples learns from one that has some."""
        self._know(ticket)
        knows = teacher(votes)
        if knows is not None:
            told = self._groups.gather_objects(self._template if knows == self._groups.rank else None)[knows]
            if not len(ticket.samples):
                assert told is not None
                self._template = told
        if not len(ticket.samples) and any(vote.samples for vote in votes):
            ticket.samples = replace(
                ticket.samples,
                lengths=self._template.lengths,
                sizes=self._template.sizes,
                roles=None if self._options.split is None else roles_of(self._template),
            )

    def _agree(self, ticket: Ticket, differ: str = "", *, compiling: bool) -> Outcome:
        waited = ticket.asked and self.turns.breaker.closed
        trace = ticket.trace
        began = time.time_ns() if trace is not None else 0
        started = time.monotonic()
        decision = None
        if waited:
            assert self._connection is not None
            decision = self._connection.decision(ticket.round, ticket.deadline, ticket.samples)
        learned = self.turns.learned_for(ticket.round)
        wait_seconds = time.monotonic() - started
        answered = time.time_ns() if trace is not None else 0
        schema = ticket.schema if len(ticket.samples) else self._template.schema
        own = vote_on(ticket, decision, window=self._options.window, ready=self._ready, schema=schema)
        learns = self._measured.learns is not None
        measured = Measure() if self._speeds is None and not learns else self._measured.take()
        votes = self._gather(
            replace(
                own, peers_differ=bool(differ), compiling=compiling, measured_load=measured.load,
                measured_seconds=measured.seconds, measured_late=measured.late, measured_loading=measured.loading,
                measured_loop=measured.loop,
                learns=learns, has_fit=self._costs.has_fit,
            )
        )  # fmt: skip
        resumed = ticket.resumed
        verdict = self._decide(votes, waited=waited, half=None if resumed is None else resumed.half)
        if verdict.reason is not Reason.LEFT:
            # Only the first round of a pass that goes on from a state has tokens.
            if any(vote.resumed for vote in votes) and tokens_differ([vote.resumed for vote in votes]):
                raise_differing(self._name, self._groups.gather_objects(resumed))
            if any(vote.peers_differ for vote in votes):
                raise PeersDifferError(next(filter(None, self._groups.gather_objects(differ))))
            if schemas_differ(votes) is not None:
                raise_mismatch(self._groups.gather_objects(ticket.schema.lines if len(ticket.samples) else None))
            if shared_values_differ(votes):
                raise_shared_differ(self._groups.gather_objects(ticket.shared))
            self._learn(ticket, votes)
            self._costs.note(ticket.round, votes)
        waited = waited and verdict.reason is not Reason.LEFT  # whose ranks did not submit it
        self._advance(votes, verdict, waited=waited, missed=waited and decision is None, problem=ticket.problem)
        agreed = time.time_ns() if trace is not None else 0
        plan, reason = None, verdict.reason
        if verdict.reason is Reason.SERVICE_IDENTITY and decision is not None:
            self._say_unplanned(ticket.round, decision.reason)
        if verdict.mode is Mode.SERVICE:
            assert decision is not None
            assert decision.plan is not None
            plan = decision.plan
        elif verdict.mode in (Mode.EMBEDDED, Mode.SPREAD):
            verdict, plan = self._partition(ticket, votes, verdict, learned)
        if self._connection is not None:  # by now it is known whether the ranks have found a plan
            self._connection.settle(ticket.round, replace(verdict, reason=reason), self.turns.round)
        if plan is None:
            plan = RankPlan.staying(self._groups.rank, ticket.samples, self._options.window)
        self.counters.rounds[verdict.mode, verdict.reason] += 1
        self._count_dropped(ticket.round, verdict, plan)
        self.counters.wait_seconds += wait_seconds
        reports = report_round(
            ticket,
            votes,
            verdict,
            plan=plan,
            rank=self._groups.rank,
            options=self._options,
            learned=learned,
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
        window = None
        if self._options.window > 1 and verdict.mode is not Mode.END:
            window = plain_window(ticket.samples, plan, size=self._options.window, last=verdict.last)
        _ = ticket.schema.constant_lines  # which states tell, and are kept: made while the training thread trains
        return Outcome(verdict=verdict, plan=plan, reports=reports, template=self._template, window=window)

    def _partition(
        self, ticket: Ticket, votes: list[Vote], verdict: Verdict, learned: LearnedSpeeds
    ) -> tuple[Verdict, RankPlan | None]:
        """The plan that all ranks make alike, and what they do if there is none."""
        if verdict.mode is Mode.EMBEDDED:
            result = balance_embedded(
                ticket.samples, votes, self._groups, self._options, self._nodes, learned=learned
            )  # fmt: skip
            if isinstance(result, PartitionError):
                self._say_unplanned(ticket.round, str(result))
                failed = replace(verdict, mode=Mode.IDENTITY, reason=Reason.PARTITION_FAILED, ranks=(), moved=False)
                verdict = spread(failed, votes, self._options.min_samples)
        if verdict.mode is Mode.SPREAD:
            result = balance_embedded(ticket.samples, votes, self._groups, self._options, self._nodes, stay=True)
        if verdict.mode is Mode.IDENTITY:
            return verdict, None
        assert not isinstance(result, PartitionError)
        return replace(verdict, moved=result.moved_samples > 0), result  # the same plan on all ranks

    def _say_unplanned(self, number: int, why: str, *, own: bool = False) -> None:
        """Said of the first, second, fourth, eighth…, as it may be every round: by rank 0 and by whose fault it is."""
        self._without_plan += 1
        if (own or self._groups.rank == 0) and self._without_plan.bit_count() == 1:
            said = "round %d of %s stays unbalanced (%d so far): %s"
            logger.warning(said, number, self._name, self._without_plan, why)

    def _advance(
        self, votes: list[Vote], verdict: Verdict, *, waited: bool, missed: bool = False, problem: str = ""
    ) -> None:
        """Moves on by a round or to the next pass, and the breaker with it, whose changes are said once."""
        before, number = self.turns.breaker, self.turns.round
        all_ready = all(vote.ready for vote in votes)
        breaker = before.after(number, waited=waited, served=verdict.served, all_ready=all_ready)
        learned = ALL_EQUAL if self._speeds is None else self._speeds.note(number, votes)
        self.turns.move_on(verdict, breaker, learned, self._costs.fit)
        if self._connection is not None:
            if missed:
                self._connection.suspect()
            ready = sum(vote.ready for vote in votes)
            if ready > self._ready_ranks:
                self._connection.encourage()
            self._ready_ranks = ready
        if before.closed != self.turns.breaker.closed:
            self.counters.breaker_changes += 1
            tell_breaker(
                self._name, number, verdict, self.turns.breaker, self._options, rank=self._groups.rank, missed=missed,
                trouble=self._connection.trouble if self._connection is not None else "",
                lasting=self._connection is not None and self._connection.cause is not None,
            )  # fmt: skip
        if self._kernels is not None:
            self._kernels.learn(number, verdict)
        if verdict.reason is Reason.INVALID_COSTS:
            ranks = ", ".join(map(str, verdict.ranks))
            self._say_unplanned(number, problem or f"the costs of rank(s) {ranks} cannot be used; their logs say why",
                                own=bool(problem))  # fmt: skip
