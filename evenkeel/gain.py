"""What balancing would gain a job, from the lengths of its samples alone: nothing is trained, and no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.refinements import plan_round
from evenkeel.partitioning.rounds import RoundOptions, RoundPlan, RoundSamples
from evenkeel.partitioning.splits import MOST, SHARE, SpanCosts, SplitOptions, table_of

WINDOW = 8
"""Batches of a window, and of what is planned at a time."""

_MOST_SAMPLES, _MOST_BATCHES = 1 << 18, 1 << 10  # that are planned; of batches so small, more change figures by 1 %
_MOST_SPLIT, _SPLIT_RANKS = 2, 256  # windows whose samples are split, which takes far longer; of more ranks, one
_WAYS = {  # and how to take them, the simplest first
    "balanced": "wrap the loader, BalancedLoader(loader, Balancer.embedded(), cost=…): docs/start/tutorial.md",
    f"windows of {WINDOW}": f"wrap the loader, with BalanceOptions(window={WINDOW}): docs/train/windows.md",
    "split samples": "wrap the loader, and split samples (what their exchange takes is not counted): "
    "docs/train/giants.md",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What one way of balancing comes to.

    Attributes:
        way: Its name.
        remedy: How to take it.
        speed_up: By how much the time of a step would fall that takes what its heaviest rank takes, as a ratio.
        imbalance: Largest load over the mean.
        moved_share: Of the bytes, those that change rank.
        loads: (ranks,) loads over their mean, the heaviest rank of each batch first, mean over the batches.
    """

    way: str
    remedy: str = ""
    speed_up: float
    imbalance: float
    moved_share: float
    loads: NDArray[np.float64]


def estimate_gain(
    lengths: NDArray[np.int64],
    *,
    ranks: int,
    batch: int,
    linear: float = 1.0,
    pairs: float = 0.0,
    progress: Callable[[float], None] = lambda _done: None,
) -> list[Gain]:
    """What balancing would come to: as loaded, balanced, with windows, with samples that may be split.

    Args:
        lengths: (n,) positions of each sample, in the order of loading; at least one batch of all ranks.
        ranks: Number of ranks.
        batch: Samples of a rank's batch.
        linear: Cost of a position.
        pairs: Cost of a position's look at an earlier one, or itself.
        progress: Called with the share that is done.

    Raises:
        ValueError: If there are fewer samples than one batch of all ranks has, or lengths are negative.
    """
    size = ranks * batch
    if len(lengths) < size:
        raise ValueError(f"there are {len(lengths)} lengths; give {size} at least, or a smaller batch or fewer ranks")
    if lengths.min() < 0:
        raise ValueError(f"a length is {lengths.min()}; give lengths of 0 or more")
    windows = list(_windows(lengths, size))
    plans: dict[str, list[RoundPlan]] = {way: [] for way in _WAYS}
    balanced, in_windows, split = plans.values()
    to_split = _evenly(len(windows), _MOST_SPLIT if ranks < _SPLIT_RANKS else 1)
    for number, window in enumerate(windows):
        samples = _samples(window.reshape(-1, ranks, batch), linear, pairs)
        in_windows.append(plan_round(samples, RoundOptions()))
        for some in window.reshape(-1, 1, ranks, batch):
            samples = _samples(some, linear, pairs)
            balanced.append(plan_round(samples, RoundOptions()))
            if number in to_split:
                split.append(plan_round(samples, RoundOptions(split=SplitOptions())))
        progress((number + 1) / len(windows))
    loaded = np.concatenate([plan.loads_before for plan in balanced])
    gains = [Gain(way="as loaded", speed_up=1.0, imbalance=_imbalance(loaded), moved_share=0.0, loads=_ordered(loaded))]
    for way, made in plans.items():
        before = np.concatenate([plan.loads_before for plan in made])
        loads = np.concatenate([plan.loads_after for plan in made])
        gains.append(
            Gain(
                way=way,
                remedy=_WAYS[way],
                speed_up=gains[0].imbalance / max(_imbalance(loads, before), 1e-300) if loads.any() else 1.0,
                imbalance=_imbalance(loads),
                moved_share=sum(plan.figures.moved_size for plan in made) / max(sum(p.figures.size for p in made), 1),
                loads=_ordered(loads),
            )
        )
    return gains


def _windows(lengths: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    """Windows of whole batches, evenly over all lengths, of so many samples in all as are worth planning."""
    batches = len(lengths) // size
    steps = min(WINDOW, batches)
    count = max(1, min(batches // steps, _MOST_SAMPLES // (size * steps), _MOST_BATCHES // steps))
    for first in _evenly(batches - steps + 1, count):
        yield lengths[first * size : (first + steps) * size]


def _evenly(count: int, most: int) -> list[int]:
    """So many of `count` positions, evenly from the first to the last."""
    positions: list[int] = np.linspace(0, count - 1, min(count, most)).astype(np.int64).tolist()
    return positions


def _samples(lengths: NDArray[np.int64], linear: float, pairs: float) -> RoundSamples:
    """A round of (batches, ranks, samples) lengths; a rank offers to split its heaviest, a good part of its batch."""
    batches, ranks, each = lengths.shape
    rows = lengths.swapaxes(0, 1).reshape(ranks * batches, each)
    spans = SpanCosts.of(rows.ravel(), per_position=linear, per_pair=pairs)
    costs = spans.whole.reshape(rows.shape)
    order = np.argsort(np.argsort(-costs, axis=1, kind="stable"), axis=1)
    heavy = (costs >= SHARE * costs.sum(axis=1, keepdims=True)) & (rows > 1) & (order < MOST)
    which = np.flatnonzero(heavy)
    return RoundSamples(
        batch_sizes=np.full((ranks, batches), each, np.int64),
        costs=spans.whole,
        lengths=rows.reshape(-1, 1),
        divisible=table_of(spans.take(which), which, np.zeros(which.size)),
        roles=np.ones(1, np.int64),
    )


def _imbalance(loads: NDArray[np.float64], whole: NDArray[np.float64] | None = None) -> float:
    """Largest load over the mean, of `whole` samples where these are split; mean over the batches by their time."""
    return float(loads.max(axis=1).sum() / max((loads if whole is None else whole).mean(axis=1).sum(), 1e-300))


def _ordered(loads: NDArray[np.float64]) -> NDArray[np.float64]:
    ordered: NDArray[np.float64] = -np.sort(-loads, axis=1).mean(axis=0) / max(float(loads.mean()), 1e-300)
    return ordered
