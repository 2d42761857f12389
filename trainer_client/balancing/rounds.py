"""A rank's part in the rounds of a stream: what it says goes up, what it is to do comes down.

A thread follows directives, another one gathers at the lead, each with a communicator of its own: contributions of
later rounds do not wait for directives of earlier ones. Every rank contributes to every round once, in order, in
whichever thread finds that it may. At most `depth` rounds are under way, so that all ranks know of a pass that ends at
round r before anybody contributes to round r + depth, where the next one begins. To the rounds between all contribute,
some of them nothing, and nobody waits for directives of these.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch.distributed as dist

from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.contribution import Contribution, Contributions, State
from trainer_client.balancing.costs.fitting import Fit
from trainer_client.balancing.decide import Decision
from trainer_client.balancing.directive import END, Directive, read_directive
from trainer_client.balancing.groups import Bytes, Communicators
from trainer_client.balancing.lead import Lead, Round
from trainer_client.balancing.options import StreamConfig
from trainer_client.balancing.reading import Measured
from trainer_client.balancing.report import Counters, Mode, Reason, RoundReport
from trainer_client.balancing.splitting import Splits

_NOTHING = Contribution(state=State.NOTHING)


@dataclass(slots=True, eq=False)
class Ticket:
    """A submitted round: what this rank contributes to it, and what becomes of it."""

    pass_number: int
    contribution: Contribution
    flats: tuple[FlatBatch, ...] = ()  # the batches, flattened, until all of them have begun to move
    measured: Measured | None = None  # where the times of its stream's batches are noted
    number: int = -1  # of the round, once that is known
    wanted: bool = False  # the loop waits for the directive
    started: int = 0  # batches whose move has begun
    unasked: bool = True  # nobody has asked for its `splits`
    directive: Directive | None = None  # what this rank is to do, once that is known
    future: Future[Directive] = field(default_factory=Future)  # the same, to be waited for

    @classmethod
    def of_nothing(cls) -> Ticket:
        """That of a loop which is over before it has begun, as no rank has had any batch."""
        ticket = cls(-1, Contribution(state=State.EXHAUSTED))
        ticket.settle(Directive(decision=END))
        return ticket

    def settle(self, directive: Directive) -> None:
        """Wakes who waits for the directive, unless the round has failed."""
        if not self.future.done():
            self.directive = directive
            self.future.set_result(directive)

    @property
    def left(self) -> tuple[int, ...]:
        """Batches of the round that are trained and whose move has not begun; none before its directive is known."""
        return () if self.directive is None else self.directive.batches[self.started :]

    @property
    def report(self) -> RoundReport:
        """What balancing did for the batch, which has been redistributed; its `loss_scale` is that of the batch.

        Raises:
            RuntimeError: If it has not been, or the loops of all ranks were over.
        """
        if not self.future.done():
            raise RuntimeError("the report is known when the batch has been redistributed; ask for it after that")
        directive = self.future.result()
        if directive.ended:
            raise RuntimeError("the loops of all ranks were over before this batch, of which there is no report")
        return directive.reports[0]

    @property
    def splits(self) -> Splits:
        """Samples that lie on several ranks, those of all ranks; of a batch that has been redistributed."""
        self.unasked = False
        return self.report.splits

    def took(self, seconds: float) -> None:
        """Notes how long this rank's own computation of the batch took; see `BalancedLoader.took`."""
        load = self.report.timed_load
        assert self.measured is not None
        self.measured.add(load, seconds)


@dataclass(slots=True)
class Clock:
    """Which rounds and passes a rank is in; a state without threads or waiting, of which `tests/model` visits all.

    One thread contributes at a time and one follows directives: `done` comes last, so that who sees a free round knows
    of an end before it.
    """

    depth: int  # rounds under way at most
    next_up: int = 0  # the round to contribute to
    done: int = 0  # rounds below this one have their directives, or take no place
    void_until: int = 0  # rounds from the end of a pass up to here take no place
    pass_number: int = 0  # the pass that contributions can be of
    first_round: int = 0  # of that pass

    def is_over(self, pass_number: int) -> bool:
        """Whether a pass has ended on all ranks."""
        return pass_number < self.pass_number

    @property
    def is_free(self) -> bool:
        """Whether fewer than `depth` rounds are under way, so that this rank would know of an end before the next."""
        return self.done > self.next_up - self.depth

    def contributed(self) -> int:
        """This rank contributes to the next round; its number."""
        self.next_up += 1
        return self.next_up - 1

    def takes_place(self, number: int) -> bool:
        """Whether a round has a directive, unlike those that were under way when their pass ended."""
        return number >= self.void_until

    def directed(self, number: int, *, ends: bool) -> None:
        """The directive of a round has come, which may end the pass."""
        if ends:
            self.pass_number += 1
            self.void_until = self.first_round = number + self.depth
        self.done = number + (self.depth if ends else 1)


