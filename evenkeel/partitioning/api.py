"""The public function over arrays, and its answer."""

import operator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenkeel.partitioning.memory import check_fits, with_caps
from evenkeel.partitioning.problem import Problem, Ranks, loads_of, make_problem, moved_sizes, plain_moved
from evenkeel.partitioning.registry import strategy_named

DEFAULT_STRATEGY = "minimal_move"
DEFAULT_TOLERANCE = 1e-3
DEFAULT_MOVE_PRICE = 0.01
Sums: TypeAlias = NDArray[Any]  # int64 or float64, as the costs are


def evenness(loads: Sums, speeds: NDArray[np.float64] | None = None) -> tuple[float, float]:
    """The largest load over speed, and max/mean of load over speed, which is 1.0 when there is no load.

    Args:
        loads: (num_ranks,) summed cost of each rank.
        speeds: (num_ranks,) relative speeds; None: all equal.
    """
    times = (loads if speeds is None else loads / speeds).tolist()  # faster than arrays of a few numbers
    largest, total = float(max(times)), float(sum(times))
    return largest, largest * len(times) / total if total > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """An assignment of samples to ranks, and what it costs to get there.

    Attributes:
        destinations: (n,) int32, the rank that trains each sample.
        loads: (num_ranks,) summed cost of each rank; int64 for integer costs, else float64.
        lower_bound: No assignment of whole samples has a smaller maximum of load over speed.
        home_loads: (num_ranks,) loads if every sample stayed at home.
        size: Summed size of all samples.
        moved_samples: Samples that leave their home.
        moved_size: Their summed size.
        moved_size_between_nodes: The part of it that crosses nodes; 0.0 without `nodes`.
        strategy: Name of the strategy that was asked.
        speeds: (num_ranks,) relative speeds; None: all equal.
    """

    destinations: NDArray[np.int32]
    loads: NDArray[np.int64] | NDArray[np.float64]
    lower_bound: float
    home_loads: NDArray[np.int64] | NDArray[np.float64]
    size: float
    moved_samples: int
    moved_size: float
    moved_size_between_nodes: float
    strategy: str
    speeds: NDArray[np.float64] | None

    @property
    def imbalance(self) -> float:
        """max/mean of load over speed; 1.0 when all loads are zero."""
        return evenness(self.loads, self.speeds)[1]

    @property
    def home_imbalance(self) -> float:
        """max/mean of home load over speed."""
        return evenness(self.home_loads, self.speeds)[1]


def _at_home(problem: Problem) -> Ranks:
    return problem.arrays.homes.copy()


