"""Where every byte of an exchange's buffers lies, in plain NumPy: the reference of what the library's kernels compute.

A buffer holds one block per peer, in rank order; a block holds one segment per field, in field order. Segments begin
at multiples of 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer_client.balancing.redistribution.copies import FieldTable

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


def segment_bytes(fields: FieldTable, counts: NDArray[np.int64], totals: NDArray[np.int64]) -> NDArray[np.int64]:
    """(peers, F) bytes of each field.

    Args:
        fields: The fields.
        counts: (peers,) samples.
        totals: (peers, num_jagged) values per jagged column.
    """
    return np.column_stack([totals, counts])[:, fields.column] * fields.unit_bytes


def lay_out(fields: FieldTable, counts: NDArray[np.int64], totals: NDArray[np.int64]) -> Blocks:
    """Places the segments of some peers; arguments as for `segment_bytes`."""
    sizes = segment_bytes(fields, counts, totals)
    padded = (sizes + (ALIGNMENT - 1)) & -ALIGNMENT
    ends = np.cumsum(padded.ravel()).reshape(padded.shape)
    return Blocks(sizes=sizes, offsets=ends - padded, block_bytes=padded.sum(axis=1))
