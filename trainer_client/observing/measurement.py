"""Where the time of training steps goes, on each rank and over all ranks, by points in time on a device's stream."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from trainer_client.checks import is_whole

if TYPE_CHECKING:
    from trainer_client.balancing import BalancedLoader

logger = logging.getLogger(__name__)

_MOST_PENDING = 4096  # steps whose times nobody has asked for
_TRIES = 50  # steps after which a timer that has measured nothing for its loader says why

PHASES = ("data", "compute", "communication", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One step on one rank, in milliseconds of the device's stream.

    Attributes:
        step: Number of the step.
        data: Until the batch was there: exposed redistribution, and the host if it was late.
        compute: Forward and backward pass, to the last gradient.
        communication: From there until all gradients were averaged: exposed communication and waiting for others.
        optimizer: The rest.
    """

    step: int
    data: float
    compute: float
    communication: float
    optimizer: float

    @property
    def total(self) -> float:
        """The whole step."""
        return self.data + self.compute + self.communication + self.optimizer


class Mark:
    """A point in time on a device's current stream; of the host, where the device is none that works behind it."""

    __slots__ = ("_event", "_seconds")

    def __init__(self, device: torch.device) -> None:
        self._seconds = time.perf_counter()
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def ready(self) -> bool:
        """Whether the device has got there; does not wait."""
        return self._event is None or bool(self._event.query())

    def since(self, earlier: Mark) -> float:
        """Milliseconds from an earlier mark of the same device; both must be ready."""
        if self._event is None:
            return 1e3 * (self._seconds - earlier._seconds)
        return float(earlier._event.elapsed_time(self._event))


class _Totals(NamedTuple):
    """What a rank has got to train, in all batches up to one."""

    load: float
    splits: int
    terms: torch.Tensor | None  # of a learned cost; on its way to the host

    @classmethod
    def of(cls, loader: BalancedLoader[Any], *, latest: bool) -> _Totals:
        """With the latest batch, or before it."""
        load, splits, terms = loader.counters.own_load, loader.counters.split_samples, loader.summed_terms
        if latest:
            return cls(load, splits, None if terms is None else terms.after)
        report = loader.report
        return cls(load - report.own_load, splits - report.split_samples, None if terms is None else terms.before)


class _Measured(NamedTuple):
    """A step whose times the loader learns once the device has finished it."""

    before: _Totals
    after: _Totals
    loading: float  # seconds in which the host waited for the wrapped loader
    others: float  # and for other ranks
    free: Mark  # when the device began to wait for the batch
    asked: Mark | None  # when the loop asked for it
    marks: dict[str, Mark]


