"""Clicks with a structure that can be learnt: what a ranking model is to find out is known exactly."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from examples.datasets.histories import Histories, group_by_user
from examples.datasets.lengths import Lengths, LogNormalLengths
from trainer_client.checks import check_number, check_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class ClickOptions:
    """A world of users and items.

    Users and items have tastes, normal vectors. A user sees items that are popular or to the user's taste, and clicks
    with a probability that rises with the agreement of the tastes and with the item's quality.

    Attributes:
        num_users: Users.
        num_items: Size of the catalogue.
        lengths: Distribution of the events of a user; shorter ones than 2 become that.
        num_tastes: Dimensions of the taste.
        exposure: How strongly taste decides what a user sees.
        agreement: How strongly taste decides about clicks.
        quality: Deviation of the quality over items.
        exponent: Of the popularity, a power law.
        seed: Of everything.
    """

    num_users: int = 4000
    num_items: int = 2000
    lengths: Lengths = field(default_factory=lambda: LogNormalLengths(mean=60, sigma=1.2, maximum=1024))
    num_tastes: int = 2
    exposure: float = 0.7
    agreement: float = 2.5
    quality: float = 0.3
    exponent: float = 0.7
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole(self, num_users=1, num_items=1, num_tastes=1, seed=0)
        for name in ("exposure", "agreement", "quality", "exponent"):
            check_number(name, getattr(self, name), least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clicks:
    """Drawn clicks.

    Attributes:
        histories: What users saw; an action is 1 for a click, else 0, which is also what a model shall predict.
        probabilities: (events,) that the event would be a click: no model can predict better.
    """

    histories: Histories
    probabilities: NDArray[np.float64]


def draw_clicks(options: ClickOptions | None = None) -> Clicks:
    """A data set of clicks, the same on every machine."""
    chosen = options or ClickOptions()
    rng = np.random.default_rng(chosen.seed)
    lengths = np.maximum(chosen.lengths.draw(rng, chosen.num_users), 2)
    tastes = rng.normal(size=(chosen.num_users, chosen.num_tastes)) / chosen.num_tastes**0.5
    traits = rng.normal(size=(chosen.num_items, chosen.num_tastes))
    quality = chosen.quality * rng.normal(size=chosen.num_items)
    popularity = rng.permutation(np.arange(1, chosen.num_items + 1.0)) ** -chosen.exponent
    items, probabilities = [], []
    for taste, length in zip(tastes, lengths.tolist(), strict=True):
        match = traits @ taste
        seen = np.cumsum(popularity * np.exp(chosen.exposure * match))
        drawn = np.minimum(np.searchsorted(seen, rng.random(length) * seen[-1], side="right"), chosen.num_items - 1)
        score = chosen.agreement * (match - chosen.exposure) + quality
        items.append(drawn)
        probabilities.append(1 / (1 + np.exp(-score[drawn])))
    likely = np.concatenate(probabilities)
    clicked = rng.random(len(likely)) < likely
    histories = group_by_user(
        users=np.repeat(np.arange(chosen.num_users, dtype=np.int64), lengths),
        items=np.concatenate(items).astype(np.int64),
        actions=clicked.astype(np.int64),
        liked=clicked,
        times=np.arange(len(likely), dtype=np.int64),
    )
    return Clicks(histories=histories, probabilities=likely)
