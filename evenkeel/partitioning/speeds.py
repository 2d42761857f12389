"""How fast each rank is, learned from the times that the ranks' batches took.

A rank that computes more slowly than the others makes all of them wait, unless it gets less to do. What is learned
follows from what all ranks have agreed on, by additions, multiplications and comparisons alone, so that every machine
comes to the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers = NDArray[np.float64]

WINDOW = 9  # of a rank's latest rates the median counts: four slow steps in a row change nothing
SURE = 3  # rounds in a row in which a rank's speed must differ before a plan follows
BAND = 0.05  # by which it must differ at least, as a share
NEAR = 0.03  # of the median rank's speed, within which a slow rank counts as even again
NOISE = 5.0  # standard errors of the median, by which it must differ too
REFINED_AFTER = 2 * WINDOW  # rounds after a change in which the first estimate is put right
FORGOTTEN = 4 * WINDOW  # rounds without a time of a rank, after which its latest rates no longer count
STEPS = 256  # speeds are multiples of one over this
HISTORY = 64  # rounds from which the fixed share of a step is learned
FIT_EVERY = 16
SPREAD = 1.15  # of the loads of these rounds, ninth to first decile, below which nothing is learned about it
MOST_FIXED = 4.0  # times the mean load
_MEDIAN_ERROR = 1.2533 * 1.4826 / math.sqrt(WINDOW)  # standard error of a median, from the median deviation


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedLimits:
    """Within which bounds speeds are learned.

    Attributes:
        lowest: The speed of a rank is taken to be no lower, as a share of the median rank's.
    """

    lowest: float = 0.3

    def __post_init__(self) -> None:
        if not 0 < self.lowest <= 1:
            raise ValueError(f"lowest is {self.lowest!r}; pass a share of the median rank's speed, above 0 and up to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that is slower than the median one.

    Attributes:
        rank: Which.
        speed: Relative to the median rank's.
        since: Rounds noted before it was seen to be slow.
    """

    rank: int
    speed: float
    since: int


