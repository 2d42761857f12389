"""Make an assignment fit the memory caps, or say why it cannot."""

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenkeel.partitioning.bounds import bound_on_largest, crowding_bound
from evenkeel.partitioning.errors import ImpossiblePartitionError, PartitionNotFoundError
from evenkeel.partitioning.exchanging import exchange_from
from evenkeel.partitioning.exhaustive import least_overflow
from evenkeel.partitioning.problem import ROUNDING, Problem
from evenkeel.partitioning.sorting import ascending_order
from evenkeel.partitioning.starts import differenced, longest_first

COARSENESS = 1e-9  # relative, by which fractions in whole units may exceed a cap
PLACEMENTS = 30_000_000  # that a search through all assignments tries at most, about a tenth of a second


def _given(problem: Problem, units: float) -> float:
    """The memory that so many units are."""
    return float(np.ldexp(units, -problem.memory_exponent))


def _doubt(problem: Problem) -> int:
    """Units by which an assignment may seem to exceed the caps though it does not."""
    return problem.memory_error * (problem.terms.costs.size + problem.num_ranks)


def check_possible(problem: Problem) -> None:
    """Refuse what plainly cannot fit.

    Raises:
        ImpossiblePartitionError: If the samples need more than all ranks hold, or one more than any rank does.
    """
    terms = problem.terms
    if terms.memory.size == 0:
        return
    doubt = _doubt(problem)
    short = sum(terms.memory.tolist()) - sum(terms.caps.tolist())
    if short > doubt:
        needed, held = _given(problem, terms.memory.sum()), _given(problem, terms.caps.sum())
        raise ImpossiblePartitionError(
            f"memory adds up to {needed:g}, memory_caps to {held:g}: {_given(problem, short):g} short; "
            "raise memory_caps or take fewer or shorter samples",
            _given(problem, short),
        )
    largest, cap = int(terms.memory.argmax()), int(terms.caps.max())
    if terms.memory[largest] > cap + 2 * problem.memory_error:
        lacking = _given(problem, int(terms.memory[largest]) - cap)
        raise ImpossiblePartitionError(
            f"memory[{largest}] is {_given(problem, terms.memory[largest]):g}, the largest of memory_caps "
            f"{_given(problem, cap):g}: {lacking:g} short; raise that cap, shorten the sample, or let it be "
            "split over ranks (split)",
            lacking,
        )
    if int(terms.caps.min()) < cap:
        return
    order = ascending_order(terms.memory)
    fewest = int(terms.fewest.min())
    crowded = max(
        bound_on_largest(terms.memory, order, np.ones(terms.caps.size), terms.fewest, terms.most),
        crowding_bound(terms.memory, order, fewest, problem.num_ranks),
    )
    if crowded > cap * (1.0 + ROUNDING) + doubt:
        lacking = _given(problem, crowded - cap)
        raise ImpossiblePartitionError(
            f"whatever goes where, some rank must hold {_given(problem, crowded):g} of memory, and memory_caps are "
            f"{_given(problem, cap):g}: {lacking:g} short; raise memory_caps, let counts be 'free', or take shorter "
            "samples",
            lacking,
        )


def check_held(memory: ArrayLike, caps: ArrayLike, destinations: NDArray[np.int32]) -> None:
    """Checks an assignment against the caps in the numbers that were given, of which the units are roundings.

    Raises:
        PartitionNotFoundError: If a rank holds more than rounding explains: where some samples take many billion times
            the memory of others, units that hold them all are too coarse for the smallest.
    """
    held = np.asarray(caps, np.float64)
    used = np.bincount(destinations, weights=np.asarray(memory, np.float64), minlength=held.size)
    over = np.flatnonzero(used > held * (1.0 + COARSENESS))
    if over.size:
        rank = int(over[0])
        raise PartitionNotFoundError(
            f"no assignment within memory_caps was found: rank {rank} would hold {used[rank]:g} with a cap of "
            f"{held[rank]:g}; raise memory_caps or let counts be 'free'"
        )


def fit_memory(problem: Problem, start: NDArray[np.int32]) -> NDArray[np.int32]:
    """The start if it is within the caps, else the nearest assignment found that is.

    Memory is searched as costs are, with the caps as limits; small instances are searched through to the end.

    Raises:
        ImpossiblePartitionError: If there is provably none.
        PartitionNotFoundError: If the search ended without one.
    """
    terms = problem.terms
    if terms.memory.size == 0:
        return start
    of_memory = replace(
        problem,
        terms=terms._replace(
            costs=terms.memory, memory=terms.memory[:0], limits=terms.caps, speeds=np.ones(terms.caps.size)
        ),
        order=ascending_order(terms.memory),
    )
    best, least = exchange_from(of_memory, start, plain=True, effort=2)
    for method, effort in ((longest_first, 8), (differenced, 4)):
        if least <= 0:
            return best
        other, overload = exchange_from(of_memory, method(of_memory), plain=False, effort=effort)
        if overload < least:
            best, least = other, overload
    if least <= 0:
        return best
    return _search_through(of_memory, best)


def _search_through(problem: Problem, best: NDArray[np.int32]) -> NDArray[np.int32]:
    terms = problem.terms
    used = np.zeros(problem.num_ranks, np.int64)
    np.add.at(used, best, terms.costs)
    known = int(np.maximum(used - terms.limits, 0).sum())
    heaviest_first = problem.order[::-1]
    ranks = np.empty(best.size, np.int32)
    least, proven = least_overflow(
        terms.costs[heaviest_first], terms.limits, terms.fewest, terms.most, PLACEMENTS, known, ranks
    )
    if least <= 0:
        destinations = np.empty_like(best)
        destinations[heaviest_first] = ranks
        return destinations
    lacking = _given(problem, least)
    if proven and least > _doubt(problem):
        raise ImpossiblePartitionError(
            f"no assignment is within memory_caps: the best of all exceeds them by {lacking:g}; raise memory_caps"
            " or let counts be 'free'",
            lacking,
        )
    raise PartitionNotFoundError(
        f"no assignment within memory_caps was found: the best exceeds them by {lacking:g}; raise memory_caps"
        " or let counts be 'free'"
    )
