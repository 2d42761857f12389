"""A loader that yields balanced batches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from trainer_client.balancing.agreement import Verdict
from trainer_client.balancing.balancer import Balancer
from trainer_client.balancing.batches import BatchSpec, FlatBatch
from trainer_client.balancing.incoming import Incoming
from trainer_client.balancing.opening import NoDataError
from trainer_client.balancing.passes import Pass
from trainer_client.balancing.redistribution import Pending
from trainer_client.balancing.report import Counters, RoundReport
from trainer_client.balancing.stream import BatchStream
from trainer_client.balancing.tickets import Cost, Ticket

B = TypeVar("B")
_NO_MORE: Any = object()


class BalancedLoader(Generic[B]):
    """Wraps a loader: the same batches, with the samples of all ranks spread evenly over the ranks.

    Costs are submitted `depth` batches ahead and samples move one batch ahead, so that with enough work in a training
    step neither is waited for. All ranks step together until the last one's data has ended: a rank whose data ends
    early gets its share of the others' samples, and a batch may then be empty.

    A loss must weigh samples, not ranks, since ranks may hold different numbers of them: multiply a sum over samples by
    `loss_scale`, and data-parallel averaging of gradients gives the gradient of the mean over the global batch.

    With `BalanceOptions.window` of K batches, the host holds `depth` × K batches, read one a step after the start.
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
        """
        self.loader = loader
        self._balancer = balancer
        self._cost = cost
        self._memory = memory
        self._spec = spec
        self._device = device
        self._name = name
        self._drop_last = drop_last
        self._report: RoundReport | None = None
        self._used: BatchStream | None = None  # by the latest loop

    @property
    def report(self) -> RoundReport:
        """What balancing did for the batch that was yielded last."""
        if self._report is None:
            raise RuntimeError("no batch has been yielded yet; report tells about the latest batch")
        return self._report

    @property
    def loss_scale(self) -> float:
        """World size over the samples of the global batch: the factor for a loss that is a sum over samples."""
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
    def breaker_open(self) -> bool:
        """Whether rounds go on without asking the service, which has missed one."""
        return not self._stream.breaker.closed

    @property
    def _stream(self) -> BatchStream:
        return self._used if self._used is not None else self._balancer.stream(self._name)

    def __len__(self) -> int:
        """Batches of this rank's own loader; ranks with fewer batches take part in more steps than they have."""
        return len(self.loader)  # type: ignore[arg-type]

    @property
    def dataset(self) -> Any:
        """The wrapped loader's, as the next two are: training frameworks look for them."""
        return self._of_loader("dataset")

    @property
    def sampler(self) -> Any:
        """The wrapped loader's."""
        return self._of_loader("sampler")

    @property
    def batch_sampler(self) -> Any:
        """The wrapped loader's."""
        return self._of_loader("batch_sampler")

    def set_epoch(self, epoch: int) -> None:
        """Tells the wrapped loader which epoch begins, or its samplers and data set, as far as they want to know."""
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        parts: list[Any] = [self.loader]
        if not hasattr(self.loader, "set_epoch"):
            parts = [getattr(self.loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
            parts.append(getattr(self.loader, "dataset", None))
        for part in {id(part): part for part in parts if hasattr(part, "set_epoch")}.values():
            part.set_epoch(epoch)

    def _of_loader(self, name: str) -> Any:
        if not hasattr(self.loader, name):
            raise AttributeError(f"the wrapped {type(self.loader).__name__} has no {name}", name=name, obj=self)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[B]:
        self._used = stream = self._balancer.stream(self._name)
        current, source = self._begin(stream)
        submitted: deque[Ticket] = deque()
        collected: list[Any] = []  # for the next window
        window: _Window | None = None  # the one that is being trained
        moving: tuple[Pending, RoundReport] | None = None
        has_data = True
        end: Verdict | None = None
        try:
            while True:
                stream.check(current)
                left = 0 if window is None else window.left
                while end is None:
                    held = left + len(collected) + len(submitted) * stream.options.window
                    if held >= stream.options.depth * stream.options.window:
                        break
                    batch: Any = next(source, _NO_MORE) if has_data else _NO_MORE
                    has_data = batch is not _NO_MORE
                    stream.open(batch if has_data else None, self._spec, self._device)
                    collected.append(batch)  # also nothing: a rank that has ended submits when the others do
                    if len(collected) == stream.options.window:
                        submitted.append(
                            self._submit(stream, source, [one for one in collected if one is not _NO_MORE])
                        )
                        collected = []
                upcoming: tuple[Pending, RoundReport] | None = None
                while upcoming is None and (left or submitted):
                    if not left:
                        ticket = submitted.popleft()
                        outcome = stream.outcome(ticket)
                        if outcome.ended:  # on all ranks in this round, and so has what was submitted after it
                            current.over, end = True, outcome.verdict
                            has_data |= any(len(one.samples) for one in (ticket, *submitted))
                            submitted.clear()
                            continue
                        window = _Window(ticket.flats, ticket, deque(outcome.batches))
                        left = window.left
                        continue
                    assert window is not None
                    upcoming = self._start_next(stream, window)
                    left = window.left
                if moving is not None:
                    yield self._finish(stream, moving)
                elif upcoming is None and end is not None:  # else all that was in flight has been dropped
                    if has_data:
                        stream.tell_end(end, current.taken)
                    return
                moving = upcoming
        except NoDataError:
            return  # on all ranks
        except Exception as error:
            stream.attend(error, self._device)
            raise
        finally:
            current.leave()

    def _begin(self, stream: BatchStream) -> tuple[Pass, Incoming]:
        try:
            batches = iter(self.loader)  # forks its workers here, before the stream's first threads start
        except Exception as error:
            current = stream.begin()
            stream.attend(error, self._device)
            current.leave()
            raise
        return stream.begin(), Incoming(batches, cost=self._cost, memory=self._memory, spec=self._spec)

    def _submit(self, stream: BatchStream, source: Incoming, batches: list[Any]) -> Ticket:
        if not batches:
            return stream.submit_exhausted(self._device, drop_last=self._drop_last)[1]
        return stream.submit_window(
            batches, cost=source.cost, memory=source.memory, spec=self._spec, device=self._device,
            drop_last=self._drop_last,
        )[1]  # fmt: skip

    def _start_next(self, stream: BatchStream, window: _Window) -> tuple[Pending, RoundReport]:
        batch = window.batches.popleft()
        pending = stream.start(window.flats, window.ticket, self._device, batch=batch)
        return pending, stream.outcome(window.ticket).reports[batch]

    def _finish(self, stream: BatchStream, moving: tuple[Pending, RoundReport]) -> B:
        pending, report = moving
        started = time.perf_counter()
        batch: B = pending.wait().unflatten(self._spec)
        stream.counters.redistribution_seconds += time.perf_counter() - started
        self._report = report
        return batch


@dataclass(slots=True)
class _Window:
    """A window that is being trained, with those of its batches that have not been started yet."""

    flats: tuple[FlatBatch, ...]
    ticket: Ticket
    batches: deque[int]

    @property
    def left(self) -> int:
        """Batches to come."""
        return len(self.batches)
