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

WINDOW = 11  # of a rank's latest rates the median counts: five slow steps in a row change nothing
SURE = 3  # rounds in a row in which a rank's speed must differ before a plan follows
BAND = 0.05  # by which it must differ at least, as a share
NOISE = 5.0  # standard errors of the median, by which it must differ too
NEAR = 0.03  # of the median rank's speed, within which a slow rank counts as even again
REFINED = (WINDOW, 32)  # rates since a change, after which it is put right by the median of them
FORGOTTEN = 48  # rounds without a time of a rank, after which nothing is known of it
LOWEST = 0.3  # a rank's speed is taken to be no lower, as a share of the median rank's
STEPS = 256  # speeds are multiples of one over this
HISTORY = 64  # rounds from which the fixed share of a step is learned, a quarter of them later again
SPREAD = 1.15  # of the loads of these rounds, ninth to first decile, below which nothing is learned about it
MOST_FIXED = 4.0  # times the mean load
OTHER_UNIT = 1e3  # times a step's load: the cost has begun to count in another unit, as where it is fitted
_ERROR = 1.2533 * 1.0483 / math.sqrt(WINDOW)  # standard error of a median, from the median of steps from rate to rate


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

    def to_plan(self, given: Sequence[float], loads: Sequence[float], num_batches: int = 1) -> Numbers:
        """(ranks,) speeds to plan a round with: loads over them are to be equal, so that all ranks take as long.

        Of a rank that is slower, what a step takes besides its load takes longer too.

        Args:
            given: The user's; empty: all equal. What is learned multiplies them.
            loads: (ranks,) what the ranks have loaded, in all batches together.
            num_batches: Batches of the round.
        """
        users = np.array(given or [1.0] * len(loads), np.float64)
        mean = sum(loads) / (float(sum(users.tolist())) * num_batches)
        share = self.fixed / mean if mean > 0 else 0.0
        speeds = np.ones(len(loads))
        for slow in self.stragglers:
            speeds[slow.rank] = slow.speed
        step = (1.0 + share) * len(loads) / math.fsum(speeds)  # that all are to take, in mean loads
        learned = np.clip(_in_steps((speeds * step - share) / (step - share)), LOWEST, 1.0)
        return np.clip(users * learned, SPEEDS.least, SPEEDS.most)


ALL_EQUAL = LearnedSpeeds()


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
        """
        self.rounds = 0
        self.fixed = 0.0
        self._rates = np.full((num_ranks, REFINED[-1]), np.nan)  # the latest first
        self._heard = np.zeros(num_ranks, np.int64)  # the round of the latest
        self._seen = np.zeros(num_ranks, np.int64)  # rates since the latest change
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
        """
        load, time = np.asarray(loads, np.float64), np.asarray(seconds, np.float64)
        known = np.isfinite(load) & np.isfinite(time) & (load > 0) & (time >= 1e-9) & (time <= 1e9)
        number = self.rounds if number is None else number
        self.rounds += 1
        if np.count_nonzero(known) * 2 > known.size:  # of fewer, the median says nothing about the others
            self._note_step(load[known], time[known])
            rates = (load[known] + self.fixed) / time[known]
            # Of two ranks, the faster one would be the median, and each look slow half of the time: the other one is.
            relative = rates / (rates[::-1] if rates.size == 2 else _upper_median(rates))
            self._rates[known] = np.column_stack([relative, self._rates[known, :-1]])
            self._heard[known] = self.rounds
            self._seen[known] += 1
        self._rates[self._heard <= self.rounds - FORGOTTEN] = np.nan
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
        if self.rounds % (HISTORY // 4) or np.isnan(self._steps).any():
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

    def _follow(self, number: int) -> bool:
        """Lets the speeds of ranks that surely differ follow the medians of their rates; whether any did."""
        latest = self._rates[:, :WINDOW]
        known = ~np.isnan(latest).any(axis=1)
        target = _targets(_medians(latest))
        target[~known] = np.where(np.isnan(latest[:, 0]), 1.0, self._speeds)[~known]
        noise = _medians(np.abs(np.diff(latest, axis=1)))
        if known.any():  # ranks have much the same noise: that of the median rank at least
            noise = np.maximum(noise, _upper_median(noise[known]))
        band = np.where(known & (target < 1), np.maximum(BAND * self._speeds, NOISE * _ERROR * noise), 0.0)
        self._differs = np.where(np.abs(target - self._speeds) > band, self._differs + 1, 0)
        follows = self._differs >= SURE
        self._seen[follows] = WINDOW // 2 + SURE  # that are surely of after the change
        for count in REFINED:
            refined = known & ~follows & (self._speeds < 1) & (self._seen == count)
            target[refined] = _targets(_medians(self._rates[refined, :count]))
            follows |= refined & (target != self._speeds)
        if not follows.any():
            return False
        self._since[follows & (self._speeds >= 1)] = number
        self._speeds[follows] = target[follows]
        self._since[self._speeds >= 1] = -1
        self._differs[follows] = 0
        return True


def _medians(rates: Numbers) -> Numbers:
    """(n,) of each row; NaN where one is unknown."""
    ordered: Numbers = np.sort(rates, axis=1)
    return np.where(np.isnan(ordered[:, -1]), np.nan, ordered[:, ordered.shape[1] // 2])


def _targets(found: Numbers) -> Numbers:
    target: Numbers = np.clip(_in_steps(found), LOWEST, 1.0)
    target[target > 1.0 - NEAR] = 1.0
    return target


def _in_steps(values: Numbers) -> Numbers:
    return np.floor(values * STEPS + 0.5) / STEPS


def _upper_median(values: Numbers) -> float:
    """The larger of the two in the middle: of two ranks the faster one."""
    return float(np.sort(values)[values.size // 2])
