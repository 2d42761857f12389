"""Key traces with what real ones have: drift, sessions, scans; and caches simulated over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from evenkeel.placement import Eviction

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]


def zipf_law(keys: int, exponent: float) -> FloatArray:
    weight = np.cumsum(np.arange(1, keys + 1) ** -exponent)
    law: FloatArray = weight / weight[-1]
    return law


def zipf(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """Independent lookups of a Zipf law."""
    law = zipf_law(200_000, 1.0)
    for _ in range(steps):
        yield np.searchsorted(law, draw.random(lookups))


def drift(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """A Zipf law whose keys exchange their popularity, three of ten in the whole time."""
    keys = 150_000
    law, own = zipf_law(keys, 0.9), draw.permutation(keys)
    for _ in range(steps):
        chosen = draw.choice(keys, int(0.3 * keys / steps), replace=False)
        own[chosen] = own[draw.permutation(chosen)]
        yield own[np.searchsorted(law, draw.random(lookups))]


def shifting(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """A window of popular keys that moves on: old ones are never used again."""
    law = zipf_law(50_000, 0.8)
    for step in range(steps):
        yield np.searchsorted(law, draw.random(lookups)) * 7_919 % 50_000 + 150_000 * step // steps


def sessions(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """Users who look up again what they looked up lately."""
    law, users = zipf_law(150_000, 0.9), 3_000
    recent = np.searchsorted(law, draw.random((users, 20)))
    for _ in range(steps):
        user, slot = draw.integers(0, users, lookups), draw.integers(0, 20, lookups)
        old = recent[user, draw.integers(0, 20, lookups)]
        key = np.where(draw.random(lookups) < 0.7, old, np.searchsorted(law, draw.random(lookups)))
        recent[user, slot] = key
        yield key


def scan(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """A Zipf law, and a quarter of the lookups one after the other through a range, over and over."""
    law, part = zipf_law(100_000, 1.1), lookups // 4
    span = part * min(30, max(1, steps // 5))
    for step in range(steps):
        through = (step * part + np.arange(part)) % span + 100_000
        yield np.concatenate([np.searchsorted(law, draw.random(lookups - part)), through])


TRACES: dict[str, Callable[[np.random.Generator, int, int], Iterator[Array]]] = {
    each.__name__: each for each in (zipf, drift, shifting, sessions, scan)
}


def simulated(trace: list[Array], sizes: FloatArray, begin: int, eviction: Eviction) -> FloatArray:
    """Miss rates among the unique keys of the steps from `begin` on, of caches that ran from the first step.

    Puts all keys in order before every step, keys used in one step in no order. LFU counts all lookups, and goes on
    counting a key that it gave up.
    """
    _, keys = np.unique(np.concatenate(trace), return_inverse=True)
    parts = np.split(keys, np.cumsum([len(step) for step in trace])[:-1])
    count = int(keys.max()) + 1
    last, often = np.full(count, -1), np.zeros(count, dtype=np.int64)
    draw = np.random.default_rng(1)
    missed, total = np.zeros(len(sizes)), 0
    for step, part in enumerate(parts):
        unique, times = np.unique(part, return_counts=True)
        if step >= begin:
            chance = draw.random(count)
            order = np.lexsort((chance, -last) if eviction is Eviction.LRU else (chance, -last, -often))
            rank = np.empty(count, dtype=np.int64)
            rank[order] = np.arange(1, count + 1)
            needed = np.sort(np.where(last[unique] < 0, count + 1, rank[unique]))
            missed += len(unique) - np.searchsorted(needed, sizes, side="right") * (sizes <= count)
            missed += (len(unique) - (needed <= count).sum()) * (sizes > count)
            total += len(unique)
        last[unique] = step
        often[unique] += times
    return missed / total
