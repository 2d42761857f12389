"""Miss-ratio curves of caches of every size in the steps to come, and how far off they would have been so far."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evenkeel.key_statistics.forecast import continued
from evenkeel.key_statistics.ranks import MissRates, observed
from evenkeel.key_statistics.trace import KeyTrace
from evenkeel.placement.access import MissCurve
from evenkeel.placement.hit_rates import Eviction
from evenkeel.placement.invalid_input import require

FloatArray = npt.NDArray[np.float64]

LEAST_STEPS = 8
"""Fewer steps tell nothing about reuse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCurve:
    """A predicted miss-ratio curve.

    Attributes:
        access: The curve, for `Table.access`.
        error: How far the prediction from the first half of the steps was off in the second half, at the worst cache
            size: what to expect of this prediction.
        lookups_per_step: Lookups of a step, of all ranks, that it is for.
        sampled_keys: Keys that it was computed from.
    """

    access: MissCurve
    error: float
    lookups_per_step: float
    sampled_keys: int


def miss_curve(
    trace: KeyTrace, rows: int, *, eviction: Eviction = Eviction.LRU, ahead: float = 1.0, points: int = 160
) -> MeasuredCurve:
    """What caches of a table of `rows` rows will miss, of the steps as they were observed or joined.

    Args:
        trace: What was observed.
        rows: Rows of the table.
        eviction: What a full cache gives up.
        ahead: How long the job goes on, over the steps observed. New keys come ever more rarely, so caches that hold
            nearly all keys miss the less the longer.
        points: Sizes that the curve tells.

    Raises:
        InvalidInputError: If there are fewer than `LEAST_STEPS` steps or no lookups.
    """
    enough = trace.steps >= LEAST_STEPS
    require(enough, "steps", trace.steps, "are too few", f"observe at least {LEAST_STEPS}, better some hundreds")
    require(len(trace.step) > 0, "lookups", trace.lookups, "are none", "observe batches that use this table")
    known = len(np.unique(trace.key)) / trace.share
    largest = min(float(rows), 4 * known)
    sizes = np.unique(np.concatenate([np.geomspace(min(8.0, largest), largest, points), [float(rows)]]))
    found, error = checked(trace, eviction, sizes, ahead=ahead, rows=rows)
    per_step = trace.lookups / trace.steps
    return MeasuredCurve(
        access=MissCurve(
            cache_fractions=tuple((sizes / rows).tolist()),
            miss_rates=tuple(found.rates.tolist()),
            unique_fraction=min(1.0, max(found.unique / per_step, 1e-9)),
        ),
        error=error,
        lookups_per_step=per_step,
        sampled_keys=len(np.unique(trace.key)),
    )


def predicted(trace: KeyTrace, eviction: Eviction, sizes: FloatArray, *, ahead: float, rows: float) -> MissRates:
    """What caches of `sizes` rows, all ranks together, will miss in the `ahead * steps` steps to come."""
    future = continued(trace, ahead, rows)
    found = observed(future, eviction, sizes, trace.steps, max(trace.steps + 1, round(trace.steps * (1 + ahead))))
    return MissRates(rates=np.minimum.accumulate(found.rates), unique=found.unique)


_TAKEN_OFF = 0.3


def checked(
    trace: KeyTrace, eviction: Eviction, sizes: FloatArray, *, ahead: float, rows: float
) -> tuple[MissRates, float]:
    """As `predicted`, with how far the prediction from the first half of the steps was off in the second half.

    Counts of few steps order keys worse than those of many, so LFU is predicted too badly for caches of middle size,
    from a part as from the whole: some of what the first half was off is taken off.
    """
    half = trace.steps // 2
    found = predicted(trace, eviction, sizes, ahead=ahead, rows=rows)
    early = predicted(trace.before(half), eviction, sizes, ahead=1.0, rows=rows)
    off = observed(trace, eviction, sizes, half, trace.steps).rates - early.rates
    if eviction is Eviction.LFU:
        rates = np.minimum.accumulate(np.clip(found.rates + _TAKEN_OFF * off, 0.0, 1.0))
        found = MissRates(rates=rates, unique=found.unique)
    return found, float(np.abs(off).max())
