"""A loader that yields balanced batches."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from evenkeel.partitioning.splits import SplitSample
from trainer_client.balancing.balancer import Balancer, check_loader
from trainer_client.balancing.batches import BatchSpec, FlatBatch
from trainer_client.balancing.costs.learned import LearnedCost, SummedTerms
from trainer_client.balancing.directive import Directive
from trainer_client.balancing.dividing import Cost
from trainer_client.balancing.errors import NoDataError, ProgramOrderError
from trainer_client.balancing.incoming import Incoming
from trainer_client.balancing.latest import Latest, OfLatest
from trainer_client.balancing.places import Place, Source, sampler_of, tell_epoch
from trainer_client.balancing.redistribution import Pending
from trainer_client.balancing.report import Counters, Reason, RoundReport
from trainer_client.balancing.resume import LoaderState, Resumed, check_resumed, state_for, states_of
from trainer_client.balancing.stream import BatchStream, Pass, Ticket
from trainer_client.checks import is_whole

logger = logging.getLogger(__name__)

B = TypeVar("B")
_NO_MORE: Any = object()
MAX_AHEAD = 64
"""Batches that a pipeline may hold, so far back that a state can be asked for."""


@dataclass(slots=True)
class Position:
    """What has been yielded of a pass.

    Attributes:
        source: Where the wrapped loader was before the first window that was not wholly yielded.
        batches: Of this pass.
        window: What a state keeps of that window, if some of it was yielded; None between two windows.
        fields: Of the window to come, or left, as `Schema.constant_lines`; empty: this rank has no sample of it.
    """

    source: Place | None = None
    batches: int = 0
    window: dict[str, Any] | None = None
    fields: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Window:
    """A window in flight, with those of its batches that have not been started yet, once that is known."""

    ticket: Ticket
    flats: tuple[FlatBatch, ...]
    begin: Place | None
    end: Place
    batches: deque[int] = field(default_factory=deque)


class _Moving(NamedTuple):
    """A batch on its way to the loop."""

    pending: Pending
    report: RoundReport
    splits: tuple[SplitSample, ...]
    position: Position


class BalancedLoader(OfLatest, Generic[B]):
    """Wraps a loader: the same batches, with the samples of all ranks spread evenly over the ranks.

    Costs are submitted `depth` batches ahead and samples move one batch ahead, so that with enough work in a training
    step neither is waited for. All ranks step together until the last one's data has ended: a rank whose data ends
    early gets its share of the others' samples, and a batch may then be empty.

    A loss must weigh samples, not ranks, since ranks may hold different numbers of them: multiply a sum over samples by
    `loss_scale`, and data-parallel averaging of gradients gives the gradient of the mean over the global batch.

    With `BalanceOptions.window` of K batches, the host holds `depth` × K batches, read one a step after the start.

    Attributes:
        summed_terms: Of a `LearnedCost`, of all batches so far, for a `StepTimer`; None where the cost is given.
    """

    def __init__(
        self,
        loader: Iterable[B],
        balancer: Balancer,
        *,
        cost: Cost,
        memory: Cost | None = None,
        spec: BatchSpec | None = None,
        device: torch.device | str | None = None,
        name: str = "train",
        drop_last: bool = False,
    ) -> None:
        """Wraps `loader`.

        Args:
            loader: Any iterable of batches, such as a `DataLoader`, on the host, or on this rank's GPU, where one more
                of them is held; batches are any nesting of dicts, lists, tuples and dataclasses of tensors and TorchRec
                jagged tensors.
            balancer: The balancer of this rank.
            cost: From a batch to one number per sample: its predicted work; of a batch on a GPU also a tensor there.
            memory: From a batch to one number per sample: what the memory caps count; default: its bytes.
            spec: Which fields are flattened, shared, or hold the batch size.
            device: Where the batches shall be; default: where the loader puts them, or this rank's current GPU if the
                process group moves tensors of GPUs only (NCCL alone).
            name: The stream's name; loaders that are used at the same time need different ones.
            drop_last: Drop global batches with fewer samples than ranks (times `BalanceOptions.min_samples`), on all
                ranks: where some rank's data has ended the loops of all end there, and what other ranks have left is
                dropped too. `counters.dropped_samples` counts what was loaded. It holds if any rank's loader has it.

        Raises:
            ValueError: If the balancer is none, a function is none, or the name is no text.
        """
        check_loader(balancer, cost, memory, name)
        self.loader = loader
        self._balancer = balancer
        self._cost = cost
        self.summed_terms = SummedTerms(cost.terms) if isinstance(cost, LearnedCost) else None
        self._memory = memory
        self._spec = spec
        self._device = device
        self._name = name
        self._drop_last = drop_last
        self._latest = Latest(name)
        self._requested: Callable[[], None] = lambda: None
        self._used: BatchStream | None = None  # by the latest loop
        self._resume: LoaderState | None = None  # which the next loop goes on from
        self._positions: deque[Position] = deque([Position()], maxlen=MAX_AHEAD + 1)  # after each batch
        self._finished = False
        self._named_epoch: int | None = None
        self._epoch: int | None = None  # of the latest loop
        self._constant: dict[str, Any] = {}  # what all states of this loop have in common

    def on_request(self, call: Callable[[], None]) -> None:
        """Calls this whenever the loop asks for a batch, in place of what was given before; a `StepTimer` does it."""
        self._requested = call

    def took(
        self,
        seconds: float,
        load: float | None = None,
        *,
        late: float = 0.0,
        loading: float = 0.0,
        loop: float = 0.0,
        terms: NDArray[np.float64] | None = None,
    ) -> None:
        """Notes how long this rank's own computation of a batch took, without waiting for other ranks.

        Ranks that turn out slower than the others get less to do (`BalanceOptions.learn_speeds`), and a `LearnedCost`
        learns what its terms take. Not every batch needs a time; none with split samples is taken, as it has waiting in
        it. `StepTimer(device, loader=loader)` calls it.

        Args:
            seconds: That it took; ignored if that is no positive number.
            load: Of the batch, its `report.own_load`; default: of the batch that was yielded last.
            late: Seconds from the loop's request for the batch until the device had it, without those in which the
                host waited for other ranks (`counters.exposed_seconds`). A rank whose batches come later than the
                others' is named, with the cause.
            loading: Seconds in which the host waited meanwhile for the wrapped loader (`counters.loading_seconds`).
            loop: Seconds from the end of the step before until that request, in which the loop did something else.
            terms: (terms,) of a `LearnedCost`, summed over the batch; default, as for the load: of the latest batch.
        """
        if load is None:
            load = self.report.timed_load
            terms = self.summed_terms.latest if terms is None and self.summed_terms is not None else terms
        self._stream.measured.add(load, seconds, late, loading, loop, terms=terms)

    @property
    def counters(self) -> Counters:
        """Running totals of the stream, also after the balancer was closed."""
        return self._stream.counters

    @property
    def breaker_open(self) -> bool:
        """Whether the lead has stopped asking the service for a while; known on rank 0 alone."""
        return self._stream.breaker_open

    @property
    def _stream(self) -> BatchStream:
        return self._used if self._used is not None else self._balancer.stream(self._name)

    def __len__(self) -> int:
        """Steps that all ranks take together, where the sampler is of this library; else this rank's own batches.

        Ranks with fewer batches of their own take part in more steps than they have.

        Raises:
            TypeError: If that is unknown, as that of other loaders without a length.
        """
        sampler = sampler_of(self.loader)
        return len(self.loader) if sampler is None else sampler.count_steps()  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Tells the wrapped loader which epoch begins, or its samplers and data set, as far as they want to know.

        With the epoch of a state that has been loaded, the next loop goes on within it, and is empty where nothing of
        it is left; with another one, as far as the state tells its epoch, it begins that one.

        Raises:
            ValueError: If it is no whole number.
        """
        if not is_whole(epoch):
            raise ValueError(f"epoch is {epoch!r}; give a whole number")
        tell_epoch(self.loader, epoch)
        self._named_epoch = int(epoch)
        if self._resume is not None:
            self._resume = self._resume.in_epoch(self._named_epoch)

    def state_dict(self, *, ahead: int = 0) -> dict[str, Any]:
        """What has been yielded of this rank's data, as plain values: what is needed to go on from there.

        At any time, from the loop's thread; what was read ahead or is in flight counts as not yielded. A batch counts
        as soon as the loop has it. Of a pass that is over, the state is the beginning of the next. States share what
        they have in common, so change none of them, but a deep copy.

        Args:
            ahead: How many of the batches yielded have not been trained: what a pipeline holds. Where fewer have been
                yielded in the pass, it is the pass's beginning.

        Raises:
            ValueError: If `ahead` is not 0 to 64.
        """
        if self._resume is not None:
            return self._resume.to_state()
        if not self._constant:
            rank, world_size = self._balancer.place
            self._constant = LoaderState(
                name=self._name, rank=rank, world_size=world_size, epoch=self._epoch
            ).to_state()
        # A step's work has thrown all of this out of the caches, so each object that is not touched is time saved.
        position, latest = self._positions[-1], True
        if ahead:
            if not 0 <= ahead <= MAX_AHEAD:
                raise ValueError(f"ahead is {ahead}; use 0 to {MAX_AHEAD} batches that a pipeline holds")
            latest = len(self._positions) == 1
            position = self._positions[max(0, len(self._positions) - 1 - ahead)]
        state = self._constant.copy()
        state["batches"], state["fields"], state["window"] = position.batches, position.fields, position.window
        if (source := position.source) is not None:
            state["source"] = source.plain or source.to_state()
        if self._finished and latest:
            state["finished"] = True
        return state

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]], *, repeat_window: bool = False) -> None:
        """Lets the next loop go on from a state: the first batch is the one that would have come next.

        Call it on all ranks with states of one checkpoint; that they fit together is checked when the loop begins, on
        all ranks alike (`ResumeError`). The same number of ranks goes on bit for bit. Another one can go on if the data
        are those of the whole job: with the samplers of `trainer_client.balancing.sampling`, or a loader that has
        `load_state_dicts(states of all ranks)`.

        Args:
            state: This rank's, of `state_dict`; or those of all ranks by rank, which another number of ranks needs
                where the data are not of the whole job.
            repeat_window: Train the window whole again in which the state was taken, if it was within one: other
                numbers of ranks, options or data cannot divide what is left of it as before.

        Raises:
            ResumeError: If it is not the state of a loader of this name, or this rank cannot go on from it.
        """
        states = states_of(state, self._name)
        if repeat_window:
            states = [one.repeating() for one in states]
        rank, world_size = self._balancer.place
        self._resume = state_for(states, self.loader, rank=rank, world_size=world_size)

    @property
    def dataset(self) -> Any:
        """The wrapped loader's, as the next two are: training frameworks look for them."""
        return self.loader.dataset  # type: ignore[attr-defined]

    @property
    def sampler(self) -> Any:
        """The wrapped loader's sampler."""
        return self.loader.sampler  # type: ignore[attr-defined]

    @property
    def batch_sampler(self) -> Any:
        """The wrapped loader's batch sampler."""
        return self.loader.batch_sampler  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[B]:
        return self._loop()

    def _loop(self) -> Iterator[B]:
        self._requested()
        self._used = stream = self._balancer.stream(self._name)
        current, source = self._begin(stream)
        submitted: deque[_Window] = deque()
        collected: list[Any] = []  # for the next window
        here = self._positions[-1].source  # where the next window begins
        window: _Window | None = None  # the one that is being trained
        directive: Directive | None = None  # of its round
        moving: _Moving | None = None
        batches = self._positions[-1].batches  # whose moves have begun
        has_data = True
        end: Directive | None = None
        try:
            while True:
                stream.check(current)
                left = 0 if window is None else len(window.batches)
                while end is None:
                    held = left + len(collected) + len(submitted) * stream.options.window
                    if held >= stream.options.depth * stream.options.window:
                        break
                    started = time.perf_counter()
                    batch: Any = next(source, _NO_MORE)
                    stream.counters.loading_seconds += time.perf_counter() - started
                    has_data = batch is not _NO_MORE
                    stream.open(batch if has_data else None, self._spec, self._device)
                    collected.append(batch)  # also nothing: a rank that has ended submits when the others do
                    if len(collected) == stream.options.window:
                        begin, here = here, source.place
                        ticket = self._submit(stream, source, [one for one in collected if one is not _NO_MORE])
                        submitted.append(_Window(ticket, ticket.flats, begin, here))
                        collected = []
                upcoming: _Moving | None = None
                while upcoming is None and (left or submitted):
                    if not left:
                        window = submitted.popleft()
                        directive = stream.directive(window.ticket)
                        if directive.ended:  # on all ranks in this round, and so has what was submitted after it
                            current.over, end = True, directive
                            has_data |= any(len(one.ticket.samples) for one in (window, *submitted))
                            submitted.clear()
                            continue
                        window.batches.extend(directive.batches)
                        left = len(window.batches)
                        continue
                    assert window is not None and directive is not None  # noqa: PT018
                    batches += 1
                    upcoming = self._start_next(stream, window, directive, batches)
                    left = len(window.batches)
                if moving is not None:
                    yield self._finish(stream, moving, None if upcoming is None else window)
                    self._requested()
                    self._latest.leave()
                elif upcoming is None and end is not None:  # else all that was in flight has been dropped
                    if end.decision.reason is not Reason.LEFT:
                        self._finish_pass(source.place)
                    if has_data:
                        stream.say_end(end, current.taken)
                    return
                moving = upcoming
        except NoDataError:  # on all ranks
            check_resumed(self._name, [current.resumed])
            self._finish_pass(source.place)
            return
        except ProgramOrderError:  # of this rank's loop alone: nobody waits for its first batch
            raise
        except Exception as error:
            stream.attend(error, self._device)
            raise
        finally:
            current.leave()

    def _begin(self, stream: BatchStream) -> tuple[Pass, Incoming]:
        state, self._resume = self._resume, None
        resumed = None if state is None else state.resumed
        try:
            # forks its workers here, before the stream's first threads start
            batches = Source(self.loader, None if state is None else state.start)
        except Exception as error:
            if resumed is None:
                current = stream.begin()
                stream.attend(error, self._device)
                current.leave()
                raise
            logger.warning("%s: the loader cannot go on from its state", self._name, exc_info=True)
            resumed = Resumed(problem=f"{type(error).__name__}: {error}")  # which all ranks hear of
            batches = Source(())
        current = stream.begin()
        stream.measured.learns = self._cost if isinstance(self._cost, LearnedCost) else None
        self._epoch = self._named_epoch if state is None or self._named_epoch is not None else state.epoch
        self._constant = {}
        current.resumed = resumed
        first = Position(source=batches.place(0))
        if state is not None and resumed is not None and not state.finished:
            first = replace(first, batches=state.batches, fields=list(state.fields), window=state.window)
        self._positions.clear()
        self._positions.append(first)
        self._finished = False
        return current, Incoming(batches, cost=self._cost, memory=self._memory, spec=self._spec)

    def _submit(self, stream: BatchStream, source: Incoming, batches: list[Any]) -> Ticket:
        if not batches:
            return stream.submit_exhausted(self._device, drop_last=self._drop_last)[1]
        return stream.submit_window(
            batches, cost=source.cost, memory=source.memory, spec=self._spec, device=self._device,
            drop_last=self._drop_last,
        )[1]  # fmt: skip

    def _start_next(self, stream: BatchStream, window: _Window, directive: Directive, batches: int) -> _Moving:
        batch = window.batches.popleft()
        pending = stream.start(window.flats, window.ticket, directive, self._device, batch=batch)
        position = Position(source=window.end, batches=batches)
        if window.batches:
            left = {**(directive.extras.window or {}), "left": list(window.batches)}
            position = Position(source=window.begin, batches=batches, window=left)
        return _Moving(pending, directive.reports[batch], directive.splits(batch), position)

    def _finish_pass(self, place: Place) -> None:
        self._positions[-1] = replace(self._positions[-1], source=place, window=None)
        self._finished = True

    def _finish(self, stream: BatchStream, moving: _Moving, following: _Window | None) -> B:
        if following is not None and len(following.ticket.samples):
            moving.position.fields = list(following.ticket.schema.constant_lines)
        started = time.perf_counter()
        batch: B = moving.pending.wait().unflatten(self._spec)
        stream.counters.redistribution_seconds += time.perf_counter() - started
        stream.counters.count(moving.report)
        if self.summed_terms is not None:
            self.summed_terms.add(batch)
        self._latest.give(moving.report, moving.splits)
        self._positions.append(moving.position)
        return batch
