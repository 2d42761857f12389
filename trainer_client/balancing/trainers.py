"""Balanced loaders in the hands of trainers and checkpointers: states of whole jobs, and loops that read ahead."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from trainer_client.balancing.errors import ResumeError
from trainer_client.balancing.loader import BalancedLoader
from trainer_client.balancing.pipelines import BalancedBatch, balanced_batches
from trainer_client.process_groups import make_group

B = TypeVar("B")
_NO_MORE: Any = object()
_KEY = "ranks"


class JobState:
    """The state of a loader on all ranks as one value, for checkpoints that keep one value for the whole job.

    A loader's state is that of its rank. Lightning, Accelerate and many loops of one's own write what rank 0 has, and
    load it on every rank; `torch.distributed.checkpoint` writes the value of one of the ranks that save it under the
    same name. This has the methods that all of them look for, and what is saved serves any number of ranks.

    The ranks that balance together share a value. Where a job has several such groups, which train different batches,
    save each group's under a name of its own.
    """

    def __init__(self, loader: BalancedLoader[Any], *, ahead: Callable[[], int] = int) -> None:
        """Stands for the loader.

        Args:
            loader: This rank's; every rank of the job makes a `JobState` of its own.
            ahead: How many of the batches that the loader has handed over are not trained yet, where something
                fetches ahead of training, such as a pipeline; default: none.
        """
        self._loader = loader
        self._ahead = ahead
        self._group: dist.ProcessGroup | None = None  # of the ranks that balance, where these are not the whole job

    def state_dict(self) -> dict[str, Any]:
        """What all ranks have handed over and trained, the same value on all of them; a few KB for each rank.

        The ranks that balance together call it together: it gathers their states.

        Raises:
            RuntimeError: If a rank cannot tell its state; on all ranks, with what that rank said.
        """
        own: Any = None
        problem = ""
        try:
            own = self._loader.state_dict(ahead=self._ahead())
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            if self._loader._balancer.place[1] == 1:
                raise
        found = [(rank, state, problem) for rank, (state, problem) in self._gathered((own, problem))]
        problems = [f"rank {rank}: {problem}" for rank, _, problem in found if problem]
        if problems:
            raise RuntimeError("the loader's state cannot be saved; " + "; ".join(problems))
        # One value, which checkpoints neither take apart nor look into: before loading nobody knows how many ranks.
        return {_KEY: pickle.dumps([state for _, state, _ in found])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what was saved, before a loop begins; on as many ranks as there were or on any other number.

        Args:
            state: From `state_dict`; empty where a checkpoint holds none: nothing changes.

        Raises:
            ResumeError: If it is something else, or does not fit the loader.
        """
        if not state:
            return
        if _KEY not in state:
            raise ResumeError(
                f"the loader's state has the fields {sorted(state)} and not {_KEY!r}; load what JobState.state_dict "
                "gave, and what BalancedLoader.state_dict gave with BalancedLoader.load_state_dict"
            )
        self._loader.load_state_dict(pickle.loads(state[_KEY]))

    def _gathered(self, own: Any) -> list[tuple[int, Any]]:
        """What each rank has that balances with this one, with its number in the job."""
        ranks = self._loader._balancer.ranks
        if len(ranks) == 1:
            return [(ranks[0], own)]
        if self._group is None and len(ranks) < dist.get_world_size():
            self._group = make_group(ranks, "gloo", use="/state")
        gathered: list[Any] = [None] * len(ranks)
        dist.all_gather_object(gathered, own, group=self._group)
        return [(rank, gathered[rank if self._group is None else place]) for place, rank in enumerate(ranks)]


class LightningLoader(Generic[B]):
    """A balanced loader as `LightningModule` and `Trainer` take it: for `train_dataloader`.

    Batches come as `BalancedBatch`, each with its own loss scale: Lightning may fetch a batch before it has trained the
    one before. Lightning keeps the state in its checkpoints, also in those of the middle of an epoch, and loads it with
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
        self._loader = loader
        self._trainer = trainer
        self._length = length
        self._job = JobState(loader, ahead=self._ahead)
        self._begin: dict[str, Any] | None = None  # from which the latest iteration began; None: an epoch's beginning
        self._epoch = 0  # of the latest iteration
        self._over = False  # whether its end has been seen
        self._taken = 0  # batches that it has taken from the loader
        self._before = self._trained  # when it began

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
        if self._length is None:
            while (batch := self._take(batches)) is not _NO_MORE:
                yield batch
            return
        # With a length Lightning does not ask for more after the last batch. So the end is seen here, and what is saved
        # then is the beginning of the next epoch.
        given = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        held = self._take(batches)
        while held is not _NO_MORE:
            following = self._take(batches)
            given += 1
            if (given == self._length) != self._over:
                what = "has ended after" if self._over else "has more than"
                raise ValueError(
                    f"length is {self._length}, but the epoch {what} {given} batches; give LightningLoader the number "
                    "of batches that all ranks have, or no length"
                )
            yield held
            held = following

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
