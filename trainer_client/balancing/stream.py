"""One stream of batches of a group of ranks: submit early, redistribute late; in passes, of which each is one loop.

Samples move by collectives, which meet in the order in which each rank starts them. So every round that moves must have
its move started by every rank, once, in the order of the rounds. A loop does so while it goes on; for a rank that has
left its loop, `Pass.leave` does it, and drops what arrives.
"""

from __future__ import annotations

import _thread
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trainer_client.balancing.batches import BatchSpec, FlatBatch, flatten
from trainer_client.balancing.batches.schema import digest as shared_digest
from trainer_client.balancing.contribution import Contribution, Extras, State, schema_number
from trainer_client.balancing.costs.base import Cost
from trainer_client.balancing.costs.learned import LearnedCost
from trainer_client.balancing.decide import Decision
from trainer_client.balancing.directive import Directive
from trainer_client.balancing.errors import NoDataError, out_of_order, used_after, used_closed
from trainer_client.balancing.opening import Opening
from trainer_client.balancing.options import BalanceOptions, StreamConfig
from trainer_client.balancing.reading import Measured, digest_of_copy, read_round
from trainer_client.balancing.redistribution import Pending, cut, load_on_device, pick
from trainer_client.balancing.redistribution import start as start_moving
from trainer_client.balancing.report import Counters, Reason
from trainer_client.balancing.resume import Resumed
from trainer_client.balancing.rounds import Rounds, Ticket
from trainer_client.balancing.splitting import warn_of_unasked_splits
from trainer_client.balancing.windows import check_window

logger = logging.getLogger(__name__)

Device = torch.device | str | None

CLOSE_SECONDS = 5.0
LEAVE_SECONDS = 1.0
"""How long a rank that leaves waits for the others to come to its last rounds, before a thread does it for it.

Within it the last moves come before whatever the program does next, on all ranks alike, which NCCL wants."""


