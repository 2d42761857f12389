"""A partition in which samples may be split: which rank has which positions, and what that takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitPartition:
    """Which rank trains which positions of which samples of a batch. A sample that is whole is one part.

    Attributes:
        samples: (m,) int64, the sample of each part, ascending; parts of a sample in the order of positions.
        begins: (m,) int64, first position; 0 of a sample that is whole.
        ends: (m,) int64, the one after the last; 0 of a sample that is whole.
        ranks: (m,) int32, the rank that trains it; a rank has one part of a sample at most.
        loads: (num_ranks,) float64, summed cost of each rank.
        exchange: (num_ranks,) float64, what its keys and values take: the more of what it sends and what it receives,
            and what it passes on.
        within: Positions whose keys and values go to another rank of the same node, counted for each rank.
        between: Positions whose keys and values go to another node, counted for each node.
        moved_parts: Parts that leave their home.
        moved_size: Their summed size.
        moved_size_between_nodes: The part of it that crosses nodes.
        speeds: (num_ranks,) float64.
        time: Largest sum of load over speed and exchange, and what splitting takes in any step.
        heaviest: A bound of whole samples: an even division, or the heaviest of them on the fastest rank.
    """

    samples: Integers
    begins: Integers
    ends: Integers
    ranks: NDArray[np.int32]
    loads: Floats
    exchange: Floats
    within: int
    between: int
    moved_parts: int
    moved_size: float
    moved_size_between_nodes: float
    speeds: Floats
    time: float
    heaviest: float

    @property
    def num_samples(self) -> int:
        """Samples, whole or not."""
        return int(np.count_nonzero(self.begins == 0))

    @property
    def num_pieces(self) -> int:
        """Parts of samples that are split."""
        return int(np.count_nonzero(self.ends))

    @property
    def num_split(self) -> int:
        """Samples that are split."""
        return int(np.count_nonzero((self.ends > 0) & (self.begins == 0)))
