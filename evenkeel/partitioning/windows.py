"""Windows of batches: heavy samples of several batches meet in one, where they can balance each other.

A sample heavier than a rank's share keeps all other ranks waiting in its batch. In a window of K batches such samples
are exchanged against light ones until they stand in as few batches as possible, side by side on different ranks. Each
batch keeps its number of samples, and no batch's lower bound rises.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.rounds import Batches, RoundOptions, RoundPlan, RoundSamples, is_uneven, partition_batches

GIANT = 1.02  # lower bound over mean load above which a batch cannot be balanced by itself
ENOUGH = 1e-3  # share of a batch's room below which it counts as full
# How full the batches of heavy samples are made, as a share of what their heaviest sample leaves room for. The fullest
# has the least sum of bounds; the next is tried where its partition misses its bounds.
FILLS = (1.0, 0.95)
MISSED = 1.01
# A batch that is full to the brim of heavy samples is the hardest to partition: the last promille would cost most of
# the time and gain nothing beside what meeting gains.
TOLERANCE = 5e-3

Floats = NDArray[np.float64]


def gather_heavy(samples: RoundSamples, options: RoundOptions, found: Batches) -> Batches:
    """Batches between which samples are exchanged, if their steps take less time.

    Samples change their batch only where some batch has a lower bound above 1.02 times its mean load or fits no memory
    caps, and only when the sum over the batches of the largest load falls by that, and by more than the additional
    moves take.
    """
    loaded = samples.steps
    assert loaded is not None
    if options.stay or samples.num_ranks < 2 or not any(is_uneven(plan, options, GIANT) for plan in found.plans):
        return found
    speeds = np.array(options.speeds, np.float64) if options.speeds else np.ones(samples.num_ranks)
    quick = replace(options, tolerance=max(options.tolerance, TOLERANCE))
    for fill in FILLS:
        steps = regroup(samples.costs, loaded, samples.num_batches, speeds, equal=options.counts == "equal", fill=fill)
        if (steps == loaded).all():
            continue
        other = partition_batches(samples, quick, steps)
        if _time(other, options) < _time(found, options):
            found = other
        reachable = sum(plan.figures.lower_bound for plan in other.plans if isinstance(plan, RoundPlan))
        if _time(other, replace(options, move_price=0.0)) <= MISSED * reachable:
            break
    return found


def _time(batches: Batches, options: RoundOptions) -> float:
    """The time of the window's steps and of its moves, in units of cost; see `partition`. Infinite without a plan."""
    plans = [plan.figures for plan in batches.plans if isinstance(plan, RoundPlan)]
    if len(plans) < len(batches.plans):
        return math.inf
    size, moved = (sum(getattr(one, name) for one in plans) for name in ("size", "moved_size"))
    steps, bounds = (sum(getattr(one, name) for one in plans) for name in ("max_load_after", "lower_bound"))
    return float(steps + options.move_price * (moved / size if size else 0.0) * bounds)


def _company(num_samples: int, num_ranks: int, *, equal: bool) -> int:
    """Samples that must share the heaviest one's rank."""
    return max(num_samples // num_ranks - 1, 0) if equal else 0


def _bounds(ascending: list[float], speeds: Floats, *, equal: bool) -> tuple[float, float]:
    """The mean load over speed, and the larger of it and of the heaviest sample with its lightest company."""
    mean, alone = sum(ascending) / float(speeds.sum()), 0.0  # Python numbers, so that integer sums are exact
    if ascending:
        company = ascending[: _company(len(ascending), len(speeds), equal=equal)]
        alone = (ascending[-1] + sum(company)) / float(speeds.max())
    return mean, max(mean, alone)


def regroup(
    costs: NDArray[np.int64] | NDArray[np.float64],
    steps: NDArray[np.int32],
    num_steps: int,
    speeds: Floats,
    *,
    equal: bool,
    fill: float = 1.0,
) -> NDArray[np.int32]:
    """Exchanges heavy samples against light ones between batches, so that as few batches as possible hold any.

    The batch of the largest bound takes the heaviest samples of the others while its load stays within `fill` of what
    its bound leaves room for, then the next one, until every bound is near its mean. Batches keep their numbers of
    samples, and no bound rises. Deterministic; at most 4 × ranks exchanges a batch.
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
    speeds: Floats,
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
