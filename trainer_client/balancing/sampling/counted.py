"""Global batches of a fixed number of samples."""

from __future__ import annotations

from collections.abc import Sized

import numpy as np
from numpy.typing import NDArray

from trainer_client.balancing.membership import Ranks
from trainer_client.balancing.sampling.order import SampleOrder
from trainer_client.balancing.sampling.ordered import OrderedBatchSampler
from trainer_client.checks import check_whole


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
