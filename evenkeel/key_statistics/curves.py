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


def predicted(
    trace: KeyTrace, eviction: Eviction, sizes: FloatArray, *, ahead: float, rows: float, told_apart: bool = False
) -> MissRates:
    """What caches of `sizes` rows, all ranks together, will miss in the `ahead * steps` steps to come."""
    return _missed(continued(trace, ahead, rows, told_apart=told_apart), trace.steps, eviction, sizes, ahead)


def _missed(future: KeyTrace, steps: int, eviction: Eviction, sizes: FloatArray, ahead: float) -> MissRates:
    found = observed(future, eviction, sizes, steps, max(steps + 1, round(steps * (1 + ahead))))
    return MissRates(rates=np.minimum.accumulate(found.rates), unique=found.unique)


_TAKEN_OFF = 0.5
"""Of a count's noise, what is left in counts of twice as many steps lies between a half and its root."""

_CLEARLY = 0.5
"""Squared error, over that of the other way."""


def checked(
    trace: KeyTrace, eviction: Eviction, sizes: FloatArray, *, ahead: float, rows: float
) -> tuple[MissRates, float]:
    """As `predicted`, with how far the prediction from the first half of the steps was off in the second half.

    LFU is predicted with roles of keys told apart where that would have told the second half clearly better. And
    counts of few steps order keys worse than those of many, so LFU misses are predicted too high from a part as from
    the whole: by how much, the first half tells, where it was off by more for LFU than for LRU, which knows no counts.
    """
    half = trace.steps // 2
    before = trace.before(half)
    if eviction is Eviction.LRU:
        found = predicted(trace, eviction, sizes, ahead=ahead, rows=rows)
        early = predicted(before, eviction, sizes, ahead=1.0, rows=rows)
        return found, float(np.abs(observed(trace, eviction, sizes, half, trace.steps).rates - early.rates).max())
    futures = [continued(before, 1.0, rows, told_apart=way) for way in (False, True)]
    actual = observed(trace, eviction, sizes, half, trace.steps).rates
    offs = [actual - _missed(future, half, eviction, sizes, 1.0).rates for future in futures]
    way = float(np.square(offs[1]).mean()) < _CLEARLY * float(np.square(offs[0]).mean())
    recency = observed(trace, Eviction.LRU, sizes, half, trace.steps).rates
    common = recency - _missed(futures[0], half, Eviction.LRU, sizes, 1.0).rates
    found = predicted(trace, eviction, sizes, ahead=ahead, rows=rows, told_apart=way)
    rates = np.minimum.accumulate(np.clip(found.rates + _TAKEN_OFF * (offs[way] - common), 0.0, 1.0))
    return MissRates(rates=rates, unique=found.unique), float(np.abs(offs[way]).max())
