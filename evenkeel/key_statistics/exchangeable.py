"""What LFU caches miss if only chance orders the lookups: each key has a rate of its own that does not change.

Roles that are handed on (`forecast`) say too little here: a key that was seen twice in all steps plays the part of one
that was among the often seen of half of them. For such keys there is an exact answer once one knows how many keys have
which rate, and counts tell that: they are a mixture of Poisson laws, whose weights expectation-maximisation finds.
Lookups of a key fall anywhere with equal chance, so among keys of one count the last use tells nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import gammainc, gammaln

from evenkeel.key_statistics.trace import KeyTrace

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]

_COUNTED = 64
"""Keys that were looked up more often have the rate that they showed."""
_LEAST_RATE = 0.05
"""Expected lookups in all steps observed; rarer keys are told from these by nothing."""
_ROUNDS = 200
_MOMENTS = 4


class Exchangeable:
    """Keys of constant rates, as many of each rate as make the counts of a trace most likely."""

    def __init__(self, trace: KeyTrace) -> None:
        """Fit the rates.

        Args:
            trace: What was observed.
        """
        _, key = np.unique(trace.key, return_inverse=True)
        rates, keys = _rates(np.bincount(key, weights=trace.times))
        self._rates, self._keys = rates, keys / trace.share
        self._used = self._keys * -np.expm1(-rates / trace.steps)
        self._unique = float(self._used.sum()) - trace.excess

    def keys(self, ahead: float) -> float:
        """Different keys that will have been seen `ahead` times the observed steps from now."""
        return float(self._keys @ -np.expm1(-self._rates * (1 + ahead)))

    def lfu(self, sizes: FloatArray, ahead: float) -> FloatArray:
        """Misses over the unique keys of a step of LFU caches of `sizes` rows, in `ahead` times the steps observed."""
        if len(self._rates) == 0:
            return np.ones(len(sizes))
        missed = np.zeros(len(sizes))
        for moment in range(_MOMENTS):
            expected = self._rates * (1 + ahead * (moment + 0.5) / _MOMENTS)
            most = float(expected.max() + 6 * np.sqrt(expected.max()) + 10)
            counts = np.unique(np.round(np.append(np.arange(1, _COUNTED), np.geomspace(_COUNTED, most + 64, 150))))
            reached = gammainc(counts[:, None], expected[None, :])  # chance of at least so many lookups
            held = np.append(0.0, (reached @ self._keys)[::-1])
            hits = np.append(0.0, (reached @ self._used)[::-1])
            missed += float(self._used.sum()) - np.interp(sizes, held, hits)
        return np.clip(missed / _MOMENTS / max(self._unique, 1e-12), 0.0, 1.0)


def _rates(counts: Array) -> tuple[FloatArray, FloatArray]:
    """Expected lookups in all steps observed, and how many keys have each, those never seen included."""
    often = counts[counts > _COUNTED]
    edges = np.geomspace(_COUNTED, max(float(often.max(initial=0)), 2 * _COUNTED) + 1, 120)
    place = np.searchsorted(edges, often)
    of_place = np.bincount(place, minlength=len(edges) + 1)
    high = np.bincount(place, weights=often, minlength=len(edges) + 1)[of_place > 0] / of_place[of_place > 0]
    seen, times = np.unique(counts[counts <= _COUNTED], return_counts=True)
    low = np.geomspace(_LEAST_RATE, 1.5 * _COUNTED, 32)
    if len(seen) == 0:
        return high, of_place[of_place > 0].astype(np.float64)
    # Only keys that were looked up are counted, so the laws are those of at least one lookup.
    shown = -np.expm1(-low)
    likely = np.exp(seen[:, None] * np.log(low) - low - gammaln(seen + 1)[:, None]) / shown
    share = np.full(len(low), 1 / len(low))
    for _ in range(_ROUNDS):
        belongs = np.maximum(likely * share, 1e-300)
        share = times @ (belongs / belongs.sum(axis=1, keepdims=True)) / times.sum()
    keys = share * times.sum() / shown
    return np.append(low, high), np.append(keys, of_place[of_place > 0])
