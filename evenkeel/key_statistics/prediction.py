"""What caches of every size will miss: caches of a continued trace, and for LFU a mixture of ways to go on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from evenkeel.key_statistics.exchangeable import Exchangeable
from evenkeel.key_statistics.forecast import continued
from evenkeel.key_statistics.ranks import MissRates, observed
from evenkeel.key_statistics.trace import KeyTrace
from evenkeel.placement.hit_rates import Eviction

FloatArray = npt.NDArray[np.float64]


def predicted(trace: KeyTrace, eviction: Eviction, sizes: FloatArray, *, ahead: float, rows: float) -> MissRates:
    """What caches of `sizes` rows, ascending, of all ranks, will miss in the `ahead * steps` steps to come.

    LRU is read off the continued trace. For LFU there are three ways to go on: roles handed on, the same with keys told
    apart, and constant rates. The first half of the steps shows from which mixture of them the second half would have
    come out best. What that was off by, some is taken off at the same share of all keys, since counts of few steps
    order keys worse than those of many. What LRU was off by, which knows no counts, is change that need not come again.
    """
    later = continued(trace, ahead, rows)
    found = _to_come(later, trace.steps, eviction, sizes, ahead)
    rates = found.rates
    if eviction is Eviction.LFU:
        half = trace.steps // 2
        before = trace.before(half)
        early = continued(before, 1.0, rows)
        places = _PLACES * len(np.unique(trace.key)) / trace.share
        change = observed(trace, Eviction.LRU, places, half, trace.steps).rates
        change -= _to_come(early, half, Eviction.LRU, places, 1.0).rates
        roles = _to_come(early, half, eviction, places, 1.0).rates
        offs = observed(trace, eviction, places, half, trace.steps).rates - _ways(before, roles, places, 1.0, rows)
        weights = _mixture(offs - _CHANGE * change)
        known = len(np.unique(later.key)) / trace.share
        rates = weights @ _ways(trace, rates, sizes, ahead, rows)
        rates += _TAKEN_OFF * np.interp(sizes / known, _PLACES, weights @ offs - _CHANGE * change)
    return MissRates(rates=np.minimum.accumulate(np.clip(rates, 0.0, 1.0)), unique=found.unique)


_PLACES = np.geomspace(0.001, 1.0, 160)
"""Sizes of caches over all keys seen so far, at which predictions are held against what came."""

_TAKEN_OFF, _CHANGE = 0.5, 0.7
"""Of what LFU was off by, what is taken off; of what LRU was off by, what LFU was off by for the same reason."""

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
