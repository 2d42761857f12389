"""Least squares of what batches took on what they contained, without outliers and slow ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer_client.checks import check_whole

_VARIES = 1e-3  # a term whose deviation is a smaller share of its mean tells nothing apart from the fixed time
_OUTLIER = 4.0  # deviations of the error
_PASSES = 10  # of reweighting
_EXACT = 1e-3  # errors of a smaller share of the median time weigh alike
_SLOW = 1.05  # times the median rank's time for the same work, from which on it is the rank that is slow, not the cost
_SCATTERED = 2.0  # times the error of the fit in use, above which it is not believed any more
_LITTLE = 0.05  # an error that is never too much for it
_ROUNDS = 3  # in which the ranks' slowness and the coefficients are put right by each other


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Coefficients of the time of a rank's step.

    Attributes:
        coefficients: (terms,) milliseconds per unit of each term, 0 or more.
        fixed: Milliseconds that do not depend on the batch.
        error: Mean absolute error over mean time, on the observations used.
        explained: Share of the variance that is explained, 1 at best.
        observations: Number used, without outliers.
    """

    coefficients: NDArray[np.float64]
    fixed: float
    error: float
    explained: float
    observations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """When to fit, and when to believe it.

    Attributes:
        every: Measured batches between fits.
        window: Latest batches of each rank that a fit uses.
        skip: First batches that are not used: compilation and warm-up.
        min_explained: Smallest share of the variance that a fit must explain to be used; else the cost stays, since a
            poor fit balances worse than what it replaces.
        upper: Largest allowed milliseconds per unit of each term; default: none.
    """

    every: int = 20
    window: int = 200
    skip: int = 5
    min_explained: float = 0.8
    upper: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_whole(self, every=1, window=1, skip=0)
        if not 0 <= self.min_explained <= 1:
            raise ValueError(f"min_explained is {self.min_explained}; use 0 to 1")
        if self.upper is not None and not all(bound > 0 for bound in self.upper):
            raise ValueError(f"upper is {self.upper}; use milliseconds above 0, math.inf for no bound")


def fit_times(
    terms: NDArray[np.float64], milliseconds: NDArray[np.float64], upper: NDArray[np.float64] | None = None
) -> Fit | None:
    """Least squares with bounds, of what is not far from the fit of least absolute deviations.

    That fit, by reweighted least squares, holds still while up to a fifth of the times are off by any factor, as those
    of one stuck rank of eight are.

    Args:
        terms: (observations, terms) sums over each rank's batch.
        milliseconds: (observations,) measured compute times.
        upper: (terms,) largest allowed coefficients; default: none.

    Returns:
        The fit; None if there are too few observations, or none of the terms varies.
    """
    finite = np.isfinite(milliseconds) & np.isfinite(terms).all(axis=1) & (milliseconds > 0)
    terms, milliseconds = terms[finite], milliseconds[finite]
    varying = terms.std(axis=0) > _VARIES * np.abs(terms.mean(axis=0)) if len(terms) else np.zeros(0, dtype=bool)
    if not varying.any() or len(terms) < 4 * (varying.sum() + 1):
        return None
    highest = np.full(terms.shape[1], np.inf) if upper is None else upper
    scale = np.append(np.abs(terms[:, varying]).max(axis=0), 1.0)
    table = np.column_stack([terms[:, varying], np.ones(len(terms))]) / scale
    highest = np.append(highest[varying], np.inf) * scale
    weights = np.ones(len(table))
    for _ in range(_PASSES):
        solution = _least_squares(table * weights[:, None], milliseconds * weights, highest)
        errors = np.abs(milliseconds - table @ solution)
        weights = 1 / np.sqrt(np.maximum(errors, _EXACT * np.median(milliseconds)))
    deviation = 1.4826 * float(np.median(errors))
    used = errors <= max(_OUTLIER * deviation, 1e-9 * float(milliseconds.mean()))
    table, times = table[used], milliseconds[used]
    solution = _least_squares(table, times, highest)
    coefficients = np.zeros(terms.shape[1])
    coefficients[varying] = solution[:-1] / scale[:-1]
    rest = times - table @ solution
    variance = float(times.var())
    return Fit(
        coefficients=coefficients,
        fixed=float(solution[-1]),
        error=float(np.abs(rest).mean() / times.mean()),
        explained=float(1 - rest.var() / variance) if variance else 0.0,
        observations=int(used.sum()),
    )


def _least_squares(
    table: NDArray[np.float64], values: NDArray[np.float64], highest: NDArray[np.float64]
) -> NDArray[np.float64]:
    from scipy.optimize import lsq_linear, nnls  # take a while, and few jobs want them

    solution: NDArray[np.float64]
    if np.isinf(highest).all():  # of 64 ranks, a tenth of the time that the lead's process takes
        orthogonal, triangle = np.linalg.qr(table)
        solution, _ = nnls(triangle, orthogonal.T @ values)
    else:
        solution = lsq_linear(table, values, bounds=(np.zeros(len(highest)), highest), method="bvls").x
    return solution


def fit_ranks(tables: Sequence[NDArray[np.float64]], upper: NDArray[np.float64] | None = None) -> Fit | None:
    """The same for what several ranks measured, of which some may compute more slowly than the others.

    A rank that takes longer for all it does says nothing else of the cost: its times count as those of the median rank.

    Args:
        tables: Of each rank, (observations, terms + 1): sums over its batch, and milliseconds.
        upper: (terms,) largest allowed coefficients; default: none.
    """
    tables = [table[np.isfinite(table).all(axis=1) & (table[:, -1] > 0)] for table in tables]
    terms, slowness, fit = np.concatenate(tables)[:, :-1], np.ones(len(tables)), None
    for _ in range(_ROUNDS):
        times = np.concatenate([table[:, -1] / slow for table, slow in zip(tables, slowness, strict=True)])
        fit = fit_times(terms, times, upper)
        if fit is None:
            return None
        ratios = np.array(  # of measured to predicted times; NaN of a rank without any
            [
                np.median(table[:, -1] / (table[:, :-1] @ fit.coefficients + fit.fixed)) if len(table) else np.nan
                for table in tables
            ]
        )
        measured = np.sort(ratios[~np.isnan(ratios)])
        usual = measured[(len(measured) - 1) // 2]  # of two ranks, the faster one's
        before, slowness = slowness, np.where(ratios >= _SLOW * usual, ratios / usual, 1.0)
        if np.allclose(slowness, before, rtol=1e-2):
            break
    return fit


def fit_in_force(fit: Fit, before: Fit | None, options: FitOptions) -> Fit | None:
    """What the cost is to be: a new fit, the one before, or the prior (None).

    A good cost makes all times alike, and then a new fit explains little, however right it is: the one that made them
    so stays as long as times are no more scattered than they were.
    """
    if fit.explained >= options.min_explained and (fit.coefficients > 0).any():
        return fit
    return before if before is not None and fit.error <= max(_SCATTERED * before.error, _LITTLE) else None
