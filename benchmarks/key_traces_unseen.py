"""Key traces that no prediction was developed on: what tables of recommenders look up, by laws of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.key_traces import zipf_law

Array = npt.NDArray[Any]
_FRESH = 10**10


def raters(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """Items that members rate: each rates many at one sitting, none twice, out of three of forty genres."""
    items, genres, law = 30_000, 40, zipf_law(750, 0.9)
    sitting = 60
    for step in range(steps):
        keys: list[Array] = []
        for _ in range(-(-lookups // sitting)):
            taste = draw.integers(0, genres, 3)
            place = np.searchsorted(law, draw.random(2 * sitting))
            keys.append(draw.permutation(np.unique(place * genres + draw.choice(taste, 2 * sitting)))[:sitting])
        yield (np.concatenate(keys)[:lookups] + 40 * (step * 200 // steps)) % items


def members(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """Members: some come daily, some once, and new ones sign up all the time and are eager at first."""
    activity = draw.lognormal(0, 1.6, 400_000)
    signed = np.sort(draw.random(400_000) * 2 - 1) * steps
    for step in range(steps):
        there = np.searchsorted(signed, step)
        eager = 1 + 6 * np.exp(-(step - signed[:there]) / (0.03 * steps))
        weight = np.cumsum(activity[:there] * eager)
        visits = np.searchsorted(weight, draw.random(-(-lookups // 3)) * weight[-1])
        yield np.repeat(visits, 3)[:lookups]


def news(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """Articles: new ones every step, their readers halve every so often; old ones are found by searching."""
    births = max(1, 60_000 // steps)
    worth = draw.pareto(1.3, births * (steps + 40)) + 0.02
    for step in range(steps):
        live = births * (step + 40)
        age = (live - 1 - np.arange(live)) / (births * 0.02 * steps)
        weight = np.cumsum(worth[:live] * (2.0**-age + 0.004))
        yield np.searchsorted(weight, draw.random(lookups) * weight[-1])


def cascades(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """What is looked up is passed on: an event begets others of its key after a while of a power law."""
    waiting: dict[int, list[Array]] = {}
    fresh = 0
    for step in range(steps):
        own = np.concatenate(waiting.pop(step, [np.zeros(0, dtype=np.int64)]))
        own = draw.permutation(own)[:lookups]
        left = lookups - len(own)
        first = fresh + np.arange(left)
        fresh += left
        key = np.concatenate([own, first])
        children = np.repeat(key, draw.poisson(0.85, len(key)))
        due = step + 1 + (draw.pareto(0.8, len(children)) * 0.004 * steps).astype(np.int64)
        order = np.argsort(due, kind="stable")
        for at, part in zip(*_groups(due[order], children[order]), strict=True):
            if at < steps:
                waiting.setdefault(int(at), []).append(part)
        yield key


def histories(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """The last 32 items of each user who comes: who comes again brings most of them again."""
    law, name = zipf_law(200_000, 0.85), draw.permutation(200_000)
    users, comes = 20_000, zipf_law(20_000, 0.6)
    past = name[np.searchsorted(law, draw.random((users, 32)))]
    for _ in range(steps):
        user = np.searchsorted(comes, draw.random(-(-lookups // 32)))
        yield past[user].ravel()[:lookups]
        past[user] = np.roll(past[user], 4, axis=1)
        past[user, :4] = name[np.searchsorted(law, draw.random((len(user), 4)))]


def reshuffled(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """The same data five times, in another order each time."""
    span = max(1, steps // 5)
    data = np.searchsorted(zipf_law(120_000, 0.75), draw.random(span * lookups))
    for step in range(steps):
        if step % span == 0:
            data = draw.permutation(data)
        yield data[step % span * lookups :][:lookups]


def negatives(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """Clicked items, and for each two others drawn of all items alike."""
    law, items = zipf_law(80_000, 1.0), 80_000
    for _ in range(steps):
        clicked = np.searchsorted(law, draw.random(-(-lookups // 3)))
        yield np.concatenate([clicked, draw.integers(0, items, 2 * len(clicked))])[:lookups]


def launch(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """A second country joins after a quarter of the time, with a catalogue of its own."""
    law = zipf_law(90_000, 0.9)
    for step in range(steps):
        key = np.searchsorted(law, draw.random(lookups))
        yield np.where(draw.random(lookups) < 0.4 * (step >= steps / 4), key + 90_000, key)


def campaigns(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """Advertisements: each runs from a day to another one, with a budget, while a few run for ever."""
    ads = 50_000
    begin = draw.random(ads) * 1.3 - 0.3
    end = begin + draw.exponential(0.08, ads)
    budget = draw.lognormal(0, 1.5, ads)
    end[:500] = 2.0
    for step in range(steps):
        weight = np.cumsum(np.where((begin <= step / steps) & (step / steps < end), budget, 0))
        yield np.searchsorted(weight, draw.random(lookups) * weight[-1], side="right")


def fading(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """What was looked up lately is looked up again, the likelier the more often; one of twelve is new."""
    weight, used = np.zeros(lookups * steps + 2_000), 2_000
    weight[:used] = 1
    for _ in range(steps):
        sums = np.cumsum(weight[:used])
        key = np.searchsorted(sums, draw.random(lookups) * sums[-1])
        new = draw.random(lookups) < 1 / 12
        key[new] = used + np.arange(new.sum())
        used += int(new.sum())
        weight[:used] *= 0.5 ** (25 / steps)
        np.add.at(weight, key, 1)
        yield key


def crosses(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """A crossed feature: pairs of a user's group and an item, hashed into one table."""
    groups, items = zipf_law(300, 0.5), zipf_law(40_000, 1.15)
    for _ in range(steps):
        group, item = np.searchsorted(groups, draw.random(lookups)), np.searchsorted(items, draw.random(lookups))
        yield (group * 40_009 + item) * 2_654_435_761 % 250_007


def queries(draw: np.random.Generator, steps: int, lookups: int) -> Iterator[Array]:
    """Words of queries: common ones, rare ones that never end, and topics of the day that come back now and then."""
    common, topics = zipf_law(5_000, 1.05), 300
    hot = draw.random(topics) < 0.05
    for _ in range(steps):
        hot = np.where(hot, draw.random(topics) > 12 / steps, draw.random(topics) < 0.6 / steps)
        hot[draw.integers(0, topics)] = True
        kind = draw.random(lookups)
        of_topic = draw.choice(np.flatnonzero(hot), lookups) * 200 + (draw.random(lookups) ** 2 * 200).astype(np.int64)
        rare = _FRESH + np.minimum(draw.pareto(0.5, lookups) * 3_000, 1e12).astype(np.int64)
        often = np.searchsorted(common, draw.random(lookups))
        yield np.select([kind < 0.5, kind < 0.8], [often, 10_000 + of_topic], rare)


def _groups(due: Array, keys: Array) -> tuple[Array, list[Array]]:
    at, first = np.unique(due, return_index=True)
    return at, np.split(keys, first[1:])


UNSEEN: dict[str, Callable[[np.random.Generator, int, int], Iterator[Array]]] = {
    each.__name__: each
    for each in (
        raters, members, news, cascades, histories, reshuffled, negatives, launch, campaigns, fading, crosses, queries
    )
}  # fmt: skip
"""Never looked at while predictions were developed."""
