"""One pass over the batches of a stream on one rank, and how a rank leaves it without holding the others up.

Samples move by collectives, which meet in the order in which each rank starts them. So every round that all ranks have
agreed to move must have its move started by every rank, once, in the order of the rounds. A loop does so while it goes
on; for a rank that has left its loop, `Pass.leave` does it, and drops what arrives.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from evenkeel.partitioning.samples import RankSamples
from trainer_client.balancing.agreement import ProgramOrderError
from trainer_client.balancing.batches import FlatBatch, Schema
from trainer_client.balancing.groups import Groups
from trainer_client.balancing.redistribution import Pending, start
from trainer_client.balancing.redistribution.copying import pick
from trainer_client.balancing.redistribution.cutting import cut
from trainer_client.balancing.report import Counters
from trainer_client.balancing.resume import Resumed
from trainer_client.balancing.telling import warn_of_unasked_splits
from trainer_client.balancing.tickets import Outcome, Ticket
from trainer_client.balancing.tracing import RoundTrace

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
    """

    def __init__(
        self,
        name: str,
        tell: Callable[[Pass, bool], None],
        patience: float,
        *,
        by_hand: bool = False,
    ) -> None:
        """Begins a pass.

        Args:
            name: The stream's name.
            tell: Tells the other ranks that this one has left, and whether it was out of turn.
            patience: Seconds that a round may take at most.
            by_hand: See the attribute.
        """
        self.number: int | None = None
        self.over = False
        self.mover: Mover | None = None
        self.by_hand = by_hand
        self.resumed: Resumed | None = None
        self._name = name
        # It refers to the stream, and that to this pass: let go of at the end, so that a dropped stream is collected
        # at once, and not when Python next looks for cycles.
        self._tell: Callable[[Pass, bool], None] | None = tell
        self._patience = patience
        self._tickets: deque[Ticket] = deque()  # submitted, and not wholly started
        self._moves: deque[Pending] = deque()  # started, and not waited for when it was last looked
        self._taken = 0
        self._handed: Ticket | None = None  # the latest whose batch a loop by hand has asked for
        self._device: torch.device | str | None = None
        self._left = False
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

    def go_on(self, samples: RankSamples, window: int, schema: Schema) -> tuple[Resumed, RankSamples]:
        """From where a pass goes on whose first round is submitted, and the samples as `Resumed.meeting` says.

        Args:
            samples: The round's samples on this rank.
            window: Batches of a window.
            schema: Of the round's batches.
        """
        resumed, self.resumed = self.resumed, None
        assert resumed is not None
        return resumed.meeting(samples, window, schema)

    def submitted(self, ticket: Ticket, device: torch.device | str | None) -> None:
        """Notes a round whose moves are to come."""
        self._tickets.append(ticket)
        if device is not None:
            self._device = device

    def in_turn(self, ticket: Ticket, outcome: Outcome, batch: int) -> bool:
        """Whether a batch of a round is the next to move."""
        while self._tickets and self._tickets[0] is not ticket and _is_empty(self._tickets[0]):
            self._tickets.popleft()
        return bool(self._tickets) and self._tickets[0] is ticket and outcome.batches[ticket.started] == batch

    def start(
        self, flats: Sequence[FlatBatch], ticket: Ticket, outcome: Outcome, device: torch.device | str | None
    ) -> Pending:
        """Starts the move that is next."""
        for flat in flats:
            flat.check_unchanged()
        assert self.mover is not None
        self._device = self.mover.goes_to(flats, device)
        _ = self.taken  # lets go of batches that the loop has got
        if self.by_hand:
            before, self._handed = self._handed, ticket
            if before is not None and before.unasked and before.splits:
                warn_of_unasked_splits(self._name)
        pending = self._start(flats, ticket, outcome, device)
        self._moves.append(pending)
        return pending

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
            self._tell(self, out_of_turn)
        _ = self.taken
        while self._tickets and _is_void(self._tickets[0]):
            self._tickets.popleft()
        if not (self._tickets or self._moves):
            self._end()
            return
        try:
            if self._device is None:
                assert self.mover is not None
                self._device = self.mover.goes_to(self._tickets[0].flats if self._tickets else (), None)
            since = _queued_by_now(self._device)
            threading.Thread(
                target=self._drain, args=(since,), name=f"evenkeel-leave-{self._name}", daemon=True
            ).start()
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
            logger.debug("%s: the last loop: %s", self._name, error)
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
        self, flats: Sequence[FlatBatch], ticket: Ticket, outcome: Outcome, device: torch.device | str | None
    ) -> Pending:
        batches = outcome.batches
        batch = batches[ticket.started]
        ticket.started += 1
        if ticket.started == len(batches):
            self._tickets.popleft()
            ticket.flats = ()
        assert self.mover is not None
        return self.mover.move(flats, outcome, batch, device, ticket.trace)

    def _drain(self, since: tuple[torch.device, torch.cuda.Event] | None) -> None:
        try:
            with _beside(since):
                for pending in list(self._moves):
                    pending.wait()
                while self._tickets:
                    ticket = self._tickets[0]
                    outcome = ticket.future.result(self._patience)
                    if outcome.ended:
                        break
                    if not outcome.verdict.moved:
                        self._tickets.popleft()
                        continue
                    self._start(ticket.flats, ticket, outcome, self._device).wait()
        except BaseException as error:
            logger.debug("%s: the last moves of a loop that was left: %s", self._name, error)
            self._failure = error
        finally:
            self._tickets.clear()
            self._moves.clear()
            self._end()

    def _end(self) -> None:
        self._tell = None
        self._drained.set()