class Rounds:
    """The rounds of a rank; of one without others, which are done at once: no collectives, no threads."""

    def __init__(
        self,
        config: StreamConfig,
        communicators: Communicators,
        *,
        counters: Counters,
        template: FlatBatch,
        lead: Lead | None,
        to_gpu: bool = False,
        world: dist.ProcessGroup | None = None,
    ) -> None:
        """Begins with round 0, once something is put; all but the name, the group and the counters is as rank 0 has it.

        `lead` is None where another rank decides.
        """
        self.options, self.communicators = config.options, communicators
        self.to_gpu = to_gpu  # batches go to the ranks' GPUs where no device is named
        self.world = world  # the default process group that they were opened in; None: there was none
        self.template = template  # an empty batch of the latest round that this rank knows of
        self._name, self._lead, self._counters = config.loader, lead, counters
        self._alone = communicators.up is None
        self.clock = Clock(1 if self._alone else config.options.depth)
        self._fits: deque[tuple[int, Fit | None]] = deque([(0, None)])  # from which round on costs follow which fit
        self._end = END  # what rounds are told that do not take place, as their pass is over
        # Of what is no ticket, a number means to contribute nothing to rounds before it, as their pass has ended.
        self._queue: deque[Ticket | int | None] = deque()
        self._contributing = threading.Lock()
        self._to_gather: SimpleQueue[tuple[Ticket, Bytes] | None] = SimpleQueue()  # at the lead
        self._to_follow: SimpleQueue[tuple[Ticket, Round | None] | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._open: deque[Ticket] = deque()  # that may not be resolved yet
        self._threads: list[threading.Thread] = []

    def put(self, ticket: Ticket) -> None:
        """Contributes as soon as that may be; waits for no lock, so that a collected generator may call it."""
        if self._alone:
            self._put_alone(ticket)
            return
        while self._open and self._open[0].future.done():
            self._open.popleft()
        self._open.append(ticket)
        if self._failure is not None:
            _fail(ticket, self._failure)
        if not self._threads:
            for work in (self._follow,) if self._lead is None else (self._gather, self._follow):
                thread = threading.Thread(target=work, name=f"evenkeel-{self._name}-{work.__name__[1:]}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._queue.append(ticket)
        self._advance()

    def _put_alone(self, ticket: Ticket) -> None:
        if self.clock.is_over(ticket.pass_number):
            self._settle(ticket, Directive(decision=self._end), took_place=False)
            return
        assert self._lead is not None
        ticket.number = self.clock.contributed()
        round_ = self._lead.begin(ticket.number, Contributions.of([ticket.contribution]))
        self._settle(ticket, self._directed(ticket, self._lead.directives(round_)[0]))

    def want(self, ticket: Ticket) -> None:
        """The loop waits for a ticket's directive: what is not planned by now is planned at once."""
        ticket.wanted = True
        if self._lead is not None and ticket.number >= 0:
            self._lead.want(ticket.number)

    def close(self, seconds: float | None = None) -> bool:
        """Ends after what has been queued, waiting at most so long, or until collectives time out; whether it has."""
        until = None if seconds is None else time.monotonic() + seconds
        self._queue.append(None)
        self._advance()
        for thread in self._threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
        ended = not any(thread.is_alive() for thread in self._threads)
        if ended and self._lead is not None:
            self._lead.close()
        return ended

    def fit_at(self, number: int) -> Fit | None:
        """What learned costs of a round follow; of rounds in their order."""
        while len(self._fits) > 1 and self._fits[1][0] <= number:
            self._fits.popleft()
        return self._fits[0][1]

    # ------------------------------------------------------------------ up

    def _advance(self) -> None:
        """Contributes what is queued and may go; where another thread does, that one looks again when it is through."""
        while self._may_go() and self._contributing.acquire(blocking=False):
            try:
                if self._may_go():
                    self._take(self._queue.popleft())
            except BaseException as error:
                self.fail(error)
            finally:
                self._contributing.release()

    def _may_go(self) -> bool:
        try:
            item = self._queue[0]
        except IndexError:
            return False
        if not isinstance(item, Ticket) or self._failure is not None:
            return True
        return self.clock.is_free or self.clock.is_over(item.pass_number)

    def _take(self, item: Ticket | int | None) -> None:
        if item is None:
            (self._to_follow if self._lead is None else self._to_gather).put(None)
        elif self._failure is not None:
            return
        elif isinstance(item, int):
            while self.clock.next_up < item:
                self._contribute(Ticket(-1, _NOTHING))
        elif self.clock.is_over(item.pass_number):
            self._to_follow.put((item, None))
        else:
            self._contribute(item)

    def _contribute(self, ticket: Ticket) -> None:
        communicators = self.communicators
        packed = ticket.contribution.pack(arrays=communicators.peer == 0)
        ticket.number = self.clock.contributed()
        if self._lead is not None:
            self._to_gather.put((ticket, packed))
            return
        communicators.flush(2 * self.clock.depth)  # the lead has taken those before
        communicators.send(packed)
        self._to_follow.put((ticket, None))

    def _gather(self) -> None:
        """At the lead: has the contributions of all to each round."""
        assert self._lead is not None
        while (entry := self._to_gather.get()) is not None:
            ticket, packed = entry
            try:
                if self._failure is not None:
                    continue
                table = self.communicators.gather(packed)
                round_ = None
                if ticket.wanted:
                    self._lead.want(ticket.number)
                if self.clock.takes_place(ticket.number):
                    round_ = self._lead.begin(ticket.number, Contributions(table, self.communicators.peers.shape[1]))
                self._to_follow.put((ticket, round_))
            except BaseException as error:
                self.fail(error)
        self._to_follow.put(None)

    # ------------------------------------------------------------------ down

    def _follow(self) -> None:
        while (entry := self._to_follow.get()) is not None:
            ticket, round_ = entry
            try:
                if self._failure is not None:
                    continue
                if ticket.number >= 0 and self.clock.takes_place(ticket.number):
                    self._receive(ticket, round_)
                    continue
                if round_ is not None:
                    round_.abandon()
                self._settle(ticket, Directive(decision=self._end), took_place=False)
            except BaseException as error:
                self.fail(error)
        with suppress(RuntimeError):  # who had waited for this rank has heard of it
            self.communicators.flush()

    def _receive(self, ticket: Ticket, round_: Round | None) -> None:
        table = None if self._lead is None or round_ is None else self._lead.directives(round_)
        row = self.communicators.scatter(table)
        directive = self._directed(ticket, row)
        if directive.decision.ends:  # before the loop hears of it, which may begin the next pass
            self._queue.append(self.clock.void_until)
        self._advance()
        self._settle(ticket, directive)

    def _directed(self, ticket: Ticket, row: Bytes) -> Directive:
        """Reads a directive, and goes on to where it leads."""
        rank = self.communicators.rank
        directive = read_directive(row, number=ticket.number, rank=rank, template=self.template)
        assert directive.template is not None
        self.template = directive.template
        if directive.broadcast.fit is not None:
            self._fits.append((ticket.number + self.clock.depth, directive.broadcast.fit[0]))
        if directive.ended:
            self._end = directive.decision
        elif directive.decision.last:
            self._end = Decision(mode=Mode.END, reason=Reason.TOO_FEW_SAMPLES, batches=())
        self.clock.directed(ticket.number, ends=directive.decision.ends)
        return directive

    def _settle(self, ticket: Ticket, directive: Directive, *, took_place: bool = True) -> None:
        """Hands a directive over to whoever waits for it, and counts what it says."""
        decision = directive.decision
        if ticket.contribution.state not in (State.LEFT, State.NOTHING) and decision.error is None:
            if took_place:
                self._counters.rounds[decision.mode, decision.reason] += 1
            self._counters.dropped_samples += _dropped(directive, len(ticket.contribution.samples))
        if directive.reports:
            self._counters.wait_seconds += directive.reports[0].wait_seconds
            self._counters.partition_seconds += directive.reports[0].partition_seconds
        if decision.error is not None:
            _fail(ticket, decision.error)
        else:
            ticket.settle(directive)

    def fail(self, error: BaseException) -> None:
        """Wakes everybody at once."""
        self._failure = self._failure or error
        self.communicators.fail()
        if self._lead is not None:
            self._lead.close()
        for ticket in list(self._open):
            _fail(ticket, self._failure)
        self._advance()


def _dropped(directive: Directive, num_samples: int) -> int:
    """Samples of this rank that nobody trains because of `drop_last`."""
    decision, plan = directive.decision, directive.plan
    if decision.mode is Mode.DROP or (decision.mode is Mode.END and decision.reason is Reason.TOO_FEW_SAMPLES):
        return num_samples
    if decision.batches is None or decision.mode is Mode.END:
        return 0
    return sum(plan.own_in(batch) for batch in range(decision.done, len(plan.slices)) if batch not in decision.batches)


def _fail(ticket: Ticket, error: BaseException) -> None:
    with suppress(InvalidStateError):
        ticket.future.set_exception(error)
