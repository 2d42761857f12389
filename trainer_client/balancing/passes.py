"""One pass over the batches of a stream on one rank, and how a rank leaves it without holding the others up.

Samples move by collectives, which meet in the order in which each rank starts them. So every round that moves must have
its move started by every rank, once, in the order of the rounds. A loop does so while it goes on; for a rank that has
left its loop, `Pass.leave` does it, and drops what arrives.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.directive import Directive
from trainer_client.balancing.redistribution import Pending, start
from trainer_client.balancing.redistribution.copying import pick
from trainer_client.balancing.redistribution.cutting import cut
from trainer_client.balancing.report import Counters
from trainer_client.balancing.resume import Resumed
from trainer_client.balancing.rounds import Item
from trainer_client.balancing.ticket import Ticket, batches_of

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 1.0
"""How long a rank that leaves waits for the others to come to its last rounds, before a thread does it for it.

Within it the last moves come before whatever the program does next, on all ranks alike, which NCCL wants."""


class Pass:
    """One `iter(loader)`, or one loop of the user's own.

    Attributes:
        number: Counts the passes of the stream, on all ranks alike; None before the stream is open.
        over: The loop has seen its end, which came on all ranks in the same round.
        mover: What starts its moves; None before the stream is open.
        by_hand: The loop is one of submissions by hand, not of an iterator.
        resumed: From where it goes on, until its first round; None: it begins at its beginning.
        problem: What made this rank leave, for the others to hear; empty: nothing.
    """

    def __init__(
        self,
        tell: Callable[[Pass, bool], Item],
        directive_of: Callable[[Ticket], Directive],
        patience: float,
        *,
        by_hand: bool = False,
    ) -> None:
        """Begins a pass.

        Args:
            tell: Tells the lead that this rank has left, and whether it was out of turn.
            directive_of: Waits for what becomes of a ticket.
            patience: Seconds that a round may take at most.
            by_hand: See the attribute.
        """
        self.number: int | None = None
        self.over = False
        self.mover: Mover | None = None
        self.by_hand = by_hand
        self.resumed: Resumed | None = None
        self.problem = ""
        # It refers to the stream, and that to this pass: let go of at the end, so that a dropped stream is collected
        # at once, and not when Python next looks for cycles.
        self._tell: Callable[[Pass, bool], Item] | None = tell
        self._directive_of: Callable[[Ticket], Directive] | None = directive_of
        self._patience = patience
        self._tickets: deque[Ticket] = deque()  # submitted, and not wholly started
        self._moves: deque[Pending] = deque()  # started, and not waited for when it was last looked
        self._taken = 0
        self._latest: Ticket | None = None  # whose batch a loop by hand has asked for
        self._device: torch.device | str | None = None
        self._left = False
        self._farewell: Item | None = None  # by which the lead hears that this rank has left
        self._drained = threading.Event()
        self._failure: BaseException | None = None
        self._owner, self._process = threading.get_ident(), os.getpid()

    @property
    def left(self) -> bool:
        """Whether this rank has left."""
        return self._left

    @property
    def taken(self) -> int:
        """Batches that the loop has got."""
        while self._moves and self._moves[0].landed:
            self._moves.popleft()
            self._taken += 1
        return self._taken

    @property
    def failed(self) -> bool:
        """Whether its last moves have."""
        return self._failure is not None

    def in_flight(self, depth: int) -> Ticket | None:
        """The ticket that was submitted so many before the next one, if it has not been started."""
        return self._tickets[-depth] if len(self._tickets) >= depth else None

    def wait(self) -> None:
        """Waits until nothing of a pass that was left is in flight on this rank, or it has failed."""
        self._drained.wait()

    def submitted(self, ticket: Ticket, device: torch.device | str | None) -> None:
        """Notes a round whose moves are to come."""
        self._tickets.append(ticket)
        if device is not None:
            self._device = device

    def in_turn(self, ticket: Ticket, directive: Directive, batch: int) -> bool:
        """Whether a batch of a round is the next to move."""
        while self._tickets and self._tickets[0] is not ticket and _is_empty(self._tickets[0]):
            self._tickets.popleft()
        return bool(self._tickets) and self._tickets[0] is ticket and batches_of(directive)[ticket.started] == batch

    def start(
        self,
        flats: Sequence[FlatBatch],
        ticket: Ticket,
        directive: Directive,
        device: torch.device | str | None,
        template: FlatBatch,
    ) -> Pending:
        """Starts the move that is next; `template` is an empty batch of the round's schema."""
        for flat in flats:
            flat.check_unchanged()
        assert self.mover is not None
        self._device = self.mover.goes_to(flats, device)
        _ = self.taken  # lets go of batches that the loop has got
        self._latest = ticket
        pending = self._start(flats, ticket, directive, device, template)
        self._moves.append(pending)
        return pending

    @property
    def latest(self) -> Ticket | None:
        """The ticket whose move was started last."""
        return self._latest

    def leave(self, *, out_of_turn: bool = False) -> None:
        """Leaves the loop: the pass ends on all ranks, and what they agreed on before is done with.

        Returns within about `LEAVE_SECONDS`; what is left to do then is done in the background. Called again, it does
        nothing. A generator that nothing refers to any more calls it from wherever it is collected: it takes no locks.
        """
        if self._left or os.getpid() != self._process:
            return
        self._left = True
        if self.number is not None and not self.over:
            assert self._tell is not None
            self._farewell = self._tell(self, out_of_turn)
        _ = self.taken
        while self._tickets and _is_void(self._tickets[0]):
            self._tickets.popleft()
        if not (self._tickets or self._moves or self._farewell):
            self._end()
            return
        try:
            if self._device is None:
                assert self.mover is not None
                self._device = self.mover.goes_to(self._tickets[0].flats if self._tickets else (), None)
            since = _queued_by_now(self._device)
            threading.Thread(target=self._drain, args=(since,), name="evenkeel-leave", daemon=True).start()
        except RuntimeError:  # the interpreter is ending, and with it the job
            self._end()
            return
        if threading.get_ident() == self._owner:
            self._drained.wait(LEAVE_SECONDS)

    def settled_within(self, seconds: float) -> bool:
        """Leaves, and says whether all that was agreed on has been done in time."""
        self.leave()
        try:
            return self.settle(seconds)
        except Exception as error:  # the job has failed, and was told so where it waited
            logger.debug("the last loop: %s", error)
            return False

    def settle(self, seconds: float) -> bool:
        """Waits until nothing of a pass that was left is in flight on this rank.

        Raises:
            BaseException: If the last moves failed; their own error, such as that of a process group.
        """
        drained = self._drained.wait(seconds)
        if self._failure is not None:
            raise self._failure
        return drained

    # ------------------------------------------------------------------ what the loop has left

    def _start(
        self,
        flats: Sequence[FlatBatch],
        ticket: Ticket,
        directive: Directive,
        device: torch.device | str | None,
        template: FlatBatch,
    ) -> Pending:
        batches = batches_of(directive)
        batch = batches[ticket.started]
        ticket.started += 1
        if ticket.started == len(batches):
            self._tickets.popleft()
            ticket.flats = ()
        assert self.mover is not None
        return self.mover.move(flats, directive, batch, device, template)

    def _drain(self, since: tuple[torch.device, torch.cuda.Event] | None) -> None:
        """Starts and waits for the moves that are left; drops what arrives."""
        try:
            with _beside(since):
                for pending in list(self._moves):
                    pending.wait()
                while self._tickets:
                    ticket = self._tickets[0]
                    assert self._directive_of is not None
                    directive = self._directive_of(ticket)
                    if directive.ended:
                        break
                    if not directive.moves:
                        self._tickets.popleft()
                        continue
                    # with an empty batch that may be another round's, of which nothing is kept here
                    template = ticket.flats[0].empty()
                    self._start(ticket.flats, ticket, directive, self._device, template).wait()
            if self._farewell is not None:
                self._farewell.future.result(self._patience)
        except BaseException as error:
            logger.debug("the last moves of a loop that was left: %s", error)
            self._failure = error
        finally:
            self._tickets.clear()
            self._moves.clear()
            self._end()

    def _end(self) -> None:
        self._tell = self._directive_of = None
        self._drained.set()