class Pass:
    """One `iter(loader)`, or one loop of the user's own, on this rank."""

    def __init__(self, counters: Counters, patience: float, *, by_hand: bool = False) -> None:
        self.rounds: Rounds | None = None  # once the stream is
        self.number, self.submitted = -1, 0  # of the pass in its stream, on all ranks alike; of its rounds
        self.by_hand = by_hand  # submissions of the user's own, not an iterator
        self.over = False  # the loop has seen its end, which came on all ranks in the same round
        self.attempted = False  # it has tried to open the stream
        self.left, self.problem = False, ""  # this rank has left the loop, and why, for the others to hear
        self.resumed: Resumed | None = None  # from where it goes on, until its first round
        self.latest: Ticket | None = None  # whose batch was started last
        self.failure: BaseException | None = None  # of its last rounds, after it was left, for the next pass to raise
        self.move_failed = False  # so that ranks do not meet any more
        self._counters, self._patience = counters, patience  # seconds that a round may take
        self._tickets: deque[Ticket] = deque()  # submitted, and not wholly started
        self._moves: deque[Pending] = deque()  # started, and not waited for when it was last looked
        self.started = 0  # batches whose move the loop has started
        self._device: Device = None  # where batches go; None: where they are
        self._farewell: Ticket | None = None  # by which the lead hears that this rank has left
        self._drained = threading.Event()
        self._leaver: threading.Thread | None = None
        self._owner, self._process = threading.get_ident(), os.getpid()

    def enter(self, rounds: Rounds) -> None:
        """Numbers the pass, on all ranks alike."""
        self.rounds, self.number, self.submitted = rounds, rounds.clock.pass_number, 0

    @property
    def next_round(self) -> int:
        """The number of the round that is submitted next."""
        return -1 if self.rounds is None else self.rounds.clock.first_round + self.submitted

    @property
    def taken(self) -> int:
        """Batches that the loop has got."""
        while self._moves and self._moves[0].landed:
            self._moves.popleft()
        return self.started - len(self._moves)

    def in_flight(self, depth: int) -> Ticket | None:
        """The ticket that was submitted so many before the next one, if it has not been started."""
        return self._tickets[-depth] if len(self._tickets) >= depth else None

    def submit(self, ticket: Ticket, device: Device) -> None:
        """Contributes to the next round."""
        assert self.rounds is not None
        self.submitted += 1
        self._tickets.append(ticket)
        self._device = self._device if device is None else device
        self.rounds.put(ticket)

    def start(self, ticket: Ticket, device: Device) -> Pending:
        """Starts the move of a ticket's next batch; tickets come in the order of their submission."""
        assert self.rounds is not None
        while self._tickets and self._tickets[0] is not ticket and _is_dropped(self._tickets[0]):
            self._forget()
        if not self._tickets or self._tickets[0] is not ticket:
            self.leave(out_of_order=True)
            raise out_of_order(self.rounds.communicators.rank)
        for flat in ticket.flats:
            flat.check_unchanged()
        self._device = self._goes_to(ticket.flats, device)
        _ = self.taken  # lets go of batches that the loop has got
        self.latest = ticket
        pending = self._start(ticket)
        self.started += 1
        self._moves.append(pending)
        return pending

    def leave(self, *, out_of_order: bool = False) -> None:
        """Leaves the loop: the pass ends on all ranks, and what they agreed on before is done with.

        Returns within about `LEAVE_SECONDS`; what is left to do then is done in the background. Called again, it does
        nothing. A generator that nothing refers to any more calls it from wherever it is collected: it takes no locks.
        """
        if self.left or os.getpid() != self._process:
            return
        self.left = True
        if self.rounds is not None and not self.over and self._farewell is None:
            self.announce_end(self.rounds, out_of_order=out_of_order)
        _ = self.taken
        while self._tickets and _moves_nothing(self._tickets[0]):
            self._forget()
        if not (self._tickets or self._moves or self._farewell):
            self._drained.set()
            return
        try:
            if self._device is None:
                self._device = self._goes_to(self._tickets[0].flats if self._tickets else (), None)
            if not _is_here(self._device):
                self._device = torch.device("cpu")  # where all can be dropped
            since = _queued_by_now(self._device)
            leaver = threading.Thread(target=self._drain, args=(since,), name="evenkeel-leave", daemon=True)
            leaver.start()
            self._leaver = leaver
        except RuntimeError:  # the interpreter is ending, and with it the job
            self._drained.set()
            return
        if threading.get_ident() == self._owner:
            self._drained.wait(LEAVE_SECONDS)

    def announce_end(self, rounds: Rounds, *, out_of_order: bool = False) -> Ticket:
        """Tells the lead that this rank's data ends the loops of all ranks; batches submitted before are trained."""
        self._farewell = _farewell(self.number, self.problem, taken=self.taken, out_of_order=out_of_order)
        rounds.put(self._farewell)
        return self._farewell

    def settle(self, seconds: float | None = None) -> bool:
        """Waits until nothing of a pass that was left is in flight on this rank, or its last moves have failed."""
        settled = self._drained.wait(seconds)
        if settled and self._leaver is not None:
            self._leaver.join()  # which has nothing left to do
        return settled

    def _drain(self, since: tuple[torch.device, torch.cuda.Event] | None) -> None:
        """Starts and waits for the moves that are left; drops what arrives."""
        farewell = None if self._farewell is None else self._farewell.future
        try:
            with _beside(since):
                for pending in list(self._moves):
                    pending.wait()
                while self._tickets:
                    ticket = self._tickets[0]
                    if self.rounds is not None:
                        self.rounds.want(ticket)  # the others wait for what was agreed on
                    if (error := ticket.future.exception(self._patience)) is not None:
                        # The end on all ranks, of which the loop may have heard.
                        self.failure = None if self.over else error
                        break
                    directive = ticket.future.result()
                    if directive.ended:
                        break
                    if not directive.moves:
                        self._forget()
                        continue
                    self._start(ticket).wait()
            if farewell is not None:
                farewell.exception(self._patience)
        except BaseException as error:
            logger.debug("the last moves of a loop that was left: %s", error)
            self.failure, self.move_failed = error, True
            if farewell is not None:
                with suppress(TimeoutError):  # the others may still hear of it
                    farewell.exception(LEAVE_SECONDS)
        finally:
            while self._tickets:
                self._forget()
            self.started -= len(self._moves)
            self._moves.clear()
            self._drained.set()

    def _forget(self) -> None:
        """Lets go of a ticket, and of its batches."""
        self._tickets.popleft().flats = ()

    def _start(self, ticket: Ticket) -> Pending:
        assert self.rounds is not None
        directive, flats, batch = ticket.future.result(), ticket.flats, ticket.left[0]
        is_empty = not directive.reports[batch].samples  # on all ranks
        template = flats[0].empty() if is_empty and flats else directive.template
        assert template is not None
        ticket.started += 1
        if not ticket.left:
            self._forget()
        began = time.perf_counter()
        samples, piece = _samples_of(directive, flats, batch, template), directive.plan.slices[batch]
        if is_empty:  # it may have other fields than the batches before it, of which the directive knows nothing
            piece = replace(piece, source_totals=np.zeros((len(piece.sources), samples.num_jagged), np.int64))
        if (cuts := directive.plan.cuts_in(batch)) is not None:
            samples = cut(samples, cuts)
        group = self.rounds.communicators.data if directive.moves else None
        pending = start_moving(samples, piece, group=group, device=self._device)
        self._counters.redistribution_seconds += time.perf_counter() - began
        return pending

    def _goes_to(self, flats: Sequence[FlatBatch], device: Device) -> torch.device | None:
        """Where the result of a move is; None where the batch is, if nobody knows yet where that is."""
        if device is None:
            to_gpu = self.rounds is not None and self.rounds.to_gpu
            return _gpu_of(flats) if to_gpu else next((one.device for one in flats if one.device is not None), None)
        where = torch.device(device)
        return torch.device("cuda", torch.cuda.current_device()) if where == torch.device("cuda") else where


