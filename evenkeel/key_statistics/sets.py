"""Caches in sets: a key may only be in the few slots of the set that its hash says."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.special import gammainc

from evenkeel.placement.model import Runtime

FloatArray = npt.NDArray[np.float64]

SLOTS = {Runtime.TORCHREC: 32, Runtime.DYNAMICEMB: 1024}
"""Slots of a set of a cache: ways of FBGEMM's; a bucket of DynamicEmb's, which are larger where a table is a cache."""
_FINER = 4


def in_sets(sizes: FloatArray, rates: FloatArray, slots: int) -> FloatArray:
    """Miss rates of caches of `sizes` rows, ascending, in sets, from those of caches that keep any key anywhere.

    A key that stands at place `r` of all keys in the order that the cache keeps has, of the keys before it, about
    `r * slots / size` in its own set, by a Poisson law. It is there unless these fill the set.

    Source: Smith, "A comparative study of set associative memory mapping algorithms", IEEE TSE 1978.
    """
    edges = np.geomspace(sizes[0] / 4, sizes[-1], _FINER * len(sizes))
    falls = -np.diff(np.interp(edges, sizes, rates, left=1.0), prepend=1.0)
    places = np.append(edges[0], np.sqrt(edges[1:] * edges[:-1]))
    own = sizes[:, None]
    full = np.where(own <= slots, places > own, gammainc(slots, places * slots / own))
    spread: FloatArray = np.clip(rates[-1] + full @ falls, 0.0, 1.0)
    return np.minimum.accumulate(spread)
