"""Partition of a window of batches: heavy samples of several batches meet in one, where they can balance each other.

A sample heavier than a rank's share keeps all other ranks waiting in its batch. In a window of K batches such samples
are exchanged against light ones until they stand in as few batches as possible, side by side on different ranks. Each
batch keeps its number of samples, and no batch's lower bound rises.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenkeel.partitioning.api import DEFAULT_MOVE_PRICE, DEFAULT_TOLERANCE, Options, Partition, evenness, partition
from evenkeel.partitioning.errors import PartitionError
from evenkeel.partitioning.slices import checked_steps

GIANT = 1.02  # lower bound over mean load above which a batch cannot be balanced by itself
ENOUGH = 1e-3  # share of a batch's room below which it counts as full
# How full the batches of heavy samples are made, as a share of what their heaviest sample leaves room for. The fullest
# has the least sum of bounds; the next is tried where its partition misses its bounds.
FILLS = (1.0, 0.95)
MISSED = 1.01
# A batch that is full to the brim of heavy samples is the hardest to partition: the last promille would cost most of
# the time and gain nothing beside what meeting gains.
TOLERANCE = 5e-3
_OF_SAMPLES = ("sizes", "memory")  # of the options of `partition`


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPartition:
    """Which batch of the window, and which rank, trains each sample.

    Attributes:
        steps: (n,) int32, the batch of the window that trains each sample; None: all are of one batch.
        loaded: (n,) int32, the batch in which it was loaded; None as well.
        destinations: (n,) int32, the rank that trains it.
        partitions: One per batch, over its samples in their order; what they say of loads at home is of the samples
            that were loaded in the batch.
    """

    steps: NDArray[np.int32] | None
    loaded: NDArray[np.int32] | None
    destinations: NDArray[np.int32]
    partitions: tuple[Partition, ...]

    @property
    def changed(self) -> int:
        """Samples that are trained in another batch than the one they were loaded in."""
        return 0 if self.steps is None or self.loaded is None else int(np.count_nonzero(self.steps != self.loaded))

    @property
    def largest(self) -> tuple[float, ...]:
        """Per batch, the largest load over speed."""
        return tuple(evenness(part.loads, part.speeds)[0] for part in self.partitions)

    @property
    def total(self) -> float:
        """Sum over the batches of the largest load over speed: the time of the window's steps, in units of cost."""
        return sum(self.largest)

    @property
    def moved_share(self) -> float:
        """Share of the samples' sizes that changes rank."""
        size = sum(part.size for part in self.partitions)
        return sum(part.moved_size for part in self.partitions) / size if size > 0 else 0.0

    def time(self, move_price: float) -> float:
        """The time of the window's steps and of its moves, in units of cost; see `partition`."""
        return self.total + move_price * self.moved_share * sum(part.lower_bound for part in self.partitions)

    @property
    def moved_samples(self) -> int:
        """Samples that change rank."""
        return sum(each.moved_samples for each in self.partitions)