class BatchStream:
    """Rounds of one loader, in passes: each is one loop over batches, and ends on all ranks in the same round.

    All ranks submit and redistribute their batches in the same order. A rank whose data ends goes on with
    empty submissions; one that leaves its loop says so with `leave`, and the loops of all ranks end.
    """

    def __init__(self, config: StreamConfig) -> None:
        self._config = config
        self._pass: Pass | None = None
        self._rounds: Rounds | None = None
        self._opening: Opening | None = None
        self._unopened: list[str] = []  # why loops were over before the stream was open, as interrupted ones
        self._process = os.getpid()
        self._logged_end = False
        self.counters, self.measured = Counters(), Measured()

    def __del__(self) -> None:
        rounds: Rounds | None = getattr(self, "_rounds", None)
        # In the background, as closing waits for other ranks; from wherever it is collected, so without locks.
        if rounds is None or os.getpid() != self._process or sys.is_finalizing():
            return
        if len(rounds.communicators.peers) > 1:
            rounds.communicators.closed = True
            with suppress(RuntimeError):  # no thread to be had
                _thread.start_new_thread(self.close, ())

    @property
    def options(self) -> BalanceOptions:
        """Rank 0's options once the stream is open, before that this rank's."""
        return self._config.options if self._rounds is None else self._rounds.options

    def begin(self, *, by_hand: bool = False) -> Pass:
        """Begins a pass, after leaving the one before if that has not ended; a submission does so where there is none.

        Waits until the pass before has ended on all ranks and nothing of it is in flight, or raises `TimeoutError`.
        """
        before = self._pass
        if before is not None:
            before.leave()
            if not before.settle(self.options.patience):
                raise TimeoutError(f"{self._config.loader}: the loop before has not ended on all ranks")
            if before.failure is not None:
                raise before.failure
            if before.rounds is None and not before.over:
                self._unopened.append(before.problem)
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if self._rounds is not None and self._rounds.world is not world:
            self.close()  # of a process group that is no more, or of the time before there was one
        self._pass = Pass(self.counters, self.options.patience, by_hand=by_hand)
        if self._rounds is not None:
            self._enter(self._pass, self._rounds)
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

    def attend(self, error: Exception, device: Device = None) -> None:
        """Tells the other ranks what has ended this rank's loop; opens the stream for that, as they wait for it."""
        current = self._pass
        if current is None or current.left:
            return
        current.problem = f"{type(error).__name__}: {error}"
        if self._rounds is not None or current.attempted:
            return
        logger.error(
            "%s: this rank's first batch cannot be read (%s); the loops of all ranks end", self._config.loader,
            current.problem,
        )  # fmt: skip
        try:
            self._open(None, device)
        except Exception as other:
            logger.debug("%s: the stream did not open: %s", self._config.loader, other)

    def open(self, batches: Sequence[Any], spec: BatchSpec | None, device: Device) -> None:
        """Meets all ranks, unless they have, as the first submission does; `batches` come later. Collective."""
        if self._rounds is None:
            self._open(flatten(batches[0], spec) if batches else None, device)

    def submit_window(
        self,
        batches: Sequence[Any],
        *,
        cost: Cost,
        memory: Cost | None = None,
        users: Cost | None = None,
        spec: BatchSpec | None = None,
        device: Device = None,
        drop_last: bool = False,
    ) -> Ticket:
        """Announces batches that are balanced together: costs and lengths go to the lead, nothing moves yet.

        The first submission opens the stream, which is collective. Later ones return at once.

        Args:
            batches: Of the host, in the order in which they are to be trained, no more than the options have balanced
                together; none after this rank's data has ended, as long as other ranks have some.
            cost: From a batch to the predicted work of each sample.
            memory: From a batch to what each sample adds to the memory caps; default: its bytes.
            users: From a batch to whose each sample is; see `BalancedLoader`.
            spec: How to read the batches' fields.
            device: Where the batches will be trained.
            drop_last: Drop a global batch with too few samples for all ranks; see `BalancedLoader`.

        Raises:
            ValueError: If the batches or their costs cannot be read, which the message names, or are too many.
            NoDataError: If no rank has ever had a batch; on all ranks.
        """
        if not batches:
            flat = self._open(None, device).template
            return self._submit(Contribution(state=State.EXHAUSTED, drop_last=drop_last), (flat,), device)
        try:
            flats = tuple(flatten(batch, spec) for batch in batches)
        except Exception as error:
            self.attend(error, device)
            raise
        for flat in flats:
            flat.watch()
        rounds = self._open(_first_of(flats), device)
        check_window(flats, rounds.options)
        if isinstance(cost, LearnedCost):
            self._follow_fit(cost)
        samples, problem = read_round(
            batches, flats, template=rounds.template, cost=cost, memory=memory, users=users, options=rounds.options,
            num_ranks=len(rounds.communicators.peers),
        )  # fmt: skip
        contribution = Contribution(
            samples=samples, drop_last=drop_last, invalid=bool(problem), extras=Extras(problem=problem)
        )
        return self._submit(contribution, flats, device)

    def directive(self, ticket: Ticket) -> Directive:
        """What this rank is to do with a round; waits for it, and raises what has ended the rounds."""
        directive = self._wait(ticket)
        if directive.ended and (current := self._ended(ticket)) and ticket.contribution.state is State.DATA:
            self._say_end(current, directive.decision)
        return directive

    def _wait(self, ticket: Ticket) -> Directive:
        """Waits for a directive, of which the loop may not hear yet."""
        if not ticket.future.done() and self._rounds is not None:
            self._rounds.want(ticket)
        started = time.perf_counter()
        try:
            return ticket.future.result(self.options.patience)
        except TimeoutError:
            if ticket.future.done():
                raise
            raise TimeoutError(
                f"{self._config.loader}: the ranks did not come to round {max(ticket.number, 0)} in time; a rank whose "
                "data has ended goes on with submit(None), and one that leaves its loop calls leave()"
            ) from None
        except Exception:
            if ticket.future.done() and ticket.future.exception() is not None:  # else this loop is interrupted
                self._ended(ticket)
            raise
        finally:
            self.counters.exposed_seconds += time.perf_counter() - started

    def _ended(self, ticket: Ticket) -> Pass | None:
        """The pass whose loop now sees its end on all ranks, in the round of a ticket; None if that is no news."""
        current = self._pass
        if current is None or current.over or current.number != ticket.pass_number:
            return None
        current.over = True
        return current

    def start(self, ticket: Ticket, device: Device = None) -> Pending:
        """Starts to move the samples of a round's next batch as the lead has directed: called once for each, in order.

        Args:
            ticket: What `submit_window` returned; `directive(ticket).batches` are those that are trained.
            device: Where the result shall be; default: where the batch is.

        Returns:
            The move in flight; its `wait()` gives the batch that this rank trains, sorted by (home, index at home).
        """
        if self.directive(ticket).ended:
            raise RuntimeError(f"the loop over {self._config.loader!r} has ended on all ranks; nothing moves any more")
        current = self._pass
        if current is None:
            raise used_closed(self._config.loader)
        if current.left or ticket.pass_number != current.number:
            raise used_after(self._config.loader)
        latest = current.latest if current.by_hand else None
        if latest is not None and latest.unasked and latest.report.splits:
            warn_of_unasked_splits(self._config.loader)
        return current.start(ticket, device)

    def _say_end(self, current: Pass, decision: Decision) -> None:
        """Says of a loop that ends if that is because another rank has left its own, while this one had data.

        Time limits end evaluations so every time: a warning on one rank, once, is enough for those who wonder.
        """
        if current.rounds is None or decision.reason is not Reason.LEFT:
            return
        rank = current.rounds.communicators.rank
        first = next((other for other in range(rank) if other not in decision.ranks), rank)
        quiet = (self._logged_end or rank != first) and not decision.problem
        logger.log(
            logging.INFO if quiet else logging.WARNING,
            "%s: rank %d has left its loop%s, which ends the loops of all ranks, this one after %d; batches loaded "
            "ahead are dropped", self._config.loader, decision.ranks[0],
            f" ({decision.problem})" if decision.problem else f" after {decision.taken} batches", current.started,
        )  # fmt: skip
        self._logged_end = True

    def close(self) -> None:
        """Leaves the loop and ends the threads; the process groups are kept for the next stream of these ranks."""
        current, self._pass = self._pass, None
        rounds, self._rounds = self._rounds, None
        opening, self._opening = self._opening, None
        if rounds is None and opening is not None:  # of a loop that was interrupted
            with suppress(Exception):
                rounds = opening.rounds if opening.error(CLOSE_SECONDS) is None else None
        if rounds is None:
            return
        rounds.communicators.closed = True
        if current is not None and current.rounds is None:
            self._unopened.append(current.problem)
        with suppress(TimeoutError):
            self._leave_unopened(rounds, CLOSE_SECONDS / 2)
        if current is not None:
            current.leave()

        def end(seconds: float | None = None) -> bool:
            if current is not None:
                if not current.settle(seconds):
                    return False
                if current.failure is not None and current.move_failed:
                    rounds.fail(current.failure)  # wakes who waits for collectives to which nobody comes
            if not rounds.close(seconds):
                return False
            rounds.communicators.release()
            return True

        if not end(CLOSE_SECONDS / 2):
            threading.Thread(target=end, name=f"evenkeel-{self._config.loader}-close", daemon=True).start()

    # ------------------------------------------------------------------ inside

    def _open(self, flat: FlatBatch | None, device: Device) -> Rounds:
        """Meets all ranks once: options, schema; a rank without any batch gets an empty one. Collective."""
        current = self._pass
        if current is None or current.over or current.left:
            current = self.begin()
        if self._rounds is not None:
            return self._rounds
        current.attempted = True
        if self._opening is None:
            self._process, measured = os.getpid(), self.measured  # not this stream, which its lead must not keep
            self._opening = Opening(
                self._config, flat, counters=self.counters, learns=lambda: measured.learns,
                resumes=current.resumed is not None,
            )  # fmt: skip
        if (error := self._opening.error()) is not None:  # while it waits, anything may interrupt it
            self._opening = None
            current.over |= isinstance(error, NoDataError)  # on all ranks
            raise error
        self._rounds = self._opening.rounds
        self._opening = None
        self._enter(current, self._rounds)  # before what may fail here, as the others are in it and are to hear of it
        load_on_device("cuda" if device is None and self._rounds.to_gpu else device)
        return self._rounds

    def _enter(self, current: Pass, rounds: Rounds) -> None:
        self._leave_unopened(rounds, self.options.patience)
        current.enter(rounds)

    def _leave_unopened(self, rounds: Rounds, seconds: float) -> None:
        """Leaves loops that were over here before the stream was open, where others may be: one by one."""
        while self._unopened:
            farewell = _farewell(rounds.clock.pass_number, self._unopened.pop(0))
            rounds.put(farewell)
            try:
                farewell.future.exception(seconds)
            except TimeoutError:
                raise TimeoutError("an interrupted loop has not ended on all ranks") from None

    def _submit(self, contribution: Contribution, flats: tuple[FlatBatch, ...], device: Device) -> Ticket:
        """Completes a contribution by what the stream knows, and contributes it."""
        current, rounds = self._pass, self._rounds
        assert current is not None and rounds is not None  # noqa: PT018
        first, template = _first_of(flats), rounds.template
        facts: dict[str, Any] = {"measured": self.measured.take()}
        extras: dict[str, Any] = {}
        if len(contribution.samples):
            extras["shared"] = shared = first.describe_shared()
            if first.schema is not template.schema and first.schema.hash != template.schema.hash:
                extras["template"] = first.empty()
            facts |= {"schema": schema_number(first.schema), "shared": shared_digest(shared)}
        if current.resumed is not None:  # the first round after a state was loaded
            extras["resumed"], current.resumed = current.resumed, None
        if (learned := self.measured.learns) is not None and (rows := self.measured.take_rows()) is not None:
            extras |= {"term_names": tuple(learned.terms.names), "term_rows": rows}
        if rounds.communicators.peers.shape[1] > 1:
            facts["copy"] = digest_of_copy(flats, contribution, values=current.next_round == 0)
        contribution = replace(contribution, extras=replace(contribution.extras, **extras), **facts)
        ticket = Ticket(current.number, contribution, flats, self.measured)
        current.submit(ticket, device)
        return ticket

    def _follow_fit(self, cost: LearnedCost) -> None:
        """Lets a learned cost follow what all ranks' do in the round that is to be submitted."""
        assert self._rounds is not None
        assert self._pass is not None
        if (ticket := self._pass.in_flight(self._rounds.options.depth)) is not None:
            self._wait(ticket)  # whose directive may bring the fit of the round to come
        cost.fit = self._rounds.fit_at(self._pass.next_round)


