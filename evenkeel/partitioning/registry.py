"""The strategies by name."""

from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.karmarkar_karp import karmarkar_karp
from evenkeel.partitioning.lpt import lpt
from evenkeel.partitioning.minimal_move import minimal_move
from evenkeel.partitioning.plain import plain_partition
from evenkeel.partitioning.problem import PartitionError, Problem
from evenkeel.plugins import Plugins

Strategy: TypeAlias = Callable[[Problem], NDArray[np.int32]]

BUILT_IN: dict[str, Strategy] = {
    "karmarkar_karp": karmarkar_karp,
    "lpt": lpt,
    "minimal_move": minimal_move,
    "plain": plain_partition,
}
STRATEGIES: Plugins[Strategy] = Plugins("strategy", BUILT_IN, group="evenkeel.strategies")


def strategies() -> tuple[str, ...]:
    """Names that `partition` takes as `strategy`: ours, and those of installed packages."""
    return STRATEGIES.names


@cache
def strategy_named(name: str) -> Strategy:
    """The strategy of that name.

    An installed package adds one with an entry point in the group `evenkeel.strategies`: a function from a `Problem` to
    (n,) int32 destinations. It must give the same answer to the same problem on every machine, since a lead and any
    balancer plan alike, and be installed on all ranks and on the balancer.

    Raises:
        ValueError: If there is none.
    """
    strategy = STRATEGIES.find(name)
    return strategy if name in BUILT_IN else _checked(name, strategy)


def _checked(name: str, strategy: Strategy) -> Strategy:
    """A strategy that is not ours: what it returns is held against the problem before anything moves by it."""

    def checked(problem: Problem) -> NDArray[np.int32]:
        found = np.asarray(strategy(problem))
        arrays, ranks = problem.arrays, problem.num_ranks
        if found.shape != arrays.costs.shape or found.dtype.kind not in "iu":
            raise ValueError(
                f"strategy {name!r} returned {found.dtype} of shape {found.shape} for {arrays.costs.size} samples; "
                "return one rank for each"
            )
        if found.size and not (int(found.min()) >= 0 and int(found.max()) < ranks):
            raise ValueError(f"strategy {name!r} returned ranks {found.min()} to {found.max()}; there are {ranks}")
        counts = np.bincount(found, minlength=ranks)
        bad = np.flatnonzero((counts < arrays.fewest) | (counts > arrays.most))
        if bad.size:
            rank = int(bad[0])
            raise ValueError(
                f"strategy {name!r} gave rank {rank} {counts[rank]} samples; keep within Problem.arrays.fewest and "
                f"most, here {arrays.fewest[rank]} to {arrays.most[rank]}"
            )
        if arrays.memory.size:
            used = np.bincount(found, weights=arrays.memory, minlength=ranks)
            if (used > arrays.caps * (1 + 1e-12)).any():
                raise PartitionError(
                    f"strategy {name!r} exceeds the memory cap of rank {int(np.argmax(used - arrays.caps))}"
                )
        return found.astype(np.int32)

    return checked
