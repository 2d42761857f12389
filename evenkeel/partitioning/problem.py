"""Arguments of `partition`, checked and brought to what the kernels know: whole units, few dtypes, bounds and limits.

Costs and memory become whole units, since sums of integers are exact in every order: no rounding ever decides a tie.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from evenkeel.partitioning.compile import F, kernel

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Ranks = NDArray[np.int32]


class PartitionError(ValueError):
    """No assignment can be returned that respects every rank's memory cap."""


class ImpossiblePartitionError(PartitionError):
    """No assignment respects the memory caps, and that is proven.

    Attributes:
        shortfall: Memory that is missing at least, in the unit of `memory`.
    """

    def __init__(self, message: str, shortfall: float) -> None:
        super().__init__(message)
        self.shortfall = shortfall

    def __reduce__(self) -> tuple[type[ImpossiblePartitionError], tuple[str, float]]:
        return type(self), (str(self), self.shortfall)


class PartitionNotFoundError(PartitionError):
    """The search ended without an assignment within the memory caps, and without a proof that none exists."""


class Range(NamedTuple):
    """Numbers from `least` to `most`, both included."""

    least: float
    most: float

    def holds(self, value: float) -> bool:
        """Whether the value is one of them; NaN is not."""
        return self.least <= value <= self.most

    def __str__(self) -> str:
        return f"{self.least:g} to {self.most:g}"


MAX_RANKS = 1 << 16
MAX_SAMPLES = (1 << 31) - 1  # indices have 32 bits
MAX_TOTAL = 1 << 62  # above all sums of integers, so that they are exact
EXACT = 2.0**53  # up to which sums of integers are exact as float64
MAX_SUM = 1e300  # above all sums of fractions, so that no product of theirs is beyond float64
COSTS = Range(0, (1 << 63) - 1)
AMOUNTS = Range(0.0, MAX_SUM)
TOLERANCE = Range(0.0, 1.0)  # share of the lower bound: at 1, loads may be twice of it
MOVE_PRICE = Range(0.0, 1000.0)  # of a step's time: what moving all samples takes
SPEEDS = Range(1e-6, 1e6)
MEMORY_CAPS = Range(0.0, float("inf"))
SPLIT_ABOVE = Range(0.0, 1000.0)  # of an even division
SPLIT_PRICE = Range(0.0, 1e100)  # of a position's keys and values, and of a step, in units of cost
COUNTS = ("equal", "free")
ROUNDING = 1e-12  # relative, by which sums of fractions may exceed a limit or a cap
BITS = 61  # all units of a batch add up to less than two to this
CROWDED = 64  # heavy samples per rank up to which `crowding_bound` looks


def share_of_total(num_ranks: int) -> float:
    """What one rank's amounts may add up to: a little less than its part of `MAX_TOTAL`, since sums are rounded."""
    return MAX_TOTAL * (1.0 - 1e-9) / num_ranks


class Arrays(NamedTuple):
    """What the search must respect; arrays only, so that kernels can take it whole.

    Attributes:
        costs: (n,) cost of each sample.
        sizes: (n,) size of each sample.
        homes: (n,) home of each sample.
        memory: (n,) memory of each sample, or (0,) without caps.
        caps: (num_ranks,) memory of each rank.
        fewest: (num_ranks,) samples that a rank must keep at least.
        most: (num_ranks,) samples that a rank may hold at most.
        speeds: (num_ranks,) relative speeds.
        nodes: (num_ranks,) host of each rank.
        limits: (num_ranks,) load that each rank should not exceed, rounded to whole units.
    """

    costs: Integers
    sizes: Floats
    homes: Ranks
    memory: Integers
    caps: Integers
    fewest: Integers
    most: Integers
    speeds: Floats
    nodes: Ranks
    limits: Integers


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
        free: Whether ranks may hold any number of samples.
        num_nodes: Number of distinct nodes.
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
    free: bool
    num_nodes: int
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

    @property
    def same_speeds(self) -> bool:
        """Whether all ranks are equally fast."""
        return bool((self.arrays.speeds == self.arrays.speeds[0]).all())


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


def plain_array(array: NDArray[Any], dtype: DTypeLike) -> NDArray[Any]:
    """The array as kernels are compiled for: of `dtype`, contiguous, aligned and writable; copied unless it is."""
    if array.dtype == dtype and array.flags.carray:
        return array
    return np.array(array, dtype, order="C")


def _vector(field: str, values: ArrayLike, length: int | None, what: str, kinds: str = "iuf") -> NDArray[Any]:
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{field} has shape {array.shape}; pass a one-dimensional array")
    if length is not None and array.size != length:
        raise ValueError(f"{field} has {array.size} entries; pass {length}, one per {what}")
    if array.size and array.dtype.kind not in kinds:
        raise ValueError(f"{field} has dtype {array.dtype}; pass {'whole ' if kinds == 'iu' else ''}numbers")
    return array


