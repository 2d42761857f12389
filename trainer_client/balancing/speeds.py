"""What the ranks learn of their speeds: what this rank measures, and what all of them make of it alike."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence

from evenkeel.partitioning.speeds import ALL_EQUAL, LearnedSpeeds, SpeedEstimator
from trainer_client.balancing.votes import Vote

logger = logging.getLogger(__name__)


class Measured:
    """The batches of this rank whose time is known, since it was last told to the others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches, self._load, self._seconds = 0, 0.0, 0.0

    def add(self, load: float, seconds: float) -> None:
        """Notes a batch; one without load, or whose time is no positive number, tells nothing."""
        if not (0 < load < math.inf and 0 < seconds < math.inf):
            return
        with self._lock:
            self._batches += 1
            self._load += load
            self._seconds += seconds

    def take(self) -> tuple[float, float]:
        """Mean load and seconds of the batches noted since the last call; zeros if there were none."""
        if not self._batches:
            return 0.0, 0.0
        with self._lock:
            number, load, seconds = self._batches, self._load, self._seconds
            self._batches, self._load, self._seconds = 0, 0.0, 0.0
        return load / number, seconds / number


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
        self._estimator: SpeedEstimator | None = None  # from the first time that anybody has measured
        self.learned = ALL_EQUAL

    def note(self, number: int, votes: Sequence[Vote]) -> LearnedSpeeds:
        """Takes a round's votes into account; what is known after it."""
        if self._estimator is None:
            if not any(vote.measured_seconds for vote in votes):
                return ALL_EQUAL
            self._estimator = SpeedEstimator(len(votes))
        loads = [vote.measured_load for vote in votes]
        if self._given is not None:  # what users say of speeds is known already
            loads = [load / speed for load, speed in zip(loads, self._given, strict=True)]
        if self._estimator.note(loads, [vote.measured_seconds for vote in votes], number):
            before, self.learned = self.learned, self._estimator.learned
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
                    "%s: rank %d on %s computes %.2f times as fast as the median rank (round %d), and gets less work",
                    self._name, rank, self._nodes[rank], now[rank].speed, number,
                )  # fmt: skip
            else:
                logger.log(
                    level, "%s: rank %d on %s is as fast as the others again, after round %d (slow since round %d)",
                    self._name, rank, self._nodes[rank], number, then[rank].since,
                )  # fmt: skip
