"""The keys of a table that most batches look up, by what was seen of live batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from evenkeel.key_statistics.sampler import unhashed
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
    return unhashed(hashes[order]), steps[order] / max(trace.steps, 1)
