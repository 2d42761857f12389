"""A sample of the keys of tables, followed step by step in bounded memory: what curves are computed from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from evenkeel.placement.fields import require

Array = npt.NDArray[Any]

ALL = 2**64 - 1
_MOST_HEAVY, _MOST_REFERENCES = 1024, 2_000_000
_COUNTED = 64
"""Steps of which all keys are counted, evenly spaced: they show what a sample overstates."""
_LEAST_ROOM = 1 << 12
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeavyKeys:
    """The keys that were looked up most in those steps of which all keys were counted.

    Attributes:
        keys: (keys,) int64 keys.
        times: (keys,) lookups of each in these steps, in all ranks, while it was among the heaviest: no more than all.
        lookups: Lookups of all keys in these steps.
    """

    keys: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    times: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    lookups: int = 0

    @classmethod
    def merged(cls, several: Iterable[HeavyKeys]) -> HeavyKeys:
        """Those of all of them together."""
        every = tuple(several)
        keys, where = np.unique(np.concatenate([each.keys for each in every]), return_inverse=True)
        times = np.bincount(where, np.concatenate([each.times for each in every]), len(keys)).astype(np.int64)
        most = np.sort(np.argsort(-times, kind="stable")[:_MOST_HEAVY])
        return cls(keys=keys[most], times=times[most], lookups=sum(each.lookups for each in every))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyTrace:
    """What the caches of one table saw of a sample of its keys.

    A key is in the sample if its 64-bit hash is at most `limit`, so it is followed in every step or never, on every
    rank. A step refers to a key once, however often it looks the key up: a cache looks up a step's unique keys.

    Attributes:
        steps: Steps observed.
        samples: Samples of all observed steps and ranks together.
        lookups: Lookups of all observed steps and ranks together, of all keys.
        limit: Largest hash in the sample.
        step: (references,) int64 step of each reference, ascending.
        key: (references,) uint64 hash of its key.
        times: (references,) uint32 lookups of that key in that step.
        excess: By how many keys a step the sample overstates the unique keys: of the popular ones, which are in every
            step, it has not just its share.
    """

    steps: int
    samples: float
    lookups: float
    limit: int = ALL
    step: Array
    key: Array
    times: Array
    excess: float = 0.0
    heavy: HeavyKeys = field(default_factory=HeavyKeys)

    @property
    def share(self) -> float:
        """Share of the keys that is in the sample."""
        return (self.limit + 1) / (ALL + 1)

    @property
    def unique(self) -> float:
        """Unique keys of a step, on average."""
        return max(len(self.step) / self.share / max(self.steps, 1) - self.excess, 0.0)

    def thinned(self, limit: int) -> KeyTrace:
        """The same with a smaller sample."""
        if limit >= self.limit:
            return self
        kept = self.key <= np.uint64(limit)
        thin = replace(self, limit=limit, step=self.step[kept], key=self.key[kept], times=self.times[kept], excess=0.0)
        return replace(thin, excess=thin.unique - self.unique)

    def joined(self, count: int) -> KeyTrace:
        """As it would be if each step had done the work of `count` steps; a last incomplete one is left out.

        Popular keys are in every step, joined or not, so the excess stays what it is.
        """
        steps = self.steps // count
        share, end = steps * count / self.steps, np.searchsorted(self.step, steps * count)
        step, key, times = united(self.step[:end] // count, self.key[:end], self.times[:end])
        samples, lookups = self.samples * share, self.lookups * share
        return replace(self, steps=steps, samples=samples, lookups=lookups, step=step, key=key, times=times)


def merge(statistics: Iterable[Mapping[str, KeyTrace]]) -> dict[str, KeyTrace]:
    """Statistics of several ranks by table, which observed the same steps, made one."""
    by_table: dict[str, list[KeyTrace]] = {}
    for one in statistics:
        for name, trace in one.items():
            by_table.setdefault(name, []).append(trace)
    most = max(_MOST_REFERENCES // max(1, len(by_table)), 1 << 12)
    return {name: _merged(traces, most) for name, traces in by_table.items()}


def _merged(traces: Sequence[KeyTrace], most: int) -> KeyTrace:
    """One trace of at most so many references."""
    limit = min(trace.limit for trace in traces)
    parts = [trace.thinned(limit) for trace in traces]
    while sum(len(trace.step) for trace in parts) > most * 2:
        limit //= 2
        parts = [trace.thinned(limit) for trace in parts]
    step, key, times = united(*(np.concatenate([getattr(t, name) for t in parts]) for name in ("step", "key", "times")))
    result = KeyTrace(
        steps=max(trace.steps for trace in parts),
        samples=sum(trace.samples for trace in parts),
        lookups=sum(trace.lookups for trace in parts),
        limit=limit,
        step=step,
        key=key,
        times=times,
        excess=float(np.mean([trace.excess for trace in parts])),  # all ranks look up the same popular keys
        heavy=HeavyKeys.merged(trace.heavy for trace in traces),
    )
    while len(result.step) > most:
        result = result.thinned(result.limit // 2)
    return result


def united(step: Array, key: Array, times: Array) -> tuple[Array, Array, Array]:
    """References ordered by step and key, those of one key in one step made one."""
    order = np.lexsort((key, step))
    step, key, times = step[order], key[order], times[order]
    first = np.ones(len(step), dtype=bool)
    first[1:] = (step[1:] != step[:-1]) | (key[1:] != key[:-1])
    starts = np.flatnonzero(first)
    total = np.add.reduceat(times.astype(np.uint64), starts) if len(starts) else times.astype(np.uint64)
    return step[first], key[first], np.minimum(total, 2**32 - 1).astype(np.uint32)


def hashed(keys: Array) -> Array:
    """(n,) uint64 hashes of integer keys, by SplitMix64's permutation: no two keys have one hash."""
    mixed = keys.astype(np.int64).view(np.uint64) + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    result: Array = mixed ^ (mixed >> np.uint64(31))
    return result


def unhashed(hashes: Array) -> Array:
    """(n,) the int64 keys that `hashed` gave these hashes."""
    mixed = _unshifted(hashes, 31) * np.uint64(pow(int(_SECOND), -1, 1 << 64))
    mixed = _unshifted(mixed, 27) * np.uint64(pow(int(_FIRST), -1, 1 << 64))
    result: Array = (_unshifted(mixed, 30) - _GOLDEN).view(np.int64)
    return result


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
        for table, arrays in enumerate(runs):
            if not arrays:
                continue
            keys = np.concatenate(arrays)
            self.lookups[table] += len(keys)
            if not is_counted:  # only of the sample is it asked which keys are the same
                hashes = hashed(keys)
                keys = hashes[hashes <= np.uint64(self._limits[table])]
            unique, counts = np.unique(keys, return_counts=True)
            counted[table] = len(unique)
            if is_counted:
                seen = HeavyKeys(keys=unique.astype(np.int64), times=counts, lookups=len(keys))
                self._heavy[table] = HeavyKeys.merged((self._heavy[table], seen))
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
            sampled = np.bincount(step, minlength=self.steps) / ((limit + 1) / (ALL + 1))
            excess = float(np.mean([sampled[at] - unique[table] for at, unique in self._unique.items()]))
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
