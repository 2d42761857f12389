"""The smallest cache that would have had a key, for each reference of a trace.

With the keys of a table in the order in which a cache keeps them, a key is found by all caches that are larger than its
rank. LRU orders keys by the last step that used them, LFU by how often they were looked up and then by the last step,
evicted keys included, as the caches of TorchRec and of DynamicEmb count. All keys of a step are looked up at once,
before any of them moves in that order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from evenkeel.key_statistics.kernels import cache_ranks
from evenkeel.key_statistics.trace import KeyTrace
from evenkeel.placement.hit_rates import Eviction

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]

_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MissRates:
    """What caches of some sizes missed.

    Attributes:
        rates: (sizes,) misses over the unique keys of a step.
        unique: Unique keys of a step.
    """

    rates: FloatArray
    unique: float


def cache_order_ranks(trace: KeyTrace, eviction: Eviction) -> FloatArray:
    """(references,) the smallest cache that holds the key before the step; infinite for a key that was never there."""
    count = len(trace.step)
    if count == 0:
        return np.zeros(0)
    order = np.lexsort((trace.step, trace.key))
    same = np.zeros(count, dtype=bool)
    same[1:] = trace.key[order[1:]] == trace.key[order[:-1]]
    previous = np.full(count, -1, dtype=np.int64)
    previous[order[1:][same[1:]]] = order[:-1][same[1:]]
    position = trace.step
    if eviction is Eviction.LFU:
        times = trace.times[order].astype(np.int64)
        total, first = np.cumsum(times), np.flatnonzero(~same)
        often = np.empty(count, dtype=np.int64)
        often[order] = total - np.repeat((total - times)[first], np.diff(np.append(first, count)))
        ordered = np.lexsort((trace.step, often))
        moves = (np.diff(often[ordered]) != 0) | (np.diff(trace.step[ordered]) != 0)
        position = np.empty(count, dtype=np.int64)
        position[ordered] = np.concatenate([[0], np.cumsum(moves)])
    starts = np.searchsorted(trace.step, np.arange(trace.steps + 1)).astype(np.int64)
    places = int(position.max()) + 1
    above, tied = np.zeros(count, dtype=np.int64), np.ones(count, dtype=np.int64)
    tree, held = np.zeros(places + 1, dtype=np.int64), np.zeros(places, dtype=np.int64)
    cache_ranks(starts, previous, position.astype(np.int64), tree, held, above, tied)
    # Keys of one place in the order are kept in no order: their ranks are spread evenly.
    spread = np.modf(np.arange(count) * _GOLDEN)[0]
    return np.where(previous < 0, np.inf, (above + spread * tied) / trace.share)


def observed(trace: KeyTrace, eviction: Eviction, sizes: FloatArray, begin: int, end: int) -> MissRates:
    """What caches of `sizes` rows, all ranks together, missed from step `begin` to step `end`."""
    rank = cache_order_ranks(trace, eviction)
    late = (trace.step >= begin) & (trace.step < end)
    rank, steps = rank[late], max(1, end - begin)
    weight = _weights(trace, trace.key[late], steps)
    order = np.argsort(rank)
    below = np.concatenate([[0.0], np.cumsum(weight[order])])
    total = max(float(below[-1]), 1e-12)
    missed = total - below[np.searchsorted(rank[order], sizes, side="right")]
    return MissRates(rates=np.clip(missed / total, 0.0, 1.0), unique=total / trace.share / steps)


def _weights(trace: KeyTrace, key: Array, steps: int) -> FloatArray:
    """What references count for, so that a step has as many unique keys as were sketched.

    A sample has more or fewer of the popular keys than its share, which are in every step, and one key more or less
    shows the more, the more steps it is in. So what is too much is taken off in proportion to that.
    """
    if not trace.excess or not len(key):
        return np.ones(len(key))
    _, where, counts = np.unique(key, return_inverse=True, return_counts=True)
    often = (counts / steps)[where]
    off = trace.excess * trace.share * steps / float(often.sum())
    weight: FloatArray = np.maximum(1 - off * often, 0.1)
    return weight
