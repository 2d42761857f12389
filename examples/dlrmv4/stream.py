"""A synthetic stream with the published figures of Yambda-5B: every user, event and id in it is made from a seed.

Yambda-5B itself is on no machine that this is run on. Published are (P), in README and settings of `recommendation_v4`
of mlcommons/training: tables and their rows, users, median, mean and longest history, shares of the pools, 4,086 events
before the first anchor, at most 1,362 of each pool in a sample, 2,663 events and 4.0 % likes in the mean sample, 0.6 to
2.4 % different ids in a rank's batch, and how much more than its share the heaviest owner of an id is asked for. What
is calibrated (C) so that these come out, or assumed (A), says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from examples.datasets import Keys, LogNormalLengths, SequenceBatch
from examples.datasets.batch import assemble
from trainer_client.embedding.routing.ownership import fmix64_of

ROWS = {  # (P) of tables of 512 float32: 293 M rows, 600 GB
    "uid": 1_000_001, "user_x_artist": 100_000_000, "user_x_album": 40_000_000, "user_x_hour": 24_000_000,
    "item_x_hour": 40_000_000, "artist_x_hour": 32_000_000, "user_x_is_organic": 2_000_000,
    "user_x_artist_x_hour": 40_000_000, "item_id": 9_390_624, "artist_id": 1_293_395, "album_id": 3_367_692,
}  # fmt: skip
CONTEXT = tuple(ROWS)[:8]
"""One lookup a sample; the others have one for each event of the history and one for the candidate."""
LISTENED, LIKED, SKIPPED = 1, 2, 4  # (P) the bits of `action_weight`
POOLS = {LISTENED: 0.613, SKIPPED: 0.359, LIKED: 0.019, 0: 0.010}  # (P) 0: taken back, in no sample
MEDIAN, MEAN, LONGEST = 2_695, 4_763, 27_738  # (P) events of a user
SIGMA = 1.1337  # (C) of the logarithm: with the median as it is and what is longer cut, the mean is MEAN
MIN_HISTORY, POOL_EVENTS, SCANNED = 4_086, 1_362, 20_000  # (P)
SKEW = {"album_id": 2.8, "artist_id": 1.3}  # (P) lookups of the heaviest owner over the mean, row-wise
SALT = {"album_id": 8, "artist_id": 3}  # (C) of their hashes: popular items of their own move it by a few percent
OWNERS = 8  # (A) the notes name no number of ranks; as the hot rows are spread over an eighth, 16 and 32 show the same
HOT_ROWS = 256  # (A) "a few hot ids"
SPREAD = 3.7  # (C) of a user's share of skips, a beta law: the mean sample has 2,663 events (and 5 % likes)
POPULARITY = 0.8  # (A) exponent of the catalogue: its most popular item has 0.8 %, so `item_id` is even, as published
REPEATS, FAVOUR = 0.2, 3.0  # (C) different items an event, and how much a user prefers some: 0.6 to 2.4 % different ids
DAYS, DAY, REST = 300, 100, 3  # (P) days; (A) the one of the stream; each user listens on one day of three
_POSITIVE, _HALF = (1 << 63) - 1, (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much smaller than the reference everything is.

    Attributes:
        rows: Divides the rows of all tables.
        history: Divides histories and what a sample has of them.
        width: Of embeddings and layers.
        layers: Of the model.
        heads: Of a layer.
        samples: Of a rank in a step.
    """

    rows: int = 1
    history: int = 1
    width: int = 512
    layers: int = 3
    heads: int = 4
    samples: int = 1024

    def rows_of(self, table: str) -> int:
        """Rows of a table."""
        return max(OWNERS, ROWS[table] // self.rows)


class Stream:
    """The samples of one day: user by user, of each user those of that day in the order of time."""

    def __init__(self, scale: Scale, *, seed: int = 0) -> None:
        """Draws the lengths of all users' histories; what they heard is drawn when it is read."""
        self.scale, self._seed = scale, seed
        self._items = Keys(count=scale.rows_of("item_id"), exponent=POPULARITY)
        users = scale.rows_of("uid")
        mean = MEDIAN * math.exp(SIGMA**2 / 2)
        lengths = LogNormalLengths(mean=mean, sigma=SIGMA, maximum=LONGEST).draw(np.random.default_rng(seed), users)
        self.lengths = np.maximum(lengths // scale.history, 1)
        active = (np.arange(users) + DAY) % REST == 0
        first, end = (self.lengths * (DAY // REST + more) // (DAYS // REST) for more in (0, 1))
        self._first = np.maximum(first, MIN_HISTORY // scale.history)
        self._ends = np.cumsum(np.where(active, np.maximum(end - self._first, 0), 0))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, samples: Sequence[int]) -> SequenceBatch:
        """The batch of samples by their numbers in the day; `candidates` and `history` are items."""
        number = np.asarray(samples, dtype=np.int64)
        users = np.searchsorted(self._ends, number, side="right")
        at = self._ends[users] - number  # events from here to the end of the user's day
        day_end = self._first[users] + np.diff(self._ends, prepend=0)[users]
        told: list[tuple[NDArray[Any], ...]] = []
        none = np.empty(0, dtype=np.int64)
        for user, event in zip(users.tolist(), (day_end - at).tolist(), strict=True):
            items, kinds, listened = self.user(user)
            past = self._past(kinds, event)
            told.append((items[past], kinds[past], items[event : event + 1], listened[event : event + 1]))
        history, actions, candidates, labels = (np.concatenate(each) for each in zip([none] * 4, *told, strict=True))
        context = self._context(torch.from_numpy(users), torch.from_numpy(candidates), day_end - at)
        return assemble(
            sample=number, context=context, num_history=np.array([len(each[0]) for each in told], dtype=np.int64),
            history=history, actions=actions, num_candidates=np.ones(len(number), dtype=np.int64),
            candidates=candidates, labels=labels.astype(np.float32),
        )  # fmt: skip

    @lru_cache(maxsize=512)  # noqa: B019  (a stream lives as long as its program)
    def user(self, user: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Items, pools, and whether it would be heard to the end, of each event of a user."""
        rng, events = np.random.default_rng([self._seed, user, 1]), int(self.lengths[user])
        known = self._items.draw(rng, math.ceil(REPEATS * events))
        items = known[(rng.random(events) ** FAVOUR * len(known)).astype(np.int64)]
        listens = POOLS[LISTENED] + POOLS[SKIPPED]
        patience = rng.beta(SPREAD * POOLS[LISTENED] / listens, SPREAD * POOLS[SKIPPED] / listens)
        listened = rng.random(events) < patience
        other = rng.random(events) * sum(POOLS.values())
        none, liked = other < POOLS[0], other < POOLS[LIKED] + POOLS[0]
        kinds = np.select([none, liked, listened], [0, LIKED, LISTENED], SKIPPED)
        return items, kinds, listened

    def _past(self, kinds: NDArray[np.int64], event: int) -> NDArray[np.int64]:
        """The latest events of each pool before an event, in the order of time."""
        begin = max(0, event - SCANNED // self.scale.history)
        most = POOL_EVENTS // self.scale.history
        pools = [np.flatnonzero(kinds[begin:event] == pool)[-most:] for pool in (LISTENED, LIKED, SKIPPED)]
        return begin + np.sort(np.concatenate(pools))

    def _context(self, users: torch.Tensor, items: torch.Tensor, event: NDArray[np.int64]) -> NDArray[np.int64]:
        """(samples, 8) the user, and hashes of what is crossed."""
        parts = {name: rows_of(items, f"{name}_id", self.scale.rows_of(f"{name}_id")) for name in ("artist", "album")}
        hours = torch.from_numpy(event % 24)
        parts |= {"user": users, "hour": hours, "item": items, "is_organic": hours % 2}
        columns = [users]
        for table in CONTEXT[1:]:
            crossed = torch.zeros_like(users)
            for part in table.split("_x_"):
                crossed = fmix64_of(crossed ^ parts[part])
            columns.append((crossed & _POSITIVE) % self.scale.rows_of(table))
        return torch.stack(columns, dim=1).numpy()


def rows_of(items: torch.Tensor, table: str, rows: int) -> torch.Tensor:
    """Rows of the artists or albums of items, of a table of so many rows.

    A share of the items belongs to a few hot rows, evenly apart in the first eighth of the table; the others are spread
    over all of it by a hash. So the first owner of eight gets SKEW times the mean of all lookups.
    """
    name = fmix64_of(items + (SALT[table] << 40))
    draw, place = name & _HALF, (name >> 32) & _HALF
    block = rows // OWNERS
    few = min(HOT_ROWS, block)
    hot = draw < (SKEW[table] - 1) / (OWNERS - 1) * _HALF
    return torch.where(hot, place % few * (block // few), place % rows)
