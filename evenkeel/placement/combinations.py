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
    """The open modules of a bound group: one opening of the first column and one set of openings of the second.

    An opening is a set of modules that run as one. A column is a set of openings that may be there together; the first
    column of each is the empty one.

    Attributes:
        group: The group.
        openings: (modules,) modules of each opening.
        first: Sets of openings of side 0.
        second: Sets of openings of side 1, with every subset of the openings that exclude none.
        fixed: (first, second) fixed cost of a combination.
        only: Of each side, (sets,) the opening of a set that has one alone; -1 for the others.
    """

    group: Group
    openings: tuple[IntArray, ...]
    first: tuple[tuple[int, ...], ...]
    second: tuple[tuple[int, ...], ...]
    fixed: FloatArray
    only: tuple[IntArray, IntArray]

    def open(self, combination: int) -> IntArray:
        """The open modules of a combination, by its flat index."""
        opened = self._opened(combination)
        return np.concatenate([self.openings[number] for number in opened]) if opened else np.zeros(0, dtype=np.int64)

    def _opened(self, combination: int) -> tuple[int, ...]:
        row, column = divmod(combination, len(self.second))
        return self.first[row] + self.second[column]

    def priced(self, prices: FloatArray) -> FloatArray:
        """(combinations,) least priced cost of the group under every combination; infinite where it cannot be."""
        flat: FloatArray = self.totals(self.group.priced(prices)).ravel()
        return flat

    def totals(self, priced: FloatArray, first: IntArray | None = None, second: IntArray | None = None) -> FloatArray:
        """(first, second) least of (tables, modules) `priced` costs of the group under some of the combinations."""
        value, total = self._by_opening(priced), self.fixed
        if first is not None and second is not None:
            total = total[first[:, None], second[None, :]]
        total = total.copy()
        left = _by_set(value, self.first, self.only[0], first)
        right = _by_set(value, self.second, self.only[1], second)
        step = max(1, _BLOCK // total.size)
        for row in range(0, len(value), step):
            part = slice(row, row + step)
            total += np.minimum(left[part, :, None], right[part, None, :]).sum(axis=0)
        return total

    def _by_opening(self, value: FloatArray) -> FloatArray:
        """(tables, openings) least of (tables, modules) `value` over the modules of each opening."""
        if len(self.openings) == value.shape[1]:
            return value[:, np.concatenate(self.openings)]
        return np.stack([value[:, modules].min(axis=1) for modules in self.openings], axis=1)

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
        can = np.isfinite(self._by_opening(self.group.time))
        return np.stack([can[:, list(numbers)].any(axis=1) for numbers in sets], axis=1)

    def by_module(self, priced: FloatArray) -> FloatArray:
        """(modules,) least of (combinations,) `priced` over the combinations in which a module is open."""
        total = priced.reshape(self.fixed.shape)
        least = np.full(len(self.group.modules), np.inf)
        for sets, values in ((self.first, total.min(axis=1)), (self.second, total.min(axis=0))):
            for numbers, value in zip(sets, values.tolist(), strict=True):
                for number in numbers:
                    modules = self.openings[number]
                    least[modules] = np.minimum(least[modules], value)
        return least

    def containing(self, chosen: IntArray) -> int:
        """The smallest combination in which all of `chosen` are open."""
        opening_of = self.group.openings()[0]
        wanted = set(opening_of[chosen].tolist())
        row = next((r for r, numbers in enumerate(self.first) if numbers and wanted & set(numbers)), 0)
        rest = wanted - set(self.first[row])
        fitting = [(len(numbers), c) for c, numbers in enumerate(self.second) if rest <= set(numbers)]
        return row * len(self.second) + min(fitting)[1]

    def choice(self, combination: int, prices: FloatArray) -> IntArray:
        """(tables,) the module of least priced cost of each table under a combination."""
        return self.choices([combination], prices)[0]

    def choices(self, combinations: Sequence[int], prices: FloatArray) -> list[IntArray]:
        """For each of some combinations, (tables,) the module of least priced cost of each table."""
        value = self.group.priced(prices)
        best = np.stack([modules[value[:, modules].argmin(axis=1)] for modules in self.openings], axis=1)
        rows = np.arange(len(value))
        least = value[rows[:, None], best]
        found = []
        for combination in combinations:
            numbers = np.array(self._opened(combination))
            found.append(best[rows, numbers[least[:, numbers].argmin(axis=1)]])
        return found


def _by_set(value: FloatArray, sets: tuple[tuple[int, ...], ...], only: IntArray, kept: IntArray | None) -> FloatArray:
    """(tables, sets) least of (tables, openings) values over the openings of each set, or of some of them."""
    kept = np.arange(len(sets)) if kept is None else kept
    opening = only[kept]
    table = value[:, opening]
    for column in np.flatnonzero(opening < 0).tolist():
        numbers = sets[kept[column]]
        table[:, column] = value[:, list(numbers)].min(axis=1) if numbers else np.inf
    return table


def enumerate_combinations(group: Group) -> Combinations:
    """All sets of openings of `group` that may be there together."""
    opening_of, cost = group.openings()
    openings = tuple(np.flatnonzero(opening_of == number) for number in range(len(cost)))
    side_of = [group.modules[int(modules[0])].side for modules in openings]
    sides = {side: [number for number, own in enumerate(side_of) if own == side] for side in (-1, 0, 1)}
    subsets = [s for size in range(len(sides[-1]) + 1) for s in combinations(sides[-1], size)]
    first: tuple[tuple[int, ...], ...] = ((), *((m,) for m in sides[0]))
    second = tuple(subset + one for one in ((), *((m,) for m in sides[1])) for subset in subsets)
    fixed_first, fixed_second = (np.array([float(cost[list(s)].sum()) for s in sets]) for sets in (first, second))
    fixed = fixed_first[:, None] + fixed_second[None, :]
    alone = [np.array([s[0] if len(s) == 1 else -1 for s in sets], dtype=np.int64) for sets in (first, second)]
    return Combinations(group, openings, first, second, fixed, (alone[0], alone[1]))
