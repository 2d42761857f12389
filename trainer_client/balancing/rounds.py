"""A rank's part in the rounds of a stream: what it says goes up, what it is to do comes down.

Two threads, each with a communicator of its own: contributions of later rounds do not wait for directives of earlier
ones. Every rank contributes to every round once, in order. At most `depth` rounds are under way, so that all ranks know
of a pass that ends at round r before anybody contributes to round r + depth, where the next one begins. To the rounds
between all contribute, some of them nothing, and nobody waits for directives of these.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

from trainer_client.balancing.contribution import Contribution, Contributions, State
from trainer_client.balancing.decide import Decision
from trainer_client.balancing.directive import Directive, read_directive
from trainer_client.balancing.groups import Communicators
from trainer_client.balancing.lead import Lead, Open
from trainer_client.balancing.report import Counters, Mode, Reason

FIRST_ROOM = 4096
_NOTHING = Contribution(state=State.NOTHING)


@dataclass(slots=True, eq=False)
class Item:
    """A rank's contribution to a round, and what becomes of it.

    Attributes:
        pass_number: Of the pass that it is of.
        contribution: What it says.
        number: Of the round, once that is known.
        wanted: The loop waits for the directive.
        future: Resolves to the directive.
    """

    pass_number: int
    contribution: Contribution
    number: int = -1
    wanted: bool = False
    future: Future[Directive] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _Until:
    """Contribute nothing to the rounds before this one."""

    number: int


@dataclass(slots=True)
class Clock:
    """Which rounds and passes a rank is in; a state without threads or waiting, of which `tests/model` visits all.

    Attributes:
        depth: Rounds under way at most.
        next_up: The round to contribute to.
        done: Rounds below this one have their directives, or take no place.
        void_until: Rounds from the end of a pass up to here take no place.
        pass_number: The pass that contributions can be of.
        first_round: Its first round.
    """

    depth: int
    next_up: int = 0
    done: int = 0
    void_until: int = 0
    pass_number: int = 0
    first_round: int = 0

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
        self.done = number + 1
        if ends:
            self.done = self.void_until = self.first_round = number + self.depth
            self.pass_number += 1


class Rounds(Protocol):
    """What a stream needs of its rounds.

    Attributes:
        clock: Where this rank is in them.
    """

    clock: Clock

    def put(self, item: Item) -> None:
        """Queues an item; takes no lock, so that a collected generator may call it."""

    def want(self, item: Item) -> None:
        """The loop waits for an item's directive."""

    def close(self, seconds: float) -> bool:
        """Ends after what has been queued, waiting at most so long; whether it has."""


class RoundsAlone:
    """The rounds of one rank without others: no collectives, no threads."""

    def __init__(self, lead: Lead, counters: Counters) -> None:
        """Begins with round 0.

        Args:
            lead: Decides.
            counters: Of the stream.
        """
        self._lead, self._counters = lead, counters
        self._end = Decision(mode=Mode.END)
        self.clock = Clock(depth=1)

    def put(self, item: Item) -> None:
        """Does the round at once."""
        if self.clock.is_over(item.pass_number):
            _settle(item, Directive.of_end(self._end), self._counters)
            return
        item.number = self.clock.contributed()
        said = Contributions.of([item.contribution])
        row = self._lead.directives(self._lead.begin(item.number, said))[0]
        directive = read_directive(row, number=item.number, rank=0, samples=item.contribution.samples)
        if directive.decision.ends:
            self._end = _end_after(directive.decision)
        self.clock.directed(item.number, ends=directive.decision.ends)
        _settle(item, directive, self._counters)

    def want(self, item: Item) -> None:
        """Does nothing: there is nobody to wait for."""

    def close(self, seconds: float) -> bool:  # noqa: ARG002
        """Does nothing."""
        return True


