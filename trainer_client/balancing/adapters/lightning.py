"""A balanced loader as Lightning takes it: with its checkpoints, its epochs and its way to fetch batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from trainer_client.balancing.adapters.job_state import JobState
from trainer_client.balancing.loader import BalancedLoader
from trainer_client.balancing.pipelines import BalancedBatch, balanced_batches

B = TypeVar("B")
_NO_MORE: Any = object()


class LightningLoader(Generic[B]):
    """A balanced loader as `LightningModule` and `Trainer` take it: for `train_dataloader`.

    Batches come as `BalancedBatch`, each with its own loss scale: Lightning may fetch a batch before it has trained the
    one before. Lightning keeps the state in its checkpoints, also in the middle of an epoch, and loads it with
    `ckpt_path`.
    """

    def __init__(self, loader: BalancedLoader[B], trainer: Any, *, length: int | None = None) -> None:
        """Wraps the loader.

        Args:
            loader: The balanced loader.
            trainer: Lightning's; in a `LightningModule` or `LightningDataModule`: `self.trainer`.
            length: Batches of an epoch, if all ranks have as many, such as `len` of a `GlobalBatchSampler`. Lightning
                then shows progress, and takes fractions of an epoch in its options. Default: unknown, and every epoch
                lasts until the last rank's data has ended.
        """
        self._loader, self._trainer, self._length = loader, trainer, length
        self._job = JobState(loader, ahead=self._ahead)
        self._begin: dict[str, Any] | None = None  # from which the latest iteration began; None: an epoch's beginning
        self._epoch, self._over = 0, False  # of the latest iteration, and whether its end has been seen
        self._taken, self._before = 0, self._trained  # batches that it has taken; those trained when it began

    @property
    def _trained(self) -> int:
        return int(self._trainer.fit_loop.epoch_loop.batch_progress.total.processed)

    def _ahead(self) -> int:
        return self._taken - (self._trained - self._before)

    def __len__(self) -> int:
        """Batches of an epoch.

        Raises:
            TypeError: If that is unknown, as from other iterables without a length.
        """
        if self._length is None:
            raise TypeError("the number of batches is unknown; LightningLoader(…, length=…) tells it")
        return self._length

    def __iter__(self) -> Iterator[BalancedBatch[B]]:
        # Lightning begins iterations that it then drops. Nothing happens before the first batch is asked for, and what
        # trained nothing has not been.
        if self._trained != self._before:
            self._begin = None
        if self._begin is None:
            self._epoch = self._trainer.fit_loop.epoch_progress.current.processed
        else:  # Lightning counts the epoch up after it has begun this iteration
            self._job.load_state_dict(self._begin)
            self._epoch = self._begin["epoch"]
        self._loader.set_epoch(self._epoch)
        self._over, self._taken, self._before = False, 0, self._trained
        batches = balanced_batches(self._loader)
        given = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        batch = self._take(batches)
        while batch is not _NO_MORE:
            # With a length Lightning does not ask for more after the last batch. So the end is seen here, and what is
            # saved then is the beginning of the next epoch.
            following = None if self._length is None else self._take(batches)
            given += 1
            if self._length is not None and (given == self._length) != self._over:
                what = "has ended after" if self._over else "has more than"
                raise ValueError(
                    f"length is {self._length}, but the epoch {what} {given} batches; give LightningLoader the number "
                    "of batches that all ranks have, or no length"
                )
            yield batch
            batch = following if self._length is not None else self._take(batches)

    def _take(self, batches: Iterator[BalancedBatch[B]]) -> Any:
        batch = next(batches, _NO_MORE)
        self._over = batch is _NO_MORE
        self._taken += not self._over
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks, for Lightning: what is trained, not what it has fetched."""
        return {**self._job.state_dict(), "epoch": self._epoch + (self._over and not self._ahead())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from it."""
        self._job.load_state_dict(state)
        self._begin, self._before = state, self._trained