class Mover:
    """Starts the moves of a stream; collective wherever samples move."""

    def __init__(self, group: dist.ProcessGroup | None, counters: Counters, *, to_gpu: bool = False) -> None:
        """Has started none yet.

        Args:
            group: Of the ranks that balance together; None: there is one.
            counters: What is counted.
            to_gpu: Batches go to this rank's GPU where no device is named; the same on all ranks.
        """
        self._group, self._counters, self._to_gpu = group, counters, to_gpu

    def move(
        self,
        flats: Sequence[FlatBatch],
        directive: Directive,
        batch: int,
        device: torch.device | str | None,
        template: FlatBatch,
    ) -> Pending:
        """Starts to move the samples of a batch.

        Args:
            flats: All batches of the round on this rank.
            directive: What it does.
            batch: Which batch of the window.
            device: Where the result shall be; None: where the batch is, or this rank's GPU.
            template: An empty batch of the round's schema.
        """
        if device is None and self._to_gpu:
            device = _gpu_of(flats)
        began = time.perf_counter()
        plan = directive.plan
        samples = samples_of(directive, flats, batch, template)
        if (cuts := plan.cuts_in(batch)) is not None:
            samples = cut(samples, cuts)
        group = self._group if directive.moves else None
        pending = start(samples, plan.slices[batch], group=group, device=device)
        self._counters.redistribution_seconds += time.perf_counter() - began
        return pending

    def goes_to(self, flats: Sequence[FlatBatch], device: torch.device | str | None) -> torch.device | None:
        """Where the result of a move is; None where the batch is, if nobody knows yet where that is."""
        if device is None and self._to_gpu:
            return _gpu_of(flats)
        if device is None:
            return next((flat.device for flat in flats if flat.device is not None), None)
        where = torch.device(device)
        if where == torch.device("cuda"):
            return torch.device("cuda", torch.cuda.current_device())
        return where


