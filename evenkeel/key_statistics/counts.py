"""How often the keys of a table were looked up, as a histogram: exact for the popular ones, sampled for the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from evenkeel.key_statistics.sampler import hashed
from evenkeel.placement.access import Histogram
from evenkeel.placement.invalid_input import require

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]

_POPULAR = 8
"""Lookups of a key from which on chance is not what they are mostly due to."""


class KeyCounts:
    """Counts the lookups of a sample of the keys exactly, and scales up.

    Which keys are in the sample is decided by a hash of the key, so a key is counted in every batch or never. While
    more than `max_keys` keys would be counted, the sampled share is halved and the others are forgotten; the few most
    frequent keys are kept whatever the sample.

    Attributes:
        lookups: Lookups seen.
    """

    def __init__(self, *, max_keys: int = 200_000, heavy_keys: int = 4_096) -> None:
        """Start empty.

        Args:
            max_keys: Keys counted at most; 24 bytes each.
            heavy_keys: Most frequent keys kept whatever the sample.

        Raises:
            InvalidInputError: If a number of keys is below one.
        """
        enough = max_keys >= 1 and 0 <= heavy_keys <= max_keys
        require(enough, "max_keys", max_keys, "is too small", "give at least 1, and more than heavy_keys")
        self.lookups = 0
        self._max_keys, self._heavy_keys, self._level, self._batches = max_keys, heavy_keys, 0, 0
        self._keys = np.zeros(0, dtype=np.int64)
        self._counts = np.zeros((2, 0))  # in even and in odd powers of two of batches

    def observe(self, keys: Array) -> None:
        """Count the lookups of one batch, (lookups,) integers."""
        late = self._batches.bit_length() % 2
        self._batches += 1
        self.lookups += keys.size
        unique, added = np.unique(keys.ravel().astype(np.int64), return_counts=True)
        kept = self._sampled(unique) | np.isin(unique, self._keys, assume_unique=True)
        more = np.zeros((2, int(kept.sum())))
        more[late] = added[kept]
        self._keys, where = np.unique(np.concatenate([self._keys, unique[kept]]), return_inverse=True)
        counts = np.concatenate([self._counts, more], axis=1)
        self._counts = np.stack([np.bincount(where, row, len(self._keys)) for row in counts])
        while len(self._keys) > self._max_keys:
            self._level += 1
            stays = self._sampled(self._keys) | self._heavy()
            self._keys, self._counts = self._keys[stays], self._counts[:, stays]

    @property
    def relative_error(self) -> float:
        """How far the share of lookups of popular keys may be off: by sampling, or by drift.

        Drift is what popular keys of one part of the batches have lost in the other; the parts alternate in ever longer
        turns. One while fewer than two batches were seen.
        """
        if self._batches < 2 or not self._counts.sum(axis=1).all():
            return 1.0
        scaled = self._counts * self._scale()
        shares = scaled / scaled.sum(axis=1, keepdims=True)
        error = 0.0 if self._level == 0 else float(np.sqrt(1 / len(self._keys)))
        for part in (0, 1):
            popular = np.flatnonzero(self._counts[part] >= _POPULAR)
            order = popular[np.argsort(-self._counts[part, popular], kind="stable")]
            lost = np.cumsum(shares[part, order] - shares[1 - part, order])
            error = max(error, float(lost.max(initial=0.0)))
        return error

    def histogram(self, *, bins_per_factor_two: int = 4) -> Histogram:
        """The frequencies in log-spaced bins, most frequent first, for a plan request to carry.

        Keys that were never seen are in it too: as many lookups of them as of keys that were seen once (Good and
        Turing), and as many keys as Chao's estimator says.

        Raises:
            InvalidInputError: If nothing was observed.
        """
        require(len(self._keys) > 0, "lookups", 0, "has none observed", "observe at least one batch")
        counts, scale = self._counts.sum(axis=0), self._scale()
        once, twice = (float(scale[counts == times].sum()) for times in (1, 2))
        total = float(scale @ counts)
        seen = max(total - once, 0.5 * total)
        bins = np.floor(np.log2(counts) * bins_per_factor_two).astype(np.int64)
        _, where = np.unique(-bins, return_inverse=True)
        expected = _expected(counts, scale) if once else counts
        keys, lookups = np.bincount(where, scale), np.bincount(where, scale * expected)
        lookups *= seen / lookups.sum()
        keys, lookups = keys[keys > 0], lookups[keys > 0]
        if once:
            keys = np.append(keys, max(once**2 / (2 * max(twice, 1.0)), total - seen))
            lookups = np.append(lookups, total - seen)
        return Histogram(keys=tuple(keys.tolist()), lookups=tuple(lookups.tolist()))

    def _scale(self) -> FloatArray:
        """How many keys each counted one stands for; a heavy key stands for itself: the head is complete."""
        share = 0.5**self._level
        return np.where(self._heavy() & (self._level > 0), 1.0, np.where(self._sampled(self._keys), 1 / share, 0.0))

    def _heavy(self) -> npt.NDArray[np.bool_]:
        heavy = np.zeros(len(self._keys), dtype=bool)
        heavy[np.argsort(-self._counts.sum(axis=0), kind="stable")[: self._heavy_keys]] = True
        return heavy

    def _sampled(self, keys: Array) -> npt.NDArray[np.bool_]:
        sampled: npt.NDArray[np.bool_] = hashed(keys) <= np.uint64((1 << (64 - self._level)) - 1)
        return sampled


def _expected(counts: FloatArray, scale: FloatArray) -> FloatArray:
    """Lookups to expect in as many batches again: a key seen `r` times was lucky where few were seen `r + 1` times."""
    expected = counts.copy()
    number = [float(scale[counts == times].sum()) for times in range(5)]
    for times in range(1, 4):
        if number[times] > 0 and number[times + 1] > 0:
            expected[counts == times] = min(times, (times + 1) * number[times + 1] / number[times])
    return expected
