"""A trace continued: the last half goes on, with other keys in the roles of those that played in it.

What caches will miss is not what they missed so far: at the beginning all keys are new, and a large cache has not been
full yet. So the references to come are made up from those of the last half, and caches are simulated over past and
future together. A key of the past takes in the future the role of the key that, at the beginning of the last half, had
been used as recently and, among these, as often. Who came into the last half as new is in the future partly a new key
and partly one that was last seen long ago; how many new keys come is forecast from how many came.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from evenkeel.key_statistics.trace import KeyTrace

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]


def continued(trace: KeyTrace, ahead: float, rows: float, *, told_apart: bool = False, seed: int = 0) -> KeyTrace:
    """The trace with about `ahead` times as many steps again (never fewer), by names of keys of its own.

    Args:
        trace: What was observed, of at least two steps.
        ahead: Steps to come, over those observed.
        rows: Rows of the table: there are no more keys.
        told_apart: Whether roles of keys that had been used as recently and as often are in the order of how often they
            were used afterwards. That knows too much where uses are by chance, and is right where keys differ in what
            shows later: a table that is gone through over and over has seen each key once for a long time.
        seed: Of the draws: which of the keys that came as new are new, and who else comes back.
    """
    draw = np.random.default_rng(seed)
    half = trace.steps // 2
    length = trace.steps - half
    names, key = np.unique(trace.key, return_inverse=True)
    step, times = trace.step, trace.times.astype(np.int64)
    past = step < half
    before = _Keys.of(len(names), key[past], step[past], times[past])
    now = _Keys.of(len(names), key, step, times)
    first = np.full(len(names), trace.steps, dtype=np.int64)
    np.minimum.at(first, key, step)
    came = np.bincount(first, minlength=trace.steps)[: trace.steps] / trace.share
    come = new_keys(came, ahead + 0.5, rows)
    newcomers = np.flatnonzero(before.last < 0)
    arrival = first[newcomers]
    usual = _smooth(came[half:])[arrival - half]
    role, since, often = key[~past], step[~past] - half, times[~past]
    after = np.bincount(key[~past], weights=times[~past], minlength=len(names)) if told_apart else None
    order = before.recent(half, after)
    steps, keys, counts = [step], [key], [times]
    clock, end = trace.steps, trace.steps * (1 + ahead)
    while clock < end:
        image, pool = _images(order, now.recent(clock), len(names))
        expected = come[np.minimum(clock - trace.steps + arrival - half, len(come) - 1)]
        back = newcomers[draw.random(len(newcomers)) >= expected / np.maximum(usual, 1e-9)]
        if len(pool) and len(back):
            likely = np.log(np.maximum(now.times[pool], 1)) + draw.gumbel(size=len(pool))
            chosen = draw.permutation(pool[np.argsort(-likely)[: len(back)]])
            image[back[: len(chosen)]] = chosen
        fresh = np.flatnonzero(image < 0)
        image[fresh] = len(now.last) + np.arange(len(fresh))
        now = now.and_new(len(fresh))
        now.use(image[role], clock + since, often)
        steps.append(clock + since)
        keys.append(image[role])
        counts.append(often)
        clock += length
    joined = (np.concatenate(parts) for parts in (steps, keys, counts))
    all_steps, all_keys, all_times = joined
    return replace(
        trace,
        steps=clock,
        step=all_steps,
        key=all_keys.astype(np.uint64),
        times=np.minimum(all_times, 2**32 - 1).astype(np.uint32),
    )


def new_keys(came: FloatArray, ahead: float, rows: float) -> FloatArray:
    """New keys in each of the steps to come, from those of each past step.

    They come as a power of the time whose exponent is that of the last half; where it fell from the second quarter to
    the last half, it goes on falling.
    """
    steps = len(came)
    seen = np.concatenate([[0.0], np.cumsum(came)])
    edges = np.linspace(0.25, 1, 7)
    rate = np.diff(np.interp(steps * edges, np.arange(steps + 1), seen)) / (steps * 0.125)
    time, logs = np.log2((edges[1:] + edges[:-1]) / 2), np.log2(np.maximum(rate, 1e-9))
    early, late = (float(np.polyfit(time[part], logs[part], 1)[0]) for part in (slice(0, 3), slice(2, 6)))
    late = float(np.clip(late, -8.0, 0.25))
    bend = float(np.clip(late - early, -2.0, 0.0))
    after = np.log2(1 + (np.arange(max(1, round(steps * ahead))) + 0.5) / steps) - time[2:].mean()
    come = 2.0 ** (logs[2:].mean() + late * after + bend / 2 * after**2)
    room = np.maximum(rows - seen[-1], 0.0)
    total = np.minimum(np.cumsum(come), room)
    return np.diff(total, prepend=0.0)


class _Keys:
    """When each key was last used, -1 for never, and how often it was looked up."""

    def __init__(self, last: Array, times: Array) -> None:
        self.last, self.times = last, times

    @classmethod
    def of(cls, count: int, key: Array, step: Array, times: Array) -> _Keys:
        keys = cls(np.full(count, -1, dtype=np.int64), np.zeros(count, dtype=np.int64))
        keys.use(key, step, times)
        return keys

    def use(self, key: Array, step: Array, times: Array) -> None:
        self.last[key] = step  # ascending: the last one stays
        self.times += np.bincount(key, weights=times, minlength=len(self.times)).astype(np.int64)

    def and_new(self, count: int) -> _Keys:
        return _Keys(np.append(self.last, np.full(count, -1)), np.append(self.times, np.zeros(count, dtype=np.int64)))

    def recent(self, now: int, after: Array | None = None) -> tuple[Array, Array, Array]:
        """Used keys, the most recent and then the most frequent first; steps since; place among those of one step.

        `after` orders keys that are alike in both.
        """
        used = np.flatnonzero(self.last >= 0)
        alike = np.zeros(len(used)) if after is None else -after[used]
        key = used[np.lexsort((alike, -self.times[used], -self.last[used]))]
        age = now - self.last[key]
        index = np.arange(len(age))
        starts = np.ones(len(age), dtype=bool)
        starts[1:] = age[1:] != age[:-1]
        return key, age, index - np.maximum.accumulate(np.where(starts, index, 0))


def _images(then: tuple[Array, Array, Array], now: tuple[Array, Array, Array], count: int) -> tuple[Array, Array]:
    """Who takes each role now (-1 for nobody), and who has none."""
    most = max(len(then[0]), len(now[0])) + 1
    wanted, there = then[1] * most + then[2], now[1] * most + now[2]
    at = np.minimum(np.searchsorted(there, wanted), max(0, len(there) - 1))
    found = there[at] == wanted if len(there) else np.zeros(len(wanted), dtype=bool)
    image = np.full(count, -1, dtype=np.int64)
    image[then[0][found]] = now[0][at[found]]
    free = np.ones(len(there), dtype=bool)
    free[at[found]] = False
    left, over = then[0][~found], now[0][free]
    paired = min(len(left), len(over))
    image[left[:paired]] = over[:paired]
    return image, over[paired:]


def _smooth(values: FloatArray) -> FloatArray:
    width = max(1, len(values) // 8)
    padded = np.pad(values, (width, width), mode="edge")
    return np.convolve(padded, np.full(2 * width + 1, 1 / (2 * width + 1)), mode="valid")
