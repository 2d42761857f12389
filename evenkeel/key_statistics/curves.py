"""Miss-ratio curves of caches of every size in the steps to come, and how far off they would have been so far."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evenkeel.key_statistics.prediction import predicted
from evenkeel.key_statistics.ranks import MissRates, observed
from evenkeel.key_statistics.sets import in_sets
from evenkeel.key_statistics.trace import KeyTrace
from evenkeel.placement.access import MissCurve
from evenkeel.placement.hit_rates import Eviction
from evenkeel.placement.invalid_input import require

FloatArray = npt.NDArray[np.float64]

LEAST_STEPS = 8
"""Fewer steps tell nothing about reuse."""
_POINTS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCurve:
    """A predicted miss-ratio curve.

    Attributes:
        access: The curve, for `Table.access`.
        error: What the prediction is off by at its worst cache size, or less, in nine tables of ten: from what was off
            where earlier steps predict later ones that were observed.
        lookups_per_step: Lookups of a step, of all ranks, that it is for.
        sampled_keys: Keys that it was computed from.
    """

    access: MissCurve
    error: float
    lookups_per_step: float
    sampled_keys: int


def miss_curve(
    trace: KeyTrace, rows: int, *, eviction: Eviction = Eviction.LRU, ahead: float = 1.0, slots: int = 0
) -> MeasuredCurve:
    """What caches of a table of `rows` rows will miss, of the steps as they were observed or joined.

    Args:
        trace: What was observed.
        rows: Rows of the table.
        eviction: What a full cache gives up.
        ahead: How long the job goes on, over the steps observed. New keys come ever more rarely, so caches that hold
            nearly all keys miss the less the longer.
        slots: Rows of a set, where a key has its place in one set of the cache alone (`SLOTS`); 0 where it has any.

    Raises:
        InvalidInputError: If there are fewer than `LEAST_STEPS` steps or no lookups.
    """
    enough = trace.steps >= LEAST_STEPS
    require(enough, "steps", trace.steps, "are too few", f"observe at least {LEAST_STEPS}, better some hundreds")
    require(len(trace.step) > 0, "lookups", trace.lookups, "are none", "observe batches that use this table")
    known = len(np.unique(trace.key)) / trace.share
    largest = min(float(rows), 4 * known)
    sizes = np.unique(np.round(np.append(np.geomspace(min(8.0, largest), largest, _POINTS), float(rows))))
    found, error = checked(trace, eviction, sizes, ahead=ahead, rows=rows)
    rates = in_sets(sizes, found.rates, slots) if slots else found.rates
    per_step = trace.lookups / trace.steps
    return MeasuredCurve(
        access=MissCurve(
            cache_fractions=tuple((sizes / rows).tolist()),
            miss_rates=tuple(rates.tolist()),
            unique_fraction=min(1.0, max(found.unique / per_step, 1e-9)),
        ),
        error=error,
        lookups_per_step=per_step,
        sampled_keys=len(np.unique(trace.key)),
    )


def checked(
    trace: KeyTrace, eviction: Eviction, sizes: FloatArray, *, ahead: float, rows: float
) -> tuple[MissRates, float]:
    """What caches of `sizes` rows, ascending, of all ranks, will miss in the `ahead * steps` steps to come; the error.

    The error comes from what earlier steps, asked for later ones that were observed, are off by at their worst sizes:
    the root of the mean square of that, times a constant.
    """
    found = predicted(trace, eviction, sizes, ahead=ahead, rows=rows)
    part = min(1.0, _TESTED / max(1, len(trace.step)))
    sample = trace.thinned(int(trace.limit * part))
    worst = [_off(sample, eviction, begin, end, rows) for begin, end in _TESTS]
    by_sampling = (1 - trace.share) / np.sqrt(max(1, len(np.unique(trace.key))))
    return found, float(_LEAST_ERROR + _TIMES * np.sqrt(np.mean(np.square(worst))) + by_sampling)


_TESTS = ((0.25, 0.5), (0.5, 1.0), (0.75, 1.0))
"""Shares of the steps: those up to the first predict what comes up to the second."""

_TESTED = 250_000
"""References at most that predictions are tested with; more take longer and tell little more."""

_LEAST_ERROR, _TIMES = 0.01, 2.5
"""With three tests, 19 of 20 values of a normal law are within 3.2 times that root, and nine of ten within 2.4."""

_PLACES = np.geomspace(0.005, 1.0, 20)
"""Sizes of caches over all keys seen, at which predictions are held against what came."""


def _off(trace: KeyTrace, eviction: Eviction, begin: float, end: float, rows: float) -> float:
    """What the steps up to one share of all are off by at the worst size, asked for those up to another share."""
    seen = trace.before(round(trace.steps * end))
    past = seen.before(max(2, round(trace.steps * begin)))
    sizes = _PLACES * len(np.unique(seen.key)) / trace.share
    found = predicted(past, eviction, sizes, ahead=seen.steps / past.steps - 1, rows=rows)
    return float(np.abs(found.rates - observed(seen, eviction, sizes, past.steps, seen.steps).rates).max())