def partition_window(
    costs: ArrayLike,
    homes: ArrayLike,
    steps: ArrayLike | None,
    num_ranks: int,
    num_steps: int,
    **options: Unpack[Options],
) -> WindowPartition:
    """Assign each sample of a window to one of its batches and a rank.

    Samples change their batch only where some batch has a lower bound above 1.02 times its mean load, and only when the
    sum over the batches of the largest load falls by that, and by more than the additional moves take. Otherwise the
    result is `partition` of each batch.

    Args:
        costs: (n,) as for `partition`.
        homes: (n,) rank that holds each sample.
        steps: (n,) batch of the window, 0 to `num_steps` - 1, in which each sample was loaded; None: in the only one.
        num_ranks: Number of ranks.
        num_steps: Number of batches K.
        **options: As for `partition`; the caps hold in each batch, and with `stay` samples do not change their batch.

    Raises:
        PartitionError: If no assignment within the memory caps was found.
        ValueError: If an argument is wrong; the message names it and its remedy.
    """
    all_costs, all_homes = np.asarray(costs), np.asarray(homes)
    loaded = checked_steps(steps, all_costs.size, num_steps)
    if loaded is None:
        only = partition(all_costs, all_homes, num_ranks, **options)
        return WindowPartition(steps=None, loaded=None, destinations=only.destinations, partitions=(only,))
    chosen: dict[str, Any] = {**options}
    of_samples = {name: np.asarray(chosen[name]) for name in _OF_SAMPLES if chosen.get(name) is not None}

    def attempt(which: NDArray[np.int32], **changes: Any) -> WindowPartition | PartitionError:
        destinations = np.empty(all_costs.size, np.int32)
        parts = []
        for step in range(num_steps):
            own = np.flatnonzero(which == step)
            how = {**chosen, **changes, **{name: values[own] for name, values in of_samples.items()}}
            try:
                parts.append(partition(all_costs[own], all_homes[own], num_ranks, **how))
            except PartitionError as error:
                return error
            destinations[own] = parts[-1].destinations
        return WindowPartition(steps=which, loaded=loaded, destinations=destinations, partitions=tuple(parts))

    best = attempt(loaded)  # checks all arguments; only the caps may have failed it
    if num_steps < 2 or num_ranks < 2 or chosen.get("stay"):
        return _found(best, all_costs, all_homes, num_ranks)
    speeds, equal = chosen.get("speeds"), chosen.get("counts", "equal") == "equal"
    weights = np.ones(num_ranks) if speeds is None else np.asarray(speeds, np.float64)
    bounds = step_bounds(all_costs, loaded, num_steps, weights, equal=equal)
    if not (bounds.bound > GIANT * bounds.mean).any():
        return _found(best, all_costs, all_homes, num_ranks)
    price = chosen.get("move_price", DEFAULT_MOVE_PRICE)
    for fill in FILLS:
        which = regroup(all_costs, loaded, num_steps, weights, equal=equal, fill=fill)
        if (which == loaded).all():
            continue
        found = attempt(which, tolerance=max(chosen.get("tolerance", DEFAULT_TOLERANCE), TOLERANCE))
        if isinstance(found, PartitionError):
            continue
        if isinstance(best, PartitionError) or found.time(price) < best.time(price):
            best = found
        reachable = step_bounds(all_costs, which, num_steps, weights, equal=equal).bound.sum()
        if found.total <= MISSED * reachable:
            break
    return _found(best, all_costs, all_homes, num_ranks)


def _found(
    best: WindowPartition | PartitionError, costs: NDArray[Any], homes: NDArray[Any], num_ranks: int
) -> WindowPartition:
    if isinstance(best, PartitionError):
        raise best
    if best.loaded is None or not best.changed:
        return best
    parts = best.partitions
    before = np.bincount(best.loaded * num_ranks + homes, costs, len(parts) * num_ranks).reshape(len(parts), -1)
    return replace(
        best,
        partitions=tuple(replace(part, home_loads=loads) for part, loads in zip(parts, before, strict=True)),
    )


class StepBounds(NamedTuple):
    """Per batch of a window: float64 (num_steps,) each, in units of cost over speed.

    Attributes:
        mean: Load over the sum of speeds.
        bound: No assignment of whole samples has a smaller maximum of load over speed.
    """

    mean: NDArray[np.float64]
    bound: NDArray[np.float64]


