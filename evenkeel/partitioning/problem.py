"""Arguments of `partition`, checked and brought to the few dtypes that the kernels know."""

import operator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenkeel.partitioning.bounds import bound_on_largest, crowding_bound
from evenkeel.partitioning.compile import kernel, plain_array
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
from evenkeel.partitioning.rows import Terms
from evenkeel.partitioning.sorting import ascending_order
from evenkeel.partitioning.units import exponent_for, scaled, whole_units

COUNTS = ("equal", "free")
ROUNDING = 1e-12  # relative, by which sums of fractions may exceed a limit or a cap


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a strategy gets; costs and memory in whole units (see `units`).

    Attributes:
        terms: Constraints, with limits at `bound` times one plus the tolerance.
        num_ranks: Number of ranks.
        costs: (n,) costs as they were given, int64 or float64.
        cost_exponent: Power of two of a cost's unit.
        memory_exponent: Power of two of the unit of memory and caps.
        memory_error: Units by which each sample's memory may be too high and each cap too low; 0 where all are whole.
        order: (n,) int32, sorts the costs ascending.
        interchangeable: Whether all ranks have the same speed and memory cap.
        free: Whether ranks may hold any number of samples.
        num_nodes: Number of distinct nodes.
        num_fuller: Ranks that take `terms.most` samples, the others taking one less; negative when `fewest` and `most`
            alone say it.
        home_counts: (num_ranks,) samples at each home.
        home_loads: (num_ranks,) load of each home.
        bound: No assignment has a smaller maximum of load over speed.
        tolerance: Share of the bound by which a limit lies above it.
        move_price: Share of the bound that moving all samples would take.
    """

    terms: Terms
    num_ranks: int
    costs: NDArray[np.int64] | NDArray[np.float64]
    cost_exponent: int
    memory_exponent: int
    memory_error: int
    order: NDArray[np.int32]
    interchangeable: bool
    free: bool
    num_nodes: int
    num_fuller: int
    home_counts: NDArray[np.int64]
    home_loads: NDArray[np.int64]
    bound: float
    tolerance: float
    move_price: float

    @property
    def lower_bound(self) -> float:
        """The bound in the costs that were given."""
        return float(np.ldexp(self.bound, -self.cost_exponent))


def _index_of(field: str, array: NDArray[Any], bad: NDArray[np.bool_]) -> str:
    index = int(np.flatnonzero(bad)[0])
    return f"{field}[{index}] is {array[index]}"


def _vector(field: str, values: ArrayLike, length: int | None, what: str) -> NDArray[Any]:
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{field} has shape {array.shape}; pass a one-dimensional array")
    if length is not None and array.size != length:
        raise ValueError(f"{field} has {array.size} entries; pass {length}, one per {what}")
    if array.size == 0 and array.dtype.kind == "f":
        return array
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{field} has dtype {array.dtype}; pass int64 or float64 numbers")
    return array


@kernel
def _range_of(values: NDArray[Any]) -> tuple[int, int]:
    """Smallest and largest of at least one integer."""
    low = high = values[0]
    for value in values:
        low = min(low, value)
        high = max(high, value)
    return low, high


@kernel
def _first_bad(values: NDArray[np.float64], infinite: bool) -> tuple[int, float]:
    """Index of the first that is negative, NaN or, unless allowed, infinite; -1 if there is none, and the largest."""
    largest = 0.0
    for i in range(values.size):
        value = values[i]
        if not value >= 0 or (value == np.inf and not infinite):
            return i, value
        largest = max(largest, value)
    return -1, largest


def _numbers(field: str, values: ArrayLike, length: int, what: str, *, infinite: bool = False) -> NDArray[np.float64]:
    array = plain_array(_vector(field, values, length, what), np.float64)
    bad, largest = _first_bad(array, infinite)
    if bad >= 0:
        raise ValueError(f"{field}[{bad}] is {array[bad]}; pass {'' if infinite else 'finite '}numbers, 0 or more")
    if not infinite and largest * array.size > MAX_SUM and sum(array.tolist()) > MAX_SUM:
        raise ValueError(f"{field} add up to {sum(array.tolist()):g}; scale them, so that it is at most {MAX_SUM:g}")
    return array


def _speeds(values: ArrayLike, num_ranks: int) -> NDArray[np.float64]:
    array = plain_array(_vector("speeds", values, num_ranks, "rank"), np.float64)
    bad = ~((array >= SPEEDS.least) & (array <= SPEEDS.most))
    if bad.any():
        raise ValueError(f"{_index_of('speeds', array, bad)}; pass numbers from {SPEEDS}")
    return array


def _costs(values: ArrayLike) -> NDArray[np.int64] | NDArray[np.float64]:
    array = _vector("costs", values, None, "sample")
    if array.dtype.kind == "f":
        return _numbers("costs", array, array.size, "sample")
    if array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{_index_of('costs', array, array == array.max())}, beyond int64; pass float64 costs")
    costs = plain_array(array, np.int64)
    if costs.size:
        least, largest = _range_of(costs)
        if least < 0:
            raise ValueError(f"{_index_of('costs', costs, costs < 0)}; pass numbers, 0 or more")
        if largest * costs.size >= MAX_TOTAL and sum(costs.tolist()) >= MAX_TOTAL:
            raise ValueError(f"costs add up to {sum(costs.tolist())}, 2**62 or more; scale them or pass float64 costs")
    return costs


def _cost_units(costs: NDArray[Any]) -> tuple[NDArray[np.int64], int]:
    if costs.dtype == np.int64:
        return costs, 0
    exponent = exponent_for(float(costs.max(initial=0.0)), costs.size)
    return whole_units(costs, exponent), exponent


def _memory_units(
    memory: NDArray[np.float64], caps: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], int, int]:
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


def _ranks_of(field: str, values: ArrayLike, length: int, what: str, limit: int | None) -> NDArray[np.int32]:
    array = _vector(field, values, length, what)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{field} has dtype {array.dtype}; pass int32 numbers")
    if array.size:
        array = plain_array(array, array.dtype if array.dtype in (np.int32, np.int64) else np.int64)
        low, high = _range_of(array)
        top = np.iinfo(np.int32).max if limit is None else limit - 1
        if low < 0 or high > top:
            bad = (array < 0) | (array > top)
            allowed = f"a rank, 0 to {top}" if limit is not None else "a number, 0 or more"
            raise ValueError(f"{_index_of(field, array, bad)}; it must be {allowed}")
    return plain_array(array, np.int32)


@kernel
def counts_and_loads(
    costs: NDArray[np.int64], ranks: NDArray[np.int32], num_ranks: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(num_ranks,) samples and (num_ranks,) summed cost of each rank."""
    counts, loads = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    for i in range(costs.size):
        counts[ranks[i]] += 1
        loads[ranks[i]] += costs[i]
    return counts, loads


