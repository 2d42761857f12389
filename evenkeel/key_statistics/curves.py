"""Miss-ratio curves of caches of every size in the steps to come, and how far off they would have been so far."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evenkeel.key_statistics.exchangeable import Exchangeable
from evenkeel.key_statistics.forecast import continued
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
        error: What the prediction is off by at its worst cache size, or less, in nine tables of ten: from what the
            first half of the steps would have told of the second.
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

    LRU is read off the continued trace. For LFU there are three ways to go on: roles handed on, the same with keys told
    apart, and constant rates. The first half of the steps shows from which mixture of them the second half would have
    come out best. What that was off by, some is taken off at the same share of all keys, since counts of few steps
    order keys worse than those of many. What LRU was off by, which knows no counts, is change that need not come again.
    """
    half = trace.steps // 2
    before = trace.before(half)
    places = _PLACES * len(np.unique(trace.key)) / trace.share
    early, later = continued(before, 1.0, rows), continued(trace, ahead, rows)
    change = observed(trace, Eviction.LRU, places, half, trace.steps).rates
    change -= _to_come(early, half, Eviction.LRU, places, 1.0).rates
    found = _to_come(later, trace.steps, eviction, sizes, ahead)
    rates, off = found.rates, change
    if eviction is Eviction.LFU:
        roles = _to_come(early, half, eviction, places, 1.0).rates
        offs = observed(trace, eviction, places, half, trace.steps).rates - _ways(before, roles, places, 1.0, rows)
        weights = _mixture(offs - _CHANGE * change)
        off = weights @ offs
        known = len(np.unique(later.key)) / trace.share
        rates = weights @ _ways(trace, found.rates, sizes, ahead, rows)
        rates += _TAKEN_OFF * np.interp(sizes / known, _PLACES, off - _CHANGE * change)
    rates = np.minimum.accumulate(np.clip(rates, 0.0, 1.0))
    by_sampling = (1 - trace.share) / np.sqrt(max(1, len(np.unique(trace.key))))
    error = _LEAST_ERROR + float(np.abs(off).max()) + float(by_sampling)
    return MissRates(rates=rates, unique=found.unique), error


_PLACES = np.geomspace(0.001, 1.0, 160)
"""Sizes of caches over all keys seen so far, at which predictions are held against what came."""

_TAKEN_OFF, _CHANGE = 0.5, 0.7
"""Of what LFU was off by, what is taken off; of what LRU was off by, what LFU was off by for the same reason."""

_LEAST_ERROR = 0.025
"""With what the first half was off by at its worst size, and what a sample may be, nine tables of ten are below it."""

_TENTHS = np.array([(a, b, 10 - a - b) for a in range(11) for b in range(11 - a)]) / 10

_EVEN = 0.3
"""What a mixture of one way costs over one of many, in squared errors of the ways."""


def _ways(trace: KeyTrace, roles: FloatArray, sizes: FloatArray, ahead: float, rows: float) -> FloatArray:
    """(3, sizes) LFU miss rates: by `roles`, by roles with keys told apart, at constant rates."""
    apart = continued(trace, ahead, rows, told_apart=True)
    return np.stack(
        [
            roles,
            _to_come(apart, trace.steps, Eviction.LFU, sizes, ahead).rates,
            Exchangeable(trace).lfu(sizes, ahead),
        ]
    )


def _mixture(offs: FloatArray) -> FloatArray:
    """(ways,) weights of a mixture that is off by the least, from (ways, sizes) what each way is off by."""
    squares = np.square(_TENTHS @ offs).mean(axis=1) + _EVEN * (_TENTHS**2 @ np.square(offs).mean(axis=1))
    best: FloatArray = _TENTHS[np.argmin(squares)]
    return best


def _to_come(future: KeyTrace, steps: int, eviction: Eviction, sizes: FloatArray, ahead: float) -> MissRates:
    return observed(future, eviction, sizes, steps, max(steps + 1, round(steps * (1 + ahead))))
