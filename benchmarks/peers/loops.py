"""Where a loop's batches come from: unbalanced, by the peer's shuffler as its pipeline places it, or by ours."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers.batches import SPEC
from benchmarks.peers.checkouts import RecsysExamples
from trainer_client.balancing import BalancedLoader, Balancer

_AHEAD = 2  # batches that the peer's pipeline has on the device before it trains one


class Shuffled:
    """The batches of a block of steps, as `JaggedMegatronTrainPipelineSparseDist` of recsys-examples has them.

    All of it on a stream of copies: the next batch to the device, then the first phase before the forward pass, the
    second after it, and the main stream waits for that before the backward pass.
    """

    def __init__(self, shuffler: Any | None, device: torch.device, *, all_to_all: bool = False) -> None:
        self._shuffler = shuffler
        self._device = device
        self._options = {"use_all2all": True} if all_to_all else {}
        self._side = torch.cuda.Stream() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._batches: Iterator[Any] = iter(())
        self._ready: deque[Any] = deque()
        self._raw: tuple[Any, Any] | None = None

    def begin(self, batches: Sequence[Any]) -> None:
        """Takes the batches, and has the first ones ready."""
        self._batches = iter(batches)
        self._ready.clear()
        for _ in range(_AHEAD):
            self.before_forward()
            self.after_forward()

    def take(self) -> Any:
        """The batch that was ready first."""
        batch = self._ready.popleft()
        if self._side is not None:
            current = torch.cuda.current_stream()
            current.wait_stream(self._side)
            batch.record_stream(current)
        return batch

    def before_forward(self) -> None:
        """Copies the next batch; the first phase."""
        raw = next(self._batches, None)
        if raw is None:
            return
        with self._on_side():
            raw = raw.to(self._device, non_blocking=True)
            handle = None if self._shuffler is None else self._shuffler.start_shuffle_async(raw, dist.group.WORLD)
        self._raw = raw, handle

    def after_forward(self) -> None:
        """The second phase."""
        if self._raw is None:
            return
        (raw, handle), self._raw = self._raw, None
        with self._on_side():
            if self._shuffler is not None:
                raw = self._shuffler.finish_shuffle(raw, handle, dist.group.WORLD, **self._options)
            for jagged in (raw.features, raw.labels):
                jagged.sync()  # lengths per key, while the stream is waited for anyway; the model asks for them
        self._ready.append(raw)
        if self._side is not None and self._shuffler is not None:
            torch.cuda.current_stream().wait_stream(self._side)  # which keeps the order on the communicator

    def _on_side(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._side is None else torch.cuda.stream(self._side)


class Ours:
    """By `BalancedLoader`."""

    def __init__(self, balancer: Balancer, device: torch.device, name: str) -> None:
        self._balancer = balancer
        self._device = device
        self._name = name
        self.loader: BalancedLoader[Any] | None = None
        self._batches: Iterator[Any] = iter(())

    def begin(self, batches: Sequence[Any]) -> None:
        """Takes the batches."""
        self.loader = BalancedLoader(
            batches, self._balancer, cost=lambda batch: batch.workload, spec=SPEC, device=self._device, name=self._name
        )
        self._batches = iter(self.loader)

    def take(self) -> Any:
        """The next one."""
        return next(self._batches)

    def before_forward(self) -> None:
        """Nothing: it works ahead by itself."""

    def after_forward(self) -> None:
        """Nothing."""


class Timed:
    """A source, and the time that the training thread spends in it."""

    def __init__(self, source: Shuffled | Ours) -> None:
        self._source = source
        self.seconds = 0.0

    def begin(self, batches: Sequence[Any]) -> None:
        """Takes the batches; not counted."""
        self._source.begin(batches)
        self.seconds = 0.0

    def take(self) -> Any:
        """The next batch."""
        return self._count(self._source.take)

    def before_forward(self) -> None:
        """Before the forward pass."""
        self._count(self._source.before_forward)

    def after_forward(self) -> None:
        """After the forward pass."""
        self._count(self._source.after_forward)

    def _count(self, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        try:
            return call()
        finally:
            self.seconds += time.perf_counter() - began


def their_shuffler(peer: RecsysExamples) -> Any:
    """The peer's shuffler with the costs that the batches carry: both sides balance by the same numbers."""
    base: Any = peer.shuffler.BaseTaskBalancedBatchShuffler

    class ByWorkload(base):  # type: ignore[misc]
        def get_workloads(self, batch: Any, *_: Any, **__: Any) -> torch.Tensor:
            """(batch_size,) int64; 0 for padding."""
            workload: torch.Tensor = batch.workload
            return workload

    return ByWorkload()
