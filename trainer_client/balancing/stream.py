"""One stream of batches of a group of ranks: submit early, redistribute late."""

from __future__ import annotations

import _thread
import hashlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trainer_client.balancing.batches import BatchSpec, FlatBatch, flatten
from trainer_client.balancing.batches.shared import digest as shared_digest
from trainer_client.balancing.contribution import NO_SAMPLES, Contribution, Extras, State, schema_number
from trainer_client.balancing.costs.fits import Fit
from trainer_client.balancing.costs.learned import LearnedCost
from trainer_client.balancing.directive import Directive
from trainer_client.balancing.errors import NoDataError, out_of_turn, used_after, used_closed
from trainer_client.balancing.latest import warn_of_unasked_splits
from trainer_client.balancing.measured import Measured
from trainer_client.balancing.opening import Opened, StreamConfig, begin_opening
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.passes import Mover, Pass
from trainer_client.balancing.reading import Cost, read_round
from trainer_client.balancing.redistribution import Pending, load_on_device
from trainer_client.balancing.report import Counters, Reason
from trainer_client.balancing.rounds import Item, SharedRounds
from trainer_client.balancing.ticket import Ticket

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0


class BatchStream:
    """Rounds of one loader, in passes: each is one loop over batches, and ends on all ranks in the same round.

    All ranks submit and redistribute their batches in the same order. A rank whose data ends goes on with
    `submit_exhausted`; one that leaves its loop says so with `leave`, and the loops of all ranks end.
    """

    def __init__(self, config: StreamConfig) -> None:
        """Opens nothing yet.

        Args:
            config: What it is made from.
        """
        self._config = config
        self._pass: Pass | None = None
        self._opened: Opened | None = None
        self._opening: Future[Opened] | None = None
        self._attempted: Pass | None = None  # in which this rank has tried to open the stream
        self._template: FlatBatch | None = None  # of the latest round whose directive the loop has seen
        self._fits: deque[tuple[int, Fit | None]] = deque()  # from which round on, learned costs follow which fit
        self._fit: Fit | None = None
        self._submitted = 0  # rounds of this pass
        self._mover: Mover | None = None
        self._said_end = False
        self.counters, self.measured = Counters(), Measured()

    def __del__(self) -> None:
        opened: Opened | None = getattr(self, "_opened", None)
        # In the background, as closing waits for other ranks; from wherever it is collected, so without locks.
        if opened is not None and opened.world_size > 1 and os.getpid() == self._process and not sys.is_finalizing():
            with suppress(RuntimeError):  # no thread to be had
                _thread.start_new_thread(self.close, ())

    @property
    def options(self) -> BalanceOptions:
        """Rank 0's options once the stream is open, before that this rank's."""
        return self._config.options if self._opened is None else self._opened.options

    @property
    def breaker_open(self) -> bool:
        """Whether the lead has stopped asking the service for a while; False on other ranks."""
        return self._opened is not None and self._opened.lead is not None and not self._opened.lead.breaker_closed

    def begin(self, *, by_hand: bool = False) -> Pass:
        """Begins a pass, after leaving the one before if that has not ended; a submission does so where there is none.

        Waits until the pass before has ended on all ranks and nothing of it is in flight, or raises `TimeoutError`.
        """
        before = self._pass
        if before is not None:
            before.leave()
            if not before.settle(self.options.patience):
                raise TimeoutError(f"{self._config.loader}: the loop before has not ended on all ranks")
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if self._opened is not None and self._opened.world is not world:
            self.close()  # of a process group that is no more, or of the time before there was one
        self._pass = Pass(self._tell_left, self.directive, self.options.patience, by_hand=by_hand)
        if self._opened is not None:
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
        """Tells the other ranks what has ended this rank's loop; opens the stream for that, as they wait for it."""
        current = self._pass
        if current is None or current.left:
            return
        current.problem = f"{type(error).__name__}: {error}"
        if self._opened is not None or self._attempted is current:
            return
        logger.error(
            "%s: this rank's first batch cannot be read (%s); the loops of all ranks end", self._config.loader,
            current.problem,
        )  # fmt: skip
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
        if self._opened is None:
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
        """Announces batches that are balanced together: costs and lengths go to the lead, nothing moves yet.

        The first submission opens the stream, which is collective. Later ones return at once.

        Args:
            batches: One to `BalanceOptions.window` batches of the host, in the order in which they are to be trained.
            cost: From a batch to the predicted work of each sample.
            memory: From a batch to what each sample adds to the memory caps; default: its bytes.
            spec: How to read the batches' fields.
            device: Where the batches will be trained.
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
        opened = self._open(next((flat for flat in flats if flat.num_samples), flats[0]) if flats else None, device)
        if not 1 <= len(flats) <= (window := opened.options.window):
            raise ValueError(f"{len(flats)} batches for a window of {window}; set BalanceOptions.window")
        assert self._template is not None
        self._follow_fit(cost)
        samples, problem = read_round(
            batches, flats, template=self._template, cost=cost, memory=memory, caps=opened.options.memory_caps,
            split=opened.options.split,
            shares=opened.world_size * window,  # sums over all ranks and batches stay exact
        )  # fmt: skip
        contribution = Contribution(
            samples=samples, drop_last=drop_last, invalid=bool(problem), extras=Extras(problem=problem)
        )
        return flats, self._put(contribution, flats, device)

    def submit_exhausted(
        self, device: torch.device | str | None = None, *, drop_last: bool = False
    ) -> tuple[FlatBatch, Ticket]:
        """Takes part in a round after this rank's data has ended, with no sample.

        Raises:
            NoDataError: If none of them has ever had a batch; on all ranks.
        """
        self._open(None, device)
        flat = self._template
        assert flat is not None
        contribution = Contribution(state=State.EXHAUSTED, samples=NO_SAMPLES, drop_last=drop_last)
        return flat, self._put(contribution, (flat,), device)

    def start(
        self,
        flat: FlatBatch | Sequence[FlatBatch],
        ticket: Ticket,
        directive: Directive,
        device: torch.device | str | None = None,
        *,
        batch: int = 0,
    ) -> Pending:
        """Starts to move the samples of a round as the lead has directed.

        Args:
            flat: The flattened batch, or all flattened batches of the window.
            ticket: What `submit_window` returned for it.
            directive: What `directive` gave for it.
            device: Where the result shall be; default: where the batch is.
            batch: Which batch of the window, 0 to `len(directive.reports)` - 1; each once, in order, on all ranks.

        Returns:
            The move in flight; its `wait()` gives the batch that this rank trains, sorted by (home, index at home).
        """
        if directive.ended:
            raise RuntimeError(f"the loop over {self._config.loader!r} has ended on all ranks; nothing moves any more")
        current = self._pass
        if current is None:
            raise used_closed(self._config.loader)
        if current.left or ticket.item.pass_number != current.number:
            raise used_after(self._config.loader)
        if not current.in_turn(ticket, directive, batch):
            current.leave(out_of_turn=True)
            assert self._opened is not None
            raise out_of_turn(self._opened.rank)
        latest = current.latest if current.by_hand else None
        if latest is not None and latest.unasked and latest.item.future.result().plan.splits:
            warn_of_unasked_splits(self._config.loader)
        assert self._template is not None
        flats = [flat] if isinstance(flat, FlatBatch) else flat
        # a batch without samples may have other fields than those before it
        nothing = flats[0].empty() if not directive.reports[batch].samples and flats else self._template
        return current.start(flats, ticket, directive, device, nothing)

    def directive(self, ticket: Ticket) -> Directive:
        """What this rank is to do with a round; waits for it.

        Raises:
            RuntimeError: If the process group failed, or what else ended the rounds.
            TimeoutError: If it did not come within the timeouts of its collectives.
        """
        item, opened = ticket.item, self._opened
        if not item.future.done() and opened is not None:
            opened.rounds.want(item)
        started = time.perf_counter()
        try:
            directive = item.future.result(self.options.patience)
        except TimeoutError:
            if item.future.done():
                raise
            raise TimeoutError(
                f"{self._config.loader}: the ranks did not come to round {max(item.number, 0)} in time; a rank whose "
                "data has ended goes on with submit(None), and one that leaves its loop calls leave()"
            ) from None
        finally:
            self.counters.exposed_seconds += time.perf_counter() - started
        if not ticket.seen:
            ticket.seen = True
            if directive.notes.template is not None:
                self._template = directive.notes.template
            if directive.notes.fit is not None:
                self._fits.append((item.number + self.options.depth, directive.notes.fit[0]))
        return directive

    def end(self, directive: Directive, ticket: Ticket) -> None:
        """Notes that a loop of the user's own has seen its end, with the round of a ticket."""
        current = self._pass
        if current is not None and current.number == ticket.item.pass_number and not current.over:
            current.over = True
            if not ticket.exhausted:
                self.say_end(directive, current.taken)

    def say_end(self, directive: Directive, taken: int) -> None:
        """Says that this rank's loop, which got so many batches, has ended because another rank has left its own.

        Time limits end evaluations so every time: a warning on one rank, once, is enough for those who wonder.
        """
        decision = directive.decision
        if decision.reason is not Reason.LEFT or self._opened is None:
            return
        rank = self._opened.rank
        first = next((other for other in range(rank) if other not in decision.ranks), rank)
        quiet = (self._said_end or rank != first) and not decision.problem
        logger.log(
            logging.INFO if quiet else logging.WARNING,
            "%s: rank %d has left its loop after %d batches%s, which ends the loops of all ranks, this one after %d; "
            "batches loaded ahead are dropped", self._config.loader, decision.ranks[0], decision.taken,
            f" ({decision.problem})" if decision.problem else "", taken,
        )  # fmt: skip
        self._said_end = True

    def close(self) -> None:
        """Leaves the loop and ends the threads; the process groups are kept for the next stream of this loader."""
        until = time.monotonic() + CLOSE_SECONDS
        current, self._pass = self._pass, None
        opened, self._opened, self._opening = self._opened, None, None
        settled = current is None or current.settled_within(CLOSE_SECONDS)
        self._mover, self._template = None, None
        self._fits.clear()
        if opened is None:
            return
        ended = opened.rounds.close(max(0.1, until - time.monotonic()))
        communicators = opened.communicators
        if communicators is None:
            return
        communicators.failed |= current is not None and current.failed
        if settled and ended:
            communicators.free.set()
            return

        def rest() -> None:
            if current is not None:
                current.wait()
            if isinstance(opened.rounds, SharedRounds):
                opened.rounds.join()
            communicators.failed |= current is not None and current.failed
            communicators.free.set()

        threading.Thread(target=rest, name=f"evenkeel-{self._config.loader}-close", daemon=True).start()

    # ------------------------------------------------------------------ inside

    def _enter(self, one: Pass) -> None:
        """Numbers a pass, on all ranks alike."""
        assert self._opened is not None
        one.number, one.mover = self._opened.rounds.clock.pass_number, self._mover
        self._submitted = 0

    def _tell_left(self, one: Pass, out_of_turn: bool) -> Item:
        assert self._opened is not None
        assert one.number is not None
        contribution = Contribution(
            state=State.LEFT, taken=one.taken, out_of_turn=out_of_turn, extras=Extras(problem=one.problem)
        )
        item = Item(one.number, contribution)
        self._opened.rounds.put(item)
        return item

    def _open(self, flat: FlatBatch | None, device: torch.device | str | None) -> Opened:
        """Meets all ranks once: options, schema; a rank without any batch gets an empty one. Collective."""
        current = self._pass
        if current is None or current.over or current.left:
            current = self.begin()
        if self._opened is not None:
            return self._opened
        self._attempted = current
        if self._opening is None:
            self._process = os.getpid()
            self._opening = begin_opening(
                self._config, flat, counters=self.counters, measured=self.measured, resumes=current.resumed is not None
            )
        try:
            opened = self._opening.result()
        except NoDataError:
            self._opening, current.over = None, True  # on all ranks
            raise
        except Exception:
            self._opening = None
            raise
        self._opened, self._template, self._opening = opened, opened.template, None
        data = None if opened.communicators is None else opened.communicators.data
        self._mover = Mover(data, self.counters, to_gpu=opened.to_gpu)
        load_on_device("cuda" if device is None and opened.to_gpu else device)
        self._enter(current)
        return opened

    def _put(
        self, contribution: Contribution, flats: tuple[FlatBatch, ...], device: torch.device | str | None
    ) -> Ticket:
        """Completes a contribution by what the stream knows, and queues it."""
        current, opened = self._pass, self._opened
        assert current is not None and current.number is not None and opened is not None  # noqa: PT018
        first = next((flat for flat in flats if flat.num_samples), flats[0])
        assert self._template is not None
        extras, samples = contribution.extras, contribution.samples
        if len(samples):
            shared = first.structure.shared
            extras = replace(extras, shared=shared)
            if first.schema is not self._template.schema and first.schema.hash != self._template.schema.hash:
                extras = replace(extras, template=first.empty())
            contribution = replace(contribution, schema=schema_number(first.schema), shared=shared_digest(shared))
        if current.resumed is not None:  # the first round after a state was loaded
            resumed, current.resumed = current.resumed, None
            extras = replace(extras, resumed=resumed.checked(len(samples), opened.options.window, first.schema))
        if (rows := self.measured.take_rows()) is not None and self.measured.learns is not None:
            extras = replace(extras, term_names=tuple(self.measured.learns.terms.names), term_rows=rows)
        if opened.communicators is not None and opened.communicators.peers.shape[1] > 1:
            values = opened.rounds.clock.first_round + self._submitted == 0
            contribution = replace(contribution, copy=_digest(flats, contribution, values=values))
        contribution = replace(contribution, extras=extras, measured=self.measured.take())
        ticket = Ticket(
            item=Item(current.number, contribution), flats=flats, schema=first.schema, measured=self.measured
        )
        self._submitted += 1
        current.submitted(ticket, device)
        opened.rounds.put(ticket.item)
        return ticket

    def _follow_fit(self, cost: object) -> None:
        """Lets a learned cost follow what all ranks' do in the round that is to be submitted."""
        cost = getattr(cost, "function", cost)
        if not isinstance(cost, LearnedCost):
            return
        assert self._opened is not None
        assert self._pass is not None
        if (ticket := self._pass.in_flight(self._opened.options.depth)) is not None:
            self.directive(ticket)  # which may bring the fit of the round to come
        number = self._opened.rounds.clock.first_round + self._submitted
        while self._fits and self._fits[0][0] <= number:
            self._fit = self._fits.popleft()[1]
        cost.fit = self._fit


def _digest(flats: Sequence[FlatBatch], contribution: Contribution, *, values: bool) -> int:
    """64 bits of what ranks that train the same batches must have alike: lengths, and values where asked for."""
    digest = hashlib.blake2b(np.ascontiguousarray(contribution.samples.lengths).tobytes(), digest_size=8)
    for flat in flats if values else ():
        for tensor in flat.tensors:
            if tensor.device.type == "cpu":
                plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
                digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "little") or 1
