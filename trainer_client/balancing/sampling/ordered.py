"""What the samplers of global batches have in common: the order, the cursor in it, and the state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Sampler

from trainer_client.balancing.membership import Ranks, read_membership
from trainer_client.balancing.sampling.cursor import Cursor, Rest, read_cursor
from trainer_client.balancing.sampling.order import MAX_SAMPLES, VERSION, SampleOrder
from trainer_client.checks import check_whole, is_whole

CONSECUTIVE = "consecutive"
_REMEMBERED = 1 << 16  # ends of batches, more than loaders read ahead of the one that is trained


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
        self.rank, self.world_size = _place(rank, world_size, process_group)
        self._epoch = 0
        self._epoch_was_named = False  # by `set_epoch`, since a state was loaded
        self._loaded: Cursor | None = None  # where the next iteration begins
        self._latest: _Iteration | None = None

    @abstractmethod
    def end_of_batch(self, coming: Coming, begin: int) -> int:
        """Where the global batch that begins at `begin` ends, counted from where the iteration began.

        `begin` if there is none any more.
        """

    @abstractmethod
    def count_steps(self) -> int:
        """Global batches of the whole of the present epoch: the batches of those ranks that have most of them.

        Raises:
            TypeError: If it takes long to count them.
        """

    @property
    def division(self) -> str:
        """How the next iteration divides a global batch over ranks, as states tell it."""
        return CONSECUTIVE

    def divide(self, coming: Coming, begin: int, end: int, world_size: int) -> NDArray[np.int32]:
        """(end - begin,) the rank of each sample of a global batch, where parts are not consecutive."""
        raise NotImplementedError

    def part(self, coming: Coming, begin: int, end: int, rank: int, world_size: int) -> NDArray[np.int64]:
        """Which samples of a global batch a rank gets: (k,) numbers from `begin` to `end`-1, ascending.

        Consecutive parts differ by one sample at most; the first ranks have one more where it does not come out even.
        """
        if coming.division != CONSECUTIVE:
            return np.flatnonzero(self.divide(coming, begin, end, world_size) == rank) + begin
        share, more = divmod(end - begin, world_size)
        first = begin + rank * share + min(rank, more)
        return np.arange(first, first + share + (rank < more))

    @property
    def epoch(self) -> int:
        """The epoch that `set_epoch` or a loaded state named last."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch's order the next iteration follows.

        With the epoch of a state that has just been loaded, the next iteration goes on where the state says, and is
        empty where the state has nothing left of the epoch. Another epoch begins at its first sample.
        """
        if not is_whole(epoch) or epoch < 0:
            raise ValueError(f"epoch is {epoch!r}; use a whole number, 0 or more")
        self._epoch_was_named = True
        if epoch != self._epoch:
            self._epoch = int(epoch)
            self._loaded = self._latest = None

    def __iter__(self) -> Iterator[list[int]]:
        self._check_world()
        start = self._loaded or Cursor(epoch=self._epoch)
        latest = _Iteration(self, start)
        if self._loaded is not None and not self._epoch_was_named and latest.end(1) == 0:
            latest = _Iteration(self, Cursor(epoch=self._epoch))  # the epoch had ended: this is the next loop
        self._latest = latest
        return latest.batches()

    def _begun(self) -> None:
        """A loaded state holds until the first batch is asked for: loaders with workers make two iterators to begin."""
        self._loaded = None

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
        if self._latest is None:  # since the start, a state or another epoch
            cursor, division = self._loaded or Cursor(epoch=self._epoch), self.division
        else:
            coming = self._latest.coming
            cursor, division = coming.start.after(self._latest.end(batches)), coming.division
        return {**self._identity(), **cursor.plain(), "division": division}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration begin where a state says, on any number of ranks.

        Raises:
            ValueError: If the state is of another data set, order or version.
        """
        cursor = self._read(state)
        self._loaded, self._epoch, self._latest, self._epoch_was_named = cursor, cursor.epoch, None, False

    def rest_of(self, state: Mapping[str, Any], trained: Sequence[Sequence[ArrayLike]]) -> dict[str, Any]:
        """The state from which a half-trained window goes on, with samples that were trained in another order.

        What is left of the window comes first, in the order of the data set, then what follows the window.

        Args:
            state: Where the window began.
            trained: By rank that the job had and batch of the window: for each sample that the rank had loaded in it,
                in order, whether it was trained.

        Raises:
            ValueError: If these are not the batches that follow the state.
        """
        start = self._read(state)
        division = state.get("division")
        if division not in (CONSECUTIVE, self.division):
            raise ValueError(
                f"state['division'] is {division!r} and this sampler's is {self.division!r}: it cannot tell which rank "
                "had which sample of the window; load it into a sampler with the options of the job that saved it"
            )
        coming = Coming(self, start, str(division))
        left, begin = [], 0
        for batch in range(max(map(len, trained), default=0)):
            masks = [np.asarray(masks[batch] if batch < len(masks) else [], np.bool_) for masks in trained]
            end = begin + sum(mask.size for mask in masks)
            for rank, mask in enumerate(masks):
                known = end <= coming.samples
                part = self.part(coming, begin, end, rank, len(trained)) if known else np.empty(0, np.int64)
                if mask.shape != part.shape:
                    raise ValueError(
                        f"trained[{rank}][{batch}] has the shape {mask.shape}, and this batch had {part.size} samples "
                        f"on {len(trained)} ranks; pass what was trained of the window that began at this state, to a "
                        "sampler with the options of that job"
                    )
                left.append(part[~mask])
            begin = end
        numbers = np.sort(np.concatenate([np.empty(0, np.int64), *left]))
        after = start.after(begin)
        places = np.concatenate((coming.places(numbers), after.left))
        rest = Rest.of(places) if places.size else None
        cursor = Cursor(epoch=start.epoch, place=after.place, rest=rest)
        return {**self._identity(), **cursor.plain(), "division": self.division}

    def _identity(self) -> dict[str, Any]:
        return {"version": VERSION, "samples": self.num_samples, "seed": self.seed, "shuffle": self.shuffle}

    def _read(self, state: Mapping[str, Any]) -> Cursor:
        if not isinstance(state, Mapping):
            raise ValueError(f"state is {state!r}; load what `state_dict` of a sampler returned")
        for name, own in self._identity().items():
            if name not in state or state[name] != own:
                found = repr(state[name]) if name in state else "missing"
                raise ValueError(f"state[{name!r}] is {found} and should be {own!r}; {_REMEDIES[name]}")
        return read_cursor(state, self.num_samples)

    def _check_world(self) -> None:
        if self._follows_default_group:
            rank, world_size = _place(None, None, None)
            if (rank, world_size) != (self.rank, self.world_size):
                raise ValueError(
                    f"the sampler was made for rank {self.rank} of {self.world_size}, and this is rank {rank} of "
                    f"{world_size}; make it after torch.distributed.init_process_group, or pass rank and world_size"
                )


