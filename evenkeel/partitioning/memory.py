"""Memory caps: assignments are made to fit them, or it is said why that cannot be."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from evenkeel.partitioning.compile import ZERO, kernel
from evenkeel.partitioning.karmarkar_karp import differenced
from evenkeel.partitioning.local_search import exchange_from
from evenkeel.partitioning.lpt import longest_first
from evenkeel.partitioning.problem import (
    EXACT,
    MEMORY_CAPS,
    ROUNDING,
    Floats,
    ImpossiblePartitionError,
    Integers,
    PartitionNotFoundError,
    Problem,
    Ranks,
    ascending_order,
    bound_on_largest,
    counts_and_loads,
    crowding_bound,
    exponent_for,
    numbers,
    scaled,
)

ENOUGH_ROOM = 1 << 62  # for all units twice, so that more need not be counted
COARSENESS = 1e-9  # relative, by which fractions in whole units may exceed a cap
PLACEMENTS = 30_000_000  # that a search through all assignments tries at most, a quarter of a second for a few ranks


def _memory_units(memory: Floats, caps: Floats) -> tuple[Integers, Integers, int, int]:
    """Memory and caps in whole units, the exponent of their unit, and how many units each may be off by, 0 or 1."""
    exponent = exponent_for(float(memory.max(initial=0.0)), memory.size)
    exact, room = scaled(memory, exponent), scaled(caps, exponent)
    units = np.ceil(exact).astype(np.int64)
    units[(units == 0) & (memory > 0)] = 1  # it may be below the smallest double; no rank with a cap of 0 holds it
    # Sums beyond 2**53 are not exact: what was given as integers is rounded to float64 by then.
    whole = bool((memory == np.floor(memory)).all()) and float(memory.sum()) <= EXACT
    room = room if whole else room * (1.0 + ROUNDING)
    total = int(units.sum())  # which a cap need not exceed; as a float64 it might be less
    limits = np.full(caps.size, total)
    below = room < float(total)
    limits[below] = np.floor(room[below]).astype(np.int64)
    return units, limits, exponent, 0 if whole and bool((exact == units).all()) else 1


def with_caps(
    problem: Problem,
    memory: ArrayLike | None,
    caps: ArrayLike | None,
    compiled: bool = True,
    placements: int | None = None,
) -> Problem:
    """The same problem with memory caps, if there are any, of which so many placements are tried; see `partition`."""
    if memory is None or caps is None:
        return problem
    room = numbers("memory_caps", caps, problem.num_ranks, "rank", MEMORY_CAPS)
    amounts = numbers("memory", memory, problem.costs.size, "sample")
    if not amounts.size:
        return problem
    units, limits, exponent, error = _memory_units(amounts, room)
    capped = replace(
        problem,
        arrays=problem.arrays._replace(memory=units, caps=limits),
        memory_exponent=exponent,
        memory_error=error,
        fit=partial(fit_memory, placements=PLACEMENTS if placements is None else placements),
    )
    _check_possible(capped, compiled)
    return capped


def _amount(problem: Problem, units: float) -> float:
    """The memory that so many units are."""
    return float(np.ldexp(units, -problem.memory_exponent))


def _doubt(problem: Problem) -> int:
    """Units by which an assignment may seem to exceed the caps though it does not."""
    return problem.memory_error * (problem.arrays.costs.size + problem.num_ranks)


def _check_possible(problem: Problem, compiled: bool) -> None:
    """Refuses what plainly cannot fit."""
    memory, caps, fewest = problem.arrays.memory, problem.arrays.caps, problem.arrays.fewest
    short = sum(memory.tolist()) - sum(caps.tolist())
    if short > _doubt(problem):
        raise ImpossiblePartitionError(
            f"memory adds up to {_amount(problem, memory.sum()):g}, memory_caps to {_amount(problem, caps.sum()):g}: "
            f"{_amount(problem, short):g} short; raise memory_caps or take fewer or shorter samples",
            _amount(problem, short),
        )
    largest, cap = int(memory.argmax()), int(caps.max())
    if memory[largest] > cap + 2 * problem.memory_error:
        lacking = _amount(problem, int(memory[largest]) - cap)
        raise ImpossiblePartitionError(
            f"memory[{largest}] is {_amount(problem, memory[largest]):g}, the largest of memory_caps "
            f"{_amount(problem, cap):g}: {lacking:g} short; raise that cap, shorten the sample, or let it be "
            "split over ranks (split)",
            lacking,
        )
    if int(caps.min()) < cap or not compiled:
        return
    order = ascending_order(memory)
    crowded = max(
        bound_on_largest(memory, order, np.ones(caps.size), fewest, problem.arrays.most),
        crowding_bound(memory, order, int(fewest.min()), problem.num_ranks),
    )
    if crowded > cap * (1.0 + ROUNDING) + _doubt(problem):
        lacking = _amount(problem, crowded - cap)
        raise ImpossiblePartitionError(
            f"whatever goes where, some rank must hold {_amount(problem, crowded):g} of memory, and memory_caps are "
            f"{_amount(problem, cap):g}: {lacking:g} short; raise memory_caps, let counts be 'free', or take shorter "
            "samples",
            lacking,
        )


def check_fits(memory: ArrayLike | None, caps: ArrayLike | None, destinations: Ranks) -> None:
    """Checks an assignment against the caps in the numbers that were given, of which the units are roundings."""
    if memory is None or caps is None:
        return
    room = np.asarray(caps, np.float64)
    used = np.bincount(destinations, weights=np.asarray(memory, np.float64), minlength=room.size)
    over = np.flatnonzero(used > room * (1.0 + COARSENESS))
    if over.size:
        rank = int(over[0])
        raise PartitionNotFoundError(
            f"no assignment within memory_caps was found: rank {rank} would hold {used[rank]:g} with a cap of "
            f"{room[rank]:g}; raise memory_caps or let counts be 'free'"
        )


def by_memory(problem: Problem) -> Problem:
    """The problem of spreading memory, as costs are, with the caps as limits."""
    arrays = problem.arrays
    arrays = arrays._replace(
        costs=arrays.memory, memory=arrays.memory[:0], limits=arrays.caps, speeds=np.ones(arrays.caps.size)
    )
    return replace(problem, arrays=arrays, order=ascending_order(arrays.costs))


def fit_memory(problem: Problem, start: Ranks, placements: int) -> Ranks:
    """The start if it is within the caps, else the nearest assignment found that is.

    Memory is searched as costs are, with the caps as limits; small instances are searched through to the end.
    """
    of_memory = by_memory(problem)
    best, least = exchange_from(of_memory, start, effort=2)
    for method, effort in ((longest_first, 8), (differenced, 4)):
        if least <= 0:
            return best
        other, overload = exchange_from(of_memory, method(of_memory), plain=False, effort=effort)
        if overload < least:
            best, least = other, overload
    return best if least <= 0 else _search_through(of_memory, best, placements)


def _search_through(problem: Problem, best: Ranks, placements: int) -> Ranks:
    arrays, heaviest_first = problem.arrays, problem.order[::-1]
    used = counts_and_loads(arrays.costs, best, problem.num_ranks)[1]
    overflow = int(np.maximum(used - arrays.limits, 0).sum())
    ranks = np.empty(best.size, np.int32)
    least, proven = least_overflow(
        arrays.costs[heaviest_first], arrays.limits, arrays.fewest, arrays.most, placements, overflow, ranks
    )
    if least <= 0:
        destinations = np.empty_like(best)
        destinations[heaviest_first] = ranks
        return destinations
    lacking = _amount(problem, least)
    remedy = "raise memory_caps or let counts be 'free'"
    if proven and least > _doubt(problem):
        raise ImpossiblePartitionError(
            f"no assignment is within memory_caps: the best of all exceeds them by {lacking:g}; {remedy}", lacking
        )
    raise PartitionNotFoundError(
        f"no assignment within memory_caps was found: the best exceeds them by {lacking:g}; {remedy}"
    )


@kernel
def least_overflow(
    memory: Integers, caps: Integers, fewest: Integers, most: Integers, budget: int, overflow: int, best: Ranks
) -> tuple[int, bool]:
    """The least memory above the caps that any assignment has, by branch and bound over descending samples.

    `overflow` is that of an assignment that there is, `budget` how many placements are tried, and `best` takes the
    ranks of a better one. Returns the least found, and whether that is proven to be the least there is; it ends at 0.
    """
    n, num_ranks = memory.size, caps.size
    used, counts = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    ranks, over = np.full(n, -1, np.int32), np.zeros(n + 1, np.int64)  # overflow of the first i samples
    left, missing, room = memory.sum(), fewest.sum(), ZERO  # memory to place, samples that ranks lack, and their room
    for cap in caps:
        room = min(room + int(cap), ENOUGH_ROOM)
    depth, added, lacked = 0, ZERO, False
    while depth >= 0:
        rank, size = np.int64(ranks[depth]), memory[depth]
        if rank >= 0:  # take the sample back
            used[rank] -= size
            counts[rank] -= 1
            left += size
            room += size - (over[depth + 1] - over[depth])
            missing += counts[rank] < fewest[rank]
        rank += 1
        while rank < num_ranks:
            budget -= 1 + int(rank) // 8
            is_new = counts[rank] < most[rank]
            for r in range(rank):  # a rank in the same state has been tried
                if not is_new or (
                    used[r] == used[rank] and counts[r] == counts[rank] and caps[r] == caps[rank]
                    and fewest[r] == fewest[rank] and most[r] == most[rank]
                ):  # fmt: skip
                    is_new = False
                    break
            if is_new:
                added = max(0, min(size, used[rank] + size - caps[rank]))
                lacked = counts[rank] < fewest[rank]
                least = over[depth] + added + max(0, (left - size) - (room - (size - added)))
                if missing - lacked < n - depth and least < overflow:
                    break
            rank += 1
        if budget < 0:
            return overflow, False
        ranks[depth] = rank if rank < num_ranks else -1
        if rank == num_ranks:
            depth -= 1
            continue
        used[rank] += size
        counts[rank] += 1
        left -= size
        room -= size - added
        missing -= lacked
        over[depth + 1] = over[depth] + added
        depth += 1
        if depth == n:
            depth -= 1
            overflow = over[n]
            best[:] = ranks
            if overflow <= 0:
                break
    return overflow, True
