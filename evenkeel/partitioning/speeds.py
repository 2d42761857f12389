"""How fast each rank is, learned from the times that the ranks' batches took.

A rank that computes more slowly than the others makes all of them wait, unless it gets less to do. What is learned
follows from what all ranks have agreed on, by additions, multiplications and comparisons alone, so that every machine
comes to the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenkeel.partitioning.delays import Delay
from evenkeel.partitioning.problem import SPEEDS

Numbers = NDArray[np.float64]

WINDOW = 9  # of a rank's latest rates the median counts: four slow steps in a row change nothing
SURE = 3  # rounds in a row in which a rank's speed must differ before a plan follows
BAND = 0.05  # by which it must differ at least, as a share
NEAR = 0.03  # of the median rank's speed, within which a slow rank counts as even again
NOISE = 5.0  # standard errors of the median, by which it must differ too
SEEN = WINDOW // 2 + 1  # rates that are surely of after a change, when a plan follows it
REFINED = (6, 7, 8, 9, 10, 11, 12, 14, 16, 19, 23, 32, 45, 64)  # rates since then, after which that is put right
KEPT = REFINED[-1]  # rates of each rank
LONG = 32  # latest rates, whose mean tells of changes that noise hides from the median
LOOKED = 4  # rounds from one look at these to the next
FAR = 4.0  # standard deviations from the median, beyond which a rate is left out of a mean
FORGOTTEN = 4 * WINDOW  # rounds without a time of a rank, after which its latest rates no longer count
LOWEST = 0.3  # a rank's speed is taken to be no lower, as a share of the median rank's
STEPS = 256  # speeds are multiples of one over this
HISTORY = 64  # rounds from which the fixed share of a step is learned
FIT_EVERY = 16
OTHER_UNIT = 1e3  # times a step's load: the cost has begun to count in another unit, as where it is fitted
SPREAD = 1.15  # of the loads of these rounds, ninth to first decile, below which nothing is learned about it
MOST_FIXED = 4.0  # times the mean load
_DEVIATION = 1.0483  # standard deviation of rates, from the median of the steps from each to the next
_MEDIAN_ERROR = 1.2533 * _DEVIATION / math.sqrt(WINDOW)  # standard error of a median
_MEAN_ERROR = _DEVIATION / math.sqrt(LONG)  # and of a mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that is slower than the median one.

    Attributes:
        rank: Which.
        speed: Relative to the median rank's, 0.3 to 1.
        since: The round after which it was seen to be slow.
    """

    rank: int
    speed: float
    since: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedSpeeds:
    """What is known of the ranks' speeds at some time.

    Attributes:
        stragglers: The slow ranks, ascending; all others are as fast as the median one.
        fixed: What a step takes besides its load, in units of cost, as far as that is known; 0 without stragglers.
        delays: The ranks whose batches come late, by rank and cause; no plan depends on it.
    """

    stragglers: tuple[Straggler, ...] = ()
    fixed: float = 0.0
    delays: tuple[Delay, ...] = ()

    def __bool__(self) -> bool:
        """Whether plans differ from those for equal ranks."""
        return bool(self.stragglers)

    @property
    def num_slow(self) -> int:
        """Ranks that are slow in anything."""
        return len({one.rank for one in self.stragglers} | {one.rank for one in self.delays})

    def to_plan(self, mean_load: float, num_ranks: int) -> Numbers:
        """(ranks,) speeds to plan a batch with: loads over them are to be equal, so that all ranks take as long.

        Of a rank that is slower, what a step takes besides its load takes longer too.

        Args:
            mean_load: Of the batch, over the ranks.
            num_ranks: How many they are.
        """
        share = self.fixed / mean_load if mean_load > 0 else 0.0
        speeds = np.ones(num_ranks)
        for slow in self.stragglers:
            speeds[slow.rank] = slow.speed
        step = (1.0 + share) * num_ranks / math.fsum(speeds)  # that all are to take, in mean loads
        return np.clip(_in_steps((speeds * step - share) / (step - share)), LOWEST, 1.0)


ALL_EQUAL = LearnedSpeeds()


def planned_speeds(
    given: Sequence[float], learned: LearnedSpeeds, loads: Sequence[float], num_batches: int = 1
) -> Numbers | None:
    """(ranks,) speeds to plan a round with; None: all are equal.

    Args:
        given: The user's; empty: all equal. What is learned multiplies them.
        learned: What is known besides.
        loads: (ranks,) what the ranks have loaded, in all batches together.
        num_batches: Batches of the round.
    """
    own = np.array(given, np.float64) if given else None
    if not learned:
        return own
    mean = sum(loads) / ((sum(given) if given else len(loads)) * num_batches)
    planned = learned.to_plan(mean, len(loads))
    return planned if own is None else np.clip(own * planned, SPEEDS.least, SPEEDS.most)


