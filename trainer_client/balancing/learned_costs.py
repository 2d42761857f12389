"""What the lead learns of a cost from what ranks measure: what each of its terms takes."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from trainer_client.balancing.contribution import Extras
from trainer_client.balancing.costs.learned import Fit, FitOptions, LearnedCost, fit_in_force, fit_ranks
from trainer_client.balancing.lead import Round, Stage

logger = logging.getLogger(__name__)

_MOST_ROWS = 4096  # of a fit; of more ranks, every so many-th


_SILENT = 15
"""Rounds with times of a rank after which one that learns has told the terms of its batches."""


class CostLearner(Stage):
    """Fits a learned cost to what batches contained and took; in a thread of its own, so that no round waits for one.

    Attributes:
        fit: That the cost is to follow; None: the prior.
    """

    def __init__(self, name: str, num_ranks: int, cost: Callable[[], LearnedCost | None]) -> None:
        """Knows nothing yet; `cost` gives the lead's own, None where it learns none."""
        self._name, self._cost = name, cost
        self._latest: list[deque[NDArray[np.float64]]] = [deque() for _ in range(num_ranks)]
        self._skipped = [0] * num_ranks
        self._timed = np.zeros(num_ranks, np.int64)  # rounds with which a rank has told the time of its batches
        self._differ = False  # the ranks' costs: nothing is learned
        self._thread: threading.Thread | None = None
        self._fitted: Fit | None = None
        self.fit: Fit | None = None
        self._sent: Fit | None = None  # that all ranks follow

    def begin(self, round_: Round) -> None:
        """Takes into account what ranks have measured."""
        self._timed += round_.contributions.headers["measured"][:, 1] > 0
        if round_.contributions.extras or self._fitted is not self.fit:
            self.note(round_.number, self._cost(), round_.contributions.extras)

    def finish(self, round_: Round) -> None:
        """Lets the ranks follow a new fit."""
        fit = self.fit
        if fit is not self._sent:
            round_.extras.fit, self._sent = (fit,), fit

    def note(self, number: int, cost: LearnedCost | None, extras: Mapping[int, Extras]) -> None:
        """Takes into account what ranks have measured by a round, which may change the fit."""
        measured = {rank: one for rank, one in extras.items() if one.term_rows is not None}
        if measured and not self._differ:
            names = () if cost is None else tuple(cost.terms.names)
            other = next((rank for rank, one in measured.items() if one.term_names != names), None)
            silent = [rank for rank, rows in enumerate(self._latest) if self._timed[rank] and not len(rows)]
            silent = [rank for rank in silent if rank not in measured]
            other = next((rank for rank in silent if self._timed[rank] > _SILENT), other)
            if other is not None:
                self._differ = True
                logger.warning(
                    "%s: the cost of rank %d has the terms %s, that of rank 0 %s: nothing is learned of it; give all "
                    "ranks the same LearnedCost", self._name, other,
                    measured[other].term_names if other in measured else None, names or None,
                )  # fmt: skip
            elif cost is not None:
                self._add(measured, cost.options)
                if 0 in measured and not silent:
                    self._begin(cost)
        wanted = None if self._differ else self._fitted
        changed = wanted is not self.fit
        if changed and cost is not None and (wanted is None) != (self.fit is None):
            _say(self._name, number, cost, wanted)
        self.fit = wanted

    def _add(self, measured: Mapping[int, Extras], options: FitOptions) -> None:
        """Keeps the latest batches of each rank but for the first ones."""
        for rank, one in measured.items():
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


def _say(name: str, number: int, cost: LearnedCost, fit: Fit | None) -> None:
    if fit is None:
        logger.info("%s: after round %d the cost is the given one again: times scatter about the fit", name, number)
        return
    named = ", ".join(
        f"{value:.3g} ms per {term}" for term, value in zip(cost.terms.names, fit.coefficients, strict=True)
    )
    explained = 100 * fit.explained
    logger.info("%s: after round %d the cost is %s (%.0f %% of the variance explained)", name, number, named, explained)
