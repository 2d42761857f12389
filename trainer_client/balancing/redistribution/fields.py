"""The fields of a batch in the order in which they travel, and where every byte of them lies in the buffers.

A buffer holds one block per peer, in rank order; a block holds one segment per field, in field order. Segments begin
at multiples of 16 bytes, so that a segment can be read in words of any dtype. Sender and receiver compute the same
layout, the one from its lengths, the other from the totals of its slice: no sizes are exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches.structure import Leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldTable:
    """F fields sorted by path, so that all ranks of one schema agree on the order.

    Attributes:
        leaf_index: (F,) int64, the tensor in which a field lies.
        before_begin: (F + 1,) int64, where each field's columns begin in `before_columns`.
        before_columns: int64, field after field, the columns whose values precede it in its tensor.
        column: (F,) int64, its jagged column, -1 if rows are fixed.
        unit_bytes: (F,) int64, bytes of one row if jagged, of one sample if rows are fixed.
    """

    column: NDArray[np.int64]
    unit_bytes: NDArray[np.int64]
    leaf_index: NDArray[np.int64]
    before_begin: NDArray[np.int64]
    before_columns: NDArray[np.int64]

    @staticmethod
    @lru_cache(maxsize=64)
    def of(leaves: tuple[Leaf, ...], table_bytes: int = 0) -> FieldTable:
        """The fields of a batch with these leaves.

        Args:
            leaves: The leaves.
            table_bytes: Bytes of each sample's row in a table that travels as the last field and lies in a tensor after
                the leaves; 0: there is none.
        """
        found: list[tuple[str, int, tuple[int, ...], int, int]] = []
        for index, leaf in enumerate(leaves):
            if leaf.rows:
                found.append((leaf.path, index, (), -1, leaf.rows * leaf.row_bytes))
            else:
                found.extend(
                    (path, index, leaf.columns[:position], leaf.columns[position], leaf.row_bytes)
                    for position, path in enumerate(leaf.field_paths)
                )
        found.sort(key=lambda item: item[0])
        if table_bytes:
            found.append(("", len(leaves), (), -1, table_bytes))
        before = [item[2] for item in found]
        return FieldTable(
            leaf_index=np.array([item[1] for item in found], dtype=np.int64),
            before_begin=np.cumsum([0, *map(len, before)], dtype=np.int64),
            before_columns=np.array([column for columns in before for column in columns], dtype=np.int64),
            column=np.array([item[3] for item in found], dtype=np.int64),
            unit_bytes=np.array([item[4] for item in found], dtype=np.int64),
        )

    def addresses(self, tensors: Sequence[torch.Tensor], totals: NDArray[np.int64]) -> NDArray[np.int64]:
        """(F,) address of each field's first row in contiguous tensors that hold `totals` values per column."""
        first = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)[self.leaf_index]
        begins = [int(totals[self.before_columns[a:b]].sum()) for a, b in pairwise(self.before_begin.tolist())]
        result: NDArray[np.int64] = first + np.array(begins, dtype=np.int64) * self.unit_bytes
        return result

    def segment_bytes(self, counts: NDArray[np.int64], totals: NDArray[np.int64]) -> NDArray[np.int64]:
        """(peers, F) bytes of each field.

        Args:
            counts: (peers,) samples.
            totals: (peers, num_jagged) values per jagged column.
        """
        return np.column_stack([totals, counts])[:, self.column] * self.unit_bytes


ALIGNMENT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The blocks of some peers in one buffer.

    Attributes:
        sizes: (peers, F) bytes of each segment.
        offsets: (peers, F) where it begins.
        block_bytes: (peers,) bytes of each block, padding included.
    """

    sizes: NDArray[np.int64]
    offsets: NDArray[np.int64]
    block_bytes: NDArray[np.int64]

    @property
    def total_bytes(self) -> int:
        """Bytes of the buffer."""
        return int(self.block_bytes.sum())


def lay_out(fields: FieldTable, counts: NDArray[np.int64], totals: NDArray[np.int64]) -> Blocks:
    """Places the segments of some peers.

    Args:
        fields: The fields.
        counts: (peers,) samples of each peer.
        totals: (peers, num_jagged) values per jagged column.
    """
    sizes = fields.segment_bytes(counts, totals)
    padded = (sizes + (ALIGNMENT - 1)) & -ALIGNMENT
    ends = np.cumsum(padded.ravel()).reshape(padded.shape)
    return Blocks(sizes=sizes, offsets=ends - padded, block_bytes=padded.sum(axis=1))
