"""Arguments of `partition`, checked and brought to what the kernels know: whole units, few dtypes, bounds and limits.

Costs and memory become whole units, since sums of integers are exact in every order: no rounding ever decides a tie.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenkeel.partitioning.compile import kernel, plain_array
from evenkeel.partitioning.exchange import Arrays, Floats, Integers, Ranks
from evenkeel.partitioning.ranges import (
    EXACT,
    MAX_RANKS,
    MAX_SAMPLES,
    MAX_SUM,
    MAX_TOTAL,
    MOVE_PRICE,
    SPEEDS,
    TOLERANCE,
)
from evenkeel.partitioning.sorting import ascending_order

COUNTS = ("equal", "free")
ROUNDING = 1e-12  # relative, by which sums of fractions may exceed a limit or a cap
BITS = 61  # all units of a batch add up to less than two to this
CROWDED = 64  # heavy samples per rank up to which `crowding_bound` looks


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a strategy gets; costs and memory in whole units.

    Attributes:
        arrays: Samples, ranks and constraints, with limits at `bound` times one plus the tolerance.
        num_ranks: Number of ranks.
        costs: (n,) costs as they were given, int64 or float64.
        cost_exponent: Power of two of a cost's unit.
        memory_exponent: Power of two of the unit of memory and caps.
        memory_error: Units by which each sample's memory may be too high and each cap too low; 0 where all are whole.
        order: (n,) int32, sorts the costs ascending.
        interchangeable: Whether all ranks have the same speed and memory cap.
        free: Whether ranks may hold any number of samples.
        num_nodes: Number of distinct nodes.
        num_fuller: Ranks that take `arrays.most` samples, the others taking one less; negative when `fewest` and `most`
            alone say it.
        home_counts: (num_ranks,) samples at each home.
        home_loads: (num_ranks,) load of each home.
        bound: No assignment has a smaller maximum of load over speed.
        tolerance: Share of the bound by which a limit lies above it.
        move_price: Share of the bound that moving all samples would take.
    """

    arrays: Arrays
    num_ranks: int
    costs: Integers | Floats
    cost_exponent: int
    memory_exponent: int
    memory_error: int
    order: Ranks
    interchangeable: bool
    free: bool
    num_nodes: int
    num_fuller: int
    home_counts: Integers
    home_loads: Integers
    bound: float
    tolerance: float
    move_price: float

    @property
    def lower_bound(self) -> float:
        """The bound in the costs that were given."""
        return float(np.ldexp(self.bound, -self.cost_exponent))


class Arithmetic(NamedTuple):
    """What a problem is made with: compiled kernels, or what stands for them while these are compiled.

    Attributes:
        ascending_order: Sorts integers.
        counts_and_loads: Adds up the samples of each rank.
        range_of: Smallest and largest of at least one integer.
        first_bad: Index of the first number that is negative, NaN or, unless allowed, infinite; -1 if there is none,
            and the largest.
        bound_on_largest: What no assignment is below.
        limits: Loads of the ranks at a bound and a tolerance.
        moved: All sizes; samples that leave their homes, their sizes, and those that leave their nodes.
    """

    ascending_order: Callable[[Integers], Ranks]
    counts_and_loads: Callable[[Integers, Ranks, int], tuple[Integers, Integers]]
    range_of: Callable[[NDArray[Any]], tuple[int, int]]
    first_bad: Callable[[Floats, bool], tuple[int, float]]
    bound_on_largest: Callable[[Integers, Ranks, Floats, Integers, Integers], float]
    limits: Callable[[Integers, Floats, float, float], Integers]
    moved: Callable[[Floats, Ranks, Ranks, Ranks], tuple[float, int, float, float]]


def exponent_for(largest: float, count: int) -> int:
    """The power of two by which `count` numbers of up to `largest` are scaled to use all bits of their sum."""
    return BITS - int(np.frexp(largest)[1]) - max(count - 1, 0).bit_length() if largest > 0 else 0


def _scaled(values: Floats, exponent: int) -> Floats:
    """The values times two to the `exponent`; exact, but for what falls below the smallest double."""
    half = exponent // 2  # two steps, since the whole power may itself be beyond doubles
    with np.errstate(over="ignore"):  # caps may be far beyond all samples
        return values * 2.0**half * 2.0 ** (exponent - half)


def whole_units(values: Floats, exponent: int) -> Integers:
    """(n,) int64 nearest whole numbers of the scaled values; within 2**-42 of the sum for a million of them."""
    units: NDArray[Any] = np.rint(_scaled(values, exponent))
    return units.astype(np.int64)