class Mover:
    """Starts the moves of a stream; collective wherever samples move."""

    def __init__(self, groups: Groups, counters: Counters, *, to_gpu: bool = False) -> None:
        """Has started none yet.

        Args:
            groups: The ranks.
            counters: What is counted.
            to_gpu: Batches go to this rank's GPU where no device is named; the same on all ranks.
        """
        self._groups = groups
        self._to_gpu = to_gpu
        self._counters = counters
        self._started = 0
        self._ended = 0

    @property
    def rest(self) -> int | None:
        """How many collective moves there were; None while one is in flight."""
        return self._ended if self._ended == self._started else None

    def move(
        self,
        flats: Sequence[FlatBatch],
        outcome: Outcome,
        batch: int,
        device: torch.device | str | None,
        trace: RoundTrace | None,
    ) -> Pending:
        """Starts to move the samples of a batch.

        Args:
            flats: All batches of the round on this rank.
            outcome: What all ranks agreed on.
            batch: Which batch of the window.
            device: Where the result shall be; None: where the batch is, or this rank's GPU.
            trace: The round's spans; None when it is not traced.
        """
        if device is None and self._to_gpu:
            device = _gpu_of(flats)
        moved = outcome.verdict.moved
        if trace is not None:
            trace.moving()
        began = time.perf_counter()
        self._started += moved
        samples, piece = samples_of(outcome, flats, batch), outcome.plan.slices[batch]
        if (cuts := outcome.plan.cuts_in(batch)) is not None:
            samples = cut(samples, cuts)
        pending = start(samples, piece, group=self._groups.data if moved else None, device=device)
        self._counters.redistribution_seconds += time.perf_counter() - began
        pending.then(partial(self._land, moved, trace))
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

    def _land(self, moved: bool, trace: RoundTrace | None) -> None:
        self._ended += moved
        if trace is not None:
            trace.moved()


def used_after(name: str) -> ProgramOrderError:
    """The error of a loop that goes on although another one has begun on its stream."""
    return ProgramOrderError(
        f"a newer loop over {name!r} has begun, which ended this one; give loaders that are in use at the same time "
        "different names (BalancedLoader(name=…)), and go on with one iterator of a loader at a time"
    )


def used_closed(name: str) -> ProgramOrderError:
    """The error of a loop that goes on although its stream was closed."""
    return ProgramOrderError(
        f"the balancer was closed while a loop over {name!r} went on, which ended it on all ranks; close the balancer "
        "behind the loop, and leave a loop by break"
    )


def _is_empty(ticket: Ticket) -> bool:
    """Whether all of a round was dropped."""
    done = ticket.future.done() and ticket.future.exception() is None
    return done and not ticket.future.result().ended and not ticket.future.result().batches


def _is_void(ticket: Ticket) -> bool:
    """Whether nothing of a round is left to do: it has ended, or every sample stays at home."""
    if not ticket.future.done() or ticket.future.exception() is not None:
        return False
    outcome = ticket.future.result()
    return outcome.ended or not outcome.verdict.moved


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


def samples_of(outcome: Outcome, flats: Sequence[FlatBatch], batch: int) -> FlatBatch:
    """This rank's samples that are trained in a batch of the window, whichever rank trains them."""
    columns = outcome.plan.slices[batch].source_totals.shape[1]
    if batch < len(flats) and not outcome.reports[batch].samples and flats[batch].num_jagged == columns:
        return flats[batch]  # as it was loaded: no rank knows better
    if outcome.plan.steps is None:
        return flats[batch] if batch < len(flats) and flats[batch].num_samples else _nothing(outcome)
    begins = np.cumsum([0, *(flat.num_samples for flat in flats)])
    chosen = [np.flatnonzero(outcome.plan.steps[begins[i] : begins[i + 1]] == batch) for i in range(len(flats))]
    some = [i for i, samples in enumerate(chosen) if samples.size]
    return pick([flats[i] for i in some], [chosen[i] for i in some]) if some else _nothing(outcome)


def _nothing(outcome: Outcome) -> FlatBatch:
    assert outcome.template is not None
    return outcome.template