def _company(num_samples: int, num_ranks: int, *, equal: bool) -> int:
    """Samples that must share the heaviest one's rank."""
    return max(num_samples // num_ranks - 1, 0) if equal else 0


def _bounds(ascending: list[float], speeds: NDArray[np.float64], *, equal: bool) -> tuple[float, float]:
    """The mean load over speed, and the larger of it and of the heaviest sample with its lightest company."""
    mean, alone = sum(ascending) / float(speeds.sum()), 0.0  # Python numbers, so that integer sums are exact
    if ascending:
        company = ascending[: _company(len(ascending), len(speeds), equal=equal)]
        alone = (ascending[-1] + sum(company)) / float(speeds.max())
    return mean, max(mean, alone)


def step_bounds(
    costs: NDArray[Any], steps: NDArray[np.int32], num_steps: int, speeds: NDArray[np.float64], *, equal: bool
) -> StepBounds:
    """What balancing each batch for itself can reach at best; arguments as for `regroup`."""
    batches = [np.sort(costs[steps == step]).tolist() for step in range(num_steps)]
    mean, bound = np.array([_bounds(each, speeds, equal=equal) for each in batches], np.float64).reshape(-1, 2).T
    return StepBounds(mean=mean, bound=bound)


def regroup(
    costs: NDArray[np.int64] | NDArray[np.float64],
    steps: NDArray[np.int32],
    num_steps: int,
    speeds: NDArray[np.float64],
    *,
    equal: bool,
    fill: float = 1.0,
) -> NDArray[np.int32]:
    """Exchanges heavy samples against light ones between batches, so that as few batches as possible hold any.

    The batch of the largest bound takes the heaviest samples of the others while its load stays within `fill` of what
    its bound leaves room for, then the next one, until every bound is near its mean. Batches keep their numbers of
    samples, and no bound rises. Deterministic; at most 4 × ranks exchanges a batch.

    Args:
        costs: (n,) work of each sample.
        steps: (n,) int32, batch of each sample as loaded.
        num_steps: Number of batches.
        speeds: (ranks,) relative speeds.
        equal: Whether ranks hold equal numbers of samples.
        fill: Share of its bound up to which a batch's mean load is raised.

    Returns:
        (n,) int32, batch of each sample.
    """
    result = steps.copy()
    batches = [
        sorted(zip(costs[own].tolist(), own.tolist(), strict=True))
        for own in (np.flatnonzero(steps == step) for step in range(num_steps))
    ]
    unfilled = list(range(num_steps))
    while len(unfilled) > 1:
        bounds = {k: _bounds([cost for cost, _ in batches[k]], speeds, equal=equal) for k in unfilled}
        host = max(unfilled, key=lambda k: bounds[k][1])  # of equal ones the first
        unfilled.remove(host)
        mean, bound = bounds[host]
        if bound > mean * (1.0 + ENOUGH):  # else it is full: nothing fits, and nothing of it needs to go before others
            _fill(batches, host, unfilled, bound, speeds, fill, equal=equal, result=result)
    return result


def _fill(
    batches: list[list[tuple[float, int]]],
    host: int,
    donors: list[int],
    bound: float,
    speeds: NDArray[np.float64],
    fill: float,
    *,
    equal: bool,
    result: NDArray[np.int32],
) -> None:
    """Brings heavy samples of the donors into the host, heaviest first, each against the lightest that is not needed.

    The lightest samples, which must keep its heaviest company, stay: the host's bound stays what it is.
    """
    num_ranks, taker = len(speeds), batches[host]
    room = bound * float(speeds.sum()) * fill - sum(cost for cost, _ in taker)
    enough = ENOUGH * bound * float(speeds.sum())
    half = bound * float(speeds.max()) / 2
    singles = sum(cost > half for cost, _ in taker)  # at most one of these fits on a rank
    light = _company(len(taker), num_ranks, equal=equal)
    tops = {k: len(batches[k]) - 1 for k in donors}  # donors' samples above have been looked at
    for _ in range(4 * num_ranks):
        if room < enough or light >= len(taker) or not tops:
            break
        donor = max(tops, key=lambda k: batches[k][tops[k]][0] if tops[k] >= 0 else -1.0)
        top, giver, lighter = tops[donor], batches[donor], taker[light]
        if top < 0 or giver[top][0] <= lighter[0]:
            del tops[donor]
            continue
        heavier = giver[top]
        ceiling = room + lighter[0] if singles < num_ranks else min(room + lighter[0], half)
        if heavier[0] > ceiling:
            # Where a donor's heaviest does not fit, its bound stays: lighter ones of it only lower its mean.
            tops[donor] = bisect_right(giver, ceiling, 0, top, key=lambda sample: sample[0]) - 1
            continue
        singles += heavier[0] > half
        room -= heavier[0] - lighter[0]
        giver[top], taker[light] = lighter, heavier
        result[heavier[1]], result[lighter[1]] = host, donor
        light += 1
        tops[donor] = top - 1
    for k in (host, *donors):
        batches[k].sort()