def _cost_units(costs: NDArray[Any]) -> tuple[Integers, int]:
    if costs.dtype == np.int64:
        return costs, 0
    exponent = exponent_for(float(costs.max(initial=0.0)), costs.size)
    return whole_units(costs, exponent), exponent


def _memory_units(memory: Floats, caps: Floats) -> tuple[Integers, Integers, int, int]:
    """Memory and caps in whole units, the exponent of their unit, and how many units each may be off by, 0 or 1."""
    exponent = exponent_for(float(memory.max(initial=0.0)), memory.size)
    exact, room = _scaled(memory, exponent), _scaled(caps, exponent)
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


def _index_of(field: str, array: NDArray[Any], bad: NDArray[np.bool_]) -> str:
    index = int(np.flatnonzero(bad)[0])
    return f"{field}[{index}] is {array[index]}"


def _vector(field: str, values: ArrayLike, length: int | None, what: str) -> NDArray[Any]:
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{field} has shape {array.shape}; pass a one-dimensional array")
    if length is not None and array.size != length:
        raise ValueError(f"{field} has {array.size} entries; pass {length}, one per {what}")
    if array.dtype.kind not in "iuf" and (array.size or array.dtype.kind != "f"):
        raise ValueError(f"{field} has dtype {array.dtype}; pass int64 or float64 numbers")
    return array


@kernel
def _range_of(values: NDArray[Any]) -> tuple[int, int]:
    low = high = values[0]
    for value in values:
        low = min(low, value)
        high = max(high, value)
    return low, high


@kernel
def _first_bad(values: Floats, infinite: bool) -> tuple[int, float]:
    largest = 0.0
    for i in range(values.size):
        value = values[i]
        if not value >= 0 or (value == np.inf and not infinite):
            return i, value
        largest = max(largest, value)
    return -1, largest


def _numbers(
    field: str, values: ArrayLike, length: int, what: str, by: Arithmetic, *, infinite: bool = False
) -> Floats:
    array = plain_array(_vector(field, values, length, what), np.float64)
    bad, largest = by.first_bad(array, infinite)
    if bad >= 0:
        raise ValueError(f"{field}[{bad}] is {array[bad]}; pass {'' if infinite else 'finite '}numbers, 0 or more")
    if not infinite and largest * array.size > MAX_SUM and sum(array.tolist()) > MAX_SUM:
        raise ValueError(f"{field} add up to {sum(array.tolist()):g}; scale them, so that it is at most {MAX_SUM:g}")
    return array


def _speeds(values: ArrayLike, num_ranks: int) -> Floats:
    array = plain_array(_vector("speeds", values, num_ranks, "rank"), np.float64)
    bad = ~((array >= SPEEDS.least) & (array <= SPEEDS.most))
    if bad.any():
        raise ValueError(f"{_index_of('speeds', array, bad)}; pass numbers from {SPEEDS}")
    return array


def _costs(values: ArrayLike, by: Arithmetic) -> Integers | Floats:
    array = _vector("costs", values, None, "sample")
    if array.size > MAX_SAMPLES:
        raise ValueError(f"costs has {array.size} entries; pass at most {MAX_SAMPLES}")
    if array.dtype.kind == "f":
        return _numbers("costs", array, array.size, "sample", by)
    if array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{_index_of('costs', array, array == array.max())}, beyond int64; pass float64 costs")
    costs = plain_array(array, np.int64)
    if costs.size:
        least, largest = by.range_of(costs)
        if least < 0:
            raise ValueError(f"{_index_of('costs', costs, costs < 0)}; pass numbers, 0 or more")
        if largest * costs.size >= MAX_TOTAL and sum(costs.tolist()) >= MAX_TOTAL:
            raise ValueError(f"costs add up to {sum(costs.tolist())}, 2**62 or more; scale them or pass float64 costs")
    return costs


def _ranks_of(field: str, values: ArrayLike, length: int, what: str, limit: int | None, by: Arithmetic) -> Ranks:
    array = _vector(field, values, length, what)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{field} has dtype {array.dtype}; pass int32 numbers")
    if array.size:
        array = plain_array(array, array.dtype if array.dtype in (np.int32, np.int64) else np.int64)
        low, high = by.range_of(array)
        top = np.iinfo(np.int32).max if limit is None else limit - 1
        if low < 0 or high > top:
            allowed = f"a rank, 0 to {top}" if limit is not None else "a number, 0 or more"
            raise ValueError(f"{_index_of(field, array, (array < 0) | (array > top))}; it must be {allowed}")
    return plain_array(array, np.int32)


