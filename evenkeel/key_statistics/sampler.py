"""Follows a sample of the keys of several tables, step by step, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from evenkeel.key_statistics.trace import ALL, HeavyKeys, KeyTrace, united
from evenkeel.placement.invalid_input import require

Array = npt.NDArray[Any]

_COUNTED = 64
"""Steps of which all keys are counted, evenly spaced: they show what a sample overstates."""
_LEAST_ROOM = 1 << 12
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def hashed(keys: Array) -> Array:
    """(n,) uint64 hashes of integer keys, by SplitMix64's permutation: no two keys have one hash."""
    mixed = keys.astype(np.int64).view(np.uint64) + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    found: Array = mixed ^ (mixed >> np.uint64(31))
    return found


def unhashed(hashes: Array) -> Array:
    """(n,) the int64 keys that `hashed` gave these hashes."""
    mixed = _unshifted(hashes, 31) * np.uint64(pow(int(_SECOND), -1, 1 << 64))
    mixed = _unshifted(mixed, 27) * np.uint64(pow(int(_FIRST), -1, 1 << 64))
    found: Array = (_unshifted(mixed, 30) - _GOLDEN).view(np.int64)
    return found


def _unshifted(mixed: Array, by: int) -> Array:
    """What gave `mixed` when it was combined with itself, shifted right by more than a third of its bits."""
    twice: Array = mixed ^ (mixed >> np.uint64(by))
    return twice ^ (mixed >> np.uint64(2 * by)) if 2 * by < 64 else twice


class KeySampler:
    """The keys of a sample, decided by a hash of the key, so that a key is followed in every step or never.

    While there is room all keys are followed. Where there is none left, the share of the tables that take the most of
    it is halved, and the keys that drop out are forgotten.

    Source: SHARDS with fixed size, Waldspurger et al., FAST 2015.
    """

    def __init__(self, tables: Sequence[str], *, max_references: int = 2_000_000) -> None:
        """Start empty.

        Args:
            tables: Names of the tables.
            max_references: References kept at most, of all tables together; 12 bytes each.

        Raises:
            InvalidInputError: If there is no table, or no room for a few thousand references a table.
        """
        require(len(tables) > 0, "tables", 0, "are none", "name at least one table")
        least = _LEAST_ROOM * len(tables)
        remedy = f"give at least {least}: {_LEAST_ROOM} a table"
        require(max_references >= least, "max_references", max_references, "is too small", remedy)
        self.tables = tuple(tables)
        self.max_references = max_references
        self.steps = 0
        self.samples = 0.0
        self.lookups = np.zeros(len(tables))
        self._limits = [ALL] * len(tables)
        self._used = np.zeros(len(tables), dtype=np.int64)
        self._parts: list[list[tuple[int, Array, Array]]] = [[] for _ in tables]  # step, hashes, counts
        self._unique: dict[int, Array] = {}
        self._heavy = [HeavyKeys() for _ in tables]
        self._stride = 1

    def observe(self, batches: Sequence[tuple[Array, Array]], samples: float) -> None:
        """Take the keys of one step.

        Args:
            batches: Keys, int64 or int32, and (runs, 3) int64 of table, first and last: the runs of keys that are of
                one table. Keys outside of all runs are passed over.
            samples: Samples of the step on this rank.
        """
        runs: list[list[Array]] = [[] for _ in self.tables]
        for values, parts in batches:
            for table, first, last in parts.tolist():
                if last > first:
                    runs[table].append(values[first:last])
        counted = np.zeros(len(self.tables))
        is_counted = self._is_counted()
        for table, found in enumerate(runs):
            if not found:
                continue
            keys = np.concatenate(found)
            self.lookups[table] += len(keys)
            if not is_counted:  # only of the sample is it asked which keys are the same
                hashes = hashed(keys)
                keys = hashes[hashes <= np.uint64(self._limits[table])]
            unique, counts = np.unique(keys, return_counts=True)
            counted[table] = len(unique)
            if is_counted:
                seen = HeavyKeys(keys=unique.astype(np.int64), times=counts, lookups=len(keys))
                self._heavy[table] = self._heavy[table].merged([seen])
                unique = hashed(unique)
                kept = unique <= np.uint64(self._limits[table])
                unique, counts = unique[kept], counts[kept]
            self._parts[table].append((self.steps, unique, counts.astype(np.uint32)))
            self._used[table] += len(unique)
        if is_counted:
            self._unique[self.steps] = counted
        self._make_room()
        self.steps += 1
        self.samples += samples

    def traces(self) -> dict[str, KeyTrace]:
        """What was seen, by name of the table."""
        return {name: self._trace(table) for table, name in enumerate(self.tables)}

    def _trace(self, table: int) -> KeyTrace:
        parts = self._parts[table]
        lengths = [len(hashes) for _, hashes, _ in parts]
        step = np.repeat(np.array([at for at, _, _ in parts], dtype=np.int64), lengths)
        key = np.concatenate([np.zeros(0, dtype=np.uint64), *(hashes for _, hashes, _ in parts)])
        times = np.concatenate([np.zeros(0, dtype=np.uint32), *(counts for _, _, counts in parts)])
        step, key, times = united(step, key, times)
        limit = self._limits[table]
        excess = 0.0
        if limit < ALL and self._unique:
            found = np.bincount(step, minlength=self.steps) / ((limit + 1) / (ALL + 1))
            excess = float(np.mean([found[at] - unique[table] for at, unique in self._unique.items()]))
        return KeyTrace(
            steps=self.steps,
            samples=self.samples,
            lookups=float(self.lookups[table]),
            limit=limit,
            step=step,
            key=key,
            times=times,
            excess=excess,
            heavy=self._heavy[table],
        )

    def _is_counted(self) -> bool:
        """Whether all keys of this step are counted; evenly spaced steps are."""
        if len(self._unique) >= _COUNTED:
            self._stride *= 2
            self._unique = {at: unique for at, unique in self._unique.items() if at % self._stride == 0}
        return self.steps % self._stride == 0

    def _make_room(self) -> None:
        while self._used.sum() > self.max_references:
            for table in np.flatnonzero(self._used >= self._used.max() / 2).tolist():
                self._limits[table] //= 2
                limit = np.uint64(self._limits[table])
                self._parts[table] = [
                    (step, hashes[hashes <= limit], counts[hashes <= limit])
                    for step, hashes, counts in self._parts[table]
                ]
                self._used[table] = sum(len(hashes) for _, hashes, _ in self._parts[table])


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
