"""What the lead learns from what ranks measure: how fast each is, who is late and why, what a cost's terms take."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.delays import Cause, Delay, DelayEstimator
from evenkeel.partitioning.speeds import ALL_EQUAL, LearnedSpeeds, SpeedEstimator
from trainer_client.balancing.contribution import Extras
from trainer_client.balancing.costs.fits import Fit, FitOptions, fit_in_force, fit_ranks
from trainer_client.balancing.costs.learned import LearnedCost

logger = logging.getLogger(__name__)

_MOST_ROWS = 4096  # of a fit; of more ranks, every so many-th


class SpeedLearner:
    """Learns the ranks' speeds and delays.

    Attributes:
        learned: What is known of them.
    """

    def __init__(self, name: str, *, nodes: Sequence[str], speeds: Sequence[float] | None) -> None:
        """Knows nothing yet.

        Args:
            name: Of the loader, for messages.
            nodes: The host of each rank.
            speeds: The user's; None: all equal.
        """
        self._name, self._nodes = name, nodes
        self._speeds = None if speeds is None else np.array(speeds, np.float64)
        self._estimators: tuple[SpeedEstimator, DelayEstimator] | None = None  # once anybody has measured
        self.learned = ALL_EQUAL

    def note(self, number: int, measured: NDArray[np.float64]) -> None:
        """Takes into account what ranks say in a round.

        Args:
            number: Of the round.
            measured: (ranks, 5) see `Measure`.
        """
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
            self._tell(number, before)

    @property
    def step_seconds(self) -> float:
        """Median seconds of a step's computation lately; 0 where nobody measures."""
        return 0.0 if self._estimators is None else self._estimators[0].step_seconds

    def _tell(self, number: int, before: LearnedSpeeds) -> None:
        """Says who has become a straggler, and who is none any more."""
        then = {slow.rank: slow for slow in before.stragglers}
        now = {slow.rank: slow for slow in self.learned.stragglers}
        for rank in sorted(then.keys() ^ now.keys()):
            if rank in now:
                logger.warning(
                    "%s: rank %d on %s computes %.2f times as fast as the median rank for what its samples cost (round "
                    "%d), and gets less work; the cost may also be wrong for this rank's data",
                    self._name, rank, self._nodes[rank], now[rank].speed, number,
                )  # fmt: skip
            else:
                logger.warning(
                    "%s: rank %d on %s is as fast as the others again, after round %d (slow since round %d)",
                    self._name, rank, self._nodes[rank], number, then[rank].since,
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


class CostLearner:
    """Fits a learned cost to what batches contained and took; in a thread of its own, so that no round waits for one.

    Attributes:
        fit: That the cost is to follow; None: the prior.
    """

    def __init__(self, name: str, num_ranks: int) -> None:
        """Knows nothing yet.

        Args:
            name: Of the loader, for messages.
            num_ranks: Number of ranks.
        """
        self._name = name
        self._latest: list[deque[NDArray[np.float64]]] = [deque() for _ in range(num_ranks)]
        self._skipped = [0] * num_ranks
        self._differ = False  # the ranks' costs: nothing is learned
        self._thread: threading.Thread | None = None
        self._fitted: Fit | None = None
        self.fit: Fit | None = None

    def note(self, number: int, cost: LearnedCost | None, extras: Mapping[int, Extras]) -> bool:
        """Takes into account what ranks say in a round; whether the fit has changed.

        Args:
            number: Of the round.
            cost: The lead's own; None where it learns none.
            extras: Of the ranks that have some.
        """
        told = {rank: one for rank, one in extras.items() if one.term_rows is not None}
        if told and not self._differ:
            names = () if cost is None else tuple(cost.terms.names)
            other = next((rank for rank, one in told.items() if one.term_names != names), None)
            if other is not None:
                self._differ = True
                logger.warning(
                    "%s: the cost of rank %d has the terms %s, that of rank 0 %s: nothing is learned of it; give all "
                    "ranks the same LearnedCost", self._name, other, told[other].term_names, names or None,
                )  # fmt: skip
            elif cost is not None:
                self._add(told, cost.options)
                if 0 in told:
                    self._begin(cost)
        wanted = None if self._differ else self._fitted
        changed = wanted is not self.fit
        if changed and cost is not None and (wanted is None) != (self.fit is None):
            _tell(self._name, number, cost, wanted)
        self.fit = wanted
        return changed

    def _add(self, told: Mapping[int, Extras], options: FitOptions) -> None:
        """Keeps the latest batches of each rank but for the first ones."""
        for rank, one in told.items():
            rows = one.term_rows
            assert rows is not None
            skipped = min(len(rows), options.skip - self._skipped[rank])
            self._skipped[rank] += skipped
            self._latest[rank] = deque([*self._latest[rank], *rows[skipped:]], maxlen=options.window)

    def _begin(self, cost: LearnedCost) -> None:
        """Begins a fit of what is known, unless one is under way."""
        if self._thread is not None and self._thread.is_alive():
            return
        stride = max(1, -(-sum(map(len, self._latest)) // _MOST_ROWS))
        width = len(cost.terms.names) + 1
        tables = [np.array(one, np.float64).reshape(-1, width) for one in self._latest[::stride]]
        self._thread = threading.Thread(target=self._run, args=(tables, cost.options), name="evenkeel-fit", daemon=True)
        self._thread.start()

    def _run(self, tables: list[NDArray[np.float64]], options: FitOptions) -> None:
        try:
            fit = fit_ranks(tables, None if options.upper is None else np.array(options.upper))
        except Exception:  # a job does not end because its cost stays what it is
            logger.warning("the cost could not be fitted", exc_info=True)
            return
        if fit is not None:
            self._fitted = fit_in_force(fit, self._fitted, options)


def _tell(name: str, number: int, cost: LearnedCost, fit: Fit | None) -> None:
    if fit is None:
        logger.info("%s: after round %d the cost is the given one again: times scatter about the fit", name, number)
        return
    named = ", ".join(
        f"{value:.3g} ms per {term}" for term, value in zip(cost.terms.names, fit.coefficients, strict=True)
    )
    explained = 100 * fit.explained
    logger.info("%s: after round %d the cost is %s (%.0f %% of the variance explained)", name, number, named, explained)
