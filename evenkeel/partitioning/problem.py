"""Arguments of `partition`, checked and brought to what the kernels know: whole units, few dtypes, bounds and limits.

Costs and memory become whole units, since sums of integers are exact in every order: no rounding ever decides a tie.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from evenkeel.partitioning.compile import kernel
from evenkeel.partitioning.exchange import Arrays, Floats, Integers, Ranks


class Range(NamedTuple):
    """Numbers from `least` to `most`, both included."""

    least: float
    most: float

    def holds(self, value: float) -> bool:
        """Whether the value is one of them; NaN is not."""
        return self.least <= value <= self.most

    def __str__(self) -> str:
        return f"{self.least:g} to {self.most:g}"


TOLERANCE = Range(0.0, 1.0)  # share of the lower bound: at 1, loads may be twice of it
MOVE_PRICE = Range(0.0, 1000.0)  # of a step's time: what moving all samples takes
SPEEDS = Range(1e-6, 1e6)
MEMORY_CAPS = Range(0.0, float("inf"))
SPLIT_ABOVE = Range(0.0, 1000.0)  # of an even division
SPLIT_PRICE = Range(0.0, 1e100)  # of a position's keys and values, and of a step, in units of cost
MAX_RANKS = 1 << 16
MAX_SAMPLES = (1 << 31) - 1  # indices have 32 bits
MAX_TOTAL = 1 << 62  # above all sums of integers, so that they are exact
EXACT = 2.0**53  # up to which sums of integers are exact as float64
MAX_SUM = 1e300  # above all sums of fractions, so that no product of theirs is beyond float64


def share_of_total(num_ranks: int) -> float:
    """What one rank's amounts may add up to: a little less than its part of `MAX_TOTAL`, since sums are rounded."""
    return MAX_TOTAL * (1.0 - 1e-9) / num_ranks