def _farewell(pass_number: int, problem: str, *, taken: int = 0, out_of_order: bool = False) -> Ticket:
    """By which the lead hears that this rank has left a pass."""
    extras = Extras(problem=problem)
    return Ticket(pass_number, Contribution(state=State.LEFT, taken=taken, out_of_order=out_of_order, extras=extras))


def check_device(device: Any) -> None:
    """Raises `ValueError` if batches cannot be put there by this rank."""
    try:
        here = _is_here(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}; give 'cpu', 'cuda' or 'cuda:N', or leave it out") from error
    if not here:
        raise ValueError(
            f"device is {str(device)!r}, and this rank sees {torch.cuda.device_count()} GPUs; give one that it has, or "
            "'cpu', or leave device out: batches then stay where the loader puts them"
        )


def _is_here(device: Device) -> bool:
    """Whether this rank has a device; asks without a CUDA context, as workers may be forked later."""
    where = None if device is None else torch.device(device)
    return where is None or where.type != "cuda" or (where.index or 0) < torch.cuda.device_count()


def _first_of(flats: Sequence[FlatBatch]) -> FlatBatch:
    """The first that has samples, if one does: an empty one tells little of its fields."""
    return next((flat for flat in flats if flat.num_samples), flats[0])


def _is_dropped(ticket: Ticket) -> bool:
    """Whether nobody trains anything of a round that takes place."""
    directive = ticket.directive
    return directive is not None and not directive.ended and not directive.batches


