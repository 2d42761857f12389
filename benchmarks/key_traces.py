"""Key traces with what real ones have: drift, sessions, new keys, scans, seasons; and caches simulated over them."""

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


def uniform(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """All keys alike."""
    for _ in range(steps):
        yield draw.integers(0, 60_000, lookups)


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


def visitors(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """Users who come, are active for a while, and leave: a key space without end."""
    users, law = 4_000, zipf_law(4_000, 0.7)
    live = draw.integers(0, 2**40, users)
    for _ in range(steps):
        gone = draw.integers(0, users, max(1, users * 40 // steps))
        live[gone] = draw.integers(0, 2**40, len(gone))
        yield live[np.searchsorted(law, draw.random(lookups))]


def growing(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """New items every step, mostly young ones looked up, beside a catalogue that stays."""
    for step in range(steps):
        live = 20_000 + 120_000 * step // steps
        age = np.minimum(draw.pareto(0.6, lookups) * 300, live - 1).astype(np.int64)
        fixed = (draw.random(lookups) ** 3 * 20_000).astype(np.int64)
        yield np.where(draw.random(lookups) < 0.3, fixed, live - 1 - age)


def scan(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """A Zipf law, and a quarter of the lookups one after the other through a range, over and over."""
    law, part = zipf_law(100_000, 1.1), lookups // 4
    span = part * min(30, max(1, steps // 5))
    for step in range(steps):
        through = (step * part + np.arange(part)) % span + 100_000
        yield np.concatenate([np.searchsorted(law, draw.random(lookups - part)), through])


def audiences(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """Two audiences in turn, day and night, with a third of the lookups in common."""
    law, period = zipf_law(60_000, 0.9), max(2, steps // 9)
    for step in range(steps):
        key, common = np.searchsorted(law, draw.random(lookups)), draw.random(lookups) < 0.33
        yield np.where(common, key, key + 60_000 * (1 + (step // period) % 2))


def bursts(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """Items that come up, are looked up a lot for a while, and fade."""
    items = 40_000
    birth, size = np.sort(draw.random(items) * 1.4 - 0.4) * steps, draw.pareto(1.1, items) + 0.05
    life = np.exp(draw.normal(np.log(max(steps * 0.05, 1)), 1.0, items))
    for step in range(steps):
        age = np.maximum(step - birth, 0)
        weight = np.cumsum(np.where(step >= birth, size * np.exp(-age / life), 0))
        yield np.searchsorted(weight, draw.random(lookups) * weight[-1])


def tastes(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """Users with tastes of their own; a batch is of few users, each with many lookups."""
    law, users = zipf_law(400, 0.9), zipf_law(8_000, 0.5)
    home = draw.integers(0, 100_000, 8_000)
    for _ in range(steps):
        user = np.searchsorted(users, draw.random(-(-lookups // 20)))
        key = np.searchsorted(law, draw.random((len(user), 20)))
        yield ((home[user][:, None] + key * key * 3) % 100_000).ravel()[:lookups]


def walks(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """Readers who go on from what they read last to something near it, and now and then elsewhere."""
    readers, keys = 2_000, 120_000
    at = draw.integers(0, keys, readers)
    for _ in range(steps):
        parts = []
        for left in range(lookups, 0, -readers):
            away = (draw.random(readers) ** 2 * keys).astype(np.int64)
            near = (at + draw.geometric(0.05, readers) * draw.choice([-1, 1], readers)) % keys
            at = np.where(draw.random(readers) < 0.1, away, near)
            parts.append(at[:left].copy())
        yield np.concatenate(parts)


def once(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """Two of five lookups are of keys that never come again."""
    law, fresh = zipf_law(50_000, 0.8), 10**9
    for _ in range(steps):
        key, new = np.searchsorted(law, draw.random(lookups)), draw.random(lookups) < 0.4
        key[new] = fresh + np.arange(new.sum())
        fresh += int(new.sum())
        yield key


def stack(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """The key that is so many places down in the order of last uses, places of a power law, or a new one."""
    order = np.arange(5_000)
    fresh = len(order)
    for _ in range(steps):
        place = (draw.pareto(0.7, lookups) * 200).astype(np.int64)
        new = place >= len(order)
        key = order[np.minimum(place, len(order) - 1)]
        key[new] = fresh + np.arange(new.sum())
        fresh += int(new.sum())
        yield key
        used = np.unique(key)
        order = np.concatenate([draw.permutation(used), order[~np.isin(order, used)]])


def richer(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """Old keys by how often they came, new ones ever more rarely: a Pitman-Yor process."""
    discount, strength = 0.6, 500
    times, used = np.zeros(lookups * steps + 1), 1
    times[0] = 1
    for _ in range(steps):
        weight = np.cumsum(times[:used] - discount)
        new = draw.random(lookups) < (strength + discount * used) / (strength + times[:used].sum())
        key = np.searchsorted(weight, draw.random(lookups) * weight[-1])
        key[new] = used + np.arange(new.sum())
        used += int(new.sum())
        np.add.at(times, key, 1)
        yield key


def seasons(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """A catalogue whose items have seasons, three in the whole time."""
    name, phase, base = draw.permutation(30_000), draw.random(30_000), 1 / np.arange(1, 30_001)
    for step in range(steps):
        weight = np.cumsum(base * (1 + 0.9 * np.sin(2 * np.pi * (3 * step / steps + phase))))
        yield name[np.searchsorted(weight, draw.random(lookups) * weight[-1])]


def logs(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """Several features of click logs in one table, and identifiers of sessions that end."""
    laws = ((zipf_law(300, 1.2), 0, 0.4), (zipf_law(30_000, 0.8), 1_000, 0.3), (zipf_law(80_000, 0.3), 50_000, 0.2))
    for step in range(steps):
        parts = [np.searchsorted(law, draw.random(int(lookups * part))) + first for law, first, part in laws]
        left = lookups - sum(map(len, parts))
        yield np.concatenate(
            [*parts, 10**9 + (draw.random(left) ** 2 * left * 0.7).astype(np.int64) + step * left // 3]
        )


def epochs(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """The same data three times over, in the same order."""
    law, span = zipf_law(90_000, 0.7), max(2, steps // 3)
    data = [np.searchsorted(law, draw.random(lookups)) for _ in range(min(span, steps))]
    for step in range(steps):
        yield data[step % span]


TRACES: dict[str, Callable[[np.random.Generator, int, int], Iterator[Array]]] = {
    each.__name__: each for each in (zipf, uniform, drift, shifting, sessions, visitors, growing, scan)
}
"""What predictions were developed on."""
LATER: dict[str, Callable[[np.random.Generator, int, int], Iterator[Array]]] = {
    each.__name__: each for each in (audiences, bursts, tastes, walks, once, stack, richer, seasons, logs, epochs)
}
"""Made later, to judge them."""


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
