"""The parts of a round's samples, as arrays that travel between processes, and as what a rank makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.slices import Slices
from evenkeel.partitioning.splits import Cuts, Piece, SplitSample

Integers = NDArray[np.int64]
PIECE_WIDTH = 8
"""Numbers of a piece: batch, number of its sample in the batch, context, candidates, rank, sequence, begin, end."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundParts:
    """Which samples of a round are split, and how.

    Attributes:
        samples: (parts,) int64, the own sample of its home that each part is of; by home, then in home order.
        begins: (parts,) int64, first item of each; see `Cuts`.
        pieces: (pieces, PIECE_WIDTH) int64, all pieces of the split samples: by batch, by sample, by position.
    """

    samples: Integers
    begins: Integers
    pieces: Integers

    @property
    def nbytes(self) -> int:
        """Memory of its arrays."""
        return self.samples.nbytes + self.begins.nbytes + self.pieces.nbytes

    def further_of(self, rank: int, slices: Slices) -> Integers:
        """(c, 2) of each part of a rank's own samples but each one's first: own sample, and first item."""
        own = slice(int(slices.home_begin[rank]), int(slices.home_begin[rank + 1]))
        samples, begins = self.samples[own], self.begins[own]
        further = begins > 0
        return np.stack([samples[further], begins[further]], axis=1)


def read_parts(
    further: Integers, num_samples: int, steps: NDArray[np.int32] | None, num_batches: int
) -> tuple[NDArray[np.int32] | None, tuple[Cuts | None, ...]]:
    """What a rank's own samples are cut into.

    Args:
        further: (c, 2) see `RoundParts.further_of`.
        num_samples: Own samples n.
        steps: (n + c,) the batch that trains each part; None: all are of one.
        num_batches: Batches of the round.

    Returns:
        (n,) the batch that trains each sample, or None; per batch, the parts of the samples that it trains, None where
        all are whole.
    """
    samples = np.concatenate([np.arange(num_samples), further[:, 0]])
    begins = np.concatenate([np.zeros(num_samples, np.int64), further[:, 1]])
    order = np.argsort(samples, kind="stable")
    samples, begins = samples[order], begins[order]
    if steps is None:
        return None, (Cuts(samples=samples, begins=begins) if len(further) else None,)
    cuts: list[Cuts | None] = []
    for batch in range(num_batches):
        own = steps == batch
        _, numbers = np.unique(samples[own], return_inverse=True)
        whole = numbers.size == 0 or int(numbers[-1]) + 1 == numbers.size
        cuts.append(None if whole else Cuts(samples=numbers.astype(np.int64), begins=begins[own]))
    return steps[begins == 0], tuple(cuts)


def check_further(further: Integers, num_samples: int) -> bool:
    """Whether cuts that came from elsewhere are of these samples, and ascend."""
    samples, begins = further[:, 0], further[:, 1]
    if not len(further):
        return True
    inside = int(samples.min()) >= 0 and int(samples.max()) < num_samples and int(begins.min()) > 0
    steps = np.diff(samples)
    return inside and bool(((steps > 0) | ((steps == 0) & (np.diff(begins) > 0))).all())


def read_splits(pieces: Integers, num_batches: int) -> tuple[tuple[SplitSample, ...], ...]:
    """Per batch, the split samples of all ranks.

    Raises:
        ValueError: If the pieces are not those of samples in such batches.
    """
    batches: list[list[SplitSample]] = [[] for _ in range(num_batches)]
    rows: Sequence[list[int]] = pieces.tolist()
    for (batch, _, context, candidates), group in groupby(rows, key=lambda row: tuple(row[:4])):
        if not 0 <= batch < num_batches:
            raise ValueError(f"a piece is of batch {batch}; the round has {num_batches}")
        found = tuple(Piece(rank=row[4], sequence=row[5], begin=row[6], end=row[7]) for row in group)
        batches[batch].append(SplitSample(pieces=found, num_context=context, num_candidates=candidates))
    return tuple(map(tuple, batches))