_REMEDIES = {
    "version": "the order of samples was another one then: finish the epoch with the release that saved the state",
    "samples": "load the data set that the state is of, or begin a new epoch",
    "seed": "make the sampler with the seed of the state",
    "shuffle": "make the sampler with the same shuffle",
}


class Coming:
    """The samples that come from a cursor on, numbered from 0.

    Attributes:
        start: The cursor.
        samples: How many there are.
        division: How global batches of them are divided over ranks.
    """

    def __init__(self, sampler: OrderedBatchSampler, start: Cursor, division: str) -> None:
        self.start = start
        self.division = division
        self.samples = start.to_come(sampler.num_samples)
        self._order = SampleOrder(sampler.num_samples, seed=sampler.seed, epoch=start.epoch, shuffle=sampler.shuffle)

    def places(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Their places in the order."""
        left = self.start.left
        places = numbers + (self.start.place - left.size)
        early = numbers < left.size
        places[early] = left[numbers[early]]
        return places

    def indexes(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Their indexes into the data set."""
        return self._order.samples(self.places(numbers))


class _Iteration:
    """One iteration of a sampler."""

    def __init__(self, sampler: OrderedBatchSampler, start: Cursor) -> None:
        self._sampler = sampler
        self.coming = Coming(sampler, start, sampler.division)
        self.yielded = 0
        self._ends = np.zeros(_REMEMBERED, np.int64)
        self._known = 0  # global batches whose end is known

    def end(self, batches: int) -> int:
        """Samples of the first global batches."""
        assert batches > self._known - _REMEMBERED
        while self._known < batches:
            last = int(self._ends[self._known % _REMEMBERED])
            self._ends[(self._known + 1) % _REMEMBERED] = self._sampler.end_of_batch(self.coming, last)
            self._known += 1
        return int(self._ends[batches % _REMEMBERED])

    def batches(self) -> Iterator[list[int]]:
        """This rank's batches."""
        sampler, begin = self._sampler, 0
        sampler._begun()
        while (end := self.end(self.yielded + 1)) > begin:
            numbers = sampler.part(self.coming, begin, end, sampler.rank, sampler.world_size)
            if not numbers.size:  # of the last global batch
                return
            batch: list[int] = self.coming.indexes(numbers).tolist()
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


def _place(rank: int | None, world_size: int | None, process_group: Ranks | None) -> tuple[int, int]:
    if rank is None and world_size is None:
        if not dist.is_available():
            return 0, 1
        found = read_membership(process_group, None)
        return (0, 1) if found is None else (found.ranks.index(found.own), len(found.ranks))
    if process_group is not None:
        raise ValueError("process_group is given beside rank or world_size; pass the group, or both numbers")
    if rank is None or world_size is None:
        raise ValueError(f"rank is {rank} and world_size is {world_size}; pass both, or neither")
    if not is_whole(world_size) or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}; use a whole number of at least 1")
    if not is_whole(rank) or not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank!r}; use 0 to {world_size - 1} with {world_size} ranks")
    return int(rank), int(world_size)
