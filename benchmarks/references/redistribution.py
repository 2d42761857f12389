"""The result of a redistribution, computed in one process with plain indexing: what tests compare with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches import FlatBatch


def select_samples(flat: FlatBatch, indices: NDArray[np.int64]) -> FlatBatch:
    """The samples at `indices`, in that order."""
    return gather_samples([flat], [(0, int(index)) for index in indices])


def gather_samples(batches: Sequence[FlatBatch], picks: Sequence[tuple[int, int]]) -> FlatBatch:
    """A batch of samples picked from several batches of one schema.

    Args:
        batches: The batches.
        picks: (batch, sample) in the order wanted.
    """
    template = batches[0]
    tensors = []
    for index, leaf in enumerate(template.structure.leaves):
        rows: list[torch.Tensor] = []
        for position in range(max(1, len(leaf.columns))):
            for batch, sample in picks:
                flat = batches[batch]
                first, last = _rows(flat, index, position, sample)
                rows.append(flat.tensors[index][first:last])
        nothing = template.tensors[index].new_empty((0, *leaf.shape))
        tensors.append(torch.cat([nothing, *rows]))
    table = [batches[batch].lengths[sample] for batch, sample in picks]
    lengths = np.array(table, dtype=np.int64).reshape(len(picks), template.num_jagged)
    return template.rebuild(tensors, lengths)


def redistribute_reference(batches: Sequence[FlatBatch], destinations: Sequence[NDArray[np.int32]]) -> list[FlatBatch]:
    """Every rank's batch after a redistribution, samples sorted by (home, index at home).

    Args:
        batches: The batch of each rank.
        destinations: (n_home,) per rank, where each of its samples goes.
    """
    return [
        gather_samples(
            batches,
            [(home, int(i)) for home, where in enumerate(destinations) for i in np.flatnonzero(where == rank)],
        )
        for rank in range(len(batches))
    ]


def _rows(flat: FlatBatch, leaf_index: int, position: int, sample: int) -> tuple[int, int]:
    leaf = flat.structure.leaves[leaf_index]
    if leaf.rows:
        return sample * leaf.rows, (sample + 1) * leaf.rows
    before = int(flat.totals[list(leaf.columns[:position])].sum())
    column = flat.lengths[:, leaf.columns[position]] if leaf.columns else np.zeros(flat.num_samples, np.int64)
    first = before + int(column[:sample].sum())
    return first, first + int(column[sample])
