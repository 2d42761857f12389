"""Balanced batches in TorchRec's training pipelines, and pipelines by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import torch
from torch import nn

from evenkeel.plugins import Plugins
from trainer_client.balancing import BalancedLoader, RoundReport
from trainer_client.balancing.batches.containers import container_of
from trainer_client.balancing.splitting import Splits, warn_of_unasked_splits

B = TypeVar("B")


class _Splits:
    """The split samples of a batch and its copies. If nobody has asked for them, it says so when these are gone."""

    __slots__ = ("__weakref__", "asked", "name", "samples")

    def __init__(self, samples: Splits, name: str) -> None:
        self.samples, self.name, self.asked = samples, name, False

    def __del__(self) -> None:
        if self.samples and not self.asked:
            warn_of_unasked_splits(self.name)


@dataclass(slots=True, kw_only=True)
class BalancedBatch(Generic[B]):
    """A batch with what balancing did for it.

    A pipeline trains a batch some steps after it was fetched, when `BalancedLoader.loss_scale` already speaks of a
    later one. This carries the scale along, through the pipeline's copies.

    Attributes:
        batch: The batch.
        loss_scale: World size over the samples of the global batch: the factor for a loss that is a sum over samples.
        report: What balancing did.
    """

    batch: B
    loss_scale: float
    report: RoundReport = field(repr=False)
    _splits: _Splits = field(repr=False)

    @property
    def splits(self) -> Splits:
        """Samples of the batch that lie on several ranks, those of all ranks, for a `PieceGroup`.

        A batch that has some and is trained without having been asked for them is warned of, once a loader.
        """
        self._splits.asked = True
        return self._splits.samples

    @property
    def mean_loss_scale(self) -> float:
        """The factor for a loss that is a mean over this rank's samples."""
        return self.report.mean_loss_scale

    def to(
        self,
        device: torch.device | str,
        non_blocking: bool = False,
        *,
        data_copy_stream: torch.Stream | None = None,
        **options: Any,
    ) -> BalancedBatch[B]:
        """The batch on `device`; nothing is copied if it is there.

        Args:
            device: Where the batch shall be.
            non_blocking: Whether the host goes on while a device copies.
            data_copy_stream: What TorchRec's pipelines give with `enable_inplace_copy_batch`: the stream that copies.
            options: What else a pipeline gives, such as `dense_only`; for a `to` of the batch's own class.
        """
        copying: Any = nullcontext()
        if data_copy_stream is not None:
            copying = torch.get_device_module(torch.device(device)).stream(data_copy_stream)
        with copying:
            return replace(self, batch=_each(self.batch, "to", device, non_blocking=non_blocking, **options))

    def record_stream(self, stream: torch.Stream | torch.cpu.Stream) -> None:
        """Tells the allocator that `stream` uses the batch; on the host there are no streams."""
        if not isinstance(stream, torch.cpu.Stream):
            _each(self.batch, "record_stream", stream)

    def pin_memory(self) -> BalancedBatch[B]:
        """The batch in page-locked memory."""
        return replace(self, batch=_each(self.batch, "pin_memory"))


