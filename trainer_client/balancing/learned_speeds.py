"""What the lead learns of the ranks from what they measure: how fast each computes, who is late and why."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.delays import Cause, Delay, DelayEstimator
from evenkeel.partitioning.speeds import ALL_EQUAL, LearnedSpeeds, SpeedEstimator
from trainer_client.balancing.lead import Round, Stage
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.report import Mode

logger = logging.getLogger(__name__)


class SpeedLearner(Stage):
    """Learns the ranks' speeds and delays, and lets plans follow them.

    Attributes:
        learned: What is known of them.
    """

    def __init__(self, name: str, options: BalanceOptions, nodes: Sequence[str]) -> None:
        """Knows nothing yet; `nodes` are the hosts of the ranks."""
        self._name, self._nodes = name, nodes
        self._speeds = None if options.speeds is None else np.array(options.speeds, np.float64)
        self._estimators: tuple[SpeedEstimator, DelayEstimator] | None = None  # once anybody has measured
        self.learned = ALL_EQUAL

    def begin(self, round_: Round) -> None:
        """Takes into account what ranks have measured, and chooses the speeds to plan with."""
        self._note(round_.number, round_.contributions.headers["measured"])
        if self._estimators is None or not (self.learned or self.learned.delays):
            return
        round_.broadcast.learned, round_.step_seconds = self.learned, self._estimators[0].step_seconds
        if self.learned and round_.samples is not None and round_.decision.mode is Mode.EMBEDDED:
            samples = round_.samples
            homes = np.repeat(np.arange(samples.num_ranks), samples.counts_at_home)
            loads = np.bincount(homes, samples.costs, samples.num_ranks).tolist()
            planned = self.learned.to_plan(round_.options.speeds, loads, samples.num_batches)
            round_.options = replace(round_.options, speeds=tuple(planned.tolist()))

    def _note(self, number: int, measured: NDArray[np.float64]) -> None:
        """Takes into account (ranks, 5) what ranks have measured, as `Measure`, by a round."""
        if self._estimators is None:
            if not measured[:, 1].any():
                return
            self._estimators = SpeedEstimator(len(measured)), DelayEstimator(len(measured))
        speeds, delays = self._estimators
        loads, seconds, *waits = measured.T
        if self._speeds is not None:  # what users say of speeds is known already
            loads = loads / self._speeds
        changed = speeds.note(loads, seconds, number)
        if delays.note(number, seconds, *waits) or changed:
            before, self.learned = self.learned, replace(speeds.learned, delays=delays.delays)
            self._say(number, before)

    def _say(self, number: int, before: LearnedSpeeds) -> None:
        """Says who has become a straggler, and who is none any more."""
        before_by_rank = {slow.rank: slow for slow in before.stragglers}
        after_by_rank = {slow.rank: slow for slow in self.learned.stragglers}
        for rank in sorted(before_by_rank.keys() ^ after_by_rank.keys()):
            if rank in after_by_rank:
                logger.warning(
                    "%s: rank %d on %s computes %.2f times as fast as the median rank for what its samples cost (round "
                    "%d), and gets less work; the cost may also be wrong for this rank's data",
                    self._name, rank, self._nodes[rank], after_by_rank[rank].speed, number,
                )  # fmt: skip
            else:
                logger.warning(
                    "%s: rank %d on %s is as fast as the others again, after round %d (slow since round %d)",
                    self._name, rank, self._nodes[rank], number, before_by_rank[rank].since,
                )  # fmt: skip
        for one, is_late in _changes(before.delays, self.learned.delays):
            if is_late:
                logger.warning(
                    "%s: rank %d on %s holds the others up: %s, and its steps begin later by %.0f %% of what the "
                    "median rank computes (round %d)",
                    self._name, one.rank, self._nodes[one.rank], _WHY[one.cause], 100 * one.share, number,
                )  # fmt: skip
            else:
                logger.warning(
                    "%s: rank %d on %s is as soon in %s as the others again, after round %d (late since %d)",
                    self._name, one.rank, self._nodes[one.rank], _WHAT[one.cause], number, one.since,
                )  # fmt: skip


_WHY = {
    Cause.LOADING: "it loads data too slowly",
    Cause.NETWORK: "its samples come late over the network",
    Cause.LOOP: "its loop does something else before it asks for the next batch",
}
_WHAT = {Cause.LOADING: "loading data", Cause.NETWORK: "exchanging samples", Cause.LOOP: "asking for batches"}


def _changes(before: Sequence[Delay], after: Sequence[Delay]) -> Iterator[tuple[Delay, bool]]:
    """Delays that have begun, and those that are over."""
    then, now = ({(one.rank, one.cause): one for one in delays} for delays in (before, after))
    for key in sorted(then.keys() ^ now.keys()):
        yield (now[key], True) if key in now else (then[key], False)
