"""Memory caps: assignments are made to fit them, or it is said why that cannot be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from evenkeel.partitioning.karmarkar_karp import differenced
from evenkeel.partitioning.local_search import exchange_from
from evenkeel.partitioning.lpt import longest_first, place
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
    crowding_bound,
    exponent_for,
    numbers,
    scaled,
)

ORDERS, FEW = 16, 1 << 10  # in which samples are placed in turn, where no other way fits; of so many in all
GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of which are spread evenly between whole numbers
COARSENESS = 1e-9  # relative, by which fractions in whole units may exceed a cap


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


def with_caps(problem: Problem, memory: ArrayLike, caps: ArrayLike, compiled: bool = True) -> Problem:
    """The same problem with memory caps; see `partition`."""
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
        fit=fit_memory,
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
        bound_on_largest(memory, order, np.ones(caps.size), int(fewest.min())),
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


def check_fits(memory: ArrayLike, caps: ArrayLike, destinations: Ranks) -> None:
    """Checks an assignment against the caps in the numbers that were given, of which the units are roundings."""
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


def _placed_in_order(number: int, problem: Problem) -> Ranks:
    """(n,) rank of each sample, if one after the other goes to the least loaded rank in an order of this number."""
    placed = np.full(problem.order.size, -1, np.int32)
    order = np.argsort(number * GOLDEN * np.arange(placed.size) % 1.0, kind="stable")
    place(replace(problem, order=order.astype(np.int32)), placed)
    return placed


def fit_memory(problem: Problem, start: Ranks) -> Ranks:
    """The start if it is within the caps, else the nearest assignment found that is.

    Memory is searched as costs are, with the caps as limits. Of few samples, some orders of placing them may fit alone.
    """
    of_memory = by_memory(problem)
    methods: list[Callable[[Problem], Ranks]] = [longest_first, differenced]
    methods += [partial(_placed_in_order, number) for number in range(1, 1 + min(ORDERS, FEW // start.size))]
    best, least = exchange_from(of_memory, start, effort=8)
    for method in methods:
        if least > 0:
            other, overload = exchange_from(of_memory, method(of_memory), plain=False, effort=8)
            if overload < least:
                best, least = other, overload
    if least > 0:
        raise PartitionNotFoundError(
            f"no assignment within memory_caps was found: the best exceeds one by {_amount(problem, least):g}; raise "
            "memory_caps or let counts be 'free'"
        )
    return best