def _each(value: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of the batch, or of what a container holds."""
    if hasattr(value, method):
        return getattr(value, method)(*args, **kwargs)

    container = container_of(value)
    if container is None:
        return value
    items, _, context = container.flatten(value)
    items = [_each(item, method, *args, **kwargs) for item in items]
    return container.unflatten(type(value), context, items, 0, None)


def balanced_batches(loader: BalancedLoader[B]) -> Iterator[BalancedBatch[B]]:
    """The batches of a loader, each with its own loss scale; the iterator that a pipeline's `progress` takes.

    All ranks' iterators end after the same number of batches, so the pipelines of all ranks stop together.
    """
    # by now TorchRec is imported, if a pipeline of it takes the batches
    if (streamable := sys.modules.get("torchrec.streamable")) is not None:
        streamable.Pipelineable.register(BalancedBatch)  # what its pipelines ask a batch to be
    fetched: WeakSet[_Splits] = WeakSet()
    try:
        for batch in loader:
            splits = _Splits(loader.splits, loader.name)
            fetched.add(splits)
            yield BalancedBatch(batch=batch, loss_scale=loader.loss_scale, report=loader.report, _splits=splits)
            del batch, splits  # the pipeline may free them while the next ones are read
    except GeneratorExit:  # what a pipeline still holds is dropped, or its users know what they have left
        for splits in fetched:
            splits.asked = True
        raise


class PipelineSteps:
    """The training steps of a pipeline over the batches of a loader: `for output in PipelineSteps(pipeline, loader)`.

    Each loop is over a new iteration of the loader: what the pipeline still holds of one that was left is dropped, also
    of a loop of other steps, so that one pipeline can serve several loaders in turn.

    Counts what the pipeline has fetched and not trained yet, which a checkpoint must not take for trained:
    `loader.state_dict(ahead=steps.ahead())`, or `JobState(loader, ahead=steps.ahead)`.
    """

    def __init__(self, pipeline: Any, loader: BalancedLoader[Any]) -> None:
        """Fetches nothing yet.

        Args:
            pipeline: Any object with `progress(iterator)` that trains one batch a call, as all of TorchRec's do, or
                hands it out to be trained, as `StagedTrainPipeline`; at the end it raises `StopIteration`, or returns
                None with nothing left. Where it has `reset()`, as TorchRec's, that makes it ready for another iterator;
                a staged one is run without further batches until it holds none.
            loader: The loader; each iteration is one over it.
        """
        self._pipeline, self._loader = pipeline, loader
        self._is_staged = hasattr(pipeline, "num_stages")  # gives None while it fills up again, and at its end
        self._has_ended = False
        self._fetched = self._trained = 0
        self._failures: list[Exception] = []  # why there are no more batches

    def ahead(self) -> int:
        """Batches of the latest iteration that the pipeline holds."""
        return self._fetched - self._trained

    def __iter__(self) -> Iterator[Any]:
        self._drop_held()
        self._has_ended = False
        self._fetched = self._trained = 0
        self._failures.clear()
        batches = self._fetch()
        try:
            while True:
                try:
                    output = self._pipeline.progress(batches)
                except StopIteration:  # on all ranks after the same step
                    if not (self._has_ended or self._fetched):
                        raise RuntimeError(
                            f"{type(self._pipeline).__name__} has ended without asking for a batch: it takes no second "
                            "iterator; make a pipeline for each loop, or give it reset()"
                        ) from None
                    break
                if self._is_staged and output is None:
                    if self._has_ended and not self.ahead():
                        break
                    continue
                self._trained += 1
                yield output
            if self._failures:
                raise self._failures.pop()
        finally:
            batches.close()

    def _drop_held(self) -> None:
        if self._is_staged:  # whose `reset` keeps what it holds
            while self._pipeline.progress(iter(())) is not None:
                pass
        elif hasattr(self._pipeline, "reset"):
            self._pipeline.reset()

    def _fetch(self) -> Generator[Any, None, None]:
        try:
            for batch in balanced_batches(self._loader):
                self._fetched += 1
                yield batch
        except Exception as error:  # raised once what the pipeline holds is trained, as it is on the other ranks
            self._failures.append(error)
        self._has_ended = True


PipelineFactory = Callable[..., Any]


def _torchrec(name: str, *arguments: Any, **options: Any) -> Any:
    from torchrec.distributed import train_pipeline

    return getattr(train_pipeline, name)(*arguments, **options)


_TORCHREC = {
    "base": partial(_torchrec, "TrainPipelineBase"),
    "sparse_dist": partial(_torchrec, "TrainPipelineSparseDist"),
    "prefetch": partial(_torchrec, "PrefetchTrainPipelineSparseDist"),
}
PIPELINES: Plugins[PipelineFactory] = Plugins("pipeline", _TORCHREC, group="evenkeel.pipelines")


def pipeline_names() -> tuple[str, ...]:
    """All names: TorchRec's, and those of installed packages (entry points in the group `evenkeel.pipelines`)."""
    return PIPELINES.names


def make_pipeline(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, **options: Any
) -> Any:
    """A pipeline; call its `progress(balanced_batches(loader))` once a step, with one iterator for all steps.

    Args:
        name: `base` copies the next batch while one trains; `sparse_dist` also exchanges its keys; `prefetch` also
            fills the caches of UVM_CACHING tables.
        model: Returns the loss and anything else; TorchRec's pipelines look for sharded modules in it.
        optimizer: Of the dense part.
        device: Of this rank.
        options: What the pipeline takes.

    Raises:
        ValueError: If there is no such pipeline.
        ModuleNotFoundError: If it needs TorchRec and that is not installed.
    """
    return PIPELINES.find(name)(model, optimizer, device, **options)
