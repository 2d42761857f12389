"""What the ranks learn of their speeds: what this rank measures, and what all of them make of it alike."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.delays import Cause, Delay, DelayEstimator
from evenkeel.partitioning.speeds import ALL_EQUAL, LearnedSpeeds, SpeedEstimator
from trainer_client.balancing.costs.learned import LearnedCost
from trainer_client.balancing.votes import Vote

logger = logging.getLogger(__name__)


class Measure(NamedTuple):
    """Batches of a rank in the mean: their load, and seconds as in a `Vote`."""

    load: float = 0.0
    seconds: float = 0.0
    late: float = 0.0
    loading: float = 0.0
    loop: float = 0.0


class Measured:
    """The batches of this rank whose time is known, since it was last told to the others.

    Attributes:
        learns: The cost that is learned from them; None: it is given.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches, self._sums = 0, Measure()
        self._terms: deque[NDArray[np.float64]] = deque(maxlen=_MOST_TERMS)
        self.learns: LearnedCost | None = None

    def add(
        self,
        load: float,
        seconds: float,
        late: float = 0.0,
        loading: float = 0.0,
        loop: float = 0.0,
        *,
        terms: NDArray[np.float64] | None = None,
    ) -> None:
        """Notes a batch; one without load, or with a time that is none, tells nothing.

        Args:
            load: Of the batch.
            seconds: As in a `Vote`.
            late: As in a `Vote`.
            loading: As in a `Vote`.
            loop: As in a `Vote`.
            terms: (terms,) of a learned cost, summed over the batch.
        """
        given = (load, seconds, late, loading, loop)
        try:
            if not (min(given[:2]) > 0 and min(given[2:]) >= 0 and all(map(math.isfinite, given))):
                return
        except (TypeError, ValueError, RuntimeError):  # no numbers, or tensors of several
            return
        new = Measure(*map(float, given))
        with self._lock:
            self._batches += 1
            self._sums = Measure(*(before + more for before, more in zip(self._sums, new, strict=True)))
            if terms is not None:
                self._terms.append(np.append(terms, 1e3 * new.seconds))

    def take_terms(self) -> list[NDArray[np.float64]]:
        """Of each batch noted since the last call (terms + 1,) its summed terms, and the milliseconds that it took."""
        with self._lock:
            rows, self._terms = list(self._terms), deque(maxlen=_MOST_TERMS)
        return rows

    def take(self) -> Measure:
        """The batches noted since the last call; zeros if there were none."""
        if not self._batches:
            return Measure()
        with self._lock:
            number, sums = self._batches, self._sums
            self._batches, self._sums = 0, Measure()
        return Measure(*(value / number for value in sums))


class SpeedKeeper:
    """What the votes of all rounds tell of the ranks' speeds, which is the same on all ranks."""

    def __init__(self, name: str, *, rank: int, nodes: Sequence[str], given: Sequence[float] | None) -> None:
        """Knows nothing yet.

        Args:
            name: Of the loader, for messages.
            rank: This rank.
            nodes: The host of each rank.
            given: The user's speeds; None: all equal.
        """
        self._name = name
        self._rank = rank
        self._nodes = nodes
        self._given = given
        self._estimators: tuple[SpeedEstimator, DelayEstimator] | None = None  # once anybody has measured
        self.learned = ALL_EQUAL

    def note(self, number: int, votes: Sequence[Vote]) -> LearnedSpeeds:
        """Takes a round's votes into account; what is known after it."""
        if self._estimators is None:
            if not any(vote.measured_seconds for vote in votes):
                return ALL_EQUAL
            self._estimators = SpeedEstimator(len(votes)), DelayEstimator(len(votes))
        speeds, delays = self._estimators
        loads = [vote.measured_load for vote in votes]
        if self._given is not None:  # what users say of speeds is known already
            loads = [load / speed for load, speed in zip(loads, self._given, strict=True)]
        seconds = [vote.measured_seconds for vote in votes]
        changed = speeds.note(loads, seconds, number)
        waits = zip(*((vote.measured_late, vote.measured_loading, vote.measured_loop) for vote in votes), strict=True)
        if delays.note(number, seconds, *waits) or changed:
            before, self.learned = self.learned, replace(speeds.learned, delays=delays.delays)
            self._tell(number, before)
        return self.learned

    def _tell(self, number: int, before: LearnedSpeeds) -> None:
        """Says who has become a straggler and who is none any more: rank 0 and the rank itself."""
        then = {slow.rank: slow for slow in before.stragglers}
        now = {slow.rank: slow for slow in self.learned.stragglers}
        for rank in sorted(then.keys() ^ now.keys()):
            level = logging.WARNING if self._rank in (0, rank) else logging.DEBUG
            if rank in now:
                logger.log(
                    level,
                    "%s: rank %d on %s computes %.2f times as fast as the median rank for what its samples cost (round "
                    "%d), and gets less work; the cost may also be wrong for this rank's data",
                    self._name, rank, self._nodes[rank], now[rank].speed, number,
                )  # fmt: skip
            else:
                logger.log(
                    level, "%s: rank %d on %s is as fast as the others again, after round %d (slow since round %d)",
                    self._name, rank, self._nodes[rank], number, then[rank].since,
                )  # fmt: skip
        for one, is_late in _turned(before.delays, self.learned.delays):
            level = logging.WARNING if self._rank in (0, one.rank) else logging.DEBUG
            if is_late:
                logger.log(
                    level, "%s: rank %d on %s holds the others up: %s, and its steps begin later by %.0f %% of what "
                    "the median rank computes (round %d)",
                    self._name, one.rank, self._nodes[one.rank], _WHY[one.cause], 100 * one.share, number,
                )  # fmt: skip
            else:
                logger.log(
                    level, "%s: rank %d on %s is as soon in %s as the others again, after round %d (late since %d)",
                    self._name, one.rank, self._nodes[one.rank], _WHAT[one.cause], number, one.since,
                )  # fmt: skip


_MOST_TERMS = 1000
_WHY = {
    Cause.LOADING: "it loads data too slowly",
    Cause.NETWORK: "its samples come late over the network",
    Cause.LOOP: "its loop does something else before it asks for the next batch",
}
_WHAT = {Cause.LOADING: "loading data", Cause.NETWORK: "exchanging samples", Cause.LOOP: "asking for batches"}


def _turned(before: Sequence[Delay], after: Sequence[Delay]) -> Iterator[tuple[Delay, bool]]:
    """Delays that have begun, and those that are over."""
    then, now = ({(one.rank, one.cause): one for one in delays} for delays in (before, after))
    for key in sorted(then.keys() ^ now.keys()):
        yield (now[key], True) if key in now else (then[key], False)