class StepTimer:
    """Times the phases of each step by events, read some steps later.

    timer = StepTimer(device, loader=loader) # the loader learns which ranks are slow, and gives them less to do
    timer.watch(model.parameters())          # finds the end of compute
    for batch in loader:
        timer.batch_ready()
        loss(model(batch)).backward()
        timer.gradients_ready()
        optimizer.step()
        timer.end_step()
    times = timer.finished()
    """

    def __init__(
        self, device: torch.device | str, *, loader: BalancedLoader[Any] | None = None, ahead: int = 0
    ) -> None:
        """Starts with the first step.

        Args:
            device: Where the steps run.
            loader: A `BalancedLoader`, which learns what each batch took to compute: from `batch_ready` to the last
                gradient, which `watch` or `compute_done` marks; without that mark it learns nothing, as the time until
                all gradients are averaged is the same on all ranks. A warning says what is missing where it learned
                nothing in 50 steps. Where several batches make a step, call `batch_ready` for each, or for the first
                alone: then their loads count together, and their time, that of fetching the others in it.
            ahead: Batches that a pipeline has fetched beyond the one that is trained.

        Raises:
            ValueError: If `ahead` is no whole number of 0 or more, or what `loader` is takes no times.
        """
        if loader is not None and not callable(getattr(loader, "took", None)):
            raise ValueError(f"loader is {loader!r}, which takes no times; give a BalancedLoader, or leave it out")
        if not is_whole(ahead) or ahead < 0:
            raise ValueError(f"ahead is {ahead!r}; use a whole number of batches, 0 or more")
        self._device = torch.device(device)
        self._loader = loader
        self._number = 0
        self._gradients, self._watched = 0, 0
        self._begin = self._free = Mark(self._device)  # of the step; since when the device waits for the batch
        self._marks: dict[str, Mark] = {}
        self._pending: deque[tuple[int, Mark, dict[str, Mark]]] = deque()
        self._remove: list[Callable[[], None]] = []
        # For the loader.
        self._fetched: deque[_Totals] = deque(maxlen=ahead + 1)  # before each of the latest batches
        self._measured: deque[_Measured] = deque()
        self._tries, self._succeeded = 0, False
        self._loading = self._others = (0.0, 0.0)  # seconds waited until the latest batch, and the one before
        self._asked: Mark | None = None
        if loader is not None:
            loader.on_request(self._request)

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Lets the last gradient of a backward pass mark the end of compute; each of `parameters` must get one.

        A warning says so where parameters are sharded, as by FSDP2: then speeds cannot be learned from these times.
        Of several backward passes in a step the last one counts. Parameters that are trained inside the backward pass,
        as TorchRec's sharded tables are, get no gradient: leave them out.
        """
        parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._watched += len(parameters)
        if self._loader is not None and any(map(_is_sharded, parameters)):
            _warn_of_shards()

        def counted(_: torch.Tensor) -> None:
            self._gradients += 1
            if self._gradients == len(parameters):
                self._gradients = 0
                self.compute_done()

        for parameter in parameters:
            handle = parameter.register_post_accumulate_grad_hook(counted)  # type: ignore[no-untyped-call]
            self._remove.append(handle.remove)

    def _request(self) -> None:
        """The loop asks for a batch: what it did since the last step is not the loader's fault nor the network's."""
        self._asked = Mark(self._device)

    def batch_ready(self) -> None:
        """The batch is there."""
        self._gradients = 0
        if self._loader is not None:
            counters = self._loader.counters
            self._fetched.append(_Totals.of(self._loader, latest=False))
            self._free = self._marks.get("compute", self._begin)  # of a batch before in the same step
            self._loading = counters.loading_seconds, self._loading[0]
            self._others = counters.exposed_seconds, self._others[0]
        self._marks["data"] = Mark(self._device)

    def compute_done(self) -> None:
        """This rank's gradients are computed."""
        self._marks["compute"] = Mark(self._device)

    def gradients_ready(self) -> None:
        """All ranks' gradients are averaged; without a mark of the last gradient, all until here was compute."""
        now = Mark(self._device)
        self._marks.setdefault("compute", now)
        self._marks["communication"] = now

    def end_step(self) -> None:
        """The step is over and the next one begins."""
        end = Mark(self._device)
        self._marks["optimizer"] = end
        if self._loader is not None:
            self._measure(self._loader)
            self._report(self._loader)
            while len(self._pending) >= _MOST_PENDING:  # where the loop wants nothing of them but this
                self._pending.popleft()
        self._pending.append((self._number, self._begin, self._marks))
        self._number += 1
        self._begin = self._free = end
        self._marks, self._gradients = {}, 0

    def _measure(self, loader: BalancedLoader[Any]) -> None:
        """Keeps what the loader is to learn of the step, if its own computation was marked."""
        if len(self._fetched) < (self._fetched.maxlen or 1) and "data" in self._marks:
            return  # a pipeline that fills up
        if "data" in self._marks and self._marks.get("compute") not in (None, self._marks.get("communication")):
            before = self._fetched[0]
            after = self._fetched[1] if len(self._fetched) > 1 else _Totals.of(loader, latest=True)
            if after.splits > before.splits:
                return  # the attention of split samples waits for other ranks: the time is not this rank's own
            loading, others = (now - last for now, last in (self._loading, self._others))
            measured = _Measured(before, after, loading, others, self._free, self._asked, self._marks)
            self._measured.append(measured)
            self._succeeded = True
        self._tries += 1
        if self._tries == _TRIES and not self._succeeded:
            logger.warning(
                "a StepTimer has told its loader of no batch in %d steps, so nothing is learned of this rank's speed: "
                "%s",
                _TRIES,
                self._missing(),
            )

    def _missing(self) -> str:
        """Why no step was measured for the loader."""
        if "data" not in self._marks:
            return "call batch_ready when a step has its batch"
        if not self._watched:
            return "call watch(model.parameters()), or compute_done when this rank's own gradients are computed"
        return (
            f"in the latest step only {self._gradients} of the {self._watched} parameters that it watches got a "
            "gradient; watch those that get one in every step, once"
        )

    def _report(self, loader: BalancedLoader[Any]) -> None:
        """Gives the loader the times of the batches that the device has finished, without waiting for it."""
        while self._measured and self._measured[0].marks["compute"].ready():
            before, after, loading, others, free, asked, marks = self._measured.popleft()
            # A thread that fetches ahead may ask on a stream of its own, or before the last step has ended.
            loop = max(0.0, asked.since(free) / 1e3) if asked is not None and asked.ready() else 0.0
            late = max(0.0, marks["data"].since(free) / 1e3 - loop - others)
            terms = None
            if before.terms is not None and after.terms is not None:  # the copies were begun before the computation
                terms = (after.terms - before.terms).numpy()
            seconds = marks["compute"].since(marks["data"]) / 1e3
            loader.took(seconds, after.load - before.load, late=late, loading=loading, loop=loop, terms=terms)

    def finished(self) -> list[StepTimes]:
        """The steps that the device has finished since the last call."""
        done = []
        while self._pending and self._pending[0][2]["optimizer"].ready():
            number, before, marks = self._pending.popleft()
            times = {}
            for phase in PHASES:
                after = marks.get(phase, before)
                times[phase] = after.since(before)
                before = after
            done.append(StepTimes(step=number, **times))
        return done

    def close(self) -> None:
        """Removes the hooks."""
        for remove in self._remove:
            remove()
        self._remove.clear()


