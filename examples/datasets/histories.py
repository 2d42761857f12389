"""Histories read from files, and batches made from them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from examples.datasets.batch import SequenceBatch, assemble
from trainer_client.checks import check_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Histories:
    """What the users of a data set did, in the order of time.

    Attributes:
        users: (users,) int64, the file's user ids, ascending.
        offsets: (users + 1,) int64, where each user's events begin.
        items: (events,) int64, item numbers from 0.
        item_ids: (items,) int64, the file's id of each item number, ascending.
        actions: (events,) int64, the rating or a bit set of actions.
        liked: (events,) bool, what a ranking model shall predict.
        times: (events,) int64, in the file's unit.
        context: (users, features) int64, features of the user; zeros for users that the file of users lacks.
    """

    users: NDArray[np.int64]
    offsets: NDArray[np.int64]
    items: NDArray[np.int64]
    item_ids: NDArray[np.int64]
    actions: NDArray[np.int64]
    liked: NDArray[np.bool_]
    times: NDArray[np.int64]
    context: NDArray[np.int64]

    @property
    def num_items(self) -> int:
        """Size of the catalogue."""
        return len(self.item_ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(users,) events of each user."""
        return np.diff(self.offsets)


def group_by_user(
    *,
    users: NDArray[np.int64],
    items: NDArray[np.int64],
    actions: NDArray[np.int64],
    liked: NDArray[np.bool_],
    times: NDArray[np.int64],
    context: dict[int, list[int]] | None = None,
) -> Histories:
    """Sorts events by user and time; events of the same time stay in the order of the file."""
    order = np.lexsort((times, users))
    known, starts = np.unique(users[order], return_index=True)
    item_ids, numbers = np.unique(items, return_inverse=True)
    width = max((len(row) for row in context.values()), default=0) if context else 0
    rows = np.zeros((len(known), width), dtype=np.int64)
    for index, user in enumerate(known.tolist()):
        if context and user in context:
            rows[index, : len(context[user])] = context[user]
    return Histories(
        users=known,
        offsets=np.append(starts, len(users)).astype(np.int64),
        items=numbers.reshape(-1)[order].astype(np.int64),
        item_ids=item_ids,
        actions=actions[order],
        liked=liked[order],
        times=times[order],
        context=rows,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryBatches:
    """One rank's batches: each user once an iteration, the last events as candidates, those before as history.

    Attributes:
        histories: The data set.
        batch_size: Samples per batch; the last batch of a rank may be smaller.
        rank: This rank.
        world_size: Ranks that share the users; each gets every world_size-th of the shuffled users.
        num_candidates: Candidates of each user; users with fewer events have fewer.
        max_history: Older events are left out.
        seed: Of the order of the users.
        epoch: Shuffles anew.
    """

    histories: Histories
    batch_size: int = 32
    rank: int = 0
    world_size: int = 1
    num_candidates: int = 1
    max_history: int = 4096
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        check_whole(self, batch_size=1, world_size=1, num_candidates=1, max_history=0, seed=0, epoch=0, rank=0)
        if self.rank >= self.world_size:
            raise ValueError(f"rank is {self.rank}; use 0 to {self.world_size - 1} in a world of {self.world_size}")

    def _mine(self) -> NDArray[np.int64]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.histories.users))
        return order[self.rank :: self.world_size]

    def __len__(self) -> int:
        return math.ceil(len(self._mine()) / self.batch_size)

    def __iter__(self) -> Iterator[SequenceBatch]:
        mine = self._mine()
        for first in range(0, len(mine), self.batch_size):
            yield self._batch(mine[first : first + self.batch_size])

    def _batch(self, users: NDArray[np.int64]) -> SequenceBatch:
        data = self.histories
        ends = data.offsets[users + 1]
        num_candidates = np.minimum(data.lengths[users], self.num_candidates)
        middles = ends - num_candidates
        begins = np.maximum(data.offsets[users], middles - self.max_history)
        past, future = ranges(begins, middles), ranges(middles, ends)
        return assemble(
            sample=users.astype(np.int64),
            context=data.context[users],
            num_history=middles - begins,
            history=data.items[past],
            actions=data.actions[past],
            num_candidates=num_candidates,
            candidates=data.items[future],
            labels=data.liked[future].astype(np.float32),
        )


def ranges(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers of all half-open ranges, one range after the other."""
    counts = ends - begins
    firsts = np.repeat(begins - np.cumsum(counts) + counts, counts)
    numbers: NDArray[np.int64] = firsts + np.arange(int(counts.sum()))
    return numbers
