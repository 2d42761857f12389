"""Samples of a ranking task: an event of a user is to be predicted from the events before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from examples.datasets.batch import SequenceBatch, assemble
from examples.datasets.histories import Histories, ranges
from trainer_client.checks import check_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """A map-style data set; each sample is an event, with its item as the candidate and those before as the history.

    Attributes:
        histories: The data set.
        users: (n,) int64, whose event it is: a place in `histories.users`.
        events: (n,) int64, the event: a place in `histories.items`.
        max_history: Older events are left out.
    """

    histories: Histories
    users: NDArray[np.int64]
    events: NDArray[np.int64]
    max_history: int = 1024

    def __post_init__(self) -> None:
        check_whole(self, max_history=0)

    def __len__(self) -> int:
        return len(self.events)

    @property
    def num_history(self) -> NDArray[np.int64]:
        """(n,) items in the history of each sample."""
        before: NDArray[np.int64] = self.events - self.histories.offsets[self.users]
        return before.clip(max=self.max_history)

    def batch(self, samples: Sequence[int] | NDArray[np.int64]) -> SequenceBatch:
        """The batch of some samples; a sample's number is its place here."""
        data, chosen = self.histories, np.asarray(samples, dtype=np.int64)
        events, num_history = self.events[chosen], self.num_history[chosen]
        past = ranges(events - num_history, events)
        return assemble(
            sample=chosen,
            context=data.context[self.users[chosen]],
            num_history=num_history,
            history=data.items[past],
            actions=data.actions[past],
            num_candidates=np.ones(len(chosen), dtype=np.int64),
            candidates=data.items[events],
            labels=data.liked[events].astype(np.float32),
        )


def split_last(
    histories: Histories, *, per_user: int = 8, max_history: int = 1024, seed: int = 0
) -> tuple[Predictions, Predictions]:
    """Samples to train on and to test on: each user's last event is a test, some of those before are trained.

    Args:
        histories: The data set; users with fewer than three events are left out.
        per_user: Events of each user to train on, at most; drawn from all but the first and the last.
        max_history: Older events are left out of a sample.
        seed: Of the draw.

    Returns:
        Training and test samples.
    """
    rng = np.random.default_rng(seed)
    firsts, lasts = histories.offsets[:-1], histories.offsets[1:] - 1
    able = np.flatnonzero(lasts - firsts >= 2)
    users, events = [], []
    for user in able.tolist():
        between = np.arange(firsts[user] + 1, lasts[user])
        drawn = np.sort(rng.permutation(between)[:per_user])
        users.append(np.full(len(drawn), user, dtype=np.int64))
        events.append(drawn)
    none = [np.zeros(0, dtype=np.int64)]
    train = Predictions(
        histories=histories,
        users=np.concatenate(users or none),
        events=np.concatenate(events or none),
        max_history=max_history,
    )
    return train, Predictions(histories=histories, users=able, events=lasts[able], max_history=max_history)
