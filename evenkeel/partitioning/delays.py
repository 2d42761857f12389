"""Who is late with its batches, and why, learned from what the ranks measured of their waiting.

A rank whose loader is slow, or whose part of the exchange is, makes the others wait as much as one that computes
slowly, and no plan can help it. It gets a name here. What is learned follows from what all ranks have agreed on, by
additions, multiplications and comparisons alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers = NDArray[np.float64]

LATE = 0.10  # of the median rank's computation, by which a rank's batches must come later than the others'
ON_TIME = 0.05  # below which they count as on time again
NOISE = 6.0  # median deviations of the ranks from their median, by which it must be later too,
MANY = 8  # of so many ranks: one of many is easily the latest by chance
FORGETS = 1 / 48  # weight of a step in the mean: four long ones in a row change nothing
SURE = 3  # rounds in a row that say so
FIRST = 12  # steps of a rank before anything is said of it
CALM = 24  # steps on time in a row, after which what was before is forgotten
MOST = 16.0  # that a step may be late, in computations
STEPS = 64  # what is told is a multiple of one over this


class Cause(IntEnum):
    """Why a rank's batches come late; numbers as on the wire."""

    LOADING = 1  # its loader had none ready
    NETWORK = 2  # its samples came late from the other ranks, or to its device
    LOOP = 3  # it did something else between a step and the next batch, as writing a checkpoint

    @property
    def label(self) -> str:
        """As metrics and documents name it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """A rank whose batches come later than the others'.

    Attributes:
        rank: Which.
        cause: Why.
        share: How much later, on average of late, in what the median rank's computation of a batch takes; at most 16.
        since: The round after which it was seen.
    """

    rank: int
    cause: Cause
    share: float
    since: int


class DelayEstimator:
    """Learns who is late, round by round."""

    def __init__(self, num_ranks: int) -> None:
        """Knows nothing yet.

        Args:
            num_ranks: Number of ranks.
        """
        shape = (len(Cause), num_ranks)
        self._mean = np.zeros(shape)  # of shares, each step's at most 1: so long a pause is one late step
        self._told = np.zeros(shape)  # the same of all of them, as far as the weight
        self._seen = np.zeros(shape)  # of the steps since they were last on time goes
        self._known = np.zeros(num_ranks, np.int64)
        self._calm = np.full(shape, CALM)
        self._says = np.zeros(shape, np.int64)  # rounds in a row that contradict what is told
        self._since = np.full(shape, -1, np.int64)
        self.delays: tuple[Delay, ...] = ()

    def note(self, number: int, compute: ArrayLike, late: ArrayLike, loading: ArrayLike, loop: ArrayLike = 0.0) -> bool:
        """Notes how long the ranks' batches were in coming; whether there is anything new to tell.

        Args:
            number: Of the round.
            compute: (ranks,) seconds of each rank's own computation of a batch; 0: nothing measured.
            late: (ranks,) seconds that its computation had waited for the batch since its loop asked for it, without
                those that its host waited for the others' submissions.
            loading: (ranks,) seconds that its host waited for its loader.
            loop: (ranks,) seconds from its step before until its loop asked for the batch.
        """
        compute = np.asarray(compute, np.float64)
        waits = np.zeros((3, compute.size))
        waits[0], waits[1], waits[2] = late, loading, loop
        known = (compute >= 1e-9) & (compute <= 1e9) & (np.isfinite(waits) & (waits >= 0)).all(axis=0)
        if np.count_nonzero(known) * 2 <= known.size:
            return False
        unit = _lower_median(compute[known])
        shares: Numbers = np.where(known, np.minimum(waits / unit, MOST), 0.0)
        waited, loaded, other = shares
        # A rank may wait in its exchange for as long as another takes longer to come to it, and that is not its fault.
        busy = np.where(known, np.minimum(compute / unit, MOST) + np.minimum(waited, loaded) + other, 0.0)
        by_loading = np.minimum(np.maximum(loaded - _lower_median(loaded[known]), 0.0), waited)
        rest = waited - by_loading
        by_network = np.maximum(rest - rest[known].min() - (busy.max() - busy), 0.0)
        by_loop = np.maximum(other - _lower_median(other[known]), 0.0)
        self._forget(np.stack([by_loading, by_network, by_loop]), known)
        return self._follow(number)

    # ------------------------------------------------------------------ inside

    def _forget(self, shares: Numbers, known: NDArray[np.bool_]) -> None:
        weight = np.where(known, FORGETS, 0.0)
        self._mean += weight * (np.minimum(shares, 1.0) - self._mean)
        self._told += 3 * weight * (shares - self._told)
        self._seen += 3 * weight * (1.0 - self._seen)
        self._known += known
        self._calm = np.where(shares < ON_TIME, self._calm + known, 0)
        forgotten = self._calm >= CALM
        self._mean[forgotten] = self._told[forgotten] = self._seen[forgotten] = 0.0

    def _follow(self, number: int) -> bool:
        is_late = self._since >= 0
        # Steps may be late on all ranks alike, as on a busy machine: what counts is by how much more than usual.
        over = self._mean - [[_lower_median(means)] for means in self._mean]
        usual = [[_lower_median(np.abs(means)) if means.size >= MANY else 0.0] for means in over]
        over[over < over.max(axis=0)] = 0.0  # a rank has one cause: what comes late by one comes late to the next
        sure = (over >= np.maximum(LATE, NOISE * np.array(usual))) & (self._known >= FIRST)
        against = np.where(is_late, over < ON_TIME, sure)
        self._says = np.where(against, self._says + 1, 0)
        turns = self._says >= SURE
        if turns.any():
            self._since[turns & ~is_late] = number
            self._since[turns & is_late] = -1
            self._says[turns] = 0
        elif not is_late.any() or number % round(1 / FORGETS):  # now and then by how much
            return False
        # Else what is told first would be too little: of few steps the weights do not add up to 1.
        told = self._told / np.maximum(self._seen, 3 * FORGETS)
        before, more = self.delays, told - [[_lower_median(means)] for means in told]
        self.delays = tuple(
            Delay(
                rank=rank, cause=Cause(row + 1), since=int(self._since[row, rank]),
                share=max(1.0, float(np.floor(more[row, rank] * STEPS + 0.5))) / STEPS,
            )
            for rank, row in np.argwhere(self._since.T >= 0).tolist()
        )  # fmt: skip
        return self.delays != before


def _lower_median(values: Numbers) -> float:
    """The smaller of the two in the middle: of two ranks that of the one that is on time."""
    return float(np.sort(values)[(values.size - 1) // 2])