class SpeedEstimator:
    """Learns the ranks' speeds, round by round.

    Attributes:
        rounds: Noted so far.
        fixed: What a step takes besides its load, in units of cost, as far as that is known.
    """

    def __init__(self, num_ranks: int, limits: SpeedLimits | None = None) -> None:
        """Knows nothing yet: all ranks are equal.

        Args:
            num_ranks: Number of ranks.
            limits: See there.

        Raises:
            ValueError: If there is no rank.
        """
        if num_ranks < 1:
            raise ValueError(f"num_ranks is {num_ranks}; pass 1 or more")
        self.rounds = 0
        self.fixed = 0.0
        self._lowest = (limits or SpeedLimits()).lowest
        self._rates = np.full((num_ranks, WINDOW), np.nan)
        self._noted = np.full((num_ranks, WINDOW), -FORGOTTEN - 1, np.int64)  # the round of each rate
        self._next = np.zeros(num_ranks, np.int64)
        self._speeds = np.ones(num_ranks)
        self._differs = np.zeros(num_ranks, np.int64)
        self._changed = np.full(num_ranks, -1, np.int64)
        self._since = np.full(num_ranks, -1, np.int64)
        self._steps = np.full((HISTORY, 2), np.nan)  # load and seconds of the median rank

    def note(self, loads: ArrayLike, seconds: ArrayLike) -> bool:
        """Notes what a batch of each rank cost and took; whether plans are to change.

        Args:
            loads: (ranks,) summed cost of each rank's batch, as planned.
            seconds: (ranks,) time that each rank's own computation of it took, without waiting for others. What is not
                finite or not above 0 counts as unknown, as does the time of a rank without load.

        Raises:
            ValueError: If a shape is wrong.
        """
        load, time = np.asarray(loads, np.float64), np.asarray(seconds, np.float64)
        for name, values in (("loads", load), ("seconds", time)):
            if values.shape != self._speeds.shape:
                raise ValueError(
                    f"{name} has the shape {values.shape}; pass one number for each of {self._speeds.size} ranks"
                )
        known = np.isfinite(load) & np.isfinite(time) & (load > 0) & (time > 0)
        self.rounds += 1
        if np.count_nonzero(known) * 2 > known.size:  # of fewer, the median says nothing about the others
            self._note_step(load[known], time[known])
            rates = (load[known] + self.fixed) / time[known]
            self._note_rates(np.flatnonzero(known), rates / _upper_median(rates))
        return self._follow()

    @property
    def speeds(self) -> Numbers:
        """(ranks,) how fast each rank computes, at most 1, the median rank's speed."""
        return self._speeds.copy()

    def to_plan(self, mean_load: float) -> Numbers:
        """(ranks,) speeds to plan a batch with: loads over them are to be equal, so that all ranks take as long.

        Of a rank that is slower, what a step takes besides its load takes longer too.

        Args:
            mean_load: Of the batch, over the ranks.
        """
        share = self.fixed / mean_load if mean_load > 0 else 0.0
        return np.clip(_in_steps(self._speeds - share * (1.0 - self._speeds)), self._lowest, 1.0)

    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        """The slow ranks, the slowest first."""
        slow = np.flatnonzero(self._speeds < 1)
        order = slow[np.lexsort((slow, self._speeds[slow]))].tolist()
        return tuple(Straggler(rank=r, speed=float(self._speeds[r]), since=int(self._since[r])) for r in order)

    def to_state(self) -> dict[str, Any]:
        """All that it knows, as plain values."""
        return {
            "rounds": self.rounds,
            "fixed": self.fixed,
            "rates": self._rates.tolist(),
            "noted": self._noted.tolist(),
            "speeds": self._speeds.tolist(),
            "since": self._since.tolist(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], limits: SpeedLimits | None = None) -> SpeedEstimator:
        """Goes on from what `to_state` gave."""
        self = cls(len(state["speeds"]), limits)
        self.rounds, self.fixed = int(state["rounds"]), float(state["fixed"])
        self._rates, self._noted = np.array(state["rates"], np.float64), np.array(state["noted"], np.int64)
        self._speeds, self._since = np.array(state["speeds"], np.float64), np.array(state["since"], np.int64)
        self._next = np.argmin(self._noted, axis=1)
        return self

    # ------------------------------------------------------------------ inside

    def _note_step(self, load: Numbers, time: Numbers) -> None:
        """Notes the median rank's step; now and then learns what steps take besides their load."""
        self._steps[self.rounds % HISTORY] = _upper_median(load), _upper_median(time)
        if self.rounds % FIT_EVERY or np.isnan(self._steps).any():
            return
        by_load = self._steps[np.argsort(self._steps[:, 0], kind="stable")]
        low, high = by_load[HISTORY // 10, 0], by_load[-1 - HISTORY // 10, 0]
        if high < SPREAD * low:
            return
        # Theil and Sen's line: the median of the slopes between the light steps and the heavy ones.
        half = HISTORY // 2
        run = by_load[half:, 0] - by_load[:half, 0]
        rise = by_load[half:, 1] - by_load[:half, 1]
        slopes = rise[run > 0] / run[run > 0]
        slope = _upper_median(slopes) if slopes.size else 0.0
        if slope <= 0:
            return
        rests = by_load[:, 1] - slope * by_load[:, 0]
        self.fixed = min(max(_upper_median(rests) / slope, 0.0), MOST_FIXED * float(by_load[half, 0]))

    def _note_rates(self, ranks: NDArray[np.int64], rates: Numbers) -> None:
        places = self._next[ranks]
        self._rates[ranks, places] = rates
        self._noted[ranks, places] = self.rounds
        self._next[ranks] = (places + 1) % WINDOW

    def _follow(self) -> bool:
        """Lets the speeds of ranks that surely differ follow; whether any did."""
        fresh = self._noted > self.rounds - FORGOTTEN
        full = fresh.all(axis=1)
        ordered = np.sort(self._rates, axis=1)
        found = ordered[:, WINDOW // 2]
        deviation = np.sort(np.abs(self._rates - found[:, None]), axis=1)[:, WINDOW // 2]
        target = np.clip(_in_steps(found), self._lowest, 1.0)
        target[target > 1.0 - NEAR] = 1.0
        target[~full] = np.where(fresh.any(axis=1), self._speeds, 1.0)[~full]  # too little is known to change it
        off = np.abs(target - self._speeds)
        # Ranks have much the same noise: that of the median rank at least, since nine rates tell little of it.
        usual = _upper_median(deviation[full]) if full.any() else 0.0
        band = np.maximum(BAND, NOISE * _MEDIAN_ERROR * np.maximum(deviation, usual))
        band[~full | (target == 1.0)] = 0.0  # evenness needs no proof
        self._differs = np.where(off > band * self._speeds, self._differs + 1, 0)
        refined = (self._changed >= 0) & (self.rounds - self._changed == REFINED_AFTER) & full & (off > 1.5 / STEPS)
        follows = (self._differs >= SURE) | refined
        if not follows.any():
            return False
        begun = follows & (self._speeds >= 1) & (target < 1)
        self._since[begun] = self.rounds
        self._speeds[follows] = target[follows]
        self._since[self._speeds >= 1] = -1
        self._changed[follows & ~refined] = self.rounds
        self._changed[refined] = -1
        self._differs[follows] = 0
        return True


def _in_steps(values: Numbers) -> Numbers:
    return np.floor(values * STEPS + 0.5) / STEPS


def _upper_median(values: Numbers) -> float:
    """The larger of the two in the middle: of two ranks the faster one."""
    return float(np.sort(values)[values.size // 2])
