"""All groups at once, as one mixed-integer program over the modules that can matter.

Columns say which module a table is in, and which modules of a bound group are open. A program over the modules whose
floor (no choice with them costs less) is below the best known cost proves the optimum of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from evenkeel.placement.limits import Watch
from evenkeel.placement.milp import solve_milp
from evenkeel.placement.placement_problem import Group, PlacementProblem

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class JointResult:
    """Outcome of a program over kept modules.

    Attributes:
        modules: For each group, the module of each of its tables; `None` where none was found.
        bound: No choice among the kept modules costs less; infinite where they allow none.
        proved: Whether the program was solved to its gap, or proved to have no solution.
    """

    modules: tuple[IntArray, ...] | None
    bound: float
    proved: bool


def widest(problem: PlacementProblem, floors: Sequence[FloatArray], cutoff: float, columns: int) -> list[BoolArray]:
    """The modules of each group with the lowest floors, all below the cutoff, that make at most `columns` columns."""
    below = [floor < cutoff for floor in floors]
    weights = [np.isfinite(group.time).sum(axis=0) + group.bound for group in problem.groups]
    floor = np.concatenate([floor[kept] for floor, kept in zip(floors, below, strict=True)])
    weight = np.concatenate([weight[kept] for weight, kept in zip(weights, below, strict=True)])
    order = np.argsort(floor, kind="stable")
    fits = np.flatnonzero(np.cumsum(weight[order]) <= columns)
    reach = np.inf if len(fits) == len(order) else (floor[order[fits[-1]]] if len(fits) else -np.inf)
    return [kept & (floor <= reach) for floor, kept in zip(floors, below, strict=True)]


def solve_joint(
    problem: PlacementProblem,
    kept: Sequence[BoolArray],
    *,
    gap: float,
    start: tuple[IntArray, ...] | None,
    nodes: int | None = None,
    enough: float | None = None,
    watch: Watch,
) -> JointResult:
    """The cheapest choice among the kept modules of each group.

    Args:
        problem: Groups and budgets.
        kept: For each group, (modules,) which may be chosen.
        gap: Relative gap to prove.
        start: A choice to start from, if all of it is kept.
        nodes: Nodes of the search at most; as many as it takes where `None`.
        enough: A cost of interest: whether there is a choice that costs at most this is all that is asked for.
        watch: Once its time is up, the best found is returned.
    """
    program = _Program(problem)
    if not all(program.add(group, np.flatnonzero(mask)) for group, mask in zip(problem.groups, kept, strict=True)):
        return JointResult(None, np.inf, True)
    scale = 1.0 / max(float(np.abs(program.costs).max()), 1e-300)
    matrix, low, high = program.constraints()
    columns = len(program.costs)
    result = solve_milp(
        program.costs * scale,
        matrix,
        low,
        high,
        np.ones(columns, dtype=bool),
        np.ones(columns),
        gap=gap,
        start=None if start is None else program.values(start),
        nodes=nodes,
        enough=None if enough is None else enough * scale,
        watch=watch,
    )
    bound = result.bound / scale if np.isfinite(result.bound) else result.bound
    return JointResult(None if result.values is None else program.choice(result.values), bound, result.proved)


class _Program:
    """Columns and rows, group by group."""

    def __init__(self, problem: PlacementProblem) -> None:
        self._problem = problem
        self._costs: list[FloatArray] = []
        self._uses: list[FloatArray] = []
        self._entries: list[tuple[IntArray, IntArray, FloatArray]] = []
        self._sides: list[tuple[FloatArray, FloatArray]] = []
        self._places: list[tuple[Group, IntArray, int, IntArray]] = []
        self._columns = self._rows = 0

    def add(self, group: Group, modules: IntArray) -> bool:
        """Adds a group with some of its modules; whether each of its tables can be in one of them."""
        table, place = np.nonzero(np.isfinite(group.time[:, modules]))
        if len(np.unique(table)) < len(group.tables):
            return False
        module = modules[place]
        fixed = np.array([group.modules[m].fixed for m in modules])
        cost = group.time[table, module] + (0.0 if group.bound else fixed[place])
        use = np.stack([group.hbm[table, module], group.host[table, module]])
        opening_of, opening_cost = group.openings()
        kept, place_of = np.unique(opening_of[modules], return_inverse=True)
        first = self._columns + (len(kept) if group.bound else 0)
        own = first + np.arange(len(table))
        if group.bound:
            opens = self._columns + np.arange(len(kept))
            self._costs.append(opening_cost[kept])
            self._uses.append(np.zeros((2, len(kept))))
            sides = np.full(len(kept), -1)
            sides[place_of] = [group.modules[m].side for m in modules]
            for side in (0, 1):
                members = opens[sides == side]
                if len(members) > 1:
                    self._add_rows(np.zeros(len(members), dtype=np.int64), members, np.ones(len(members)), -np.inf, 1.0)
            linked = np.arange(len(table))
            ones = np.ones(len(table))
            rows, columns = np.concatenate([linked, linked]), np.concatenate([own, opens[place_of[place]]])
            self._add_rows(rows, columns, np.concatenate([ones, -ones]), -np.inf, 0.0)
        self._costs.append(cost)
        self._uses.append(use)
        self._add_rows(table, own, np.ones(len(own)), 1.0, 1.0)
        self._columns = first + len(own)
        self._places.append((group, kept if group.bound else kept[:0], first, np.stack([table, module])))
        return True

    def _add_rows(self, row: IntArray, column: IntArray, value: FloatArray, low: float, high: float) -> None:
        number = int(row.max()) + 1
        self._entries.append((row + self._rows, column, value))
        self._sides.append((np.full(number, low), np.full(number, high)))
        self._rows += number

    @property
    def costs(self) -> FloatArray:
        """(columns,) costs."""
        return np.concatenate(self._costs)

    def constraints(self) -> tuple[sp.csr_matrix, FloatArray, FloatArray]:
        """The matrix, and the lower and upper side of each of its rows; the budgets come last."""
        row, column, value = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        low, high = (np.concatenate(part) for part in zip(*self._sides, strict=True))
        matrix = sp.csr_matrix((value, (row, column)), shape=(self._rows, self._columns))
        use, budget = np.concatenate(self._uses, axis=1), self._problem.budget
        limited = [b for b in range(2) if np.isfinite(budget[b])]
        stacked = sp.vstack([matrix, *(sp.csr_matrix(use[b][None, :]) for b in limited)]).tocsr()
        return (
            stacked,
            np.concatenate([low, np.full(len(limited), -np.inf)]),
            np.concatenate([high, budget[limited]]),
        )

    def values(self, chosen: tuple[IntArray, ...]) -> FloatArray | None:
        """(columns,) the values that stand for a choice; `None` where a column for it is missing."""
        values = np.zeros(self._columns)
        for (group, openings, first, pairs), mine in zip(self._places, chosen, strict=True):
            taken = mine[pairs[0]] == pairs[1]
            if taken.sum() < len(group.tables):
                return None
            values[first : first + pairs.shape[1]] = taken
            values[first - len(openings) : first] = np.isin(openings, group.openings()[0][mine])
        return values

    def choice(self, values: FloatArray) -> tuple[IntArray, ...]:
        """For each group, the module of each of its tables."""
        found = []
        for group, _, first, (table, module) in self._places:
            taken = values[first : first + len(table)] > 0.5
            mine = np.zeros(len(group.tables), dtype=np.int64)
            mine[table[taken]] = module[taken]
            found.append(mine)
        return tuple(found)