COUNTS = ("equal", "free")
ROUNDING = 1e-12  # relative, by which sums of fractions may exceed a limit or a cap
BITS = 61  # all units of a batch add up to less than two to this
_NOTHING = np.empty(0, np.int64)
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
        fit: Brings an assignment within the memory caps, where there are any.
    """

    arrays: Arrays
    num_ranks: int
    costs: Integers | Floats
    cost_exponent: int
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
    memory_exponent: int = 0
    memory_error: int = 0
    fit: Callable[[Problem, Ranks], Ranks] = lambda _, start: start

    @property
    def lower_bound(self) -> float:
        """The bound in the costs that were given."""
        return float(np.ldexp(self.bound, -self.cost_exponent))


class Arithmetic(NamedTuple):
    """What a problem is made with: compiled kernels, or what stands for them while these are compiled."""

    ascending_order: Callable[[Integers], Ranks]
    counts_and_loads: Callable[[Integers, Ranks, int], tuple[Integers, Integers]]
    bound_on_largest: Callable[[Integers, Ranks, Floats, Integers, Integers], float]
    limits: Callable[[Integers, Floats, float, float], Integers]
    moved: Callable[[Floats, Ranks, Ranks, Ranks], tuple[float, int, float, float]]


def exponent_for(largest: float, count: int) -> int:
    """The power of two by which `count` numbers of up to `largest` are scaled to use all bits of their sum."""
    return BITS - int(np.frexp(largest)[1]) - max(count - 1, 0).bit_length() if largest > 0 else 0


def scaled(values: Floats, exponent: int) -> Floats:
    """The values times two to the `exponent`; exact, but for what falls below the smallest double."""
    half = exponent // 2  # two steps, since the whole power may itself be beyond doubles
    with np.errstate(over="ignore"):  # caps may be far beyond all samples
        return values * 2.0**half * 2.0 ** (exponent - half)


def whole_units(values: Floats, exponent: int) -> Integers:
    """(n,) int64 nearest whole numbers of the scaled values; within 2**-42 of the sum for a million of them."""
    units: NDArray[Any] = np.rint(scaled(values, exponent))
    return units.astype(np.int64)


def _cost_units(costs: NDArray[Any]) -> tuple[Integers, int]:
    if costs.dtype == np.int64:
        return costs, 0
    exponent = exponent_for(float(costs.max(initial=0.0)), costs.size)
    return whole_units(costs, exponent), exponent


def plain_array(array: NDArray[Any], dtype: DTypeLike) -> NDArray[Any]:
    """The array as kernels are compiled for: of `dtype`, contiguous, aligned and writable; copied unless it is."""
    if array.dtype == dtype and array.flags.carray:
        return array
    return np.array(array, dtype, order="C")


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


def numbers(field: str, values: ArrayLike, length: int, what: str, *, infinite: bool = False) -> Floats:
    """(length,) float64 amounts, 0 or more."""
    array = plain_array(_vector(field, values, length, what), np.float64)
    if not array.size:
        return array
    least, largest = float(array.min()), float(array.max())  # NaN if any is
    if not (least >= 0 and (largest < np.inf or (infinite and largest == np.inf))):
        bad = _index_of(field, array, ~((array >= 0) & ((array < np.inf) | infinite)))
        raise ValueError(f"{bad}; pass {'' if infinite else 'finite '}numbers, 0 or more")
    if not infinite and largest * array.size > MAX_SUM and sum(array.tolist()) > MAX_SUM:
        raise ValueError(f"{field} add up to {sum(array.tolist()):g}; scale them, so that it is at most {MAX_SUM:g}")
    return array


def _speeds(values: ArrayLike, num_ranks: int) -> Floats:
    array = plain_array(_vector("speeds", values, num_ranks, "rank"), np.float64)
    bad = ~((array >= SPEEDS.least) & (array <= SPEEDS.most))
    if bad.any():
        raise ValueError(f"{_index_of('speeds', array, bad)}; pass numbers from {SPEEDS}")
    return array


def _costs(values: ArrayLike) -> Integers | Floats:
    array = _vector("costs", values, None, "sample")
    if array.size > MAX_SAMPLES:
        raise ValueError(f"costs has {array.size} entries; pass at most {MAX_SAMPLES}")
    if array.dtype.kind == "f":
        return numbers("costs", array, array.size, "sample")
    if array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{_index_of('costs', array, array == array.max())}, beyond int64; pass float64 costs")
    costs = plain_array(array, np.int64)
    if costs.size:
        least, largest = int(costs.min()), int(costs.max())
        if least < 0:
            raise ValueError(f"{_index_of('costs', costs, costs < 0)}; pass numbers, 0 or more")
        if largest * costs.size >= MAX_TOTAL and sum(costs.tolist()) >= MAX_TOTAL:
            raise ValueError(f"costs add up to {sum(costs.tolist())}, 2**62 or more; scale them or pass float64 costs")
    return costs


def _ranks_of(field: str, values: ArrayLike, length: int, what: str, limit: int | None) -> Ranks:
    array = _vector(field, values, length, what)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{field} has dtype {array.dtype}; pass int32 numbers")
    if array.size:
        low, high = int(array.min()), int(array.max())
        top = np.iinfo(np.int32).max if limit is None else limit - 1
        if low < 0 or high > top:
            allowed = f"a rank, 0 to {top}" if limit is not None else "a number, 0 or more"
            raise ValueError(f"{_index_of(field, array, (array < 0) | (array > top))}; it must be {allowed}")
    return plain_array(array, np.int32)


@kernel
def ascending_order(values: NDArray[np.int64]) -> NDArray[np.int32]:
    """(n,) int32 indices that sort the values ascending, read as unsigned numbers, equal ones by index."""
    n = values.size
    keys, order = np.empty(n, np.uint64), np.empty(n, np.int32)
    spare_keys, spare_order = np.empty(n, np.uint64), np.empty(n, np.int32)
    varying = np.uint64(0)
    for i in range(n):
        keys[i] = values[i]
        order[i] = i
        varying |= keys[i] ^ keys[0]
    width = np.uint64(11 if n >= 8192 else 8)
    radix = 1 << width
    mask, shift = np.uint64(radix - 1), np.uint64(0)
    begin = np.empty(radix, np.int64)
    while shift < np.uint64(64) and (varying >> shift) != np.uint64(0):
        if (varying >> shift) & mask != np.uint64(0):  # digits that all keys share are skipped
            begin[:] = 0
            for i in range(n):
                begin[(keys[i] >> shift) & mask] += 1
            place = 0
            for digit in range(radix):
                count = begin[digit]
                begin[digit] = place
                place += count
            for i in range(n):
                digit_of_i = (keys[i] >> shift) & mask
                place = begin[digit_of_i]
                begin[digit_of_i] = place + 1
                spare_keys[place] = keys[i]
                spare_order[place] = order[i]
            keys, spare_keys = spare_keys, keys
            order, spare_order = spare_order, order
        shift += width
    return order


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
    nodes: ArrayLike | None,
    by: Arithmetic = COMPILED,
) -> Problem:
    """Checks all arguments of `partition`; see there. `by` is what computes."""
    num_ranks = _check_options(num_ranks, counts, tolerance, move_price)
    all_costs = _costs(costs)
    n = all_costs.size
    units, cost_exponent = _cost_units(all_costs)
    if all_costs.dtype == np.float64:
        tolerance = max(tolerance, ROUNDING)
    all_homes = _ranks_of("homes", homes, n, "sample", num_ranks)
    all_sizes = all_costs.astype(np.float64) if sizes is None else numbers("sizes", sizes, n, "sample")
    all_speeds = np.ones(num_ranks) if speeds is None else _speeds(speeds, num_ranks)
    num_nodes, all_nodes = 1, np.zeros(num_ranks, np.int32)
    if nodes is not None:
        distinct, places = np.unique(_ranks_of("nodes", nodes, num_ranks, "rank", None), return_inverse=True)
        num_nodes, all_nodes = distinct.size, places.astype(np.int32)
    home_counts, home_loads = by.counts_and_loads(units, all_homes, num_ranks)
    fewest_at_home, most_at_home = int(home_counts.min()), int(home_counts.max())
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
        costs=units, sizes=all_sizes, homes=all_homes, memory=_NOTHING, caps=_NOTHING, fewest=fewest, most=most,
        speeds=all_speeds, nodes=all_nodes, limits=by.limits(units, all_speeds, bound, tolerance),
    )  # fmt: skip
    return Problem(
        arrays=arrays,
        num_ranks=num_ranks,
        costs=all_costs,
        cost_exponent=cost_exponent,
        order=order,
        interchangeable=speeds is None or bool((all_speeds == all_speeds[0]).all()),
        free=counts == "free",
        num_nodes=num_nodes,
        num_fuller=num_fuller,
        home_counts=home_counts,
        home_loads=home_loads,
        bound=bound,
        tolerance=tolerance,
        move_price=float(move_price),
    )
