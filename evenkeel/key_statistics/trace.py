"""References to a sample of the keys of one table, step by step: what miss-ratio curves are computed from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from evenkeel.placement.invalid_input import require

Array = npt.NDArray[Any]

ALL = 2**64 - 1


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
        sketches: HyperLogLog registers of all keys of some steps, to tell how many unique keys a step has.
        known_excess: What `excess` is, where steps were joined and no sketches are of them.
    """

    steps: int
    samples: float
    lookups: float
    limit: int = ALL
    step: Array
    key: Array
    times: Array
    sketches: dict[int, Array] = field(default_factory=dict)
    known_excess: float | None = None

    @property
    def share(self) -> float:
        """Share of the keys that is in the sample."""
        return (self.limit + 1) / (ALL + 1)

    @property
    def excess(self) -> float:
        """By how many keys a step the sample overstates the unique keys: of the popular ones it has not just its share.

        Keys that are in every step stay in every step when steps are joined, and so does this.
        """
        if self.known_excess is not None or self.limit == ALL or not self.sketches:
            return self.known_excess or 0.0
        found = np.bincount(self.step, minlength=self.steps)
        return float(np.mean([found[at] / self.share - estimate(own) for at, own in self.sketches.items()]))

    def thinned(self, limit: int) -> KeyTrace:
        """The same with a smaller sample."""
        if limit >= self.limit:
            return self
        kept = self.key <= np.uint64(limit)
        return replace(self, limit=limit, step=self.step[kept], key=self.key[kept], times=self.times[kept])

    def before(self, steps: int) -> KeyTrace:
        """The first steps alone, as if no more had been observed."""
        end, part = int(np.searchsorted(self.step, steps)), steps / self.steps
        return replace(
            self,
            steps=steps,
            samples=self.samples * part,
            lookups=self.lookups * part,
            step=self.step[:end],
            key=self.key[:end],
            times=self.times[:end],
            sketches={at: registers for at, registers in self.sketches.items() if at < steps},
        )

    def joined(self, count: int) -> KeyTrace:
        """As it would be if each step had done the work of `count` steps; a last incomplete one is left out."""
        if count <= 1:
            return self
        kept = self.before(self.steps // count * count)
        step, key, times = united(kept.step // count, kept.key, kept.times)
        steps, excess = kept.steps // count, kept.excess  # of steps before they were joined
        return replace(kept, steps=steps, step=step, key=key, times=times, sketches={}, known_excess=excess)


def estimate(registers: Array) -> float:
    """Number of different keys that a HyperLogLog sketch has noted (Flajolet et al. 2007)."""
    size = len(registers)
    raw = 0.7213 / (1 + 1.079 / size) * size**2 / float(np.sum(2.0 ** -registers.astype(np.float64)))
    empty = int(np.count_nonzero(registers == 0))
    return size * float(np.log(size / empty)) if raw <= 2.5 * size and empty else raw


def merged(traces: Sequence[KeyTrace], most: int = 2_000_000) -> KeyTrace:
    """One trace of those that the ranks of a job took of the same steps.

    Args:
        traces: Traces of one table, of one rank each.
        most: References to keep; the sample is thinned until no more are left.

    Raises:
        InvalidInputError: If there is none.
    """
    require(len(traces) > 0, "traces", 0, "are none", "give those of at least one rank")
    limit = min(trace.limit for trace in traces)
    own = [trace.thinned(limit) for trace in traces]
    while sum(len(trace.step) for trace in own) > most * 2:
        limit //= 2
        own = [trace.thinned(limit) for trace in own]
    step, key, times = united(*(np.concatenate([getattr(t, name) for t in own]) for name in ("step", "key", "times")))
    shared = set.intersection(*(set(trace.sketches) for trace in own))
    result = KeyTrace(
        steps=max(trace.steps for trace in own),
        samples=sum(trace.samples for trace in own),
        lookups=sum(trace.lookups for trace in own),
        limit=limit,
        step=step,
        key=key,
        times=times,
        sketches={at: np.maximum.reduce([trace.sketches[at] for trace in own]) for at in sorted(shared)},
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