class SharedRounds:
    """The rounds of a rank among others."""

    def __init__(
        self, name: str, communicators: Communicators, *, depth: int, counters: Counters, lead: Lead | None
    ) -> None:
        """Begins with round 0, once something is put.

        Args:
            name: Of the loader.
            communicators: With the other ranks.
            depth: Rounds under way at most.
            counters: Of the stream.
            lead: Decides; None where another rank does.
        """
        self._name, self._communicators = name, communicators
        self._counters, self._lead = counters, lead
        self._items: SimpleQueue[Item | _Until | None] = SimpleQueue()
        self._gathered: SimpleQueue[tuple[Item, Open | None] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._rooms: deque[tuple[int, int]] = deque()  # from which round on, contributions have how much room
        self._room_up = self._room_down = FIRST_ROOM
        self._end = Decision(mode=Mode.END)
        self._failure: BaseException | None = None
        self._open: deque[Item] = deque()  # that may not be resolved yet
        self._threads: list[threading.Thread] = []
        self.clock = Clock(depth)

    def put(self, item: Item) -> None:
        """Queues an item; takes no lock, so that a collected generator may call it."""
        while self._open and self._open[0].future.done():
            self._open.popleft()
        self._open.append(item)
        self._items.put(item)
        if self._failure is not None:
            _resolve(item, self._failure)
        if not self._threads:
            for work in (self._contribute, self._follow):
                thread = threading.Thread(target=work, name=f"evenkeel-{self._name}-{work.__name__[1:]}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def want(self, item: Item) -> None:
        """The loop waits for an item's directive: what is not planned by now is planned at once."""
        item.wanted = True
        if self._lead is not None and item.number >= 0:
            self._lead.want(item.number)

    def close(self, seconds: float) -> bool:
        """Ends after what has been queued, waiting at most so long; whether it has."""
        until = time.monotonic() + seconds
        self._items.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if not (alive := any(thread.is_alive() for thread in self._threads)) and self._lead is not None:
            self._lead.close()
        return not alive

    def join(self) -> None:
        """Waits until both threads have ended, which the timeouts of collectives bound."""
        for thread in self._threads:
            thread.join()
        if self._lead is not None:
            self._lead.close()

    # ------------------------------------------------------------------ up

    def _contribute(self) -> None:
        while (item := self._items.get()) is not None:
            try:
                if isinstance(item, _Until):
                    while self.clock.next_up < item.number:
                        self._gather(Item(-1, _NOTHING))
                elif self._takes_place(item):
                    self._gather(item)
            except BaseException as error:
                self._fail(error)
        self._gathered.put(None)

    def _takes_place(self, item: Item) -> bool:
        """Waits until fewer than `depth` rounds are under way; False if the item's pass is over by then."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.clock.is_free or self.clock.is_over(item.pass_number) or self._failure is not None
            )
            if self._failure is not None:
                return False
            over = self.clock.is_over(item.pass_number)
        if over:
            _settle(item, Directive.of_end(self._end), self._counters)
        return not over

    def _gather(self, item: Item) -> None:
        communicators, number = self._communicators, self.clock.next_up
        while self._rooms and self._rooms[0][0] <= number:
            self._room_up = self._rooms.popleft()[1]
        item.number = number
        packed = item.contribution.pack(arrays=communicators.peer == 0)
        table = communicators.gather(packed, self._room_up)
        opened = None
        if self._lead is not None and table is not None:
            if item.wanted:
                self._lead.want(number)
            if self.clock.takes_place(number):
                opened = self._lead.begin(number, Contributions(table, communicators.peers.shape[1]))
        self.clock.contributed()
        self._gathered.put((item, opened))

    # ------------------------------------------------------------------ down

    def _follow(self) -> None:
        while (entry := self._gathered.get()) is not None:
            item, opened = entry
            try:
                if self._failure is not None:
                    continue
                if self.clock.takes_place(item.number):
                    self._receive(item, opened)
                    continue
                if opened is not None and opened.call is not None:
                    opened.call.cancel()
                _settle(item, Directive.of_end(self._end), self._counters)
            except BaseException as error:
                self._fail(error)

    def _receive(self, item: Item, opened: Open | None) -> None:
        table = None if self._lead is None or opened is None else self._lead.directives(opened)
        row = self._communicators.scatter(table, self._room_down)
        rank = self._communicators.rank
        directive = read_directive(row, number=item.number, rank=rank, samples=item.contribution.samples)
        self._room_down = directive.room_down
        with self._changed:
            self._rooms.append((item.number + self.clock.depth, directive.room_up))
            self.clock.directed(item.number, ends=directive.decision.ends)
            if directive.decision.ends:
                self._end = _end_after(directive.decision)
                self._items.put(_Until(self.clock.void_until))
            self._changed.notify_all()
        _settle(item, directive, self._counters)

    def _fail(self, error: BaseException) -> None:
        """Raises the error wherever somebody waits for a round, now or later."""
        with self._changed:
            self._failure = self._failure or error
            self._communicators.failed = True
            self._changed.notify_all()
        if self._lead is not None:
            self._lead.close()
        for item in list(self._open):
            _resolve(item, self._failure)


def _end_after(decision: Decision) -> Decision:
    """What rounds are told that do not take place, since a decision has ended their pass."""
    if decision.mode is Mode.END:
        return decision
    return Decision(mode=Mode.END, reason=Reason.TOO_FEW_SAMPLES, batches=())


def _settle(item: Item, directive: Directive, counters: Counters) -> None:
    """Hands a directive over to whoever waits for it, and counts what it says."""
    decision, samples = directive.decision, item.contribution.samples
    if item.contribution.state not in (State.LEFT, State.NOTHING) and decision.error is None:
        counters.rounds[decision.mode, decision.reason] += 1
        counters.dropped_samples += _dropped(directive, len(samples))
    if directive.reports:
        counters.wait_seconds += directive.reports[0].wait_seconds
    if decision.error is not None:
        _resolve(item, decision.error)
    elif not item.future.done():
        item.future.set_result(directive)


def _dropped(directive: Directive, num_samples: int) -> int:
    """Samples of this rank that nobody trains because of `drop_last`."""
    decision, plan = directive.decision, directive.plan
    if decision.mode is Mode.DROP or (decision.mode is Mode.END and decision.reason is Reason.TOO_FEW_SAMPLES):
        return num_samples
    if decision.batches is None or decision.mode is Mode.END or decision.resumed:
        return 0
    return sum(plan.own_in(batch) for batch in range(len(plan.slices)) if batch not in decision.batches)


def _resolve(item: Item, error: BaseException) -> None:
    with suppress(InvalidStateError):
        item.future.set_exception(error)
