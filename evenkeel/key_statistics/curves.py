"""Miss-ratio curves of what was seen, how far the second half was from the first, and which keys are popular.

With the keys of a table in the order in which a cache keeps them, a key is found by all caches that are larger than its
rank. LRU orders keys by the last step that used them, LFU by how often they were looked up and then by the last step,
evicted keys included, as the caches of TorchRec and of DynamicEmb count. All keys of a step are looked up at once,
before any of them moves in that order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from scipy.special import gammainc

from evenkeel.key_statistics.trace import ALL, Array, HeavyKeys, KeyTrace, hashed, unhashed
from evenkeel.placement.access import Eviction, FloatArray, MissCurve
from evenkeel.placement.fields import require
from evenkeel.placement.hardware import Runtime

LEAST_STEPS = 8
"""Fewer steps say nothing about reuse."""
SLOTS = {Runtime.TORCHREC: 32, Runtime.DYNAMICEMB: 1024}
"""Slots of a set of a cache: ways of FBGEMM's; a bucket of DynamicEmb's, which are larger where a table is a cache."""
_POINTS = 160
_DRIFT = 0.1
_GOLDEN = 0.6180339887498949
_SURELY = 16
"""Lookups of a key that is popular not by chance."""
_MOST_HOT, _PER_PART = 256, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCurve:
    """A measured miss-ratio curve.

    Attributes:
        access: The curve of the second half of the steps, in caches that the first half has filled; for `Table.access`.
        error: What the curve of the first half, taken likewise, would have been off by in the second, at its worst
            cache size.
        drift: Share of the lookups that went from keys that were popular in the first half to others in the second.
        lookups_per_step: Lookups of a step, of all ranks, that it is for.
        sampled_keys: Keys that it was computed from.
    """

    access: MissCurve
    error: float
    drift: float
    lookups_per_step: float
    sampled_keys: int

    @property
    def is_drifting(self) -> bool:
        """Whether popular keys changed so much that a plan may age."""
        return self.drift > _DRIFT


def miss_curve(trace: KeyTrace, rows: int, *, eviction: Eviction = Eviction.LRU, slots: int = 0) -> MeasuredCurve:
    """What caches of a table of `rows` rows missed, of the steps as they were observed or joined.

    Args:
        trace: What was observed.
        rows: Rows of the table.
        eviction: What a full cache gives up.
        slots: Rows of a set, where a key has its place in one set of the cache alone (`SLOTS`); 0 where it has any.

    Raises:
        InvalidInputError: If there are fewer than `LEAST_STEPS` steps or no lookups.
    """
    enough = trace.steps >= LEAST_STEPS
    require(enough, "steps", trace.steps, "are too few", f"observe at least {LEAST_STEPS}, better some hundreds")
    require(len(trace.step) > 0, "lookups", trace.lookups, "are none", "observe batches that use this table")
    keys = len(np.unique(trace.key))
    largest = min(float(rows), 2 * keys / trace.share)
    sizes = np.unique(np.round(np.append(np.geomspace(min(8.0, largest), largest, _POINTS), float(rows))))
    half, quarter = trace.steps // 2, trace.steps // 4
    latest = miss_rates(trace, eviction, sizes, half, trace.steps)
    before = miss_rates(trace, eviction, sizes, quarter, half)
    sampling = np.sqrt((1 - trace.share) / keys)
    rates = in_sets(sizes, latest, slots) if slots else latest
    per_step = trace.lookups / trace.steps
    return MeasuredCurve(
        access=MissCurve(
            cache_fractions=tuple((sizes / rows).tolist()),
            miss_rates=tuple(rates.tolist()),
            unique_fraction=min(1.0, max(trace.unique / per_step, 1e-9)),
            **lookup_shares(trace, rows),
        ),
        error=float(np.abs(latest - before).max() + sampling),
        drift=popularity_drift(trace),
        lookups_per_step=per_step,
        sampled_keys=keys,
    )


def miss_rates(trace: KeyTrace, eviction: Eviction, sizes: FloatArray, begin: int, end: int) -> FloatArray:
    """(sizes,) misses over unique keys of caches of `sizes` rows, of all ranks, from step `begin` to step `end`."""
    rank = _cache_ranks(trace, eviction)
    late = (trace.step >= begin) & (trace.step < end)
    if not late.any():
        return np.ones(len(sizes))
    rank, weight = rank[late], _weights(trace, trace.key[late], max(1, end - begin))
    order = np.argsort(rank)
    below = np.concatenate([[0.0], np.cumsum(weight[order])])
    missed = 1 - below[np.searchsorted(rank[order], sizes, side="right")] / below[-1]
    return np.minimum.accumulate(np.clip(missed, 0.0, 1.0))


def _weights(trace: KeyTrace, key: Array, steps: int) -> FloatArray:
    """What references count for, so that a step has as many unique keys as were counted.

    One popular key too many in the sample shows the more, the more steps it is in. So what is too much is taken off in
    proportion to that.
    """
    if not trace.excess:
        return np.ones(len(key))
    _, where, counts = np.unique(key, return_inverse=True, return_counts=True)
    often = (counts / steps)[where]
    weight: FloatArray = np.maximum(1 - trace.excess * trace.share * steps / float(often.sum()) * often, 0.1)
    return weight


def _cache_ranks(trace: KeyTrace, eviction: Eviction) -> FloatArray:
    """(references,) the smallest cache that holds the key before the step; infinite for a key that was never there."""
    count = len(trace.step)
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
    above, tied = _ranks_in_order(starts, previous, position.astype(np.int64))
    # Keys of one position are kept in no order: their ranks are spread evenly.
    spread = np.modf(np.arange(count) * _GOLDEN)[0]
    return np.where(previous < 0, np.inf, (above + spread * tied) / trace.share)


@numba.njit(cache=True, nogil=True)
def _ranks_in_order(starts: Array, previous: Array, position: Array) -> tuple[Array, Array]:
    """How many keys are at larger positions of the order, and at the same, at the beginning of each reference's step.

    Each reference puts its key on a position of the order, where it stays until its next one; the larger, the longer a
    key is kept. References of a step (`starts` delimits steps) all see the order before the step, counted by a Fenwick
    tree over the positions. `previous` is the same key's previous reference, or -1.
    """
    above, tied = np.zeros(position.size, dtype=np.int64), np.ones(position.size, dtype=np.int64)
    places = position.max() + 1
    tree, here = np.zeros(places + 1, dtype=np.int64), np.zeros(places, dtype=np.int64)
    keys = 0
    for step in range(starts.size - 1):
        for i in range(starts[step], starts[step + 1]):
            if previous[i] >= 0:
                at = position[previous[i]]
                tied[i] = here[at]
                node, up_to = at + 1, 0
                while node > 0:
                    up_to += tree[node]
                    node -= node & -node
                above[i] = keys - up_to
        for i in range(starts[step], starts[step + 1]):
            for at, change in ((position[max(previous[i], 0)], -1), (position[i], 1)):
                if change < 0 and previous[i] < 0:
                    keys += 1
                    continue
                here[at] += change
                node = at + 1
                while node < tree.size:
                    tree[node] += change
                    node += node & -node
    return above, tied


def in_sets(sizes: FloatArray, rates: FloatArray, slots: int) -> FloatArray:
    """Miss rates of caches of `sizes` rows, ascending, in sets, from those of caches that keep any key anywhere.

    A key that stands at place `r` of all keys in the order that the cache keeps has, of the keys before it, about
    `r * slots / size` in its set, by a Poisson law. It is there unless these fill the set.

    Source: Smith, "A comparative study of set associative memory mapping algorithms", IEEE TSE 1978.
    """
    edges = np.geomspace(sizes[0] / 4, sizes[-1], 4 * len(sizes))
    falls = -np.diff(np.interp(edges, sizes, rates, left=1.0), prepend=1.0)
    places = np.append(edges[0], np.sqrt(edges[1:] * edges[:-1]))
    caches = sizes[:, None]
    full = np.where(caches <= slots, places > caches, gammainc(slots, places * slots / caches))
    spread: FloatArray = np.clip(rates[-1] + full @ falls, 0.0, 1.0)
    return np.minimum.accumulate(spread)


def popularity_drift(trace: KeyTrace) -> float:
    """Share of the lookups that the first half's popular keys had there and have lost in the second half.

    The largest over all numbers of keys, less what chance does: the same between even and odd steps.
    """
    names, key = np.unique(trace.key, return_inverse=True)
    late, odd = trace.step >= trace.steps // 2, trace.step % 2 == 1

    def lost(apart: Array) -> float:
        first, second = (np.bincount(key[part], trace.times[part], len(names)) for part in (~apart, apart))
        if not first.sum() or not second.sum():
            return 0.0
        order = np.argsort(-first, kind="stable")
        shares = np.cumsum(first[order]) / first.sum() - np.cumsum(second[order]) / second.sum()
        return float(shares.max())

    return max(0.0, lost(late) - lost(odd))


def lookup_shares(trace: KeyTrace, rows: int) -> dict[str, Any]:
    """Fields of `MissCurve` that say which keys are the most popular, and how others are spread over the rows.

    A thousand lookups or more are between two quantiles, so that chance brings none much closer together than others.
    Of statistics that name no popular keys nothing is said.
    """
    if not trace.heavy.lookups:
        return {}
    heavy = trace.heavy
    if trace.limit == ALL:  # all keys are known, also those that come in every step and lead in none
        key, where = np.unique(trace.key, return_inverse=True)
        times = np.bincount(where, trace.times, len(key))
        heavy = HeavyKeys(keys=unhashed(key), times=times, lookups=int(times.sum()))
    order = np.argsort(-heavy.times, kind="stable")[:_MOST_HOT]
    hot = order[heavy.times[order] >= _SURELY]
    rest = ~np.isin(trace.key, hashed(heavy.keys[hot]))
    row = unhashed(trace.key[rest]).view(np.uint64) % np.uint64(rows)
    by_row = np.argsort(row)
    below = np.cumsum(trace.times[rest][by_row], dtype=np.float64)
    quantiles = np.array([0.0, 1.0])
    if len(below):
        parts = np.arange(1, max(2, min(_MOST_HOT, below[-1] // _PER_PART) + 1))
        place = row[by_row] / rows
        quantiles = np.append(place[0], place[np.searchsorted(below, parts / parts[-1] * below[-1] - 0.5)] + 1 / rows)
    return {
        "hot_keys": tuple(heavy.keys[hot].tolist()),
        "hot_shares": tuple((heavy.times[hot] / heavy.lookups).tolist()),
        "row_quantiles": tuple(np.minimum(quantiles, 1.0).tolist()),
    }
