"""What is known of the samples of a round: by one rank of its own, and of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.divisible import WIDTH

Lengths: TypeAlias = NDArray[np.int64] | NDArray[np.uint32]  # as ranks have them, and as the wire does

_FEW_FIELDS = 8  # up to which sums over a row are fastest column by column


class Column(NamedTuple):
    """An array in pieces, to be joined along the first dimension: whoever joins them says where.

    Attributes:
        dtype: Of the whole array.
        shape: Of the whole array.
        parts: Its pieces, in order.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    parts: Sequence[NDArray[Any]]

    @classmethod
    def of(cls, array: NDArray[Any]) -> Column:
        """An array in one piece."""
        return cls(array.dtype, array.shape, (array,))

    def joined(self) -> NDArray[Any]:
        """The whole array, in memory of its own."""
        return np.concatenate(self.parts, dtype=self.dtype) if self.shape[0] else np.empty(self.shape, self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankSamples:
    """What a rank knows of its own samples of a round, on the host: one batch after the other.

    Attributes:
        costs: (n,) int64 or float64, predicted work.
        lengths: (n, jagged fields) int64 or uint32, values of each jagged field.
        sizes: (n,) int64, bytes that moving each sample takes; None: the sum of its lengths.
        memory: (n,) float64, what the memory caps count; None: nothing.
        batch_sizes: Samples of each of the rank's batches, in order; empty: all are of one.
        given: (n,) int64, the batch of the window and the rank that train each sample, as batch << 32 | rank, where
            that has been decided before; None: it is to be found.
        divisible: (m, WIDTH) float64, the samples that may be split; see `Divisible.table`. None: there are none.
        roles: (jagged fields,) int64, what each field is to a sample in parts; see `part_ranges`. None: none is split.
    """

    costs: NDArray[np.int64] | NDArray[np.float64]
    lengths: Lengths
    sizes: NDArray[np.int64] | None = None
    memory: NDArray[np.float64] | None = None
    batch_sizes: tuple[int, ...] = ()
    given: NDArray[np.int64] | None = None
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

    def rows(self, *, as_float: bool, with_memory: bool) -> NDArray[np.int64]:
        """(n, columns) all that is said of each sample, as words of 8 bytes, which `RoundSamples.of_rows` reads.

        Args:
            as_float: Some rank's costs are float64.
            with_memory: There are memory caps.
        """
        first = 2 + with_memory + (self.given is not None)
        rows = np.empty((len(self), first + self.lengths.shape[1]), np.int64)
        rows[:, 0] = self.costs.astype(np.float64 if as_float else np.int64, copy=False).view(np.int64)
        rows[:, 1] = self.moving_sizes
        if with_memory:
            assert self.memory is not None
            rows[:, 2] = self.memory.view(np.int64)
        if self.given is not None:
            rows[:, first - 1] = self.given
        rows[:, first:] = self.lengths
        return rows


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
        given: (n,) int64 or None; see `RankSamples`.
        divisible: (m, WIDTH) float64 or None; its samples are numbered among those of all ranks, and ascend.
        roles: (jagged fields,) int64 or None; see `RankSamples`.
    """

    batch_sizes: NDArray[np.int64]
    costs: NDArray[np.int64] | NDArray[np.float64]
    lengths: Lengths
    sizes: NDArray[np.int64] | None = None
    memory: NDArray[np.float64] | None = None
    nodes: NDArray[np.int32] | None = None
    given: NDArray[np.int64] | None = None
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

    @property
    def nbytes(self) -> int:
        """Memory of the arrays, in the types that a plan is made from."""
        n, fields = self.lengths.shape
        each = 8 + 4 * fields + 8 * (self.sizes is not None) + 8 * (self.memory is not None)
        return int(n * each) + self.batch_sizes.nbytes + (0 if self.divisible is None else self.divisible.nbytes)

    def part(self, begin: int, end: int) -> RoundSamples:
        """The samples of the ranks from `begin` to before `end`, numbered from 0 on."""
        if begin == 0 and end == self.num_ranks:
            return self
        first, last = int(self.batch_sizes[:begin].sum()), int(self.batch_sizes[:end].sum())
        return RoundSamples(
            batch_sizes=self.batch_sizes[begin:end],
            costs=self.costs[first:last],
            lengths=self.lengths[first:last],
            sizes=None if self.sizes is None else self.sizes[first:last],
            memory=None if self.memory is None else self.memory[first:last],
            divisible=self.divisible_in(first, last),
        )

    def divisible_in(self, first: int, last: int) -> NDArray[np.float64] | None:
        """(m, WIDTH) the samples that may be split from `first` to before `last`, numbered from 0 on."""
        if self.divisible is None:
            return None
        begin, end = np.searchsorted(self.divisible[:, 0], (first, last))
        return self.divisible[begin:end] - np.eye(1, WIDTH) * first

    @classmethod
    def joined(cls, parts: Sequence[RoundSamples]) -> RoundSamples:
        """The samples of all ranks of all parts, one part after another, in memory of their own."""
        as_float = any(part.costs.dtype.kind == "f" for part in parts)
        tables, counts = [part.divisible for part in parts], np.array([len(part.costs) for part in parts])
        any_sizes = any(part.sizes is not None for part in parts)
        any_memory = any(part.memory is not None for part in parts)
        return cls(
            batch_sizes=np.concatenate([part.batch_sizes for part in parts]),
            costs=np.concatenate([part.costs for part in parts], dtype=np.float64 if as_float else None),
            lengths=np.concatenate([part.lengths for part in parts]),
            sizes=np.concatenate([part.moving_sizes for part in parts]) if any_sizes else None,
            memory=np.concatenate([_memory(part) for part in parts]) if any_memory else None,
            divisible=_numbered(tables, counts) if any(table is not None for table in tables) else None,
        )

    @staticmethod
    def columns(
        parts: Sequence[RoundSamples],
        nodes: NDArray[np.int32] | None,
        *,
        with_memory: bool,
        roles: NDArray[np.int64] | None = None,
    ) -> dict[str, Column]:
        """The arrays of all ranks' samples by name, not joined yet.

        Args:
            parts: Of some ranks each, in the order of the ranks. Integers may be of narrower types.
            nodes: See above.
            with_memory: There are memory caps.
            roles: What each field is to a sample in parts; None: none is split.
        """
        counts = [len(part.costs) for part in parts]
        n = sum(counts)
        # Integer costs stay integers unless some rank's are floating.
        costs = np.dtype(np.float64 if any(part.costs.dtype.kind == "f" for part in parts) else np.int64)
        first = parts[0].lengths
        lengths = np.dtype(np.uint32) if first.dtype.kind == "u" else first.dtype
        columns = {
            "batch_sizes": Column.of(np.concatenate([part.batch_sizes for part in parts])),
            "costs": Column(costs, (n,), [part.costs for part in parts]),
            "lengths": Column(lengths, (n, first.shape[1]), [part.lengths for part in parts]),
        }
        if any(part.sizes is not None for part in parts):
            columns["sizes"] = Column(np.dtype(np.int64), (n,), [part.moving_sizes for part in parts])
        if with_memory:
            columns["memory"] = Column(np.dtype(np.float64), (n,), list(map(_memory, parts)))
        if nodes is not None:
            columns["nodes"] = Column.of(nodes)
        if roles is not None and any(part.divisible is not None for part in parts):
            columns["divisible"] = Column.of(_numbered([part.divisible for part in parts], np.array(counts)))
            columns["roles"] = Column.of(roles)
        return columns

    @classmethod
    def of_rows(
        cls,
        rows: Sequence[bytes],
        batch_sizes: NDArray[np.int64],
        nodes: NDArray[np.int32] | None,
        *,
        num_fields: int,
        as_float: bool,
        with_memory: bool,
        with_given: bool = False,
        divisible: Sequence[bytes] = (),
        roles: NDArray[np.int64] | None = None,
    ) -> RoundSamples:
        """Reads what `RankSamples.rows` gave on each rank.

        Args:
            rows: The bytes, by rank.
            batch_sizes, nodes: see above.
            num_fields: Jagged fields.
            as_float, with_memory: as given to `rows`.
            with_given: The ranks' samples have `given`.
            divisible: The bytes of their samples that may be split, by rank; empty: there are none.
            roles: What each field is to a sample in parts, where there are some.
        """
        counts = batch_sizes.sum(axis=1)
        tables = [np.frombuffer(data, "<f8").reshape(-1, WIDTH) for data in divisible]
        first = 2 + with_memory + with_given
        table = np.frombuffer(b"".join(rows), dtype="<i8").reshape(-1, first + num_fields)
        costs, sizes, *others = (np.ascontiguousarray(table[:, column]) for column in range(first))
        return cls(
            batch_sizes=batch_sizes,
            costs=costs.view(np.float64) if as_float else costs,
            lengths=np.ascontiguousarray(table[:, first:]),
            sizes=sizes,
            memory=others[0].view(np.float64) if with_memory else None,
            nodes=nodes,
            given=others[-1] if with_given else None,
            divisible=_numbered(tables, counts) if any(map(len, tables)) else None,
            roles=roles,
        )


def _memory(part: RoundSamples) -> NDArray[np.float64]:
    return np.zeros(len(part.costs)) if part.memory is None else part.memory


def _numbered(tables: Sequence[NDArray[np.float64] | None], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """The ranks' samples that may be split, numbered among those of all ranks, so many of each."""
    begins = np.cumsum(counts) - counts
    found = [(table, begin) for table, begin in zip(tables, begins.tolist(), strict=True) if table is not None]
    result = np.concatenate([table for table, _ in found])
    result[:, 0] += np.repeat([begin for _, begin in found], [len(table) for table, _ in found])
    return result


def row_sums(lengths: Lengths) -> NDArray[np.int64]:
    """(n,) sum of each row of (n, fields) lengths."""
    num_fields = lengths.shape[1]
    if not 0 < num_fields <= _FEW_FIELDS:
        return np.asarray(np.einsum("ij->i", lengths, dtype=np.int64))
    sums = lengths[:, 0].astype(np.int64)
    for field in range(1, num_fields):
        sums += lengths[:, field]
    return sums
