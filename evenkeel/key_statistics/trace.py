"""References to a sample of the keys of one table, step by step: what curves and histograms are computed from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

ALL = 2**64 - 1
_MOST_HEAVY = 1024


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

    def merged(self, others: Sequence[HeavyKeys]) -> HeavyKeys:
        """Those of all of them together."""
        every = (self, *others)
        keys, where = np.unique(np.concatenate([each.keys for each in every]), return_inverse=True)
        times = np.bincount(where, np.concatenate([each.times for each in every]), len(keys)).astype(np.int64)
        most = np.sort(np.argsort(-times, kind="stable")[:_MOST_HEAVY])
        return HeavyKeys(keys=keys[most], times=times[most], lookups=sum(each.lookups for each in every))


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

    def part(self, begin: int, end: int) -> KeyTrace:
        """The steps from `begin` up to `end` alone."""
        low, high = np.searchsorted(self.step, [begin, end])
        share = (end - begin) / self.steps
        return replace(
            self,
            steps=end - begin,
            samples=self.samples * share,
            lookups=self.lookups * share,
            step=self.step[low:high] - begin,
            key=self.key[low:high],
            times=self.times[low:high],
        )

    def joined(self, count: int) -> KeyTrace:
        """As it would be if each step had done the work of `count` steps; a last incomplete one is left out.

        Popular keys are in every step, joined or not, so the excess stays what it is.
        """
        if count <= 1:
            return self
        kept = self.part(0, self.steps // count * count)
        step, key, times = united(kept.step // count, kept.key, kept.times)
        return replace(kept, steps=kept.steps // count, step=step, key=key, times=times)


def merged(traces: Sequence[KeyTrace], most: int = 2_000_000) -> KeyTrace:
    """One trace of those that the ranks of a job took of the same steps."""
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
        heavy=traces[0].heavy.merged([trace.heavy for trace in traces[1:]]),
    )
    while len(result.step) > most:
        result = result.thinned(result.limit // 2)
    return result


def merge(statistics: Iterable[Mapping[str, KeyTrace]]) -> dict[str, KeyTrace]:
    """Statistics of several ranks by table, which observed the same steps, made one."""
    every = list(statistics)
    names = {name: None for one in every for name in one}
    most = 2_000_000 // max(1, len(names))
    return {name: merged([one[name] for one in every if name in one], max(most, 1 << 12)) for name in names}


def united(step: Array, key: Array, times: Array) -> tuple[Array, Array, Array]:
    """References ordered by step and key, those of one key in one step made one."""
    order = np.lexsort((key, step))
    step, key, times = step[order], key[order], times[order]
    first = np.ones(len(step), dtype=bool)
    first[1:] = (step[1:] != step[:-1]) | (key[1:] != key[:-1])
    starts = np.flatnonzero(first)
    total = np.add.reduceat(times.astype(np.uint64), starts) if len(starts) else times.astype(np.uint64)
    return step[first], key[first], np.minimum(total, 2**32 - 1).astype(np.uint32)
