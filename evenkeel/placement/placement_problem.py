"""The optimisation problem: tables that fuse share modules, and each module has one mode and one ratio."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evenkeel.placement.model import Mode

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

UNIT = float(1 << 20)
"""Bytes in a unit of the solver: sizes are multiples of a page, so units of 1 MiB are exact in floating point."""


@dataclass(frozen=True, slots=True)
class Module:
    """A mode and a ratio that tables of a group may share.

    Attributes:
        mode: The mode.
        ratio: Fraction of the rows that HBM holds.
        fixed: Seconds a step that the module costs once, however many tables are in it.
        side: Modules of one side exclude each other within a group; -1 excludes none.
    """

    mode: Mode
    ratio: float
    fixed: float
    side: int


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


@dataclass(frozen=True, slots=True)
class PlacementProblem:
    """Groups and budgets, in units of the solver.

    Attributes:
        groups: The groups.
        budget: (2,) HBM of the fullest rank and memory of a host; infinite where there is no limit.
    """

    groups: tuple[Group, ...]
    budget: FloatArray

    def unbound(self) -> PlacementProblem:
        """The same problem with every table in a module of its own."""
        groups = []
        for group in self.groups:
            for row, table in enumerate(group.tables):
                pick = slice(row, row + 1)
                free = Group((table,), group.modules, group.time[pick], group.hbm[pick], group.host[pick], False)
                groups.append(free)
        return PlacementProblem(tuple(groups), self.budget)

    def with_budget(self, hbm: float, host: float) -> PlacementProblem:
        """The same problem under other budgets, in units."""
        return PlacementProblem(self.groups, np.array([hbm, host]))

    def minimising(self, resource: int) -> PlacementProblem:
        """The same problem with the use of one budget (0 HBM, 1 host) as its cost, and that budget lifted."""
        groups = []
        for group in self.groups:
            use = np.where(np.isfinite(group.time), group.host if resource else group.hbm, np.inf)
            modules = tuple(Module(m.mode, m.ratio, 0.0, m.side) for m in group.modules)
            groups.append(Group(group.tables, modules, use, group.hbm, group.host, group.bound))
        budget = self.budget.copy()
        budget[resource] = np.inf
        return PlacementProblem(tuple(groups), budget)

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
