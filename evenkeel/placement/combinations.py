"""Which modules of a group are open: all combinations, priced at once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from evenkeel.placement.placement_problem import Group

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Combinations:
    """The open modules of a bound group: one of the first columns and one of the second.

    A column is a set of modules that may be open together; the first column of each is the empty one.

    Attributes:
        group: The group.
        first: Module sets of side 0.
        second: Module sets of side 1, with every subset of the modules that exclude none.
        fixed: (first, second) fixed cost of a combination.
    """

    group: Group
    first: tuple[tuple[int, ...], ...]
    second: tuple[tuple[int, ...], ...]
    fixed: FloatArray

    def open(self, combination: int) -> tuple[int, ...]:
        """The open modules of a combination, by its flat index."""
        row, column = divmod(combination, len(self.second))
        return self.first[row] + self.second[column]

    def priced(self, prices: FloatArray) -> FloatArray:
        """(combinations,) least priced cost of the group under every combination; infinite where it cannot be."""
        value = self.group.time + prices[0] * self.group.hbm + prices[1] * self.group.host
        rows = len(self.group.tables)
        second = np.full((rows, len(self.second)), np.inf)
        for column, modules in enumerate(self.second):
            if modules:
                second[:, column] = value[:, list(modules)].min(axis=1)
        total = np.empty((len(self.first), len(self.second)))
        total[0] = second.sum(axis=0)
        for row, modules in enumerate(self.first[1:], start=1):
            total[row] = np.minimum(value[:, [modules[0]]], second).sum(axis=0)
        flat: FloatArray = (total + self.fixed).ravel()
        return flat

    def choice(self, combination: int, prices: FloatArray) -> IntArray:
        """(tables,) the module of least priced cost of each table under a combination."""
        modules = np.array(self.open(combination))
        value = self.group.time + prices[0] * self.group.hbm + prices[1] * self.group.host
        best: IntArray = modules[value[:, modules].argmin(axis=1)]
        return best


def enumerate_combinations(group: Group) -> Combinations:
    """All sets of modules of `group` that may be open together."""
    sides = {side: [m for m, module in enumerate(group.modules) if module.side == side] for side in (-1, 0, 1)}
    subsets = [s for size in range(len(sides[-1]) + 1) for s in combinations(sides[-1], size)]
    first: tuple[tuple[int, ...], ...] = ((), *((m,) for m in sides[0]))
    second = tuple(subset + one for one in ((), *((m,) for m in sides[1])) for subset in subsets)
    cost = np.array([module.fixed for module in group.modules])
    fixed = np.array([[sum(cost[list(a + b)]) for b in second] for a in first], dtype=np.float64)
    return Combinations(group, first, second, fixed)