def _is_sharded(parameter: Any) -> bool:
    """Whether ranks gather a parameter from each other, as with FSDP2; then it is a distributed tensor."""
    places = getattr(parameter, "placements", ())
    return any(place.is_shard() and parameter.device_mesh.size(dim) > 1 for dim, place in enumerate(places))


@cache
def _warn_of_shards() -> None:
    logger.warning(
        "a StepTimer with a loader watches sharded parameters (FSDP2): ranks wait for each other inside of what is "
        "timed and look alike, so that slow ones are not found; say BalanceOptions.speeds, or leave loader= out and "
        "call loader.took(seconds, load) with times without such waiting, as of attention kernels (docs/train/loop.md)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Steps of all ranks; arrays are (steps, ranks), in milliseconds.

    Attributes:
        data: Exposed redistribution and the host.
        compute: Own forward and backward pass.
        waiting: For the slowest rank's compute.
        communication: Exposed communication besides.
        optimizer: The rest.
    """

    data: NDArray[np.float64]
    compute: NDArray[np.float64]
    waiting: NDArray[np.float64]
    communication: NDArray[np.float64]
    optimizer: NDArray[np.float64]

    @classmethod
    def of(cls, times: NDArray[np.float64]) -> Breakdown:
        """From the times of all ranks.

        Args:
            times: (ranks, steps, 4) milliseconds of `PHASES`.
        """
        data, compute, communication, optimizer = (times[:, :, phase].T for phase in range(len(PHASES)))
        # A rank waits until the slowest has computed, counted from when both had their batch.
        finish = data + compute
        waiting = np.minimum(finish.max(axis=1, keepdims=True) - finish, communication)
        return cls(
            data=data, compute=compute, waiting=waiting, communication=communication - waiting, optimizer=optimizer
        )

    @property
    def step(self) -> NDArray[np.float64]:
        """(steps,) duration of each step: of the rank that took longest."""
        total = self.data + self.compute + self.waiting + self.communication + self.optimizer
        longest: NDArray[np.float64] = total.max(axis=1)
        return longest

    @property
    def compute_imbalance(self) -> NDArray[np.float64]:
        """(steps,) max/mean of measured compute time over the ranks."""
        ratio: NDArray[np.float64] = self.compute.max(axis=1) / self.compute.mean(axis=1)
        return ratio

    def summary(self) -> dict[str, float]:
        """Medians and the 99th percentile of the step, means of the phases over steps and ranks, in milliseconds."""
        return {
            "step_ms_median": float(np.median(self.step)),
            "step_ms_p99": float(np.quantile(self.step, 0.99)),
            "step_ms_mean": float(self.step.mean()),
            "compute_imbalance": float(self.compute_imbalance.mean()),
        } | {
            f"{phase}_ms": float(getattr(self, phase).mean())
            for phase in ("data", "compute", "waiting", "communication", "optimizer")
        }


def gather_breakdown(times: Sequence[StepTimes], group: dist.ProcessGroup | None = None) -> Breakdown:
    """The breakdown over all ranks; collective, so call it between steps or at the end.

    Args:
        times: This rank's steps; the same number on all ranks.
        group: The ranks; default: all, or this one alone where torch.distributed is not initialised.

    Raises:
        ValueError: If the ranks pass different steps.
    """
    rows = np.array([[getattr(step, phase) for phase in PHASES] for step in times], dtype=np.float64).reshape(-1, 4)
    if not (dist.is_available() and dist.is_initialized()):
        return Breakdown.of(rows[None])
    tables = [rows] * dist.get_world_size(group)
    dist.all_gather_object(tables, rows, group=group)
    counts = [len(table) for table in tables]
    if len(set(counts)) > 1:
        raise ValueError(f"the ranks pass {counts} steps; pass the same steps on all ranks")
    return Breakdown.of(np.stack(tables))
