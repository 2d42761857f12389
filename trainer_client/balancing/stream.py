"""One stream of batches of a group of ranks: submit early, redistribute late."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from evenkeel.partitioning.samples import RankSamples
from trainer_client.balancing.agreement import Reason, Verdict, out_of_turn
from trainer_client.balancing.batches import BatchSpec, FlatBatch, flatten
from trainer_client.balancing.breaker import Breaker
from trainer_client.balancing.dropped import Key, await_predecessors, drop, note_closed, note_open
from trainer_client.balancing.embedded import decide_alone
from trainer_client.balancing.groups import Groups
from trainer_client.balancing.learning import follow
from trainer_client.balancing.opening import NoDataError, StreamConfig, meet
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.passes import Mover, Pass, used_after, used_closed
from trainer_client.balancing.peers import Twin
from trainer_client.balancing.redistribution import Pending
from trainer_client.balancing.report import Counters
from trainer_client.balancing.speeds import Measured, SpeedKeeper
from trainer_client.balancing.telling import tell_end, tell_unreadable
from trainer_client.balancing.tickets import Cost, Leaving, Outcome, Ticket, read_nothing, read_round
from trainer_client.balancing.tracing import RoundTrace, StreamTracer
from trainer_client.balancing.worker import RoundWorker

if TYPE_CHECKING:
    from trainer_client.balancing.service import Connection

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0


class BatchStream:
    """Rounds of one loader, in passes: each is one loop over batches, and ends on all ranks in the same round.

    All ranks submit and redistribute their batches in the same order. A rank whose data ends goes on with
    `submit_exhausted`; one that leaves its loop says so with `leave`, and the loops of all ranks end.
    """

    def __init__(self, config: StreamConfig) -> None:
        self._config = config
        self._options = config.options
        self._next_round = 0
        self._last_pass = -1  # in which this rank took part
        self._unopened = 0  # passes that this rank has left before the stream was open
        self._pass: Pass | None = None
        self._met: Pass | None = None  # in which this rank has tried to open the stream
        self._template: FlatBatch | None = None
        self._worker: RoundWorker | None = None
        self._connection: Connection | None = None
        self._groups: Groups | None = None
        self._cost_dtype: np.dtype[Any] = np.dtype(np.int64)
        self._tracer: StreamTracer | None = None
        self._mover: Mover | None = None
        self._told_end = False
        self.counters, self.measured = Counters(), Measured()

    def __del__(self) -> None:
        groups: Groups | None = getattr(self, "_groups", None)
        if groups is not None and groups.world_size > 1:  # one rank alone has nothing to leave
            drop(self, self._opened_by)

    @property
    def key(self) -> Key:
        """Job, group and loader."""
        return self._config.job, self._config.group, self._config.loader

    @property
    def options(self) -> BalanceOptions:
        """Rank 0's options once the stream is open, before that this rank's."""
        return self._options

    @property
    def breaker(self) -> Breaker:
        """The state after the latest agreement."""
        return Breaker() if self._worker is None else self._worker.turns.breaker

    def begin(self, *, by_hand: bool = False) -> Pass:
        """Begins a pass, after leaving the one before if that has not ended; a submission does so where there is none.

        Waits until the pass before has ended on all ranks and nothing of it is in flight, or raises `TimeoutError`.
        """
        before = self._pass
        if before is not None:
            before.leave()
            if not before.settle(self._options.patience):
                raise TimeoutError(f"{self._config.loader}: the loop before has not ended on all ranks")
            self._unopened += before.number is None and not before.over
        self._pass = Pass(self._config.loader, self._tell_left, self._options.patience, by_hand=by_hand)
        if self._worker is not None:
            self._enter(self._pass)
        return self._pass

    def go_on_by_hand(self) -> None:
        """Begins a pass of submissions by hand, unless one is under way."""
        current = self._pass
        if current is None or current.over or current.left or not current.by_hand:
            self.begin(by_hand=True)

    def check(self, one: Pass) -> None:
        """Raises `ProgramOrderError` if a newer loop has begun on this stream, or it was closed."""
        if self._pass is None:
            raise used_closed(self._config.loader)
        if one is not self._pass:
            raise used_after(self._config.loader)

    def leave(self) -> None:
        """Leaves the loop: the loops of all ranks end together, and the next submission begins a new pass.

        Does nothing after the end of a pass. What all ranks have agreed on before is moved, and dropped here.
        """
        if self._pass is not None:
            self._pass.leave()

    def attend(self, error: Exception, device: torch.device | str | None = None) -> None:
        """Opens the stream where this rank's first batch cannot be read, as the others wait for that; else nothing."""
        current = self._pass
        if self._worker is not None or (current is not None and (current.left or self._met is current)):
            return
        tell_unreadable(self._config.loader, error)
        try:
            self._open(None, device)
        except Exception as other:
            logger.debug("%s: the stream did not open: %s", self._config.loader, other)

    def open(self, first: Any | None, spec: BatchSpec | None, device: torch.device | str | None) -> None:
        """Meets all ranks, which take rank 0's options, unless they have; as the first submission does. Collective.

        Args:
            first: The first batch, to be submitted later; None where there is none.
            spec: How to read its fields; as in `submit_window`.
            device: Where the batches will be trained; as in `submit_window`.
        """
        if self._worker is None:
            self._open(None if first is None else flatten(first, spec), device)

    def submit_window(
        self,
        batches: Sequence[Any],
        *,
        cost: Cost,
        memory: Cost | None = None,
        spec: BatchSpec | None = None,
        device: torch.device | str | None = None,
        drop_last: bool = False,
    ) -> tuple[tuple[FlatBatch, ...], Ticket]:
        """Announces batches that are balanced together: costs and lengths go to the service, nothing moves yet.

        The first submission opens the stream, which is collective. Later ones return at once, unless `depth` windows
        are already in flight.

        Args:
            batches: One to `BalanceOptions.window` batches of the host, in the order in which they are to be trained.
            cost: From a batch to the predicted work of each sample.
            memory: From a batch to what each sample adds to the memory caps; default: its bytes.
            spec: How to read the batches' fields.
            device: Where the batches will be trained; its kernels are compiled when the stream opens.
            drop_last: Drop a global batch with too few samples for all ranks; see `BalancedLoader`.

        Raises:
            ValueError: If the batches or their costs cannot be read, which the message names, or are too many.
            SchemaMismatchError: If the ranks' batches differ in their fields.
        """
        try:
            flats = tuple(flatten(batch, spec) for batch in batches)
        except Exception as error:
            self.attend(error, device)
            raise
        for flat in flats:
            flat.watch()
        self._open(next((flat for flat in flats if flat.num_samples), flats[0]) if flats else None, device)
        trace = None if self._tracer is None else self._tracer.begin(self._next_round)
        if not 1 <= len(flats) <= (window := self._options.window):
            raise ValueError(f"{len(flats)} batches for a window of {window}; set BalanceOptions.window")
        groups, worker, current = self._groups, self._worker, self._pass
        assert groups and worker and current and self._template  # noqa: PT018
        follow(cost, worker.turns if groups.world_size > 1 else None, self._next_round, current.number)
        samples, problem = read_round(
            self._config.loader, batches, flats, began=None if self._connection is None else self._template,
            cost=cost, memory=memory, caps=self._options.memory_caps, split=self._options.split,
            shares=groups.world_size * window,  # sums over all ranks and batches stay exact
        )  # fmt: skip
        self._cost_dtype = samples.costs.dtype
        return flats, self._enqueue(
            flats, samples, problem, exhausted=False, drop_last=drop_last, trace=trace, device=device
        )

    def submit_exhausted(
        self, device: torch.device | str | None = None, *, drop_last: bool = False
    ) -> tuple[FlatBatch, Ticket]:
        """Takes part in a round after this rank's data has ended, with no sample.

        Raises:
            NoDataError: If none of them has ever had a batch; on all ranks.
        """
        self._open(None, device)
        trace = None if self._tracer is None else self._tracer.begin(self._next_round)
        flat = self._template
        assert flat is not None
        options = self._options
        samples = read_nothing(
            flat, self._cost_dtype, capped=options.memory_caps is not None, splits=options.split is not None
        )
        ticket = self._enqueue((flat,), samples, "", exhausted=True, drop_last=drop_last, trace=trace, device=device)
        return flat, ticket

    def start(
        self,
        flat: FlatBatch | Sequence[FlatBatch],
        ticket: Ticket,
        outcome: Outcome,
        device: torch.device | str | None = None,
        *,
        batch: int = 0,
    ) -> Pending:
        """Starts to move the samples of a round as all ranks have agreed.

        Args:
            flat: The flattened batch, or all flattened batches of the window.
            ticket: What `submit_window` returned for it.
            outcome: What `outcome` gave for it.
            device: Where the result shall be; default: where the batch is.
            batch: Which batch of the window, 0 to `len(outcome.reports)` - 1; each once, in order, on all ranks.

        Returns:
            The move in flight; its `wait()` gives the batch that this rank trains, sorted by (home, index at home).
        """
        if outcome.ended:
            raise RuntimeError(f"the loop over {self._config.loader!r} has ended on all ranks; nothing moves any more")
        current = self._pass
        if current is None:
            raise used_closed(self._config.loader)
        if current.left or ticket.pass_number != current.number:
            raise used_after(self._config.loader)
        if not current.in_turn(ticket, outcome, batch):
            current.leave(out_of_turn=True)
            assert self._groups is not None
            raise out_of_turn(self._groups.rank)
        return current.start([flat] if isinstance(flat, FlatBatch) else flat, ticket, outcome, device)

    def outcome(self, ticket: Ticket) -> Outcome:
        """What all ranks agreed on; waits for it.

        Raises:
            RuntimeError: If the process group failed, or what else ended the agreement.
            TimeoutError: If it did not come within the timeouts of its waits and collectives.
        """
        started = time.perf_counter()
        try:
            return ticket.outcome(self._config.loader, self._options.patience)
        finally:
            self.counters.exposed_seconds += time.perf_counter() - started

    def end(self, verdict: Verdict, ticket: Ticket) -> None:
        """Notes that a loop of the user's own has seen its end, with the round of a ticket."""
        current = self._pass
        if current is not None and current.number == ticket.pass_number and not current.over:
            current.over = True
            if not ticket.exhausted:
                self.tell_end(verdict, current.taken)

    def tell_end(self, verdict: Verdict, taken: int) -> None:
        """Says that this rank's loop, which got so many batches, has ended because another rank has left its own."""
        if verdict.reason is Reason.LEFT and self._groups is not None:
            tell_end(self._config.loader, verdict, taken, rank=self._groups.rank, again=self._told_end)
            self._told_end = True

    def close(self) -> None:
        """Leaves the session and ends the threads; the process groups are kept for the next stream of these ranks."""
        until = time.monotonic() + CLOSE_SECONDS
        current, self._pass = self._pass, None
        settled = current is None or current.settled_within(CLOSE_SECONDS)
        rounds = None if self._worker is None else self._worker.close(max(0.1, until - time.monotonic()))
        if self._connection is not None:
            self._connection.close()
        moves = None if self._mover is None else self._mover.rest
        if self._groups is not None and rounds is not None and settled and moves is not None:
            self._groups.leave(rounds, moves)
        self._groups, self._worker, self._connection, self._mover = None, None, None, None
        note_closed(self)
        self._next_round, self._last_pass, self._unopened = 0, -1, 0

    def _enter(self, one: Pass) -> None:
        """Numbers a pass, on all ranks alike."""
        assert self._groups is not None
        if self._groups.world_size == 1:
            one.number = self._last_pass + 1
        else:
            assert self._worker is not None
            for number in range(self._unopened):
                self._worker.put(Leaving(pass_number=number, taken=0, out_of_turn=False))
            self._last_pass, self._unopened = max(self._last_pass, self._unopened - 1), 0
            one.number, self._next_round = self._worker.turns.enter(self._last_pass)
        self._last_pass, one.mover = one.number, self._mover

    def _tell_left(self, one: Pass, out_of_turn: bool) -> None:
        if self._worker is not None and self._groups is not None and self._groups.world_size > 1:
            assert one.number is not None
            self._worker.put(Leaving(pass_number=one.number, taken=one.taken, out_of_turn=out_of_turn))

    # ------------------------------------------------------------------ opening

    def _open(self, flat: FlatBatch | None, device: torch.device | str | None) -> None:
        """Meets all ranks once: options, session, schema; a rank without any batch gets an empty one. Collective."""
        current = self._pass
        if current is None or current.over or current.left:
            current = self.begin()
        if self._worker is not None:
            return
        self._met = current
        if self._groups is None:
            await_predecessors(self, CLOSE_SECONDS)
            self._opened_by = os.getpid()
            self._groups = Groups.create(
                self._config.process_group, self._config.options.collective_timeout, self._config.peers
            )
            note_open(self)
        try:
            opened = meet(self._config, self._groups, flat, device, resumes=current.resumed is not None)
        except NoDataError:
            current.over = True  # on all ranks
            raise
        self._template, self._options, self._connection = opened.template, opened.options, opened.connection
        self._tracer = opened.tracer
        speeds = None
        if opened.options.learn_speeds and opened.balance and self._groups.leaders.world_size > 1:
            speeds = SpeedKeeper(
                self._config.loader, rank=self._groups.leaders.rank, nodes=opened.node_names,
                given=opened.options.speeds,
            )  # fmt: skip
        self._worker = RoundWorker(
            name=self._config.loader,
            groups=self._groups,
            options=opened.options,
            connection=opened.connection,
            balance=opened.balance,
            nodes=opened.nodes,
            template=opened.template,
            counters=self.counters,
            kernels=opened.kernels,
            measured=self.measured,
            speeds=speeds,
        )
        self._mover = Mover(self._groups, self.counters, to_gpu=opened.to_gpu)
        self._enter(current)

    def _enqueue(
        self,
        flats: tuple[FlatBatch, ...],
        samples: RankSamples,
        problem: str,
        *,
        exhausted: bool,
        drop_last: bool,
        trace: RoundTrace | None,
        device: torch.device | str | None,
    ) -> Ticket:
        current = self._pass
        assert current is not None and current.number is not None  # noqa: PT018
        assert self._groups is not None and self._worker is not None  # noqa: PT018
        number, self._next_round = self._next_round, self._next_round + 1
        schema = next((flat for flat in flats if flat.num_samples), flats[0]).schema
        resumed = None
        if current.resumed is not None:  # the first round after a state was loaded
            resumed, samples = current.go_on(samples, self._options.window, schema)
        asked = samples.given is None and self._worker.turns.asks(number, current.number)
        twin = None
        if self._groups.peers is not None:
            twin = Twin.of(number, flats, samples.lengths, exhausted=exhausted, values=number == 0)
        ticket = Ticket(
            round=number, pass_number=current.number, samples=samples, flats=flats, schema=schema, exhausted=exhausted,
            drop_last=drop_last, problem=problem, asked=asked, twin=twin, resumed=resumed, trace=trace,
            shared=flats[0].structure.shared if flats[0].num_samples else (),
            deadline=time.monotonic() + self._options.timeout.total_seconds(), measured=self.measured,
        )  # fmt: skip
        if asked:
            assert self._connection is not None
            self._connection.submit(
                number, samples, exhausted=exhausted, timeout_ms=self._options.service_timeout_ms,
                traceparent="" if trace is None else trace.traceparent,
                learned=self._worker.turns.learned_for(number),
            )  # fmt: skip
        if trace is not None:
            trace.submitted()
        if self._groups.world_size == 1:
            assert self._template is not None
            ticket.future.set_result(decide_alone(self._config.loader, ticket, self._options, self._template))
        else:
            self._worker.put(ticket)
        current.submitted(ticket, device)
        return ticket