def _fill(problem: Problem, destinations: Ranks, at_least: int) -> Ranks:
    """The assignment with at least so many samples on each rank, or floor of the mean where there are fewer.

    A rank that has too few takes the lightest sample of those that have more, one after the other; of equal ones the
    one that is smallest to move. The memory caps come first: a rank on which no sample has room stays as it is.
    """
    arrays = problem.arrays
    counts = np.bincount(destinations, minlength=problem.num_ranks)
    at_least = min(at_least, destinations.size // problem.num_ranks)
    short = np.flatnonzero(counts < at_least)
    if not short.size:
        return destinations
    filled, lightest_first = destinations.copy(), np.lexsort((arrays.sizes, arrays.costs))
    memory = arrays.memory if arrays.caps.size else np.zeros(filled.size, np.int64)
    room = arrays.caps.copy() if arrays.caps.size else np.zeros(problem.num_ranks, np.int64)
    np.subtract.at(room, filled, memory)
    for rank in np.repeat(short, at_least - counts[short]).tolist():
        spare = (counts[filled] > at_least) & (memory <= room[rank])
        candidates = lightest_first[spare[lightest_first]]
        if candidates.size:
            sample = candidates[0]
            counts[[filled[sample], rank]] += [-1, 1]
            np.add.at(room, [filled[sample], rank], [memory[sample], -memory[sample]])
            filled[sample] = rank
    return filled


def partition(
    costs: ArrayLike,
    homes: ArrayLike,
    num_ranks: int,
    *,
    strategy: str = DEFAULT_STRATEGY,
    sizes: ArrayLike | None = None,
    counts: str = "equal",
    tolerance: float = DEFAULT_TOLERANCE,
    move_price: float = DEFAULT_MOVE_PRICE,
    speeds: ArrayLike | None = None,
    memory: ArrayLike | None = None,
    memory_caps: ArrayLike | None = None,
    nodes: ArrayLike | None = None,
    min_samples: int = 0,
    stay: bool = False,
) -> Partition:
    """Assign each sample to a rank so that no rank has much more to do than the others.

    The same arguments give the same answer on every machine. Sums of integer costs are exact.

    Args:
        costs: (n,) int64 or float64, predicted work of each sample; 0 or more, integers adding up to less than 2**62,
            fractions to 1e300 at most (sizes and memory as well).
        homes: (n,) int32, the rank that holds each sample; any number of samples per rank, also none.
        num_ranks: Number of ranks, up to 65,536.
        strategy: One of `strategies()`.
        sizes: (n,) what moving each sample costs; its cost when None.
        counts: "equal" gives each rank floor or ceil of n/num_ranks samples, and its own number where the homes are
            within one of each other; "free" any number.
        tolerance: `minimal_move` stops exchanging once the load is within this share of the lower bound, 0 to 1.
        move_price: Time that moving all samples would take, to other nodes if there are several, as a share of a step
            with even loads, 0 to 1000; `minimal_move` moves a sample only where the load that it takes off is more.
        speeds: (num_ranks,) relative speeds, 1e-6 to 1e6; a rank of speed 0.5 gets half the load.
        memory: (n,) what each sample takes of the memory of the rank that trains it.
        memory_caps: (num_ranks,) what each rank holds of it; infinity for no cap.
        nodes: (num_ranks,) host of each rank, any numbers; samples move inside a node before across.
        min_samples: With free counts, samples that each rank gets at least, while there are enough for all and the
            memory caps have room; equal counts give every rank floor of n/num_ranks anyway.
        stay: Every sample stays at home but those that `min_samples` needs elsewhere; nothing is balanced.

    Returns:
        The assignment with its loads, the lower bound beside it, and what moves.

    Raises:
        ImpossiblePartitionError: If no assignment is within the memory caps.
        PartitionNotFoundError: If none was found.
        ValueError: If an argument is wrong; the message names it and its remedy.
    """
    if operator.index(min_samples) < 0:
        raise ValueError(f"min_samples is {min_samples}; pass a number of samples, 0 or more")
    if (memory is None) != (memory_caps is None):
        given, missing = ("memory", "memory_caps") if memory_caps is None else ("memory_caps", "memory")
        raise ValueError(f"{given} is given without {missing}; pass both or neither")
    chosen = _at_home if stay else strategy_named(strategy)
    compiled = strategy != "plain"
    problem = make_problem(
        costs,
        homes,
        num_ranks,
        sizes=sizes,
        counts=counts,
        tolerance=tolerance,
        move_price=move_price,
        speeds=speeds,
        nodes=nodes,
        compiled=compiled,
    )
    if memory is not None and memory_caps is not None:
        problem = with_caps(problem, memory, memory_caps, compiled)
    arrays = problem.arrays
    destinations = chosen(problem) if num_ranks > 1 and arrays.costs.size else _at_home(problem)
    if min_samples:
        destinations = _fill(problem, destinations, min_samples)
    if memory is not None and memory_caps is not None:
        check_fits(memory, memory_caps, destinations)
    home_loads: Sums = problem.home_loads
    if problem.costs is not arrays.costs:
        home_loads = loads_of(problem.costs, arrays.homes, problem.num_ranks)
    moved = moved_sizes if compiled else plain_moved
    total, samples, size, between = moved(arrays.sizes, arrays.homes, arrays.nodes, destinations)
    return Partition(
        destinations=destinations,
        loads=loads_of(problem.costs, destinations, problem.num_ranks),
        lower_bound=problem.lower_bound,
        home_loads=home_loads,
        size=total,
        moved_samples=samples,
        moved_size=size,
        moved_size_between_nodes=between,
        strategy=strategy,
        speeds=None if speeds is None else arrays.speeds,
    )