def _moves_nothing(ticket: Ticket) -> bool:
    """Whether nothing of a round is left to do: it has ended, or every sample stays at home."""
    directive = ticket.directive
    return directive is not None and (directive.ended or not directive.moves)


def _samples_of(directive: Directive, flats: Sequence[FlatBatch], batch: int, template: FlatBatch) -> FlatBatch:
    """This rank's samples that are trained in a batch of the round, whichever rank trains them."""
    if batch < len(flats) and not (directive.reports[batch].samples or flats[batch].num_samples):
        return flats[batch]  # as it was loaded: no rank knows better
    steps = directive.plan.steps
    if steps is None:
        return flats[batch] if batch < len(flats) and flats[batch].num_samples else template
    begins = np.cumsum([0, *(flat.num_samples for flat in flats)])
    chosen = [np.flatnonzero(steps[begins[i] : begins[i + 1]] == batch) for i in range(len(flats))]
    some = [i for i, samples in enumerate(chosen) if samples.size]
    return pick([flats[i] for i in some], [chosen[i] for i in some]) if some else template


def _gpu_of(flats: Sequence[FlatBatch]) -> torch.device:
    device = next((flat.device for flat in flats if flat.num_samples), None)
    if device is not None and device.type == "cuda":
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _queued_by_now(device: Device) -> tuple[torch.device, torch.cuda.Event] | None:
    """The point that a device's current stream has come to; None on the host."""
    if device is None or torch.device(device).type != "cuda":
        return None
    current = torch.cuda.current_stream(torch.device(device))
    return current.device, current.record_event()


@contextmanager
def _beside(since: tuple[torch.device, torch.cuda.Event] | None) -> Iterator[None]:
    """Work on a stream of its own, after what was queued then; what the program has queued since may wait for it."""
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
