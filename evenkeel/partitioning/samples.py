"""What is known of the samples of a round: by one rank of its own, and of all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Lengths: TypeAlias = NDArray[np.int64] | NDArray[np.uint32]  # as ranks have them, and as the wire does

_FEW_FIELDS = 8  # up to which sums over a row are fastest column by column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankSamples:
    """What a rank knows of its own samples of a round, on the host: one batch after the other.

    Attributes:
        costs: (n,) int64 or float64, predicted work.
        lengths: (n, jagged fields) int64 or uint32, values of each jagged field.
        sizes: (n,) int64, bytes that moving each sample takes; None: the sum of its lengths.
        memory: (n,) float64, what the memory caps count; None: nothing.
        batch_sizes: Samples of each of the rank's batches, in order; empty: all are of one.
        divisible: (m, WIDTH) float64, the samples that may be split; see `Divisible.table`. None: there are none.
        roles: (jagged fields,) int64, what each field is to a sample in parts; see `part_ranges`. None: none is split.
    """

    costs: NDArray[np.int64] | NDArray[np.float64]
    lengths: Lengths
    sizes: NDArray[np.int64] | None = None
    memory: NDArray[np.float64] | None = None
    batch_sizes: tuple[int, ...] = ()
    divisible: NDArray[np.float64] | None = None
    roles: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.costs)

    @property
    def moving_sizes(self) -> NDArray[np.int64]:
        """(n,) what moving each sample takes."""
        return row_sums(self.lengths) if self.sizes is None else self.sizes

    @property
    def sizes_by_batch(self) -> tuple[int, ...]:
        """Samples of each of the rank's batches."""
        return self.batch_sizes or (len(self),)

    def in_batch(self, batch: int) -> slice:
        """Where the samples of a batch are; an empty range for one that the rank does not have."""
        sizes = self.sizes_by_batch
        begin = sum(sizes[:batch])
        return slice(begin, begin + (sizes[batch] if batch < len(sizes) else 0))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundSamples:
    """The samples of all ranks: by home rank, then by batch, then as they are in the batch.

    Attributes:
        batch_sizes: (ranks, batches) int64, samples of each of a rank's batches.
        costs: (n,) int64 or float64.
        lengths: (n, jagged fields) int64 or uint32.
        sizes: (n,) int64, or None for the sum of its lengths.
        memory: (n,) float64 or None.
        nodes: (ranks,) int32, number of each rank's host; None when there is at most one.
        divisible: (m, WIDTH) float64 or None; its samples are numbered among those of all ranks, and ascend.
        roles: (jagged fields,) int64 or None; see `RankSamples`.
    """

    batch_sizes: NDArray[np.int64]
    costs: NDArray[np.int64] | NDArray[np.float64]
    lengths: Lengths
    sizes: NDArray[np.int64] | None = None
    memory: NDArray[np.float64] | None = None
    nodes: NDArray[np.int32] | None = None
    divisible: NDArray[np.float64] | None = None
    roles: NDArray[np.int64] | None = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.batch_sizes)

    @property
    def num_batches(self) -> int:
        """Batches of the round's window."""
        return int(self.batch_sizes.shape[1])

    @property
    def counts_at_home(self) -> NDArray[np.int64]:
        """(ranks,) samples of each rank."""
        return self.batch_sizes[:, 0] if self.num_batches == 1 else np.asarray(self.batch_sizes.sum(axis=1))

    @property
    def moving_sizes(self) -> NDArray[np.int64]:
        """(n,) what moving each sample takes."""
        return row_sums(self.lengths) if self.sizes is None else self.sizes

    @property
    def steps(self) -> NDArray[np.int32] | None:
        """(n,) the batch in which each sample was loaded; None: all are of one."""
        if self.num_batches == 1:
            return None
        batches = np.tile(np.arange(self.num_batches, dtype=np.int32), self.num_ranks)
        return np.repeat(batches, self.batch_sizes.ravel())


def row_sums(lengths: Lengths) -> NDArray[np.int64]:
    """(n,) sum of each row of (n, fields) lengths."""
    num_fields = lengths.shape[1]
    if not 0 < num_fields <= _FEW_FIELDS:
        return np.asarray(np.einsum("ij->i", lengths, dtype=np.int64))
    sums = lengths[:, 0].astype(np.int64)
    for field in range(1, num_fields):
        sums += lengths[:, field]
    return sums
