"""The stage in which the lead learns what each term of a cost takes, from what ranks measure."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from trainer_client.balancing.costs.fitting import Fit, FitOptions, fit_in_force, fit_ranks
from trainer_client.balancing.costs.learned import LearnedCost
from trainer_client.balancing.lead import Round, Stage

logger = logging.getLogger(__name__)

_MOST_ROWS = 4096  # of a fit; of more ranks, every so many-th
_SILENT = 15  # rounds with times of a rank after which one that learns has sent the terms of its batches


class CostLearner(Stage):
    """Fits a learned cost to what batches contained and took; in a thread of its own, so that no round waits for one.

    Attributes:
        fit: That the cost is to follow; None: the prior.
    """

    def __init__(self, name: str, num_ranks: int, cost: Callable[[], LearnedCost | None]) -> None:
        """Knows nothing yet; `cost` gives the lead's own, None where it learns none."""
        self._name, self._cost = name, cost
        self._rows: list[deque[NDArray[np.float64]]] = [deque() for _ in range(num_ranks)]  # the latest of each rank
        self._skipped = [0] * num_ranks
        self._timed = np.zeros(num_ranks, np.int64)  # rounds in which a rank has sent the time of its batches
        self._differ = False  # the ranks' costs: nothing is learned
        self._thread: threading.Thread | None = None
        self._fitted: Fit | None = None
        self.fit: Fit | None = None
        self._sent: Fit | None = None  # that all ranks follow

    def begin(self, round_: Round) -> None:
        """Takes into account what ranks have measured."""
        self._timed += round_.contributions.headers["measured"][:, 1] > 0
        cost, extras = self._cost(), round_.contributions.extras
        rows = {rank: one.term_rows for rank, one in extras.items() if one.term_rows is not None}
        if rows and not self._differ:
            silent = [rank for rank, kept in enumerate(self._rows) if self._timed[rank] and not (kept or rank in rows)]
            names = () if cost is None else tuple(cost.terms.names)
            others: dict[int, object] = {r: extras[r].term_names for r in rows if extras[r].term_names != names}
            others |= dict.fromkeys((rank for rank in silent if self._timed[rank] > _SILENT), None)
            if others:
                self._differ, self._fitted = True, None
                logger.warning(
                    "%s: the cost of rank %d has the terms %s, that of rank 0 %s: nothing is learned of it; give all "
                    "ranks the same LearnedCost", self._name, *next(iter(others.items())), names or None,
                )  # fmt: skip
            elif cost is not None:
                self._keep(rows, cost.options)
                if 0 in rows and not silent:
                    self._begin_fit(cost)
        fitted = None if self._differ else self._fitted
        if fitted is not self.fit:
            if cost is not None and (fitted is None) != (self.fit is None):
                _say(self._name, round_.number, cost, fitted)
            self.fit = fitted

    def finish(self, round_: Round) -> None:
        """Lets the ranks follow a new fit."""
        fit = self.fit
        if fit is not self._sent:
            round_.broadcast.fit, self._sent = (fit,), fit

    def _keep(self, rows_of: dict[int, NDArray[np.float64]], options: FitOptions) -> None:
        """Keeps the latest batches of each rank but for the first ones."""
        for rank, rows in rows_of.items():
            skipped = min(len(rows), options.skip - self._skipped[rank])
            self._skipped[rank] += skipped
            self._rows[rank] = deque([*self._rows[rank], *rows[skipped:]], maxlen=options.window)

    def _begin_fit(self, cost: LearnedCost) -> None:
        """Begins a fit, unless one is under way."""
        if self._thread is not None and self._thread.is_alive():
            return
        stride = max(1, -(-sum(map(len, self._rows)) // _MOST_ROWS))
        width = len(cost.terms.names) + 1
        tables = [np.array(one, np.float64).reshape(-1, width) for one in self._rows[::stride]]
        self._thread = threading.Thread(target=self._fit, args=(tables, cost.options), name="evenkeel-fit", daemon=True)
        self._thread.start()

    def _fit(self, tables: list[NDArray[np.float64]], options: FitOptions) -> None:
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
    named = zip(cost.terms.names, fit.coefficients, strict=True)
    logger.info(
        "%s: after round %d the cost is %s (%.0f %% of the variance explained)",
        name, number, ", ".join(f"{value:.3g} ms per {term}" for term, value in named), 100 * fit.explained,
    )  # fmt: skip
