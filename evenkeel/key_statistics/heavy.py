"""The keys of a table that most batches look up, by what was seen of live batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from evenkeel.key_statistics.sampler import FIRST, GOLDEN, SECOND
from evenkeel.key_statistics.trace import ALL, KeyTrace
from evenkeel.placement.invalid_input import require

Array = npt.NDArray[Any]


def heavy_hitters(trace: KeyTrace) -> tuple[Array, Array]:
    """(keys,) int64 keys that were seen, and (keys,) share of the steps that looked each up, the largest first.

    Args:
        trace: Of one rank, and of all keys: there was room for them.

    Raises:
        InvalidInputError: If only a sample of the keys was followed, most of which are unknown then.
    """
    remedy = "observe fewer steps, or give KeyStatistics a larger max_references"
    require(trace.limit == ALL, "share", trace.share, "of the keys alone was followed", remedy)
    hashes, steps = np.unique(trace.key, return_counts=True)
    order = np.argsort(-steps, kind="stable")
    return _keys_of(hashes[order]), steps[order] / max(trace.steps, 1)


def _keys_of(hashes: Array) -> Array:
    """The keys that `sampler.hashed` gave these hashes."""
    mixed = _unshifted(hashes, 31) * np.uint64(pow(int(SECOND), -1, 1 << 64))
    mixed = _unshifted(mixed, 27) * np.uint64(pow(int(FIRST), -1, 1 << 64))
    found: Array = (_unshifted(mixed, 30) - GOLDEN).view(np.int64)
    return found


def _unshifted(mixed: Array, by: int) -> Array:
    """What gave `mixed` when it was combined with itself, shifted right by more than a third of its bits."""
    twice: Array = mixed ^ (mixed >> np.uint64(by))
    return twice ^ (mixed >> np.uint64(2 * by)) if 2 * by < 64 else twice