class SpeedEstimator:
    """Learns the ranks' speeds, round by round.

    Attributes:
        rounds: Noted so far.
        fixed: What a step takes besides its load, in units of cost, as far as that is known.
    """

    def __init__(self, num_ranks: int) -> None:
        """Knows nothing yet: all ranks are equal.

        Args:
            num_ranks: Number of ranks.

        Raises:
            ValueError: If there is no rank.
        """
        if num_ranks < 1:
            raise ValueError(f"num_ranks is {num_ranks}; pass 1 or more")
        self.rounds = 0
        self.fixed = 0.0
        self._rates = np.full((num_ranks, KEPT), np.nan)
        self._noted = np.full((num_ranks, KEPT), -FORGOTTEN - 1, np.int64)  # the round of each rate
        self._next = np.zeros(num_ranks, np.int64)
        self._seen = np.full(num_ranks, KEPT + 1, np.int64)  # rates since the latest change
        self._noise = np.full(num_ranks, np.nan)  # median of the steps from each rate to the next, as a share
        self._speeds = np.ones(num_ranks)
        self._differs = np.zeros(num_ranks, np.int64)
        self._since = np.full(num_ranks, -1, np.int64)
        self._steps = np.full((HISTORY, 2), np.nan)  # load and seconds of the median rank

    def note(self, loads: ArrayLike, seconds: ArrayLike, number: int | None = None) -> bool:
        """Notes what a batch of each rank cost and took; whether plans are to change.

        Args:
            loads: (ranks,) summed cost of each rank's batch, as planned.
            seconds: (ranks,) time that each rank's own computation of it took, without waiting for others. What is not
                from a nanosecond to 30 years counts as unknown, as does the time of a rank without load.
            number: Of the round; default: how many were noted before.

        Raises:
            ValueError: If a shape is wrong.
        """
        load, time = np.asarray(loads, np.float64), np.asarray(seconds, np.float64)
        for name, values in (("loads", load), ("seconds", time)):
            if values.shape != self._speeds.shape:
                raise ValueError(
                    f"{name} has the shape {values.shape}; pass one number for each of {self._speeds.size} ranks"
                )
        known = np.isfinite(load) & np.isfinite(time) & (load > 0) & (time >= 1e-9) & (time <= 1e9)
        number = self.rounds if number is None else number
        self.rounds += 1
        if np.count_nonzero(known) * 2 > known.size:  # of fewer, the median says nothing about the others
            self._note_step(load[known], time[known])
            rates = (load[known] + self.fixed) / time[known]
            # Of two ranks, the faster one would be the median, and each look slow half of the time: the other one is.
            self._note_rates(np.flatnonzero(known), rates / (rates[::-1] if rates.size == 2 else _upper_median(rates)))
        return self._follow(number)

    @property
    def step_seconds(self) -> float:
        """Seconds of the median rank's step, in the median of those noted lately; 0 where none was."""
        seconds = self._steps[:, 1]
        return 0.0 if np.isnan(seconds).all() else float(np.nanmedian(seconds))

    @property
    def speeds(self) -> Numbers:
        """(ranks,) how fast each rank computes, at most 1, the median rank's speed."""
        return self._speeds.copy()

    @property
    def learned(self) -> LearnedSpeeds:
        """What plans are to follow."""
        slow = np.flatnonzero(self._speeds < 1).tolist()
        if not slow:
            return ALL_EQUAL
        return LearnedSpeeds(
            stragglers=tuple(
                Straggler(rank=rank, speed=float(self._speeds[rank]), since=int(self._since[rank])) for rank in slow
            ),
            fixed=self.fixed,
        )

    # ------------------------------------------------------------------ inside

    def _note_step(self, load: Numbers, time: Numbers) -> None:
        """Notes the median rank's step; now and then learns what steps take besides their load."""
        median = np.argsort(load / time, kind="stable")[load.size // 2]
        before = self._steps[(self.rounds - 1) % HISTORY, 0]
        if load[median] > OTHER_UNIT * before or before > OTHER_UNIT * load[median]:
            self._steps[:], self.fixed = np.nan, 0.0
        self._steps[self.rounds % HISTORY] = load[median], time[median]
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
        self._next[ranks] = (places + 1) % KEPT
        self._seen[ranks] += 1

    def _places(self, count: int) -> NDArray[np.int64]:
        """(ranks, count) where the latest rates of each rank are, the latest first."""
        return (self._next[:, None] - 1 - np.arange(count)) % KEPT

    def _follow(self, number: int) -> bool:
        """Lets the speeds of ranks that surely differ follow; whether any did."""
        latest = self._places(WINDOW)
        fresh = np.take_along_axis(self._noted, latest, axis=1) > self.rounds - FORGOTTEN
        full = fresh.all(axis=1)
        found = np.sort(np.take_along_axis(self._rates, latest, axis=1), axis=1)[:, WINDOW // 2]
        target = _targets(found)
        target[~full] = np.where(fresh.any(axis=1), self._speeds, 1.0)[~full]  # too little is known to change it
        off = np.abs(target - self._speeds)
        looks = self.rounds % LOOKED == 0
        if self.rounds % (2 * WINDOW) == 0 or self.rounds < 2 * WINDOW:
            self._learn_noise(found)
        # Ranks have much the same noise: that of the median rank at least, since some rates tell little of it.
        noise = np.maximum(self._noise, _upper_median(self._noise[full]) if full.any() else 0.0)
        band = np.maximum(BAND * self._speeds, NOISE * _MEDIAN_ERROR * noise * found)
        band[~full | (target == 1.0)] = 0.0  # evenness needs no proof
        self._differs = np.where(off > band, self._differs + 1, 0)
        follows = self._differs >= SURE
        seen = np.where(follows, SEEN, self._seen)
        if looks:
            long = np.take_along_axis(self._rates, self._places(LONG), axis=1)
            differs = np.abs(_targets(_mean(long, noise)) - self._speeds)
            late = differs > np.maximum(BAND * self._speeds, NOISE * _MEAN_ERROR * noise * found)
            late &= full & ~follows & (self._seen > LONG)
            seen[late] = LONG // 2
            follows |= late
        refined = full & ~follows & (self._speeds < 1) & np.isin(seen, REFINED)
        for rank in np.flatnonzero((follows & (target < 1)) | refined).tolist():
            since = (self._next[rank] - 1 - np.arange(seen[rank])) % KEPT
            target[rank] = _targets(_mean(self._rates[rank, since][None], noise[rank]))[0]
        off = np.abs(target - self._speeds)
        follows &= (off > BAND * self._speeds) | (target == 1.0)  # two long steps and some chance are no change
        self._seen[follows] = seen[follows]
        follows |= refined & (off > 0)
        if not follows.any():
            return False
        begun = follows & (self._speeds >= 1) & (target < 1)
        self._since[begun] = number
        self._speeds[follows] = target[follows]
        self._since[self._speeds >= 1] = -1
        self._differs[follows] = 0
        return True

    def _learn_noise(self, found: Numbers) -> None:
        latest = np.take_along_axis(self._rates, self._places(LONG + 1), axis=1)
        steps = np.sort(np.abs(latest[:, 1:] - latest[:, :-1]), axis=1)  # what is unknown comes last
        known = np.maximum(np.count_nonzero(np.isfinite(steps), axis=1), WINDOW - 1)
        self._noise = np.take_along_axis(steps, known[:, None] // 2, axis=1)[:, 0] / found


def _targets(found: Numbers) -> Numbers:
    target = np.clip(_in_steps(found), LOWEST, 1.0)
    target[target > 1.0 - NEAR] = 1.0
    return target


def _mean(rates: Numbers, noise: ArrayLike) -> Numbers:
    """(n,) mean of each row of (n, rates), without those that are far from its median.

    Args:
        rates: Rates of each rank; unknown where any is.
        noise: (n,) median of the steps from rate to rate, as a share.
    """
    middle = np.sort(rates, axis=1)[:, [rates.shape[1] // 2]]
    counts = np.abs(rates - middle) <= FAR * _DEVIATION * np.reshape(noise, (-1, 1)) * middle
    total, number = np.zeros(len(rates)), np.zeros(len(rates))
    for column in range(rates.shape[1]):  # in this order on every machine
        total += np.where(counts[:, column], rates[:, column], 0.0)
        number += counts[:, column]
    return np.where(number > 0, total / np.maximum(number, 1.0), np.nan)


def _in_steps(values: Numbers) -> Numbers:
    return np.floor(values * STEPS + 0.5) / STEPS


def _upper_median(values: Numbers) -> float:
    """The larger of the two in the middle: of two ranks the faster one."""
    return float(np.sort(values)[values.size // 2])
