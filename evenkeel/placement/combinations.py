"""Which modules of a group are open: all combinations, priced at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from evenkeel.placement.placement_problem import Group

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_BLOCK = 1 << 18


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
        first = np.full((rows, len(self.first)), np.inf)
        for column, modules in enumerate(self.first):
            if modules:
                first[:, column] = value[:, modules[0]]
        total = self.fixed.copy()
        step = max(1, _BLOCK // total.size)
        for row in range(0, rows, step):
            part = slice(row, row + step)
            total += np.minimum(first[part, :, None], second[part, None, :]).sum(axis=0)
        flat: FloatArray = total.ravel()
        return flat

    def conflict(self) -> list[int]:
        """Rows of tables that no combination holds together, few of them; empty where one holds all."""
        first, second = self._available(self.first), self._available(self.second)
        named: list[int] = []
        while True:
            allowed = np.ones((len(self.first), len(self.second)), dtype=bool)
            for row in named:
                allowed &= np.logical_or.outer(first[row], second[row])
            if named and not allowed.any():
                return sorted(named)
            for row in range(len(self.group.tables)):
                allowed &= np.logical_or.outer(first[row], second[row])
                if not allowed.any():
                    named.append(row)
                    break
            else:
                return []

    def _available(self, sets: tuple[tuple[int, ...], ...]) -> npt.NDArray[np.bool_]:
        """(tables, sets) whether a table can be in one of the modules of a set."""
        return np.stack([np.isfinite(self.group.time[:, list(modules)]).any(axis=1) for modules in sets], axis=1)

    def by_module(self, priced: FloatArray) -> FloatArray:
        """(modules,) least of (combinations,) `priced` over the combinations in which a module is open."""
        total = priced.reshape(self.fixed.shape)
        least = np.full(len(self.group.modules), np.inf)
        for sets, values in ((self.first, total.min(axis=1)), (self.second, total.min(axis=0))):
            for modules, value in zip(sets, values.tolist(), strict=True):
                for module in modules:
                    least[module] = min(least[module], value)
        return least

    def containing(self, chosen: IntArray) -> int:
        """The smallest combination in which all of `chosen` are open."""
        wanted = set(chosen.tolist())
        row = next((r for r, modules in enumerate(self.first) if modules and wanted & set(modules)), 0)
        rest = wanted - set(self.first[row])
        fitting = [(len(modules), c) for c, modules in enumerate(self.second) if rest <= set(modules)]
        return row * len(self.second) + min(fitting)[1]

    def choice(self, combination: int, prices: FloatArray) -> IntArray:
        """(tables,) the module of least priced cost of each table under a combination."""
        return self.choices([combination], prices)[0]

    def choices(self, combinations: Sequence[int], prices: FloatArray) -> list[IntArray]:
        """For each of some combinations, (tables,) the module of least priced cost of each table."""
        value = self.group.time + prices[0] * self.group.hbm + prices[1] * self.group.host
        opens = [np.array(self.open(combination)) for combination in combinations]
        return [modules[value[:, modules].argmin(axis=1)] for modules in opens]


def enumerate_combinations(group: Group) -> Combinations:
    """All sets of modules of `group` that may be open together."""
    sides = {side: [m for m, module in enumerate(group.modules) if module.side == side] for side in (-1, 0, 1)}
    subsets = [s for size in range(len(sides[-1]) + 1) for s in combinations(sides[-1], size)]
    first: tuple[tuple[int, ...], ...] = ((), *((m,) for m in sides[0]))
    second = tuple(subset + one for one in ((), *((m,) for m in sides[1])) for subset in subsets)
    cost = np.array([module.fixed for module in group.modules])
    fixed_first, fixed_second = (np.array([float(cost[list(s)].sum()) for s in sets]) for sets in (first, second))
    fixed = fixed_first[:, None] + fixed_second[None, :]
    return Combinations(group, first, second, fixed)