def _check_range(field: str, array: NDArray[Any], allowed: Range) -> None:
    least, most = allowed
    if array.size and not (array.min() >= least and array.max() <= most):  # NaN is neither
        index = int(np.flatnonzero(~((array >= least) & (array <= most)))[0])
        raise ValueError(f"{field}[{index}] is {array[index]}; pass numbers from {allowed}")


def _check_sum(field: str, array: NDArray[Any], most: float) -> None:
    may_exceed = array.size and array.max().item() * array.size > most
    if may_exceed and (total := sum(array.tolist())) > most:
        raise ValueError(f"{field} add up to {total:g}; scale them, so that it is at most {most:g}")


def numbers(field: str, values: ArrayLike, length: int, what: str, allowed: Range = AMOUNTS) -> Floats:
    """(length,) float64 numbers; amounts, unless others are allowed, add up to `MAX_SUM` at most."""
    array = plain_array(_vector(field, values, length, what), np.float64)
    _check_range(field, array, allowed)
    if allowed is AMOUNTS:
        _check_sum(field, array, MAX_SUM)
    return array


def whole_numbers(field: str, values: ArrayLike, length: int | None, what: str, most: int) -> NDArray[Any]:
    """(length,) integers from 0 to `most`."""
    array = _vector(field, values, length, what, "iu")
    _check_range(field, array, Range(0, most))
    return array


@kernel
def are_ordinary(costs: Integers | Floats, homes: Ranks, sizes: Floats, num_ranks: int) -> bool:
    """Whether samples need no closer look: their numbers are far within what is allowed."""
    fine, cost, size = True, 0.0, 0.0
    for i in range(costs.size):
        fine &= costs[i] >= 0 and sizes[i] >= 0.0 and 0 <= homes[i] < num_ranks
        cost += costs[i]
        size += sizes[i]
    return fine and cost < MAX_TOTAL / 2 and size < MAX_TOTAL / 2


def _samples(
    costs: ArrayLike, homes: ArrayLike, sizes: ArrayLike | None, num_ranks: int, compiled: bool
) -> tuple[NDArray[Any], Ranks, Floats]:
    """Costs, homes and sizes, checked."""
    values = _vector("costs", costs, None, "sample")
    if values.size > MAX_SAMPLES:
        raise ValueError(f"costs has {values.size} entries; pass at most {MAX_SAMPLES}")
    places = _vector("homes", homes, values.size, "sample", "iu")
    weights = values if sizes is None else _vector("sizes", sizes, values.size, "sample")
    whole = values.dtype.kind in "iu"
    work, ranks = plain_array(values, np.int64 if whole else np.float64), plain_array(places, np.int32)
    size = plain_array(weights, np.float64)
    is_same = work.dtype == values.dtype and ranks.dtype == places.dtype  # else they may have wrapped around
    if not (compiled and is_same and are_ordinary(work, ranks, size, num_ranks)):
        _check_range("costs", values, COSTS if whole else AMOUNTS)
        _check_sum("costs", values, MAX_TOTAL - 1 if whole else MAX_SUM)
        _check_range("homes", places, Range(0, num_ranks - 1))
        size = numbers("sizes", size, size.size, "sample")
    return work, ranks, size


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
def largest_load(loads: Integers, speeds: Floats) -> float:
    """The largest load over speed."""
    largest = 0.0
    for rank in range(loads.size):
        largest = max(largest, loads[rank] / speeds[rank])
    return largest


@kernel
def counts_and_loads(costs: Integers, ranks: Ranks, num_ranks: int) -> tuple[Integers, Integers]:
    """(num_ranks,) samples and (num_ranks,) summed cost of each rank."""
    counts, loads = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    for i in range(costs.size):
        counts[ranks[i]] += 1
        loads[ranks[i]] += costs[i]
    return counts, loads


@kernel
def bound_on_largest(costs: Integers, order: Ranks, speeds: Floats, fewest: int) -> float:
    """The larger of two bounds on max(load / speed) of whole samples.

    All work spread over all ranks, each as fast as it is; and the heaviest sample with the lightest others that must
    fill its rank, on the rank where that is done first. `order` sorts `costs` ascending.
    """
    if costs.size == 0:
        return 0.0
    alone = costs[order[-1]] + costs[order[: max(fewest - 1, 0)]].sum()
    return float(max(costs.sum() / np.cumsum(speeds)[-1], alone / speeds.max()))


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
def limits_at(costs: Integers, speeds: Floats, bound: float, tolerance: float) -> Integers:
    """(num_ranks,) the loads at `bound` and the tolerance, at most the whole load."""
    limits = np.maximum(np.floor(bound * (1.0 + tolerance) * speeds), np.ceil(bound * speeds))
    # Of a fast rank they may be beyond int64: the bound may be that of a slow one.
    units: Integers = np.minimum(np.minimum(limits, 2.0**62).astype(np.int64), costs.sum())
    return units


@kernel
def moved_sizes(sizes: Floats, homes: Ranks, nodes: Ranks, destinations: Ranks) -> tuple[float, int, float, float]:
    """The size of all samples; the number and the size of those that move, and the size of those that leave a node."""
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