@kernel
def _limits(costs: NDArray[np.int64], speeds: NDArray[np.float64], bound: float, tolerance: float) -> NDArray[np.int64]:
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


def with_limits(problem_terms: Terms, largest: float, tolerance: float) -> Terms:
    """The same terms with each rank's limit at `largest * (1 + tolerance)` times its speed, at most the whole load."""
    return problem_terms._replace(limits=_limits(problem_terms.costs, problem_terms.speeds, largest, tolerance))


def with_crowding(problem: Problem) -> Problem:
    """The same problem with limits that heavy samples leave possible, where the plain bound cannot be reached."""
    terms = problem.terms
    if not bool((terms.speeds == terms.speeds[0]).all()):
        return problem
    crowded = crowding_bound(terms.costs, problem.order, int(terms.fewest.min()), problem.num_ranks)
    bound = max(problem.bound, crowded / float(terms.speeds[0]))
    return replace(problem, terms=with_limits(terms, bound, problem.tolerance))


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
) -> Problem:
    """Check all arguments of `partition`; see there."""
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
    if (memory is None) != (memory_caps is None):
        given, missing = ("memory", "memory_caps") if memory_caps is None else ("memory_caps", "memory")
        raise ValueError(f"{given} is given without {missing}; pass both or neither")
    all_costs = _costs(costs)
    n = all_costs.size
    if n > MAX_SAMPLES:
        raise ValueError(f"costs has {n} entries; pass at most {MAX_SAMPLES}")
    units, cost_exponent = _cost_units(all_costs)
    if all_costs.dtype == np.float64:
        tolerance = max(tolerance, ROUNDING)
    all_homes = _ranks_of("homes", homes, n, "sample", num_ranks)
    all_sizes = all_costs.astype(np.float64) if sizes is None else _numbers("sizes", sizes, n, "sample")
    all_speeds = np.ones(num_ranks) if speeds is None else _speeds(speeds, num_ranks)
    if memory is None or memory_caps is None:
        all_memory, caps, memory_exponent, memory_error = np.empty(0, np.int64), np.empty(0, np.int64), 0, 0
    else:
        all_memory, caps, memory_exponent, memory_error = _memory_units(
            _numbers("memory", memory, n, "sample"),
            _numbers("memory_caps", memory_caps, num_ranks, "rank", infinite=True),
        )
    if nodes is None:
        num_nodes, all_nodes = 1, np.zeros(num_ranks, np.int32)
    else:
        given_nodes = _ranks_of("nodes", nodes, num_ranks, "rank", None)
        distinct, places = np.unique(given_nodes, return_inverse=True)
        num_nodes, all_nodes = distinct.size, places.astype(np.int32)
    home_counts, home_loads = counts_and_loads(units, all_homes, num_ranks)
    fewest_at_home, most_at_home = _range_of(home_counts)
    floor, remainder = divmod(n, num_ranks)
    num_fuller = -1
    if counts == "free":
        fewest, most = np.zeros(num_ranks, np.int64), np.full(num_ranks, n, np.int64)
    elif most_at_home - fewest_at_home <= 1:
        fewest, most = home_counts, home_counts
    else:
        fewest = np.full(num_ranks, floor, np.int64)
        most = fewest + (remainder > 0)
        num_fuller = remainder if remainder > 0 else -1
    order = ascending_order(units)
    bound = bound_on_largest(units, order, all_speeds, fewest, most)
    terms = Terms(
        costs=units,
        sizes=all_sizes,
        homes=all_homes,
        memory=all_memory,
        caps=caps,
        fewest=fewest,
        most=most,
        speeds=all_speeds,
        nodes=all_nodes,
        limits=_limits(units, all_speeds, bound, tolerance),
    )
    interchangeable = (speeds is None or bool((all_speeds == all_speeds[0]).all())) and (
        memory_caps is None or bool((caps == caps[0]).all())
    )
    return Problem(
        terms=terms,
        num_ranks=num_ranks,
        costs=all_costs,
        cost_exponent=cost_exponent,
        memory_exponent=memory_exponent,
        memory_error=memory_error,
        order=order,
        interchangeable=interchangeable,
        free=counts == "free",
        num_nodes=num_nodes,
        num_fuller=num_fuller,
        home_counts=home_counts,
        home_loads=home_loads,
        bound=bound,
        tolerance=tolerance,
        move_price=float(move_price),
    )
