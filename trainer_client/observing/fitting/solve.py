"""The fit as a pure function: measured times in, coefficients and how good they are out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear

_VARIES = 1e-3  # a term whose deviation is a smaller share of its mean tells nothing apart from the fixed time
_OUTLIER = 4.0  # deviations of the error
_PASSES = 10  # of reweighting
_EXACT = 1e-3  # errors of a smaller share of the median time weigh alike


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


def fit_times(
    terms: NDArray[np.float64], milliseconds: NDArray[np.float64], upper: NDArray[np.float64] | None = None
) -> Fit | None:
    """Least squares with bounds, without outliers: what is far from the fit of least absolute deviations.

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
    bounds = (np.zeros(len(scale)), np.append(highest[varying], np.inf) * scale)
    weights = np.ones(len(table))
    for _ in range(_PASSES):
        solution = _solve(table * weights[:, None], milliseconds * weights, bounds)
        errors = np.abs(milliseconds - table @ solution)
        weights = 1 / np.sqrt(np.maximum(errors, _EXACT * np.median(milliseconds)))
    spread = 1.4826 * float(np.median(errors))
    used = errors <= max(_OUTLIER * spread, 1e-9 * float(milliseconds.mean()))
    solution = _solve(table[used], milliseconds[used], bounds)
    coefficients = np.zeros(terms.shape[1])
    coefficients[varying] = solution[:-1] / scale[:-1]
    chosen = milliseconds[used]
    wrong = chosen - table[used] @ solution
    variance = float(chosen.var())
    return Fit(
        coefficients=coefficients,
        fixed=float(solution[-1]),
        error=float(np.abs(wrong).mean() / chosen.mean()),
        explained=float(1 - wrong.var() / variance) if variance else 0.0,
        observations=int(used.sum()),
    )


def _solve(
    table: NDArray[np.float64], milliseconds: NDArray[np.float64], bounds: tuple[NDArray[np.float64], ...]
) -> NDArray[np.float64]:
    solution: NDArray[np.float64] = lsq_linear(table, milliseconds, bounds=bounds, method="bvls").x
    return solution
