"""Options and ranks together, as one mixed-integer program: exact where it is small, and for some of the tables else.

Columns say which option a table takes, how many of its shards are on each rank or host, and which openings are there.
The slowest rank is what is made fast, and each rank and host keeps its own budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from evenkeel.placement.layouts import Scope
from evenkeel.placement.limits import Watch
from evenkeel.placement.milp import solve_milp
from evenkeel.placement.placement_problem import Group, PlacementProblem
from evenkeel.placement.ranks import Machines

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Places = dict[int, tuple[int, ...]]

_ENTRIES = 16
"""Of a column in as many rows as others."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """Outcome of a program.

    Attributes:
        modules: For each group, the module of each of its tables; `None` where none was found.
        places: Of each table that is not everywhere, the rank or host of each of its pieces.
        bound: No choice among the options makes the slowest rank faster.
        proved: Whether the program was solved to its gap, or proved to have no solution.
    """

    modules: tuple[IntArray, ...] | None
    places: Places
    bound: float
    proved: bool


def columns_of_table(group: Group, kept: BoolArray, machines: Machines) -> int:
    """Columns that (modules,) kept options of one table have in a program, about; long ones count as several."""
    ranks, hosts = machines.ranks, machines.hosts
    size = {
        Scope.EVERYWHERE: max(1, (2 * ranks + hosts) // _ENTRIES),
        Scope.RANK: ranks,
        Scope.HOST: max(hosts, (2 * ranks + hosts) // _ENTRIES),
    }
    return int(np.array([size[module.layout.scope] for module in group.modules])[kept].sum())


def assign(
    problem: PlacementProblem,
    whole: list[FloatArray],
    kept: list[BoolArray],
    machines: Machines,
    *,
    start: tuple[tuple[IntArray, ...], Places] | None = None,
    fixed: frozenset[int] = frozenset(),
    gap: float = 0.0,
    nodes: int | None = None,
    watch: Watch | None = None,
) -> Assigned:
    """The choice among kept options, and of places for them, with the fastest slowest rank.

    Args:
        problem: Groups and budgets.
        whole: For each group, (3, tables, modules) time, HBM and memory of one shard, or of a table that is everywhere.
        kept: For each group, (tables, modules) which options may be chosen.
        machines: Ranks and hosts; their rooms are the budgets.
        start: Modules and places to start from.
        fixed: Tables that stay as they are in `start`.
        gap: Relative gap to prove.
        nodes: Nodes of the search at most.
        watch: Once its time is up, the best found is returned.
    """
    program = _Program(problem, machines, start, fixed)
    for number, (group, figures, mask) in enumerate(zip(problem.groups, whole, kept, strict=True)):
        if not program.add(number, group, figures, mask & np.isfinite(group.time)):
            return Assigned(None, {}, np.inf, True)
    cost, matrix, low, high, upper = program.matrices()
    result = solve_milp(
        cost,
        matrix,
        low,
        high,
        np.append(False, np.ones(len(cost) - 1, dtype=bool)),
        upper,
        gap=gap,
        start=program.started(upper),
        nodes=nodes,
        watch=watch,
    )
    if result.values is None:
        return Assigned(None, {}, result.bound, result.proved)
    modules, places = program.read(result.values)
    return Assigned(modules, places, result.bound * program.scale, result.proved)


def _places(scope: Scope, machines: Machines) -> int:
    return {Scope.EVERYWHERE: 1, Scope.RANK: machines.ranks, Scope.HOST: machines.hosts}[scope]


@dataclass(frozen=True, slots=True)
class _Column:
    """What a column means: some pieces of a table, in a module, at a place, or everywhere where that is `None`."""

    group: int
    row: int
    module: int
    place: int | None


class _Program:
    """Columns and rows; column 0 is the time of the slowest rank."""

    def __init__(
        self,
        problem: PlacementProblem,
        machines: Machines,
        start: tuple[tuple[IntArray, ...], Places] | None,
        fixed: frozenset[int],
    ) -> None:
        self.problem, self.machines, self.start, self.fixed = problem, machines, start, fixed
        self.scale = 1.0
        self._upper: list[float] = [1e6]
        self._meaning: dict[int, _Column] = {}
        self._taken: dict[int, tuple[int, int, int]] = {}
        self._opened: dict[int, tuple[int, int]] = {}
        # Ranks' time, ranks' HBM and hosts' memory come first.
        first = 2 * machines.ranks + machines.hosts
        budget = problem.budget
        self._low = [-np.inf] * first
        self._high = [0.0] * machines.ranks + [float(budget[0])] * machines.ranks + [float(budget[1])] * machines.hosts
        self._entries: list[tuple[int, int, float]] = []
        self._held: Places = {}
        self._times: list[float] = []

    def add(self, number: int, group: Group, whole: FloatArray, kept: BoolArray) -> bool:
        """Adds a group; whether each of its tables has an option."""
        opening_of, fixed = group.openings()
        free = [row for row, table in enumerate(group.tables) if table not in self.fixed]
        if not kept[free].any(axis=1).all():
            return False
        used = set(opening_of[kept[free].any(axis=0)].tolist()) if free else set()
        used |= {int(opening_of[self._mine(number)[row]]) for row in range(len(group.tables)) if row not in set(free)}
        opens = {opening: self._column(1.0) for opening in sorted(used)}
        for opening, column in opens.items():
            self._opened[column] = (number, opening)
            self._weigh(column, None, Scope.EVERYWHERE, (float(fixed[opening]), 0.0, 0.0))
        for side in (0, 1):
            members = [o for o in opens if group.modules[int(np.flatnonzero(opening_of == o)[0])].side == side]
            if len(members) > 1 and group.bound:
                row = self._row(-np.inf, 1.0)
                self._entries += [(row, opens[opening], 1.0) for opening in members]
        for row, table in enumerate(group.tables):
            one = self._row(1.0, 1.0)
            links: dict[int, list[int]] = {}
            if table in self.fixed:
                column = self._hold(number, row, whole)
                self._entries.append((one, column, 1.0))
                links.setdefault(int(opening_of[self._mine(number)[row]]), []).append(column)
            else:
                for module in np.flatnonzero(kept[row]).tolist():
                    columns = self._option(number, group, row, module, whole)
                    self._entries += [(one, column, 1.0) for column in columns]
                    links.setdefault(int(opening_of[module]), []).extend(columns)
            for opening, columns in links.items():
                link = self._row(-np.inf, 0.0)
                self._entries += [(link, column, 1.0) for column in columns]
                self._entries.append((link, opens[opening], -1.0))
        return True

    def _mine(self, number: int) -> IntArray:
        assert self.start is not None, "tables are fixed as they are at the start"
        return self.start[0][number]

    def _option(self, number: int, group: Group, row: int, module: int, whole: FloatArray) -> list[int]:
        """Columns of one option of a table; those that are returned say in sum whether it is chosen."""
        layout = group.modules[module].layout
        figures = tuple(float(value) for value in whole[:, row, module])
        columns = []
        places = _places(layout.scope, self.machines)
        for place in range(places):
            column = self._column(float(-(-layout.pieces // places)))
            there = None if layout.scope is Scope.EVERYWHERE else place
            self._meaning[column] = _Column(number, row, module, there)
            self._weigh(column, there, layout.scope, figures)
            columns.append(column)
        if layout.pieces == 1:
            return columns
        chosen = self._column(1.0)
        all_of_them = self._row(0.0, 0.0)
        self._entries += [(all_of_them, column, 1.0) for column in columns]
        self._entries.append((all_of_them, chosen, -float(layout.pieces)))
        self._taken[chosen] = (number, row, module)
        return [chosen]

    def _hold(self, number: int, row: int, whole: FloatArray) -> int:
        """The only column of a table that stays as it is."""
        assert self.start is not None, "tables are fixed as they are at the start"
        group = self.problem.groups[number]
        module, table = int(self.start[0][number][row]), group.tables[row]
        column = self._column(1.0)
        self._taken[column] = (number, row, module)
        scope = group.modules[module].layout.scope
        figures = tuple(float(value) for value in whole[:, row, module])
        places: list[int | None] = [None] if scope is Scope.EVERYWHERE else list(self.start[1][table])
        for place in places:
            self._weigh(column, place, scope, figures)
        if scope is not Scope.EVERYWHERE:
            self._held[table] = self.start[1][table]
        return column

    def _column(self, upper: float) -> int:
        self._upper.append(upper)
        return len(self._upper) - 1

    def _row(self, low: float, high: float) -> int:
        self._low.append(low)
        self._high.append(high)
        return len(self._low) - 1

    def _weigh(self, column: int, place: int | None, scope: Scope, figures: tuple[float, ...]) -> None:
        """What a piece takes of the ranks and hosts that it is on."""
        ranks, local, hosts = self.machines.ranks, self.machines.local_ranks, self.machines.hosts
        seconds, hbm, host = figures
        if place is None:
            on, at = range(ranks), range(hosts)
        elif scope is Scope.RANK:
            on, at = range(place, place + 1), range(place // local, place // local + 1)
        else:
            on, at = range(place * local, (place + 1) * local), range(place, place + 1)
        self._times.append(seconds)
        self._entries += [(rank, column, seconds) for rank in on]
        if hbm and np.isfinite(self.problem.budget[0]):
            self._entries += [(ranks + rank, column, hbm) for rank in on]
        if host and np.isfinite(self.problem.budget[1]):
            self._entries += [(2 * ranks + number, column, host) for number in at]

    def matrices(self) -> tuple[FloatArray, sp.csr_matrix, FloatArray, FloatArray, FloatArray]:
        """Costs, the matrix, lower and upper sides of its rows, and upper bounds of columns."""
        ranks = self.machines.ranks
        self.scale = max(max(self._times, default=0.0), 1e-12)
        rows, columns, values = zip(*self._entries, strict=True) if self._entries else ((), (), ())
        row, value = np.array(rows, dtype=np.int64), np.array(values, dtype=np.float64)
        value = np.where(row < ranks, value / self.scale, value)
        row = np.concatenate([row, np.arange(ranks)])
        column = np.concatenate([np.array(columns, dtype=np.int64), np.zeros(ranks, dtype=np.int64)])
        value = np.concatenate([value, np.full(ranks, -1.0)])
        matrix = sp.csr_matrix((value, (row, column)), shape=(len(self._low), len(self._upper)))
        cost = np.zeros(len(self._upper))
        cost[0] = 1.0
        return cost, matrix, np.array(self._low), np.array(self._high), np.array(self._upper)

    def started(self, upper: FloatArray) -> FloatArray | None:
        """(columns,) the values that stand for the start, but for the time; `None` where a column for it is missing."""
        if self.start is None:
            return None
        modules, places = self.start
        values, due = np.zeros(len(upper)), 0.0
        for column, meant in self._meaning.items():
            group = self.problem.groups[meant.group]
            if int(modules[meant.group][meant.row]) == meant.module:
                table = group.tables[meant.row]
                count = 1 if meant.place is None else places[table].count(meant.place)
                values[column] = count
                due += count / group.modules[meant.module].layout.pieces
        for column, (number, row, module) in self._taken.items():
            values[column] = float(int(modules[number][row]) == module)
            due += values[column] if self.problem.groups[number].tables[row] in self.fixed else 0.0
        if abs(due - self.problem.num_tables) > 1e-6:
            return None
        for column, (number, opening) in self._opened.items():
            values[column] = float(opening in self.problem.groups[number].openings()[0][modules[number]])
        _, matrix, _, _, _ = self.matrices()
        values[0] = float((matrix[: self.machines.ranks] @ values).max())
        return values

    def read(self, values: FloatArray) -> tuple[tuple[IntArray, ...], Places]:
        """Modules and places."""
        modules = tuple(np.zeros(len(group.tables), dtype=np.int64) for group in self.problem.groups)
        places: dict[int, list[int]] = {}
        for column, (number, row, module) in self._taken.items():
            if values[column] > 0.5:
                modules[number][row] = module
        for column, meant in self._meaning.items():
            count = round(float(values[column]))
            if count:
                modules[meant.group][meant.row] = meant.module
                if meant.place is not None:
                    table = self.problem.groups[meant.group].tables[meant.row]
                    places.setdefault(table, []).extend([meant.place] * count)
        return modules, self._held | {table: tuple(own) for table, own in places.items()}
