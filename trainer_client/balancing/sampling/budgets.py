"""Global batches of a budget of cost or tokens, divided over the ranks by cost."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from evenkeel.partitioning import PartitionError, partition
from trainer_client.balancing.groups import Ranks
from trainer_client.balancing.sampling.order import SampleOrder
from trainer_client.balancing.sampling.samplers import OrderedBatchSampler
from trainer_client.checks import check_number, check_whole

Costs = ArrayLike | torch.Tensor | Callable[[int], float] | str
"""Costs of samples as a sampler takes them."""

_WALKED = 1 << 24  # samples whose costs `len` looks through, in a few seconds; fewer where a function is called
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
                function from an index to a number; or the name of such an attribute of the data set. 0 or more. All
                ranks have the same.
            max_samples: Of a global batch, whatever they cost; at least `min_samples`.
            min_samples: Of a global batch, whatever they cost; default: one for each rank, and not less. Give the
                largest number of ranks to come, to have the same batches on any of them even where a sample costs more
                than a rank's part of the budget.
            memory: What each sample takes of a rank's memory, as `costs`; default: its cost.
            memory_cap: What a rank holds of it. A batch that the ranks cannot hold is made smaller, which then depends
                on their number; a sample above it is refused when its batch comes.
            counts: `equal`: ranks get floor or ceil of the mean number of samples; `free`: any number. As in
                `BalanceOptions`.
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
        self._costs = _numbers("costs", costs, data, self.num_samples)
        self._memory = self._costs if memory is None else _numbers("memory", memory, data, self.num_samples)
        # of the next samples of an order from a position on, costs and memory as far as they have been read
        self._amounts: tuple[SampleOrder, int, NDArray[Any], NDArray[Any]] | None = None
        self._divided: tuple[SampleOrder, int, int, NDArray[np.int32]] | None = None  # the latest global batch
        self._counted: tuple[int, int, bool] | None = None  # the latest epoch's

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
        return self._count()[0]

    def count_batches(self) -> int:
        """Batches of this rank in the whole of the present epoch, however long that takes to count."""
        steps, lacks = self._count()
        return steps - lacks

    def _check_walk(self) -> None:
        if self.num_samples > (_CALLED if callable(self._costs) or callable(self._memory) else _WALKED):
            raise TypeError(
                f"the number of batches is not known without a walk through all {self.num_samples} samples; "
                "`count_batches()` walks"
            )

    def _count(self) -> tuple[int, bool]:
        """Global batches, and whether this rank has no sample of the last one."""
        if self._counted is None or self._counted[0] != self.epoch:
            order, steps, begin, end = self.order(), 0, 0, 0
            while (following := self.end_of_batch(order, end)) > end:
                steps, begin, end = steps + 1, end, following
            self._counted = (self.epoch, steps, steps > 0 and not self.part(order, begin, end).size)
        return self._counted[1:]

    def end_of_batch(self, order: SampleOrder, begin: int) -> int:
        """Where the costs reach the budget, or the epoch ends."""
        most = min(self.max_samples, order.length - begin)
        count, fits = 0, 0
        while fits == count < most:
            count = min(max(2 * count, _READ), most)
            costs, memory = self._read(order, begin, count)
            fits = int(np.searchsorted(np.cumsum(costs), self.budget, side="right"))
            if self.memory_cap is not None:
                room = self.memory_cap * self.world_size
                fits = min(fits, int(np.searchsorted(np.cumsum(memory), room, side="right")))
        end = begin + min(max(fits, self.min_samples), most)
        if self.memory_cap is not None and end > begin:
            end = self._end_that_fits(order, begin, end, self.memory_cap)
        return begin if self.drop_last and end == order.length else end

    def part(self, order: SampleOrder, begin: int, end: int) -> NDArray[np.int64]:
        """By cost, evenly; consecutive parts, exchanged where they differ."""
        return np.flatnonzero(self._divide(order, begin, end) == self.rank) + begin

    def _divide(self, order: SampleOrder, begin: int, end: int) -> NDArray[np.int32]:
        """(end - begin,) the rank of each sample of a global batch."""
        if self._divided is not None and self._divided[0] is order and self._divided[1:3] == (begin, end):
            return self._divided[3]
        count = end - begin
        costs, memory = self._read(order, begin, count)
        capped: dict[str, Any] = {}
        if self.memory_cap is not None:
            capped = {"memory": memory, "memory_caps": np.full(self.world_size, float(self.memory_cap))}
        destinations = partition(
            costs, np.arange(count) * self.world_size // max(count, 1), self.world_size,
            counts=self.counts, min_samples=min(1, count // self.world_size), **capped,
        ).destinations  # fmt: skip
        self._divided = (order, begin, end, destinations)
        return destinations

    def _end_that_fits(self, order: SampleOrder, begin: int, end: int, cap: float) -> int:
        """The same end, or an earlier one if no division over the ranks is within the memory cap."""
        memory = self._read(order, begin, end - begin)[1]
        heavy = np.flatnonzero(memory > cap)
        if heavy.size:
            index = int(order.samples(begin + heavy[:1])[0])
            raise ValueError(
                f"sample {index} takes {memory[heavy[0]]} of memory and memory_cap is {cap}; raise it, shorten the "
                "sample, or leave it out of the data set"
            )
        while True:
            try:
                self._divide(order, begin, end)
            except PartitionError:
                assert end - begin > self.world_size  # a sample for each rank fits
                end = max(end - max((end - begin) // _SHRINK, 1), begin + self.world_size)
            else:
                return end

    def _read(self, order: SampleOrder, begin: int, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """(count,) costs and memory of the samples from a position on; what was read of later ones is kept."""
        if self._amounts is None or self._amounts[0] is not order or begin < self._amounts[1]:
            self._amounts = order, begin, np.empty(0, np.int64), np.empty(0, np.int64)
        costs, memory = (read[begin - self._amounts[1] :] for read in self._amounts[2:])
        if count > costs.size:
            indexes = order.samples(np.arange(begin + costs.size, begin + count))
            more = _at("costs", self._costs, indexes)
            taken = more if self._memory is self._costs else _at("memory", self._memory, indexes)
            costs, memory = np.concatenate((costs, more)), np.concatenate((memory, taken))
        self._amounts = order, begin, costs, memory
        return costs[:count], memory[:count]


def _numbers(field: str, values: Costs, data: Sized | int, num_samples: int) -> Callable[[int], float] | NDArray[Any]:
    """A number for each sample, as the user gave them."""
    if isinstance(values, str):
        if not hasattr(data, values):
            raise ValueError(f"{field} is {values!r}, which {type(data).__name__} lacks; name one of its attributes")
        values = getattr(data, values)
    if callable(values):
        return values
    numbers: NDArray[Any] = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if numbers.shape != (num_samples,) or numbers.dtype.kind not in "iuf":
        raise ValueError(
            f"{field} is {numbers.dtype} of shape {numbers.shape}; give one number for each of the {num_samples} "
            "samples"
        )
    return numbers


def _at(field: str, values: Callable[[int], float] | NDArray[Any], indexes: NDArray[np.int64]) -> NDArray[Any]:
    """The numbers of some samples, int64 or float64; `ValueError` if one is negative or not finite."""
    chosen = np.array([values(index) for index in indexes.tolist()]) if callable(values) else values[indexes]
    chosen = chosen.astype(np.int64 if chosen.dtype.kind in "iu" and chosen.size else np.float64)
    bad = np.flatnonzero(~((chosen >= 0) & (chosen < np.inf)))
    if bad.size:
        raise ValueError(f"{field}[{indexes[bad[0]]}] is {chosen[bad[0]]}; use finite numbers, 0 or more")
    return chosen
