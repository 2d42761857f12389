"""The optimisation problem: tables that fuse share modules, and each module has one mode and one ratio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from evenkeel.placement.layouts import ROW_WISE, Layout, Scope
from evenkeel.placement.model import Mode

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

UNIT = float(1 << 20)
"""Bytes in a unit of the solver: sizes are multiples of a page, so units of 1 MiB are exact in floating point."""


@dataclass(frozen=True, slots=True)
class Module:
    """A mode, a ratio and a layout that tables of a group may share.

    Attributes:
        mode: The mode.
        ratio: Fraction of the rows that HBM holds.
        fixed: Seconds a step that all modules of its opening cost once, however many tables are in them.
        side: Modules of one side exclude each other within a group; -1 excludes none.
        layout: How its tables are spread.
    """

    mode: Mode
    ratio: float
    fixed: float
    side: int
    layout: Layout = ROW_WISE

    @property
    def opening(self) -> tuple[object, ...]:
        """Equal for modules that run as one: row-wise tables share a ratio, those of a rank or host only their mode."""
        if self.layout.scope is Scope.EVERYWHERE:
            return (self.layout, self.mode, self.ratio)
        return (self.layout.scope, self.mode)


@dataclass(frozen=True, slots=True)
class Group:
    """Tables that fuse, and the modules that they may fuse into.

    Attributes:
        tables: Indices of its tables.
        modules: The modules to choose from.
        time: (tables, modules) seconds a step, infinite where a table cannot be in a module.
        hbm: (tables, modules) HBM on the fullest rank, in units.
        host: (tables, modules) memory of a host, in units.
        bound: Whether tables of the group must agree on modules. Otherwise each pays its module's fixed time itself.
    """

    tables: tuple[int, ...]
    modules: tuple[Module, ...]
    time: FloatArray
    hbm: FloatArray
    host: FloatArray
    bound: bool
    _openings: list[tuple[IntArray, FloatArray]] = field(default_factory=list, repr=False, compare=False)

    def openings(self) -> tuple[IntArray, FloatArray]:
        """(modules,) number of the opening that each module belongs to, and (openings,) their fixed costs."""
        if self._openings:
            return self._openings[0]
        numbers: dict[tuple[object, ...], int] = {}
        found = np.array([numbers.setdefault(module.opening, len(numbers)) for module in self.modules], dtype=np.int64)
        fixed = np.zeros(len(numbers))
        fixed[found] = [module.fixed for module in self.modules]
        self._openings.append((found, fixed))
        return found, fixed

    def priced(self, prices: FloatArray) -> FloatArray:
        """(tables, modules) time and what the use of the budgets costs at `prices`."""
        priced: FloatArray = self.time + prices[0] * self.hbm + prices[1] * self.host
        return priced


@dataclass(frozen=True, slots=True)
class PlacementProblem:
    """Groups and budgets, in units of the solver.

    Attributes:
        groups: The groups.
        budget: (2,) HBM of the fullest rank and memory of a host; infinite where there is no limit.
    """

    groups: tuple[Group, ...]
    budget: FloatArray

    def with_budget(self, hbm: float, host: float) -> PlacementProblem:
        """The same problem under other budgets, in units."""
        return PlacementProblem(self.groups, np.array([hbm, host]))

    def minimising(self, resource: int) -> PlacementProblem:
        """The same problem with the use of one budget (0 HBM, 1 host) as its cost, and that budget lifted."""
        groups = []
        for group in self.groups:
            use = np.where(np.isfinite(group.time), group.host if resource else group.hbm, np.inf)
            modules = tuple(replace(module, fixed=0.0) for module in group.modules)
            groups.append(Group(group.tables, modules, use, group.hbm, group.host, group.bound))
        budget = self.budget.copy()
        budget[resource] = np.inf
        return PlacementProblem(tuple(groups), budget)

    def without(self, dropped: Sequence[npt.NDArray[np.bool_]]) -> PlacementProblem:
        """The same problem without some options: (tables, modules) of each group."""
        groups = []
        for group, mask in zip(self.groups, dropped, strict=True):
            time = np.where(mask, np.inf, group.time)
            groups.append(replace(group, time=time))
        return PlacementProblem(tuple(groups), self.budget)

    @property
    def num_tables(self) -> int:
        """Number of tables."""
        return sum(len(group.tables) for group in self.groups)


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice of a module for each table.

    Attributes:
        modules: For each group, the module of each of its tables; `None` where no choice is feasible.
        cost: Cost of the choice (seconds a step, or units of a budget); infinite without one.
        bound: No choice costs less.
        proved: Whether the search ended by itself, not by its time limit.
        prices: (2,) cost that one more unit of each budget saves, at the optimum of the dual.
    """

    modules: tuple[IntArray, ...] | None
    cost: float
    bound: float
    proved: bool
    prices: FloatArray

    @property
    def gap(self) -> float:
        """Relative distance between cost and bound."""
        return 0.0 if self.cost <= self.bound or self.cost == 0 else (self.cost - self.bound) / abs(self.cost)
