"""What the ranks make of the times of their batches where their cost is a learned one: the same fit on all of them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer_client.balancing.costs.fits import Fit, FitOptions, fit_in_force, fit_ranks
from trainer_client.balancing.costs.learned import LearnedCost
from trainer_client.balancing.groups import Groups
from trainer_client.balancing.speeds import Measured
from trainer_client.balancing.votes import Vote

if TYPE_CHECKING:
    from trainer_client.balancing.turns import Turns

logger = logging.getLogger(__name__)

_FIRST = 10  # rounds with times until the ranks first show them to each other, and learn how often they will
_MOST_ROWS = 4096  # of a fit; of more ranks, every so many-th


def follow(cost: object, turns: Turns | None, number: int, pass_number: int | None) -> None:
    """Lets a learned cost follow what all ranks' do in the round that is to be submitted.

    Args:
        cost: Of the loader, learned or not.
        turns: Of the stream; None where this rank is alone.
        number: Of the round.
        pass_number: Of the pass.
    """
    cost = getattr(cost, "function", cost)
    if isinstance(cost, LearnedCost):
        assert pass_number is not None
        cost.fit = None if turns is None else turns.fit_for(number, pass_number)


class _Told(NamedTuple):
    """What a rank shows to the others now and then."""

    names: tuple[str, ...] | None  # of its cost's terms; None: it is no learned one
    rows: NDArray[np.float64]  # (batches, terms + 1) since the last time
    every: int
    fit: Fit | None


class CostKeeper:
    """Gathers what batches held and took; the first rank fits, and all follow its fit from the same round on.

    Attributes:
        fit: That a learned cost follows in rounds that are submitted from now on; None: the prior.
    """

    def __init__(self, name: str, groups: Groups, measured: Measured) -> None:
        """Knows nothing yet: the cost is the prior.

        Args:
            name: Of the loader, for messages.
            groups: The ranks.
            measured: This rank's batches.
        """
        self._name, self._groups, self._measured = name, groups, measured
        self.fit: Fit | None = None
        self._timed, self._every = 0, _FIRST
        self._differ = False  # the ranks' costs: nothing is learned
        self._fitter = _Fitter() if groups.rank == 0 else None

    @property
    def has_fit(self) -> bool:
        """Whether this rank has a fit for the others; only the first may."""
        return self._fitter is not None and not self._differ and self._fitter.used is not self.fit

    def note(self, number: int, votes: Sequence[Vote]) -> None:
        """Takes a round into account. Now and then collective, by the votes alone."""
        if self._differ or not any(vote.learns for vote in votes):
            return
        self._timed += any(vote.measured_seconds for vote in votes)
        enough = self._timed >= self._every
        if enough or votes[0].has_fit:
            self._exchange(number, enough=enough)

    def _exchange(self, number: int, *, enough: bool) -> None:
        cost, rows = self._measured.learns, self._measured.take_terms()
        own = None if self._fitter is None else self._fitter.used
        width = 1 if cost is None else len(cost.terms.names) + 1
        told: list[_Told] = self._groups.gather_objects(
            _Told(
                None if cost is None else tuple(cost.terms.names),
                np.array(rows, np.float64).reshape(-1, width),
                _FIRST if cost is None else cost.options.every,
                own,
            )
        )
        if enough:
            self._timed, self._every = 0, told[0].every
        others = [rank for rank, one in enumerate(told) if one.names != told[0].names]
        if others:
            self._differ, self.fit = True, None
            self._tell_others(others[0], told)
            return
        # The first rank keeps what it has told itself, not its copy, which `has_fit` would take for another one.
        before, self.fit = self.fit, told[0].fit if self._fitter is None else own
        if self._fitter is not None and cost is not None:
            if (before is None) != (self.fit is None):
                _tell(self._name, number, cost, self.fit)
            self._fitter.add([one.rows for one in told], cost.options)
            if enough:
                self._fitter.begin(cost)

    def _tell_others(self, rank: int, told: list[_Told]) -> None:
        if self._groups.rank == 0:
            logger.warning(
                "%s: the cost of rank %d has the terms %s, that of rank 0 %s: nothing is learned of it; give all ranks "
                "the same LearnedCost",
                self._name, rank, told[rank].names, told[0].names,
            )  # fmt: skip


class _Fitter:
    """The first rank's fits, made in a thread of their own: no round waits for one.

    Attributes:
        used: What the cost is to follow; None: the prior.
    """

    def __init__(self) -> None:
        self.used: Fit | None = None
        self._latest: list[deque[NDArray[np.float64]]] = []
        self._skipped: list[int] = []
        self._thread: threading.Thread | None = None

    def add(self, rows: Sequence[NDArray[np.float64]], options: FitOptions) -> None:
        """Keeps the latest batches of each rank, by rank, but for the first ones."""
        if not self._latest:
            self._latest = [deque(maxlen=options.window) for _ in rows]
            self._skipped = [0] * len(rows)
        for rank, table in enumerate(rows):
            skipped = min(len(table), options.skip - self._skipped[rank])
            self._skipped[rank] += skipped
            self._latest[rank].extend(table[skipped:])

    def begin(self, cost: LearnedCost) -> None:
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
            self.used = fit_in_force(fit, self.used, options)


def _tell(name: str, number: int, cost: LearnedCost, fit: Fit | None) -> None:
    if fit is None:
        logger.info("%s: after round %d the cost is the given one again: times scatter about the fit", name, number)
        return
    named = ", ".join(
        f"{value:.3g} ms per {term}" for term, value in zip(cost.terms.names, fit.coefficients, strict=True)
    )
    explained = 100 * fit.explained
    logger.info("%s: after round %d the cost is %s (%.0f %% of the variance explained)", name, number, named, explained)
