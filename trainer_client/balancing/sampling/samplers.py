"""Samplers of global batches along an order: the position in it and its state, and batches of a fixed size."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from trainer_client.balancing.groups import Ranks, read_membership
from trainer_client.balancing.sampling.order import MAX_SAMPLES, VERSION, SampleOrder
from trainer_client.checks import check_whole, is_whole

_REMEDIES = {
    "version": "the order of samples was another one then: finish the epoch with the release that saved the state",
    "samples": "load the data set that the state is of, or begin a new epoch",
    "seed": "make the sampler with the seed of the state",
    "shuffle": "make the sampler with the same shuffle",
}


class OrderedBatchSampler(Sampler[list[int]]):
    """Yields this rank's samples of one global batch after the other, along the order of a data set.

    A subclass says where a global batch ends, and which rank gets which of its samples. The state is the same on all
    ranks and does not depend on their number: how far the order has been trained.

    Attributes:
        epoch: That `set_epoch` or a loaded state named last.
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
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        check_whole(self, seed=0)
        for name in ("shuffle", "drop_last"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; use True or False")
        self._follows_default_group = rank is None and world_size is None and process_group is None
        self.rank, self.world_size = _rank_of(rank, world_size, process_group)
        self.epoch = 0
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
        if epoch != self.epoch:
            self.epoch = int(epoch)
            self._loaded = self._latest = None

    def __iter__(self) -> Iterator[list[int]]:
        if self._follows_default_group and (now := _rank_of(None, None, None)) != (self.rank, self.world_size):
            raise ValueError(
                f"the sampler was made for rank {self.rank} of {self.world_size}, and this is rank {now[0]} of "
                f"{now[1]}; make it after torch.distributed.init_process_group, or pass rank and world_size"
            )
        latest = _Iteration(self, self._loaded or 0)
        if self._loaded is not None and not self._epoch_was_named and latest.end(1) == latest.end(0):
            latest = _Iteration(self, 0)  # the epoch had ended: this is the next loop
        self._latest = latest
        return latest.batches()

    def order(self) -> SampleOrder:
        """The order of the present epoch."""
        return SampleOrder(self.num_samples, seed=int(self.seed), epoch=self.epoch, shuffle=self.shuffle)

    def state_dict(self) -> dict[str, Any]:
        """The state behind all batches that the latest iteration has yielded."""
        return self.state_after(0 if self._latest is None else self._latest.yielded)

    def state_after(self, batches: int) -> dict[str, Any]:
        """The state when so many global batches of the latest iteration have been trained; of any rank, the same.

        It takes a few microseconds, also where workers of a `DataLoader` have read far ahead of what is trained.

        Args:
            batches: Counted from the iteration's begin, also those in which this rank has no samples.
        """
        position = (self._loaded or 0) if self._latest is None else self._latest.end(batches)
        return {**self._identity(), "epoch": self.epoch, "position": position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration begin where a state says, on any number of ranks.

        Raises:
            ValueError: If the state is of another data set, order or version.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"state is {state!r}; load what `state_dict` of a sampler returned")
        for name, expected in self._identity().items():
            if name not in state or state[name] != expected:
                value = repr(state[name]) if name in state else "missing"
                raise ValueError(f"state[{name!r}] is {value} and should be {expected!r}; {_REMEDIES[name]}")
        for name in ("epoch", "position"):
            if not is_whole(state.get(name)) or state[name] < 0:
                raise ValueError(f"state[{name!r}] is {state.get(name)!r}; load a state as `state_dict` returned it")
        if state["position"] > self.num_samples:
            raise ValueError(
                f"state['position'] is {state['position']}, and the data set has {self.num_samples} samples; load a "
                "state of its own"
            )
        self._loaded, self.epoch = int(state["position"]), int(state["epoch"])
        self._latest, self._epoch_was_named = None, False

    def _identity(self) -> dict[str, Any]:
        return {"version": VERSION, "samples": self.num_samples, "seed": int(self.seed), "shuffle": self.shuffle}


class _Iteration:
    """One iteration of a sampler, from a position of the order on."""

    def __init__(self, sampler: OrderedBatchSampler, position: int) -> None:
        self._sampler, self._order = sampler, sampler.order()
        self._ends = array("q", [position])  # behind each of the global batches so far
        self.yielded = 0

    def end(self, batches: int) -> int:
        """The position behind the first so many global batches."""
        while len(self._ends) <= batches:
            self._ends.append(self._sampler.end_of_batch(self._order, self._ends[-1]))
        return self._ends[batches]

    def batches(self) -> Iterator[list[int]]:
        """This rank's batches."""
        # A loaded state holds until the first batch is asked for: loaders with workers make two iterators to begin.
        self._sampler._loaded = None
        begin = self.end(0)
        while (end := self.end(self.yielded + 1)) > begin:
            positions = self._sampler.part(self._order, begin, end)
            if not positions.size:  # of the last global batch
                return
            begin = end
            self.yielded += 1
            yield self._order.samples(positions).tolist()


class GlobalBatchSampler(OrderedBatchSampler):
    """Yields this rank's samples of global batches that have a fixed number of samples.

    For a `DataLoader(data, batch_sampler=…)` around a map-style data set. A global batch is the next samples of the
    data set's order, divided into a consecutive part for each rank; parts differ by one sample at most. The order is a
    function of seed and epoch (`SampleOrder`), so that a job of any number of ranks goes on from the same state with
    the same global batches.

    The last global batch of an epoch has what is left. Where that is less than a sample for each rank, the last ranks
    have a batch less than others; `BalancedLoader` goes on with them, and other loops want `drop_last`.
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        global_batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: Ranks | None = None,
    ) -> None:
        """Begins at the first sample of epoch 0.

        Args:
            data: The data set, or its number of samples.
            global_batch_size: Samples of all ranks in a step; at least one for each.
            seed: Of the order.
            shuffle: False: the order of the data set itself, in each epoch.
            drop_last: Leave out the last global batch if it has fewer samples than others.
            rank: This rank, with `world_size`; default: that in the process group.
            world_size: Ranks that share the data.
            process_group: The data-parallel group, or the dimensions of a mesh that make it, as for `Balancer`;
                default: all ranks, or this one alone where torch.distributed is not initialised.

        Raises:
            ValueError: If an argument is wrong.
        """
        super().__init__(
            data, seed=seed, shuffle=shuffle, drop_last=drop_last, rank=rank, world_size=world_size,
            process_group=process_group,
        )  # fmt: skip
        self.global_batch_size = global_batch_size
        check_whole(self, global_batch_size=1)
        if global_batch_size < self.world_size:
            raise ValueError(
                f"global_batch_size is {global_batch_size} for {self.world_size} ranks; use one sample for each or more"
            )

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch."""
        full, rest = divmod(self.num_samples, self.global_batch_size)
        return full + (rest > self.rank and not self.drop_last)

    def count_steps(self) -> int:
        """Global batches of a whole epoch."""
        full, rest = divmod(self.num_samples, self.global_batch_size)
        return full + (rest > 0 and not self.drop_last)

    def end_of_batch(self, order: SampleOrder, begin: int) -> int:
        """After the fixed number of samples, or where the epoch ends."""
        end = min(begin + self.global_batch_size, order.length)
        return begin if self.drop_last and end - begin < self.global_batch_size else end

    def part(self, order: SampleOrder, begin: int, end: int) -> NDArray[np.int64]:  # noqa: ARG002
        """Consecutive positions; the first ranks have one more where it does not come out even."""
        share, more = divmod(end - begin, self.world_size)
        first = begin + self.rank * share + min(self.rank, more)
        return np.arange(first, first + share + (self.rank < more))


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
        return read_membership(process_group, None).place
    if process_group is not None:
        raise ValueError("process_group is given beside rank or world_size; pass the group, or both numbers")
    if rank is None or world_size is None:
        raise ValueError(f"rank is {rank} and world_size is {world_size}; pass both, or neither")
    if not is_whole(world_size) or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}; use a whole number of at least 1")
    if not is_whole(rank) or not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank!r}; use 0 to {world_size - 1} with {world_size} ranks")
    return int(rank), int(world_size)
