"""How uneven the rows of a table are asked for, by what was seen of live batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from evenkeel.key_statistics.sampler import hashed, unhashed
from evenkeel.key_statistics.trace import ALL, HeavyKeys, KeyTrace

Array = npt.NDArray[Any]


_SURELY = 16
"""Lookups of a key that is popular not by chance."""
_MOST = 256
_PER_PART = 1024


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
    order = np.argsort(-heavy.times, kind="stable")[:_MOST]
    hot = order[heavy.times[order] >= _SURELY]
    rest = ~np.isin(trace.key, hashed(heavy.keys[hot]))
    row = unhashed(trace.key[rest]).view(np.uint64) % np.uint64(rows)
    by_row = np.argsort(row)
    below = np.cumsum(trace.times[rest][by_row], dtype=np.float64)
    quantiles = np.array([0.0, 1.0])
    if len(below):
        parts = np.arange(1, max(2, min(_MOST, below[-1] // _PER_PART) + 1))
        place = row[by_row] / rows
        quantiles = np.append(place[0], place[np.searchsorted(below, parts / parts[-1] * below[-1] - 0.5)] + 1 / rows)
    return {
        "hot_keys": tuple(heavy.keys[hot].tolist()),
        "hot_shares": tuple((heavy.times[hot] / heavy.lookups).tolist()),
        "row_quantiles": tuple(np.minimum(quantiles, 1.0).tolist()),
    }
