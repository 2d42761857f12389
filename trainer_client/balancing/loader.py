"""A loader that yields balanced batches."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.balancer import Balancer
from trainer_client.balancing.batches import BatchSpec
from trainer_client.balancing.batches.spec import check_spec
from trainer_client.balancing.costs.base import Cost
from trainer_client.balancing.costs.learned import LearnedCost, SummedTerms
from trainer_client.balancing.directive import Directive
from trainer_client.balancing.errors import NoDataError, ProgramOrderError
from trainer_client.balancing.redistribution import Pending
from trainer_client.balancing.report import Counters, Reason, RoundReport
from trainer_client.balancing.resume import LoaderState, Resumed, check_resumed, state_for
from trainer_client.balancing.rounds import Ticket
from trainer_client.balancing.source import Position, Source, sampler_of, tell_epoch
from trainer_client.balancing.splitting import Splits, warn_of_unasked_splits
from trainer_client.balancing.stream import BatchStream, Pass, check_device
from trainer_client.checks import is_whole

logger = logging.getLogger(__name__)

B = TypeVar("B")
_NO_MORE: Any = object()
MAX_AHEAD = 64
"""Batches that a pipeline may hold, so far back that a state can be asked for."""


@dataclass(slots=True)
class _Window:
    """A window in flight, between two positions of the loader."""

    ticket: Ticket
    begin: Position
    end: Position
    done: int = 0  # batches of it that were trained before the state that the loop went on from


@dataclass(frozen=True, slots=True)
class _Moving:
    """A batch on its way to the loop."""

    pending: Pending
    report: RoundReport
    state: LoaderState  # once the loop has it


class BalancedLoader(Generic[B]):
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
        users: Cost | None = None,
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
            users: From a batch to one whole number per sample: whose it is. Samples of a user come to one rank where
                that leaves fewer rows to look up, and no rank more to do (docs/train/loop.md).
            spec: Which fields are flattened, shared, or hold the batch size.
            device: Where the batches shall be; default: where the loader puts them, or this rank's current GPU if the
                process group moves tensors of GPUs only (NCCL alone).
            name: The stream's name; loaders that are used at the same time need different ones.
            drop_last: Drop global batches with fewer samples than ranks (times `BalanceOptions.min_samples`), on all
                ranks: where some rank's data has ended the loops of all end there, and what other ranks have left is
                dropped too. `counters.dropped_samples` counts what was loaded. It holds if any rank's loader has it.

        Raises:
            ValueError: If the balancer is none, a function is none, the spec is no `BatchSpec`, this rank does not have
                the device, or the name is no text.
            TypeError: If the loader is no iterable.
        """
        self._functions: dict[str, Any] = {"cost": cost, "memory": memory, "users": users}
        _check(loader, balancer, self._functions, name)
        check_spec(spec)
        check_device(device)
        self.loader = loader
        self.balancer = balancer
        self.name = name
        self.summed_terms = SummedTerms(cost.terms) if isinstance(cost, LearnedCost) else None
        self._spec, self._device, self._drop_last = spec, device, drop_last
        self._requested: Callable[[], None] = lambda: None
        self._used: BatchStream | None = None  # by the latest loop
        self._report: RoundReport | None = None  # of the latest batch
        self._splits_asked = True
        self._resume: LoaderState | None = None  # which the next loop goes on from
        self._states = deque([LoaderState(name=name)], maxlen=MAX_AHEAD + 1)  # after each batch of the latest pass
        self._finished = False
        self._named_epoch: int | None = None
        self._epoch: int | None = None  # of the latest loop

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
    def report(self) -> RoundReport:
        """What balancing did for the batch that was yielded last."""
        if self._report is None:
            raise RuntimeError("no batch has been yielded yet; report tells about the latest batch")
        return self._report

    @property
    def splits(self) -> Splits:
        """Samples of the batch that was yielded last that lie on several ranks, those of all ranks; mostly none.

        See `BalanceOptions.split`, and `trainer_client.attention.PieceGroup`, which takes them. A loop that does not
        ask for them is warned.
        """
        self._splits_asked = True
        return () if self._report is None else self._report.splits

    @property
    def loss_scale(self) -> float:
        """World size over the samples of the global batch: the factor for a loss that is a sum over samples.

        It is that of the batch that was yielded last: what fetches batches ahead takes `balanced_batches(loader)`.
        """
        return self.report.loss_scale

    @property
    def mean_loss_scale(self) -> float:
        """The factor for a loss that is a mean over this rank's samples; see `RoundReport.mean_loss_scale`."""
        return self.report.mean_loss_scale

    @property
    def counters(self) -> Counters:
        """Running totals of the stream, also after the balancer was closed."""
        return self._stream.counters

    @property
    def _stream(self) -> BatchStream:
        return self._used if self._used is not None else self.balancer.stream(self.name)

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
        as soon as the loop has it. Of a pass that is over, the state is the beginning of the next.

        Args:
            ahead: How many of the batches yielded have not been trained: what a pipeline holds. Where fewer have been
                yielded in the pass, it is the pass's beginning.

        Raises:
            ValueError: If `ahead` is not 0 to 64.
        """
        if not 0 <= ahead <= MAX_AHEAD:
            raise ValueError(f"ahead is {ahead}; use 0 to {MAX_AHEAD} batches that a pipeline holds")
        if self._resume is not None:
            return self._resume.to_state()
        state = self._states[max(0, len(self._states) - 1 - ahead)]
        rank, world_size = self.balancer.rank_and_size
        finished = self._finished and state is self._states[-1]
        return replace(state, rank=rank, world_size=world_size, epoch=self._epoch, finished=finished).to_state()

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
        rank, world_size = self.balancer.rank_and_size
        self._resume = state_for(
            state, self.loader, name=self.name, rank=rank, world_size=world_size, repeat_window=repeat_window
        )

    def __getattr__(self, name: str) -> Any:
        """The wrapped loader's data set and samplers, for which training frameworks look."""
        if name in ("dataset", "sampler", "batch_sampler"):
            return getattr(self.loader, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __iter__(self) -> Iterator[B]:
        self._requested()
        loop = _Loop(self)
        moving: _Moving | None = None
        try:
            while True:
                loop.read_ahead()
                following = loop.start_next()
                if moving is not None:
                    yield self._finish(loop.stream, moving)
                    self._requested()
                    if self.report.splits and not self._splits_asked:
                        warn_of_unasked_splits(self.name)
                elif following is None and loop.end is not None:  # else all that was in flight has been dropped
                    if loop.failures:
                        raise loop.failures.pop()  # whose traceback leads to the loop: not to be kept there
                    if loop.end.decision.reason is not Reason.LEFT:
                        self._finish_pass(loop.source)
                    return
                moving = following
        except NoDataError:  # on all ranks
            check_resumed(self.name, [loop.current.resumed])
            self._finish_pass(loop.source)
        except ProgramOrderError:  # of this rank's loop alone: nobody waits for its first batch
            raise
        except Exception as error:
            loop.stream.attend(error, self._device)
            raise
        finally:
            loop.current.leave()

    def _finish(self, stream: BatchStream, moving: _Moving) -> B:
        started = time.perf_counter()
        batch: B = moving.pending.wait().unflatten(self._spec)
        counters, report = stream.counters, moving.report
        counters.redistribution_seconds += time.perf_counter() - started
        counters.own_load += 0.0 if math.isnan(report.own_load) else report.own_load
        counters.split_samples += report.split_samples
        if self.summed_terms is not None:
            self.summed_terms.add(batch)
        self._report, self._splits_asked = report, False
        self._states.append(moving.state)
        return batch

    def _finish_pass(self, source: Source) -> None:
        self._states[-1] = replace(self._states[-1], source=source.position, window=None)
        self._finished = True


class _Loop:
    """One iteration over a loader: windows are read and submitted ahead, and moves are started a batch ahead.

    Attributes:
        stream: The stream.
        current: Its pass.
        source: This rank's own batches.
        end: The directive that has ended the pass; None before that.
        failures: Why this rank's data has ended too early, if it has; the loop raises it at the step where all ranks'
            loops end, as ranks also meet in the model.
    """

    def __init__(self, loader: BalancedLoader[Any]) -> None:
        self._loader = loader
        self.stream = loader._used = loader.balancer.stream(loader.name)
        self.end: Directive | None = None
        self.failures: list[Exception] = []
        self._submitted: deque[_Window] = deque()
        self._collected: list[Any] = []  # for the next window; also nothing, as a rank that has ended submits too
        self._window: _Window | None = None  # the one whose batches are being started
        state, loader._resume = loader._resume, None
        resumed = None if state is None else state.resumed
        try:
            # forks its workers here, before the stream's first threads start
            self.source = self._source(loader.loader, None if state is None else state.start)
        except Exception as error:
            if resumed is None:
                current = self.stream.begin()
                self.stream.attend(error, loader._device)
                current.leave()
                raise
            logger.warning("%s: the loader cannot go on from its state", loader.name, exc_info=True)
            resumed = Resumed(problem=f"{type(error).__name__}: {error}")  # which all ranks hear of
            self.source = self._source((), None)
        self.current: Pass = self.stream.begin()
        self.current.resumed = resumed
        cost = loader._functions["cost"]
        self.stream.measured.learns = cost if isinstance(cost, LearnedCost) else None
        loader._epoch = loader._named_epoch if state is None or loader._named_epoch is not None else state.epoch
        loader._finished = False
        self._here = self.source.position  # where the next window begins
        begin = LoaderState(name=loader.name, source=self._here)
        if state is not None and resumed is not None and not state.finished:
            begin = replace(begin, batches=state.batches, window=state.window)
        loader._states.clear()
        loader._states.append(begin)
        self._batches = begin.batches  # whose moves have begun
        self._skipped = 0 if begin.window is None else int(begin.window["done"])  # of the first window

    def _source(self, batches: Any, start: Position | None) -> Source:
        loader = self._loader
        functions = [one for one in loader._functions.values() if one is not None]
        return Source(batches, start, functions=functions, spec=loader._spec)

    def read_ahead(self) -> None:
        """Reads and submits until `depth` windows are in flight; raises if this loop is no longer the stream's."""
        stream = self.stream
        stream.check(self.current)
        left = 0 if self._window is None else len(self._window.ticket.left)
        while self.end is None and not self.failures:
            options = stream.options
            ahead = left + len(self._collected) + len(self._submitted) * options.window
            if ahead >= options.depth * options.window:
                return
            try:
                self._read()
            except Exception as error:
                rounds = self.current.rounds
                if rounds is None or self.current.left:
                    raise
                logger.error("%s: %r; all ranks end after what was submitted before", self._loader.name, error)
                self.failures.append(error)
                stream.attend(error)
                self._submitted.append(_Window(self.current.announce_end(rounds), self._here, self._here))

    def _read(self) -> None:
        """Reads a batch, and submits the window that it completes."""
        stream, loader, source = self.stream, self._loader, self.source
        started = time.perf_counter()
        batch: Any = next(source, _NO_MORE)
        stream.counters.loading_seconds += time.perf_counter() - started
        stream.open([] if batch is _NO_MORE else [batch], loader._spec, loader._device)
        self._collected.append(batch)
        if len(self._collected) < stream.options.window:
            return
        end = source.position
        batches = [one for one in self._collected if one is not _NO_MORE]
        ticket = stream.submit_window(
            batches, spec=loader._spec, device=loader._device, drop_last=loader._drop_last, **loader._functions
        )
        begin, self._here, self._collected = self._here, end, []
        self._submitted.append(_Window(ticket, begin, self._here, done=self._skipped))
        self._skipped = 0

    def start_next(self) -> _Moving | None:
        """Starts to move the batch that is next; None if nothing is left that was submitted."""
        while self._window is None or not self._window.ticket.left:
            if not self._submitted:
                return None
            self._window = self._submitted.popleft()
            directive = self.stream.directive(self._window.ticket)
            if directive.ended:  # on all ranks in this round, and so has what was submitted after it
                self.end = directive
                self._submitted.clear()
                return None
        window, ticket = self._window, self._window.ticket
        directive, batch = ticket.future.result(), ticket.left[0]
        pending = self.stream.start(ticket, self._loader._device)
        self._batches += 1
        state = LoaderState(name=self._loader.name, source=window.end, batches=self._batches)
        if ticket.left:
            for_states = {**(directive.broadcast.for_states or {}), "done": window.done + ticket.started}
            state = replace(state, source=window.begin, window=for_states)
        return _Moving(pending, directive.reports[batch], state)


def _check(loader: object, balancer: object, functions: dict[str, object], name: object) -> None:
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"loader is {loader!r}; give an iterable of batches, such as a DataLoader")
    if not isinstance(balancer, Balancer):
        raise ValueError(
            f"balancer is {balancer!r}; make one with Balancer.connect(address), Balancer.embedded() or "
            "Balancer.from_env()"
        )
    for name_of, function in functions.items():
        if not callable(function) and (name_of == "cost" or function is not None):
            raise ValueError(f"{name_of} is {function!r}; give a function from a batch to one number per sample")
    if not isinstance(name, str) or not name:
        raise ValueError(f"name is {name!r}; name the loader by a text, such as 'train'")