@kernel
def counts_and_loads(costs: Integers, ranks: Ranks, num_ranks: int) -> tuple[Integers, Integers]:
    """(num_ranks,) samples and (num_ranks,) summed cost of each rank."""
    counts, loads = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    for i in range(costs.size):
        counts[ranks[i]] += 1
        loads[ranks[i]] += costs[i]
    return counts, loads


@kernel
def bound_on_largest(costs: Integers, order: Ranks, speeds: Floats, fewest: Integers, most: Integers) -> float:
    """The larger of two bounds on max(load / speed) of whole samples.

    All work spread over all ranks, each as fast as it is; and the heaviest sample with the lightest others that must
    fill its rank, on the rank where that is done first. `order` sorts `costs` ascending.
    """
    n = costs.size
    if n == 0:
        return 0.0
    below = np.zeros(n, costs.dtype)  # summed cost of the i lightest
    for i in range(n - 1):
        below[i + 1] = below[i] + costs[order[i]]
    heaviest = costs[order[n - 1]]
    total = below[n - 1] + heaviest
    speed = 0.0
    alone = np.inf
    for r in range(speeds.size):
        speed += speeds[r]
        if most[r] > 0:
            alone = min(alone, (heaviest + below[max(fewest[r] - 1, 0)]) / speeds[r])
    return float(max(total / speed, alone))