def _is_empty(ticket: Ticket) -> bool:
    """Whether all of a round was dropped."""
    future = ticket.item.future
    done = future.done() and future.exception() is None
    return done and not future.result().ended and not batches_of(future.result())


def _is_void(ticket: Ticket) -> bool:
    """Whether nothing of a round is left to do: it has ended, or every sample stays at home."""
    future = ticket.item.future
    if not future.done() or future.exception() is not None:
        return False
    return future.result().ended or not future.result().moves


def _queued_by_now(device: torch.device | str | None) -> tuple[torch.device, torch.cuda.Event] | None:
    """The point that a device's current stream has come to; None on the host."""
    if device is None or torch.device(device).type != "cuda":
        return None
    current = torch.cuda.current_stream(torch.device(device))
    return current.device, current.record_event()


@contextmanager
def _beside(since: tuple[torch.device, torch.cuda.Event] | None) -> Iterator[None]:
    """Work on a stream of its own: after what was queued then.

    What the program has queued since may wait for this work.
    """
    if since is None:
        yield
        return
    device, event = since
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()  # only then may the batches' memory be used again


def _gpu_of(flats: Sequence[FlatBatch]) -> torch.device:
    found = next((flat.device for flat in flats if flat.num_samples), None)
    if found is not None and found.type == "cuda":
        return found
    return torch.device("cuda", torch.cuda.current_device())


def samples_of(directive: Directive, flats: Sequence[FlatBatch], batch: int, template: FlatBatch) -> FlatBatch:
    """This rank's samples that are trained in a batch of the window, whichever rank trains them."""
    columns = directive.plan.slices[batch].source_totals.shape[1]
    if batch < len(flats) and not directive.reports[batch].samples and flats[batch].num_jagged == columns:
        return flats[batch]  # as it was loaded: no rank knows better
    steps = directive.plan.steps
    if steps is None:
        return flats[batch] if batch < len(flats) and flats[batch].num_samples else template
    begins = np.cumsum([0, *(flat.num_samples for flat in flats)])
    chosen = [np.flatnonzero(steps[begins[i] : begins[i + 1]] == batch) for i in range(len(flats))]
    some = [i for i, samples in enumerate(chosen) if samples.size]
    return pick([flats[i] for i in some], [chosen[i] for i in some]) if some else template
