"""Global batches of a budget of cost or tokens, divided over the ranks by cost."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning import PartitionError, partition
from trainer_client.balancing.membership import Ranks
from trainer_client.balancing.sampling.costs import Costs, CostTable
from trainer_client.balancing.sampling.cursor import Cursor
from trainer_client.balancing.sampling.ordered import CONSECUTIVE, Coming, OrderedBatchSampler
from trainer_client.checks import check_number, check_whole

_WALKED = 1 << 24  # samples whose costs `len` looks through, in a second or two; fewer where a function is called
_CALLED = 1 << 18
_READ = 256  # samples of which costs are read at first
_SHRINK = 16  # a batch that the ranks cannot hold loses a sixteenth of its samples and is tried again


class TokenBudgetSampler(OrderedBatchSampler):
    """Yields this rank's samples of global batches that cost as much as a budget allows.

    A global batch is the next samples of the data set's order (`SampleOrder`) whose costs add up to the budget at most.
    It is divided over the ranks so that their loads differ as little as `evenkeel.partitioning` finds, which leaves
    little for balancing to move. Where global batches end depends on order, costs and budget alone: a job of another
    number of ranks goes on with the same ones, and a step's work and the learning rate keep their meaning.

    A sample above the budget is a batch of its own. Batches get more than the budget where they would have fewer than
    `min_samples`: with one for each rank, a long sample does not leave the other ranks idle.
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        budget: float,
        costs: Costs,
        max_samples: int | None = None,
        min_samples: int | None = None,
        memory: Costs | None = None,
        memory_cap: float | None = None,
        counts: Literal["equal", "free"] = "equal",
        first_batch_size: int | None = None,
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
            budget: Cost of a global batch, of all ranks together, in the unit of `costs`.
            costs: What each sample costs, such as its tokens: (n,) numbers as an array, a memory map or a tensor; a
                function from an index to a number; the name of an attribute of the data set that is one of them; or
                `MeasuredCosts`. 0 or more. All ranks have the same.
            max_samples: Of a global batch, whatever they cost; at least `min_samples`.
            min_samples: Of a global batch, whatever they cost; default: one for each rank, and not less. Give the
                largest number of ranks to come, to have the same batches on any of them even where a sample costs more
                than a rank's part of the budget.
            memory: What each sample takes of a rank's memory, as `costs`; default: its cost.
            memory_cap: What a rank holds of it. A batch that the ranks cannot hold is made smaller, which then depends
                on their number; a sample above it is refused when its batch comes.
            counts: `equal`: ranks get floor or ceil of the mean number of samples; `free`: any number. As in
                `BalanceOptions`.
            first_batch_size: Samples of a global batch while costs are still being measured.
            seed: Of the order.
            shuffle: False: the order of the data set itself, in each epoch.
            drop_last: Leave out the last global batch of an epoch, which has what is left.
            rank: This rank, with `world_size`; default: that in the process group.
            world_size: Ranks that share the data.
            process_group: As for `GlobalBatchSampler`.

        Raises:
            ValueError: If an argument is wrong.
        """
        super().__init__(
            data, seed=seed, shuffle=shuffle, drop_last=drop_last, rank=rank, world_size=world_size,
            process_group=process_group,
        )  # fmt: skip
        check_number("budget", budget, above=0)
        if counts not in ("equal", "free"):
            raise ValueError(f"counts is {counts!r}; use 'equal' or 'free'")
        self.budget = budget
        self.counts = counts
        self.min_samples = min_samples if min_samples is not None else self.world_size
        check_whole(self, min_samples=self.world_size)
        self.max_samples = max_samples if max_samples is not None else max(self.num_samples, self.min_samples)
        check_whole(self, max_samples=self.min_samples)
        if memory is not None and memory_cap is None:
            raise ValueError("memory is given without memory_cap; pass what a rank holds of it")
        if memory_cap is not None:
            check_number("memory_cap", memory_cap, above=0)
        self.memory_cap = memory_cap
        self._costs = CostTable("costs", costs, data, self.num_samples)
        self._memory = self._costs if memory is None else CostTable("memory", memory, data, self.num_samples)
        self.first_batch_size = first_batch_size
        measured = [name for name, table in (("costs", self._costs), ("memory", self._memory)) if table.measured]
        if measured and first_batch_size is None:
            raise ValueError(f"{measured[0]} are measured; pass first_batch_size, for the batches until they are known")
        if first_batch_size is not None:
            check_whole(self, first_batch_size=self.world_size)
        self._amounts: _Amounts | None = None
        self._divided: tuple[Coming, int, int, int, NDArray[np.int32]] | None = None  # the latest of them
        self._length: tuple[int, str, tuple[int, bool]] | None = None

    def __len__(self) -> int:
        """Batches of this rank in the whole of the present epoch, counted by looking through all costs.

        Raises:
            TypeError: If that takes long: beyond 16 million samples, or 262,144 of a function's; see `count_batches`.
        """
        self._check_walk()
        return self.count_batches()

    def count_steps(self) -> int:
        """Global batches of the whole of the present epoch, counted by looking through all costs.

        Raises:
            TypeError: If that takes long, as of `len`.
        """
        self._check_walk()
        return self._counted()[0]

    def _check_walk(self) -> None:
        most = _CALLED if self._costs.is_called or self._memory.is_called else _WALKED
        if self.num_samples > most:
            raise TypeError(
                f"the number of batches is not known without a walk through all {self.num_samples} samples; "
                "`count_batches()` walks"
            )

    def count_batches(self) -> int:
        """Batches of this rank in the whole of the present epoch, however long that takes to count."""
        steps, lacks = self._counted()
        return steps - lacks

    def _counted(self) -> tuple[int, bool]:
        """Global batches, and whether this rank has no sample of the last one."""
        division = self.division
        if self._length is None or self._length[:2] != (self.epoch, division):
            coming = Coming(self, Cursor(epoch=self.epoch), division)
            ends = [0]
            while (end := self.end_of_batch(coming, ends[-1])) > ends[-1]:
                ends.append(end)
            lacks = len(ends) > 1 and not self.part(coming, ends[-2], ends[-1], self.rank, self.world_size).size
            self._length = (self.epoch, division, (len(ends) - 1, lacks))
        return self._length[2]

    @property
    def division(self) -> str:
        """By cost, unless costs are still being measured."""
        if not (self._costs.known and self._memory.known):
            return CONSECUTIVE
        return f"cost, counts {self.counts}, memory_cap {self.memory_cap}"

    def amounts(self, indexes: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Costs and memory of samples, given by index into the data set."""
        costs = self._costs.of(indexes)
        return costs, costs if self._memory is self._costs else self._memory.of(indexes)

    def end_of_batch(self, coming: Coming, begin: int) -> int:
        """Where the costs reach the budget, or the epoch ends."""
        if coming.division == CONSECUTIVE:
            end = min(begin + self._first_batch_size, coming.samples)
            return begin if self.drop_last and end - begin < self._first_batch_size else end
        most = min(begin + self.max_samples, coming.samples)
        amounts = self._amounts_from(coming, begin)
        while True:
            costs, memory = amounts.costs, amounts.memory
            fits = int(np.searchsorted(np.cumsum(costs), self.budget, side="right"))
            if self.memory_cap is not None:
                room = self.memory_cap * self.world_size
                fits = min(fits, int(np.searchsorted(np.cumsum(memory), room, side="right")))
            if fits < costs.size or begin + costs.size >= most:
                break
            amounts.read(self, max(2 * costs.size, _READ), most - begin)
        end = min(begin + max(fits, self.min_samples), most)
        if self.memory_cap is not None and end > begin:
            amounts.read(self, end - begin, most - begin)
            end = self._end_that_fits(coming, begin, end)
        return begin if self.drop_last and end == coming.samples else end

    def divide(self, coming: Coming, begin: int, end: int, world_size: int) -> NDArray[np.int32]:
        """By cost, evenly; consecutive parts, exchanged where they differ."""
        known = self._divided
        if known is not None and known[0] is coming and known[1:4] == (begin, end, world_size):
            return known[4]
        amounts = self._amounts_from(coming, begin)
        amounts.read(self, end - begin, end - begin)
        count = end - begin
        capped: dict[str, Any] = {}
        if self.memory_cap is not None:
            capped = {"memory": amounts.memory[:count], "memory_caps": np.full(world_size, float(self.memory_cap))}
        found = partition(
            amounts.costs[:count], np.arange(count) * world_size // max(count, 1), world_size, counts=self.counts,
            min_samples=min(1, count // world_size), **capped,
        ).destinations  # fmt: skip
        self._divided = (coming, begin, end, world_size, found)
        return found

    @property
    def _first_batch_size(self) -> int:
        assert self.first_batch_size is not None  # costs that are being measured come with it
        return self.first_batch_size

    def _end_that_fits(self, coming: Coming, begin: int, end: int) -> int:
        """The same end, or an earlier one if no division over the ranks is within the memory cap."""
        assert self.memory_cap is not None
        amounts = self._amounts_from(coming, begin)
        heavy = np.flatnonzero(amounts.memory[: end - begin] > self.memory_cap)
        if heavy.size:
            index = int(coming.indexes(begin + heavy[:1])[0])
            raise ValueError(
                f"sample {index} takes {amounts.memory[heavy[0]]} of memory and memory_cap is {self.memory_cap}; raise "
                "it, shorten the sample, or leave it out of the data set"
            )
        while True:
            try:
                self.divide(coming, begin, end, self.world_size)
            except PartitionError:
                assert end - begin > self.world_size  # a sample for each rank fits
                end = max(end - max((end - begin) // _SHRINK, 1), begin + self.world_size)
            else:
                return end

    def _amounts_from(self, coming: Coming, begin: int) -> _Amounts:
        if self._amounts is None or self._amounts.coming is not coming or begin < self._amounts.begin:
            self._amounts = _Amounts(coming, begin)
        self._amounts.drop_before(begin)
        return self._amounts


class _Amounts:
    """Costs and memory of the next samples, as far as they have been read."""

    def __init__(self, coming: Coming, begin: int) -> None:
        self.coming = coming
        self.begin = begin
        self.costs = self.memory = np.empty(0, np.int64)

    def drop_before(self, begin: int) -> None:
        """Forgets those of earlier samples."""
        gone = begin - self.begin
        self.begin, self.costs, self.memory = begin, self.costs[gone:], self.memory[gone:]

    def read(self, sampler: TokenBudgetSampler, count: int, most: int) -> None:
        """Reads on, until they are so many."""
        count = min(count, most)
        if count <= self.costs.size:
            return
        numbers = np.arange(self.begin + self.costs.size, self.begin + count)
        indexes = self.coming.indexes(numbers)
        costs, memory = sampler.amounts(indexes)
        self.costs, self.memory = np.concatenate((self.costs, costs)), np.concatenate((self.memory, memory))
