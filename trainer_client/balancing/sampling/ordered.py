"""What the samplers of global batches have in common: the order, the position in it, and the state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import Sampler

from trainer_client.balancing.membership import Ranks, read_membership
from trainer_client.balancing.sampling.order import MAX_SAMPLES, VERSION, SampleOrder
from trainer_client.checks import check_whole, is_whole

_REMEMBERED = 1 << 16  # ends of batches, more than loaders read ahead of the one that is trained
_REMEDIES = {
    "version": "the order of samples was another one then: finish the epoch with the release that saved the state",
    "samples": "load the data set that the state is of, or begin a new epoch",
    "seed": "make the sampler with the seed of the state",
    "shuffle": "make the sampler with the same shuffle",
}


class OrderedBatchSampler(Sampler[list[int]]):
    """Yields this rank's samples of one global batch after the other, along the order of a data set.

    Where a global batch ends says a subclass, and which rank gets which of its samples. The state is the same on all
    ranks and does not depend on their number: how far the order has been trained.
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        rank: int | None,
        world_size: int | None,
        process_group: Ranks | None,
    ) -> None:
        """Begins at the first sample of epoch 0; see the subclasses."""
        self.num_samples = _length(data)
        self.seed = seed
        check_whole(self, seed=0)
        self.seed = int(seed)
        self.shuffle = shuffle
        self.drop_last = drop_last
        for name in ("shuffle", "drop_last"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; use True or False")
        self._follows_default_group = rank is None and world_size is None and process_group is None
        self.rank, self.world_size = _rank_of(rank, world_size, process_group)
        self._epoch = 0
        self._epoch_was_named = False  # by `set_epoch`, since a state was loaded
        self._loaded: int | None = None  # the position at which the next iteration begins
        self._latest: _Iteration | None = None

    @abstractmethod
    def end_of_batch(self, order: SampleOrder, begin: int) -> int:
        """The position at which the global batch ends that begins at `begin`; `begin` if there is none any more."""

    @abstractmethod
    def part(self, order: SampleOrder, begin: int, end: int) -> NDArray[np.int64]:
        """(k,) the positions of a global batch that are this rank's, ascending."""

    @abstractmethod
    def count_steps(self) -> int:
        """Global batches of the whole of the present epoch: the batches of those ranks that have most of them.

        Raises:
            TypeError: If it takes long to count them.
        """

    @property
    def epoch(self) -> int:
        """The epoch that `set_epoch` or a loaded state named last."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch's order the next iteration follows.

        With the epoch of a state that has just been loaded, the next iteration goes on where the state says, and is
        empty where the state has nothing left of the epoch. Another epoch begins at its first sample.

        Raises:
            ValueError: If it is no whole number, or negative.
        """
        if not is_whole(epoch) or epoch < 0:
            raise ValueError(f"epoch is {epoch!r}; use a whole number, 0 or more")
        self._epoch_was_named = True
        if epoch != self._epoch:
            self._epoch = int(epoch)
            self._loaded = self._latest = None

    def __iter__(self) -> Iterator[list[int]]:
        self._check_world()
        latest = _Iteration(self, self._loaded or 0)
        if self._loaded is not None and not self._epoch_was_named and latest.end(1) == latest.end(0):
            latest = _Iteration(self, 0)  # the epoch had ended: this is the next loop
        self._latest = latest
        return latest.batches()

    def order(self) -> SampleOrder:
        """The order of the present epoch."""
        return SampleOrder(self.num_samples, seed=self.seed, epoch=self._epoch, shuffle=self.shuffle)

    def state_dict(self) -> dict[str, Any]:
        """The state behind all batches that the latest iteration has yielded."""
        return self.state_after(0 if self._latest is None else self._latest.yielded)

    def state_after(self, batches: int) -> dict[str, Any]:
        """The state when so many global batches of the latest iteration have been trained; of any rank, the same.

        It takes a few microseconds, also where workers of a `DataLoader` have read far ahead of what is trained.

        Args:
            batches: Counted from the iteration's begin, also those in which this rank has no samples; at most 65,536
                fewer than have been yielded.
        """
        position = (self._loaded or 0) if self._latest is None else self._latest.end(batches)
        return {**self._identity(), "epoch": self._epoch, "position": position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration begin where a state says, on any number of ranks.

        Raises:
            ValueError: If the state is of another data set, order or version.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"state is {state!r}; load what `state_dict` of a sampler returned")
        for name, own in self._identity().items():
            if name not in state or state[name] != own:
                value = repr(state[name]) if name in state else "missing"
                raise ValueError(f"state[{name!r}] is {value} and should be {own!r}; {_REMEDIES[name]}")
        for name in ("epoch", "position"):
            if not is_whole(state.get(name)) or state[name] < 0:
                raise ValueError(f"state[{name!r}] is {state.get(name)!r}; load a state as `state_dict` returned it")
        if state["position"] > self.num_samples:
            raise ValueError(
                f"state['position'] is {state['position']}, and the data set has {self.num_samples} samples; load a "
                "state of its own"
            )
        self._loaded, self._epoch = int(state["position"]), int(state["epoch"])
        self._latest, self._epoch_was_named = None, False

    def _identity(self) -> dict[str, Any]:
        return {"version": VERSION, "samples": self.num_samples, "seed": self.seed, "shuffle": self.shuffle}

    def _check_world(self) -> None:
        if self._follows_default_group:
            rank, world_size = _rank_of(None, None, None)
            if (rank, world_size) != (self.rank, self.world_size):
                raise ValueError(
                    f"the sampler was made for rank {self.rank} of {self.world_size}, and this is rank {rank} of "
                    f"{world_size}; make it after torch.distributed.init_process_group, or pass rank and world_size"
                )


class _Iteration:
    """One iteration of a sampler, from a position of the order on."""

    def __init__(self, sampler: OrderedBatchSampler, position: int) -> None:
        self._sampler = sampler
        self._order = sampler.order()
        self.yielded = 0
        self._ends = np.zeros(_REMEMBERED, np.int64)
        self._ends[0] = position
        self._known = 0  # global batches whose end is known

    def end(self, batches: int) -> int:
        """The position behind the first so many global batches."""
        assert batches > self._known - _REMEMBERED
        while self._known < batches:
            last = int(self._ends[self._known % _REMEMBERED])
            self._ends[(self._known + 1) % _REMEMBERED] = self._sampler.end_of_batch(self._order, last)
            self._known += 1
        return int(self._ends[batches % _REMEMBERED])

    def batches(self) -> Iterator[list[int]]:
        """This rank's batches."""
        sampler, begin = self._sampler, self.end(0)
        # A loaded state holds until the first batch is asked for: loaders with workers make two iterators to begin.
        sampler._loaded = None
        while (end := self.end(self.yielded + 1)) > begin:
            positions = sampler.part(self._order, begin, end)
            if not positions.size:  # of the last global batch
                return
            batch: list[int] = self._order.samples(positions).tolist()
            begin = end
            self.yielded += 1
            yield batch


def _length(data: Sized | int) -> int:
    try:
        length = data if is_whole(data) else len(data)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(
            f"data is {data!r}, which has no length; pass a map-style data set or its number of samples"
        ) from None
    if not 0 <= length <= MAX_SAMPLES:  # type: ignore[operator]
        raise ValueError(f"the data set has {length} samples; use 0 to 2**62")
    return int(length)  # type: ignore[arg-type]


def _rank_of(rank: int | None, world_size: int | None, process_group: Ranks | None) -> tuple[int, int]:
    if rank is None and world_size is None:
        membership = read_membership(process_group, None) if dist.is_available() else None
        return (0, 1) if membership is None else (membership.ranks.index(membership.rank), len(membership.ranks))
    if process_group is not None:
        raise ValueError("process_group is given beside rank or world_size; pass the group, or both numbers")
    if rank is None or world_size is None:
        raise ValueError(f"rank is {rank} and world_size is {world_size}; pass both, or neither")
    if not is_whole(world_size) or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}; use a whole number of at least 1")
    if not is_whole(rank) or not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank!r}; use 0 to {world_size - 1} with {world_size} ranks")
    return int(rank), int(world_size)