@kernel
def crowding_bound(costs: Integers, order: Ranks, fewest: int, num_ranks: int) -> float:
    """What equal ranks cannot beat because the heavy samples do not divide evenly over them.

    Of the k·num_ranks + s heaviest samples, j ranks with more than k of them each hold k·j + s at least, since the
    others hold k each at most. So these j carry the lightest k·j + s of the heavy ones, and the lightest samples of all
    to fill them up to `fewest`; one of them has the mean of that. The j that makes it least counts, of all k and s.
    """
    n = costs.size
    below = np.zeros(n + 1, np.float64)
    for i in range(n):
        below[i + 1] = below[i] + costs[order[i]]
    bound = 0.0
    for k in range(1, min(CROWDED, (n - 1) // num_ranks) + 1):
        surplus = 1
        while surplus <= num_ranks and k * num_ranks + surplus <= n:
            first = n - (k * num_ranks + surplus)
            least = np.inf
            for j in range(1, surplus + 1):
                heavy = k * j + surplus
                fill = min(max(fewest * j - heavy, 0), first)
                least = min(least, (below[first + heavy] - below[first] + below[fill]) / j)
            bound = max(bound, least)
            surplus += max(1, surplus // 4)
    return bound


@kernel
def _limits(costs: Integers, speeds: Floats, bound: float, tolerance: float) -> Integers:
    """(num_ranks,) the loads at `bound` and the tolerance, at most the whole load."""
    total = 0
    for cost in costs:
        total += cost
    limits = np.empty(speeds.size, np.int64)
    for r in range(speeds.size):
        # The bound is that of a slow rank, whose whole load may be far less than a fast one could do: the product may
        # be beyond int64.
        limit = max(np.floor(bound * (1.0 + tolerance) * speeds[r]), np.ceil(bound * speeds[r]))
        limits[r] = np.int64(limit) if limit < np.float64(total) else total
    return limits


@kernel
def _moved(sizes: Floats, homes: Ranks, nodes: Ranks, destinations: Ranks) -> tuple[float, int, float, float]:
    total, samples, size, between = 0.0, 0, 0.0, 0.0
    for i in range(destinations.size):
        rank, home = destinations[i], homes[i]
        total += sizes[i]
        if rank != home:
            samples += 1
            size += sizes[i]
            if nodes[rank] != nodes[home]:
                between += sizes[i]
    return total, samples, size, between


COMPILED = Arithmetic(
    ascending_order=ascending_order,
    counts_and_loads=counts_and_loads,
    range_of=_range_of,
    first_bad=_first_bad,
    bound_on_largest=bound_on_largest,
    limits=_limits,
    moved=_moved,
)


def with_limits(arrays: Arrays, largest: float, tolerance: float) -> Arrays:
    """The same with each rank's limit at `largest * (1 + tolerance)` times its speed, at most the whole load."""
    return arrays._replace(limits=_limits(arrays.costs, arrays.speeds, largest, tolerance))


def with_crowding(problem: Problem) -> Problem:
    """The same problem with limits that heavy samples leave possible, where the plain bound cannot be reached."""
    arrays = problem.arrays
    if not bool((arrays.speeds == arrays.speeds[0]).all()):
        return problem
    crowded = crowding_bound(arrays.costs, problem.order, int(arrays.fewest.min()), problem.num_ranks)
    bound = max(problem.bound, crowded / float(arrays.speeds[0]))
    return replace(problem, arrays=with_limits(arrays, bound, problem.tolerance))


def _check_options(num_ranks: int, counts: str, tolerance: float, move_price: float) -> int:
    try:
        num_ranks = operator.index(num_ranks)
    except TypeError:
        raise ValueError(f"num_ranks is {num_ranks!r}; pass a positive integer") from None
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ValueError(f"num_ranks is {num_ranks}; pass a positive integer up to {MAX_RANKS}")
    if counts not in COUNTS:
        raise ValueError(f"counts is {counts!r}; pass one of {', '.join(map(repr, COUNTS))}")
    if not TOLERANCE.holds(tolerance):
        raise ValueError(f"tolerance is {tolerance!r}; pass a share of the lower bound, {TOLERANCE}")
    if not MOVE_PRICE.holds(move_price):
        raise ValueError(f"move_price is {move_price!r}; pass a share of a step's time, {MOVE_PRICE}")
    return num_ranks


def make_problem(
    costs: ArrayLike,
    homes: ArrayLike,
    num_ranks: int,
    *,
    sizes: ArrayLike | None,
    counts: str,
    tolerance: float,
    move_price: float,
    speeds: ArrayLike | None,
    memory: ArrayLike | None,
    memory_caps: ArrayLike | None,
    nodes: ArrayLike | None,
    by: Arithmetic = COMPILED,
) -> Problem:
    """Checks all arguments of `partition`; see there. `by` is what computes."""
    num_ranks = _check_options(num_ranks, counts, tolerance, move_price)
    if (memory is None) != (memory_caps is None):
        given, missing = ("memory", "memory_caps") if memory_caps is None else ("memory_caps", "memory")
        raise ValueError(f"{given} is given without {missing}; pass both or neither")
    all_costs = _costs(costs, by)
    n = all_costs.size
    units, cost_exponent = _cost_units(all_costs)
    if all_costs.dtype == np.float64:
        tolerance = max(tolerance, ROUNDING)
    all_homes = _ranks_of("homes", homes, n, "sample", num_ranks, by)
    all_sizes = all_costs.astype(np.float64) if sizes is None else _numbers("sizes", sizes, n, "sample", by)
    all_speeds = np.ones(num_ranks) if speeds is None else _speeds(speeds, num_ranks)
    all_memory, caps, memory_exponent, memory_error = np.empty(0, np.int64), np.empty(0, np.int64), 0, 0
    if memory is not None and memory_caps is not None:
        given_caps = _numbers("memory_caps", memory_caps, num_ranks, "rank", by, infinite=True)
        all_memory, caps, memory_exponent, memory_error = _memory_units(
            _numbers("memory", memory, n, "sample", by), given_caps
        )
    num_nodes, all_nodes = 1, np.zeros(num_ranks, np.int32)
    if nodes is not None:
        distinct, places = np.unique(_ranks_of("nodes", nodes, num_ranks, "rank", None, by), return_inverse=True)
        num_nodes, all_nodes = distinct.size, places.astype(np.int32)
    home_counts, home_loads = by.counts_and_loads(units, all_homes, num_ranks)
    fewest_at_home, most_at_home = by.range_of(home_counts)
    floor, remainder = divmod(n, num_ranks)
    num_fuller = -1
    if counts == "free":
        fewest, most = np.zeros(num_ranks, np.int64), np.full(num_ranks, n, np.int64)
    elif most_at_home - fewest_at_home <= 1:
        fewest, most = home_counts, home_counts
    else:
        fewest = np.full(num_ranks, floor, np.int64)
        most = fewest + (remainder > 0)
        num_fuller = remainder or -1
    order = by.ascending_order(units)
    bound = by.bound_on_largest(units, order, all_speeds, fewest, most)
    arrays = Arrays(
        costs=units, sizes=all_sizes, homes=all_homes, memory=all_memory, caps=caps, fewest=fewest, most=most,
        speeds=all_speeds, nodes=all_nodes, limits=by.limits(units, all_speeds, bound, tolerance),
    )  # fmt: skip
    alike = speeds is None or bool((all_speeds == all_speeds[0]).all())
    return Problem(
        arrays=arrays,
        num_ranks=num_ranks,
        costs=all_costs,
        cost_exponent=cost_exponent,
        memory_exponent=memory_exponent,
        memory_error=memory_error,
        order=order,
        interchangeable=alike and (memory_caps is None or bool((caps == caps[0]).all())),
        free=counts == "free",
        num_nodes=num_nodes,
        num_fuller=num_fuller,
        home_counts=home_counts,
        home_loads=home_loads,
        bound=bound,
        tolerance=tolerance,
        move_price=float(move_price),
    )