def plain_moved(sizes: Floats, homes: Ranks, nodes: Ranks, destinations: Ranks) -> tuple[float, int, float, float]:
    """As `moved_sizes`, without compiled kernels."""
    moves = destinations != homes
    near, far = np.bincount(nodes[destinations[moves]] != nodes[homes[moves]], sizes[moves], 2).tolist()
    return float(np.cumsum(sizes)[-1:].sum()), int(np.count_nonzero(moves)), near + far, far


def loads_of(costs: NDArray[Any], ranks: Ranks, num_ranks: int) -> NDArray[Any]:
    """(num_ranks,) summed cost of each rank; fractions in the order of the samples, the same on every machine."""
    loads = np.zeros(num_ranks, costs.dtype)
    np.add.at(loads, ranks, costs)
    return loads


def with_limits(arrays: Arrays, largest: float, tolerance: float) -> Arrays:
    """The same with each rank's limit at `largest * (1 + tolerance)` times its speed, at most the whole load."""
    return arrays._replace(limits=limits_at(arrays.costs, arrays.speeds, largest, tolerance))


def with_crowding(problem: Problem) -> Problem:
    """The same problem with limits that heavy samples leave possible, where the plain bound cannot be reached."""
    arrays = problem.arrays
    if not problem.same_speeds:
        return problem
    crowded = crowding_bound(arrays.costs, problem.order, int(arrays.fewest.min()), problem.num_ranks)
    bound = crowded / float(arrays.speeds[0])
    if bound <= problem.bound:
        return problem
    return replace(problem, arrays=with_limits(arrays, bound, problem.tolerance))


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
    compiled: bool = True,
) -> Problem:
    """Checks all arguments of `partition`; see there. Unless it is to be compiled, no kernel is."""
    try:
        number = operator.index(num_ranks)
    except TypeError:
        number = 0
    if not 1 <= number <= MAX_RANKS:
        raise ValueError(f"num_ranks is {num_ranks!r}; pass a positive integer up to {MAX_RANKS}")
    num_ranks = number
    if counts not in COUNTS:
        raise ValueError(f"counts is {counts!r}; pass one of {', '.join(map(repr, COUNTS))}")
    for field, value, allowed in (("tolerance", tolerance, TOLERANCE), ("move_price", move_price, MOVE_PRICE)):
        if not allowed.holds(value):
            raise ValueError(f"{field} is {value!r}; pass a number from {allowed}")
    all_costs, all_homes, all_sizes = _samples(costs, homes, sizes, num_ranks, compiled)
    n, units, exponent = all_costs.size, all_costs, 0
    if all_costs.dtype == np.float64:
        exponent = exponent_for(float(all_costs.max(initial=0.0)), n)
        units, tolerance = whole_units(all_costs, exponent), max(tolerance, ROUNDING)
    all_speeds = np.ones(num_ranks) if speeds is None else numbers("speeds", speeds, num_ranks, "rank", SPEEDS)
    num_nodes, all_nodes = 1, np.zeros(num_ranks, np.int32)
    if nodes is not None:
        numbered = whole_numbers("nodes", nodes, num_ranks, "rank", MAX_SAMPLES)
        distinct, node_of = np.unique(numbered, return_inverse=True)
        num_nodes, all_nodes = distinct.size, node_of.astype(np.int32)
    if compiled:
        home_counts, home_loads = counts_and_loads(units, all_homes, num_ranks)
    else:
        home_counts, home_loads = np.bincount(all_homes, minlength=num_ranks), loads_of(units, all_homes, num_ranks)
    floor, remainder = divmod(n, num_ranks)
    if counts == "free":
        floor, fewest, most = 0, np.zeros(num_ranks, np.int64), np.full(num_ranks, n, np.int64)
    elif np.ptp(home_counts) <= 1:  # as even as counts get
        fewest = most = home_counts
    else:
        fewest = np.full(num_ranks, floor, np.int64)
        most = fewest + (remainder > 0)
    order = ascending_order(units) if compiled else np.argsort(units, kind="stable").astype(np.int32)
    bound = _variant(bound_on_largest, compiled)(units, order, all_speeds, floor)
    limits = _variant(limits_at, compiled)(units, all_speeds, bound, tolerance)
    nothing = np.empty(0, np.int64)
    arrays = Arrays(
        costs=units, sizes=all_sizes, homes=all_homes, memory=nothing, caps=nothing, fewest=fewest, most=most,
        speeds=all_speeds, nodes=all_nodes, limits=limits,
    )  # fmt: skip
    return Problem(
        arrays=arrays,
        num_ranks=num_ranks,
        costs=all_costs,
        cost_exponent=exponent,
        order=order,
        free=counts == "free",
        num_nodes=num_nodes,
        home_counts=home_counts,
        home_loads=home_loads,
        bound=bound,
        tolerance=tolerance,
        move_price=float(move_price),
    )


def _variant(function: F, compiled: bool) -> F:
    """A kernel, or what it was made of, which NumPy runs nearly as quickly where it has no loops."""
    return function if compiled else cast(F, getattr(function, "py_func", function))
