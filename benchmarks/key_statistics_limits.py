"""How much of a prediction's error no extrapolation of the first half of a trace could have avoided."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from evenkeel.key_statistics import KeyTrace
from evenkeel.key_statistics.exchangeable import Exchangeable
from evenkeel.key_statistics.forecast import continued, new_keys
from evenkeel.key_statistics.ranks import cache_order_ranks, observed
from evenkeel.placement import Eviction

FloatArray = npt.NDArray[np.float64]


def best_in_hindsight(trace: KeyTrace, eviction: Eviction, sizes: FloatArray, actual: FloatArray) -> float:
    """Largest error of the mixture of extrapolations that is nearest to what came, chosen by one who knows it.

    Extrapolated are the unsampled trace itself, continued in each way that predictions know, and the miss rates of its
    last half, as they were or going on as they had changed, of caches of as many rows and of as large a share of keys.
    """
    every = [_continued(trace, eviction, sizes), *_extrapolated(trace, eviction, sizes)]
    if eviction is Eviction.LFU:
        every += [_continued(trace, eviction, sizes, told_apart=True), Exchangeable(trace).lfu(sizes, 1.0)]
    certain = 1e3  # weights sum to one
    system = np.vstack([np.stack(every, axis=1), np.full(len(every), certain)])
    weights, _ = nnls(system, np.append(actual, certain))
    return float(np.abs(weights @ np.stack(every) - actual).max())


def _continued(trace: KeyTrace, eviction: Eviction, sizes: FloatArray, **how: bool) -> FloatArray:
    future = continued(trace, 1.0, 1e12, **how)
    return observed(future, eviction, sizes, trace.steps, 2 * trace.steps).rates


def _extrapolated(trace: KeyTrace, eviction: Eviction, sizes: FloatArray) -> list[FloatArray]:
    rank = cache_order_ranks(trace, eviction)
    first = np.unique(trace.key, return_index=True)[1]
    came = np.bincount(trace.step[first], minlength=trace.steps).astype(np.float64)
    come = new_keys(came, 1.0, 1e12)[: trace.steps]
    seen = np.cumsum(came)
    new = float(come.mean()) / (len(trace.step) / trace.steps)
    later = float(np.mean(seen[-1] + np.cumsum(come)))
    found: dict[bool, list[Any]] = {False: [], True: []}
    for end, begin in pairwise([trace.steps, trace.steps // 2, trace.steps // 4]):
        part = np.sort(rank[(trace.step >= begin) & (trace.step < end)])
        known = part[np.isfinite(part)]
        for relative in (False, True):
            own = sizes * float(seen[begin:end].mean()) / later if relative else sizes
            found[relative].append((len(known) - np.searchsorted(known, own, side="right")) / len(part))
    return [
        np.clip(last + share * (last - before) + new, 0.0, 1.0)
        for last, before in found.values()
        for share in (0.0, 0.5, 1.0)
    ]
