"""Which modules of all groups may be open together: joint combinations, with a bound for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evenkeel.placement.layers import SLACK

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Visited:
    """The dual at one pair of prices, by parts.

    Attributes:
        prices: (2,) prices.
        groups: For each bound group, the value of every combination.
        free: The value of all free groups.
    """

    prices: FloatArray
    groups: list[FloatArray]
    free: float


@dataclass(frozen=True, slots=True)
class Candidates:
    """Joint combinations in ascending order of their bounds.

    Attributes:
        names: The combination of each bound group.
        floors: Their bounds.
        complete: Whether none was dropped for want of room or time.
    """

    names: list[tuple[int, ...]]
    floors: list[float]
    complete: bool


def joint_candidates(
    visited: Sequence[Visited], budget: FloatArray, cutoff: float, most: int, is_over: Callable[[], bool]
) -> Candidates:
    """Joint combinations whose dual bound is below `cutoff`, `most` at each stage.

    Args:
        visited: The dual at some prices.
        budget: (2,) budgets; may be infinite.
        cutoff: Combinations that cost this or more are of no interest.
        most: Combinations to go on with.
        is_over: Asked for every combination to go on with; once true, nothing is returned.
    """
    budget = budget + SLACK
    finite = np.isfinite(budget)
    paid = np.array([float(point.prices[finite] @ budget[finite]) for point in visited])
    free = np.array([point.free for point in visited])
    tables = [np.stack(values) for values in zip(*(point.groups for point in visited), strict=True)]
    least = [table.min(axis=1) for table in tables]
    everything = np.sum(least, axis=0) + free - paid
    partial, names = (free - paid)[:, None], np.zeros((1, 0), dtype=np.int64)
    floors = np.array([float(everything.max())])
    complete = True
    for position, table in enumerate(tables):
        alone = (table + (everything - least[position])[:, None]).max(axis=0)
        usable = np.flatnonzero(alone < cutoff)
        added_floor = table[:, usable]
        rest = np.sum(least[position + 1 :], axis=0) if position + 1 < len(tables) else np.zeros(len(free))
        floors, parents, added = np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        limit = cutoff
        for row in range(partial.shape[1]):
            if is_over():
                return Candidates([], [], False)
            floor = (added_floor + (partial[:, row] + rest)[:, None]).max(axis=0)
            kept = np.flatnonzero(floor < limit)
            floors = np.concatenate([floors, floor[kept]])
            parents = np.concatenate([parents, np.full(len(kept), row)])
            added = np.concatenate([added, usable[kept]])
            if len(floors) > most:
                order = np.sort(np.argsort(floors, kind="stable")[:most])
                floors, parents, added = floors[order], parents[order], added[order]
                complete, limit = False, float(floors.max())
        order = np.argsort(floors, kind="stable")
        floors, parents, added = floors[order], parents[order], added[order]
        partial = partial[:, parents] + table[:, added]
        names = np.column_stack([names[parents], added])
    return Candidates([tuple(int(c) for c in row) for row in names], floors.tolist(), complete)
